"""mma.sync and movmatrix against scalar oracles from the PTX ISA's fragment formulas (9.7.14.5.7 to 9.7.14.5.12)."""

from __future__ import annotations

import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.isa.base import Instr, UnknownInstruction
from cubinery.aot.ptxsim.isa.matrix import OPCODES

WARPS = 2


def instr(name: str) -> Instr:
    opcode, *modifiers = name.split(".")
    return Instr(opcode, tuple(modifiers), (), text=name)


def number(bits: int, kind: str) -> Fraction | None:
    """The value of an element's bits; None for NaN and infinities."""
    if kind in ("s8", "u8"):
        return Fraction(bits - 256 if kind == "s8" and bits > 127 else bits)
    if kind == "s32":
        return Fraction(bits - (1 << 32) if bits >> 31 else bits)
    if kind in ("f32", "tf32"):
        value = struct.unpack("<f", struct.pack("<I", bits & (~0x1FFF if kind == "tf32" else ~0)))[0]
    elif kind == "bf16":
        value = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    elif kind == "f16":
        value = struct.unpack("<e", struct.pack("<H", bits))[0]
    else:
        exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[kind]
        exponent, mantissa = bits >> mantissa_bits & (1 << exponent_bits) - 1, bits & (1 << mantissa_bits) - 1
        top = (1 << exponent_bits) - 1
        if exponent == top and (kind == "e5m2" or mantissa == 7):
            return None
        scale = Fraction(2) ** (max(exponent, 1) - bias - mantissa_bits)
        whole = (mantissa + (1 << mantissa_bits if exponent else 0)) * scale
        return -whole if bits >> 7 else whole
    return Fraction(value) if np.isfinite(value) else None


def element(registers: Any, warp: int, index: int, lane: int, bits: int) -> int:
    """Element `index` of a lane's fragment: elements fill registers from the low end."""
    per = 32 // bits
    return int(registers[index // per][warp, lane]) >> index % per * bits & (1 << bits) - 1


def place_a(i: int, lane: int, k: int, bits: int) -> tuple[int, int]:
    """(row, column) of element ai, by the tables of 9.7.14.5."""
    g, t = lane >> 2, lane % 4
    per = 32 // bits
    row = g if i // per % 2 == 0 else g + 8
    column = t * per + i % per + (4 * per if i >= 2 * per else 0)
    assert column < k
    return row, column


def place_b(i: int, lane: int, bits: int) -> tuple[int, int]:
    """(row, column) of element bi."""
    per = 32 // bits
    return lane % 4 * per + i % per + (4 * per if i >= per else 0), lane >> 2


def place_c(i: int, lane: int) -> tuple[int, int]:
    """(row, column) of element ci."""
    return (lane >> 2) + (8 if i >= 2 else 0), lane % 4 * 2 + (i & 1)


def rounded(value: Fraction, kind: str, saturate: bool) -> int:
    """A sum's bits as an accumulator."""
    if kind == "s32":
        whole = int(value)
        whole = max(-(1 << 31), min((1 << 31) - 1, whole)) if saturate else whole
        return whole & 0xFFFFFFFF
    double = value.numerator / value.denominator  # correctly rounded; the sums here fit 53 bits
    assert Fraction(double) == value
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", double))[0])
    return int(struct.unpack("<H", struct.pack("<e", double))[0])


CASES = [
    ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", 16, "bf16", "bf16", "f32"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32", 8, "bf16", "bf16", "f32"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", 16, "f16", "f16", "f32"),
    ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", 16, "f16", "f16", "f16"),
    ("mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16", 8, "f16", "f16", "f16"),
    ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", 8, "tf32", "tf32", "f32"),
    ("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32", 4, "tf32", "tf32", "f32"),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", 32, "e4m3", "e5m2", "f32"),
    ("mma.sync.aligned.m16n8k16.row.col.f16.e4m3.e4m3.f16", 16, "e4m3", "e4m3", "f16"),
    ("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32", 32, "s8", "u8", "s32"),
    ("mma.sync.aligned.m16n8k16.row.col.satfinite.s32.u8.u8.s32", 16, "u8", "u8", "s32"),
]


def codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> Any:
    """Small integers and halves as codes, so that every sum is exact in float64, and in f32 and f16 rounds once."""
    whole = rng.integers(-6, 7, shape).astype(np.float32) / 2
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, shape).astype(np.uint8)
    if kind == "bf16":
        return (whole.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "f16":
        return whole.astype(np.float16).view(np.uint16)
    if kind in ("tf32", "f32"):
        return whole.view(np.uint32) | np.uint32(0x1FFF if kind == "tf32" else 0)  # tf32: low bits are ignored
    if kind == "s32":
        return rng.integers(0, 1 << 32, shape, dtype=np.uint64).astype(np.uint32)
    return rng.integers(0x20, 0x50, shape).astype(np.uint8) | rng.integers(0, 2, shape).astype(np.uint8) << 7


def registers(rng: np.random.Generator, kind: str, count: int) -> list[Any]:
    """`count` registers (warps, 32) full of elements."""
    per = {"s8": 4, "u8": 4, "e4m3": 4, "e5m2": 4, "bf16": 2, "f16": 2}.get(kind, 1)
    packed = codes(rng, kind, (count, WARPS, 32 * per))
    return [np.ascontiguousarray(register).view(np.uint32).reshape(WARPS, 32) for register in packed]


@pytest.mark.parametrize(("name", "k", "a_kind", "b_kind", "acc"), CASES)
def test_mma_is_the_product_of_its_fragments(name: str, k: int, a_kind: str, b_kind: str, acc: str) -> None:
    rng = np.random.default_rng(3)
    bits = {"bf16": 16, "f16": 16, "tf32": 32}.get(a_kind, 8)
    a_count, b_count, c_count = k * bits // 64, k * bits // 128, 2 if acc == "f16" else 4
    a, b, c = registers(rng, a_kind, a_count), registers(rng, b_kind, b_count), registers(rng, acc, c_count)
    compiled = OPCODES["mma"].specialise(instr(name))
    assert compiled.dst == ("b32",) * c_count
    assert compiled.src == ("b32",) * (a_count + b_count + c_count)
    assert compiled.converged
    assert compiled.fn is not None
    d = compiled.fn(*a, *b, *c)
    acc_bits = 16 if acc == "f16" else 32
    for warp in range(WARPS):
        A, B, C = {}, {}, {}
        for lane in range(32):
            for i in range(a_count * 32 // bits):
                A[place_a(i, lane, k, bits)] = number(element(a, warp, i, lane, bits), a_kind)
            for i in range(b_count * 32 // bits):
                B[place_b(i, lane, bits)] = number(element(b, warp, i, lane, bits), b_kind)
            for i in range(4):
                C[place_c(i, lane)] = number(element(c, warp, i, lane, acc_bits), acc)
        assert len(A) == 16 * k
        assert len(B) == 8 * k
        for lane in range(32):
            for i in range(4):
                row, column = place_c(i, lane)
                total = C[row, column] + sum(A[row, x] * B[x, column] for x in range(k))
                assert element(d, warp, i, lane, acc_bits) == rounded(total, acc, "satfinite" in name), (lane, i)


def test_nan_and_infinity() -> None:
    fn = OPCODES["mma"].specialise(instr("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32")).fn
    assert fn is not None
    ones = np.full((1, 32), 0x3C003C00, np.uint32)
    zero = np.zeros((1, 32), np.uint32)
    infinite = np.full((1, 32), 0x3C007C00, np.uint32)  # every even column of A is infinite
    with np.errstate(all="ignore"):
        assert (np.stack(fn(infinite, ones, ones, zero, zero, zero, zero))[:2] == 0x7F800000).all()
        assert (np.stack(fn(infinite, ones, zero, zero, zero, zero, zero))[:2] == 0x7FFFFFFF).all()


def test_saturation_and_wrapping_of_integers() -> None:
    most = np.full((1, 32), 0x7F7F7F7F, np.uint32)
    c = np.full((1, 32), 0x7FFFFFFF, np.uint32)
    for word, expected in (("satfinite.", 0x7FFFFFFF), ("", (0x7FFFFFFF + 127 * 127 * 16) & 0xFFFFFFFF)):
        fn = OPCODES["mma"].specialise(instr(f"mma.sync.aligned.m16n8k16.row.col.{word}s32.s8.s8.s32")).fn
        assert fn is not None
        assert (np.stack(fn(most, most, most, c, c, c, c)) == expected).all()


def test_movmatrix_transposes() -> None:
    matrix = np.arange(64, dtype=np.uint16).reshape(8, 8)
    fn = OPCODES["movmatrix"].specialise(instr("movmatrix.sync.aligned.m8n8.trans.b16")).fn
    assert fn is not None
    out = fn(matrix.reshape(-1).view(np.uint32)[None])
    assert (out.view(np.uint16).reshape(8, 8) == matrix.T).all()


@pytest.mark.parametrize(
    "name",
    [
        "mma.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f16.bf16.bf16.f16",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f16",
        "mma.sync.aligned.m16n8k16.row.col.satfinite.f32.f16.f16.f32",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
    ],
)
def test_unknown_forms_are_refused(name: str) -> None:
    with pytest.raises(UnknownInstruction, match=r"executed|expected"):
        OPCODES["mma"].specialise(instr(name))
