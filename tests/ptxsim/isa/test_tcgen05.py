"""tcgen05.mma of every kind against products of matrices placed element by element (PTX ISA 9.7.16.10)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import DescriptorFault
from cubinery.aot.ptxsim.isa.descriptors import SmemDescriptor
from cubinery.aot.ptxsim.isa.instruction_descriptors import InstructionDescriptor
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES
from cubinery.aot.ptxsim.isa.tcgen05 import Cta, Operands, footprint, multiply

RNG = np.random.default_rng(21)
D = InstructionDescriptor
FORMATS = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15), "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1)}


def decode(code: int, kind: str) -> float:
    """An element's value, from the format's definition."""
    if kind in ("s8", "u8"):
        return float(code - 256 if kind == "s8" and code > 127 else code)
    if kind == "f16":
        return float(np.array(code, np.uint16).view(np.float16))
    if kind in ("bf16", "tf32"):
        return float(np.array(code << 16 if kind == "bf16" else code, np.uint32).view(np.float32))
    exponent_bits, mantissa_bits, bias = FORMATS[kind]
    exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
    value = (mantissa + (1 << mantissa_bits if exponent else 0)) * 2.0 ** (max(exponent, 1) - bias - mantissa_bits)
    return -value if code >> (exponent_bits + mantissa_bits) & 1 else value


def codes(kind: str, shape: tuple[int, ...]) -> Any:
    """Random codes of moderate finite values."""
    small = RNG.integers(-4, 5, shape).astype(np.float32) / 2
    if kind == "f16":
        return small.astype(np.float16).view(np.uint16)
    if kind == "bf16":
        return (small.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "tf32":
        return small.view(np.uint32)
    if kind in ("s8", "u8"):
        return RNG.integers(0, 256, shape).astype(np.uint8)
    if kind == "e4m3":
        return (RNG.integers(0x28, 0x48, shape) | RNG.integers(0, 2, shape) << 7).astype(np.uint8)
    if kind == "e5m2":
        return (RNG.integers(0x38, 0x44, shape) | RNG.integers(0, 2, shape) << 7).astype(np.uint8)
    bits = 1 + sum(FORMATS[kind][:2])
    return RNG.integers(0, 1 << bits, shape).astype(np.uint8)


def numbers(matrix: Any, kind: str) -> Any:
    return np.array([[decode(int(c), kind) for c in row] for row in matrix])


def row_bytes(row: Any, kind: str, packed: bool) -> bytes:
    """A row of codes as it lies in shared memory along K: padded containers, packed, or whole bytes."""
    bits = {"e2m1": 4, "e2m3": 6, "e3m2": 6}.get(kind)
    if bits is None:
        return bytes(row.tobytes())
    if packed:
        return sum(int(c) << 4 * i for i, c in enumerate(row)).to_bytes(len(row) // 2, "little")
    groups = [row[i : i + 16] for i in range(0, len(row), 16)]
    return b"".join(sum(int(c) << bits * i for i, c in enumerate(g)).to_bytes(16, "little") for g in groups)


def put(shared: Any, matrix: Any, kind: str, start: int, name: str, packed: bool = False) -> SmemDescriptor:
    """(mn, k) codes K-major with 32 bytes a row."""
    width = {"none": 16, "32B": 32, "64B": 64, "128B": 128}[name]
    leading = 16 * len(matrix) if name == "none" else 0
    for i, row in enumerate(matrix):
        data = row_bytes(row, kind, packed)
        assert len(data) == 32
        for byte, value in enumerate(data):
            at = i * 16 + byte // 16 * leading + byte % 16 if name == "none" else i * width + byte
            at += start
            shared[at ^ (at >> 7 & {"none": 0, "32B": 1, "64B": 3, "128B": 7}[name]) << 4] = value
    return SmemDescriptor(start, leading, 8 * width, SWIZZLES[name], version=1)


def put_columns(shared: Any, matrix: Any, kind: str, start: int) -> SmemDescriptor:
    """(mn, k) codes MN-major with the 128-byte swizzle; narrow ones in padded containers along M or N."""
    if kind in ("e2m1", "e2m3", "e3m2"):
        matrix = np.array([np.frombuffer(row_bytes(column, kind, False), np.uint8) for column in matrix.T]).T
    size, (mn, k) = matrix.dtype.itemsize, matrix.shape
    per = 128 // size
    leading = 1024
    stride = leading * -(-mn // per)
    for i in range(mn):
        for x in range(k):
            at = start + i // per * leading + i % per * size + x % 8 * 128 + x // 8 * stride
            at ^= (at >> 7 & 7) << 4
            shared[at : at + size] = np.frombuffer(matrix[i, x].tobytes(), np.uint8)
    return SmemDescriptor(start, leading, stride, SWIZZLES["128B"], version=1)


def cell(m: int, n: int, d: InstructionDescriptor, group: int, ws: bool = False) -> tuple[int, int, int]:
    """(CTA, lane, column) of an element of D, from the data path figures (9.7.16.10.5)."""
    if ws:
        fold = {128: 1, 64: 2, 32: 4}[d.m]
        return 0, m + d.m * (n // (d.n // fold)), n % (d.n // fold)
    if group == 1:
        return 0, m if d.m == 128 else m // 16 * 32 + m % 16, n
    if d.m == 256:
        return m // 128, m % 128, n
    return m // 64, m % 64 + (64 if n >= d.n // 2 else 0), n % (d.n // 2)


def check(
    d: InstructionDescriptor, group: int = 1, ws: bool = False, swizzle: str = "128B", column: int = 8, **changes: Any
) -> list[Cta]:
    """Random operands, both with and without the old D; every cell of tensor memory compared."""
    packed = d.kind in ("mxf4", "mxf4nvf4")
    ctas = [Cta(np.zeros(1 << 17, np.uint8), RNG.integers(0, 1 << 32, (128, 512), dtype=np.uint64).astype(np.uint32))
            for _ in range(group)]  # fmt: skip
    a, b = codes(d.a_type, (d.m, d.k)), codes(d.b_type, (d.n, d.k))
    av, bv = numbers(a, d.a_type), numbers(b, d.b_type)
    first = second = None
    for i, cta in enumerate(ctas):
        mine = a[i * d.m // group : (i + 1) * d.m // group], b[i * d.n // group : (i + 1) * d.n // group]
        first = put_columns(cta.shared, mine[0], d.a_type, 2048) if d.a_mn_major else put(
            cta.shared, mine[0], d.a_type, 2048, swizzle, packed)  # fmt: skip
        second = put_columns(cta.shared, mine[1], d.b_type, 65536) if d.b_mn_major else put(
            cta.shared, mine[1], d.b_type, 65536, swizzle, packed)  # fmt: skip
    assert first is not None
    assert second is not None
    old = RNG.integers(-8, 9, (d.m, d.n)).astype(np.float64)
    for enable in (True, False):
        for m in range(d.m):
            for n in range(d.n):
                i, lane, at = cell(m, n, d, group, ws)
                ctas[i].cells[lane, column + at] = pattern(old[m, n], d.d_type)
        o = Operands(column, first.encode(), second.encode(), enable_d=enable, **changes)
        expected = [cta.cells.copy() for cta in ctas]
        sign = -1 if d.a_negate != d.b_negate else 1
        result = sign * (av @ bv.T) + (old * 2.0**-o.scale_d if enable else 0)
        for m in range(d.m):
            for n in range(d.n):
                i, lane, at = cell(m, n, d, group, ws)
                if not o.disabled >> (128 * i + lane) & 1:
                    expected[i][lane, column + at] = pattern(result[m, n], d.d_type, d.saturate)
        multiply(d, group, ws, ctas, o)
        for cta, cells in zip(ctas, expected, strict=True):
            assert (cta.cells == cells).all()
    return ctas


def pattern(value: float, kind: str, saturate: bool = False) -> int:
    if kind == "s32":
        whole = int(value)
        return (max(-(1 << 31), min((1 << 31) - 1, whole)) if saturate else whole) & 0xFFFFFFFF
    if kind == "f16":
        return int(np.float16(value).view(np.uint16))
    return int(np.float32(value).view(np.uint32))


@pytest.mark.parametrize(
    "d",
    [
        D("f16", 128, 32, "bf16", "bf16", "f32"),
        D("f16", 64, 16, "f16", "f16", "f32", a_negate=True),
        D("f16", 64, 8, "f16", "f16", "f16"),
        D("tf32", 64, 16, "tf32", "tf32", "f32", b_negate=True),
        D("f8f6f4", 64, 16, "e4m3", "e5m2", "f32"),
        D("f8f6f4", 64, 16, "e2m1", "e4m3", "f16"),
        D("f8f6f4", 64, 16, "e3m2", "e2m3", "f32"),
        D("i8", 64, 16, "s8", "u8", "s32"),
        D("i8", 64, 8, "u8", "u8", "s32", saturate=True),
    ],
)
@pytest.mark.parametrize("swizzle", ["none", "128B"])
def test_kinds(d: InstructionDescriptor, swizzle: str) -> None:
    check(d, swizzle=swizzle)


@pytest.mark.parametrize("d", [D("f16", 64, 32, "bf16", "bf16", "f32"), D("f8f6f4", 64, 32, "e4m3", "e4m3", "f32"),
                               D("f8f6f4", 64, 32, "e2m1", "e3m2", "f32"), D("f8f6f4", 64, 32, "e2m3", "e4m3", "f32"),
                               D("i8", 64, 32, "s8", "s8", "s32")])  # fmt: skip
@pytest.mark.parametrize(("a_turn", "b_turn"), [(True, False), (False, True), (True, True)])
def test_operands_by_columns(d: InstructionDescriptor, a_turn: bool, b_turn: bool) -> None:
    check(dataclasses.replace(d, a_mn_major=a_turn, b_mn_major=b_turn))


@pytest.mark.parametrize("m", [128, 256])
@pytest.mark.parametrize("swizzle", ["32B", "64B"])
def test_pairs_of_ctas(m: int, swizzle: str) -> None:
    check(D("f16", m, 32, "bf16", "bf16", "f32"), group=2, swizzle=swizzle)


@pytest.mark.parametrize("m", [32, 64, 128])
def test_weight_stationary_data_paths(m: int) -> None:
    check(D("f16", m, 64, "f16", "f16", "f32"), ws=True)


def test_scaled_input_and_disabled_lanes() -> None:
    check(D("f16", 64, 8, "f16", "f16", "f32"), scale_d=3)
    check(D("f16", 64, 8, "f16", "f16", "f32"), disabled=1 << 5 | 1 << 40)
    check(D("f16", 256, 16, "f16", "f16", "f32"), group=2, disabled=1 << 5 | 1 << 200)


def write_rows(cells: Any, lanes: Any, column: int, rows: list[bytes]) -> None:
    for lane, data in zip(lanes, rows, strict=True):
        words = np.frombuffer(data, np.uint32)
        cells[lane, column : column + len(words)] = words


@pytest.mark.parametrize(
    ("d", "group", "ws"),
    [
        (D("f16", 128, 16, "bf16", "bf16", "f32"), 1, False),
        (D("f16", 64, 16, "f16", "f16", "f32"), 1, False),
        (D("tf32", 128, 16, "tf32", "tf32", "f32"), 1, False),
        (D("f8f6f4", 128, 16, "e5m2", "e4m3", "f32"), 1, False),
        (D("f8f6f4", 128, 16, "e2m1", "e4m3", "f32"), 1, False),
        (D("i8", 128, 16, "s8", "s8", "s32"), 1, False),
        (D("f16", 256, 32, "bf16", "bf16", "f32"), 2, False),
        (D("f16", 128, 32, "bf16", "bf16", "f32"), 2, False),
        (D("f16", 32, 64, "bf16", "bf16", "f32"), 1, True),
    ],
)
def test_a_in_tensor_memory(d: InstructionDescriptor, group: int, ws: bool) -> None:
    a, b = codes(d.a_type, (d.m, d.k)), codes(d.b_type, (d.n, d.k))
    ctas, second = [], None
    for i in range(group):
        cta = Cta(np.zeros(1 << 17, np.uint8), np.zeros((128, 512), np.uint32))
        second = put(cta.shared, b[i * d.n // group : (i + 1) * d.n // group], d.b_type, 65536, "128B")
        for m in range(i * d.m // group, (i + 1) * d.m // group):
            lanes = {cell(m, n, d, group, ws)[1] for n in range(d.n)}  # once for each fold of the columns
            for lane in lanes:
                write_rows(cta.cells, [lane], 300, [a[m].tobytes()])
        ctas.append(cta)
    assert second is not None
    multiply(d, group, ws, ctas, Operands(0, 300, second.encode(), a_in_tensor_memory=True, enable_d=False))
    expected = numbers(a, d.a_type) @ numbers(b, d.b_type).T
    for m in range(d.m):
        for n in range(d.n):
            i, lane, column = cell(m, n, d, group, ws)
            assert int(ctas[i].cells[lane, column]) == pattern(expected[m, n], d.d_type)


def scale(code: int, kind: str) -> float:
    return 2.0 ** (code - 127) if kind == "ue8m0" else decode(code & 0x7F, "e4m3")


@pytest.mark.parametrize(
    ("d", "vector", "group"),
    [
        (D("mxf8f6f4", 128, 48, "e4m3", "e5m2", "f32", scale_type="ue8m0", a_scale_byte=3, b_scale_byte=1), 1, 1),
        (D("mxf8f6f4", 128, 16, "e2m1", "e3m2", "f32", scale_type="ue8m0"), 1, 1),
        (D("mxf4", 128, 16, "e2m1", "e2m1", "f32", scale_type="ue8m0", a_scale_byte=2), 2, 1),
        (D("mxf4nvf4", 128, 16, "e2m1", "e2m1", "f32", scale_type="ue4m3"), 4, 1),
        (D("mxf4nvf4", 128, 16, "e2m1", "e2m1", "f32", scale_type="ue8m0", b_scale_byte=2), 2, 1),
        (D("mxf4nvf4", 256, 64, "e2m1", "e2m1", "f32", scale_type="ue4m3"), 4, 2),
        (D("mxf8f6f4", 128, 96, "e4m3", "e4m3", "f32", scale_type="ue8m0"), 1, 2),
    ],
)
def test_block_scales(d: InstructionDescriptor, vector: int, group: int) -> None:
    packed = d.kind != "mxf8f6f4"
    a, b = codes(d.a_type, (d.m, d.k)), codes(d.b_type, (d.n, d.k))
    low, high = (124, 131) if d.scale_type == "ue8m0" else (0x30, 0x40)
    sa, sb = RNG.integers(low, high, (d.m, vector)), RNG.integers(low, high, (d.n, vector))
    ctas, first, second = [], None, None
    folded = group == 2 and d.m == 128
    for i in range(group):
        cta = Cta(np.zeros(1 << 17, np.uint8), np.zeros((128, 512), np.uint32))
        rows = d.m // group
        first = put(cta.shared, a[i * rows : (i + 1) * rows], d.a_type, 2048, "128B", packed)
        second = put(cta.shared, b[i * d.n // group : (i + 1) * d.n // group], d.b_type, 65536, "128B", packed)
        memory = cta.cells.view(np.uint8).reshape(128, 512, 4)
        for m in range(rows):
            for quarter in range(4):
                for j in range(vector):
                    memory[32 * quarter + m % 32, 400 + m // 32, d.a_scale_byte + j] = sa[i * rows + m, j]
        for n in range(d.n):
            half = d.n // 2
            for quarter in range(4):
                if folded and quarter // 2 != n // half:
                    continue  # each half of the lanes holds the scales of its own columns of B
                row = n % half if folded else n
                for j in range(vector):
                    memory[32 * quarter + row % 32, 420 + row // 32, d.b_scale_byte + j] = sb[n, j]
        ctas.append(cta)
    assert first is not None
    assert second is not None
    o = Operands(0, first.encode(), second.encode(), enable_d=False, a_scales=400, b_scales=420, vector=vector)
    multiply(d, group, False, ctas, o)
    block = d.k // vector
    av, bv = numbers(a, d.a_type), numbers(b, d.b_type)
    for x in range(d.k):
        av[:, x] *= [scale(int(s), d.scale_type) for s in sa[:, x // block]]
        bv[:, x] *= [scale(int(s), d.scale_type) for s in sb[:, x // block]]
    expected = av @ bv.T
    for m in range(d.m):
        for n in range(d.n):
            i, lane, column = cell(m, n, d, group)
            assert int(ctas[i].cells[lane, column]) == pattern(expected[m, n], "f32")


def one(idesc: InstructionDescriptor, **changes: Any) -> None:
    inside = SmemDescriptor(1024, 0, 1024, SWIZZLES["128B"], version=1).encode()
    o = dataclasses.replace(Operands(0, inside, inside), **changes)
    multiply(idesc, 1, False, [Cta(np.zeros(1 << 15, np.uint8), np.zeros((128, 512), np.uint32))], o)


def test_misplaced_operands() -> None:
    plain = D("f16", 128, 32, "bf16", "bf16", "f32")
    scaled = D("mxf8f6f4", 128, 32, "e4m3", "e4m3", "f32", scale_type="ue8m0", a_scale_byte=1)
    far = SmemDescriptor(0x7C00, 0, 1024, SWIZZLES["128B"], version=1).encode()
    hopper = SmemDescriptor(1024, 0, 1024, SWIZZLES["128B"]).encode()
    one(plain)
    for d, changes, message in (
        (plain, {"d": 490}, "does not lie in tensor memory"),
        (plain, {"d": 16 << 16}, "does not lie in tensor memory"),
        (plain, {"a": far}, "reaches from"),
        (plain, {"b": hopper}, "bits 46 to 48"),
        (plain, {"a": 510, "a_in_tensor_memory": True}, "by rows"),
        (plain, {"vector": 1}, "scale_vec::1X for kind::f16"),
        (scaled, {"vector": 2}, "expected"),
        (scaled, {"vector": 1, "a_scales": 510}, "past column 511"),
        (dataclasses.replace(scaled, kind="mxf4", a_type="e2m1", b_type="e2m1"), {"vector": 2}, "scale bytes 1"),
    ):
        with pytest.raises(DescriptorFault, match=message):
            one(d, **changes)


def test_the_upper_half_of_m64_starts_at_lane_16() -> None:
    d = D("f16", 64, 8, "bf16", "bf16", "f32")
    marks = footprint(d, 1, False, Operands(16 << 16 | 4, 1 << 46 | 64, 1 << 46 | 64))
    assert marks.d_lanes[0].tolist() == [32 * (m // 16) + m % 16 + 16 for m in range(64)]
    assert marks.d_columns == (4, 12)
