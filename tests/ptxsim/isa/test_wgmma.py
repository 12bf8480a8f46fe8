"""wgmma against products of matrices laid out element by element (PTX ISA 9.7.15.5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import DescriptorFault
from cubinery.aot.ptxsim.isa.base import Immediate, Instr, Register, UnknownInstruction, Vector
from cubinery.aot.ptxsim.isa.descriptors import SmemDescriptor
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES
from cubinery.aot.ptxsim.isa.wgmma import WgmmaForm, form, multiply

RNG = np.random.default_rng(11)
PREDICATE = Register("%p1", "pred")
DESCRIPTOR = Register("%d1", "b64")


def registers(count: int) -> Vector:
    return Vector(tuple(Register(f"%r{i}", "b32") for i in range(count)))


def make(name: str, d: int, *constants: int, a: Any = DESCRIPTOR) -> WgmmaForm:
    opcode, *modifiers = name.split(".")
    operands = (registers(d), a, DESCRIPTOR, PREDICATE, *(Immediate(c) for c in constants))
    return form(Instr(opcode, tuple(modifiers), operands, text=name))


def codes(kind: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Random element codes, and their values as float64."""
    small = RNG.integers(-4, 5, shape).astype(np.float32)
    if kind == "f16":
        return small.astype(np.float16).view(np.uint16), small.astype(np.float64)
    if kind == "bf16":
        return (small.view(np.uint32) >> 16).astype(np.uint16), small.astype(np.float64)
    if kind == "tf32":
        return small.view(np.uint32), small.astype(np.float64)
    if kind in ("s8", "u8"):
        byte = RNG.integers(0, 256, shape).astype(np.uint8)
        return byte, (byte.view(np.int8) if kind == "s8" else byte).astype(np.float64)
    powers = RNG.integers(0, 3, shape)  # 1, 2, 4 in either FP8 format
    one, step = {"e4m3": (7 << 3, 1 << 3), "e5m2": (15 << 2, 1 << 2)}[kind]
    return (one + step * powers).astype(np.uint8), 2.0**powers


def place(shared: Any, matrix: Any, name: str, start: int, mn_major: bool) -> SmemDescriptor:
    """Write (mn, k) codes in a canonical layout, one element after the other, and describe it."""
    size, (mn, k) = matrix.dtype.itemsize, matrix.shape
    t = 16 // size
    width = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[name]
    per = width // size  # elements of a row of the pattern
    if not mn_major:
        leading, stride = (mn * 16, 128) if name == "none" else (0, 8 * width)
    elif name == "none":
        stride, leading = 128, 128 * (mn // t)
    else:
        leading, stride = 8 * width, 8 * width * (mn // per)
    for i in range(mn):
        for x in range(k):
            if not mn_major and name == "none":
                at = i * 16 + x // t * leading + x % t * size  # rows of 16 bytes, stride 128 for each 8
            elif not mn_major:
                at = i * width + x * size
            elif name == "none":
                at = i // t * stride + i % t * size + x % 8 * 16 + x // 8 * leading
            else:
                at = i // per * leading + i % per * size + x % 8 * width + x // 8 * stride
            at += start
            at ^= (at >> 7 & {"none": 0, "32B": 1, "64B": 3, "128B": 7}[name]) << 4
            shared[at : at + size] = np.frombuffer(matrix[i, x].tobytes(), np.uint8)
    return SmemDescriptor(start, leading, stride, SWIZZLES[name])


def spread(matrix: Any, acc: str) -> Any:
    """Accumulator registers (4, r, 32) of a (64, N) matrix of bits (figure of 9.7.15.5.1.1.2: D fragment)."""
    n = matrix.shape[1]
    result = np.zeros((4, n // (4 if acc == "f16" else 2), 32), np.uint32)
    for row in range(64):
        for column in range(n):
            warp, lane = row // 16, row % 8 * 4 + column % 8 // 2
            i = column // 8 * 4 + row % 16 // 8 * 2 + column % 2  # d0, d1, ...
            bits = int(matrix[row, column])
            if acc == "f16":
                result[warp, i // 2, lane] |= bits << 16 * (i % 2)
            else:
                result[warp, i, lane] = bits
    return result


def bits_of(values: Any, acc: str) -> Any:
    if acc == "f16":
        return values.astype(np.float16).view(np.uint16)
    if acc == "s32":
        return values.astype(np.int64).astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)


CASES = [
    ("m64n16k16.f32.bf16.bf16", 16, 16, "bf16", "bf16", "f32"),
    ("m64n8k16.f16.f16.f16", 8, 16, "f16", "f16", "f16"),
    ("m64n24k16.f32.f16.f16", 24, 16, "f16", "f16", "f32"),
    ("m64n16k8.f32.tf32.tf32", 16, 8, "tf32", "tf32", "f32"),
    ("m64n16k32.f32.e4m3.e5m2", 16, 32, "e4m3", "e5m2", "f32"),
    ("m64n16k32.f16.e5m2.e5m2", 16, 32, "e5m2", "e5m2", "f16"),
    ("m64n16k32.s32.s8.u8", 16, 32, "s8", "u8", "s32"),
]


def constants(kind: str, a_sign: int = 1, a_turn: int = 0, b_turn: int = 0) -> tuple[int, ...]:
    if kind in ("s8", "u8"):
        return ()
    return (a_sign, 1, a_turn, b_turn) if kind in ("f16", "bf16") else (a_sign, 1)


@pytest.mark.parametrize(("name", "n", "k", "a_kind", "b_kind", "acc"), CASES)
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_k_major_operands(name: str, n: int, k: int, a_kind: str, b_kind: str, acc: str, swizzle: str) -> None:
    f = make(f"wgmma.mma_async.sync.aligned.{name}", n // (4 if acc == "f16" else 2), *constants(a_kind))
    assert (f.n, f.k, f.registers) == (n, k, n // (4 if acc == "f16" else 2))
    shared = RNG.integers(0, 256, 1 << 15).astype(np.uint8)
    (a, av), (b, bv) = codes(a_kind, (64, k)), codes(b_kind, (n, k))
    first, second = place(shared, a, swizzle, 1024, False), place(shared, b, swizzle, 16384, False)
    old = RNG.integers(-8, 9, (64, n)).astype(np.float64)
    for keep in (True, False):
        got = multiply(f, shared, first.encode(), second.encode(), spread(bits_of(old, acc), acc), keep)
        expected = av @ bv.T + (old if keep else 0)
        assert (got == spread(bits_of(expected, acc), acc)).all()


@pytest.mark.parametrize("a_turn", [0, 1])
@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
def test_transposed_operands(swizzle: str, a_turn: int) -> None:
    f = make("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", 32, *constants("bf16", a_turn=a_turn, b_turn=1))
    shared = np.zeros(1 << 15, np.uint8)
    (a, av), (b, bv) = codes("bf16", (64, 16)), codes("bf16", (64, 16))
    first, second = place(shared, a, swizzle, 1024, bool(a_turn)), place(shared, b, swizzle, 16384, True)
    got = multiply(f, shared, first.encode(), second.encode(), np.zeros((4, 32, 32), np.uint32), False)
    assert (got == spread(bits_of(av @ bv.T, "f32"), "f32")).all()


def test_a_in_registers_and_negation() -> None:
    f = make("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", 4, -1, 1, 0, a=registers(4))
    assert f.a_in_registers
    shared = np.zeros(1 << 15, np.uint8)
    (a, av), (b, bv) = codes("f16", (64, 16)), codes("f16", (8, 16))
    spread_a = np.zeros((4, 4, 32), np.uint32)
    for row in range(64):
        for x in range(16):
            i = x % 2 + 2 * (row % 16 // 8) + 4 * (x // 8)  # a0, a1: row g; a2, a3: row g + 8; a4 on: 8 columns on
            spread_a[row // 16, i // 2, row % 8 * 4 + x % 8 // 2] |= int(a[row, x]) << 16 * (i % 2)
    descriptor = place(shared, b, "128B", 2048, False).encode()
    got = multiply(f, shared, spread_a, descriptor, np.zeros((4, 4, 32), np.uint32), False)
    assert (got == spread(bits_of(0 - av @ bv.T, "f32"), "f32")).all()


def test_a_matrix_outside() -> None:
    f = make("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16", 4, 1, 1, 0, 0)
    inside = SmemDescriptor(0, 0, 1024, SWIZZLES["128B"]).encode()
    outside = SmemDescriptor(0x3C00, 0, 1024, SWIZZLES["128B"]).encode()
    with pytest.raises(DescriptorFault, match="0x4000"):
        multiply(f, np.zeros(0x4000, np.uint8), outside, inside, np.zeros((4, 4, 32), np.uint32), False)


@pytest.mark.parametrize(
    ("name", "d", "rest"),
    [
        ("m64n8k32.f32.bf16.bf16", 4, (1, 1, 0, 0)),
        ("m64n12k16.f32.bf16.bf16", 6, (1, 1, 0, 0)),
        ("m64n8k16.f16.bf16.bf16", 2, (1, 1, 0, 0)),
        ("m64n8k16.f32.bf16.bf16", 4, (1, 2, 0, 0)),
        ("m64n8k16.f32.bf16.bf16", 4, (1, 1)),
        ("m64n8k16.f32.bf16.bf16", 8, (1, 1, 0, 0)),
        ("m64n8k32.f32.e4m3.e4m3", 4, (1, 1, 0, 0)),
        ("m64n40k32.s32.s8.s8", 20, ()),
        ("sp.m64n8k32.f32.bf16.bf16", 4, (1, 1, 0, 0)),
    ],
)
def test_unknown_forms_are_refused(name: str, d: int, rest: tuple[int, ...]) -> None:
    with pytest.raises(UnknownInstruction):
        make(f"wgmma.mma_async.sync.aligned.{name}", d, *rest)
