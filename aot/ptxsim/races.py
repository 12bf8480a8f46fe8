"""Data races in shared memory and missing proxy fences, by vector clocks.

Each warp is an agent, and so is each mbarrier's share of the async proxy (TMA and its like): within a warp
the program's order holds, everything else must be ordered through barriers. An agent's clock says what it knows
of the others (FastTrack, Flanagan and Freund 2009, with full read sets). There are two planes: what
happened before, and of that what the async proxy may see, which `fence.proxy.async` raises to the first.
Clocks start at 1; a memory unit that nobody touched holds 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.faults import ProxyFault, RaceFault
from cubinery.aot.ptxsim.state import LANES, Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.access import Access

ASYNC_AGENTS = 8
"""Agents of the async proxy a CTA: the last is the tensor core's pipe, mbarriers share the others in order of use."""
PIPE = -(1 << 20)
"""Stands for the pipe where a barrier's address is expected."""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where flat units come from: `count` units for each lane of `mask`, or of `width` lanes of every row."""

    mask: Any
    width: int
    count: int

    def lane(self, position: int) -> int:
        """The lane of a unit."""
        if self.mask is None:
            return position // self.count % self.width
        return int(np.argwhere(self.mask)[position // self.count][1])


class Races:
    """Clocks of all resident CTAs. Agents of a cluster know each other."""

    def __init__(self, slots: int, wpc: int, cluster: int, stride: int, unit: int, rank: Any, base: Any) -> None:
        self.wpc, self.unit, self.rank, self.base = wpc, unit, rank, base
        self.per_cta = wpc + ASYNC_AGENTS
        self.agents = cluster * self.per_cta
        self.units = stride // unit
        self.clock = np.zeros((slots, self.per_cta, 2, self.agents), np.int32)
        self.writer = np.zeros(slots * self.units, np.int16)
        self.write_clock = np.zeros(slots * self.units, np.int32)
        self.read_clock = np.zeros((slots * self.units, self.agents), np.int32)
        self._read_flat = self.read_clock.reshape(-1)
        self._async: dict[tuple[int, int], int] = {}
        self._atomic = np.zeros(slots * self.units, np.int32)
        for slot in range(slots):
            self._begin(slot)

    def _begin(self, slot: int) -> None:
        first = int(self.rank[slot]) * self.per_cta
        self.clock[slot] = 0
        for agent in range(self.per_cta):
            self.clock[slot, agent, 0, first + agent] = 1

    def reset(self, slot: int) -> None:
        """A new CTA in a slot."""
        self._begin(slot)
        span = slice(slot * self.units, (slot + 1) * self.units)
        self.writer[span] = 0
        self.write_clock[span] = self.read_clock[span] = self._atomic[span] = 0
        self._async = {key: agent for key, agent in self._async.items() if key[0] != slot}

    def agent(self, slot: int, local: int) -> int:
        """An agent's number in its cluster."""
        return int(self.rank[slot]) * self.per_cta + local

    # -- accesses of warps ---------------------------------------------------------------------

    def _rows(self, g: Gang) -> tuple[Any, Any, Any]:
        """(agent, what it knows, its own clock) of each row: (W,), (W, agents), (W,)."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        agent = self.rank[slot] * self.per_cta + warp
        known = self.clock[slot, warp, 0]
        return agent, known, known[np.arange(len(g)), agent]

    def _units(self, g: Gang, mask: Any, index: Any, size: int) -> tuple[Any, Any, _Origin]:
        """(units touched, row of each, how to find the lane of each), flat."""
        count = -(-size // self.unit)
        if mask is None:
            width = index.shape[1]
            at = index.ravel() // self.unit if len(index) == len(g) else np.tile(index[0] // self.unit, len(g))
            rows = np.repeat(np.arange(len(g)), width * count)
        else:
            width = LANES
            at = np.broadcast_to(index, (len(g), LANES))[mask] // self.unit
            rows = np.nonzero(mask)[0]
            rows = rows if count == 1 else rows.repeat(count)
        if count > 1:
            at = (at[:, None] + np.arange(count)).ravel()
        return at, rows, _Origin(mask, width, count)

    def read(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int) -> None:
        """Loads: what they read must have been written before."""
        at, rows, origin = self._units(g, mask, index, size)
        if not len(at):
            return
        agent, known, own = self._rows(g)
        writer = self.writer.take(at)
        late = self.write_clock.take(at) > known.ravel().take(rows * self.agents + writer)
        if late.any():
            self._report(rt, g, k, at, rows, origin, late, "reads", "written", writer)
        self._read_flat[at * self.agents + agent.take(rows)] = own.take(rows)

    def write(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int) -> None:
        """Stores: what they overwrite must have been written and read before."""
        at, rows, origin = self._units(g, mask, index, size)
        if not len(at):
            return
        agent, known, own = self._rows(g)
        self._check_write(rt, g, k, at, rows, origin, known.take(rows, axis=0))
        mine = agent.take(rows)
        self.writer[at] = mine
        self.write_clock[at] = own.take(rows)
        self._atomic[at] = 0
        if len(g) > 1:  # warps of one gang store at the same time
            last = self.writer.take(at)
            other = last != mine
            if other.any():
                self._report(rt, g, k, at, rows, origin, other, "writes", "written", last)

    def touch(self, rt: Access, g: Gang, row: int, lane: int, k: int, place: int, size: int) -> None:
        """A read by one lane, as every use of an mbarrier is one of what initialised it."""
        slot, local = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc
        agent, known = self.agent(slot, local), self.clock[slot, local, 0]
        span = slice(place // self.unit, -(-(place + size) // self.unit))
        writer = self.writer[span]
        late = self.write_clock[span] > known[writer]
        if late.any():
            at = np.arange(span.start, span.stop)
            lanes = np.zeros((len(g), LANES), bool)
            lanes[row, lane] = True
            origin = _Origin(lanes, LANES, len(at))
            self._report(rt, g, k, at, np.full(len(at), row), origin, late, "reads", "written", writer)
        self.read_clock[span, agent] = known[agent]

    def atomic(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int) -> None:
        """Atomics do not race with each other, only with loads and stores."""
        at, rows, origin = self._units(g, mask, index, size)
        if not len(at):
            return
        agent, known, own = self._rows(g)
        fresh = self.write_clock[at] != self._atomic[at]  # the last write was no atomic
        writer = self.writer[at]
        late = fresh & (self.write_clock[at] > known[rows, writer])
        if late.any():
            self._report(rt, g, k, at, rows, origin, late, "updates", "written", writer)
        reads = self.read_clock[at] > known[rows]
        if reads.any():
            self._report(rt, g, k, at, rows, origin, reads.any(axis=1), "updates", "read", reads.argmax(axis=1))
        self.writer[at] = agent[rows]
        self.write_clock[at] = own[rows]
        self._atomic[at] = self.write_clock[at]

    def _check_write(
        self, rt: Access, g: Gang | None, k: int, at: Any, rows: Any, origin: _Origin | None, known: Any
    ) -> None:
        """`known` (units, agents) or (agents,): what the writer of each unit knows."""
        writer = self.writer.take(at)
        late = self.write_clock.take(at) > (known[writer] if known.ndim == 1 else known[np.arange(len(at)), writer])
        if late.any():
            self._report(rt, g, k, at, rows, origin, late, "writes", "written", writer)
        reads = self.read_clock.take(at, axis=0) > known
        if reads.any():
            late, reader = reads.any(axis=1), reads.argmax(axis=1)
            self._report(rt, g, k, at, rows, origin, late, "writes", "read", reader)

    def _report(
        self, rt: Access, g: Gang | None, k: int, at: Any, rows: Any, origin: _Origin | None, late: Any, does: str,
        done: str, by: Any,
    ) -> None:  # fmt: skip
        first = int(np.argmax(late))
        address = int(at[first] % self.units) * self.unit
        other = self.describe(int(by[first]))
        detail = f"{does} shared address {address:#x}, {done} by {other}, with nothing that orders the two"
        where = None
        if g is not None:
            where = np.zeros((len(g), LANES), bool)
            where[int(rows[first]), 0 if origin is None else origin.lane(first)] = True
        rt.fail(RaceFault, detail, g, k, where)

    def describe(self, agent: int) -> str:
        rank, local = divmod(agent, self.per_cta)
        who = f"warp {local}" if local < self.wpc else "an asynchronous copy"
        return who if self.agents == self.per_cta else f"{who} of CTA {rank} of the cluster"

    # -- the async proxy -----------------------------------------------------------------------

    def async_agent(self, slot: int, barrier: int) -> int:
        """The local agent that stands for the copies that a barrier counts."""
        if barrier == PIPE:
            return self.wpc + ASYNC_AGENTS - 1
        found = self._async.get((slot, barrier))
        if found is None:
            number = sum(1 for s, _ in self._async if s == slot)
            found = self._async[slot, barrier] = self.wpc + number % (ASYNC_AGENTS - 1)
        return found

    def async_write(
        self, rt: Access, g: Gang, row: int, k: int, slot: int, local: int, at: Any, proxy: bool = True
    ) -> int:
        """A copy issued by row's warp writes units `at` of CTA `slot`; returns the clock of its completion.

        Where it writes through the async `proxy`, ordinary stores to the same place need a proxy fence before it.
        """
        issuer = self.clock[int(g.cta[row, 0]), int(g.warps[row]) % self.wpc]
        self._check_write(rt, g, k, at, np.broadcast_to(row, at.shape), None, issuer[0])
        if proxy:
            self._check_proxy(rt, g, k, at, issuer, "overwritten")
        agent = self.agent(slot, local)
        clock = self.clock[slot, local]
        clock[:, agent] += 1
        self.writer[at] = agent
        self.write_clock[at] = clock[0, agent]
        self._atomic[at] = 0
        return int(clock[0, agent])

    def async_read(self, rt: Access, g: Gang, row: int, k: int, slot: int, local: int, at: Any) -> int:
        """A copy or matrix instruction issued by row's warp reads units `at` through the async proxy."""
        issuer = self.clock[int(g.cta[row, 0]), int(g.warps[row]) % self.wpc]
        writer = self.writer[at]
        late = self.write_clock[at] > issuer[0, writer]
        if late.any():
            self._report(rt, g, k, at, np.broadcast_to(row, at.shape), None, late, "reads", "written", writer)
        self._check_proxy(rt, g, k, at, issuer, "read")
        agent = self.agent(slot, local)
        clock = self.clock[slot, local]
        clock[:, agent] += 1
        self.read_clock[at, agent] = clock[0, agent]
        return int(clock[0, agent])

    def _check_proxy(self, rt: Access, g: Gang, k: int, at: Any, issuer: Any, done: str) -> None:
        """Ordinary stores to units `at` must have passed a proxy fence that the issuer knows of."""
        writer = self.writer[at]
        hidden = (writer % self.per_cta < self.wpc) & (self.write_clock[at] > issuer[1, writer])
        if hidden.any():
            first = int(np.argmax(hidden))
            address = int(at[first] % self.units) * self.unit
            detail = (
                f"shared address {address:#x}, stored by {self.describe(int(writer[first]))}, is {done} by the async "
                "proxy without fence.proxy.async after the store"
            )
            rt.fail(ProxyFault, detail, g, k)

    def fence_async(self, g: Gang) -> None:
        """fence.proxy.async: the async proxy may see all that happened before."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        self.clock[slot, warp, 1] = np.maximum(self.clock[slot, warp, 1], self.clock[slot, warp, 0])

    # -- ordering ------------------------------------------------------------------------------

    def fresh(self) -> Any:
        """What an object that orders knows at first: nothing. Shape (2, agents)."""
        return np.zeros((2, self.agents), np.int32)

    def release(self, known: Any, slot: int, local: int) -> None:
        """An agent publishes what it knows into an object, in place, and starts a new stretch of its own."""
        clock = self.clock[slot, local]
        np.maximum(known, clock, out=known)
        clock[0, self.agent(slot, local)] += 1

    def publish(self, slot: int, local: int) -> Any:
        """What an agent knows now, for work that publishes it later; the agent starts a new stretch of its own."""
        known = self.fresh()
        self.release(known, slot, local)
        return known

    def acquire(self, known: Any, slot: int, local: int) -> None:
        """An agent learns what an object knows."""
        clock = self.clock[slot, local]
        np.maximum(clock, known, out=clock)
