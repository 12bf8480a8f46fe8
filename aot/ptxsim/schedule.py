"""Which gang runs next, and when asynchronous work lands.

Every schedule is a function of its seed alone. `Fair` is the default: the smallest segment first, everything
asynchronous at once. The others are hostile on purpose: they shake out orderings that nothing guarantees.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.state import Gang

Ready = dict[int, list[Gang]]
"""Gangs that can run, by segment."""

PATIENCE = 2000
"""Segments that may run before the gang that waited longest gets its turn: a spin on memory must not starve others."""

_SHARES_APART = 1_000_003
"""Between the seeds of a launch's shares: schedules that are asked for by name have small seeds."""


@dataclass(slots=True)
class Pending:
    """Asynchronous work issued and not yet landed."""

    queue: int
    """Work of one queue lands in order; 0 means unordered."""
    slot: int
    """CTA slot whose memory it touches."""
    land: Callable[[], None]


class Fair:
    """Smallest segment first; asynchronous work lands as it is issued."""

    name = "fair"
    merges = True
    """May gangs of different warps be joined?"""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.runs = 0

    def of_share(self, share: int) -> Fair:
        """A schedule of this kind for one share of a launch; the first share's is the launch's own."""
        return type(self)(self.seed + share * _SHARES_APART) if share else self

    def pick(self, ready: Ready) -> list[Gang]:
        """Take the gangs to run next out of `ready`; all stand at one segment."""
        self.runs += 1
        number = next(iter(ready)) if self.runs % PATIENCE == 0 else min(ready)
        return ready.pop(number)

    def lands_now(self, _pending: list[Pending]) -> list[int]:
        """Indices of pending work that lands before the next segment runs."""
        return list(range(len(_pending)))

    def lands_late(self, pending: list[Pending]) -> int:
        """The work that lands when nobody can run."""
        return 0

    def peek_fails(self) -> bool:
        """Does a lone try_wait of a complete phase fail this time?"""
        return False


class Delays(Fair):
    """Random gangs run, in random parts, and asynchronous work lands at random times in random order."""

    name = "delays"

    def pick(self, ready: Ready) -> list[Gang]:
        self.runs += 1
        number = self.random.choice(list(ready))
        gangs = ready.pop(number)
        if len(gangs) > 1 and self.random.random() < 0.5:
            one = gangs.pop(self.random.randrange(len(gangs)))
            ready[number] = gangs
            gangs = [one]
        if len(gangs) == 1 and len(gangs[0]) > 1 and self.random.random() < 0.25:
            gang = gangs[0]
            keep = np.array([self.random.random() < 0.5 for _ in range(len(gang))])
            if keep.any() and not keep.all():
                ready.setdefault(number, []).append(gang.rows(~keep))
                return [gang.rows(keep)]
        return gangs

    def lands_now(self, pending: list[Pending]) -> list[int]:
        return [i for i in range(len(pending)) if self.random.random() < 0.15]

    def lands_late(self, pending: list[Pending]) -> int:
        return self.random.randrange(len(pending))

    def peek_fails(self) -> bool:
        return self.random.random() < 0.3


class Priorities(Fair):
    """One warp at a time, the one of highest priority; priorities change at random moments."""

    name = "priorities"
    merges = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.priority = np.zeros(0)
        self.until = 0
        self.current = -1
        """The warp that ran last: it goes on unless one of higher priority may have become ready."""

    def pick(self, ready: Ready) -> list[Gang]:
        self.runs += 1
        if self.runs > self.until:
            self.priority = np.zeros(0)
            self.until = self.runs + self.random.choice((20, 100, 500))
            self.current = -1
        same = self._goes_on(ready)
        if same is not None:
            return [same]
        number, warp = self._highest(ready)
        self.current = warp
        taken, rest = [], []
        for gang in ready.pop(number):
            rows = gang.warps == warp
            if not rows.any():
                rest.append(gang)
            elif len(gang) == 1:
                taken.append(gang)
            else:
                taken.append(gang.rows(rows))
                rest.append(gang.rows(~rows))
        if rest:
            ready[number] = rest
        return taken

    def _goes_on(self, ready: Ready) -> Gang | None:
        """The warp that ran last, unless a better one is looked for; what it left off is the last of its list."""
        if self.current < 0 or self.random.random() < 0.1:
            return None
        for number in reversed(ready):
            gangs = ready[number]
            if len(gangs[-1].warps) == 1 and gangs[-1].warps[0] == self.current:
                gang = gangs.pop()
                if not gangs:
                    del ready[number]
                return gang
        return None

    def _highest(self, ready: Ready) -> tuple[int, int]:
        """(segment, warp) of the highest priority among all that can run."""
        warps = np.concatenate([gang.warps for gangs in ready.values() for gang in gangs])
        numbers = np.repeat(
            np.fromiter(ready, np.int64), [sum(len(gang) for gang in gangs) for gangs in ready.values()]
        )
        if warps.max() >= len(self.priority):
            more = int(warps.max()) + 1 - len(self.priority)
            self.priority = np.append(self.priority, [self.random.random() for _ in range(more)])
        best = np.lexsort((numbers, -self.priority[warps]))[0]
        return int(numbers[best]), int(warps[best])

    def lands_now(self, pending: list[Pending]) -> list[int]:
        return [i for i in range(len(pending)) if self.random.random() < 0.05]

    def lands_late(self, pending: list[Pending]) -> int:
        return self.random.randrange(len(pending))


class Late(Fair):
    """Everything asynchronous as late as the waits allow, in any order that its queue allows."""

    name = "late"

    def lands_now(self, pending: list[Pending]) -> list[int]:
        return []

    def lands_late(self, pending: list[Pending]) -> int:
        first: dict[int, int] = {}
        for i, work in enumerate(pending):
            first.setdefault(work.queue if work.queue else -1 - i, i)
        return self.random.choice(list(first.values()))


SCHEDULES: dict[str, type[Fair]] = {kind.name: kind for kind in (Fair, Delays, Priorities, Late)}


def schedule(name: str) -> Fair:
    """A schedule by `name` or `name:seed`. Raises SimError."""
    kind, _, seed = name.partition(":")
    if kind not in SCHEDULES or (seed and not seed.isdigit()):
        raise SimError(f"schedule {name!r}: expected one of {', '.join(SCHEDULES)}, with a seed as in delays:7")
    return SCHEDULES[kind](int(seed or 0))


def series(count: int) -> list[str]:
    """The first `count` schedules to verify with: fair, then hostile ones by turns."""
    hostile = ("late", "delays", "priorities")
    return [("fair:0" if i == 0 else f"{hostile[(i - 1) % 3]}:{(i - 1) // 3}") for i in range(count)]


@dataclass(slots=True)
class Counters:
    """What a run has done so far."""

    instructions: int = 0
    """Warp instructions."""
    segments: int = 0
    launches: int = 0
    seconds: float = 0.0
    per_schedule: dict[str, int] = field(default_factory=dict)
