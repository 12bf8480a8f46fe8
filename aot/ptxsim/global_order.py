"""What threads of different clusters know of each other, through global memory (PTX ISA 8.7 to 8.9).

A release publishes, at the address that it writes, what its thread knows: of its own cluster by the clocks of
clocks.py, of other CTAs what it has learned. An acquire of that address learns it. A relaxed write after a fence
releases what was known at the fence; a relaxed read before a fence acquires at the fence; atomics continue what the
writes before them released. What a warp learned of CTAs outside its cluster stands in a log, and a column of its clock
says how much of the log others know, so that barriers hand it on like everything else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.clocks import Clocks
from cubinery.aot.ptxsim.memory_order import CLUSTER, CTA, GPU, Order

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.fences import Fences

Array = Any
Knowledge = dict[int, Array]
"""CTA of the grid to the columns of its part of a clock. Arrays are never written again."""
Key = tuple[int, int]
"""Level of a scope, and the CTA, cluster or (0) GPU that it spans."""


def merged(mine: Knowledge, other: Knowledge) -> Knowledge:
    """What both know together."""
    result = dict(mine)
    for cta, known in other.items():
        old = result.get(cta)
        if old is None:
            result[cta] = known
        elif old is not known and (known > old).any():
            result[cta] = np.maximum(old, known)
    return result


@dataclass(slots=True)
class GlobalOrder:
    """Release and acquire at addresses of global memory."""

    clocks: Clocks
    objects: dict[tuple[int, int], dict[Key, Knowledge]] = field(default_factory=dict)
    """By address (allocation, byte in it): what the writes there released, for each scope."""
    pending: dict[tuple[int, int], dict[int, list[tuple[int, Knowledge]]]] = field(default_factory=dict)
    """By warp (CTA of the grid, warp) and lane: what relaxed reads will have acquired at a fence, with its level."""
    _foreign: dict[tuple[int, ...], tuple[list[Knowledge], Knowledge]] = field(default_factory=dict)
    """What several logs say together, by their ids; the logs are kept, so that the ids stay theirs."""

    # -- what is known -------------------------------------------------------------------------

    def foreign(self, known: Array, slot: int) -> Knowledge:
        """What a clock (agents,) held in CTA `slot` implies of CTAs outside the cluster."""
        clocks = self.clocks
        base = int(clocks.base[slot])
        counts = known.reshape(clocks.cluster, clocks.span)[:, clocks.foreign_columns()]
        if not counts.any():
            return {}
        logs = [
            clocks.learned[base + rank, warp][counts[rank, warp] - 1] for rank, warp in np.argwhere(counts).tolist()
        ]
        result: Knowledge = logs[0]
        if len(logs) > 1:
            key = tuple(map(id, logs))
            if key not in self._foreign:
                for log in logs[1:]:
                    result = merged(result, log)
                self._foreign[key] = logs, result
            result = self._foreign[key][1]
        return result

    def knowledge(self, known: Array, slot: int, ids: Array) -> Knowledge:
        """All that a clock (agents,) held in CTA `slot` implies. `ids`: the grid's CTA in each slot."""
        clocks = self.clocks
        base = int(clocks.base[slot])
        result = dict(self.foreign(known, slot))
        for rank in range(clocks.cluster):
            part = known[rank * clocks.span : (rank + 1) * clocks.span]
            if part.any():
                result[int(ids[base + rank])] = part.copy()
        return result

    def learn(self, knowledge: Knowledge, slot: int, warp: int, ids: Array) -> None:
        """A warp acquires."""
        clocks = self.clocks
        base, clock = int(clocks.base[slot]), clocks.clock[slot, warp, 0]
        rest = dict(knowledge)
        for rank in range(clocks.cluster):
            part = rest.pop(int(ids[base + rank]), None)
            if part is not None:
                mine = clock[rank * clocks.span : (rank + 1) * clocks.span]
                np.maximum(mine, part, out=mine)
        if rest:
            log = clocks.learned.setdefault((slot, warp), [])
            log.append(merged(log[-1], rest) if log else rest)
            clock[clocks.foreign_column(slot, warp)] = len(log)

    # -- at an address -------------------------------------------------------------------------

    def keys(self, level: int, cta: int, cluster: int) -> list[Key]:
        """The scopes up to a level around a CTA."""
        return [(CTA, cta), (CLUSTER, cluster), (GPU, 0)][: min(level, GPU) + 1]

    def read(self, address: tuple[int, int], order: Order, slot: int, warp: int, lane: int, ids: Array) -> None:
        """A strong read: it acquires, now or at the next fence."""
        found = self.objects.get(address)
        if not found:
            return
        cta, base = int(ids[slot]), int(self.clocks.base[slot])
        for key in self.keys(order.level, cta, int(ids[base])):
            knowledge = found.get(key)
            if knowledge and order.acquires:
                self.learn(knowledge, slot, warp, ids)
            elif knowledge:
                waiting = self.pending.setdefault((cta, warp), {}).setdefault(lane, [])
                if not any(old is knowledge for _, old in waiting):
                    waiting.append((key[0], knowledge))

    def write(
        self, rt: Fences, address: tuple[int, int], order: Order, slot: int, warp: int, lane: int, ids: Array,
        update: bool,
    ) -> None:  # fmt: skip
        """A strong write: what it releases is there from now on; an `update` adds to what was released before."""
        clocks = self.clocks
        level = min(order.level, GPU)
        mine = slot * clocks.wpc + warp
        known = clocks.publish(slot, warp, lane) if order.releases else rt.fenced(mine, lane, level)
        if known is None:
            if not update:
                self.objects.pop(address, None)
            return
        knowledge = self.knowledge(known[0], slot, ids)
        found = self.objects.setdefault(address, {})
        if not update:
            found.clear()
        for key in self.keys(level, int(ids[slot]), int(ids[int(clocks.base[slot])])):
            found[key] = merged(found[key], knowledge) if key in found else knowledge

    def weak_write(self, addresses: list[tuple[int, int]]) -> None:
        """A weak write: what was released at an address is gone."""
        for address in addresses:
            self.objects.pop(address, None)

    def fence(self, slot: int, warp: int, lanes: Array, level: int, ids: Array) -> None:
        """What relaxed reads of `lanes` found is acquired, as far as the fence's scope goes."""
        waiting = self.pending.get((int(ids[slot]), warp))
        if not waiting:
            return
        for lane in [lane for lane in waiting if lanes[lane]]:
            for needed, knowledge in waiting[lane]:
                if level >= needed:
                    self.learn(knowledge, slot, warp, ids)
            waiting[lane] = [(needed, knowledge) for needed, knowledge in waiting[lane] if level < needed]
