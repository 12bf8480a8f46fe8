"""f32 and f32x2 arithmetic against exact rational arithmetic (PTX ISA 9.7.3, mixed precision 9.7.5)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_floats import (
    BF16,
    F16,
    F32,
    Value,
    add,
    decode,
    divide,
    encode,
    flush,
    flushed,
    fma,
    is_negative,
    multiply,
    negate,
    sample,
    saturated,
    specials,
)
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa import rounding
from cubinery.aot.ptxsim.isa.base import UnknownInstruction

MODES = ("rn", "rz", "rm", "rp")
EDGES = specials(F32)
TWO = (
    [a for a in EDGES for _ in EDGES] + sample(F32, 60, 1) + sample(F32, 200, 2, spread=20),
    [b for _ in EDGES for b in EDGES] + sample(F32, 60, 3) + sample(F32, 200, 4, spread=20),
)

Exact = Callable[[Value, Value, str], Value]
BINARY: dict[str, Exact] = {
    "add": add,
    "sub": lambda a, b, mode: add(a, negate(b), mode),
    "mul": multiply,
    "div": divide,
}


def expected(exact: Exact, a: list[int], b: list[int], mode: str, ftz: bool = False, sat: bool = False) -> list[int]:
    results = []
    for x, y in zip(a, b, strict=True):
        if ftz:
            x, y = flush(x, F32), flush(y, F32)
        value = exact(decode(x, F32), decode(y, F32), mode)
        bits = encode(value, F32, mode)
        if ftz:
            bits = flush(bits, F32) if exact is divide else flushed(value, bits, mode)
        results.append(saturated(bits, F32) if sat else bits)
    return results


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str, mode: str) -> None:
    """9.7.3.3 add, .4 sub, .5 mul, .8 div in every mode, with .ftz and .sat: bit-exact, NaN 0x7fffffff."""
    a, b = TWO
    assert run(f"{name}.{mode}.f32", a, b) == expected(BINARY[name], a, b, mode)
    assert run(f"{name}.{mode}.ftz.f32", a, b) == expected(BINARY[name], a, b, mode, ftz=True)
    if name != "div":
        assert run(f"{name}.{mode}.sat.f32", a, b) == expected(BINARY[name], a, b, mode, sat=True)


def test_default_rounding() -> None:
    """add, sub and mul without a mode round to nearest even."""
    a, b = TWO
    for name in ("add", "sub", "mul"):
        assert run(f"{name}.f32", a, b) == run(f"{name}.rn.f32", a, b)


def hard_cases() -> tuple[list[int], list[int], list[int]]:
    """Triples where rounding twice goes wrong: a product that ends at a tie, and a sum just beside it."""
    one = 0x3F800000
    triples = []
    for shift in (24, 23, 30):
        tie = encode(1 + Fraction(1, 1 << 12), F32)  # squared: 1 + 2^-11 + 2^-24, half of the last place
        tiny = encode(Fraction(1, 1 << (60 + shift)), F32)
        triples += [(tie, tie, tiny), (tie, tie, tiny | F32.sign), (tie | F32.sign, tie, tiny)]
    half_ulp = encode(Fraction(1, 1 << 24), F32)
    triples += [(half_ulp, one, one), (half_ulp, one + 1, one), (half_ulp, one - 1, one)]
    least = encode(Fraction(1, 1 << 75), F32)  # squared: half of the least subnormal
    for c in (0, 1, 2, 3, F32.sign | 1, 0x007FFFFF, 0x00800000):
        triples += [(least, least, c), (least, least + 1, c), (least, least - 1, c), (least | F32.sign, least, c)]
    # (1 + x)(1 - x) is just below 1: a subnormal sum just below a tie, which float64 rounds onto the tie.
    above, below = (encode((1 + sign * Fraction(1, 1 << 16)) / (1 << 75), F32) for sign in (1, -1))
    triples += [(above, below, c) for c in (0x00400001, 0x00400003, F32.sign | 0x00400001)]
    big = encode(Fraction(2) ** 127, F32)
    triples += [(big, one, F32.max_code), (big, encode(Fraction(2), F32), F32.max_code | F32.sign)]
    triples += [
        (F32.max_code, one, encode(Fraction(2) ** 103, F32)),
        (F32.max_code, one, encode(Fraction(2) ** 102, F32)),
    ]
    columns = zip(*triples, strict=True)
    return tuple(list(column) for column in columns)  # type: ignore[return-value]


def three() -> tuple[list[int], list[int], list[int]]:
    short = [0, F32.sign, 1, 0x00800000, 0x3F800000, 0xBF800001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000]
    a = [x for x in short for _ in range(len(short) ** 2)]
    b = [y for _ in short for y in short for _ in short]
    c = [z for _ in range(len(short) ** 2) for z in short]
    hard = hard_cases()
    return (
        a + hard[0] + sample(F32, 200, 5, spread=15) + sample(F32, 60, 8),
        b + hard[1] + sample(F32, 200, 6, spread=15) + sample(F32, 60, 9),
        c + hard[2] + sample(F32, 200, 7, spread=15) + sample(F32, 60, 10),
    )


@pytest.mark.parametrize("mode", MODES)
def test_fma(mode: str) -> None:
    """9.7.3.6 fma, .7 mad: one rounding of the exact value, ties, subnormals and overflow included."""
    a, b, c = three()
    exact = [fma(decode(x, F32), decode(y, F32), decode(z, F32), mode) for x, y, z in zip(a, b, c, strict=True)]
    bits = [encode(value, F32, mode) for value in exact]
    assert run(f"fma.{mode}.f32", a, b, c) == bits
    assert run(f"mad.{mode}.f32", a, b, c) == bits
    assert run(f"fma.{mode}.sat.f32", a, b, c) == [saturated(x, F32) for x in bits]
    exact = [fma(*(decode(flush(x, F32), F32) for x in triple), mode) for triple in zip(a, b, c, strict=True)]
    assert run(f"fma.{mode}.ftz.f32", a, b, c) == [flushed(x, encode(x, F32, mode), mode) for x in exact]


def test_naive_double_rounding_fails_the_hard_cases() -> None:
    """The hard cases are hard: float64 rounded again gets some wrong, so test_fma would see it."""
    a, b, c = (np.array(column, np.uint32).view(np.float32) for column in hard_cases())
    with np.errstate(all="ignore"):
        naive = (a.astype(np.float64) * b + c).astype(np.float32)
        right = rounding.fma_f32(a, b, c, "rn")
    assert (naive.view(np.uint32) != right.view(np.uint32)).sum() >= 5


FLOATS32 = st.integers(0, 0xFFFFFFFF)


@given(FLOATS32, FLOATS32, FLOATS32, st.integers(-30, 30), st.sampled_from(MODES))
def test_fma_property(a: int, b: int, c: int, offset: int, mode: str) -> None:
    """Any bits, c moved near the product so that they interact."""
    product = multiply(decode(a, F32), decode(b, F32), mode)
    if isinstance(product, Fraction):
        near = encode(product * Fraction(2) ** offset, F32)
        if near & 0x7FFFFFFF < 0x7F800000:
            c = near & 0xFF800000 | c & 0x7FFFFF
    value = fma(decode(a, F32), decode(b, F32), decode(c, F32), mode)
    assert run(f"fma.{mode}.f32", [a], [b], [c]) == [encode(value, F32, mode)]


@pytest.mark.parametrize("mode", MODES)
def test_pairs(mode: str) -> None:
    """.f32x2 of add, sub, mul and fma: each half as .f32 (9.7.3.3 to .6)."""
    a, b, c = three()
    wide = [[low | high << 32 for low, high in zip(x, x[::-1], strict=True)] for x in (a, b, c)]
    for name, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
        for ftz in ("", ".ftz"):
            single = run(f"{name}.{mode}{ftz}.f32", *(a, b, c)[:count])
            other = run(f"{name}.{mode}{ftz}.f32", *(a[::-1], b[::-1], c[::-1])[:count])
            joined = [low | high << 32 for low, high in zip(single, other, strict=True)]
            assert run(f"{name}.{mode}{ftz}.f32x2", *wide[:count]) == joined


@pytest.mark.parametrize(("kind", "fmt"), [("f16", F16), ("bf16", BF16)])
def test_mixed_precision(kind: str, fmt: object) -> None:
    """9.7.5: halves widened exactly, then one rounding to f32."""
    assert fmt in (F16, BF16)
    halves = specials(fmt)  # type: ignore[arg-type]
    a = [x for x in halves for _ in halves]
    b = [y for _ in halves for y in halves]
    c = [EDGES[i % len(EDGES)] for i in range(len(a))]
    value = [fma(decode(x, fmt), decode(y, fmt), decode(z, F32), "rz") for x, y, z in zip(a, b, c, strict=True)]  # type: ignore[arg-type]
    assert run(f"fma.rz.f32.{kind}", a, b, c) == [encode(v, F32, "rz") for v in value]
    value = [add(decode(x, fmt), decode(z, F32), "rn") for x, z in zip(a, c, strict=True)]  # type: ignore[arg-type]
    assert run(f"add.f32.{kind}", a, c) == [encode(v, F32) for v in value]
    value = [add(decode(x, fmt), negate(decode(z, F32)), "rm") for x, z in zip(a, c, strict=True)]  # type: ignore[arg-type]
    assert run(f"sub.rm.f32.{kind}", a, c) == [encode(v, F32, "rm") for v in value]


def test_approximate_division() -> None:
    """9.7.3.8 div.full and .approx: correctly rounded here; .approx gives 0 for divisors above 2**126, NaN for inf."""
    a, b = TWO
    exact = expected(divide, a, b, "rn")
    assert run("div.full.f32", a, b) == exact
    for x, y, result, right in zip(a, b, run("div.approx.f32", a, b), exact, strict=True):
        divisor = decode(y, F32)
        if not (isinstance(divisor, Fraction) and abs(divisor) > Fraction(2) ** 126):
            assert result == right
        elif abs(decode(x, F32)) == math.inf or x & 0x7FFFFFFF > 0x7F800000:
            assert result == 0x7FFFFFFF
        else:
            assert result & 0x7FFFFFFF == 0
    with pytest.raises(UnknownInstruction):
        specialise("div.f32")


def test_sign_operations() -> None:
    """9.7.3.9 abs, .10 neg, .2 copysign: the sign bit; .ftz flushes."""
    assert run("abs.f32", EDGES) == [x & 0x7FFFFFFF for x in EDGES]
    assert run("neg.f32", EDGES) == [x ^ 0x80000000 for x in EDGES]
    numbers = [x for x in EDGES if x & 0x7FFFFFFF <= 0x7F800000]
    assert run("abs.ftz.f32", numbers) == [flush(x, F32) & 0x7FFFFFFF for x in numbers]
    assert run("neg.ftz.f32", numbers) == [flush(x, F32) ^ 0x80000000 for x in numbers]
    a, b = TWO
    assert run("copysign.f32", a, b) == [x & 0x80000000 | y & 0x7FFFFFFF for x, y in zip(a, b, strict=True)]


def smaller(a: int, b: int, propagate: bool, flip: bool) -> int:
    """min, or with `flip` max, by definition: -0 < +0, NaN loses or wins."""
    x, y = decode(a, F32), decode(b, F32)
    if x != x or y != y:
        if propagate or (x != x and y != y):
            return 0x7FFFFFFF
        return b if x != x else a
    first = (is_negative(x) if x == y else x < y) != flip
    return a if first or a == b else b


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_extremes(name: str, ftz: str) -> None:
    """9.7.3.11 min, .12 max: NaN, zeros, .xorsign.abs, three sources."""
    a, b = TWO
    flip = name == "max"
    x, y = ([flush(v, F32) if ftz else v for v in side] for side in (a, b))
    both = list(zip(x, y, strict=True))
    assert run(f"{name}{ftz}.f32", a, b) == [smaller(u, v, False, flip) for u, v in both]
    assert run(f"{name}{ftz}.NaN.f32", a, b) == [smaller(u, v, True, flip) for u, v in both]
    magnitude = [smaller(u & 0x7FFFFFFF, v & 0x7FFFFFFF, False, flip) for u, v in both]
    signs = [0 if m > 0x7F800000 else (u ^ v) & 0x80000000 for m, (u, v) in zip(magnitude, both, strict=True)]
    xorsign = [m | s for m, s in zip(magnitude, signs, strict=True)]
    assert run(f"{name}{ftz}.xorsign.abs.f32", a, b) == xorsign
    c = a[::-1]
    z = [flush(v, F32) if ftz else v for v in c]
    expected3 = [smaller(smaller(u, v, True, flip), w, True, flip) for (u, v), w in zip(both, z, strict=True)]
    assert run(f"{name}{ftz}.NaN.f32", a, b, c) == expected3
    size = 0x7FFFFFFF
    absolute = [
        smaller(smaller(u & size, v & size, False, flip), w & size, False, flip)
        for (u, v), w in zip(both, z, strict=True)
    ]
    assert run(f"{name}{ftz}.abs.f32", a, b, c) == absolute


def test_testp() -> None:
    """9.7.3.1 testp."""
    values = [0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0x80000001, 0xFF800000]
    classes = {
        "finite": [1, 1, 1, 1, 1, 1, 0, 0, 1, 0],
        "infinite": [0, 0, 0, 0, 0, 0, 1, 0, 0, 1],
        "number": [1, 1, 1, 1, 1, 1, 1, 0, 1, 1],
        "notanumber": [0, 0, 0, 0, 0, 0, 0, 1, 0, 0],
        "normal": [1, 0, 0, 1, 1, 1, 0, 0, 0, 0],
        "subnormal": [0, 1, 1, 0, 0, 0, 0, 0, 1, 0],
    }
    for name, truth in classes.items():
        assert run(f"testp.{name}.f32", values) == truth, name


REFUSED = ["fma.f32", "add.sat.f32x2", "max.relu.f32", "min.xorsign.f32", "add.rna.f32", "add.relu.f32", "testp.f32"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is no PTX raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
