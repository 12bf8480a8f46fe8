"""What every warp knows of what happened before: vector clocks over threads (the base of the race checks).

A warp counts stretches: the next begins where any of its lanes publishes something, and at every bar.warp.sync. An
access is known by its thread and the stretch in which it happened. A warp holds one clock, of what all its lanes know
in common; that includes its own lanes, whose accesses since the warp last came together are no common knowledge. So two
lanes of a warp are as unordered as two warps until bar.warp.sync or a barrier orders them; a shuffle or a vote does not
(PTX ISA 9.7.9.6, 8.6). A lane that publishes alone, as the one that arrives for its warp, publishes what its warp
has in common and its own accesses.

There are two planes: what happened before, and of that what the async proxy may see, which `fence.proxy.async` raises
to the first. Where tensor memory is ordered by tcgen05.fence there are two more: what accesses to it may rely on (a
thread offers its own accesses by fence::before_thread_sync), and what joins that at the next fence::after_thread_sync.
Clocks start at 1; memory that nobody touched holds 0.

Columns of a clock, for each CTA of the cluster: its threads; the agents of its async proxy; bulk writes to global
memory of each warp; and of each warp how often it learned something of other clusters (global_order.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubinery.aot.ptxsim.state import LANES, Gang

ASYNC_AGENTS = 8
"""Agents of the async proxy a CTA: the last is the tensor core's pipe, mbarriers share the others in order of use."""
PIPE = -(1 << 20)
"""Stands for the pipe where a barrier's address is expected."""
TENSOR, TENSOR_NEXT = 2, 3
"""Planes of what accesses to tensor memory may rely on: now, and from the next fence on."""
Array = Any


class Clocks:
    """Clocks of all resident CTAs; those of a cluster know each other. Holders of clocks are warps and async agents."""

    def __init__(
        self, slots: int, wpc: int, cluster: int, rank: Array, base: Array, tensor_fences: bool = False
    ) -> None:
        self.wpc, self.cluster, self.rank, self.base = wpc, cluster, rank, base
        self.threads = wpc * LANES
        self.span = self.threads + ASYNC_AGENTS + 2 * wpc
        """Columns of a CTA."""
        self.agents = cluster * self.span
        self.holders = wpc + ASYNC_AGENTS
        """Holders of a CTA."""
        self.tensor_fences = tensor_fences
        """Is tensor memory ordered by tcgen05.fence?"""
        self.planes = 4 if tensor_fences else 2
        self.clock = np.zeros((slots, self.holders, self.planes, self.agents), np.int32)
        self.now = np.ones((slots, wpc), np.int32)
        """The stretch that each warp is in."""
        self.bulk = np.zeros((slots, wpc), np.int32)
        """Bulk copies to global memory that each warp has issued."""
        self.learned: dict[tuple[int, int], list[dict[int, Array]]] = {}
        """By slot and warp: after each acquire from beyond its cluster, all that it had learned (global_order.py)."""
        self._async: dict[tuple[int, int], int] = {}

    def reset(self, slot: int) -> None:
        """A new CTA in a slot."""
        self.clock[slot] = 0
        self.now[slot], self.bulk[slot] = 1, 0
        for warp in range(self.wpc):
            self.learned.pop((slot, warp), None)
        self._async = {key: agent for key, agent in self._async.items() if key[0] != slot}

    # -- columns -------------------------------------------------------------------------------

    def first(self, slot: int, warp: int) -> int:
        """The column of a warp's lane 0."""
        return int(self.rank[slot]) * self.span + warp * LANES

    def agent(self, slot: int, local: int) -> int:
        """The column of a holder that is an async agent."""
        return int(self.rank[slot]) * self.span + self.threads + local - self.wpc

    def bulk_column(self, slot: int, warp: int) -> int:
        """The column of a warp's bulk writes to global memory."""
        return int(self.rank[slot]) * self.span + self.threads + ASYNC_AGENTS + warp

    def foreign_column(self, slot: int, warp: int) -> int:
        """The column that counts what a warp learned of other clusters."""
        return self.bulk_column(slot, warp) + self.wpc

    def foreign_columns(self) -> slice:
        """Those of all warps of a CTA, within its columns."""
        return slice(self.span - self.wpc, self.span)

    def async_agent(self, slot: int, barrier: int) -> int:
        """The holder that stands for the copies that a barrier counts."""
        if barrier == PIPE:
            return self.wpc + ASYNC_AGENTS - 1
        found = self._async.get((slot, barrier))
        if found is None:
            number = sum(1 for s, _ in self._async if s == slot)
            found = self._async[slot, barrier] = self.wpc + number % (ASYNC_AGENTS - 1)
        return found

    def holder(self, slot: int, local: int) -> int:
        """A holder's number in its cluster."""
        return int(self.rank[slot]) * self.holders + local

    def by_holder(self, known: Array, lanes: Any = np.minimum) -> Array:
        """What clocks (..., agents) say of each holder: of a warp what is known of all its lanes, or of any."""
        parts = known.reshape(*known.shape[:-1], self.cluster, self.span)
        warps = parts[..., : self.threads].reshape(*parts.shape[:-1], self.wpc, LANES)
        rest = parts[..., self.threads : self.threads + ASYNC_AGENTS]
        merged = np.concatenate((lanes.reduce(warps, axis=-1), rest), axis=-1)
        return merged.reshape(*known.shape[:-1], self.cluster * self.holders)

    def describe(self, column: int, *, lane: bool = False) -> str:
        """Who a column stands for."""
        rank, local = divmod(column, self.span)
        if local < self.threads:
            who = f"lane {local % LANES} of warp {local // LANES}" if lane else f"warp {local // LANES}"
        else:
            who = "an asynchronous copy"
        return who if self.cluster == 1 else f"{who} of CTA {rank} of the cluster"

    # -- ordering ------------------------------------------------------------------------------

    def fresh(self) -> Array:
        """What an object that orders knows at first: nothing. Shape (planes, agents)."""
        return np.zeros((self.planes, self.agents), np.int32)

    def release(self, known: Array, slot: int, warp: int, lanes: Any = None) -> None:
        """`lanes` of a warp (all, a number, or bools) publish what they know into an object, in place."""
        np.maximum(known, self.clock[slot, warp], out=known)
        first = self.first(slot, warp)
        now = self.now[slot, warp]
        if lanes is None:
            known[0, first : first + LANES] = now
        elif isinstance(lanes, int):
            known[0, first + lanes] = now
        else:
            known[0, first : first + LANES][lanes] = now
        self.now[slot, warp] = now + 1

    def publish(self, slot: int, warp: int, lanes: Any = None) -> Array:
        """What lanes of a warp know now, for work that publishes it later."""
        known = self.fresh()
        self.release(known, slot, warp, lanes)
        return known

    def acquire(self, known: Array, slot: int, local: int) -> None:
        """A warp learns what an object knows."""
        clock = self.clock[slot, local]
        np.maximum(clock[:2], known[:2], out=clock[:2])
        if self.tensor_fences:
            np.maximum(clock[TENSOR_NEXT], known[TENSOR], out=clock[TENSOR_NEXT])

    def converge(self, g: Gang, mask: Any) -> None:
        """bar.warp.sync: what each lane did becomes known to its warp."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        columns = (self.rank[slot] * self.span + warp * LANES)[:, None] + np.arange(LANES)
        now = self.now[slot, warp]
        if mask is None:
            self.clock[slot[:, None], warp[:, None], 0, columns] = now[:, None]
        else:
            rows, lanes = np.nonzero(mask)
            self.clock[slot[rows], warp[rows], 0, columns[rows, lanes]] = now[rows]
        self.now[slot, warp] = now + 1

    def tensor_fence(self, g: Gang, mask: Any, before: bool) -> None:
        """tcgen05.fence: before_thread_sync offers what its lanes did, after_thread_sync takes what was offered."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        if not before:
            clock = self.clock[slot, warp]
            self.clock[slot, warp, TENSOR] = np.maximum(clock[:, TENSOR], clock[:, TENSOR_NEXT])
            return
        rows, lanes = np.nonzero(g.lanes() if mask is None else mask)
        now = self.now[slot, warp]
        columns = (self.rank[slot] * self.span + warp * LANES)[rows] + lanes
        self.clock[slot[rows], warp[rows], TENSOR, columns] = now[rows]
        self.now[slot, warp] = now + 1

    def fence_async(self, g: Gang, mask: Any) -> None:
        """fence.proxy.async: the async proxy may see all that happened before, as far as its lanes know."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        seen = np.maximum(self.clock[slot, warp, 1], self.clock[slot, warp, 0])
        rows, lanes = np.nonzero(g.lanes() if mask is None else mask)
        now = self.now[slot, warp]
        seen[rows, (self.rank[slot] * self.span + warp * LANES)[rows] + lanes] = now[rows]
        self.clock[slot, warp, 1] = seen
        self.now[slot, warp] = now + 1
