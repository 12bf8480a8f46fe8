"""In which phase of an mbarrier an arrival counts: a mistake where nothing orders it after the phase before.

An mbarrier counts arrivals, not who makes them. So a thread that arrives again, with nothing that orders it after the
last arrivals of the phase before, may be early by a phase in another interleaving: it then ends that phase in place of
a thread that is not there yet. Schedules find that where the one thread runs far enough ahead; vector clocks
(clocks.py) see it in any. What an arrival must know is every arrival of the phase before, which a wait for that phase
tells, or anything that follows such a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.faults import Place, RaceFault
from cubinery.aot.ptxsim.fences import Fences

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.barriers import MBarrier


@dataclass(slots=True)
class Arrivals:
    """Who arrived at an mbarrier in its current phase, and in the one before: columns of clocks, and stretches."""

    now: list[tuple[int, int]] = field(default_factory=list)
    columns: Any = None
    """Those of the phase before, as an array; None where it had none, or there is none."""
    stretches: Any = None
    """The stretch of each."""

    def late(self, known: Any, column: int) -> int:
        """Whose arrival of the phase before one by the thread of `column` does not follow: a column, or -1.

        `known` is what is known where it arrives, an array over all columns; a thread knows all of its own.
        """
        if self.columns is None:
            return -1
        missing = known.take(self.columns) < self.stretches
        if not missing.any():
            return -1
        missing &= self.columns != column
        return int(self.columns[missing.argmax()]) if missing.any() else -1

    def end(self) -> None:
        """The phase has ended."""
        self.columns = self.stretches = None
        if self.now:
            self.columns, self.stretches = np.array(self.now).T
            self.now = []


class ArrivalOrder(Fences):
    """The check of each arrival. Machine derives from this."""

    def follows(
        self, barrier: MBarrier, key: tuple[int, int], known: Any, thread: int, now: int, place: Callable[[], Place]
    ) -> None:
        """An arrival by a thread (a column of clocks, in its stretch `now`) must follow those of the phase before.

        `known` is what the thread knows of what happened before. Raises RaceFault.
        """
        assert self.races is not None
        late = barrier.arrivals.late(known, thread)
        if late >= 0:
            detail = (
                f"arrives at the mbarrier at {key[1]:#x} in phase {barrier.phase}, with nothing that orders it after "
                f"the arrival by {self.races.describe(late, lane=True)} in the phase before, which it might end early"
            )
            raise RaceFault(detail, place())
        barrier.arrivals.now.append((thread, now))
