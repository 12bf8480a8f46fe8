"""fence and membar in the machine: what they order, and make visible to the async proxy (PTX ISA 9.7.13.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.access import Access
from cubinery.aot.ptxsim.memory_order import order_of
from cubinery.aot.ptxsim.state import Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.barriers import MBarrier


@dataclass(frozen=True, slots=True)
class Fenced:
    """What some lanes of a warp knew at a fence: a relaxed write or arrival after it publishes that."""

    lanes: Any
    """bool (32,)."""
    level: int
    known: Any


class Fences(Access):
    """Fences as generated code sees them. Machine derives from this."""

    fence_clocks: dict[int, list[Fenced]]
    """Fences of each warp, the latest first."""
    unfenced: dict[int, list[MBarrier]]
    """Barriers that a warp initialised and has not fenced, by warp."""

    def fence(self, g: Gang, mask: Any, k: int, kind: str) -> None:
        """fence, membar: what the checks know of the async proxy, of mbarriers, and of relaxed accesses to come."""
        if self.races is None:
            return
        if kind != "async":
            self._orders(g, mask, k)
        if not kind:
            return
        if kind == "async":
            self.races.fence_async(g, mask)
        for warp in g.warps.tolist():
            for barrier in self.unfenced.pop(warp, ()):
                barrier.fenced = True

    def _orders(self, g: Gang, mask: Any, k: int) -> None:
        """Relaxed reads before it acquire; relaxed writes after it release."""
        assert self.races is not None
        level = order_of(self.kernel.instrs[k]).level
        active = self.active(g, g.mask if mask is None else mask)
        for row, (slot, warp) in enumerate(zip(g.cta[:, 0].tolist(), g.warps.tolist(), strict=True)):
            lanes = active[row]
            if not lanes.any():
                continue
            if self.global_races is not None:
                self.global_races.acquire(self, slot, warp % self.wpc, lanes, level)
            made = Fenced(lanes, level, self.races.publish(slot, warp % self.wpc, lanes))
            older = [f for f in self.fence_clocks.get(warp, ()) if (f.lanes & ~lanes).any() or f.level > level]
            self.fence_clocks[warp] = [made, *older]

    def fenced(self, warp: int, lanes: Any, level: int) -> Any:
        """What all `lanes` (a number, or bools) of a warp knew at a fence of at least a level; None without one."""
        for found in self.fence_clocks.get(warp, ()):
            if found.level >= level and (
                found.lanes[lanes] if isinstance(lanes, int) else not (lanes & ~found.lanes).any()
            ):
                return found.known
        return None

    def fenced_by_each(self, warp: int, lanes: Any, level: int) -> Any:
        """What `lanes` (bools) of a warp knew, each at its own last fence of at least a level; None without any.

        For arrivals, which every thread makes for itself: lanes that came to the fence one after the other count too.
        """
        known = None
        left = lanes.copy()
        for found in self.fence_clocks.get(warp, ()):
            if found.level >= level and (left & found.lanes).any():
                known = found.known.copy() if known is None else np.maximum(known, found.known)
                left &= ~found.lanes
        return known
