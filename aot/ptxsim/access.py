"""Loads, stores and atomics of a gang, with their checks: the memory half of the machine that segments call."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.dependent import READ, WRITTEN, Footprint
from cubinery.aot.ptxsim.faults import Fault, MisalignedFault, OutOfBoundsFault, Place, RaceFault, UninitialisedFault
from cubinery.aot.ptxsim.global_races import READ as READS
from cubinery.aot.ptxsim.global_races import UPDATE as UPDATES
from cubinery.aot.ptxsim.global_races import WRITE as WRITES
from cubinery.aot.ptxsim.global_races import GlobalRaces
from cubinery.aot.ptxsim.independence import Touched
from cubinery.aot.ptxsim.isa.atomics import atomic as atomic_operation
from cubinery.aot.ptxsim.memory import (
    GENERIC,
    RANK_SHIFT,
    SHARED_BASE,
    WIDTHS,
    AccessError,
    Allocation,
    Block,
    GlobalMemory,
    SharedMemory,
)
from cubinery.aot.ptxsim.races import Races
from cubinery.aot.ptxsim.state import LANES, Gang, spread
from cubinery.aot.ptxsim.translate import Translation

_WINDOW_MASK = np.uint32((1 << RANK_SHIFT) - 1)
_ONES = np.ones((1, 1), bool)


class Access:
    """Memory as generated code sees it. Machine derives from this."""

    kernel: Translation
    memory: GlobalMemory
    shared: SharedMemory
    params: Block
    local: Block
    variables: dict[str, int]
    """Addresses of the module's variables in global and constant memory."""
    wpc: int
    """Warps of a CTA."""
    cluster_size: int
    cluster_base: Any
    """First CTA slot of each slot's cluster, (slots,)."""
    rank: Any
    """Rank of each slot's CTA in its cluster, (slots,)."""
    block_index: Any
    """Block index of each slot's CTA, (slots, 3)."""
    fixed_params: dict[tuple[int, ...], tuple[Any, ...]]
    races: Races | None
    global_races: GlobalRaces | None
    uninitialised: bool
    """Report reads of memory that was never written."""
    footprint: Footprint | None
    """Records what this launch touches, for a dependent launch that may overlap with it."""
    predecessor: Footprint | None
    """What the launch before touched, where this one may overlap with it."""
    touched: Touched | None
    """Records what this share of a launch touches, where others are only supposed not to touch it."""
    gone: Any
    """CTA slots whose threads have all exited: bool (slots,)."""
    waited: Any
    """CTA slots that have executed griddepcontrol.wait: bool (slots,)."""

    @property
    def watched(self) -> bool:
        """Does anybody want to know of accesses to global memory?"""
        return self.global_races is not None or self.touched is not None

    # -- faults --------------------------------------------------------------------------------

    def place(self, g: Gang | None, k: int, lanes: Any = None) -> Place:
        """Where instruction `k` is, and the first of `lanes` in the gang."""
        instr = self.kernel.instrs[k]
        block, warp, lane = None, -1, -1
        if g is not None and len(g):
            row = 0
            if lanes is not None:
                lanes = spread(lanes, len(g)) & g.lanes()
                where = np.argwhere(lanes)
                if len(where):
                    row, lane = (int(i) for i in where[0])
            x, y, z = (int(i) for i in self.block_index[int(g.cta[row, 0])])
            block, warp = (x, y, z), int(g.warps[row]) % self.wpc
        return Place(self.kernel.entry.name, instr.line, instr.text, instr.source, block, warp, lane)

    def fail(self, kind: type[Fault], detail: str, g: Gang | None, k: int, lanes: Any = None) -> NoReturn:
        raise kind(detail, self.place(g, k, lanes))

    def _refuse(self, error: AccessError, g: Gang, k: int, address: Any) -> NoReturn:
        kind = OutOfBoundsFault
        lanes = np.broadcast_to(error.lanes, np.broadcast_shapes(error.lanes.shape, (len(g), LANES))) & g.lanes()
        where = np.argwhere(lanes)
        first = np.broadcast_to(address, lanes.shape)[tuple(where[0])] if len(where) else 0
        self.fail(kind, error.message(int(first)), g, k, lanes)

    def _check_aligned(self, g: Gang, mask: Any, k: int, address: Any, size: int) -> None:
        odd = (address & address.dtype.type(size - 1)) != 0
        if odd.any():
            bad = odd if mask is None else odd & mask
            if bad.any():
                where = tuple(np.argwhere(bad)[0])
                found = int(np.broadcast_to(address, bad.shape)[where])
                self.fail(MisalignedFault, f"address {found:#x}: expected a multiple of {size}", g, k, bad)

    # -- masks and warp-wide values ------------------------------------------------------------

    @staticmethod
    def lanes(g: Gang, guard: Any) -> Any:
        """The executing lanes under a guard: None for all."""
        if guard.all():
            return g.mask
        full = spread(guard, len(g))
        return full if g.mask is None else full & g.mask

    @staticmethod
    def active(g: Gang, mask: Any) -> Any:
        """The executing lanes as an array (warps, 32)."""
        return np.ones((len(g), LANES), bool) if mask is None else mask

    @staticmethod
    def full(g: Gang, value: Any) -> Any:
        """A value for every lane of every warp."""
        return spread(value, len(g))

    @staticmethod
    def elect(members: Any) -> tuple[Any, Any]:
        """(leader, am I it) for member masks: the lowest lane leads."""
        bits = members.astype(np.int64)
        leader = np.frexp((bits & -bits).astype(np.float64))[1] - 1
        lane = np.arange(LANES)[None]
        return leader.astype(np.uint32), leader == lane

    # -- shared memory -------------------------------------------------------------------------

    def own_shared(self, g: Gang, address: int) -> Any:
        """The shared address of a variable as a CTA sees it: its rank in the cluster from bit 24 up."""
        if self.cluster_size == 1:
            return np.full((1, 1), address, np.uint64)
        return (self.rank[g.cta] << RANK_SHIFT).astype(np.uint64) + np.uint64(address)

    def shared_index(self, g: Gang, mask: Any, k: int, address: Any, size: int) -> Any:
        """Byte index into the shared block for addresses of `size` bytes, bounds checked; safe in idle lanes."""
        owner = g.cta
        if self.cluster_size > 1:
            ranks = (address >> np.uint32(RANK_SHIFT)).astype(np.int64)
            if mask is not None:
                ranks = np.where(mask, ranks, 0)
            if (ranks >= self.cluster_size).any():
                bad = ranks >= self.cluster_size
                self.fail(
                    OutOfBoundsFault, f"shared address of a CTA outside the cluster of {self.cluster_size}", g, k, bad
                )
            owner = self.cluster_base[g.cta] + ranks
            gone = self.gone[owner] if mask is None else self.gone[owner] & mask
            if gone.any():
                self.fail(OutOfBoundsFault, "shared memory of a CTA of the cluster that has exited", g, k, gone)
            address = address & _WINDOW_MASK
        if address.min() < SHARED_BASE or address.max() > self.shared.size - size:
            try:
                self.shared.check(address, mask, size)
            except AccessError as error:
                self._refuse(error, g, k, address)
            address = np.where(mask, address, np.uint32(SHARED_BASE))
        return owner * self.shared.stride + address

    def load_shared(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, count: int, wanted: Any, _order: bool
    ) -> tuple[Any, ...]:
        """ld.shared: `count` arrays of `width` bytes."""
        size = width * count
        if size > 1:
            self._check_aligned(g, mask, k, address, size)
        index = self.shared_index(g, mask, k, address, size)
        if self.races is not None:
            self.races.read(self, g, mask, k, index, size)
        if self.uninitialised:
            bad = self.shared.block.unwritten(index, width, count, wanted)
            if bad is not None and bad.any():
                self._unwritten(g, mask, k, address, bad, "shared")
        return self.shared.block.load(index, width, count)

    def store_shared(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, values: tuple[Any, ...], _order: bool
    ) -> None:
        """st.shared."""
        size = width * len(values)
        if size > 1:
            self._check_aligned(g, mask, k, address, size)
        index = self.shared_index(g, mask, k, address, size)
        if self.races is not None:
            self.races.write(self, g, mask, k, index, size)
        _scatter(self.shared.block, g, mask, index, width, values)

    def _unwritten(self, g: Gang, mask: Any, k: int, address: Any, bad: Any, space: str) -> None:
        bad = np.broadcast_to(bad, np.broadcast_shapes(bad.shape, (len(g), LANES)))
        if mask is not None:
            bad = bad & mask
        if bad.any():
            first = int(np.broadcast_to(address, bad.shape)[tuple(np.argwhere(bad)[0])])
            self.fail(UninitialisedFault, f"{space} address {first:#x} was never written", g, k, bad)

    # -- global, parameters, local, generic ----------------------------------------------------

    def load_global(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, count: int, wanted: Any, _order: bool
    ) -> tuple[Any, ...]:
        """ld.global."""
        size = width * count
        if size > 1:
            self._check_aligned(g, mask, k, address, size)
        if mask is not None:
            address = spread(address, len(g))
            used = address[mask]
            if not used.size:
                return tuple(np.zeros((1, 1), WIDTHS[width]) for _ in range(count))
        else:
            used = address
        low, high = int(used.min()), int(used.max())
        found = self.memory.find(low)
        if found is not None and high + size <= found.end:
            index = (address - np.uint64(found.origin)).astype(np.int64)
            if mask is not None:
                index = np.where(mask, index, low - found.origin)
            if self.uninitialised:
                bad = found.block.unwritten(index, width, count, wanted)
                if bad is not None and bad.any():
                    self._unwritten(g, mask, k, address, bad, "global")
            if self.watched:
                self._orders_access(g, k, found, spread(index, len(g)), self.active(g, mask), size, READS)
            return found.block.load(index, width, count)
        return self._load_pieces(g, mask, k, address, width, count, wanted)

    def _load_pieces(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, count: int, wanted: Any
    ) -> tuple[Any, ...]:
        """A gather over several allocations."""
        address = spread(address, len(g))
        result = tuple(np.zeros(address.shape, WIDTHS[width]) for _ in range(count))
        for found, inside in self._pieces(g, mask, k, address, width * count):
            index = (address[inside] - np.uint64(found.origin)).astype(np.int64)
            if self.uninitialised:
                missing = found.block.unwritten(index, width, count, wanted)
                if missing is not None and missing.any():
                    bad = np.zeros(address.shape, bool)
                    bad[inside] = missing
                    self._unwritten(g, mask, k, address, bad, "global")
            if self.watched:
                where = (address - np.uint64(found.origin)).astype(np.int64)
                self._orders_access(g, k, found, where, inside, width * count, READS)
            for out, values in zip(result, found.block.load(index, width, count), strict=True):
                out[inside] = values
        return result

    def _pieces(self, g: Gang, mask: Any, k: int, address: Any, size: int) -> Any:
        lanes = np.ones(address.shape, bool) if mask is None else mask
        try:
            return self.memory.pieces(address, lanes, size)
        except AccessError as error:
            self._refuse(error, g, k, address)

    def store_global(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, values: tuple[Any, ...], _order: bool
    ) -> None:
        """st.global."""
        size = width * len(values)
        if size > 1:
            self._check_aligned(g, mask, k, address, size)
        address = spread(address, len(g))
        for found, inside in self._pieces(g, mask, k, address, size):
            index = (address[inside] - np.uint64(found.origin)).astype(np.int64)
            if self.watched:
                where = (address - np.uint64(found.origin)).astype(np.int64)
                self._orders_access(g, k, found, where, inside, size, WRITES, values)
            self.memory.writes(found).store(
                index, width, tuple(np.broadcast_to(v, address.shape)[inside] for v in values)
            )

    def _orders_access(
        self, g: Gang, k: int, found: Allocation, index: Any, inside: Any, size: int, does: str,
        values: tuple[Any, ...] = (),
    ) -> None:  # fmt: skip
        """Lanes `inside` touch bytes of an allocation: in order with the rest of the launch and with others."""
        if self.touched is not None:
            self._uses_memory(self.touched, g, k, found, index, inside, size, does)
        if self.global_races is not None:  # it takes a Machine, of which this is a part
            self.global_races.access(self, g, k, found, index, inside, size, does, values)  # type: ignore[arg-type]
        if self.footprint is not None or self.predecessor is not None:
            self._overlaps(g, k, found, index, inside, size, does != READS)

    def _uses_memory(
        self, touched: Touched, g: Gang, k: int, found: Allocation, index: Any, inside: Any, size: int, does: str
    ) -> None:
        """Record an access for the proof that shares are independent."""
        touched.access(found, index[inside], size, does != READS)
        if does != WRITES:
            rows = np.flatnonzero(inside.any(axis=1))
            first = index[rows, inside[rows].argmax(axis=1)] + found.origin
            touched.repeats(k, g.warps[rows], self.block_index[g.cta[rows, 0]], first)

    def _overlaps(self, g: Gang, k: int, found: Allocation, index: Any, inside: Any, size: int, writes: bool) -> None:
        """Report what the launch before may still be at, and record for the launch after. `inside`: the lanes."""
        if self.predecessor is not None:
            early = inside & ~self.waited[g.cta]
            bad = self.predecessor.touched(found, index[early], size, READ | WRITTEN if writes else WRITTEN)
            if bad is not None:
                lanes = np.zeros(early.shape, bool)
                lanes[early] = bad
                does = "writes what the launch before uses" if writes else "reads what the launch before writes"
                self.fail(RaceFault, f"without griddepcontrol.wait {does}: {found.name}", g, k, lanes)
        if self.footprint is not None:
            self.footprint.record(found, index[inside], size, WRITTEN if writes else READ)

    def load_fixed_param(self, g: Gang, mask: Any, k: int, address: Any, *rest: Any) -> tuple[Any, ...]:
        """ld.param of a named parameter: the same array every time, so that gangs that join see one value."""
        key = (int(address[0, 0]), *rest[:2])
        found = self.fixed_params.get(key)
        if found is None:
            found = self.fixed_params[key] = self.load_param(g, mask, k, address, *rest)
        return found

    def load_param(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, count: int, _wanted: Any, _order: bool
    ) -> tuple[Any, ...]:
        """ld.param: the same in every warp unless a register addresses it."""
        index = (address - np.uint64(GENERIC["param"])).astype(np.int64)
        if index.min() < 0 or index.max() > len(self.params.data) - width * count:
            self.fail(OutOfBoundsFault, "a parameter address outside the parameters", g, k)
        return self.params.load(index, width, count)

    def _local_index(self, g: Gang, mask: Any, k: int, address: Any, size: int) -> Any:
        if mask is not None:
            address = np.where(mask, address, np.uint64(0))
        if address.max() > np.uint64(max(self.kernel.local_size - size, 0)) or not self.kernel.local_size:
            bad = address > np.uint64(max(self.kernel.local_size - size, 0))
            self.fail(OutOfBoundsFault, f"local address outside of {self.kernel.local_size} bytes", g, k, bad)
        thread = g.warps[:, None] * LANES + np.arange(LANES)
        return thread * self.kernel.local_size + address.astype(np.int64)

    def load_local(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, count: int, wanted: Any, _order: bool
    ) -> tuple[Any, ...]:
        """ld.local."""
        self._check_aligned(g, mask, k, address, width * count)
        index = self._local_index(g, mask, k, address, width * count)
        if self.uninitialised:
            bad = self.local.unwritten(index, width, count, wanted)
            if bad is not None and bad.any():
                self._unwritten(g, mask, k, address, bad, "local")
        return self.local.load(index, width, count)

    def store_local(
        self, g: Gang, mask: Any, k: int, address: Any, width: int, values: tuple[Any, ...], _order: bool
    ) -> None:
        """st.local."""
        self._check_aligned(g, mask, k, address, width * len(values))
        _scatter(self.local, g, mask, self._local_index(g, mask, k, address, width * len(values)), width, values)

    def _by_space(self, g: Gang, mask: Any, address: Any) -> list[tuple[str, Any, Any]]:
        """(space, lanes, address in it) of generic addresses."""
        address = spread(address, len(g))
        lanes = self.active(g, mask)
        found = []
        for space, base in GENERIC.items():
            inside = lanes & (address >= np.uint64(base)) & (address < np.uint64(base + GENERIC["shared"]))
            if inside.any():
                offset = address if space == "param" else address - np.uint64(base)
                found.append((space, inside, offset.astype(np.uint32) if space == "shared" else offset))
                lanes = lanes & ~inside
        if lanes.any():
            found.append(("global", lanes, address))
        return found

    def load_generic(self, g: Gang, mask: Any, k: int, address: Any, *rest: Any) -> tuple[Any, ...]:
        """ld without a state space."""
        result: tuple[Any, ...] | None = None
        for space, inside, offset in self._by_space(g, mask, address):
            values = getattr(self, f"load_{space}")(g, inside, k, offset, *rest)
            result = values if result is None else tuple(
                np.where(inside, v, r) for v, r in zip(values, result, strict=True)
            )  # fmt: skip
        if result is None:
            return tuple(np.zeros((1, 1), WIDTHS[rest[0]]) for _ in range(rest[1]))
        return result

    def store_generic(self, g: Gang, mask: Any, k: int, address: Any, *rest: Any) -> None:
        """st without a state space."""
        for space, inside, offset in self._by_space(g, mask, address):
            getattr(self, f"store_{space}")(g, inside, k, offset, *rest)

    def variable(self, name: str, offset: int) -> Any:
        """The address of a variable of the module in global or constant memory."""
        return np.full((1, 1), self.variables[name] + offset, np.uint64)

    def is_space(self, g: Gang, address: Any, space: str) -> Any:
        """isspacep: .shared and .shared::cta are the CTA's own memory, .shared::cluster that of the cluster."""
        if space in ("global", "const"):
            constant = np.zeros_like(address, bool)
            for start, end in self.memory.constants:
                constant |= (address >= np.uint64(start)) & (address < np.uint64(end))
            return constant if space == "const" else (address < np.uint64(GENERIC["shared"])) & ~constant
        space, _, part = space.partition("::")
        base = GENERIC[space]
        if space == "shared" and part != "cluster" and self.cluster_size > 1:
            own = np.uint64(base) + (self.rank[g.cta] << RANK_SHIFT).astype(np.uint64)
            return (address >= own) & (address < own + np.uint64(1 << RANK_SHIFT))
        return (address >= np.uint64(base)) & (address < np.uint64(base + GENERIC["shared"]))

    def map_shared(self, g: Gang, k: int, address: Any, rank: Any, generic: bool) -> Any:
        """mapa."""
        if (spread(rank, len(g))[g.lanes()] >= self.cluster_size).any():
            self.fail(OutOfBoundsFault, f"mapa to a CTA outside the cluster of {self.cluster_size}", g, k)
        kind = address.dtype.type
        own = address & kind((1 << RANK_SHIFT) - 1)
        base = kind(GENERIC["shared"]) if generic and address.dtype == np.uint64 else kind(0)
        return base + own + (rank.astype(address.dtype) << kind(RANK_SHIFT))

    # -- atomics -------------------------------------------------------------------------------

    def atomic(
        self, g: Gang, mask: Any, k: int, space: str, operation: str, kind: str, address: Any, values: Any, _order: str
    ) -> Any:
        """atom and red: the old values. Lanes of one address follow each other in order of warp and lane."""
        function, dtype = atomic_operation(operation, kind)
        flushing, _ = atomic_operation(operation, kind, flush=True)
        width = np.dtype(dtype).itemsize
        old = np.zeros((len(g), LANES), WIDTHS[width])
        self._check_aligned(g, mask, k, address, width)
        if space == "generic":
            parts = self._by_space(g, mask, address)
        else:
            parts = [(space, self.active(g, mask), spread(address, len(g)))]
        for where, lanes, offset in parts:
            operands = [np.broadcast_to(v, old.shape)[lanes].view(dtype) for v in values]
            if where == "shared":
                index = np.broadcast_to(self.shared_index(g, lanes, k, offset, width), old.shape)
                if self.races is not None:
                    self.races.atomic(self, g, lanes, k, index, width)
                old[lanes] = _apply(self.shared.block, index[lanes], function, operands, dtype, width)
                continue
            for found, inside in self._pieces(g, lanes, k, offset, width):
                index = (offset[inside] - np.uint64(found.origin)).astype(np.int64)
                if self.watched:
                    whole = (offset - np.uint64(found.origin)).astype(np.int64)
                    self._orders_access(g, k, found, whole, inside, width, UPDATES)
                some = [o[inside[lanes]] for o in operands]
                old[inside] = _apply(self.memory.writes(found), index, flushing, some, dtype, width)
        return old


def _scatter(block: Block, g: Gang, mask: Any, index: Any, width: int, values: tuple[Any, ...]) -> None:
    index = spread(index, len(g))
    if mask is None:
        block.store(index, width, values)
    else:
        block.store(index[mask], width, tuple(spread(v, len(g))[mask] for v in values))


def _apply(block: Block, index: Any, function: Any, operands: list[Any], dtype: Any, width: int) -> Any:
    """Update elements in rounds: each round takes the first lane that still waits for its address."""
    old = np.zeros(len(index), WIDTHS[width])
    rest = np.arange(len(index))
    while len(rest):
        _, first = np.unique(index[rest], return_index=True)
        now = rest[first]
        (before,) = block.load(index[now], width, 1)
        after = function(before.view(dtype), *(o[now] for o in operands))
        block.store(index[now], width, (np.asarray(after, dtype).view(WIDTHS[width]),))
        old[now] = before
        rest = np.delete(rest, first)
    return old
