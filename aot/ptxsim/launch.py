"""One launch: its shares run one after the other, or in forked processes side by side, and are put together.

Every share starts from global memory as it was before the launch and never sees another's writes; these are merged in
the order of the shares once all have run. So a launch gives the same results, and the same fault (that of the first
share that has one), on any number of processes. See shares.py for when a launch may be cut at all.
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
from cubinery.aot.ptxsim.isolation import Changes, Snapshot
from cubinery.aot.ptxsim.machine import Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.schedule import Counters

WORTH = 1.0
"""Seconds of work from which on processes are worth their start: each copies the pages that it writes to."""

Maker = Callable[[int, "range | None"], Machine]
"""Makes the machine of a share: its number, and its clusters (None: all)."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What became of one share."""

    share: int
    counters: Counters
    changes: Changes
    marks: dict[int, Any] | None
    """Its footprint."""
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
        shares: Sequence[range],
        cluster_size: int,
        kernel: str,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress` is told how many CTAs have ended, of how many; of several shares, when a share's results come."""
        self.progress = progress
        self.make, self.memory, self.shares = make, memory, shares
        self.cluster_size, self.kernel = cluster_size, kernel
        self.counters = Counters()
        self.footprint: Footprint | None = None
        """What it touched, where that was asked for."""

    def run(self, processes: int) -> None:
        """Run to the end, in so many processes at most. Raises Fault."""
        start = time.perf_counter()
        try:
            if len(self.shares) == 1:
                machine = self.make(0, None)
                machine.run()
                self.counters, self.footprint = machine.counters, machine.footprint
            else:
                self._together(processes)
        finally:
            self.counters.seconds = time.perf_counter() - start

    def _together(self, processes: int) -> None:
        snapshot = self.memory.snapshot = Snapshot()
        try:
            done = self._all(snapshot, processes)
        finally:
            self.memory.snapshot = None
        done.sort(key=lambda ran: ran.share)
        self._merge(snapshot, done)

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
                claims.stop_after(0)
            elif first.counters.seconds * (len(self.shares) - 1) > WORTH:
                helpers.start()
            done = []
            for ran in chain([first], self._rest(snapshot, claims), helpers.results()):
                done.append(ran)
                self._tell(done)
            return done
        finally:
            helpers.end()

    def _tell(self, done: Sequence[Ran]) -> None:
        if self.progress is not None:
            ended = sum(len(self.shares[ran.share]) for ran in done)
            self.progress(ended * self.cluster_size, self.shares[-1].stop * self.cluster_size)

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
        return Ran(share, machine.counters, changes, marks, error)

    def _rest(self, snapshot: Snapshot, claims: Claims) -> Iterator[Ran]:
        """Run shares as long as there are any to claim."""
        for share in claims:
            ran = self._isolated(snapshot, share)
            if ran.error is not None:
                claims.stop_after(share)
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
        return f"CTAs {clusters.start * self.cluster_size} to {clusters.stop * self.cluster_size - 1}"
