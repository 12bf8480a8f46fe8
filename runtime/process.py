"""Whether this process still is the one that loaded kernels: CUDA does not survive `fork`."""

from __future__ import annotations

import os

from cubinery.runtime.errors import ForkError

generation = 0
"""Forks between this process and the one that first imported this module; comparing it costs no system call."""

alive = [True]
"""Empty in the child of a fork, which gets one of its own: who keeps it sees a fork sooner than by comparing."""


def _forked() -> None:
    global alive, generation
    generation += 1
    alive.clear()
    alive = [True]


os.register_at_fork(after_in_child=_forked)


def check(created: int, what: str) -> None:
    """Raise ForkError when `what`, made at generation `created`, is used in a forked child."""
    if created != generation:
        raise ForkError(
            f"{what} belongs to the parent of this process ({os.getpid()}): CUDA state does not survive fork; "
            "open the library in the child, or start workers with the 'spawn' or 'forkserver' method"
        )
