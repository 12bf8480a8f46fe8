"""Tensor maps as the simulator keeps them: the 128 bytes hold what cuTensorMapEncodeTiled was given.

The layout inside is the simulator's own; the hardware's is not published. The two are told apart by a magic
number, so bytes that are no tensor map are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cubinery.runtime.manifest import TensorMapSpec

_MAGIC = b"simTMAP1"
_LAYOUT = struct.Struct("<8sBBBBB3xQ5Q4Q5H5B5x")
assert _LAYOUT.size <= 128

DTYPES = (
    "uint8", "uint16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64", "bfloat16",
    "float32_ftz", "tfloat32", "tfloat32_ftz", "16u4_align8b", "16u4_align16b", "16u6_align16b",
)  # fmt: skip
"""CUtensorMapDataType in the order of its values."""
SWIZZLES = ("none", "32B", "64B", "128B", "128B_atom_32B", "128B_atom_32B_flip_8B", "128B_atom_64B")
INTERLEAVES = ("none", "16B", "32B")
OOB_FILLS = ("zero", "nan")


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One tiled tensor map. Dimensions are listed from the innermost."""

    dtype: str
    address: int
    extents: tuple[int, ...]
    """Elements."""
    strides: tuple[int, ...]
    """Bytes, of dimensions 1 and up: one fewer than `extents`."""
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: str = "none"
    interleave: str = "none"
    oob_fill: str = "zero"

    @property
    def rank(self) -> int:
        return len(self.extents)

    @classmethod
    def of(cls, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]) -> TensorMap:
        """What a launch encodes. Raises ValueError for a word that is not known."""
        return cls(
            dtype=spec.dtype.lower(), address=address, extents=tuple(extents), strides=tuple(strides), box=spec.box,
            element_strides=spec.element_strides, swizzle=spec.swizzle, interleave=spec.interleave,
            oob_fill=spec.oob_fill,
        )  # fmt: skip

    def encode(self) -> bytes:
        """The 128 bytes. Raises ValueError for a word that is not known."""
        rank = self.rank
        pad = (0,) * (5 - rank)
        data = _LAYOUT.pack(
            _MAGIC, rank, DTYPES.index(self.dtype), SWIZZLES.index(self.swizzle), INTERLEAVES.index(self.interleave),
            OOB_FILLS.index(self.oob_fill), self.address, *self.extents, *pad, *self.strides, *pad, *self.box, *pad,
            *self.element_strides, *pad,
        )  # fmt: skip
        return data.ljust(128, b"\0")

    @classmethod
    def decode(cls, data: bytes) -> TensorMap:
        """Read 128 bytes back. Raises ValueError where they hold no tensor map."""
        magic, rank, dtype, swizzle, interleave, fill, address, *rest = _LAYOUT.unpack_from(data)
        if magic != _MAGIC or not 1 <= rank <= 5:
            raise ValueError("these 128 bytes hold no tensor map")
        extents, strides, box, steps = rest[:5], rest[5:9], rest[9:14], rest[14:19]
        return cls(
            DTYPES[dtype], address, tuple(extents[:rank]), tuple(strides[: rank - 1]), tuple(box[:rank]),
            tuple(steps[:rank]), SWIZZLES[swizzle], INTERLEAVES[interleave], OOB_FILLS[fill],
        )  # fmt: skip
