"""Asynchronous copies: forms read from PTX text, bytes, reductions and groups (PTX ISA 9.7.9.25 to 27)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.faults import MisalignedFault
from cubinery.aot.ptxsim.isa.async_copy import CopyGroups, check_bulk, combine, masked_copy, padded
from cubinery.aot.ptxsim.isa.base import Address, Immediate, Instr, Register, UnknownInstruction
from cubinery.aot.ptxsim.isa.copy_forms import Arrive, BulkCopy, Form, Group, TensorCopy, ThreadCopy, form
from cubinery.aot.ptxsim.parser import parse

HEADER = ".version 9.4\n.target sm_100a\n.address_size 64\n"


def read(text: str) -> Form:
    module = parse(
        f"{HEADER}.visible .entry k() {{ .reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<9>; .reg .b64 %d<9>;\n"
        f"{text};\nret; }}"
    )
    instr = module.entries["k"].body[0]
    assert isinstance(instr, Instr)
    return form(instr)


def at(name: str) -> Address:
    return Address(Register(name, "b64" if "d" in name else "b32"))


def reg(name: str) -> Register:
    return Register(name, {"p": "pred", "h": "b16", "r": "b32", "d": "b64"}[name[1]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cp.async.ca.shared.global [%r1], [%d1], 8", ThreadCopy(at("%r1"), at("%d1"), 8)),
        (
            "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%r1], [%d1], 16, %r2, %d2",
            ThreadCopy(at("%r1"), at("%d1"), 16, source_size=reg("%r2")),
        ),
        (
            "cp.async.ca.shared::cta.global [%r1], [%d1], 4, %p1",
            ThreadCopy(at("%r1"), at("%d1"), 4, ignore=reg("%p1")),
        ),
        ("cp.async.commit_group", Group(bulk=False, commit=True)),
        ("cp.async.wait_group 2", Group(bulk=False, commit=False, keep=2)),
        ("cp.async.wait_all", Group(bulk=False, commit=False, open_too=True)),
        ("cp.async.bulk.commit_group", Group(bulk=True, commit=True)),
        ("cp.async.bulk.wait_group.read 1", Group(bulk=True, commit=False, keep=1, read=True)),
        ("cp.async.mbarrier.arrive.shared.b64 [%r1]", Arrive(at("%r1"), True)),
        ("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1]", Arrive(at("%r1"), False)),
        (
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1], %r2, [%r3]",
            BulkCopy("shared", "global", reg("%r2"), at("%r1"), at("%d1"), at("%r3")),
        ),
        (
            (
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
                "[%r1], [%d1], 64, [%r3], %h1, %d2"
            ),
            BulkCopy("shared", "global", Immediate(64), at("%r1"), at("%d1"), at("%r3"), mask=reg("%h1")),
        ),
        (
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r2], %r4, [%r3]",
            BulkCopy("shared", "shared", reg("%r4"), at("%r1"), at("%r2"), at("%r3")),
        ),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d1], [%r1], %r2, %h1",
            BulkCopy("global", "shared", reg("%r2"), at("%d1"), at("%r1"), byte_mask=reg("%h1")),
        ),
        ("cp.async.bulk.prefetch.L2.global [%d1], %r2", BulkCopy("", "global", reg("%r2"), None, at("%d1"))),
        (
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16 [%d1], [%r1], %r2",
            BulkCopy("global", "shared", reg("%r2"), at("%d1"), at("%r1"), reduction="add", type="bf16"),
        ),
        (
            (
                "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.inc.u32 "
                "[%r1], [%r2], %r4, [%r3]"
            ),
            BulkCopy("shared", "shared", reg("%r4"), at("%r1"), at("%r2"), at("%r3"), reduction="inc", type="u32"),
        ),
    ],
)
def test_forms(text: str, expected: Form) -> None:
    assert read(text) == expected


def test_tensor_forms() -> None:
    load = read(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        ".cta_group::2.L2::cache_hint [%r1], [%d1, {%r2, %r3}], [%r4], %h1, %d2"
    )
    assert isinstance(load, TensorCopy)
    assert (load.direction, load.rank, load.mode, load.group, load.mask) == ("load", 2, "tile", 2, reg("%h1"))
    assert load.tensor.coords == (reg("%r2"), reg("%r3"))
    assert (load.shared, load.barrier) == (at("%r1"), at("%r4"))
    gathered = read(
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4, %r5, %r6}], [%r7]"
    )
    assert isinstance(gathered, TensorCopy)
    assert (gathered.mode, len(gathered.tensor.coords or ())) == ("gather4", 5)
    stored = read("cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%d1, {%r2}], [%r1]")
    assert isinstance(stored, TensorCopy)
    assert (stored.direction, stored.shared, stored.barrier) == ("store", at("%r1"), None)
    reduced = read("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%d1, {%r2, %r3, 0}], [%r1]")
    assert isinstance(reduced, TensorCopy)
    assert (reduced.direction, reduced.reduction, reduced.rank) == ("store", "add", 3)
    ahead = read("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d1, {%r2, %r3}]")
    assert isinstance(ahead, TensorCopy)
    assert (ahead.direction, ahead.shared) == ("prefetch", None)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.cg.shared.global [%r1], [%d1], 8",
        "cp.async.ca.shared.global [%r1], [%d1], 3",
        "cp.async.wait_group %r1",
        "cp.async.bulk.shared::cluster.global.bulk_group [%r1], [%d1], %r2",
        "cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r1], %r2, %d2",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%d1], [%r1], %r2",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.f32 [%d1], [%r1], %r2",
        "cp.async.bulk.tensor.1d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2}], [%r4]",
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d1, {%r2, %r3}], [%r4]",
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::gather4.bulk_group [%d1, {%r2, %r3}], [%r1]",
    ],
)
def test_unknown_forms_are_refused(text: str) -> None:
    with pytest.raises(UnknownInstruction):
        read(text)


def test_bulk_alignment() -> None:
    check_bulk(32, 64, 16)
    for wrong in ((8, 64, 16), (32, 4, 16), (32, 64, 24)):
        with pytest.raises(MisalignedFault, match="multiple of 16"):
            check_bulk(*wrong)


def test_byte_masks_and_zero_fill() -> None:
    old, new = np.zeros(32, np.uint8), np.arange(1, 33, dtype=np.uint8)
    got = masked_copy(old, new, 0x8003)
    assert [i for i in range(32) if got[i]] == [0, 1, 15, 16, 17, 31]
    assert padded(new[:5], 16).tolist() == [1, 2, 3, 4, 5] + [0] * 11


def bits(values: list[Any], code: str) -> Any:
    return np.frombuffer(struct.pack(f"<{len(values)}{code}", *values), np.uint8)


@pytest.mark.parametrize(
    ("reduction", "kind", "code", "old", "new", "expected"),
    [
        ("add", "u32", "I", [1, 0xFFFFFFFF], [2, 1], [3, 0]),
        ("min", "s32", "i", [-5, 3], [2, -1], [-5, -1]),
        ("max", "u64", "Q", [1 << 63, 3], [5, 4], [1 << 63, 4]),
        ("max", "s64", "q", [-(1 << 63), 3], [5, 4], [5, 4]),
        ("inc", "u32", "I", [0, 5, 6], [5, 5, 5], [1, 0, 0]),
        ("dec", "u32", "I", [0, 5, 6], [5, 5, 5], [5, 4, 5]),
        ("and", "b32", "I", [0xF0F0], [0xFF00], [0xF000]),
        ("or", "b64", "Q", [0xF0F0], [0xFF00], [0xFFF0]),
        ("xor", "b32", "I", [0xF0F0], [0xFF00], [0x0FF0]),
        ("add", "f16", "e", [1.5, 2048.0], [0.25, 1.0], [1.75, 2048.0]),
        ("min", "f16", "e", [float("nan"), 1.0], [3.0, 2.0], [3.0, 1.0]),
        ("add", "f32", "f", [1.5], [2.0**-24], [1.5]),
        ("add", "f64", "d", [0.1], [0.2], [0.1 + 0.2]),
    ],
)
def test_reductions(reduction: str, kind: str, code: str, old: list[Any], new: list[Any], expected: list[Any]) -> None:
    assert combine(reduction, kind)(bits(old, code), bits(new, code)).tolist() == bits(expected, code).tolist()


def test_bf16_rounds_once() -> None:
    """1 + 2**-8 is a tie, which goes to the even neighbour; 1 + 3 * 2**-9 is above it."""
    old = bits([0x3F80, 0x3F80], "H")
    new = bits([0x3B80, 0x3BC0], "H")
    assert combine("add", "bf16")(old, new).view(np.uint16).tolist() == [0x3F80, 0x3F81]


def test_groups_are_due_oldest_first() -> None:
    groups: CopyGroups[str] = CopyGroups()
    for name in "ab":
        groups.add(name)
    groups.commit()
    groups.commit()  # an empty group counts
    groups.add("c")
    groups.commit()
    groups.add("d")
    assert groups.pending == ["a", "b", "c", "d"]
    assert groups.due(3) == []
    assert groups.due(2) == ["a", "b"]
    assert groups.due(0) == ["c"]
    assert groups.due(0) == []
    assert groups.due(0, open_too=True) == ["d"]
    assert groups.pending == []
