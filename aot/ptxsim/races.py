"""Data races in shared memory and missing proxy fences, by the clocks of clocks.py.

Every unit of shared memory remembers who wrote it last and when, and of each warp when and by which lanes it was read
last (FastTrack, Flanagan and Freund 2009, with full read sets).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.clocks import PIPE, Clocks
from cubinery.aot.ptxsim.faults import ProxyFault, RaceFault
from cubinery.aot.ptxsim.state import LANES, Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.access import Access

__all__ = ["PIPE", "Races"]

Array = Any
_EVERY = np.uint32(0xFFFFFFFF)
_BIT: Array = np.uint32(1) << np.arange(LANES, dtype=np.uint32)
_LANE = np.arange(LANES)


class _Units:
    """Units that a gang touches, flat: each with its row and lane. `lanes` None: all lanes touch each of them."""

    __slots__ = ("at", "lanes", "row", "rows")

    def __init__(self, at: Array, rows: Array, lanes: Array | None, row: int = 0) -> None:
        self.at, self.rows, self.lanes = at, rows, lanes
        self.row = row
        """Row of the gang from which `rows` count."""


@lru_cache(maxsize=64)
def _grid(rows: int, count: int) -> tuple[Array, Array]:
    """Row and lane of `count` units a lane of whole warps."""
    return np.repeat(np.arange(rows), LANES * count), np.tile(_LANE.repeat(count), rows)


class Races(Clocks):
    """Clocks, and the shared memory of all resident CTAs."""

    def __init__(
        self,
        slots: int,
        wpc: int,
        cluster: int,
        stride: int,
        unit: int,
        rank: Any,
        base: Any,
        tensor_fences: bool = False,
    ) -> None:
        super().__init__(slots, wpc, cluster, rank, base, tensor_fences)
        self.unit = unit
        self.units = stride // unit
        self.writer = np.zeros(slots * self.units, np.int16)
        self.write_clock = np.zeros(slots * self.units, np.int32)
        self._readers = cluster * self.holders
        self.read_clock = np.zeros((slots * self.units, self._readers), np.int32)
        self.read_lanes = np.zeros((slots * self.units, self._readers), np.uint32)
        """Lanes of a warp that read in that stretch, or since its lanes last came together."""
        self._read_flat, self._lanes_flat = self.read_clock.reshape(-1), self.read_lanes.reshape(-1)
        self._atomic = np.zeros(slots * self.units, np.int32)

    def reset(self, slot: int) -> None:
        """A new CTA in a slot."""
        super().reset(slot)
        span = slice(slot * self.units, (slot + 1) * self.units)
        self.writer[span] = 0
        self.write_clock[span] = self.read_clock[span] = self._atomic[span] = 0

    # -- accesses of warps ---------------------------------------------------------------------

    def _rows(self, g: Gang) -> tuple[Array, Array, Array, Array]:
        """(column of lane 0, holder, what is known, stretch) of each row; known is (W, agents)."""
        slot, warp = g.cta[:, 0], g.warps % self.wpc
        rank = self.rank[slot]
        known = self.clock[slot, warp, 0]
        return rank * self.span + warp * LANES, rank * self.holders + warp, known, self.now[slot, warp]

    def _units(self, g: Gang, mask: Any, index: Any, size: int) -> _Units:
        count = -(-size // self.unit)
        if mask is None and index.shape[1] == 1:
            at = np.broadcast_to(index[:, 0], len(g)) // self.unit
            if count > 1:
                at = (at[:, None] + np.arange(count)).ravel()
            return _Units(at, np.arange(len(g)).repeat(count), None)
        if mask is None:
            at = (index if len(index) == len(g) else np.broadcast_to(index, (len(g), LANES))).ravel() // self.unit
            rows, lanes = _grid(len(g), count)
        else:
            at = np.broadcast_to(index, (len(g), LANES))[mask] // self.unit
            rows, lanes = (v.repeat(count) for v in np.nonzero(mask))
        if count > 1:
            at = (at[:, None] + np.arange(count)).ravel()
        return _Units(at, rows, lanes)

    def read(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int, collective: bool = False) -> None:
        """Loads: what they read must have been written before. `collective`: each lane gets parts of all."""
        u = self._units(g, mask, index, size)
        if not len(u.at):
            return
        first, holder, known, now = self._rows(g)
        self._after_write(rt, g, k, u, first, known, "reads")
        place = u.at * self._readers + holder.take(u.rows)
        if collective or u.lanes is None:
            self._lanes_flat[place] = _EVERY
        else:
            self._add_lanes(place, u, first, known)
        self._read_flat[place] = now.take(u.rows)

    def _add_lanes(self, place: Array, u: _Units, first: Array, known: Array) -> None:
        """Remember who reads, beside the lanes whose reads are not known to their whole warp yet."""
        assert u.lanes is not None
        common = known[np.arange(len(first))[:, None], first[:, None] + _LANE].min(axis=1)
        bits = _BIT.take(u.lanes)
        old = self._lanes_flat.take(place)
        self._lanes_flat[place] = np.where(self._read_flat.take(place) > common.take(u.rows), old | bits, bits)
        lost = self._lanes_flat.take(place) & bits == 0  # lanes of one instruction that read the same unit
        if lost.any():
            np.bitwise_or.at(self._lanes_flat, place[lost], bits[lost])

    def write(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int) -> None:
        """Stores: what they overwrite must have been written and read before."""
        u = self._units(g, mask, index, size)
        if not len(u.at):
            return
        first, holder, known, now = self._rows(g)
        self._after_write(rt, g, k, u, first, known, "writes")
        self._after_reads(rt, g, k, u, first, holder, known, "writes")
        self._write(u, first, now)
        self._atomic[u.at] = 0
        if len(g) > 1:  # warps of one gang store at the same time; of the lanes of a warp one is the last
            last = self.writer.take(u.at)
            other = (last - first.take(u.rows)) >> 5 != 0
            if other.any():
                self._report(rt, g, k, u, other, "writes", "written", last)

    def _write(self, u: _Units, first: Array, now: Array) -> None:
        self.writer[u.at] = first.take(u.rows) + (LANES - 1 if u.lanes is None else u.lanes)
        self.write_clock[u.at] = now.take(u.rows)

    def touch(self, rt: Access, g: Gang, row: int, lane: int, k: int, place: int, size: int) -> None:
        """A read by one lane, as every use of an mbarrier is one of what initialised it. The latest stretch counts."""
        slot, warp = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc
        mine, known = self.first(slot, warp) + lane, self.clock[slot, warp, 0]
        span = slice(place // self.unit, -(-(place + size) // self.unit))
        writer = self.writer[span]
        late = (self.write_clock[span] > known[writer]) & (writer != mine)
        if late.any():
            count = span.stop - span.start
            u = _Units(np.arange(span.start, span.stop), np.full(count, row), np.full(count, lane))
            self._report(rt, g, k, u, late, "reads", "written", writer)
        holder = self.holder(slot, warp)
        again = self.read_clock[span, holder] == self.now[slot, warp]
        self.read_lanes[span, holder] = np.where(again, self.read_lanes[span, holder], 0) | _BIT[lane]
        self.read_clock[span, holder] = self.now[slot, warp]

    def atomic(self, rt: Access, g: Gang, mask: Any, k: int, index: Any, size: int) -> None:
        """Atomics do not race with each other, only with loads and stores."""
        u = self._units(g, mask, index, size)
        if not len(u.at):
            return
        first, holder, known, now = self._rows(g)
        stored = self.write_clock[u.at] != self._atomic[u.at]  # the last write was no atomic
        self._after_write(rt, g, k, u, first, known, "updates", stored)
        self._after_reads(rt, g, k, u, first, holder, known, "updates")
        self._write(u, first, now)
        self._atomic[u.at] = self.write_clock[u.at]

    def outlives(self, slot: int) -> str | None:
        """What a CTA that has exited cannot know of the use of its shared memory by others; None where it knows all."""
        known = self.clock[slot, : self.wpc, 0].max(axis=0)[None]
        span = slice(slot * self.units, (slot + 1) * self.units)
        first = int(self.rank[slot]) * self.span
        writer = self.writer[span]
        late = self.write_clock[span] > known[0, writer]
        late &= (writer < first) | (writer >= first + self.threads)
        if late.any():
            at = int(np.argmax(late))
            return f"at {at * self.unit:#x} is written by {self.describe(int(writer[at]))}"
        own = int(self.rank[slot]) * self.holders
        reads = self.read_clock[span]
        unknown = reads > self.by_holder(known)
        unknown[:, own : own + self.wpc] = False
        which, reader = np.nonzero(unknown)
        if len(which):
            rows = np.zeros(len(which), np.int64)
            lanes = self._unknown_lanes(which + span.start, reader, reads[which, reader], known, rows)
            bad = lanes.any(axis=1)
            if bad.any():
                at = int(np.argmax(bad))
                who = self.describe(self._lane_column(int(reader[at]), int(lanes[at].argmax())))
                return f"at {int(which[at]) * self.unit:#x} is read by {who}"
        return None

    # -- checks --------------------------------------------------------------------------------

    def _after_write(
        self, rt: Access, g: Gang, k: int, u: _Units, first: Array, known: Array, does: str, which: Any = None
    ) -> None:
        """The last write of each unit (of `which`) is known, or the lane's own."""
        writer = self.writer.take(u.at)
        late = self.write_clock.take(u.at) > known.reshape(-1).take(u.rows * self.agents + writer)
        if which is not None:
            late &= which
        if late.any():
            if u.lanes is not None:
                late &= writer != first.take(u.rows) + u.lanes
            if late.any():
                self._report(rt, g, k, u, late, does, "written", writer)

    def _after_reads(
        self, rt: Access, g: Gang, k: int, u: _Units, first: Array, holder: Array, known: Array, does: str
    ) -> None:
        """All reads of each unit are known, or the lane's own."""
        reads: Array = self.read_clock.take(u.at, axis=0)
        unknown = reads > self.by_holder(known).take(u.rows, axis=0)
        if not unknown.any():
            return
        which, reader = np.nonzero(unknown)
        late = self._unknown_lanes(u.at[which], reader, reads[which, reader], known, u.rows[which])
        if u.lanes is not None:
            own = np.flatnonzero(reader == holder.take(u.rows[which]))
            late[own, u.lanes[which[own]]] = False
        bad = late.any(axis=1)
        if bad.any():
            at = int(np.argmax(bad))
            by = self._lane_column(int(reader[at]), int(late[at].argmax()))
            where = np.zeros(len(u.at), bool)
            where[which[at]] = True
            self._report(rt, g, k, u, where, does, "read", np.full(len(u.at), by))

    def _unknown_lanes(self, at: Array, reader: Array, clock: Array, known: Array, rows: Array) -> Array:
        """Lanes (n, 32) of each reader of a unit whose read is not known; lane 0 stands for an async agent."""
        rank, local = reader // self.holders, reader % self.holders
        warp = local < self.wpc
        column = rank * self.span + np.where(warp, local * LANES, self.threads + local - self.wpc)
        columns = column[:, None] + np.where(warp[:, None], _LANE, 0)
        late = known[rows[:, None], columns] < clock[:, None]
        bits = np.where(warp, self.read_lanes[at, reader], 1)
        return late & (bits[:, None] & _BIT != 0)

    def _lane_column(self, holder: int, lane: int) -> int:
        rank, local = divmod(holder, self.holders)
        if local < self.wpc:
            return rank * self.span + local * LANES + lane
        return rank * self.span + self.threads + local - self.wpc

    def _report(
        self, rt: Access, g: Gang, k: int, u: _Units, late: Array, does: str, done: str, by: Array
    ) -> None:  # fmt: skip
        first = int(np.argmax(late))
        row, column = int(u.rows[first]) + u.row, int(by[first])
        address = int(u.at[first] % self.units) * self.unit
        slot, warp = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc
        same = 0 <= column - self.first(slot, warp) < LANES
        other = self.describe(column, lane=same)
        missing = "no bar.warp.sync between" if same else "with nothing that orders the two"
        where = np.zeros((len(g), LANES), bool)
        where[row, 0 if u.lanes is None else int(u.lanes[first])] = True
        rt.fail(RaceFault, f"{does} shared address {address:#x}, {done} by {other}, {missing}", g, k, where)

    # -- the async proxy -----------------------------------------------------------------------

    def _issued(self, g: Gang, row: int, lane: int | None, at: Array) -> tuple[_Units, Array, Array, Array]:
        """Units that an instruction of one lane (None: of the whole warp) hands on; (.., column, holder, known)."""
        slot, warp = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc
        lanes = None if lane is None else np.full(len(at), lane)
        known = self.clock[slot, warp, 0]
        if lane is None:  # its lanes all take part, so it comes after what each of them did
            known = known.copy()
            first = self.first(slot, warp)
            known[first : first + LANES] = self.now[slot, warp]
        u = _Units(at, np.zeros(len(at), np.int64), lanes, row)
        return u, np.array([self.first(slot, warp)]), np.array([self.holder(slot, warp)]), known[None]

    def async_write(
        self, rt: Access, g: Gang, row: int, k: int, slot: int, local: int, at: Any, proxy: bool = True,
        lane: int | None = None,
    ) -> int:  # fmt: skip
        """A copy issued by `lane` of row's warp writes units `at` of CTA `slot`; returns the clock of its completion.

        Where it writes through the async `proxy`, ordinary stores to the same place need a proxy fence before it.
        """
        u, first, holder, known = self._issued(g, row, lane, at)
        self._after_write(rt, g, k, u, first, known, "writes")
        self._after_reads(rt, g, k, u, first, holder, known, "writes")
        if proxy:
            self._check_proxy(rt, g, row, k, at, "overwritten")
        agent = self.agent(slot, local)
        clock = self.clock[slot, local]
        clock[:, agent] += 1
        self.writer[at] = agent
        self.write_clock[at] = clock[0, agent]
        self._atomic[at] = 0
        return int(clock[0, agent])

    def async_read(
        self, rt: Access, g: Gang, row: int, k: int, slot: int, local: int, at: Any, lane: int | None = None
    ) -> int:
        """A copy or matrix instruction issued by row's warp reads units `at` through the async proxy."""
        u, first, _, known = self._issued(g, row, lane, at)
        self._after_write(rt, g, k, u, first, known, "reads")
        self._check_proxy(rt, g, row, k, at, "read")
        agent = self.agent(slot, local)
        clock = self.clock[slot, local]
        clock[:, agent] += 1
        self.read_clock[at, self.holder(slot, local)] = clock[0, agent]
        return int(clock[0, agent])

    def _check_proxy(self, rt: Access, g: Gang, row: int, k: int, at: Any, done: str) -> None:
        """Ordinary stores to units `at` must have passed a proxy fence that the issuer knows of."""
        fenced = self.clock[int(g.cta[row, 0]), int(g.warps[row]) % self.wpc, 1]
        writer = self.writer[at]
        hidden = (writer % self.span < self.threads) & (self.write_clock[at] > fenced[writer])
        if hidden.any():
            first = int(np.argmax(hidden))
            address = int(at[first] % self.units) * self.unit
            detail = (
                f"shared address {address:#x}, stored by {self.describe(int(writer[first]))}, is {done} by the async "
                "proxy without fence.proxy.async after the store"
            )
            rt.fail(ProxyFault, detail, g, k)
