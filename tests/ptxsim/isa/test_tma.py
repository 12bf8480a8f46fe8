"""TMA boxes against a scalar oracle: element by element, from PTX ISA 5.5.3 (bounds) and 5.5.6 (swizzles)."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import DescriptorFault, MisalignedFault, OutOfBoundsFault
from cubinery.aot.ptxsim.isa import tma
from cubinery.aot.ptxsim.isa.tma import ELEMENTS, gather, multicast, shape, tile
from cubinery.aot.ptxsim.tensormap import TensorMap

BASE = 0x1000
SHARED = 16384


def tensor(
    extents: tuple[int, ...], box: tuple[int, ...], dtype: str = "uint16", steps: tuple[int, ...] = (), **rest: Any
) -> TensorMap:
    """A map whose rows are padded by 32 bytes."""
    strides, size = [], extents[0] * ELEMENTS[dtype].bits // 8
    for extent in extents[1:]:
        size = -(-size // 32) * 32 + 32
        strides.append(size)
        size *= extent
    return TensorMap(dtype, BASE, extents, tuple(strides), box, steps or (1,) * len(box), **rest)


class Memory:
    """Global memory from BASE on, filled with noise."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.data = np.random.default_rng(1).integers(1, 255, size).astype(np.uint8)

    def span(self, address: int, size: int) -> Any:
        if address < BASE or address + size > BASE + len(self.data):
            raise KeyError(address)
        return self.data[address - BASE : address - BASE + size]


def swizzled(address: int, name: str) -> int:
    """The swizzle of one byte's address, bit by bit (5.5.6)."""
    pairs = {"none": [], "32B": [(4, 7)], "64B": [(4, 7), (5, 8)], "128B": [(4, 7), (5, 8), (6, 9)],
             "128B_atom_32B": [(5, 7), (6, 8)]}[name]  # fmt: skip
    return address ^ sum((address >> high & 1) << low for low, high in pairs)


def elements(m: TensorMap, coords: tuple[int, ...]) -> list[tuple[int, bool]]:
    """(address, inside) of each element of a box of whole-byte elements, in the order of the box."""
    size = ELEMENTS[m.dtype].bits // 8
    steps = (1, *m.element_strides[1:])
    ranges = [range(-(-b // s)) for b, s in zip(m.box, steps, strict=True)]
    found = []
    for index in itertools.product(*reversed(ranges)):
        at = [c + i * s for c, i, s in zip(coords, reversed(index), steps, strict=True)]
        inside = all(0 <= a < e for a, e in zip(at, m.extents, strict=True))
        address = m.address + at[0] * size + sum(a * s for a, s in zip(at[1:], m.strides, strict=True))
        found.append((address, inside))
    return found


def check(m: TensorMap, coords: tuple[int, ...], at: int = 1024) -> None:
    """Load and store a box, compare every byte."""
    memory, size = Memory(), ELEMENTS[m.dtype].bits // 8
    nan = ELEMENTS[m.dtype].nan
    fill = nan.to_bytes(size, "little") if m.oob_fill == "nan" and nan is not None else bytes(size)
    t = tile(m, coords)
    shared = np.full(SHARED, 0xAA, np.uint8)
    t.put(shared, at, t.load(memory.span))
    expected = np.full(SHARED, 0xAA, np.uint8)
    listed = elements(m, coords)
    for i, (address, inside) in enumerate(listed):
        data = memory.span(address, size) if inside else fill
        for j in range(size):
            expected[swizzled(at + i * size + j, m.swizzle)] = data[j]
    assert (shared == expected).all()
    assert t.tx_bytes == t.shared_bytes == len(listed) * size
    touched = np.flatnonzero(expected != 0xAA) // 16 * 16
    assert set(touched.tolist()) <= set(t.addresses(at).tolist())

    before, after = memory.data.copy(), np.random.default_rng(2).integers(0, 255, SHARED).astype(np.uint8)
    t.store(memory.span, t.take(after, at))
    for i, (address, inside) in enumerate(listed):
        if inside:
            for j in range(size):
                before[address - BASE + j] = after[swizzled(at + i * size + j, m.swizzle)]
    assert (memory.data == before).all()


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B", "128B_atom_32B"])
def test_swizzles(swizzle: str) -> None:
    check(tensor((64, 20), (16 if swizzle == "32B" else 32, 12), swizzle=swizzle), (16, 3))


@pytest.mark.parametrize(
    ("extents", "box", "coords"),
    [
        ((64,), (24,), (48,)),
        ((64,), (24,), (-16,)),
        ((24, 7), (16, 4), (16, 5)),
        ((24, 7), (16, 4), (-8, -2)),
        ((24, 7), (16, 4), (32, 0)),
        ((24, 7), (16, 4), (0, 7)),
        ((8, 5, 4), (8, 3, 2), (0, 3, 3)),
        ((8, 5, 4), (8, 3, 2), (0, -1, -1)),
        ((8, 3, 2, 3), (8, 2, 2, 2), (0, 2, 1, -1)),
        ((8, 3, 2, 3, 2), (8, 2, 1, 2, 2), (8, 1, 1, 2, 1)),
    ],
)
@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_bounds(extents: tuple[int, ...], box: tuple[int, ...], coords: tuple[int, ...], fill: str) -> None:
    check(tensor(extents, box, "bfloat16", oob_fill=fill), coords)


@pytest.mark.parametrize("dtype", ["uint8", "float32", "int64", "float64"])
def test_widths(dtype: str) -> None:
    check(tensor((32, 9), (16, 5), dtype), (16, 6))


def test_element_strides_take_every_nth_row() -> None:
    m = tensor((16, 12, 5), (8, 7, 3), steps=(2, 3, 2))
    assert shape(m).counts == (8, 3, 2)  # dimension 0 stays dense
    check(m, (8, 5, 2))
    check(m, (0, -3, -2))


def test_rows_in_several_allocations() -> None:
    m, memory = tensor((16, 8), (16, 4)), Memory()

    def rows_only(address: int, size: int) -> Any:
        if size > 64:
            raise KeyError(address)
        return memory.span(address, size)

    t = tile(m, (0, 1))
    assert (t.load(rows_only) == t.load(memory.span)).all()
    with pytest.raises(KeyError):
        t.load(lambda address, size: (_ for _ in ()).throw(KeyError(address)))


@pytest.mark.parametrize(("dtype", "bits", "data"), [("16u4_align16b", 4, 8), ("16u6_align16b", 6, 12)])
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_padded_types_credit_packed_bytes_and_leave_the_padding(dtype: str, bits: int, data: int, swizzle: str) -> None:
    m, memory = tensor((256, 6), (128, 4), dtype, swizzle=swizzle), Memory()
    t = tile(m, (128, 4))  # two rows are outside
    assert (t.tx_bytes, t.shared_bytes) == (4 * 128 * bits // 8, 4 * 128)
    shared = np.full(SHARED, 0xAA, np.uint8)
    t.put(shared, 1024, t.load(memory.span))
    for row in range(4):
        for group in range(8):
            address = BASE + (4 + row) * m.strides[0] + (128 + 16 * group) * bits // 8
            expected = memory.span(address, data).tolist() if row < 2 else [0] * data
            at = swizzled(1024 + row * 128 + group * 16, swizzle)
            assert shared[at : at + 16].tolist() == expected + [0xAA] * (16 - data)
    assert (t.take(shared, 1024) == t.load(memory.span)).all()


def test_a_stage_of_fp6_and_fp4() -> None:
    """128 x 128 elements: 12288 and 8192 bytes credited, 16384 taken."""
    for dtype, credit in (("16u6_align16b", 12288), ("16u4_align16b", 8192)):
        t = tile(tensor((128, 128), (128, 128), dtype), (0, 0))
        assert (t.tx_bytes, t.shared_bytes) == (credit, 16384)


def test_packed_fp4_has_no_gaps() -> None:
    t = tile(tensor((64, 4), (64, 4), "16u4_align8b"), (0, 0))
    assert t.tx_bytes == t.shared_bytes == 128
    with pytest.raises(MisalignedFault, match="16 bytes"):
        tile(tensor((64, 4), (32, 4), "16u4_align8b"), (16, 0))


def test_gather4_takes_four_rows_anywhere() -> None:
    m, memory = tensor((64, 9), (32, 1), swizzle="64B"), Memory()
    t = gather(m, 16, (8, 0, -1, 8))
    assert t.tx_bytes == 4 * 64
    shared = np.zeros(SHARED, np.uint8)
    t.put(shared, 512, t.load(memory.span))
    for i, row in enumerate((8, 0, None, 8)):
        for j in range(64):
            expected = 0 if row is None else memory.data[row * m.strides[0] + 32 + j]
            assert shared[swizzled(512 + 64 * i + j, "64B")] == expected
    t.store(memory.span, np.full((4, 64), 7, np.uint8))  # scatter4 drops the row outside
    assert (memory.data[32 : 32 + 64] == 7).all()
    with pytest.raises(DescriptorFault, match="rank 2 and one row"):
        gather(tensor((64, 9), (32, 2)), 0, (0, 1, 2, 3))


def test_reduction_combines_what_lies_inside() -> None:
    m, memory = tensor((16, 3), (8, 2)), Memory()
    before = memory.data.copy()
    t = tile(m, (8, 2))
    t.store(memory.span, np.ones((2, 16), np.uint8), lambda old, new: old ^ new)
    changed = np.flatnonzero(memory.data != before)
    assert changed.tolist() == list(range(2 * m.strides[0] + 16, 2 * m.strides[0] + 32))


def test_innermost_start_of_no_multiple_of_16_bytes() -> None:
    with pytest.raises(MisalignedFault, match="coordinate 4 of 16-bit"):
        tile(tensor((64, 4), (8, 2)), (4, 0))
    with pytest.raises(MisalignedFault, match="128 elements"):
        tile(tensor((256, 4), (128, 2), "16u4_align16b"), (64, 0))


def test_misplaced_tiles() -> None:
    t = tile(tensor((64, 4), (8, 2)), (0, 0))
    with pytest.raises(MisalignedFault, match="128"):
        t.put(np.zeros(SHARED, np.uint8), 64, t.blank())
    with pytest.raises(OutOfBoundsFault):
        t.put(np.zeros(144, np.uint8), 128, t.blank())
    with pytest.raises(DescriptorFault, match="3 coordinates"):
        tile(tensor((64, 4), (8, 2)), (0, 0, 0))


@pytest.mark.parametrize(
    ("m", "rule"),
    [
        (tensor((64, 4), (8, 257)), "256"),
        (tensor((64, 4), (4, 2)), "multiple of 16"),
        (tensor((64, 4), (64, 2), swizzle="64B"), "swizzle's 64"),
        (tensor((64, 4), (8, 2), steps=(1, 9)), "element strides"),
        (tensor((64, 4), (8, 2), oob_fill="nan"), "NaN"),
        (tensor((128, 4), (64, 2), "16u6_align16b"), "128 elements in the box"),
        (tensor((128, 4), (128, 2), "16u6_align16b", swizzle="64B"), "swizzle's 64"),
        (TensorMap("uint8", BASE + 8, (64,), (), (16,), (1,)), "address"),
        (TensorMap("uint8", BASE, (64, 2), (72,), (16, 1), (1, 1)), "strides"),
        (tensor((64, 4, 2), (8, 2, 1), interleave="16B"), "not executed"),
    ],
)
def test_rules_of_the_driver(m: TensorMap, rule: str) -> None:
    with pytest.raises(DescriptorFault, match=rule):
        tile(m, (0,) * m.rank)


def test_multicast_masks() -> None:
    assert multicast(0b1011, 4) == (0, 1, 3)
    for mask in (0, 0b10000):
        with pytest.raises(DescriptorFault):
            multicast(mask, 4)


def test_loads_round_to_tf32() -> None:
    """To nearest, subnormals kept, NaN 0x7fffe000, as an H200 does; .tfloat32_ftz the same."""
    words = np.array([0x006A8721, 0xBFCBD4AC, 0x7F800001, 0xFF800000, 0x3F801000, 0x3F803000], np.uint32)
    rounded = [0x006A8000, 0xBFCBE000, 0x7FFFE000, 0xFF800000, 0x3F800000, 0x3F804000]
    assert tma.tf32(words.view(np.uint8)).view(np.uint32).tolist() == rounded


def test_a_box_is_stored_from_a_corner_that_is_not_negative() -> None:
    tma.check_store([0, 1000])
    with pytest.raises(OutOfBoundsFault, match="no negative"):
        tma.check_store([8, -1])


@pytest.mark.parametrize(
    ("dtype", "name", "old", "new", "found"),
    [("uint32", "inc", [3, 9], [5, 5], [4, 0]), ("int32", "min", [-3, 9], [5, 5], [-3, 5]),
     ("float16", "add", [0x3C00, 0x7C00], [0x3C00, 0], [0x4000, 0x7C00])],
)  # fmt: skip
def test_reductions(dtype: str, name: str, old: list[int], new: list[int], found: list[int]) -> None:
    """9.7.9.27.1.3: in the element type of the map."""
    kind = {"float16": np.uint16}.get(dtype, dtype)
    combine = tma.reduction(tensor((64, 4), (8, 2), dtype), name)
    assert combine is not None
    a, b = (np.array(x, kind).view(np.uint8) for x in (old, new))
    assert combine(a, b).view(kind).tolist() == found
    assert tma.reduction(tensor((64, 4), (8, 2), dtype), "") is None


@pytest.mark.parametrize(("dtype", "name"), [("uint8", "add"), ("float32", "min"), ("int32", "inc"), ("float16", "or")])
def test_reductions_that_do_not_exist(dtype: str, name: str) -> None:
    with pytest.raises(DescriptorFault, match="does not exist"):
        tma.reduction(tensor((64, 4), (16, 2), dtype), name)
