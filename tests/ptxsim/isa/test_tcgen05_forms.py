"""Forms of tcgen05 instructions, read from PTX text (PTX ISA 9.7.16)."""

from __future__ import annotations

import pytest

from cubinery.aot.ptxsim.isa.base import Address, Immediate, Instr, Register, UnknownInstruction
from cubinery.aot.ptxsim.isa.tcgen05_forms import Access, Allocation, Commit, Copy, Form, Mma, Order, Shift, form
from cubinery.aot.ptxsim.isa.tensor_memory import AccessForm, CopyForm
from cubinery.aot.ptxsim.parser import parse

HEADER = ".version 9.4\n.target sm_100a\n.address_size 64\n"


def read(text: str) -> Form:
    module = parse(
        f"{HEADER}.visible .entry k() {{ .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<99>; .reg .b64 %d<9>;\n"
        f"{text};\nret; }}"
    )
    instr = module.entries["k"].body[0]
    assert isinstance(instr, Instr)
    return form(instr)


def reg(name: str) -> Register:
    return Register(name, {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}[name[1]])


def at(name: str) -> Address:
    return Address(reg(name))


def vector(count: int) -> str:
    return "{" + ", ".join(f"%r{i + 10}" for i in range(count)) + "}"


def registers(count: int) -> tuple[Register, ...]:
    return tuple(reg(f"%r{i + 10}") for i in range(count))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1",
            Mma("f16", 1, False, at("%r1"), reg("%d1"), reg("%d2"), reg("%r2"), reg("%p1")),
        ),
        (
            f"tcgen05.mma.cta_group::2.kind::tf32.collector::a::fill [%r1], [%r3], %d2, %r2, {vector(8)}, %p1, 4",
            Mma("tf32", 2, False, at("%r1"), at("%r3"), reg("%d2"), reg("%r2"), reg("%p1"), 4, registers(8)),
        ),
        (
            "tcgen05.mma.ws.cta_group::1.kind::i8.collector::b1::use [%r1], %d1, %d2, %r2, %p1",
            Mma("i8", 1, True, at("%r1"), reg("%d1"), reg("%d2"), reg("%r2"), reg("%p1")),
        ),
        (
            "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1",
            Mma("mxf4nvf4", 1, False, at("%r1"), reg("%d1"), reg("%d2"), reg("%r2"), reg("%p1"),
                vector=4, a_scales=at("%r3"), b_scales=at("%r4")),
        ),
        (
            "tcgen05.ld.sync.aligned.16x256b.x2.b32 " + vector(8) + ", [%r1]",
            Access(False, AccessForm("16x256b", 2), at("%r1"), registers(8)),
        ),
        (
            "tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 " + vector(4) + ", [%r1]",
            Access(False, AccessForm("32x32b", 4, pack=True), at("%r1"), registers(4)),
        ),
        (
            "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r10}, [%r1], 8",
            Access(False, AccessForm("16x32bx2", 1, half_offset=8), at("%r1"), registers(1)),
        ),
        (
            "tcgen05.ld.red.sync.aligned.32x32b.x2.max.abs.NaN.f32 " + vector(2) + ", %r5, [%r1]",
            Access(False, AccessForm("32x32b", 2), at("%r1"), registers(2), "max", "f32", True, True, reg("%r5")),
        ),
        (
            "tcgen05.st.sync.aligned.16x32bx2.x2.unpack::16b.b32 [%r1], 4, " + vector(2),
            Access(True, AccessForm("16x32bx2", 2, True, 4), at("%r1"), registers(2)),
        ),
        (
            "tcgen05.cp.cta_group::2.64x128b.warpx2::01_23.b8x16.b4x16_p64 [%r1], %d1",
            Copy(CopyForm("64x128b", "warpx2::01_23", "b4x16_p64"), 2, at("%r1"), reg("%d1")),
        ),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 128",
            Allocation("alloc", 1, at("%r1"), Immediate(128)),
        ),
        (
            "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r1, %r2",
            Allocation("dealloc", 2, reg("%r1"), reg("%r2")),
        ),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned",
            Allocation("relinquish_alloc_permit", 1),
        ),
        (
            "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]",
            Commit(1, at("%r1")),
        ),
        (
            "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h1",
            Commit(2, at("%r1"), reg("%h1")),
        ),
        ("tcgen05.wait::ld.sync.aligned", Order("wait::ld")),
        ("tcgen05.fence::after_thread_sync", Order("fence::after_thread_sync")),
        ("tcgen05.shift.cta_group::1.down [%r1]", Shift(1, at("%r1"))),
    ],
)  # fmt: skip
def test_forms(text: str, expected: Form) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("word", "kind", "size"),
    [
        ("", "mxf8f6f4", 1),
        ("", "mxf4", 2),
        (".block32", "mxf8f6f4", 1),
        (".block32", "mxf4", 2),
        (".block16", "mxf4nvf4", 4),
        (".scale_vec::2X", "mxf4nvf4", 2),
    ],
)
def test_scale_vectors(word: str, kind: str, size: int) -> None:
    read_form = read(f"tcgen05.mma.cta_group::1.kind::{kind}.block_scale{word} [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1")
    assert isinstance(read_form, Mma)
    assert read_form.vector == size


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.mma.cta_group::1.kind::f16.ashift [%r1], [%r3], %d2, %r2, %p1",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %d1, %d2, [%r3], %r2, %p1",
        "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1",
        "tcgen05.mma.cta_group::1.kind::mxf4 [%r1], %d1, %d2, %r2, [%r3], [%r4], %p1",
        "tcgen05.mma.cta_group::1.kind::i8 [%r1], %d1, %d2, %r2, %p1, 4",
        "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1, 16",
        "tcgen05.mma.cta_group::2.kind::f16 [%r1], %d1, %d2, %r2, " + vector(4) + ", %p1",
        "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1, %d3",
        "tcgen05.ld.sync.aligned.16x256b.x2.b32 " + vector(4) + ", [%r1]",
        "tcgen05.ld.red.sync.aligned.16x64b.x2.max.f32 " + vector(2) + ", %r5, [%r1]",
        "tcgen05.cp.cta_group::1.64x128b [%r1], %d1",
        "tcgen05.alloc.cta_group::1.sync.aligned.b32 %r1, 128",
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%r1], %h1",
        "tcgen05.unknown [%r1]",
    ],
)
def test_unknown_forms_are_refused(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        read(text)
