"""One launch: its shares run one after the other, or in forked processes side by side, and are put together.

Every share starts from global memory as it was before the launch and never sees another's writes; these are merged in
the order of the shares once all have run. So a launch gives the same results, and the same fault (that of the first
share that has one), on any number of processes. See shares.py for when a launch may be cut at all.

Where it is only supposed that the shares have nothing to do with each other, that must show once they have run. If it
does not, or one of them has failed, memory is as before, and the launch runs again, whole: what that does counts.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from cubinery.aot.ptxsim.dependent import Footprint
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.helpers import Claims, Helpers
from cubinery.aot.ptxsim.independence import Touches, independent
from cubinery.aot.ptxsim.isolation import Changes, Snapshot
from cubinery.aot.ptxsim.machine import Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.schedule import Counters
from cubinery.aot.ptxsim.shares import Cut

WORTH = 1.0
"""Seconds of work from which on processes are worth their start: each copies the pages that it writes to."""

Maker = Callable[[int, "Sequence[int] | None"], Machine]
"""Makes the machine of a share: its number, and its clusters (None: all)."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of one share."""

    share: int
    counters: Counters
    changes: Changes
    marks: dict[int, Any] | None
    """Its footprint."""
    touches: Touches | None
    """What it touched, where the cut was only supposed and it has not failed."""
    error: SimError | None


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


class Launch:
    """A launch of a kernel in shares."""

    def __init__(
        self,
        make: Maker,
        memory: GlobalMemory,
        cut: Cut,
        cluster_size: int,
        kernel: str,
        progress: Callable[[int, int], None] | None = None,
        again: Callable[[], None] | None = None,
    ) -> None:
        """`progress` is told how many CTAs have ended, of how many; of several shares, when a share's results come.

        `again` is told where the launch begins anew, whole.
        """
        self.progress, self.again = progress, again
        self.make, self.memory, self.shares, self.supposed = make, memory, cut.shares, cut.supposed
        self.cluster_size, self.kernel = cluster_size, kernel
        self.counters = Counters()
        self.footprint: Footprint | None = None
        """What it touched, where that was asked for."""

    def run(self, processes: int) -> None:
        """Run to the end, in so many processes at most. Raises Fault."""
        start = time.perf_counter()
        try:
            if len(self.shares) == 1 or not self._together(processes):
                machine = self.make(0, None)
                machine.run()
                self.counters, self.footprint = machine.counters, machine.footprint
        finally:
            self.counters.seconds = time.perf_counter() - start

    def _together(self, processes: int) -> bool:
        """Run the shares. False where they turn out not to be any; then memory is as before."""
        snapshot = self.memory.snapshot = Snapshot()
        try:
            done = self._all(snapshot, processes)
        finally:
            self.memory.snapshot = None
        done.sort(key=lambda ran: ran.share)
        if self.supposed and not self._independent(done):
            if self.again is not None:
                self.again()
            return False
        self._merge(snapshot, done)
        return True

    def _independent(self, done: Sequence[Ran]) -> bool:
        """Whether all have run, without a fault, and no share touched what another wrote."""
        touches = [ran.touches for ran in done if ran.touches is not None]
        return len(touches) == len(self.shares) and independent(self.memory, touches)

    def _all(self, snapshot: Snapshot, processes: int) -> list[Ran]:
        """Every share, or those up to one that failed, in any order.

        This process begins with the first; others start once it has run for a while, and never for a small launch.
        """
        alone = processes <= 1 or multiprocessing.current_process().daemon
        claims = Claims(len(self.shares))
        count = 0 if alone else min(processes, len(self.shares)) - 1
        helpers = Helpers(self.kernel, count, lambda: self._helps(snapshot, claims))
        try:
            first = self._isolated(snapshot, 0, helpers.start)
            if first.error is not None:
                self._failed(claims, 0)
            elif first.counters.seconds * (len(self.shares) - 1) > WORTH:
                helpers.start()
            done = []
            for ran in chain([first], self._rest(snapshot, claims), helpers.results()):
                done.append(ran)
                if self.supposed and ran.error is not None:
                    break
                self._tell(done)
            return done
        finally:
            helpers.end()

    def _failed(self, claims: Claims, share: int) -> None:
        """Only shares before one that failed still matter; none where they are only supposed to be shares."""
        claims.stop_after(0 if self.supposed else share)

    def _tell(self, done: Sequence[Ran]) -> None:
        if self.progress is not None:
            ended = sum(len(self.shares[ran.share]) for ran in done)
            self.progress(ended * self.cluster_size, sum(map(len, self.shares)) * self.cluster_size)

    def _isolated(self, snapshot: Snapshot, share: int, meanwhile: Callable[[], None] | None = None) -> Ran:
        """Run one share, and leave global memory as it was. Where it takes long, `meanwhile` is called."""
        machine = self.make(share, self.shares[share])
        error = None
        try:
            machine.run(WORTH, meanwhile)
        except SimError as raised:
            error = raised
        changes = snapshot.changes()
        snapshot.restore(changes)
        marks = None if machine.footprint is None else machine.footprint.marks()
        touches = None if machine.touched is None or error is not None else machine.touched.touches()
        return Ran(share, machine.counters, changes, marks, touches, error)

    def _rest(self, snapshot: Snapshot, claims: Claims) -> Iterator[Ran]:
        """Run shares as long as there are any to claim."""
        for share in claims:
            ran = self._isolated(snapshot, share)
            if ran.error is not None:
                self._failed(claims, share)
            yield ran

    def _helps(self, snapshot: Snapshot, claims: Claims) -> Iterator[Ran]:
        """The same in a child, which may have begun in the middle of the first share."""
        snapshot.restore(snapshot.changes())
        return self._rest(snapshot, claims)

    def _merge(self, snapshot: Snapshot, done: Sequence[Ran]) -> None:
        """Sum up, and make the shares' changes in their order. Raises what the first share that failed raised."""
        for ran in done:
            self.counters.instructions += ran.counters.instructions
            self.counters.segments += ran.counters.segments
            snapshot.apply(self.memory, ran.changes)
            if ran.error is not None:
                raise ran.error
        if any(ran.marks is not None for ran in done):
            names = [self._blocks(share) for share in range(len(self.shares))]
            snapshot.check(self.kernel, names, [ran.changes for ran in done], [ran.marks for ran in done])
            self.footprint = Footprint()
            for ran in done:
                for base, marks in (ran.marks or {}).items():
                    self.footprint.add(self.memory.at(base), marks)

    def _blocks(self, share: int) -> str:
        clusters = self.shares[share]
        return f"CTAs {clusters[0] * self.cluster_size} to {(clusters[-1] + 1) * self.cluster_size - 1}"
