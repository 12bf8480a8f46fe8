"""Order of accesses to tensor memory, by the vector clocks of clocks.py.

Units are 16 lanes x 1 column. A warp's loads and stores, and the pipe of a CTA, are agents; within an agent the order
of issue holds. A store counts until its wait::st, when its clock is set anew; meeting a store before its wait is a
fault by itself. A load counts until its wait::ld, and accesses by different threads need a tcgen05.fence on each side
of what orders them; some generated code leaves both out, which a machine can be told to let pass (`Checks`). Loads and
stores are the whole warp's, so what any of its lanes publishes covers them. Freeing columns counts as a write
of all of them, so that a warp which frees what others still use is reported whatever the schedule.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.clocks import TENSOR
from cubinery.aot.ptxsim.faults import RaceFault, TensorMemoryFault
from cubinery.aot.ptxsim.isa.tensor_memory import COLUMNS, LANES, AccessForm, cells, split
from cubinery.aot.ptxsim.races import Races
from cubinery.aot.ptxsim.state import LANES as WARP
from cubinery.aot.ptxsim.state import Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.access import Access

Array = Any
GROUP = 16
"""Lanes of a unit."""
UNITS = LANES // GROUP * COLUMNS
"""Units of a CTA's tensor memory."""
NOBODY = -1
FREES = "frees"
UNDER_WAY = np.iinfo(np.int32).max
"""The clock of a load that nobody waited for yet."""


@lru_cache(maxsize=256)
def access_units(form: AccessForm) -> Array:
    """Units that a load or store touches, relative to that of its address."""
    cell = cells(form)
    return np.unique(cell // COLUMNS // GROUP * COLUMNS + cell % COLUMNS)


def address_unit(address: int) -> int:
    """The unit of an address."""
    lane, column = split(address)
    return lane // GROUP * COLUMNS + column


def area_units(lanes: Array, first: int, last: int) -> Array:
    """Units of `lanes` (any shape) in columns [first, last)."""
    return (np.unique(lanes // GROUP)[:, None] * COLUMNS + np.arange(first, last)).ravel()


class TensorOrder:
    """Who touched which units last, and when."""

    def __init__(self, races: Races, slots: int) -> None:
        self.races = races
        self.strict = races.tensor_fences
        """Order takes tcgen05.fence, and loads take their time until wait::ld (Checks.tensor_fences)."""
        self.writer = np.full(slots * UNITS, NOBODY, np.int16)
        self.write_clock = np.zeros(slots * UNITS, np.int32)
        self.read_clock = np.zeros((slots * UNITS, races.cluster * races.holders), np.int32)
        self.storing: dict[int, list[Array]] = {}
        """Units that a warp stored since its last wait::st."""
        self.loading: dict[int, list[Array]] = {}
        """Units that a warp loaded since its last wait::ld."""

    def reset(self, slot: int) -> None:
        """A new CTA in a slot."""
        span, wpc = slice(slot * UNITS, (slot + 1) * UNITS), self.races.wpc
        self.writer[span] = NOBODY
        self.write_clock[span] = self.read_clock[span] = 0
        for warp in range(slot * wpc, (slot + 1) * wpc):
            self.storing.pop(warp, None)
            self.loading.pop(warp, None)

    # -- warps ---------------------------------------------------------------------------------

    def load(self, rt: Access, g: Gang, row: int, k: int, slot: int, units: Array) -> None:
        """tcgen05.ld by row's warp."""
        at, agent, own = self._begin(rt, g, row, k, slot, units, "loads")
        self._written_before(rt, g, row, k, at, "loads", agent)
        self.read_clock[at, agent] = UNDER_WAY if self.strict else own
        self.loading.setdefault(int(g.warps[row]), []).append(at)

    def store(self, rt: Access, g: Gang, row: int, k: int, slot: int, units: Array) -> None:
        """tcgen05.st by row's warp."""
        at, agent, own = self._begin(rt, g, row, k, slot, units, "stores over", own=False)
        self._untouched(rt, g, row, k, at, "stores over", agent)
        self.writer[at], self.write_clock[at] = agent, own
        self.storing.setdefault(int(g.warps[row]), []).append(at)

    def free(self, rt: Access, g: Gang, row: int, k: int, slot: int, units: Array) -> None:
        """tcgen05.dealloc by row's warp."""
        at, agent, _ = self._begin(rt, g, row, k, slot, units, FREES)
        self._untouched(rt, g, row, k, at, FREES, agent)
        self.writer[at] = NOBODY  # whoever is given the columns next comes after
        self.write_clock[at] = self.read_clock[at] = 0

    def stores_done(self, warp: int) -> None:
        """wait::st: the stores count as made now."""
        slot, local = divmod(warp, self.races.wpc)
        agent = self.races.holder(slot, local)
        for at in self.storing.pop(warp, ()):
            self.write_clock[at[self.writer[at] == agent]] = self.races.now[slot, local]

    def loads_done(self, warp: int) -> None:
        """wait::ld: the loads count as made now."""
        slot, local = divmod(warp, self.races.wpc)
        agent = self.races.holder(slot, local)
        for at in self.loading.pop(warp, ()):
            self.read_clock[at, agent] = np.minimum(self.read_clock[at, agent], self.races.now[slot, local])

    # -- the pipe ------------------------------------------------------------------------------

    def pipe(
        self, rt: Access, g: Gang, row: int, k: int, pipe: tuple[int, int], slot: int, units: Array, *, writes: bool
    ) -> tuple[int, int]:
        """Work that row's warp gives to a pipe (CTA slot, local agent) touches units of CTA `slot`.

        Returns (column, clock), which the next commit publishes.
        """
        at, _, _ = self._begin(rt, g, row, k, slot, units, "uses")
        agent, column = self.races.holder(*pipe), self.races.agent(*pipe)
        if writes:
            self._untouched(rt, g, row, k, at, "overwrites", agent)
        else:
            self._written_before(rt, g, row, k, at, "reads", agent)
        clock = self.races.clock[pipe]
        clock[:, column] += 1
        if writes:
            self.writer[at], self.write_clock[at] = agent, clock[0, column]
        else:
            self.read_clock[at, agent] = clock[0, column]
        return column, int(clock[0, column])

    # -- checks --------------------------------------------------------------------------------

    def _begin(
        self, rt: Access, g: Gang, row: int, k: int, slot: int, units: Array, does: str, own: bool = True
    ) -> tuple[Array, int, int]:
        """(indices of the units, row's agent, its clock). Nothing there may be a store that nobody waited for."""
        at = slot * UNITS + units
        mine = int(g.warps[row])
        for warp, stored in self.storing.items():
            if stored and (own or warp != mine) and any(np.isin(at, part).any() for part in stored):
                who = self._name(self.races.holder(*divmod(warp, self.races.wpc)))
                detail = f"{does} tensor memory that {who} stores to, before its tcgen05.wait::st"
                rt.fail(TensorMemoryFault, detail, g, k, _row(g, row))
        cta, local = divmod(mine, self.races.wpc)
        return at, self.races.holder(cta, local), int(self.races.now[cta, local])

    def _known(self, g: Gang, row: int, plane: int = 0) -> Array:
        """What row's warp knows of each holder; of itself everything."""
        cta, local = divmod(int(g.warps[row]), self.races.wpc)
        known = self.races.by_holder(self.races.clock[cta, local, plane], np.maximum)
        known[self.races.holder(cta, local)] = self.races.now[cta, local]
        return known

    def _name(self, holder: int) -> str:
        races = self.races
        rank, local = divmod(holder, races.holders)
        if local >= races.wpc:
            return "the tensor core" + ("" if races.cluster == 1 else f" of CTA {rank} of the cluster")
        return races.describe(rank * races.span + local * WARP)

    def _written_before(self, rt: Access, g: Gang, row: int, k: int, at: Array, does: str, agent: int) -> None:
        writer = self.writer[at]
        late = (writer != NOBODY) & (writer != agent) & (self.write_clock[at] > self._known(g, row)[writer])
        if late.any():
            self._report(rt, g, row, k, at, does, "written", writer, late)
        if self.strict and does != FREES:
            late = (writer != NOBODY) & (writer != agent) & (self.write_clock[at] > self._known(g, row, TENSOR)[writer])
            if late.any():
                self._report(rt, g, row, k, at, does, "written", writer, late, "without tcgen05.fence on both sides")

    def _untouched(self, rt: Access, g: Gang, row: int, k: int, at: Array, does: str, agent: int) -> None:
        """All earlier accesses by others are known to row's warp."""
        self._written_before(rt, g, row, k, at, does, agent)
        reads = self.read_clock[at] > self._known(g, row)
        reads[:, agent] = False
        if reads.any():
            late, by = reads.any(axis=1), reads.argmax(axis=1)
            waits = self.read_clock[at, by] == UNDER_WAY
            done = "loaded" if waits[int(np.argmax(late))] else "read"
            self._report(rt, g, row, k, at, does, done, by, late)
        if self.strict and does != FREES:
            reads = self.read_clock[at] > self._known(g, row, TENSOR)
            reads[:, agent] = False
            if reads.any():
                late, by = reads.any(axis=1), reads.argmax(axis=1)
                self._report(rt, g, row, k, at, does, "read", by, late, "without tcgen05.fence on both sides")

    def _report(
        self, rt: Access, g: Gang, row: int, k: int, at: Array, does: str, done: str, by: Array, late: Array,
        missing: str = "with nothing that orders the two",
    ) -> NoReturn:  # fmt: skip
        first = int(np.argmax(late))
        slot, unit = divmod(int(at[first]), UNITS)
        lane, column = unit // COLUMNS * GROUP, unit % COLUMNS
        agent = int(by[first])
        block = tuple(rt.block_index[slot].tolist())
        if done == "loaded":
            missing = "before its tcgen05.wait::ld"
        detail = (
            f"{does} tensor memory of block {block}, lanes {lane} to {lane + GROUP - 1}, column {column}, "
            f"{done} by {self._name(agent)}, {missing}"
        )
        rt.fail(RaceFault, detail, g, k, _row(g, row))


def _row(g: Gang, row: int) -> Array:
    lanes = np.zeros_like(g.lanes())
    lanes[row] = g.lanes()[row]
    return lanes
