"""Matrix loads and asynchronous copies: shared memory moved in fragments and boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.barriers import Barriers
from cubinery.aot.ptxsim.faults import DescriptorFault, OutOfBoundsFault
from cubinery.aot.ptxsim.memory import GENERIC, SHARED_BASE
from cubinery.aot.ptxsim.state import LANES, Gang

_ROW = np.arange(16)


class Copies(Barriers):
    """Copies as generated code sees them. Machine derives from this."""

    def issue(self, queue: int, slot: int, land: Callable[[], None]) -> None:
        raise NotImplementedError

    # -- ldmatrix, stmatrix --------------------------------------------------------------------

    def _rows(self, g: Gang, k: int, address: Any, count: int) -> Any:
        """Byte index of each row: (W, 8 * count)."""
        address = np.broadcast_to(address, (len(g), LANES))[:, : 8 * count]
        self._check_aligned(g, None, k, address, 16)
        return self.shared_index(g, None, k, address, 16)

    def load_matrix(self, g: Gang, mask: Any, k: int, address: Any, count: int, trans: bool) -> list[Any]:
        """ldmatrix: `count` 8 x 8 matrices of 16-bit elements; lane i gives the address of row i."""
        self._whole_warps(g, mask, k)
        index = self._rows(g, k, address, count)
        block = self.shared.block
        if self.uninitialised:
            bad = block.unwritten(index, 8, 2, (True, True))
            if bad is not None and bad.any():
                padded = np.zeros((len(g), LANES), bool)
                padded[:, : 8 * count] = bad
                self._unwritten(g, None, k, np.broadcast_to(address, (len(g), LANES)), padded, "shared")
        if self.races is not None:
            padded = np.broadcast_to(index[:, :1], (len(g), LANES)).copy()
            padded[:, : 8 * count] = index
            self.races.read(self, g, None, k, padded, 16)
        from cubinery.aot.ptxsim.isa.matrix import ldmatrix

        return list(ldmatrix(block.data[index[..., None] + _ROW], count, trans))

    def store_matrix(self, g: Gang, mask: Any, k: int, address: Any, values: tuple[Any, ...], trans: bool) -> None:
        """stmatrix: the reverse of ldmatrix."""
        self._whole_warps(g, mask, k)
        index = self._rows(g, k, address, len(values))
        if self.races is not None:
            padded = np.broadcast_to(index[:, :1], (len(g), LANES)).copy()
            padded[:, : 8 * len(values)] = index
            self.races.write(self, g, None, k, padded, 16)
        from cubinery.aot.ptxsim.isa.matrix import stmatrix

        rows = stmatrix([np.broadcast_to(v, (len(g), LANES)) for v in values], trans)
        at = index[..., None] + _ROW
        self.shared.block.data[at] = rows
        if self.shared.block.written is not None:
            self.shared.block.written[at] = 255

    # -- cp.async.bulk.tensor ------------------------------------------------------------------

    def tensor_map(self, g: Gang, row: int, k: int, address: int) -> Any:
        """The decoded tensor map at a generic address (a parameter, or global memory)."""
        base = GENERIC["param"]
        if base <= address < base + len(self.params.data):
            data = self.params.data[address - base : address - base + 128].tobytes()
        else:
            try:
                data = self.memory.bytes(address, 128).tobytes()
            except KeyError:
                self.fail(OutOfBoundsFault, f"no tensor map at {address:#x}", g, k)
        from cubinery.aot.ptxsim.isa.tma import TensorMap

        try:
            return TensorMap.decode(data)
        except ValueError as error:
            self.fail(DescriptorFault, f"tensor map: {error}", g, k)
