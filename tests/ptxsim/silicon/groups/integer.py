"""Integer arithmetic, bits, logic, shifts, permutes, carries, dot products (PTX ISA 9.7.1, 9.7.2, 9.7.8)."""

# ruff: noqa: E501, PERF401 - lines of PTX; tables grow one row at a time
from __future__ import annotations

from ptxsim.silicon.entries import Entry, Op, op, raw, table
from ptxsim.silicon.patterns import triples

_LETTER = {"16": "h", "32": "", "64": "l"}


def _named(kind: str) -> tuple[str, str, str, str]:
    """(destination, a, b, c) of a type."""
    p = _LETTER[kind[-2:]]
    return f"d{p}", f"{p}a", f"{p}b", f"{p}c"


def _arithmetic() -> list[Op]:
    ops = []
    for kind in ("u16", "s16", "u32", "s32", "u64", "s64"):
        d, a, b, c = _named(kind)
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem"):
            ops.append(op(f"{name}.{kind} {d} {a} {b}"))
        ops += [op(f"mad.{half}.{kind} {d} {a} {b} {c}") for half in ("lo", "hi")]
        if kind[0] == "s":
            ops += [op(f"abs.{kind} {d} {a}"), op(f"neg.{kind} {d} {a}")]
        if kind[1:] != "64":
            wide = {"16": "d", "32": "dl"}[kind[1:]]
            more = {"16": "c", "32": "lc"}[kind[1:]]
            ops += [op(f"mul.wide.{kind} {wide} {a} {b}"), op(f"mad.wide.{kind} {wide} {a} {b} {more}")]
    for half in ("lo", "hi"):
        for kind in ("u32", "s32"):
            ops += [op(f"mul24.{half}.{kind} d a b"), op(f"mad24.{half}.{kind} d a b c")]
    ops += [
        op("add.sat.s32 d a b"),
        op("sub.sat.s32 d a b"),
        op("mad.hi.sat.s32 d a b c"),
        op("mad24.hi.sat.s32 d a b c"),
    ]
    ops += [
        op(f"sad.{kind} {_named(kind)[0]} {' '.join(_named(kind)[1:])}")
        for kind in ("u16", "s16", "u32", "s32", "u64", "s64")
    ]
    ops += [op("min.relu.s32 d a b"), op("max.relu.s32 d a b")]
    return ops


def _packed() -> list[Op]:
    ops = [op(f"{name}.{kind}x2 d a b") for name in ("add", "min", "max") for kind in ("u16", "s16")]
    ops += [op(f"{name}.relu.s16x2 d a b") for name in ("min", "max")]
    ops += [op(f"dp4a.{x}.{y} d a b c") for x in ("u32", "s32") for y in ("u32", "s32")]
    ops += [op(f"dp2a.{half}.{x}.{y} d a b c") for half in ("lo", "hi") for x in ("u32", "s32") for y in ("u32", "s32")]
    for kind in ("u32", "s32", "u64", "s64"):
        a = _named(kind)[1]
        ops += [op(f"bfind.{kind} d {a}"), op(f"bfind.shiftamt.{kind} d {a}")]
        d, a, *_ = _named(kind)
        ops += [op(f"bfe.{kind} {d} {a} b c")]
        ops += [
            op(f"bfe.{kind} {d} {a} {at} {size}") for at, size in ((3, 9), (20, 20), (31, 1), (0, 32), (5, 0), (40, 30))
        ]
    for size in ("32", "64"):
        d, a, b, _ = _named(f"u{size}")
        ops += [op(f"popc.b{size} d {a}"), op(f"clz.b{size} d {a}"), op(f"brev.b{size} {d} {a}")]
        ops += [op(f"bfi.b{size} {d} {a} {b} {at} {n}") for at, n in ((0, 5), (7, 11), (30, 8), (0, 0), (33, 20))]
        ops += [
            raw(
                f"bfi.b{size}",
                f"and.b32 %t0, %c, 63; shr.u32 %t1, %c, 8; bfi.b{size} %d, %{a}, %{b}, %t0, %t1;",
                f"b{size}",
            )
        ]
    ops += [op(f"bmsk.{mode}.b32 d a b") for mode in ("clamp", "wrap")]
    ops += [op(f"szext.{mode}.{kind} d a b") for mode in ("clamp", "wrap") for kind in ("u32", "s32")]
    ops += [raw("fns.b32", "and.b32 %t0, %b, 31; and.b32 %t1, %c, 15; sub.s32 %t1, %t1, 7; fns.b32 %d, %a, %t0, %t1;")]
    return ops


def _carries() -> list[Op]:
    ops = []
    for size, p in (("32", ""), ("64", "l")):
        first, extra = f"%{p}t0", f"b{size}"
        for kind in (f"u{size}", f"s{size}"):
            ops += [
                raw(f"add.cc.{kind}", f"add.cc.{kind} {first}, %{p}a, %{p}b; addc.{kind} %d, %{p}c, 0;", extra),
                raw(f"addc.cc.{kind}", f"add.cc.{kind} {first}, %{p}a, %{p}b; addc.cc.{kind} {first}, %{p}b, %{p}c; addc.{kind} %d, {first}, %{p}a;", extra),
                raw(f"sub.cc.{kind}", f"sub.cc.{kind} {first}, %{p}a, %{p}b; subc.{kind} %d, %{p}c, 0;", extra),
                raw(f"subc.cc.{kind}", f"sub.cc.{kind} {first}, %{p}a, %{p}b; subc.cc.{kind} {first}, %{p}b, %{p}c; subc.{kind} %d, {first}, %{p}a;", extra),
            ]  # fmt: skip
            for half in ("lo", "hi"):
                ops += [
                    raw(f"mad.{half}.cc.{kind}", f"mad.{half}.cc.{kind} {first}, %{p}a, %{p}b, %{p}c; addc.{kind} %d, {first}, 0;", extra),
                    raw(f"madc.{half}.{kind}", f"add.cc.{kind} {first}, %{p}a, %{p}b; madc.{half}.{kind} %d, %{p}a, %{p}b, %{p}c;", extra),
                    raw(f"madc.{half}.cc.{kind}", f"add.cc.{kind} {first}, %{p}a, %{p}b; madc.{half}.cc.{kind} {first}, %{p}a, %{p}b, %{p}c; addc.{kind} %d, {first}, 0;", extra),
                ]  # fmt: skip
    return ops


def _logic() -> list[Op]:
    ops = []
    for size in ("16", "32", "64"):
        d, a, b, _ = _named(f"b{size}")
        ops += [op(f"{name}.b{size} {d} {a} {b}") for name in ("and", "or", "xor")]
        ops += [op(f"not.b{size} {d} {a}"), op(f"cnot.b{size} {d} {a}")]
        ops += [op(f"{name} {d} {a} b") for name in (f"shl.b{size}", f"shr.u{size}", f"shr.s{size}", f"shr.b{size}")]
        ops += [
            op(f"{name} {d} {a} {n}")
            for name in (f"shl.b{size}", f"shr.u{size}", f"shr.s{size}")
            for n in (0, 1, 15, 16, 31, 32, 63, 64, 70)
        ]
        ops += [op(f"selp.b{size} {d} {a} {b} pc")]
    ops += [op(f"{name}.pred dp pa pb") for name in ("and", "or", "xor")] + [op("not.pred dp pa")]
    ops += [op(f"shf.{way}.{mode}.b32 d a b c") for way in ("l", "r") for mode in ("clamp", "wrap")]
    ops += [
        op(f"shf.{way}.{mode}.b32 d a b {n}")
        for way in ("l", "r")
        for mode in ("clamp", "wrap")
        for n in (0, 9, 32, 40)
    ]
    ops += [op(f"lop3.b32 d a b c {table}") for table in (0, 0x1E, 0x80, 0xFE, 0x96, 0xCA, 0xD8, 0x2D, 0xF0, 0xFF)]
    ops += [raw(f"lop3.{name} p", f"lop3.{name}.b32 %t0|%d, %a, %b, %c, 0xCA, %pc;", "pred") for name in ("or", "and")]
    ops += [op(f"prmt.b32{mode} d a b c") for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")]
    ops += [op(f"prmt.b32 d a b {sel}") for sel in ("0x7654", "0x3210", "0xFEDC", "0x89AB", "0x0F1E", "0x5140")]
    return ops


def entries() -> list[Entry]:
    """The integer kernels."""
    return [
        table("integer_arithmetic", _arithmetic(), triples("i", seed=1)),
        table("integer_packed_and_bits", _packed(), triples("i", seed=2)),
        table("integer_carries", _carries(), triples("i", seed=3)),
        table("logic", _logic(), triples("i", seed=4)),
    ]
