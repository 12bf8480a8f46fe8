"""Boxes of tiled tensor maps: which bytes of global memory a copy touches and where they lie in shared memory.

PTX ISA 5.5.3 (tiled mode, bounds), 5.5.6 (swizzles).
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.tensormap import TensorMap

_SIZES = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "uint64": 8, "int64": 8, "float64": 8}
_SWIZZLED = {"none": 0, "32B": 1, "64B": 3, "128B": 7}
"""Bits of the 16-byte chunk number that a swizzle changes, by the bits three places above."""
CHUNK = 16


def element_size(box: TensorMap) -> int:
    """Bytes of an element in global memory. Raises ValueError for packed sub-byte types."""
    if box.dtype.startswith("16u"):
        raise ValueError(f"element type {box.dtype} is not executed")
    return _SIZES.get(box.dtype, 4)


@functools.lru_cache(maxsize=256)
def _steps(box: TensorMap) -> tuple[Any, Any]:
    """Coordinates of each row of a box relative to its start (rows, rank - 1), and byte steps (rank - 1,)."""
    counts = box.box[1:]
    rows = np.arange(int(np.prod(counts, dtype=np.int64)))
    columns, below = [], 1
    for count, step in zip(counts, box.element_strides[1:], strict=True):
        columns.append(rows // below % count * step)
        below *= count
    relative = np.stack(columns, axis=1) if columns else np.zeros((1, 0), np.int64)
    return relative, np.array(box.strides, np.int64)


def rows(box: TensorMap, coords: list[int]) -> tuple[Any, Any, int, int]:
    """(addresses, valid) of a box's rows, and the bytes [first, last) of a row that lie inside the tensor.

    `addresses` are those of the row's byte 0, whether it is inside or not.
    """
    relative, strides = _steps(box)
    at = relative + np.array(coords[1:], np.int64)
    valid = ((at >= 0) & (at < np.array(box.extents[1:], np.int64))).all(axis=1)
    size = element_size(box)
    addresses = box.address + at @ strides + coords[0] * size
    first = min(max(-coords[0], 0), box.box[0]) * size
    last = min(max(box.extents[0] - coords[0], 0), box.box[0]) * size
    return addresses, valid, first, max(last, first)


@functools.lru_cache(maxsize=1024)
def chunks(swizzle: str, start: int, count: int) -> Any:
    """Chunk numbers in shared memory of `count` consecutive chunks from `start`, swizzled by absolute address."""
    linear = start + np.arange(count)
    result = linear ^ ((linear >> 3) & _SWIZZLED[swizzle])
    result.setflags(write=False)
    return result
