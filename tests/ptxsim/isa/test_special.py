"""Reciprocals, roots, transcendental functions (PTX ISA 9.7.3.13 to 9.7.3.22)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest
from ptx_floats import F32, F64, decode, divide, encode, flush, sample, specials, square_root
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

MODES = ("rn", "rz", "rm", "rp")
EDGES = specials(F32)
VALUES = EDGES + sample(F32, 120, 1) + sample(F32, 120, 2, spread=6)
ONE = Fraction(1)


@pytest.mark.parametrize("mode", MODES)
def test_exact_reciprocals_and_roots(mode: str) -> None:
    """9.7.3.13 rcp, .15 sqrt with a rounding mode, bit-exact, with .ftz too."""
    reciprocal = [encode(divide(ONE, decode(x, F32), mode), F32, mode) for x in VALUES]
    assert run(f"rcp.{mode}.f32", VALUES) == reciprocal
    assert run(f"sqrt.{mode}.f32", VALUES) == [square_root(x, F32, mode) for x in VALUES]
    flushed = [flush(x, F32) for x in VALUES]
    expected = [flush(encode(divide(ONE, decode(x, F32), mode), F32, mode), F32) for x in flushed]
    assert run(f"rcp.{mode}.ftz.f32", VALUES) == expected


def precise(name: str, value: Fraction) -> Fraction | float:
    """A function's value from 200-bit arithmetic, exact enough to be rounded to f32."""
    with mpmath.workprec(200):
        x = mpmath.mpf(value.numerator) / value.denominator
        functions: dict[str, Callable[[], mpmath.mpf]] = {
            "ex2": lambda: mpmath.power(2, x),
            "lg2": lambda: mpmath.log(x, 2),
            "rsqrt": lambda: 1 / mpmath.sqrt(x),
            "sqrt": lambda: mpmath.sqrt(x),
            "rcp": lambda: 1 / x,
            "sin": lambda: mpmath.sin(x),
            "cos": lambda: mpmath.cos(x),
            "tanh": lambda: mpmath.tanh(x),
        }
        result = functions[name]()
        if result == 0:
            return 0.0
        sign, mantissa, exponent, _ = result._mpf_
        return (-1) ** sign * Fraction(mantissa) * Fraction(2) ** exponent


DOMAIN = {"lg2": 0, "rsqrt": 0, "sqrt": 0}


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"])
def test_approximate(name: str) -> None:
    """.approx: correctly rounded on edge and random values. (Silicon was measured within 4e-7, tanh within 1e-3.)"""
    finite = [x for x in VALUES if isinstance(decode(x, F32), Fraction)]
    if name in DOMAIN:
        finite = [x for x in finite if not x >> 31]
    if name in ("sin", "cos", "ex2", "tanh"):
        finite = [x for x in finite if abs(decode(x, F32)) < 150]
    expected = [encode(precise(name, decode(x, F32)), F32) for x in finite]  # type: ignore[arg-type]
    assert run(f"{name}.approx.f32", finite) == expected
    if name != "tanh":
        normal = [x for x in finite if flush(x, F32) == x]
        expected = [flush(encode(precise(name, decode(x, F32)), F32), F32) for x in normal]  # type: ignore[arg-type]
        assert run(f"{name}.approx.ftz.f32", normal) == expected


def test_edges() -> None:
    """The tables of special values in 9.7.3.13 to .22."""
    nan, inf, minus = 0x7FFFFFFF, 0x7F800000, 0x80000000
    zeros = [0, minus, inf, inf | minus, 0x7FC00001]
    assert run("ex2.approx.f32", zeros) == [0x3F800000, 0x3F800000, inf, 0, nan]
    assert run("lg2.approx.f32", zeros) == [inf | minus, inf | minus, inf, nan, nan]
    assert run("rcp.approx.f32", zeros) == [inf, inf | minus, 0, minus, nan]
    assert run("rsqrt.approx.f32", zeros) == [inf, inf | minus, 0, nan, nan]
    assert run("sqrt.approx.f32", zeros) == [0, minus, inf, nan, nan]
    assert run("sin.approx.f32", zeros) == [0, minus, nan, nan, nan]
    assert run("cos.approx.f32", zeros) == [0x3F800000, 0x3F800000, nan, nan, nan]
    assert run("tanh.approx.f32", zeros) == [0, minus, 0x3F800000, 0xBF800000, nan]
    assert run("ex2.approx.ftz.f32", [encode(Fraction(-127), F32)]) == [0]
    assert run("ex2.approx.f32", [encode(Fraction(-127), F32)]) == [0x00400000]
    assert run("lg2.approx.ftz.f32", [1, 0x80000001]) == [inf | minus, inf | minus]
    assert run("rsqrt.approx.f32", [0xBF800000]) == [nan]


def test_f64_approximations() -> None:
    """9.7.3.14 rcp.approx.ftz.f64, .17 rsqrt.approx.ftz.f64: of the upper word, the lower word 0, within 2**-20."""
    values = sample(F64, 60, 3, spread=300)
    for name, function in (("rcp", lambda x: 1 / x), ("rsqrt", lambda x: 1 / math.sqrt(x))):
        chosen = [x & ~F64.sign for x in values]
        for x, result in zip(chosen, run(f"{name}.approx.ftz.f64", chosen), strict=True):
            assert result & 0xFFFFFFFF == 0
            right = function(float(decode(x, F64)))
            assert abs(float(decode(result, F64)) / right - 1) < 2.0**-19
    assert run("rcp.approx.ftz.f64", [0, F64.sign, F64.inf, 1]) == [F64.inf, F64.inf | F64.sign, 0, F64.inf]


@pytest.mark.parametrize(
    "name", ["ex2.f32", "tanh.approx.ftz.f32", "rcp.f32", "ex2.approx.f64", "sqrt.approx.f64", "sin.rn.f32"]
)
def test_refused(name: str) -> None:
    """What is no PTX raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
