"""Comparison and selection by their definitions (PTX ISA 9.7.6; halves 9.7.7)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ptx_floats import NAMES, Format, Value, decode, flush, specials
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

INTEGER: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def bits_of(width: int) -> tuple[list[int], list[int]]:
    top = 1 << (width - 1)
    values = [0, 1, 2, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 0x1234]
    return [a for a in values for _ in values], [b for _ in values for b in values]


@pytest.mark.parametrize("kind", [f"{letter}{width}" for letter in "bus" for width in (16, 32, 64)])
def test_integers(kind: str) -> None:
    """9.7.6.2 setp of integers; lo, ls, hi, hs are the unsigned orders; bits know eq and ne alone."""
    width = int(kind[1:])
    a, b = bits_of(width)

    def value(x: int) -> int:
        return x - (1 << width) if kind[0] == "s" and x >> (width - 1) else x

    names = {name: name for name in INTEGER} | (UNSIGNED if kind[0] == "u" else {})
    for name, meaning in names.items():
        if kind[0] == "b" and meaning not in ("eq", "ne"):
            with pytest.raises(UnknownInstruction, match="bits are compared"):
                specialise(f"setp.{name}.{kind}")
            continue
        expected = [int(INTEGER[meaning](value(x), value(y))) for x, y in zip(a, b, strict=True)]
        assert run(f"setp.{name}.{kind}", a, b) == expected, name


ORDERED = ("eq", "ne", "lt", "le", "gt", "ge")
FLOAT = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def holds(name: str, a: Value, b: Value) -> bool:
    unordered = a != a or b != b
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    base = name[:2]
    if unordered:
        return name.endswith("u") and len(name) == 3
    return INTEGER[base](a, b)  # type: ignore[arg-type]


def float_pairs(fmt: Format) -> tuple[list[int], list[int]]:
    values = specials(fmt)
    return [a for a in values for _ in values], [b for _ in values for b in values]


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", FLOAT)
def test_floats(name: str, kind: str) -> None:
    """setp of floats, ordered and unordered, over every pair of edge values; .ftz where there is one."""
    fmt = NAMES[kind]
    a, b = float_pairs(fmt)
    expected = [int(holds(name, decode(x, fmt), decode(y, fmt))) for x, y in zip(a, b, strict=True)]
    assert run(f"setp.{name}.{kind}", a, b) == expected
    if kind in ("f32", "f16"):
        flushed = [(decode(flush(x, fmt), fmt), decode(flush(y, fmt), fmt)) for x, y in zip(a, b, strict=True)]
        assert run(f"setp.{name}.ftz.{kind}", a, b) == [int(holds(name, x, y)) for x, y in flushed]


BOOLEAN: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda t, c: t and c,
    "or": lambda t, c: t or c,
    "xor": lambda t, c: t != c,
}


@pytest.mark.parametrize("boolean", BOOLEAN)
@pytest.mark.parametrize("kind", ["s32", "f32", "bf16"])
def test_boolean_operators_and_second_result(kind: str, boolean: str) -> None:
    """p = BoolOp(t, c) and q = BoolOp(!t, c); q alone without an operator is the complement."""
    a, b, c = [1, 1, 2, 2, 1, 2], [2, 2, 1, 1, 1, 2], [0, 1, 0, 1, 0, 1]
    truth = [x < y for x, y in zip(a, b, strict=True)]
    p = [int(BOOLEAN[boolean](t, bool(z))) for t, z in zip(truth, c, strict=True)]
    q = [int(BOOLEAN[boolean](not t, bool(z))) for t, z in zip(truth, c, strict=True)]
    assert run(f"setp.lt.{boolean}.{kind}", a, b, c) == p
    assert run(f"setp.lt.{boolean}.{kind}", a, b, c, pair=True) == (p, q)
    assert run(f"setp.lt.{kind}", a, b, pair=True) == ([int(t) for t in truth], [int(not t) for t in truth])


@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_packed(kind: str) -> None:
    """9.7.7.2 setp of packed halves: p for the lower, q for the upper."""
    fmt = NAMES[kind[:-2]]
    a, b = float_pairs(fmt)
    x, y = [low | high << 16 for low, high in zip(a, reversed(a), strict=True)], b
    y = [low | low << 16 for low in b]
    for name in ("lt", "neu", "nan"):
        p = [int(holds(name, decode(u & 0xFFFF, fmt), decode(v & 0xFFFF, fmt))) for u, v in zip(x, y, strict=True)]
        q = [int(holds(name, decode(u >> 16, fmt), decode(v >> 16, fmt))) for u, v in zip(x, y, strict=True)]
        assert run(f"setp.{name}.{kind}", x, y, pair=True) == (p, q)
        c = [1] * len(x)
        inverted = ([1 - t for t in p], [1 - t for t in q])
        assert run(f"setp.{name}.xor.{kind}", x, y, c, pair=True) == inverted


def test_set() -> None:
    """9.7.6.1 set: all ones or 1.0; packed halves (9.7.7.1) give a 16-bit word each."""
    a, b = [1, 2, 0xFFFFFFFF], [2, 1, 0]
    assert run("set.lt.u32.s32", a, b) == [0xFFFFFFFF, 0, 0xFFFFFFFF]
    assert run("set.lt.f32.u32", a, b) == [0x3F800000, 0, 0]
    assert run("set.lt.and.f32.u32", a, b, [0, 1, 1]) == [0, 0, 0]
    assert run("set.geu.s32.f32", [0x7FC00000], [0]) == [0xFFFFFFFF]
    assert run("set.eq.f16.f16", [0x8000, 1], [0, 2]) == [0x3C00, 0]
    assert run("set.lt.bf16.f32", [0, 0x3F800000], [0x3F800000, 0]) == [0x3F80, 0]
    assert run("set.eq.bf16x2.bf16x2", [0x80003F80], [0x00003F81]) == [0x3F800000]
    assert run("set.gt.u32.f16x2", [0x3C000001], [0x00003C00]) == [0xFFFF0000]
    assert run("set.gt.ftz.f16x2.f16x2", [0x00010400], [0x00000000]) == [0x00003C00]
    with pytest.raises(UnknownInstruction):
        specialise("set.eq.f16x2.f32")


@pytest.mark.parametrize("kind", ["b16", "u32", "s32", "f32", "b64", "f64"])
def test_selection(kind: str) -> None:
    """9.7.6.3 selp and 9.7.6.4 slct: -0 counts as >= 0, NaN does not, flushed negative subnormals do."""
    a, b = [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]
    assert run(f"selp.{kind}", a, b, [1, 0, 1, 0, 1]) == [10, 21, 12, 23, 14]
    assert run(f"slct.{kind}.s32", a, b, [0, 5, 0xFFFFFFFF, 0x80000000, 1]) == [10, 11, 22, 23, 14]
    c = [0, 0x80000000, 0xBF800000, 0x7FFFFFFF, 0x80000001]
    assert run(f"slct.{kind}.f32", a, b, c) == [10, 11, 22, 23, 24]
    assert run(f"slct.ftz.{kind}.f32", a, b, c) == [10, 11, 22, 23, 14]


@pytest.mark.parametrize(
    "name", ["setp.lo.f32", "setp.equ.s32", "setp.lt.ftz.f64", "setp.lt", "selp.f16", "set.eq.s32"]
)
def test_refused(name: str) -> None:
    """What is no PTX raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
