"""Tensor memory: allocation, fragments of ld and st, cp and shift against the figures of PTX ISA 9.7.16.2.3."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import DescriptorFault, TensorMemoryFault
from cubinery.aot.ptxsim.isa.descriptors import SmemDescriptor
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES
from cubinery.aot.ptxsim.isa.tensor_memory import (
    CELLS,
    COLUMNS,
    AccessForm,
    Allocator,
    CopyForm,
    cells,
    check_access,
    copy,
    load,
    reduce_registers,
    shift_down,
    store,
)

RNG = np.random.default_rng(4)


def place(shape: str, lane: int, register: int, offset: int = 0) -> tuple[int, int]:
    """(row, column) of a register, written down from the figures, bit by bit where CuTe's copy traits have strides."""
    g, t = lane >> 2, lane & 3
    if shape == "32x32b":
        return lane, register
    if shape == "16x32bx2":  # threads 0-15 the first half, 16-31 the second
        return lane & 15, register + (offset if lane >= 16 else 0)
    if shape == "16x64b":  # thread bit 0: 8 rows, bit 1: one column, bits 2-4: rows
        return g + (8 if t & 1 else 0), 2 * register + (t >> 1)
    repetition, inner = divmod(register, {"16x128b": 2, "16x256b": 4}[shape])
    if shape == "16x128b":  # four threads a row of four columns; second register eight rows below
        return g + 8 * inner, 4 * repetition + t
    return g + (8 if inner >= 2 else 0), 8 * repetition + 2 * t + (inner & 1)


SHAPES = ["32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 8, 128])
@pytest.mark.parametrize("pack", [False, True])
def test_fragments(shape: str, count: int, pack: bool) -> None:
    columns = {"16x64b": 2, "16x128b": 4, "16x256b": 8}.get(shape, 1)
    count = min(count, 128 // max(columns // 2, 1) // (2 if pack else 1))
    offset = 256 if shape == "16x32bx2" and count > 8 else 37 if shape == "16x32bx2" else 0
    form = AccessForm(shape, count, pack, offset)
    assert form.columns <= COLUMNS
    memory = RNG.integers(0, 1 << 32, 2 * CELLS, dtype=np.uint64).astype(np.uint32)
    base = np.array([CELLS + 16 * COLUMNS + 3 if form.columns < 500 else CELLS + 16 * COLUMNS, 0])
    got = load(memory, base, form)
    assert got.shape == (2, form.registers, 32)
    seen = set()
    for warp in range(2):
        for lane in range(32):
            for register in range(form.registers):
                row, column = place(shape, lane, register)
                shift = offset if shape == "16x32bx2" and lane >= 16 else 0
                at = int(base[warp]) + row * COLUMNS + (2 * column if pack else column) + shift
                expected = int(memory[at])
                if pack:
                    expected = expected & 0xFFFF | (int(memory[at + 1]) & 0xFFFF) << 16
                assert int(got[warp, register, lane]) == expected
                seen.add(at)
                assert (at % COLUMNS - int(base[warp]) % COLUMNS) < form.columns
    assert len(seen) == 2 * 32 * form.registers  # no cell twice
    other = np.zeros_like(memory)
    store(other, base, form, got)
    assert (load(other, base, form) == got).all()
    touched = (base[:, None, None, None] + cells(form)).ravel()
    assert set(np.flatnonzero(other).tolist()) <= set(touched.tolist())
    if pack:
        assert (other <= 0xFFFF).all()
    else:
        assert (other[touched] == memory[touched]).all()


def test_registers_of_each_shape() -> None:
    """Table of 9.7.16.8.1: registers of .x1."""
    assert [AccessForm(s, 1).registers for s in SHAPES] == [1, 1, 2, 4, 1]
    assert [AccessForm(s, 4).columns for s in SHAPES] == [4, 8, 16, 32, 4]
    assert AccessForm("32x32b", 4, pack=True).columns == 8
    assert AccessForm("16x32bx2", 4, half_offset=10).columns == 14


def test_a_warp_reaches_its_own_lanes() -> None:
    assert check_access(AccessForm("32x32b", 2), 32 << 16 | 7, 5) == (32, 7)
    assert check_access(AccessForm("16x64b", 2), 48 << 16, 1) == (48, 0)
    for shape, lane in (("32x32b", 0), ("32x32b", 48), ("16x64b", 40), ("16x256b", 64)):
        with pytest.raises(TensorMemoryFault, match="expected lane 32"):
            check_access(AccessForm(shape, 1), lane << 16, 1)
    with pytest.raises(TensorMemoryFault, match="past column 511"):
        check_access(AccessForm("32x32b", 128), 400, 0)


def test_reductions_over_a_threads_registers() -> None:
    floats = np.array([[1.0, -5.0], [np.nan, 2.0]], np.float32)  # (registers, two threads)
    bits = np.tile(floats[:, :1], (1, 32)).view(np.uint32)[None]
    bits[0, :, 1] = floats[:, 1].view(np.uint32)

    def value(*rest: Any) -> list[float]:
        return reduce_registers(bits, *rest).view(np.float32)[0, :2].tolist()

    assert value("max", "f32") == [1.0, 2.0]
    assert value("min", "f32") == [1.0, -5.0]
    assert value("max", "f32", True) == [1.0, 5.0]
    assert int(reduce_registers(bits, "max", "f32", False, True)[0, 0]) == 0x7FFFFFFF
    words = np.full((1, 2, 32), 5, np.uint32)
    words[0, 1] = 0xFFFFFFFE
    assert int(reduce_registers(words, "max", "u32")[0, 0]) == 0xFFFFFFFE
    assert int(reduce_registers(words, "max", "s32")[0, 0]) == 5
    assert int(reduce_registers(words, "min", "s32")[0, 0]) == 0xFFFFFFFE


# -- allocation ----------------------------------------------------------------------------------------


def test_allocation_waits_frees_and_leaks() -> None:
    memory = Allocator()
    assert [memory.alloc(256), memory.alloc(128)] == [0, 256]
    assert memory.alloc(256) is None
    memory.require(0, 384, "ld")
    with pytest.raises(TensorMemoryFault, match="column 384"):
        memory.require(380, 390, "ld")
    memory.dealloc(0, 256)
    with pytest.raises(TensorMemoryFault, match="column 0"):
        memory.require(0, 4, "mma")
    assert memory.alloc(256) == 0
    memory.dealloc(0, 256)
    assert memory.leaked() == "128 columns at 0x100"
    memory.dealloc(256, 128)
    assert memory.leaked() == ""


def test_allocation_misuse() -> None:
    memory = Allocator()
    for wrong in (16, 48, 0, 1024):
        with pytest.raises(TensorMemoryFault, match="power of two"):
            memory.alloc(wrong)
    memory.alloc(64)
    for address, count in ((0, 32), (32, 64), (1 << 16, 64)):
        with pytest.raises(TensorMemoryFault, match="dealloc"):
            memory.dealloc(address, count)
    memory.relinquish()
    with pytest.raises(TensorMemoryFault, match="relinquish"):
        memory.alloc(32)
    memory.dealloc(0, 64)
    with pytest.raises(TensorMemoryFault, match="nothing"):
        memory.dealloc(0, 64)


def test_allocation_keeps_to_what_the_launch_declares() -> None:
    memory = Allocator(declared=128)
    assert memory.alloc(64) == 0
    with pytest.raises(TensorMemoryFault, match="alloc of 128 columns beside 64: the launch declares 128"):
        memory.alloc(128)
    assert memory.alloc(64) == 64
    with pytest.raises(TensorMemoryFault, match="alloc of 32 columns: the launch declares 0"):
        Allocator(declared=0).alloc(32)


# -- cp and shift --------------------------------------------------------------------------------------

TARGETS: dict[tuple[str, str], Any] = {
    ("128x256b", ""): lambda row: [row],
    ("128x128b", ""): lambda row: [row],
    ("4x256b", ""): lambda row: [32 * row],
    ("64x128b", "warpx2::02_13"): lambda row: [row, row + 64],
    ("64x128b", "warpx2::01_23"): lambda row: [row, row + 32] if row < 32 else [row + 32, row + 64],
    ("32x128b", "warpx4"): lambda row: [row, row + 32, row + 64, row + 96],
}


@pytest.mark.parametrize("case", list(TARGETS))
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_copies(case: tuple[str, str], swizzle: str) -> None:
    form = CopyForm(*case)
    assert form.exists
    rows, size = int(case[0].split("x")[0]), int(case[0].split("x")[1][:-1]) // 8
    shared = RNG.integers(0, 256, 1 << 15).astype(np.uint8)
    d = SmemDescriptor(1024, 2048, 128 if swizzle == "none" else 1024, SWIZZLES[swizzle], version=1)
    memory = np.zeros((128, COLUMNS), np.uint32)
    copy(form, d, shared, memory, 8)
    expected = np.zeros((128, COLUMNS * 4), np.uint8)
    for row in range(rows):
        for byte in range(size):
            if swizzle == "none":
                at = 1024 + row % 8 * 16 + row // 8 * 128 + byte // 16 * 2048 + byte % 16
            else:
                at = 1024 + row % 8 * 128 + row // 8 * 1024 + byte
                at ^= (at >> 7 & 7) << 4
            for lane in TARGETS[case](row):
                expected[lane, 32 + byte] = shared[at]
    assert (memory.view(np.uint8) == expected).all()


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_copies_widen(source: str, bits: int) -> None:
    shared = RNG.integers(0, 256, 4096).astype(np.uint8)
    memory = np.zeros((128, COLUMNS), np.uint32)
    copy(CopyForm("32x128b", "warpx4", source), SmemDescriptor(1024, 0, 128, SWIZZLES["none"]), shared, memory, 0)
    for row in (0, 9, 31):
        start = 1024 + row * 16
        word = int.from_bytes(shared[start : start + 16].tobytes(), "little")
        expected = [word >> i * bits & (1 << bits) - 1 for i in range(16)]
        assert memory[row, :4].view(np.uint8).tolist() == expected


def test_copies_outside() -> None:
    d = SmemDescriptor(1024, 0, 128, SWIZZLES["none"])
    for address in (510, 16 << 16):
        with pytest.raises(DescriptorFault, match="outside of tensor memory"):
            copy(CopyForm("128x128b"), d, np.zeros(8192, np.uint8), np.zeros((128, COLUMNS), np.uint32), address)
    assert not CopyForm("64x128b").exists
    assert not CopyForm("32x128b", "warpx2::02_13").exists


def test_shift_moves_each_row_into_the_one_before() -> None:
    memory = np.arange(128 * COLUMNS, dtype=np.uint32).reshape(128, COLUMNS)
    before = memory.copy()
    shift_down(memory, 32 << 16 | 16)
    assert (memory[32:63, 16:24] == before[33:64, 16:24]).all()
    memory[32:63, 16:24] = before[32:63, 16:24]
    assert (memory == before).all()
    with pytest.raises(TensorMemoryFault):
        shift_down(memory, 8 << 16)
