"""f64 arithmetic against exact rational arithmetic (PTX ISA 9.7.3)."""

from __future__ import annotations

import pytest
from ptx_floats import (
    F64,
    Value,
    add,
    decode,
    divide,
    encode,
    fma,
    multiply,
    negate,
    payload_kept,
    sample,
    specials,
    square_root,
)
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

MODES = ("rn", "rz", "rm", "rp")
EDGES = specials(F64)
A = [a for a in EDGES for _ in EDGES] + sample(F64, 40, 1, spread=30)
B = [b for _ in EDGES for b in EDGES] + sample(F64, 40, 2, spread=30)


def exact(name: str, a: Value, b: Value, mode: str) -> Value:
    match name:
        case "add":
            return add(a, b, mode)
        case "sub":
            return add(a, negate(b), mode)
        case "mul":
            return multiply(a, b, mode)
        case _:
            return divide(a, b, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_two_operands(name: str, mode: str) -> None:
    """9.7.3.3 add, .4 sub, .5 mul, .8 div of f64 in every mode."""
    pairs = zip(A, B, strict=True)
    expected = [
        payload_kept(
            encode(exact(name, decode(a, F64), decode(b, F64), mode), F64, mode), *((b, a) if name == "div" else (a, b))
        )
        for a, b in pairs
    ]
    assert run(f"{name}.{mode}.f64", A, B) == expected
    if mode == "rn" and name != "div":
        assert run(f"{name}.f64", A, B) == expected


@pytest.mark.parametrize("mode", MODES)
def test_fma(mode: str) -> None:
    """9.7.3.6 fma: one rounding."""
    a, b = A + sample(F64, 40, 3, spread=2), B + sample(F64, 40, 4, spread=2)
    c = [EDGES[(7 * i) % len(EDGES)] for i in range(len(A))] + sample(F64, 40, 5, spread=3)
    triples = zip(a, b, c, strict=True)
    expected = [
        payload_kept(encode(fma(*(decode(x, F64) for x in (a, b, c)), mode), F64, mode), a, c, b) for a, b, c in triples
    ]
    assert run(f"fma.{mode}.f64", a, b, c) == expected
    assert run(f"mad.{mode}.f64", a, b, c) == expected


@pytest.mark.parametrize("mode", MODES)
def test_roots_and_reciprocals(mode: str) -> None:
    """9.7.3.13 rcp, .15 sqrt."""
    values = EDGES + sample(F64, 30, 6)
    one = decode(0x3FF0000000000000, F64)
    inverses = [payload_kept(encode(divide(one, decode(x, F64), mode), F64, mode), x) for x in values]
    assert run(f"rcp.{mode}.f64", values) == inverses
    assert run(f"sqrt.{mode}.f64", values) == [payload_kept(square_root(x, F64, mode), x) for x in values]


def test_signs_and_extremes() -> None:
    """9.7.3.9 abs, .10 neg, .11 min, .12 max, .2 copysign, .1 testp."""
    sign = 1 << 63
    assert run("abs.f64", EDGES) == [payload_kept(x & ~sign, x) for x in EDGES]
    assert run("neg.f64", EDGES) == [payload_kept(x ^ sign, x) for x in EDGES]
    assert run("copysign.f64", A, B) == [a & sign | b & ~sign for a, b in zip(A, B, strict=True)]
    zero, one, nan = 0, 0x3FF0000000000000, 0x7FF8000000000001
    assert run("min.f64", [zero, sign, one, nan, nan], [sign, zero, zero, one, nan]) == [sign, sign, zero, one, nan]
    assert run("max.f64", [zero, sign, one, nan, nan], [sign, zero, zero, one, nan]) == [zero, zero, one, one, nan]
    assert run("testp.subnormal.f64", [1, 0, one]) == [1, 0, 0]
    assert run("testp.normal.f64", [1, 0, one, nan, F64.inf]) == [0, 1, 1, 0, 0]


@pytest.mark.parametrize(
    "name", ["add.ftz.f64", "add.sat.f64", "div.f64", "div.approx.f64", "max.NaN.f64", "sqrt.rn.ftz.f64"]
)
def test_refused(name: str) -> None:
    """What is no PTX raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
