"""Matrix loads and asynchronous copies: shared memory moved in fragments and boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim import boxes
from cubinery.aot.ptxsim.barriers import Barriers
from cubinery.aot.ptxsim.faults import DescriptorFault, MisalignedFault, OutOfBoundsFault, UninitialisedFault
from cubinery.aot.ptxsim.isa import matrix_memory
from cubinery.aot.ptxsim.memory import GENERIC, AccessError
from cubinery.aot.ptxsim.state import LANES, Gang
from cubinery.aot.ptxsim.tensormap import TensorMap


class Copies(Barriers):
    """Copies as generated code sees them. Machine derives from this."""

    _maps: dict[bytes, TensorMap]

    def issue(self, queue: int, slot: int, land: Callable[[], None]) -> None:
        raise NotImplementedError

    # -- ldmatrix, stmatrix --------------------------------------------------------------------

    def _rows(self, g: Gang, k: int, address: Any, count: int) -> Any:
        """Byte index of each 16-byte row, (W, count); lane i holds the address of row i."""
        address = np.broadcast_to(address, (len(g), LANES))[:, :count]
        self._check_aligned(g, None, k, address, 16)
        return self.shared_index(g, None, k, address, 16)

    @staticmethod
    def _per_lane(g: Gang, rows: Any) -> Any:
        """Rows' indices spread over 32 lanes, for checks; lanes without a row repeat the first."""
        lanes = np.broadcast_to(rows[:, :1], (len(g), LANES)).copy()
        lanes[:, : rows.shape[1]] = rows
        return lanes

    def load_matrix(self, g: Gang, mask: Any, k: int, address: Any, form: matrix_memory.MatrixForm) -> list[Any]:
        """ldmatrix: the registers of each lane."""
        self._whole_warps(g, mask, k)
        index = self._rows(g, k, address, form.rows)
        block = self.shared.block
        if self.uninitialised:
            bad = block.unwritten(index, 8, 2, (True, True))
            if bad is not None and bad.any():
                lanes = np.zeros((len(g), LANES), bool)
                lanes[:, : form.rows] = bad
                self._unwritten(g, None, k, address, lanes, "shared")
        if self.races is not None:
            self.races.read(self, g, None, k, self._per_lane(g, index), 16)
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
        registers = np.stack([np.broadcast_to(v, (len(g), LANES)) for v in values], axis=1)
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
        found = self._maps.get(data)
        if found is None:
            try:
                found = self._maps[data] = TensorMap.decode(data)
            except ValueError as error:
                self.fail(DescriptorFault, f"tensor map: {error}", g, k)
        return found

    def tensor_load(
        self, g: Gang, mask: Any, k: int, destination: Any, tensor: Any, coords: tuple[Any, ...], barrier: Any
    ) -> None:
        """cp.async.bulk.tensor from global to shared memory: each executing lane copies one box."""
        shape = (len(g), LANES)
        active = np.ones(shape, bool) if mask is None else mask
        destination, tensor, barrier = (np.broadcast_to(v, shape) for v in (destination, tensor, barrier))
        where = np.stack([np.broadcast_to(c, shape).view(np.int32) for c in coords], axis=-1)
        for row, lane in np.argwhere(active).tolist():
            box = self.tensor_map(g, row, k, int(tensor[row, lane]))
            if box.rank != len(coords):
                self.fail(DescriptorFault, f"{len(coords)} coordinates for a tensor map of rank {box.rank}", g, k)
            at = int(destination[row, lane])
            key, _ = self.mbarrier_at(g, row, lane, k, int(barrier[row, lane]))
            self._tensor_load(g, row, lane, k, box, where[row, lane].tolist(), at, key)

    def _tensor_load(
        self, g: Gang, row: int, lane: int, k: int, box: TensorMap, coords: list[int], at: int, key: tuple[int, int]
    ) -> None:
        size = box.box[0] * boxes.element_size(box)
        if at % 128 or size % boxes.CHUNK:
            self.fail(MisalignedFault, f"a box of {size}-byte rows to {at:#x}: expected 128-byte alignment", g, k)
        addresses, valid, first, last = boxes.rows(box, coords)
        total = len(addresses) * size
        slot, offset = self.mbarrier_key(int(g.cta[row, 0]), at)
        if offset + total > self.shared.size:
            self.fail(OutOfBoundsFault, f"a box of {total} bytes to shared address {at:#x} of {self.shared.size}", g, k)
        pieces = self._sources(g, row, lane, k, addresses[valid] + first, last - first)
        start = slot * self.shared.stride + offset
        places = (slot * self.shared.stride) // boxes.CHUNK + boxes.chunks(box.swizzle, offset // boxes.CHUNK, total // boxes.CHUNK)
        clock = None
        if self.races is not None:
            local = self.races.async_agent(slot, key[1])
            units = np.arange(start // self.races.unit, (start + total) // self.races.unit)
            value = self.races.async_write(self, g, row, k, slot, local, units)
            clock = (self.races.agent(slot, local), value)

        def land() -> None:
            data = np.zeros((len(addresses), size), np.uint8)
            for block, index, rows in pieces:
                target = np.flatnonzero(valid)[rows]
                data[target, first:last] = block.data[index[:, None] + np.arange(last - first)]
            self.shared.chunks[places] = data.reshape(-1, boxes.CHUNK)
            self.shared.block.mark(start, start + total)
            self.complete_tx(key, total, clock)

        self.issue(0, slot, land)

    def _sources(self, g: Gang, row: int, lane: int, k: int, addresses: Any, size: int) -> list[tuple[Any, Any, Any]]:
        """(block, byte index of each row, which rows) of rows in global memory; bounds and contents checked."""
        if not len(addresses) or not size:
            return []
        address = addresses.astype(np.uint64)[None]
        where = np.zeros((len(g), LANES), bool)
        where[row, lane] = True
        try:
            found = self.memory.pieces(address, np.ones(address.shape, bool), size)
        except AccessError as error:
            first = int(address[np.broadcast_to(error.lanes, address.shape)][0])
            self.fail(OutOfBoundsFault, f"a box reads {error.message(first)}", g, k, where)
        result = []
        for allocation, inside in found:
            rows = np.flatnonzero(inside[0])
            index = (address[0, rows] - np.uint64(allocation.origin)).astype(np.int64)
            if self.uninitialised and allocation.block.written is not None:
                marks = allocation.block.written[index[:, None] + np.arange(size)]
                if not marks.all():
                    at = int(address[0, rows[int(np.argmin(marks.all(axis=1)))]])
                    self.fail(UninitialisedFault, f"a box reads the row at {at:#x}, never written as a whole", g, k, where)
            result.append((allocation.block, index, rows))
        return result
