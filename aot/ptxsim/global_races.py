"""Data races in global memory: between threads of a CTA, and between CTAs of one launch.

Every unit remembers its last write, and its last read by each of a few groups of CTAs. Two accesses race where one of
them writes, nothing orders them (clocks.py within a cluster, global_order.py beyond) and not both are strong. What a
launch finds in memory was there before it: launches follow each other (dependent.py checks those that may overlap).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.clocks import ASYNC_AGENTS
from cubinery.aot.ptxsim.faults import LaunchFault, ProxyFault, RaceFault
from cubinery.aot.ptxsim.global_order import GlobalOrder
from cubinery.aot.ptxsim.isa.base import Instr
from cubinery.aot.ptxsim.memory import Allocation
from cubinery.aot.ptxsim.memory_order import GPU, Order, order_of
from cubinery.aot.ptxsim.races import Races
from cubinery.aot.ptxsim.state import LANES, Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.fences import Fences as Access

READ, WRITE, UPDATE = "reads", "writes", "updates"
_READERS = 4
"""Readers kept of each unit: the last of the CTAs with the same remainder."""
_CLOCK, _THREAD, _WIDE, _STRONG, _CTA = 0, 26, 37, 38, 39
"""Bits of a recorded access: its clock, thread, whether it is strong and for the whole GPU, and its CTA plus 1."""
_WARP = _THREAD + 5
_WEAK = Order(False, False, False, GPU)
Array = Any


@dataclass(slots=True)
class _Shadow:
    """Who touched an allocation; int64 a unit."""

    allocation: Allocation
    writer: Array
    readers: Array
    """(units, readers)."""
    written: bool = False


@dataclass(slots=True)
class _Lanes:
    """Units that lanes touch, flat, and who the rows are."""

    at: Array
    rows: Array
    lanes: Array
    slot: Array
    """By row, as the next three."""
    warp: Array
    cta: Array
    now: Array
    data: Callable[[], Array] | None = None
    """The bytes (units, unit) that are stored."""
    bulk: int | None = None
    """Not the lanes access the units, but the bulk copies of their warp: the thread that stands for those."""


class GlobalRaces:
    """The accesses of one launch to global memory."""

    def __init__(self, races: Races, instrs: list[Instr], grid: tuple[int, int, int]) -> None:
        if grid[0] * grid[1] * grid[2] >= 1 << 62 - _CTA:
            raise LaunchFault(f"a grid of {grid} is too large for the race check: switch the checks off")
        self.races, self.grid = races, grid
        self.order = GlobalOrder(races)
        self.unit = min((_width(instr) for instr in instrs), default=4)
        """Bytes that are told apart."""
        self._orders: dict[int, Order] = {}
        self._shadows: dict[int, _Shadow] = {}
        self._strides = np.array([1, grid[0], grid[0] * grid[1]])

    def _shadow(self, found: Allocation) -> _Shadow:
        shadow = self._shadows.get(found.base)
        if shadow is None or shadow.allocation.size != found.size or shadow.allocation.origin != found.origin:
            units = len(found.block.data) // self.unit
            shadow = _Shadow(found, np.zeros(units, np.int64), np.zeros((units, _READERS), np.int64))
            self._shadows[found.base] = shadow
        return shadow

    def _ids(self, rt: Access) -> Array:
        """The grid's CTA in each slot."""
        return rt.block_index @ self._strides

    # -- accesses of lanes ---------------------------------------------------------------------

    def access(
        self, rt: Access, g: Gang, k: int, found: Allocation, index: Array, inside: Array, size: int, does: str,
        values: tuple[Array, ...] = (),
    ) -> None:  # fmt: skip
        """Lanes `inside` (W, 32) read, write or update `size` bytes from byte `index` (W, 32) of an allocation.

        `values` are what a write stores, (W, 32) each: who stores what is there already does not race with its writer.
        """
        order = self._orders.get(k)
        if order is None:
            order = self._orders[k] = order_of(rt.kernel.instrs[k])
        rows, lanes = np.nonzero(inside)
        if not len(rows):
            return
        start = index[rows, lanes]
        ids, shadow = self._ids(rt), self._shadow(found)
        slot, warp = g.cta[:, 0], g.warps % rt.wpc
        at, count = start // self.unit, -(-size // self.unit)
        units, owners, places = at, rows, lanes
        if count > 1:
            units = (at[:, None] + np.arange(count)).ravel()
            owners, places = rows.repeat(count), lanes.repeat(count)
        u = _Lanes(units, owners, places, slot, warp, ids[slot], self.races.now[slot, warp])
        if values:
            u.data = partial(_units, self.unit, tuple(np.broadcast_to(v, inside.shape)[inside] for v in values))
        self._check(rt, g, k, shadow, u, ids, order, does)
        self._record(rt, g, k, shadow, u, order, does)
        if order.strong:
            self._synchronise(rt, found, start, rows, lanes, u, order, does, ids)
        elif does == WRITE and self.order.objects:
            self.order.weak_write([(found.base, i) for i in start.tolist()])

    def _check(
        self, rt: Access, g: Gang, k: int, shadow: _Shadow, u: _Lanes, ids: Array, order: Order, does: str
    ) -> None:
        if shadow.written:
            writer = shadow.writer.take(u.at)
            if writer.any():
                if order.constant:
                    self._report(rt, g, k, shadow, u, writer != 0, "reads by ld.global.nc", "written", writer)
                self._late(rt, g, k, shadow, u, ids, order, does, "written", writer)
        if does != READ:
            readers = shadow.readers.take(u.at, axis=0)
            for i in range(_READERS):
                if readers[:, i].any():
                    self._late(rt, g, k, shadow, u, ids, order, does, "read", readers[:, i])

    def _late(
        self, rt: Access, g: Gang, k: int, shadow: _Shadow, u: _Lanes, ids: Array, order: Order, does: str,
        done: str, codes: Array,
    ) -> None:  # fmt: skip
        """Report accesses (`codes`) that a lane does not know of, other than its own."""
        late = codes != 0
        cta, thread = (codes >> _CTA) - 1, codes >> _THREAD & 0x7FF
        own = cta == u.cta.take(u.rows)
        warp = u.warp.take(u.rows)
        late &= ~(own & (thread == (u.lanes + warp * LANES if u.bulk is None else u.bulk)))
        if order.strong:
            late &= ~((codes >> _STRONG & 1 == 1) & (own | ((codes >> _WIDE & 1 == 1) & (order.level >= GPU))))
        if not late.any():
            return
        which = np.flatnonzero(late)
        unknown = ~self._known(u.slot[u.rows[which]], u.warp[u.rows[which]], ids, codes[which])
        if unknown.any():
            late[which] = unknown
            if does == WRITE and done == "written" and u.data is not None:
                late &= (u.data() != shadow.allocation.block.data.reshape(-1, self.unit)[u.at]).any(axis=1)
                if not late.any():
                    return
            self._report(rt, g, k, shadow, u, late, does, done, codes)

    def _known(self, slot: Array, warp: Array, ids: Array, codes: Array, plane: int = 0) -> Array:
        """Does each warp know of an access?"""
        races = self.races
        cta, thread, clock = (codes >> _CTA) - 1, codes >> _THREAD & 0x7FF, codes & (1 << _THREAD) - 1
        known = np.zeros(len(codes), bool)
        near = np.zeros(len(codes), bool)
        for rank in range(races.cluster):
            here = ids[races.base[slot] + rank] == cta
            near |= here
            known |= here & (races.clock[slot, warp, plane, rank * races.span + thread] >= clock)
        if not near.all():
            far = np.flatnonzero(~near)
            pairs, inverse = np.unique(
                np.stack((slot[far], warp[far], cta[far]), axis=1), axis=0, return_inverse=True
            )  # fmt: skip
            for i, (at, by, who) in enumerate(pairs.tolist()):
                learned = self.order.foreign(races.clock[at, by, plane], at).get(who)
                if learned is not None:
                    these = far[inverse.ravel() == i]
                    known[these] = learned[thread[these]] >= clock[these]
        return known

    def _record(self, rt: Access, g: Gang, k: int, shadow: _Shadow, u: _Lanes, order: Order, does: str) -> None:
        flags = (order.strong << _STRONG) | ((order.strong and order.level >= GPU) << _WIDE)
        mine = (u.cta + 1 << _CTA) | (u.warp * LANES << _THREAD) | u.now | flags
        codes = mine.take(u.rows) + (u.lanes << _THREAD)
        if does == READ:
            shadow.readers.reshape(-1)[u.at * _READERS + (u.cta % _READERS).take(u.rows)] = codes
            return
        shadow.written = True
        shadow.writer[u.at] = codes
        if not order.strong and len(g) > 1:  # of the lanes of one warp that write the same, one is the last
            last = shadow.writer.take(u.at)
            other = last >> _WARP != codes >> _WARP
            if other.any() and u.data is not None:
                data, (places, first) = u.data(), np.unique(u.at[::-1], return_index=True)
                winner = len(u.at) - 1 - first[np.searchsorted(places, u.at)]
                other &= (data != data[winner]).any(axis=1)
            if other.any():
                self._report(rt, g, k, shadow, u, other, does, "written", last)

    def _synchronise(
        self, rt: Access, found: Allocation, start: Array, rows: Array, lanes: Array, u: _Lanes, order: Order,
        does: str, ids: Array,
    ) -> None:  # fmt: skip
        relaxed = not (order.acquires or order.releases)
        if relaxed and not self.order.objects and not any(
            slot * rt.wpc + warp in rt.fence_clocks for slot, warp in zip(u.slot.tolist(), u.warp.tolist(), strict=True)
        ):  # fmt: skip
            return
        for at, row, lane in zip(start.tolist(), rows.tolist(), lanes.tolist(), strict=True):
            address, slot, warp = (found.base, at), int(u.slot[row]), int(u.warp[row])
            if does != WRITE:
                self.order.read(address, order, slot, warp, lane, ids)
            if does != READ:
                self.order.write(rt, address, order, slot, warp, lane, ids, does == UPDATE)

    def acquire(self, rt: Access, slot: int, warp: int, lanes: Array, level: int) -> None:
        """A fence: what relaxed reads of these lanes found is acquired."""
        if self.order.pending:
            self.order.fence(slot, warp, lanes, level, self._ids(rt))

    # -- the async proxy -----------------------------------------------------------------------

    def written(self, found: Allocation) -> bool:
        """Has the launch written anything of an allocation?"""
        shadow = self._shadows.get(found.base)
        return shadow is not None and shadow.written

    def copy_reads(
        self, rt: Access, g: Gang, row: int, lane: int, k: int, found: Allocation, starts: Array, size: int
    ) -> None:
        """A copy issued by a lane reads `size` bytes from each of `starts` by the async proxy."""
        shadow = self._shadows.get(found.base)
        if shadow is None or not shadow.written:
            return
        u = self._issued(rt, g, row, lane, starts, size)
        writer = shadow.writer.take(u.at)
        if not writer.any():
            return
        ids = self._ids(rt)
        self._late(rt, g, k, shadow, u, ids, _WEAK, "copies", "written", writer)
        stored = np.flatnonzero((writer != 0) & (writer >> _THREAD & 0x7FF < self.races.threads))
        slot, warp = u.slot[u.rows[stored]], u.warp[u.rows[stored]]
        hidden = ~self._known(slot, warp, ids, writer[stored], plane=1)
        if hidden.any():
            at = int(u.at[stored[int(np.argmax(hidden))]])
            detail = f"copies {self._where(shadow, at)} by the async proxy without fence.proxy.async after the store"
            rt.fail(ProxyFault, detail, g, k, _lane(g, row, lane))

    def copy_writes(
        self,
        rt: Access,
        g: Gang,
        row: int,
        lane: int,
        k: int,
        found: Allocation,
        starts: Array,
        size: int,
        combines: bool,
    ) -> tuple[int, int]:
        """A bulk copy issued by a lane writes there; returns what its end publishes: column, clock."""
        races = self.races
        shadow, ids = self._shadow(found), self._ids(rt)
        u = self._issued(rt, g, row, lane, starts, size)
        order = Order(combines, False, False, GPU)
        u.bulk = races.threads + ASYNC_AGENTS + int(u.warp[row])
        self._check(rt, g, k, shadow, u, ids, order, UPDATE if combines else WRITE)
        slot, warp = int(u.slot[row]), int(u.warp[row])
        column = races.bulk_column(slot, warp)
        clock = races.bulk[slot, warp] = int(races.bulk[slot, warp]) + 1
        flags = (combines << _STRONG) | (combines << _WIDE)
        shadow.written = True
        shadow.writer[u.at] = (int(ids[slot]) + 1 << _CTA) | (u.bulk << _THREAD) | clock | flags
        return column, clock

    def _issued(self, rt: Access, g: Gang, row: int, lane: int, starts: Array, size: int) -> _Lanes:
        slot, warp = g.cta[:, 0], g.warps % rt.wpc
        at = ((starts // self.unit)[:, None] + np.arange(-(-size // self.unit))).ravel()
        rows, lanes = np.full(len(at), row), np.full(len(at), lane)
        return _Lanes(at, rows, lanes, slot, warp, self._ids(rt)[slot], self.races.now[slot, warp])

    # -- reports -------------------------------------------------------------------------------

    def _where(self, shadow: _Shadow, at: int) -> str:
        found = shadow.allocation
        return f"{found.name} + {at * self.unit + found.origin - found.base:#x}"

    def _report(
        self, rt: Access, g: Gang, k: int, shadow: _Shadow, u: _Lanes, late: Array, does: str, done: str, codes: Array
    ) -> NoReturn:
        first = int(np.argmax(late))
        code, row = int(codes[first]), int(u.rows[first])
        cta, thread = (code >> _CTA) - 1, code >> _THREAD & 0x7FF
        x, y, _ = self.grid
        block = (cta % x, cta // x % y, cta // (x * y))
        who = f"a bulk copy of warp {thread - self.races.threads - ASYNC_AGENTS}"
        if thread < self.races.threads:
            who = f"warp {thread // LANES}, lane {thread % LANES}"
        detail = (
            f"{does} {self._where(shadow, int(u.at[first]))}, {done} by {who} of block {block}, "
            "with nothing that orders the two"
        )
        if does.endswith("nc"):
            detail = f"{detail.rpartition(', ')[0]}: it is for memory that nothing writes during the launch"
        rt.fail(RaceFault, detail, g, k, _lane(g, row, int(u.lanes[first])))


def _lane(g: Gang, row: int, lane: int) -> Array:
    where = np.zeros((len(g), LANES), bool)
    where[row, lane] = True
    return where


def _width(instr: Instr) -> int:
    """Bytes of the narrowest access to global memory that an instruction makes, at most 4."""
    if instr.opcode not in ("ld", "st", "atom", "red", "cp"):
        return 4
    words = set(instr.modifiers)
    if words & {"shared", "shared::cta", "shared::cluster", "param", "const", "local", "param::entry"}:
        return 4
    if words & {"b8", "u8", "s8"}:
        return 1
    return 2 if words & {"b16", "u16", "s16", "f16", "bf16"} else 4


def _units(unit: int, values: tuple[Array, ...]) -> Array:
    """Elements (n,) that n lanes store one after the other, as bytes (n * units, unit)."""
    return np.ascontiguousarray(np.stack(values, axis=-1)).view(np.uint8).reshape(-1, unit)
