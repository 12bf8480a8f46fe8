"""Groups of asynchronous copies that a warp commits and waits for (PTX ISA 9.7.9.25.1.2, cp.async groups)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, int]
"""Kind (cp, bulk) and warp: lanes of a warp share groups, which differs only for lanes that commit apart."""


@dataclass(slots=True)
class Group:
    """Copies committed together."""

    left: int = 0
    """Copies not finished."""
    entered: int = 0
    """Copies in all."""


@dataclass(slots=True)
class Groups:
    """Open and committed groups of every warp."""

    open: dict[Key, Group] = field(default_factory=dict)
    committed: dict[Key, list[Group]] = field(default_factory=dict)
    waiting: dict[Key, list[tuple[int, Callable[[], None]]]] = field(default_factory=dict)
    clocks: dict[Key, dict[int, Any]] = field(default_factory=dict)
    """What finished copies publish to their warp: agent to clock."""
    covered: dict[Key, int] = field(default_factory=dict)
    """Committed groups that the warp has waited for."""

    def add(self, key: Key, clock: tuple[int, int] | None) -> Callable[[], None]:
        """Enter a copy into the open group; call the result when it has finished."""
        group = self.open.setdefault(key, Group())
        group.left += 1
        group.entered += 1

        def done() -> None:
            group.left -= 1
            if clock is not None:
                known = self.clocks.setdefault(key, {})
                known[clock[0]] = max(known.get(clock[0], 0), clock[1])
            self._look(key)

        return done

    def commit(self, key: Key) -> None:
        """Close the open group, which may be empty."""
        self.committed.setdefault(key, []).append(self.open.pop(key, Group()))

    def unfinished(self, key: Key, most: int) -> bool:
        """Does any group but the latest `most` hold unfinished copies?"""
        groups = self.committed.get(key, [])
        return any(group.left for group in groups[: len(groups) - most])

    def wait(self, key: Key, most: int, ready: Callable[[], None]) -> None:
        """Call `ready` once all but the latest `most` groups have finished: now, or when they do."""
        self.covered[key] = max(self.covered.get(key, 0), len(self.committed.get(key, ())) - most)
        if self.unfinished(key, most):
            self.waiting.setdefault(key, []).append((most, ready))
        else:
            ready()

    def abandoned(self, key: Key) -> int:
        """Groups, open or committed, that hold copies and that the warp never waited for; they are forgotten."""
        committed = self.committed.pop(key, [])[self.covered.pop(key, 0) :]
        return sum(group.entered > 0 for group in (*committed, self.open.pop(key, Group())))

    def _look(self, key: Key) -> None:
        waiting = self.waiting.pop(key, [])
        for most, ready in waiting:
            self.wait(key, most, ready)
