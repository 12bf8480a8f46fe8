"""Matrix loads and asynchronous copies: shared memory moved in fragments and boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.barriers import Barriers
from cubinery.aot.ptxsim.faults import (
    BarrierFault,
    DescriptorFault,
    Fault,
    OutOfBoundsFault,
    ProxyFault,
    UninitialisedFault,
)
from cubinery.aot.ptxsim.groups import Groups
from cubinery.aot.ptxsim.isa import matrix_memory, tma
from cubinery.aot.ptxsim.memory import GENERIC
from cubinery.aot.ptxsim.state import LANES, Gang, spread
from cubinery.aot.ptxsim.tensormap import TensorMap

WRITTEN = "written"
"""Kind of the groups (groups.py) of what bulk copies publish once global memory holds what they write."""


class Copies(Barriers):
    """Copies as generated code sees them. Machine derives from this."""

    _maps: dict[bytes, TensorMap]
    groups: Groups

    def issue(self, queue: int, slot: int, land: Callable[[], None]) -> None:
        raise NotImplementedError

    # -- ldmatrix, stmatrix --------------------------------------------------------------------

    def _rows(self, g: Gang, k: int, address: Any, count: int) -> Any:
        """Byte index of each 16-byte row, (W, count); lane i holds the address of row i."""
        address = spread(address, len(g))[:, :count]
        self._check_aligned(g, None, k, address, 16)
        return self.shared_index(g, None, k, address, 16)

    @staticmethod
    def _per_lane(g: Gang, rows: Any) -> Any:
        """Rows' indices spread over 32 lanes, for checks; lanes without a row repeat the first."""
        lanes = spread(rows[:, :1], len(g)).copy()
        lanes[:, : rows.shape[1]] = rows
        return lanes

    def load_matrix(self, g: Gang, mask: Any, k: int, address: Any, form: matrix_memory.MatrixForm) -> list[Any]:
        """ldmatrix: the registers of each lane."""
        self._whole_warps(g, mask, k)
        index = self._rows(g, k, address, form.rows)
        block = self.shared.block
        if self.races is not None:
            self.races.read(self, g, None, k, self._per_lane(g, index), 16, collective=True)
        if self.uninitialised:
            bad = block.unwritten(index, 8, 2, (True, True))
            if bad is not None and bad.any():
                lanes = np.zeros((len(g), LANES), bool)
                lanes[:, : form.rows] = bad
                self._unwritten(g, None, k, address, lanes, "shared")
        low, high = block.load(index, 8, 2)
        rows = np.stack((low, high), axis=-1).view(np.uint8).reshape(len(g), form.rows, 16)
        return list(matrix_memory.load(form, rows).transpose(1, 0, 2))

    def store_matrix(
        self, g: Gang, mask: Any, k: int, address: Any, values: tuple[Any, ...], form: matrix_memory.MatrixForm
    ) -> None:
        """stmatrix: the reverse of ldmatrix."""
        self._whole_warps(g, mask, k)
        index = self._rows(g, k, address, form.rows)
        if self.races is not None:
            self.races.write(self, g, None, k, self._per_lane(g, index), 16)
        registers = np.stack([spread(v, len(g)) for v in values], axis=1)
        words = np.ascontiguousarray(matrix_memory.store(form, registers)).view(np.uint64)
        self.shared.block.store(index, 8, (words[..., 0], words[..., 1]))

    # -- cp.async.bulk.tensor ------------------------------------------------------------------

    def tensor_map(self, g: Gang, row: int, k: int, address: int) -> TensorMap:
        """The decoded tensor map at a generic address (a parameter, or global memory)."""
        base = GENERIC["param"]
        if base <= address < base + len(self.params.data):
            data = self.params.data[address - base : address - base + 128].tobytes()
        else:
            try:
                data = self.memory.bytes(address, 128).tobytes()
            except KeyError:
                self.fail(OutOfBoundsFault, f"no tensor map at {address:#x}", g, k)
            self._copy_reads(g, row, k, address, 128)
        found = self._maps.get(data)
        if found is None:
            try:
                found = self._maps[data] = TensorMap.decode(data)
            except ValueError as error:
                self.fail(DescriptorFault, f"tensor map: {error}", g, k)
        return found

    def _placed(self, error: Fault, g: Gang, k: int, row: int, lane: int) -> NoReturn:
        """A fault of the pure functions, with its place."""
        where = np.zeros((len(g), LANES), bool)
        where[row, lane] = True
        raise type(error)(error.detail, self.place(g, k, where)) from None

    def _tiles(self, g: Gang, mask: Any, k: int, tensor: Any, coords: tuple[Any, ...], mode: str) -> Any:
        """(row, lane, tile) of each executing lane's box."""
        where = np.stack([spread(c, len(g)).view(np.int32) for c in coords], axis=-1)
        tensor = spread(tensor, len(g))
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        for row, lane in np.argwhere(active).tolist():
            box = self.tensor_map(g, row, k, int(tensor[row, lane]))
            at = where[row, lane].tolist()
            try:
                yield row, lane, tma.gather(box, at[0], at[1:]) if mode == "gather4" else tma.tile(box, at)
            except Fault as error:
                self._placed(error, g, k, row, lane)

    def tensor_load(
        self, g: Gang, mask: Any, k: int, destination: Any, tensor: Any, coords: tuple[Any, ...], mode: str,
        barrier: Any, ranks: Any, pair: bool,
    ) -> None:  # fmt: skip
        """cp.async.bulk.tensor from global to shared memory: each executing lane copies one box.

        A multicast goes to the same offsets in every CTA of the mask and counts at the barrier there; with
        cta_group::2 (`pair`) at that of the CTA of the pair whose parity the barrier's address has.
        """
        destination, barrier = spread(destination, len(g)), spread(barrier, len(g))
        self._check_aligned(g, mask, k, barrier, 8)
        for row, lane, tile in self._tiles(g, mask, k, tensor, coords, mode):
            at, bar = int(destination[row, lane]), int(barrier[row, lane])
            slot, offset = self.mbarrier_key(int(g.cta[row, 0]), at)
            owner, bar_offset = key = self.mbarrier_key(int(g.cta[row, 0]), bar)
            if ranks is None:
                targets = [(slot, key)]
            else:
                base = int(self.cluster_base[int(g.cta[row, 0])])
                chosen = tma.multicast(int(spread(ranks, len(g))[row, lane]), self.cluster_size)
                parity = (owner - base) % 2
                counts = [rank - rank % 2 + parity if pair else rank for rank in chosen]
                targets = [(base + r, (base + at, bar_offset)) for r, at in zip(chosen, counts, strict=True)]
            try:
                tile.check_shared(offset, self.shared.size)
            except Fault as error:
                self._placed(error, g, k, row, lane)
            self._check_source(g, row, lane, k, tile)
            for slot, key in targets:
                self._load_tile(g, row, lane, k, tile, slot, offset, key)

    def _signalled(self, g: Gang, row: int, lane: int, k: int, key: tuple[int, int]) -> None:
        """The mbarrier that a copy completes at must exist, and the async proxy must see it."""
        if key not in self.mbarriers:
            where = np.zeros((len(g), LANES), bool)
            where[row, lane] = True
            self.fail(BarrierFault, f"no mbarrier was initialised at shared address {key[1]:#x}", g, k, where)
        if self.races is not None and not self.mbarriers[key].fenced:
            detail = f"the mbarrier at {key[1]:#x} was initialised and not made visible to the async proxy by a fence"
            self.fail(ProxyFault, detail, g, k)

    def _load_tile(
        self, g: Gang, row: int, lane: int, k: int, tile: tma.Tile, slot: int, offset: int, key: tuple[int, int]
    ) -> None:
        self._signalled(g, row, lane, k, key)
        start = slot * self.shared.stride + offset
        clock = None
        if self.races is not None:
            local = self.races.async_agent(slot, key[1])
            units = np.arange(start // self.races.unit, (start + tile.shared_bytes) // self.races.unit)
            value = self.races.async_write(self, g, row, k, slot, local, units, lane=lane)
            clock = (self.races.agent(slot, local), value)
        shared = self.shared.of(slot)

        def land() -> None:
            tile.put(shared, offset, tile.load(self.memory.bytes))
            self.shared.block.mark(start, start + tile.shared_bytes)
            self.complete_tx(key, tile.tx_bytes, clock)

        self.issue(0, slot, land)

    def _copy_reads(self, g: Gang, row: int, k: int, start: int, size: int) -> None:
        """A warp reads some of `size` bytes from an address of global memory, other than by a lane's load."""
        if self.touched is not None:
            block = self.block_index[int(g.cta[row, 0])].tolist()
            self.touched.copy_reads(k, int(g.warps[row]), block, start, size)

    def _check_source(self, g: Gang, row: int, lane: int, k: int, tile: tma.Tile) -> None:
        """The rows of a box that exist lie in allocations, and hold something."""
        low, size = tile.extent()
        if not size:
            return
        self._copy_reads(g, row, k, low, size)
        found = self.memory.find(low)
        if self.global_races is not None and found is not None and self.global_races.written(found):
            starts = tile.rows[tile.exists] + tile.first
            places = starts[(starts >= found.base) & (starts < found.end)] - found.origin
            self.global_races.copy_reads(self, g, row, lane, k, found, places, tile.last - tile.first)
        if found is not None and low + size <= found.end and (found.block.written is None or not self.uninitialised):
            return
        for address in (tile.rows[tile.exists] + tile.first).tolist():
            found, width = self.memory.find(address), tile.last - tile.first
            if found is None or address + width > found.end:
                self._placed(
                    OutOfBoundsFault(f"a box reads {width} bytes at {address:#x}, which no allocation holds"),
                    g,
                    k,
                    row,
                    lane,
                )
            start = address - found.origin
            if (
                self.uninitialised
                and found.block.written is not None
                and not found.block.written[start : start + width].all()
            ):
                self._placed(
                    UninitialisedFault(f"a box reads {width} bytes at {address:#x}, never all written"), g, k, row, lane
                )

    def tensor_store(
        self, g: Gang, mask: Any, k: int, tensor: Any, coords: tuple[Any, ...], mode: str, source: Any,
        reduction: str,
    ) -> None:  # fmt: skip
        """cp.async.bulk.tensor (and cp.reduce) from shared to global memory, in the thread's open bulk group."""
        source = spread(source, len(g))
        for row, lane, tile in self._tiles(g, mask, k, tensor, coords, mode):
            slot, offset = self.mbarrier_key(int(g.cta[row, 0]), int(source[row, lane]))
            try:
                if mode == "tile":
                    tma.check_store([int(spread(c, len(g)).view(np.int32)[row, lane]) for c in coords])
                combine = tma.reduction(tile.map, reduction)
                tile.check_shared(offset, self.shared.size)
            except Fault as error:
                self._placed(error, g, k, row, lane)
            start, stop = slot * self.shared.stride + offset, slot * self.shared.stride + offset + tile.shared_bytes
            written = self.shared.block.written
            if self.uninitialised and written is not None and not written[start:stop].all():
                self._placed(
                    UninitialisedFault(f"a box reads shared memory at {offset:#x}, never all written"), g, k, row, lane
                )
            done = self._bulk_read(g, row, lane, k, slot, start, stop)
            starts = tile.rows[tile.exists] + tile.first
            written = self.writes_global(g, row, lane, k, starts, tile.last - tile.first, combine is not None)
            shared = self.shared.of(slot)

            def land(
                tile: tma.Tile = tile, shared: Any = shared, offset: int = offset, done: Callable[[], None] = done,
                written: Callable[[], None] = written, combine: Callable[[Any, Any], Any] | None = combine,
            ) -> None:  # fmt: skip
                tile.store(self._writable, tile.take(shared, offset), combine)
                written()
                done()

            self.issue(int(g.warps[row]) + 1, slot, land)

    def _writable(self, address: int, size: int) -> Any:
        """Bytes of global memory that are about to be written."""
        found = self.memory.find(address)
        if found is None or address + size > found.end:
            raise OutOfBoundsFault(f"a copy writes {size} bytes at {address:#x}, which no allocation holds")
        start, block = address - found.origin, self.memory.writes(found)
        block.mark(start, start + size)
        return block.data[start : start + size]

    def tensor_prefetch(self, g: Gang, mask: Any, k: int, tensor: Any, coords: tuple[Any, ...], mode: str) -> None:
        """cp.async.bulk.prefetch.tensor: the checks of a load and nothing else."""
        for _ in self._tiles(g, mask, k, tensor, coords, mode):
            pass

    # -- groups --------------------------------------------------------------------------------

    def _bulk_read(self, g: Gang, row: int, lane: int, k: int, slot: int, start: int, stop: int) -> Callable[[], None]:
        """Enter a copy that reads shared memory [start, stop) into its warp's open group; call the result when done."""
        clock = None
        if self.races is not None:
            unit = self.races.unit
            local = self.races.async_agent(slot, -1 - int(g.warps[row]))
            units = np.arange(start // unit, stop // unit)
            value = self.races.async_read(self, g, row, k, slot, local, units, lane=lane)
            clock = (self.races.agent(slot, local), value)
        return self.groups.add(("bulk", int(g.warps[row])), clock)

    def writes_global(
        self, g: Gang, row: int, lane: int, k: int, starts: Any, size: int, combines: bool
    ) -> Callable[[], None]:
        """A bulk copy writes `size` bytes from each address of an array; call the result when it has."""
        if self.touched is not None:
            self.touched.copy_writes(self.memory, starts, size)
        clock = None
        rest = starts
        while self.global_races is not None and len(rest):
            found = self.memory.find(int(rest.min()))
            if found is None:
                break  # reported where the copy lands
            inside = rest < found.end
            places = rest[inside].astype(np.int64) - found.origin
            clock = self.global_races.copy_writes(self, g, row, lane, k, found, places, size, combines)
            rest = rest[~inside]
        return self.groups.add((WRITTEN, int(g.warps[row])), clock)

    def commit_group(self, g: Gang, mask: Any, kind: str) -> None:
        """cp.async.commit_group and cp.async.bulk.commit_group: close the open group of each warp."""
        for row in range(len(g)):
            if mask is None or mask[row].any():
                self.groups.commit((kind, int(g.warps[row])))

    def wait_group(self, g: Gang, k: int, then: int, kind: str, most: int) -> None:
        """Wait until at most `most` of a warp's latest groups are unfinished."""
        parked = self.park(g, then, k, f"all but {most} of its groups of copies")
        kinds = [kind]
        if kind == "bulk" and "read" not in self.kernel.instrs[k].modifiers:
            kinds.append(WRITTEN)
        for row in range(len(g)):
            cta, warp = int(g.cta[row, 0]), int(g.warps[row])

            def ready(row: int = row, cta: int = cta, warp: int = warp) -> None:
                if self.races is not None:
                    clock = self.races.clock[cta, warp % self.wpc]
                    for each in kinds:
                        for agent, value in self.groups.clocks.get((each, warp), {}).items():
                            clock[:, agent] = np.maximum(clock[:, agent], value)
                self.release(parked, row)

            self.groups.wait((kind, warp), most, ready)
