"""Boxes that TMA copies: the data side of cp.async.bulk.tensor in tile mode (PTX ISA 5.5.3 to 5.5.6, 9.7.9.27.1).

A `Tile` is one box at one place: where its rows lie in global memory, which parts exist, and how it lies in shared
memory. The machine calls `tile(...)` (or `gather(...)` for tile::gather4 and scatter4), then

- load: `image = t.load(span)`, later `t.put(shared, address, image)`, and credits `t.tx_bytes` to the barrier; with
  .multicast::cluster the same box goes to the same offset of every CTA in the mask, and each CTA's barrier gets it all;
- store and reduce: `image = t.take(shared, address)`, then `t.store(span, image)` with the function that combines;
- prefetch: nothing but the checks that `tile` makes.

`span(address, size)` returns the bytes of global memory there (a uint8 view) or raises KeyError. Called with marks
instead of data, `t.load` checks initialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import DescriptorFault, MisalignedFault, OutOfBoundsFault
from cubinery.aot.ptxsim.isa.async_copy import combine
from cubinery.aot.ptxsim.isa.containers import DATA_BYTES
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES, chunks
from cubinery.aot.ptxsim.tensormap import TensorMap

Array = Any
Span = Callable[[int, int], Array]
MAX_BOX = 256
_CHUNK = np.dtype("V16")
"""Sixteen bytes, which NumPy moves at once."""


@dataclass(frozen=True, slots=True)
class ElementType:
    """An element type of tensor maps."""

    name: str
    bits: int
    nan: int | None = None
    """The code that fills elements out of bounds under `oob_fill: nan`; None for types that have none."""
    padded: str = ""
    """Name of the padded container in shared memory: 16 bytes for 16 elements."""
    ptx: str = ""
    """The type that .reduce computes in."""
    rounds: bool = False
    """A load rounds to tf32."""


_NAN16, _NAN32, _NAN64 = 0x7FF7, 0x7FF77FF7, 0x7FF77FF77FF77FF7
"""What an H200 fills with: one pattern of 16 bits, repeated."""
ELEMENTS: dict[str, ElementType] = {
    element.name: element
    for element in (
        ElementType("uint8", 8),
        ElementType("uint16", 16),
        ElementType("uint32", 32, ptx="u32"),
        ElementType("int32", 32, ptx="s32"),
        ElementType("uint64", 64, ptx="u64"),
        ElementType("int64", 64, ptx="s64"),
        ElementType("float16", 16, _NAN16, ptx="f16"),
        ElementType("float32", 32, _NAN32, ptx="f32"),
        ElementType("float64", 64, _NAN64, ptx="f64"),
        ElementType("bfloat16", 16, _NAN16, ptx="bf16"),
        ElementType("float32_ftz", 32, _NAN32, ptx="f32"),
        ElementType("tfloat32", 32, _NAN32, rounds=True),
        ElementType("tfloat32_ftz", 32, _NAN32, rounds=True),
        ElementType("16u4_align8b", 4),
        ElementType("16u4_align16b", 4, padded="b4x16_p64"),
        ElementType("16u6_align16b", 6, padded="b6x16_p32"),
    )
}
"""By the name that manifests use: CUtensorMapDataType without its prefix, lower case."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a tensor map's box is like wherever it lies."""

    element: ElementType
    counts: tuple[int, ...]
    """Elements that a box takes from each dimension; dimension 0 is always dense."""
    row_bytes: int
    """Bytes of a row in global memory, packed."""
    row_shared: int
    """Bytes of a row in shared memory, the padding of sub-byte containers included."""


@lru_cache(maxsize=256)
def shape(m: TensorMap) -> Shape:
    """The shape of a map's boxes, after a check of the rules of cuTensorMapEncodeTiled.

    Raises DescriptorFault with the rule that is broken; the real driver refuses such a map with INVALID_VALUE.
    """
    element = ELEMENTS.get(m.dtype)
    if element is None or m.swizzle not in SWIZZLES or m.interleave != "none":
        raise DescriptorFault(f"tensor map of {m.dtype}, swizzle {m.swizzle}, interleave {m.interleave}: not executed")
    steps = (1, *m.element_strides[1:])
    row_bytes = m.box[0] * element.bits // 8
    result = Shape(
        element,
        tuple(-(-size // step) for size, step in zip(m.box, steps, strict=True)),
        row_bytes,
        m.box[0] if element.padded else row_bytes,
    )
    for broken, rule in _rules(m, result):
        if broken:
            raise DescriptorFault(f"tensor map: {rule}")
    return result


def _rules(m: TensorMap, s: Shape) -> list[tuple[bool, str]]:
    """(broken, what is expected) for the rules of cuTensorMapEncodeTiled without interleave."""
    padded, inner, span = bool(s.element.padded), s.row_shared, SWIZZLES[m.swizzle].span
    align = 32 if padded else 16
    return [
        (m.address % align != 0, f"address {m.address:#x}: expected a multiple of {align}"),
        (any(not 1 <= e <= 1 << 32 for e in m.extents), f"extents {m.extents}: expected 1 to 2**32"),
        (any(b % align or not 0 <= b < 1 << 40 for b in m.strides),
         f"strides {m.strides}: expected multiples of {align} below 2**40"),
        (any(not 1 <= b <= MAX_BOX for b in m.box), f"box {m.box}: expected 1 to {MAX_BOX}"),
        (any(not 1 <= e <= 8 for e in m.element_strides), f"element strides {m.element_strides}: expected 1 to 8"),
        (inner % 16 != 0, f"box {m.box}: {inner} bytes innermost, expected a multiple of 16"),
        (m.swizzle != "none" and inner > span,
         f"box {m.box}: {inner} bytes innermost, expected at most the swizzle's {span}"),
        (padded and (m.box[0] != 128 or m.extents[0] % 128 != 0),
         f"box {m.box}, extents {m.extents}: padded types need 128 elements in the box, a multiple of 128 in all"),
        (s.element.bits == 4 and m.extents[0] % 2 != 0, f"extents {m.extents}: expected an even number"),
        (m.oob_fill == "nan" and s.element.nan is None, f"NaN fill for {m.dtype}: expected a floating-point type"),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Inside:
    """What is the same of all boxes of a map that lie inside the tensor."""

    rows: Array
    """Where each row starts, from the first one: (R,) of int64."""
    exists: Array
    """All rows do: (R,) of bool."""
    size: int
    """Bytes from the first one of a box to its last."""
    chunks: Array
    """The box's 16-byte chunks, counted from its first byte; None where it cannot be cut into such."""


@dataclass(frozen=True, slots=True)
class Tile:
    """One box at one place: R rows, all with the same innermost part."""

    map: TensorMap
    shape: Shape
    rows: Array
    """Global address of each row's innermost start, in bounds or not: (R,) of int64."""
    exists: Array
    """Rows that lie in the tensor: (R,) of bool."""
    first: int
    """Bytes [first, last) of a row lie in the tensor; the rest is filled (load) or dropped (store)."""
    last: int
    inside: Inside | None = None
    """Where all of the box lies in the tensor."""

    @property
    def tx_bytes(self) -> int:
        """What a load credits to the barrier: the whole box, packed, out of bounds or not."""
        return len(self.rows) * self.shape.row_bytes

    @property
    def shared_bytes(self) -> int:
        """What the box takes in shared memory."""
        return len(self.rows) * self.shape.row_shared

    def blank(self) -> Array:
        """The box filled as out of bounds: (R, row bytes packed) of uint8."""
        element = self.shape.element
        image = np.zeros((len(self.rows), self.shape.row_bytes), np.uint8)
        if self.map.oob_fill == "nan" and element.nan is not None:
            image[:] = np.frombuffer(element.nan.to_bytes(element.bits // 8, "little") * self.map.box[0], np.uint8)
        return image

    def extent(self) -> tuple[int, int]:
        """(address, size) of the global memory from the first to the last byte touched; size 0 where none is."""
        if self.inside is not None:
            return int(self.rows[0]), self.inside.size
        if self.first >= self.last or not self.exists.any():
            return 0, 0
        low = int(self.rows[self.exists].min()) + self.first
        return low, int(self.rows[self.exists].max()) + self.last - low

    def load(self, span: Span) -> Array:
        """The box from global memory: (R, row bytes packed) of uint8."""
        low, size = self.extent()
        if self.inside is not None and self.inside.chunks is not None and not self.shape.element.rounds:
            with suppress(KeyError):  # its rows lie in several allocations
                data = span(low, size).view(_CHUNK).take(self.inside.chunks)
                return data.view(np.uint8).reshape(len(self.rows), -1)
        image = self.blank()
        if size:
            data = self._window(span, low, size)
            image[self.exists, self.first : self.last] = tf32(data) if self.shape.element.rounds else data
        return image

    def _window(self, span: Span, low: int, size: int) -> Array:
        rows = self.rows[self.exists] + self.first
        width = self.last - self.first
        try:
            data = span(low, size)
        except KeyError:  # rows in several allocations, or one that does not exist: that row's KeyError then counts
            return np.stack([span(int(row), width) for row in rows])
        return data.take((rows - low)[:, None] + np.arange(width))

    def store(self, span: Span, image: Array, combine: Callable[[Array, Array], Array] | None = None) -> None:
        """Write the parts of a packed image that lie in the tensor; `combine(old, new)` for a reduction."""
        if self.first >= self.last:
            return
        for row, data in zip(self.rows[self.exists], image[self.exists, self.first : self.last], strict=True):
            target = span(int(row) + self.first, len(data))
            target[:] = data if combine is None else combine(target, data)

    def _chunks(self, shared: Array, address: int) -> tuple[Array, Array, int]:
        """(shared memory as chunks of 16 bytes, the box's chunk numbers, bytes used of each).

        Chunks are elements where all of their bytes are used, and rows otherwise.
        """
        self.check_shared(address, len(shared))
        where = chunks(address, self.shared_bytes // 16, SWIZZLES[self.map.swizzle]) >> 4
        memory, padded = shared[: len(shared) & ~15], self.shape.element.padded
        return (memory.reshape(-1, 16), where, DATA_BYTES[padded]) if padded else (memory.view(_CHUNK), where, 16)

    def check_shared(self, address: int, size: int) -> None:
        """Bounds and alignment of the box in shared memory (PTX ISA 5.5.4: 128 bytes)."""
        if address % 128:
            raise MisalignedFault(f"a tile at shared address {address:#x}: expected a multiple of 128")
        if address < 0 or address + self.shared_bytes > size:
            raise OutOfBoundsFault(
                f"a tile of {self.shared_bytes} bytes at shared address {address:#x}: expected an end by {size:#x}"
            )

    def addresses(self, address: int) -> Array:
        """Shared addresses of the 16-byte chunks that the box takes, in the order of the box."""
        return chunks(address, self.shared_bytes // 16, SWIZZLES[self.map.swizzle])

    def put(self, shared: Array, address: int, image: Array) -> None:
        """Write a packed image into one CTA's shared memory (uint8 by shared address), swizzled.

        The padding of sub-byte containers keeps what it held.
        """
        memory, where, used = self._chunks(shared, address)
        if used == 16:
            memory[where] = image.reshape(-1).view(_CHUNK)
        else:
            memory[where, :used] = image.reshape(-1, used)

    def take(self, shared: Array, address: int) -> Array:
        """The packed image of a box in shared memory."""
        memory, where, used = self._chunks(shared, address)
        image = memory[where].view(np.uint8) if used == 16 else memory[where, :used]
        return image.reshape(len(self.rows), self.shape.row_bytes)


def _inner(m: TensorMap, s: Shape, coordinate: int) -> tuple[int, int, int]:
    """(start of the row in bytes, first, last byte of it that lies in the tensor) for an innermost coordinate.

    A start that is no multiple of 16 bytes raised an illegal instruction on an H200; padded types need 128 elements.
    """
    element, row = s.element, s.row_bytes
    bits = coordinate * element.bits
    if bits % 128 or (element.padded and coordinate % 128):
        expected = "128 elements" if element.padded else "16 bytes"
        raise MisalignedFault(
            f"innermost coordinate {coordinate} of {element.bits}-bit elements: expected a multiple of {expected}"
        )
    start, width = bits // 8, m.extents[0] * element.bits // 8
    return start, min(max(0, -start), row), max(0, min(row, width - start))


@lru_cache(maxsize=256)
def _within(m: TensorMap) -> Inside:
    """What is the same of all boxes inside the tensor."""
    rows = np.zeros(1, np.int64)
    for d, count in enumerate(shape(m).counts[1:], 1):
        steps = np.arange(count, dtype=np.int64) * m.element_strides[d] * m.strides[d - 1]
        rows = (steps[:, None] + rows).ravel()
    width = shape(m).row_bytes
    pieces = None
    if width % 16 == 0 and not (rows % 16).any():
        pieces = (rows[:, None] // 16 + np.arange(width // 16)).ravel()
    return Inside(rows, np.ones(len(rows), bool), int(rows.max()) + width, pieces)


def tile(m: TensorMap, coordinates: Sequence[int]) -> Tile:
    """The box whose lowest corner is at signed `coordinates`, innermost first (PTX ISA 5.5.3)."""
    if len(coordinates) != m.rank:
        raise DescriptorFault(f"{len(coordinates)} coordinates for a tensor map of rank {m.rank}")
    s = shape(m)
    counts = s.counts
    start, first, last = _inner(m, s, coordinates[0])
    upper = range(1, m.rank)
    if all(0 <= coordinates[d] <= m.extents[d] - 1 - (counts[d] - 1) * m.element_strides[d] for d in upper):
        base = m.address + start + sum(coordinates[d] * m.strides[d - 1] for d in upper)
        known = _within(m)
        whole = first == 0 and last == s.row_bytes
        return Tile(m, s, known.rows + base, known.exists, first, last, known if whole else None)
    rows = np.full(1, m.address + start, np.int64)
    exists = np.ones(1, bool)
    for d in range(1, m.rank):
        at = coordinates[d] + np.arange(counts[d], dtype=np.int64) * m.element_strides[d]
        inside = (at >= 0) & (at < m.extents[d])
        rows = (at[:, None] * m.strides[d - 1] + rows).ravel()
        exists = (inside[:, None] & exists).ravel()
    return Tile(m, s, rows, exists, first, last)


def check_store(coordinates: Sequence[int]) -> None:
    """A box may pass the end of the tensor where it is stored, but on an H200 a negative corner is illegal."""
    if min(coordinates) < 0:
        raise OutOfBoundsFault(f"a box stored at {tuple(coordinates)}: expected no negative coordinate")


def reduction(m: TensorMap, name: str) -> Callable[[Array, Array], Array] | None:
    """The function of (old, new) bytes of cp.reduce.async.bulk.tensor; None for a store.

    Raises DescriptorFault where the map's element type has no such reduction.
    """
    if not name:
        return None
    try:
        return combine(name, ELEMENTS[m.dtype].ptx)
    except (KeyError, ValueError):
        raise DescriptorFault(f"reduction .{name} with a tensor map of {m.dtype}: does not exist") from None


def tf32(data: Array) -> Array:
    """Bytes of f32 rounded to nearest tf32, NaN canonical; neither this nor .float32_ftz flushes, on an H200."""
    bits = np.ascontiguousarray(data).view(np.uint32)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    rounded = (bits + np.uint32(0x0FFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
    return np.where(nan, np.uint32(0x7FFFE000), rounded).view(np.uint8)


def gather(m: TensorMap, column: int, rows: Sequence[int]) -> Tile:
    """Four rows of a 2-D tensor from one column on: tile::gather4 and tile::scatter4 (PTX ISA 5.5.6)."""
    if m.rank != 2 or m.box[1] != 1 or len(rows) != 4:
        raise DescriptorFault(f"gather4 with a map of rank {m.rank} and box {m.box}: expected rank 2 and one row")
    start, first, last = _inner(m, shape(m), column)
    at = np.asarray(rows, np.int64)
    return Tile(m, shape(m), m.address + start + at * m.strides[0], (at >= 0) & (at < m.extents[1]), first, last)


def multicast(mask: int, cluster: int) -> tuple[int, ...]:
    """CTA ranks in a 16-bit mask; raises DescriptorFault for a rank that the cluster does not have."""
    ranks = tuple(rank for rank in range(16) if mask >> rank & 1)
    if not ranks or ranks[-1] >= cluster:
        raise DescriptorFault(f"multicast mask {mask:#06x} in a cluster of {cluster}: expected ranks below {cluster}")
    return ranks
