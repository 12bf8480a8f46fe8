"""f16 and bf16 arithmetic against exact rational arithmetic (PTX ISA 9.7.4)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_floats import (
    NAMES,
    Format,
    add,
    decode,
    encode,
    flush,
    fma,
    is_negative,
    multiply,
    negate,
    sample,
    saturated,
    specials,
)
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

KINDS = ("f16", "bf16")


def triples(fmt: Format) -> tuple[list[int], list[int], list[int]]:
    edges = specials(fmt)
    a = [x for x in edges for _ in edges]
    b = [y for _ in edges for y in edges]
    c = [edges[(5 * i) % len(edges)] for i in range(len(a))]
    spread = 8
    return (
        a + sample(fmt, 200, 1, spread) + sample(fmt, 60, 4),
        b + sample(fmt, 200, 2, spread) + sample(fmt, 60, 5),
        c + sample(fmt, 200, 3, spread) + sample(fmt, 60, 6),
    )


def relu(bits: int, fmt: Format) -> int:
    value = decode(bits, fmt)
    return 0 if value == value and is_negative(value) else bits


def joined(low: list[int], high: list[int]) -> list[int]:
    return [x | y << 16 for x, y in zip(low, high, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_add_sub_mul(kind: str) -> None:
    """9.7.4.1 add, .2 sub, .3 mul: rounded once to nearest even; NaN is 0x7fff; f16 also .ftz and .sat; packed."""
    fmt = NAMES[kind]
    a, b, _ = triples(fmt)
    exact = {"add": add, "sub": lambda x, y, m: add(x, negate(y), m), "mul": multiply}
    for name, f in exact.items():
        bits = [encode(f(decode(x, fmt), decode(y, fmt), "rn"), fmt) for x, y in zip(a, b, strict=True)]
        assert run(f"{name}.{kind}", a, b) == bits, name
        assert run(f"{name}.rn.{kind}", a, b) == bits
        assert run(f"{name}.{kind}x2", joined(a, a[::-1]), joined(b, b[::-1])) == joined(bits, bits[::-1])
        if kind == "f16":
            assert run(f"{name}.sat.f16", a, b) == [saturated(x, fmt) for x in bits]
            flushed = [(flush(x, fmt), flush(y, fmt)) for x, y in zip(a, b, strict=True)]
            expected = [flush(encode(f(decode(x, fmt), decode(y, fmt), "rn"), fmt), fmt) for x, y in flushed]
            assert run(f"{name}.ftz.f16", a, b) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_fma(kind: str) -> None:
    """9.7.4.4 fma: one rounding, .relu, .sat, packed."""
    fmt = NAMES[kind]
    a, b, c = triples(fmt)
    bits = [encode(fma(*(decode(x, fmt) for x in triple), "rn"), fmt) for triple in zip(a, b, c, strict=True)]
    assert run(f"fma.rn.{kind}", a, b, c) == bits
    assert run(f"fma.rn.relu.{kind}", a, b, c) == [relu(x, fmt) for x in bits]
    pairs = [joined(x, x[::-1]) for x in (a, b, c)]
    assert run(f"fma.rn.{kind}x2", *pairs) == joined(bits, bits[::-1])
    if kind == "f16":
        assert run("fma.rn.sat.f16", a, b, c) == [saturated(x, fmt) for x in bits]


def test_fma_beyond_float64() -> None:
    """bf16: a product at a tie and an addend 60 binades below it, which a float64 sum alone would lose."""
    fmt = NAMES["bf16"]
    tie = encode(decode(0x3F80, fmt) * 17 / 16, fmt)  # squared: 1 + 1/8 + 1/256, half of the last place
    for addend, expected in ((0x2000, 0x3F91), (0xA000, 0x3F90), (0, 0x3F90)):
        assert run("fma.rn.bf16", [tie], [tie], [addend]) == [expected]


HALVES = st.integers(0, 0xFFFF)


@given(HALVES, HALVES, HALVES, st.sampled_from(KINDS))
def test_fma_property(a: int, b: int, c: int, kind: str) -> None:
    """Any bits at all."""
    fmt = NAMES[kind]
    assert run(f"fma.rn.{kind}", [a], [b], [c]) == [
        encode(fma(decode(a, fmt), decode(b, fmt), decode(c, fmt), "rn"), fmt)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_signs(kind: str) -> None:
    """9.7.4.5 neg, .6 abs."""
    edges = specials(NAMES[kind])
    assert run(f"neg.{kind}", edges) == [x ^ 0x8000 for x in edges]
    assert run(f"abs.{kind}", edges) == [x & 0x7FFF for x in edges]
    pairs = joined(edges, edges[::-1])
    assert run(f"neg.{kind}x2", pairs) == [x ^ 0x80008000 for x in pairs]
    assert run(f"abs.{kind}x2", pairs) == [x & 0x7FFF7FFF for x in pairs]
    if kind == "f16":
        assert run("abs.ftz.f16", [0x83FF, 0x8400]) == [0, 0x0400]


def extreme(a: int, b: int, fmt: Format, propagate: bool, flip: bool) -> int:
    x, y = decode(a, fmt), decode(b, fmt)
    if x != x or y != y:
        return 0x7FFF if propagate or (x != x and y != y) else b if x != x else a
    first = (is_negative(x) if x == y else x < y) != flip
    return a if first or a == b else b


@pytest.mark.parametrize("name", ["min", "max"])
@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kind: str, name: str) -> None:
    """9.7.4.7 min, .8 max: NaN, zeros, .xorsign.abs, packed."""
    fmt, flip = NAMES[kind], name == "max"
    a, b, _ = triples(fmt)
    both = list(zip(a, b, strict=True))
    plain = [extreme(x, y, fmt, False, flip) for x, y in both]
    assert run(f"{name}.{kind}", a, b) == plain
    assert run(f"{name}.NaN.{kind}", a, b) == [extreme(x, y, fmt, True, flip) for x, y in both]
    assert run(f"{name}.{kind}x2", joined(a, a[::-1]), joined(b, b[::-1])) == joined(plain, plain[::-1])
    sizes = [extreme(x & 0x7FFF, y & 0x7FFF, fmt, False, flip) for x, y in both]
    signed = [m | (0 if m == 0x7FFF else (x ^ y) & 0x8000) for m, (x, y) in zip(sizes, both, strict=True)]
    assert run(f"{name}.xorsign.abs.{kind}", a, b) == signed


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ex2.approx", "f16"), ("ex2.approx.ftz", "bf16"), ("tanh.approx", "f16"), ("tanh.approx", "bf16")],
)
def test_transcendental(name: str, kind: str) -> None:
    """9.7.4.10 ex2, .9 tanh: every code, against the C library's float64 function rounded once."""
    fmt = NAMES[kind]
    ftz = "ftz" in name
    codes = list(range(0, 0x10000, 7)) + specials(fmt)

    def apply(bits: int) -> int:
        value = decode(flush(bits, fmt) if ftz else bits, fmt)
        if value != value:
            return 0x7FFF
        number = float(value)
        if name.startswith("tanh"):
            result = math.tanh(number)
        else:
            result = math.inf if number >= 1024 else math.exp2(number) if hasattr(math, "exp2") else 2.0**number
        code = encode(result, fmt)
        return flush(code, fmt) if ftz else code

    assert run(f"{name}.{kind}", codes) == [apply(x) for x in codes]
    packed = run(f"{name}.{kind}x2", joined(codes, codes[::-1]))
    single = run(f"{name}.{kind}", codes)
    assert packed == joined(single, single[::-1])


REFUSED = [
    "fma.f16",
    "add.ftz.bf16",
    "add.sat.bf16",
    "fma.rn.ftz.oob.f16",
    "add.relu.f16",
    "ex2.approx.bf16",
    "fma.rz.f16",
    "min.ftz.bf16",
]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is no PTX, or is not executed, raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)


@pytest.mark.parametrize("kind", KINDS)
def test_fma_oob(kind: str) -> None:
    """9.7.4.4 fma.oob: a factor that is an out-of-bounds NaN, of either sign, gives 0; other NaNs are NaN."""
    one, other = (0x3C00, 0x7E00) if kind == "f16" else (0x3F80, 0x7FC0)
    factors = [0x7FF7, one, other, one], [one, 0xFFF7, one, one]
    assert run(f"fma.rn.oob.{kind}", *factors, [one] * 4) == [0, 0, 0x7FFF, 0x4000]
    assert run(f"fma.rn.oob.relu.{kind}", *factors, [one | 0x8000] * 4) == [0, 0, 0x7FFF, 0]
    assert run(f"fma.rn.oob.{kind}x2", *(joined(f, f[::-1]) for f in factors), joined([one] * 4, [one] * 4)) == joined(
        [0, 0, 0x7FFF, 0x4000], [0x4000, 0x7FFF, 0, 0]
    )
