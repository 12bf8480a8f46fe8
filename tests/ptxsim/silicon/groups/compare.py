"""setp, set, selp, slct, testp on every type (PTX ISA 9.7.6, 9.7.7)."""

# ruff: noqa: E501 - lines of PTX
from __future__ import annotations

from ptxsim.silicon.entries import Entry, Op, op, raw, table
from ptxsim.silicon.patterns import triples

_INTEGER = {"s": ("eq", "ne", "lt", "le", "gt", "ge"), "u": ("eq", "ne", "lo", "ls", "hi", "hs"), "b": ("eq", "ne")}
_FLOAT = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _letter(kind: str) -> str:
    return {"16": "h", "32": "", "64": "l"}[kind.removesuffix("x2").removeprefix("b")[-2:]]


def _integers() -> list[Op]:
    ops = []
    for kind in ("u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"):
        p = _letter(kind)
        for test in _INTEGER[kind[0]]:
            ops.append(op(f"setp.{test}.{kind} dp {p}a {p}b"))
            ops.append(op(f"set.{test}.u32.{kind} d {p}a {p}b"))
        ops += [op(f"selp.{kind} d{p} {p}a {p}b pc"), op(f"set.ne.f32.{kind} d {p}a {p}b")]
        ops += [
            op(f"slct.{kind}.s32 d{p} {p}a {p}b c"),
            op(f"slct.{kind}.f32 d{p} {p}a {p}b c"),
            op(f"slct.ftz.{kind}.f32 d{p} {p}a {p}b c"),
        ]
    for word in ("and", "or", "xor"):
        ops.append(op(f"setp.lt.{word}.s32 dp a b pc"))
        ops.append(op(f"setp.lt.{word}.s32 dp a b !pc"))
        ops.append(op(f"set.gt.{word}.u32.s32 d a b pc"))
        ops.append(
            raw(
                f"setp p|q {word}",
                f"setp.ge.{word}.s32 %p0|%p1, %a, %b, %pc; selp.u32 %t0, 2, 0, %p0; selp.u32 %t1, 1, 0, %p1; or.b32 %d, %t0, %t1;",
            )
        )
    ops.append(
        raw(
            "setp p|q",
            "setp.ltu.f32 %p0|%p1, %a, %b; selp.u32 %t0, 2, 0, %p0; selp.u32 %t1, 1, 0, %p1; or.b32 %d, %t0, %t1;",
        )
    )
    return ops


def _floats(kind: str) -> list[Op]:
    p, ops = _letter(kind), []
    ftz = (".ftz",) if kind in ("f32", "f16") else ()
    for test in _FLOAT:
        ops += [op(f"setp.{test}{f}.{kind} dp {p}a {p}b") for f in ("", *ftz)]
        target = {"f32": "u32", "f64": "s32", "f16": "f32", "bf16": "u32"}[kind]
        if kind in ("f32", "f64"):
            ops += [op(f"set.{test}.{target}.{kind} d {p}a {p}b")]
        else:
            ops += [
                op(f"set.{test}.u32.{kind} d {p}a {p}b"),
                op(f"set.{test}.u16.{kind} dh {p}a {p}b"),
                op(f"set.{test}.{kind}.{kind} dh {p}a {p}b"),
            ]
    if kind in ("f32", "f64"):
        ops += [
            op(f"set.lt.f32.{kind} d {p}a {p}b"),
            op(f"slct.{kind}.s32 d{p} {p}a {p}b c"),
            op(f"selp.{kind} d{p} {p}a {p}b pc"),
        ]
        ops += [
            op(f"testp.{what}.{kind} dp {p}a")
            for what in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
        ]
    return ops


def _pairs(kind: str) -> list[Op]:
    ops = []
    for test in _FLOAT:
        text = f"setp.{test}.{kind} %p0|%p1, %a, %b; selp.u32 %t0, 2, 0, %p0; selp.u32 %t1, 1, 0, %p1; or.b32 %d, %t0, %t1;"
        ops += [
            raw(f"setp.{test}.{kind}", text),
            op(f"set.{test}.{kind}.{kind} d a b"),
            op(f"set.{test}.u32.{kind} d a b"),
        ]
    return ops


def entries() -> list[Entry]:
    """The comparisons."""
    return [
        table("compare_integers", _integers(), triples("i", 256, seed=11)),
        table("compare_f32", _floats("f32"), triples("f32", seed=12)),
        table("compare_f64", _floats("f64"), triples("f64", 256, seed=13)),
        table("compare_f16", _floats("f16"), triples("f16", 256, seed=14)),
        table("compare_bf16", _floats("bf16"), triples("bf16", 256, seed=15)),
        table("compare_f16x2", _pairs("f16x2"), triples("f16", 256, seed=16)),
        table("compare_bf16x2", _pairs("bf16x2"), triples("bf16", 256, seed=17)),
    ]
