"""Matrix and instruction descriptors: fields, refusals, and canonical layouts against CuTe-style strides."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import DescriptorFault
from cubinery.aot.ptxsim.isa.descriptors import SmemDescriptor, decode, fetch, operand_chunks
from cubinery.aot.ptxsim.isa.instruction_descriptors import InstructionDescriptor
from cubinery.aot.ptxsim.isa.instruction_descriptors import decode as decode_instruction
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES

SHARED = np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint8)


def xor(address: int, name: str, base: int = 0) -> int:
    """The swizzle in terms of (bits, base, shift) as CuTe writes it: Swizzle<B, M, S>."""
    plain = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
    b, m, s = (plain[name], 4, 3) if name in plain else (2, 5, 2)
    source = (address >> (m + s)) - base
    return address ^ (source & (1 << b) - 1) << m


def layout(d: SmemDescriptor, i: int, k: int, size: int, mn_major: bool) -> int:
    """Byte address of element (i along M or N, k), by the canonical layouts (9.7.15.5.1, 9.7.16.5)."""
    t, name = 16 // size, d.swizzle.name
    width = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B_atom_32B": 8}[name]  # 16-byte units in the pattern
    if not mn_major:
        step = d.leading if name == "none" else 16
        at = i % 8 * width * 16 + i // 8 * d.stride + k // t * step + k % t * size
    elif name == "none":
        at = i % t * size + i // t * d.stride + k % 8 * 16 + k // 8 * d.leading
    else:
        rows = 4 if name == "128B_atom_32B" else 8
        at = i % (t * width) * size + i // (t * width) * d.leading + k % rows * width * 16 + k // rows * d.stride
    return xor(d.start + at, name, d.base_offset)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("mn_major", [False, True])
@pytest.mark.parametrize("name", list(SWIZZLES))
def test_canonical_layouts(name: str, mn_major: bool, size: int) -> None:
    mn, k = 128, 32 // size
    d = SmemDescriptor(start=2048 + (0 if mn_major else 32), leading=4096, stride=1024, swizzle=SWIZZLES[name])
    chunks = operand_chunks(d, mn, k, 8 * size, mn_major)
    data = fetch(SHARED, chunks).reshape(len(chunks), -1, size)
    got = data.transpose(1, 0, 2) if mn_major else data
    for i in (0, 1, 7, 8, 9, 63, 64, 65, 127):
        for x in range(k):
            at = layout(d, i, x, size, mn_major)
            assert got[i, x].tolist() == SHARED[at : at + size].tolist(), (i, x)


def test_base_offset_moves_the_pattern() -> None:
    d = SmemDescriptor(start=2048 + 3 * 128, leading=0, stride=1024, swizzle=SWIZZLES["128B"], base_offset=3)
    chunks = operand_chunks(d, 8, 16, 16, False)
    assert chunks[:, 0].tolist() == [d.start + 128 * i + 16 * i for i in range(8)]


def test_every_byte_of_a_swizzled_tile_is_read_once() -> None:
    d = SmemDescriptor(start=4096, leading=0, stride=1024, swizzle=SWIZZLES["128B"])
    found: list[int] = []
    for block in range(4):
        moved = dataclasses.replace(d, start=d.start + 32 * block)
        found += operand_chunks(moved, 64, 16, 16, False).ravel().tolist()
    assert sorted(found) == list(range(4096, 4096 + 64 * 128, 16))


@pytest.mark.parametrize("blackwell", [False, True])
def test_fields_of_matrix_descriptors(blackwell: bool) -> None:
    d = SmemDescriptor(0x3FF0, 0x1230, 0x2340, SWIZZLES["64B"], base_offset=5, version=int(blackwell))
    value = d.encode()
    assert value & 0x3FFF == 0x3FF
    assert value >> 16 & 0x3FFF == 0x123
    assert value >> 32 & 0x3FFF == 0x234
    assert value >> 49 & 7 == 5
    assert value >> 61 == 4
    assert decode(value, blackwell) == d


@pytest.mark.parametrize(
    ("value", "blackwell", "message"),
    [
        (3 << 61 | 1 << 46, True, "swizzle code 3"),
        (1 << 61, False, "swizzle code 1"),
        (2 << 61, True, "bits 46 to 48 are 0, expected 1"),
        (2 << 61 | 1 << 46, False, "expected 0"),
        (1 << 46 | 1 << 14, True, "reserved"),
        (1 << 46 | 1 << 60, True, "reserved"),
        (1 << 46 | 1 << 52, True, "K = 96"),
        (1 << 52, False, "reserved"),
    ],
)
def test_malformed_matrix_descriptors(value: int, blackwell: bool, message: str) -> None:
    with pytest.raises(DescriptorFault, match=message):
        decode(value, blackwell)


def test_a_matrix_outside_of_shared_memory() -> None:
    d = SmemDescriptor(start=0xFF00, leading=0, stride=1024, swizzle=SWIZZLES["128B"])
    with pytest.raises(DescriptorFault, match="0x10000"):
        fetch(SHARED, operand_chunks(d, 16, 16, 16, False))
    with pytest.raises(DescriptorFault, match="expected 0x400"):
        fetch(SHARED, operand_chunks(dataclasses.replace(d, start=0), 8, 16, 16, False), low=0x400)


# -- instruction descriptors ---------------------------------------------------------------------------

D = InstructionDescriptor
GOOD: list[tuple[D, int]] = [
    (D("f16", 128, 256, "bf16", "bf16", "f32", b_mn_major=True), 1),
    (D("f16", 64, 8, "f16", "f16", "f16", a_negate=True), 1),
    (D("tf32", 256, 32, "tf32", "tf32", "f32", a_mn_major=True), 2),
    (D("f8f6f4", 128, 64, "e4m3", "e2m1", "f32", b_negate=True), 1),
    (D("i8", 64, 24, "u8", "s8", "s32", saturate=True), 1),
    (D("mxf8f6f4", 128, 40, "e5m2", "e3m2", "f32", scale_type="ue8m0", a_scale_byte=3, b_scale_byte=1), 1),
    (D("mxf4", 256, 64, "e2m1", "e2m1", "f32", scale_type="ue8m0", a_scale_byte=2), 2),
    (D("mxf4nvf4", 128, 16, "e2m1", "e2m1", "f32", scale_type="ue4m3"), 1),
]


@pytest.mark.parametrize(("descriptor", "group"), GOOD)
def test_instruction_descriptors_survive_encoding(descriptor: D, group: int) -> None:
    assert decode_instruction(descriptor.encode(), descriptor.kind, group) == descriptor


def test_a_narrow_product_of_a_published_decode_kernel() -> None:
    expected = D("f16", 128, 8, "bf16", "bf16", "f32")
    assert decode_instruction(0x8020490, "f16") == expected
    assert decode_instruction(0x8020490 | 1 << 16, "f16") == dataclasses.replace(expected, b_mn_major=True)


def test_bits_of_an_instruction_descriptor() -> None:
    """A hand-made one: bf16 x bf16 -> f32, B by columns, M = 128, N = 256, as public Blackwell GEMM kernels use it."""
    value = 1 << 4 | 1 << 7 | 1 << 10 | 1 << 16 | 32 << 17 | 8 << 24
    assert decode_instruction(value, "f16") == GOOD[0][0]
    scaled = 5 << 7 | 5 << 10 | 16 << 17 | 1 << 23 | 8 << 24 | 2 << 29 | 1 << 4
    expected = D("mxf8f6f4", 128, 128, "e2m1", "e2m1", "f32", scale_type="ue8m0", a_scale_byte=2, b_scale_byte=1)
    assert decode_instruction(scaled, "mxf8f6f4") == expected


def bad(kind: str, group: int = 1, ws: bool = False, **changes: Any) -> tuple[int, str, int, bool]:
    base = next(d for d, _ in GOOD if d.kind == kind)
    return dataclasses.replace(base, **changes).encode(), kind, group, ws


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (bad("f16", m=192), "expected M of 64 or 128"),
        (bad("f16", group=2, m=64), "expected M of 128 or 256"),
        (bad("f16", group=2, n=24), "steps of 16"),
        (bad("f16", n=264), "steps of 8"),
        (bad("f16", n=0), "expected N"),
        (bad("i8", n=40), "steps of 16"),
        (bad("mxf8f6f4", m=64), "expected M of 128"),
        (bad("mxf4", group=2, b_mn_major=True), "K-major"),
        (bad("f16", ws=True, n=32), "N 64, 128 or 256"),
        (bad("mxf4", group=2, scale_type="ue4m3"), "scales"),
        (bad("tf32", group=2, saturate=True), "saturate"),
        ((GOOD[0][0].encode() | 4, "f16", 1, False), "sparse"),
        ((GOOD[0][0].encode() | 7 << 7, "f16", 1, False), "types"),
        ((GOOD[6][0].encode() | 1 << 31, "mxf4", 2, False), "K = 96"),
        ((GOOD[4][0].encode() | 1 << 13, "i8", 1, False), "negation"),
        ((GOOD[0][0].encode() ^ 3 << 4, "f16", 1, False), "type 2 of D"),
    ],
)
def test_malformed_instruction_descriptors(case: tuple[int, str, int, bool], message: str) -> None:
    with pytest.raises(DescriptorFault, match=message):
        decode_instruction(*case)


def test_weight_stationary_shapes() -> None:
    value = D("f16", 32, 64, "f16", "f16", "f32").encode()
    assert decode_instruction(value, "f16", ws=True).m == 32
