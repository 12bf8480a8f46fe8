"""The tensor core of Blackwell in the machine: tensor memory, its pipe and its waits (PTX ISA 9.7.16).

The pipe. tcgen05.mma, cp, shift and commit of a CTA (with cta_group::2 of its pair) happen in the order of issue, at
any time: each waits in its pipe until the schedule lets the pipe take one step. tcgen05.st waits the same way in a
queue of its warp until wait::st asks for it. tcgen05.ld reads at once, and so finds what an MMA that nobody waited for
has not written yet: such reads are faults, as are cells never written and columns not allocated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import BarrierFault, Fault, TensorMemoryFault, UninitialisedFault
from cubinery.aot.ptxsim.isa import descriptors, instruction_descriptors, tcgen05, tensor_memory
from cubinery.aot.ptxsim.isa.base import Address
from cubinery.aot.ptxsim.isa.tcgen05_forms import Access, Copy, Mma
from cubinery.aot.ptxsim.memory import POISON, SHARED_BASE
from cubinery.aot.ptxsim.races import PIPE
from cubinery.aot.ptxsim.state import LANES, Gang, spread
from cubinery.aot.ptxsim.tensor_order import TensorOrder, access_units, address_unit, area_units
from cubinery.aot.ptxsim.warpgroup import Warpgroup

_PIPE, _STORES = 1 << 24, 1 << 25
"""Where queue numbers of pipes and of warps' stores begin, apart from those of bulk copies."""
ST = "tcgen05.st"
"""Kind of the groups (groups.py) in which stores to tensor memory are waited for."""


@dataclass(slots=True)
class Step:
    """One operation in a pipe or queue."""

    run: Callable[[], None]
    slots: tuple[int, ...] = ()
    writes: tuple[int, int] = (0, 0)
    """First and last + 1 column of tensor memory that it writes."""
    lanes: tuple[int, int] = (0, tensor_memory.LANES)
    """First and last + 1 lane."""
    line: int = 0


@dataclass(slots=True)
class Waiting:
    """An alloc that waits for columns."""

    slots: tuple[int, ...]
    columns: int
    go: Callable[[int], None]


@dataclass(slots=True)
class TensorState:
    """Tensor memory of all resident CTAs."""

    cells: Any
    """uint32 (slots, 128, 512)."""
    written: Any
    """bool like cells."""
    allocators: list[tensor_memory.Allocator]
    pipes: dict[int, deque[Step]] = field(default_factory=dict)
    """By queue number."""
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    """What the steps of a pipe have read: agent to clock, published by the next commit."""
    waiting: list[Waiting] = field(default_factory=list)
    order: TensorOrder | None = None
    """None where races are not looked for."""


class TensorCore(Warpgroup):
    """tcgen05 as generated code sees it. Machine derives from this."""

    tensor: TensorState | None = None
    tensor_columns: int = tensor_memory.COLUMNS
    """Columns that a CTA of this launch may allocate."""

    # -- state ---------------------------------------------------------------------------------

    def _tensor(self) -> TensorState:
        if self.tensor is None:
            count = len(self.block_index)
            shape = (count, tensor_memory.LANES, tensor_memory.COLUMNS)
            cells = np.full(shape, POISON * 0x01010101, np.uint32)
            allocators = [tensor_memory.Allocator(declared=self.tensor_columns) for _ in range(count)]
            self.tensor = TensorState(cells, np.zeros(shape, bool), allocators)
            if self.races is not None:
                self.tensor.order = TensorOrder(self.races, count)
        return self.tensor

    def tensor_exit(self, slot: int) -> None:
        """A CTA has exited: it must have freed what it allocated. Its tensor memory becomes unwritten again."""
        state = self.tensor
        if state is None:
            return
        if leaked := state.allocators[slot].leaked():
            block = tuple(self.block_index[slot].tolist())
            detail = f"block {block} exits with tensor memory allocated: {leaked}"
            raise TensorMemoryFault(detail, self.place(None, len(self.kernel.instrs) - 1))
        state.allocators[slot] = tensor_memory.Allocator(declared=self.tensor_columns)
        state.cells[slot] = POISON * 0x01010101
        state.written[slot] = False
        if state.order is not None:
            state.order.reset(slot)

    def _group(self, slot: int, group: int) -> tuple[int, ...]:
        """CTA slots that an instruction of a CTA concerns, the even rank first."""
        if group == 1:
            return (slot,)
        first = slot - int(self.rank[slot]) % 2
        if self.cluster_size % 2:
            raise TensorMemoryFault("cta_group::2 in a cluster of an odd number of CTAs")
        return (first, first + 1)

    def _each(self, g: Gang, mask: Any) -> list[tuple[int, int]]:
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        return [(int(row), int(lane)) for row, lane in np.argwhere(active)]

    def _push(self, queue: int, slot: int, step: Step) -> None:
        """Enter a step; whenever the schedule lands one of a queue, the oldest of that queue runs."""
        pipe = self._tensor().pipes.setdefault(queue, deque())
        pipe.append(step)

        def land() -> None:
            pipe[0].run()
            pipe.popleft()

        self.issue(queue, slot, land)

    def _columns(self, g: Gang, k: int, slot: int, first: int, last: int, what: str) -> None:
        """Columns that an instruction touches are allocated."""
        try:
            self._tensor().allocators[slot].require(first, last, what)
        except Fault as error:
            self.fail(type(error), error.detail, g, k)

    def _settled(
        self, g: Gang, k: int, slot: int, first: int, last: int, order: int = -1,
        lanes: tuple[int, int] = (0, tensor_memory.LANES),
    ) -> None:  # fmt: skip
        """Nothing that writes these columns and lanes is under way, but in queue `order`, where order takes care."""
        for queue, pipe in self._tensor().pipes.items():
            for step in pipe if queue != order else ():
                beside = step.lanes[0] >= lanes[1] or lanes[0] >= step.lanes[1]
                if slot in step.slots and step.writes[0] < last and first < step.writes[1] and not beside:
                    missing = "tcgen05.wait::st" if queue >= _STORES else "a wait for its commit"
                    where = f"columns {first} to {last - 1} while line {step.line} may still write them"
                    detail = f"{where}: {missing} is missing"
                    self.fail(TensorMemoryFault, detail, g, k)

    # -- allocation ----------------------------------------------------------------------------

    def tensor_alloc(self, g: Gang, k: int, then: int, address: Any, columns: Any) -> None:
        """tcgen05.alloc: wait for columns, write their address to shared memory."""
        parked = self.park(g, then, k, "columns of tensor memory")
        address, columns = spread(address, len(g)), spread(columns, len(g))
        for row in range(len(g)):
            lane = int(g.lanes()[row].argmax())
            index = self.shared_index(g, None, k, address, 4)
            place = int(spread(index, len(g))[row, lane])

            def go(found: int, row: int = row, place: int = place) -> None:
                if self.races is not None:
                    self.races.write(self, g.rows([row]), _first_lane(1), k, np.full((1, 1), place), 4)
                    self.races.converge(g.rows([row]), None)  # the address is for the whole warp, which executes it
                self.shared.block.store(np.array([place]), 4, (np.uint32(found),))
                self.release(parked, row)

            waiting = Waiting((int(g.cta[row, 0]),), int(columns[row, lane]), go)
            self._tensor().waiting.append(waiting)
        self._allocate(g, k)

    def _allocate(self, g: Gang, k: int) -> None:
        """Give columns to who waits for them, first come first served in each CTA."""
        state = self._tensor()
        blocked: set[int] = set()
        for waiting in list(state.waiting):
            (slot,) = waiting.slots
            try:
                found = None if slot in blocked else state.allocators[slot].alloc(waiting.columns)
            except Fault as error:
                self.fail(type(error), error.detail, g, k)
            if found is None:
                blocked.add(slot)
            else:
                state.waiting.remove(waiting)
                waiting.go(found)

    def tensor_dealloc(self, g: Gang, mask: Any, k: int, address: Any, columns: Any) -> None:
        """tcgen05.dealloc: by one warp of each CTA; nothing may still write there."""
        address, columns = spread(address, len(g)), spread(columns, len(g))
        for row in _rows(g, mask):
            slot, at, count = int(g.cta[row, 0]), int(address[row, 0]), int(columns[row, 0])
            self._settled(g, k, slot, at & 0xFFFF, (at & 0xFFFF) + count)
            if (order := self._tensor().order) is not None:
                area = area_units(np.arange(tensor_memory.LANES), at & 0xFFFF, (at & 0xFFFF) + count)
                order.free(self, g, row, k, slot, area)
            try:
                self._tensor().allocators[slot].dealloc(at, count)
            except Fault as error:
                self.fail(type(error), error.detail, g, k)
            self._tensor().written[slot, :, at & 0xFFFF : (at & 0xFFFF) + count] = False
        self._allocate(g, k)

    def tensor_relinquish(self, g: Gang, mask: Any) -> None:
        """tcgen05.relinquish_alloc_permit."""
        for row in _rows(g, mask):
            self._tensor().allocators[int(g.cta[row, 0])].relinquish()

    # -- loads and stores ----------------------------------------------------------------------

    def _bases(self, g: Gang, mask: Any, k: int, form: Access, address: Any) -> Any:
        """Cell of each row's address, checked. A warp's own stores follow each other in order."""
        address = spread(address, len(g))
        bases = np.zeros(len(g), np.int64)
        for row in _rows(g, mask):
            slot, at = int(g.cta[row, 0]), int(address[row, 0])
            try:
                lane, column = tensor_memory.check_access(form.form, at, int(g.warps[row]) % self.wpc)
            except Fault as error:
                self.fail(type(error), error.detail, g, k)
            self._columns(g, k, slot, column, column + form.form.columns, form.form.shape)
            own = _STORES + int(g.warps[row]) if form.store else -1
            self._settled(g, k, slot, column, column + form.form.columns, own, (lane, lane + form.form.lanes))
            bases[row] = slot * tensor_memory.CELLS + lane * tensor_memory.COLUMNS + column
        return bases

    def _ordered(self, g: Gang, mask: Any, k: int, form: Access, bases: Any) -> None:
        """Loads and stores come in order with what others do to the same cells."""
        order = self._tensor().order
        for row in _rows(g, mask) if order is not None else ():
            assert order is not None
            slot, cell = divmod(int(bases[row]), tensor_memory.CELLS)
            lane, column = divmod(cell, tensor_memory.COLUMNS)
            enter = order.store if form.store else order.load
            enter(self, g, row, k, slot, access_units(form.form) + address_unit(lane << 16 | column))

    def tensor_ld(self, g: Gang, mask: Any, k: int, form: Access, address: Any) -> list[Any]:
        """tcgen05.ld and ld.red: the registers, then the reduced value where there is one."""
        self._whole_warps(g, mask, k)
        state, bases = self._tensor(), self._bases(g, mask, k, form, address)
        self._ordered(g, mask, k, form, bases)
        where = bases[:, None, None, None] + tensor_memory.cells(form.form)
        if self.uninitialised and not state.written.reshape(-1).take(where).all():
            self.fail(UninitialisedFault, "tensor memory that nothing wrote", g, k)
        registers = tensor_memory.load(state.cells.reshape(-1), bases, form.form)
        found = list(registers.transpose(1, 0, 2))
        if form.reduction:
            found.append(tensor_memory.reduce_registers(registers, form.reduction, form.type, form.absolute, form.nan))
        return found

    def tensor_st(self, g: Gang, mask: Any, k: int, form: Access, address: Any, values: tuple[Any, ...]) -> None:
        """tcgen05.st: lands at the latest at the warp's wait::st."""
        self._whole_warps(g, mask, k)
        state, bases = self._tensor(), self._bases(g, mask, k, form, address)
        self._ordered(g, mask, k, form, bases)
        registers = np.stack([spread(v, len(g)) for v in values], axis=1)
        for row in _rows(g, mask):
            warp, slot = int(g.warps[row]), int(g.cta[row, 0])
            base = bases[row : row + 1]
            done = self.groups.add((ST, warp), None)

            def run(base: Any = base, row: int = row, done: Callable[[], None] = done) -> None:
                tensor_memory.store(state.cells.reshape(-1), base, form.form, registers[row : row + 1])
                state.written.reshape(-1)[base[:, None, None, None] + tensor_memory.cells(form.form)] = True
                done()

            lane, column = divmod(int(base[0]) % tensor_memory.CELLS, tensor_memory.COLUMNS)
            lanes = (lane, lane + form.form.lanes)
            step = Step(run, (slot,), (column, column + form.form.columns), lanes, self.kernel.instrs[k].line)
            self._push(_STORES + warp, slot, step)

    def tensor_fence(self, g: Gang, mask: Any, before: bool) -> None:
        """tcgen05.fence: for the order of accesses by different threads."""
        if self.races is not None and self.races.tensor_fences:
            self.races.tensor_fence(g, mask, before)

    def tensor_misuse(self, g: Gang, mask: Any, k: int, detail: str) -> None:
        """An instruction that tensor_registers.py found to be wrong is executed."""
        if self.races is not None and self.races.tensor_fences and (mask is None or mask.any()):
            self.fail(TensorMemoryFault, detail, g, k)

    def tensor_wait(self, g: Gang, k: int, then: int, what: str) -> None:
        """wait::ld has nothing to wait for here; wait::st waits for the warp's stores."""
        order = self._tensor().order
        if what == "wait::ld":
            for warp in g.warps.tolist() if order is not None else ():
                assert order is not None
                order.loads_done(warp)
            self.go_on(g, then)
            return
        if order is not None:
            for warp in g.warps.tolist():
                order.stores_done(warp)
        self.commit_group(g, None, ST)
        self.wait_group(g, k, then, ST, 0)

    # -- the pipe ------------------------------------------------------------------------------

    def _reads(self, g: Gang, row: int, k: int, queue: int, slot: int, chunks: Any) -> None:
        """The pipe reads shared memory; the next commit publishes that it has."""
        clock = self.matrix_read(g, row, k, slot, PIPE, chunks)
        if clock is not None:
            self._tensor().clocks.setdefault(queue, {})[clock[0]] = clock[1]

    def _touches(
        self, g: Gang, row: int, k: int, queue: int, slot: int, lanes: Any, columns: tuple[int, int], writes: bool
    ) -> None:  # fmt: skip
        """The pipe touches tensor memory; the next commit publishes that it has."""
        state = self._tensor()
        if state.order is not None:
            assert self.races is not None
            first = queue - _PIPE
            pipe = (first, self.races.async_agent(first, PIPE))
            agent, clock = state.order.pipe(self, g, row, k, pipe, slot, area_units(lanes, *columns), writes=writes)
            state.clocks.setdefault(queue, {})[agent] = clock

    def tensor_mma(
        self, g: Gang, mask: Any, k: int, form: Mma, d: Any, a: Any, b: Any, idesc: Any, enable: Any,
        disabled: tuple[Any, ...], scales: tuple[Any, ...],
    ) -> None:  # fmt: skip
        """tcgen05.mma by each executing lane."""
        sources = [spread(v, len(g)) for v in (d, a, b, idesc, enable, *scales, *disabled)]
        in_memory = isinstance(form.a, Address)
        for row, lane in self._each(g, mask):
            d_at, a_at, b_at, word, keep, *rest = (int(v[row, lane]) for v in sources)
            a_scales, b_scales = rest[:2] if form.vector else (0, 0)
            lanes = rest[2:] if form.vector else rest
            o = tcgen05.Operands(
                d_at, a_at, b_at, in_memory, bool(keep), form.scale_d,
                sum(value << 32 * i for i, value in enumerate(lanes)), a_scales, b_scales, form.vector,
            )  # fmt: skip
            try:
                self._mma(g, row, k, form, word, o)
            except Fault as error:
                if error.place.kernel:
                    raise
                self.fail(type(error), error.detail, g, k)

    def _mma(self, g: Gang, row: int, k: int, form: Mma, word: int, o: tcgen05.Operands) -> None:
        idesc = instruction_descriptors.decode(word, form.kind, form.group, form.ws)
        tcgen05.check_vector(idesc, o.vector)
        marks = tcgen05.footprint(idesc, form.group, form.ws, o)
        slots = self._group(int(g.cta[row, 0]), form.group)
        queue = _PIPE + slots[0]
        state = self._tensor()
        touched = [c for c in (marks.d_columns, marks.a_columns, *marks.scale_columns) if c is not None]
        a_lanes = marks.d_lanes + tensor_memory.split(o.a)[0] - tensor_memory.split(o.d)[0]
        for slot in slots:
            for chunks in (marks.a_chunks, marks.b_chunks):
                if chunks is not None:
                    self._reads(g, row, k, queue, slot, chunks)
            for first, last in touched:
                self._columns(g, k, slot, first, last, "tcgen05.mma")
                self._settled(g, k, slot, first, last, queue)
            every = np.arange(tensor_memory.LANES)
            for columns in marks.scale_columns:
                self._touches(g, row, k, queue, slot, every, columns, False)
            if marks.a_columns is not None:
                self._touches(g, row, k, queue, slot, a_lanes, marks.a_columns, False)
            self._touches(g, row, k, queue, slot, marks.d_lanes, marks.d_columns, True)
        place = self.place(g, k)
        ctas = [tcgen05.Cta(self.shared.of(slot), state.cells[slot], SHARED_BASE) for slot in slots]

        def run() -> None:
            for slot in slots if self.uninitialised else ():
                written = state.written[slot]
                if o.enable_d and not written[marks.d_lanes, slice(*marks.d_columns)].all():
                    raise UninitialisedFault("adds to an accumulator that nothing wrote", place)
                if marks.a_columns is not None and not written[a_lanes, slice(*marks.a_columns)].all():
                    raise UninitialisedFault("multiplies a matrix in tensor memory that nothing wrote", place)
            tcgen05.multiply(idesc, form.group, form.ws, ctas, o)
            for slot in slots:
                state.written[slot, marks.d_lanes, slice(*marks.d_columns)] = True

        self._push(queue, slots[0], Step(run, slots, marks.d_columns, line=self.kernel.instrs[k].line))

    def tensor_cp(self, g: Gang, mask: Any, k: int, form: Copy, address: Any, descriptor: Any) -> None:
        """tcgen05.cp by each executing lane."""
        address, descriptor = spread(address, len(g)), spread(descriptor, len(g))
        state = self._tensor()
        for row, lane in self._each(g, mask):
            at = int(address[row, lane])
            try:
                matrix = descriptors.decode(int(descriptor[row, lane]), True)
            except Fault as error:
                self.fail(type(error), error.detail, g, k)
            slots = self._group(int(g.cta[row, 0]), form.group)
            queue, column = _PIPE + slots[0], at & 0xFFFF
            for slot in slots:
                self._reads(g, row, k, queue, slot, tensor_memory.copy_chunks(form.form, matrix))
                self._columns(g, k, slot, column, column + form.form.columns, "tcgen05.cp")
                self._settled(g, k, slot, column, column + form.form.columns, queue)
                lanes = form.form.lanes() + tensor_memory.split(at)[0]
                self._touches(g, row, k, queue, slot, lanes, (column, column + form.form.columns), True)

            def run(slots: tuple[int, ...] = slots, matrix: Any = matrix, at: int = at) -> None:
                lane, column = tensor_memory.split(at)
                for slot in slots:
                    tensor_memory.copy(form.form, matrix, self.shared.of(slot), state.cells[slot], at, SHARED_BASE)
                    for lanes in form.form.lanes() + lane:
                        state.written[slot, lanes, column : column + form.form.columns] = True

            columns = (column, column + form.form.columns)
            self._push(queue, slots[0], Step(run, slots, columns, line=self.kernel.instrs[k].line))

    def tensor_shift(self, g: Gang, mask: Any, k: int, group: int, address: Any) -> None:
        """tcgen05.shift.down by each executing lane."""
        address, state = spread(address, len(g)), self._tensor()
        for row, lane in self._each(g, mask):
            at, slots = int(address[row, lane]), self._group(int(g.cta[row, 0]), group)
            column = at & 0xFFFF

            def run(slots: tuple[int, ...] = slots, at: int = at) -> None:
                for slot in slots:
                    tensor_memory.shift_down(state.cells[slot], at)

            for slot in slots:
                self._columns(g, k, slot, column, column + 8, "tcgen05.shift")
                lanes = np.arange(32) + tensor_memory.split(at)[0]
                self._touches(g, row, k, _PIPE + slots[0], slot, lanes, (column, column + 8), True)
            step = Step(run, slots, (column, column + 8), line=self.kernel.instrs[k].line)
            self._push(_PIPE + slots[0], slots[0], step)

    def tensor_commit(self, g: Gang, mask: Any, k: int, group: int, barrier: Any, ranks: Any) -> None:
        """tcgen05.commit: an arrival when everything before it in the pipe is done."""
        barrier = spread(barrier, len(g))
        for row, lane in self._each(g, mask):
            slots = self._group(int(g.cta[row, 0]), group)
            key, _ = self.mbarrier_at(g, row, lane, k, int(barrier[row, lane]))
            keys = [key]
            if ranks is not None:
                base, chosen = int(self.cluster_base[slots[0]]), int(spread(ranks, len(g))[row, lane])
                keys = [(base + rank, key[1]) for rank in range(self.cluster_size) if chosen >> rank & 1]
            clocks = dict(self._tensor().clocks.get(_PIPE + slots[0], {}))
            warp = int(g.warps[row]) % self.wpc
            knows = None if self.races is None else self.races.publish(int(g.cta[row, 0]), warp, lane)
            thread = 0 if self.races is None else self.races.first(int(g.cta[row, 0]), warp) + lane
            place = self.place(g, k)

            def run(
                keys: list[tuple[int, int]] = keys,
                clocks: dict[int, int] = clocks,
                knows: Any = knows,
                thread: int = thread,
                place: Any = place,
            ) -> None:
                for key in keys:
                    found = self.mbarriers.get(key)
                    if found is None or found.pending < 1:
                        raise BarrierFault(f"the commit arrives at {key[1]:#x}, which expects no arrival", place)
                    found.pending -= 1
                    if knows is not None:  # what was waited for before the work was issued is over when it is done
                        self.follows(found, key, knows[0], thread, int(knows[0, thread]), lambda: place)
                        np.maximum(found.known, knows, out=found.known)
                        for agent, value in clocks.items():
                            found.known[:, agent] = np.maximum(found.known[:, agent], value)
                    self.mbarrier_advance(key, found)

            self._push(_PIPE + slots[0], slots[0], Step(run, line=self.kernel.instrs[k].line))


def _rows(g: Gang, mask: Any) -> list[int]:
    return [row for row in range(len(g)) if mask is None or mask[row].any()]


def _first_lane(rows: int) -> Any:
    lanes = np.zeros((rows, LANES), bool)
    lanes[:, 0] = True
    return lanes
