"""A compile entry that only one process can load: the others die while they start, as without memory."""

from __future__ import annotations

import os

from toy_plugin import compile_fake

__all__ = ["compile_fake", "prepare"]


def prepare(arch: str) -> None:
    """Succeed for the first process alone."""
    try:
        os.close(os.open(os.environ["TOY_ONCE"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        os._exit(9)
