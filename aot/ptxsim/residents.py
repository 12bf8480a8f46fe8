"""CTAs that are resident: clusters begin, threads exit, and what a cluster leaves behind is checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import DeadlockFault, RaceFault, TransactionFault
from cubinery.aot.ptxsim.register_pool import RegisterPool
from cubinery.aot.ptxsim.state import Gang, packed, spread
from cubinery.aot.ptxsim.waits import Waits


class Residents(Waits):
    """Slots of CTAs, and the clusters that take their turn in them. Machine derives from this."""

    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    total: int
    """CTAs that run."""
    coming: deque[int]
    """Clusters that have not started yet, by their numbers in the grid."""
    finished: int
    progress: Callable[[int, int], None] | None
    register_pool: RegisterPool
    _threads_of_cta: Any
    """Lanes that a CTA has: bool (warps, 32)."""
    _undefined: list[Any]
    """Registers at a thread's start."""

    def start_cluster(self, slot: int) -> None:
        """Start the next cluster in the slots from `slot` on."""
        index = self.coming.popleft()
        counts = [n // c for n, c in zip(self.grid, self.cluster, strict=True)]
        at = (index % counts[0], index // counts[0] % counts[1], index // (counts[0] * counts[1]))
        for rank in range(self.cluster_size):
            within = (
                rank % self.cluster[0],
                rank // self.cluster[0] % self.cluster[1],
                rank // (self.cluster[0] * self.cluster[1]),
            )
            self.block_index[slot + rank] = [a * c + w for a, c, w in zip(at, self.cluster, within, strict=True)]
        for each in range(slot, slot + self.cluster_size):
            self.register_pool.start(each)
        self.waited[slot : slot + self.cluster_size] = self.gone[slot : slot + self.cluster_size] = False
        first, count = slot * self.wpc, self.cluster_size * self.wpc
        self.live[first : first + count] = np.tile(self._threads_of_cta, (self.cluster_size, 1))
        warps = np.arange(first, first + count)
        for warp in warps.tolist():
            self.fence_clocks.pop(warp, None)
        frame = list(self._undefined)
        gang = Gang(0, warps, (warps // self.wpc)[:, None], packed(self.live[warps].copy()), frame)
        self.go_on(gang, 0)

    def exit(self, gang: Gang, follow: int, predicate: Any) -> None:
        """Lanes leave; those outside the guard go on at `follow`. Completes barriers that waited for them alone."""
        leaves = gang.lanes()
        if predicate is not None:
            through = spread(predicate, len(gang))
            stays = leaves & ~through
            if stays.any():
                self.go_on(gang.part(stays), follow)
            leaves = leaves & through
        self.live[gang.warps] &= ~leaves
        for slot in np.unique(gang.cta).tolist():
            alive = self.live[slot * self.wpc : (slot + 1) * self.wpc].any()
            if alive:
                self.barriers_of_exited(slot)
            else:
                self._gone(slot)
            base = int(self.cluster_base[slot])
            self.cluster_complete(base)
            if not self.live[base * self.wpc : (base + self.cluster_size) * self.wpc].any():
                self._cluster_done(base)

    def _cluster_done(self, base: int) -> None:
        """All threads of a cluster have exited: check what they leave, and start the next one there."""
        for _ in range(len(self.pending)):  # copies out of shared memory may still read it
            self.land(
                [i for i, p in enumerate(self.pending) if base <= p.slot < base + self.cluster_size and p.queue][:1]
            )
        lost = [p for p in self.pending if base <= p.slot < base + self.cluster_size]
        if lost:
            block = tuple(self.block_index[lost[0].slot].tolist())
            detail = f"block {block} exits while {len(lost)} copies to its shared memory are under way: nobody waited"
            raise TransactionFault(detail, self.place(None, len(self.kernel.instrs) - 1))
        for slot in range(base, base + self.cluster_size):
            self._abandoned(slot)
            self._leftovers(slot)
            self.tensor_exit(slot)
            if self.coming:
                self.shared.reset(slot)
                if self.races is not None:
                    self.races.reset(slot)
        self.clusters.pop(base, None)
        self.finished += self.cluster_size
        if self.progress is not None:
            self.progress(self.finished, self.total)
        if self.coming:
            self.start_cluster(base)

    def _gone(self, slot: int) -> None:
        """A CTA has exited: who uses its shared memory must have been done, as far as one of its threads knows."""
        self.gone[slot] = True
        if lacking := self.register_pool.lacking(slot):
            raise DeadlockFault(lacking, self.place(None, len(self.kernel.instrs) - 1))
        use = None if self.races is None or self.cluster_size == 1 else self.races.outlives(slot)
        if use is not None:
            block = tuple(self.block_index[slot].tolist())
            detail = f"block {block} exits while its shared memory {use}: no thread of it has waited for that"
            raise RaceFault(detail, self.place(None, len(self.kernel.instrs) - 1))

    def _abandoned(self, slot: int) -> None:
        """Copies out of shared memory read it until they are waited for: a CTA must not exit before."""
        for warp in range(slot * self.wpc, (slot + 1) * self.wpc):
            lost = self.groups.abandoned(("bulk", warp))
            if lost and self.races is not None:
                block = tuple(self.block_index[slot].tolist())
                detail = (
                    f"block {block} exits while bulk copies of warp {warp % self.wpc} may still read its shared "
                    f"memory: {lost} groups without cp.async.bulk.wait_group"
                )
                raise RaceFault(detail, self.place(None, len(self.kernel.instrs) - 1))

    def _leftovers(self, slot: int) -> None:
        """Drop the barriers of a CTA that has ended. Raises TransactionFault where one still counts bytes."""
        last = len(self.kernel.instrs) - 1
        for key in [key for key in self.mbarriers if key[0] == slot]:
            barrier = self.mbarriers.pop(key)
            if barrier.tx:
                place = self.place(None, last)
                detail = (
                    f"the mbarrier at {key[1]:#x} of block {tuple(self.block_index[slot].tolist())} ends with a "
                    f"transaction count of {barrier.tx} bytes in phase {barrier.phase}: "
                    "expected and copied bytes differ"
                )
                raise TransactionFault(detail, place)
        for key in [key for key in self.named if key[0] == slot]:
            del self.named[key]

    def finish(self) -> None:
        """Finish everything asynchronous, after the last thread."""
        while self.pending:
            self.land([0])
