"""Integer arithmetic against Python integers (PTX ISA 9.7.1, extended precision 9.7.2)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

EDGES = (0, 1, 2, 3, 7, 0x55, 0x7F, 0x80, 0xFF, -1, -2, -3, -128)


def values(width: int, seed: int = 0) -> list[int]:
    """Edge values and random ones, as raw bits."""
    rng = random.Random(seed)
    top = 1 << (width - 1)
    found = {x & ((1 << width) - 1) for x in (*EDGES, top, top - 1, top + 1, 1 << width // 2)}
    return sorted(found) + [rng.getrandbits(width) for _ in range(6)]


def pairs(width: int) -> tuple[list[int], list[int]]:
    """Every pair of values."""
    left, right = values(width, 1), values(width, 2)
    return [a for a in left for _ in right], [b for _ in left for b in right]


def signed(bits: int, width: int) -> int:
    return bits - (1 << width) if bits >> (width - 1) & 1 else bits


def as_type(kind: str) -> tuple[Callable[[int], int], int]:
    """From raw bits to the value, and the width."""
    width = int(kind[1:])
    return (lambda x: signed(x, width) if kind[0] == "s" else x), width


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


KINDS = ("u16", "s16", "u32", "s32", "u64", "s64")
BINARY: dict[str, Callable[[int, int, int], int]] = {
    "add": lambda a, b, w: a + b,
    "sub": lambda a, b, w: a - b,
    "mul.lo": lambda a, b, w: a * b,
    "mul.hi": lambda a, b, w: a * b >> w,
    "min": lambda a, b, w: min(a, b),
    "max": lambda a, b, w: max(a, b),
    "div": lambda a, b, w: truncated(a, b) if b else -1,
    "rem": lambda a, b, w: a - b * truncated(a, b) if b else -1,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", BINARY)
def test_two_operands(name: str, kind: str) -> None:
    """9.7.1.1 add, .2 sub, .3 mul, .8 div, .9 rem, .12 min, .13 max. Division by zero: all ones, as measured."""
    value, width = as_type(kind)
    a, b = pairs(width)
    expected = [BINARY[name](value(x), value(y), width) & ((1 << width) - 1) for x, y in zip(a, b, strict=True)]
    assert run(f"{name}.{kind}", a, b) == expected


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(kind: str) -> None:
    """9.7.1.3 mul.wide and 9.7.1.4 mad.wide: the product has twice the width."""
    value, width = as_type(kind)
    a, b = pairs(width)
    c = [random.Random(5).getrandbits(2 * width)] * len(a)
    mask = (1 << 2 * width) - 1
    product = [value(x) * value(y) for x, y in zip(a, b, strict=True)]
    assert run(f"mul.wide.{kind}", a, b) == [p & mask for p in product]
    assert run(f"mad.wide.{kind}", a, b, c) == [(p + c[0]) & mask for p in product]


@pytest.mark.parametrize("half", ["lo", "hi"])
@pytest.mark.parametrize("kind", KINDS)
def test_mad(kind: str, half: str) -> None:
    """9.7.1.4 mad: product word plus c."""
    value, width = as_type(kind)
    a, b = pairs(width)
    c = [(3 * x + 1) & ((1 << width) - 1) for x in b]
    shift = width if half == "hi" else 0
    expected = [((value(x) * value(y) >> shift) + z) & ((1 << width) - 1) for x, y, z in zip(a, b, c, strict=True)]
    assert run(f"mad.{half}.{kind}", a, b, c) == expected


def clamp32(x: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, x)) & 0xFFFFFFFF


def test_saturation() -> None:
    """.sat of add, sub and mad.hi clamps to the range of s32 (9.7.1.1, .2, .4)."""
    a, b = pairs(32)
    both = [(signed(x, 32), signed(y, 32)) for x, y in zip(a, b, strict=True)]
    assert run("add.sat.s32", a, b) == [clamp32(x + y) for x, y in both]
    assert run("sub.sat.s32", a, b) == [clamp32(x - y) for x, y in both]
    top = [0x7FFFFFFF] * len(a)
    assert run("mad.hi.sat.s32", a, b, top) == [clamp32((x * y >> 32) + 0x7FFFFFFF) for x, y in both]
    with pytest.raises(UnknownInstruction, match=r"\.sat applies to \.s32 only"):
        specialise("add.sat.u32")


def low24(bits: int, kind: str) -> int:
    return signed(bits & 0xFFFFFF, 24) if kind == "s32" else bits & 0xFFFFFF


@pytest.mark.parametrize("half", ["lo", "hi"])
@pytest.mark.parametrize("kind", ["u32", "s32"])
def test_24_bits(kind: str, half: str) -> None:
    """9.7.1.5 mul24, .6 mad24: bits 31..0 or 47..16 of the product of the low 24 bits."""
    a, b = pairs(32)
    shift = 16 if half == "hi" else 0
    products = [low24(x, kind) * low24(y, kind) >> shift for x, y in zip(a, b, strict=True)]
    assert run(f"mul24.{half}.{kind}", a, b) == [p & 0xFFFFFFFF for p in products]
    c = [0x7FFFFFF0] * len(a)
    assert run(f"mad24.{half}.{kind}", a, b, c) == [(p + c[0]) & 0xFFFFFFFF for p in products]
    if (kind, half) == ("s32", "hi"):
        assert run("mad24.hi.sat.s32", a, b, c) == [clamp32(p + c[0]) for p in products]


@pytest.mark.parametrize("kind", KINDS)
def test_sad(kind: str) -> None:
    """9.7.1.7 sad: c + |a - b|."""
    value, width = as_type(kind)
    a, b = pairs(width)
    expected = [(5 + abs(value(x) - value(y))) & ((1 << width) - 1) for x, y in zip(a, b, strict=True)]
    assert run(f"sad.{kind}", a, b, [5] * len(a)) == expected


@pytest.mark.parametrize("kind", ["s16", "s32", "s64"])
def test_sign(kind: str) -> None:
    """9.7.1.10 abs, .11 neg: the least integer maps to itself."""
    value, width = as_type(kind)
    a = values(width)
    mask = (1 << width) - 1
    assert run(f"abs.{kind}", a) == [abs(value(x)) & mask for x in a]
    assert run(f"neg.{kind}", a) == [-value(x) & mask for x in a]


def test_relu_and_pairs() -> None:
    """min and max with .relu, and per half of .u16x2 and .s16x2 (9.7.1.12, .13); add.u16x2 (9.7.1.1)."""
    a, b = pairs(32)
    assert run("min.relu.s32", a, b) == [max(0, min(signed(x, 32), signed(y, 32))) for x, y in zip(a, b, strict=True)]

    def halves(x: int, y: int, f: Callable[[int, int], int]) -> int:
        return (f(x >> 16, y >> 16) & 0xFFFF) << 16 | f(x & 0xFFFF, y & 0xFFFF) & 0xFFFF

    def s16(f: Callable[[int, int], int]) -> Callable[[int, int], int]:
        return lambda x, y: f(signed(x, 16), signed(y, 16))

    cases: dict[str, Callable[[int, int], int]] = {
        "add.u16x2": lambda x, y: x + y,
        "add.s16x2": lambda x, y: x + y,
        "max.u16x2": max,
        "min.s16x2": s16(min),
        "max.relu.s16x2": s16(lambda x, y: max(x, y, 0)),
    }
    for name, f in cases.items():
        assert run(name, a, b) == [halves(x, y, f) for x, y in zip(a, b, strict=True)], name


@pytest.mark.parametrize("width", [32, 64])
def test_counting(width: int) -> None:
    """9.7.1.14 popc, .15 clz, .18 brev."""
    a = values(width) + [1 << i for i in range(width)] + [(1 << i) - 1 for i in range(width + 1)]
    assert run(f"popc.b{width}", a) == [x.bit_count() for x in a]
    assert run(f"clz.b{width}", a) == [width - x.bit_length() for x in a]
    assert run(f"brev.b{width}", a) == [int(f"{x:0{width}b}"[::-1], 2) for x in a]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfind(kind: str) -> None:
    """9.7.1.16 bfind: the place of the highest bit unlike the sign; .shiftamt: how far it is from the top."""
    value, width = as_type(kind)
    a = values(width) + [1 << i for i in range(width)]
    place = [(x if value(x) >= 0 else ~value(x)).bit_length() - 1 for x in a]
    assert run(f"bfind.{kind}", a) == [p & 0xFFFFFFFF for p in place]
    assert run(f"bfind.shiftamt.{kind}", a) == [0xFFFFFFFF if p < 0 else width - 1 - p for p in place]


def test_fns() -> None:
    """9.7.1.17 fns: the loop of its semantics, bit by bit."""

    def search(mask: int, base: int, offset: int) -> int:
        if offset == 0:
            return base if mask >> base & 1 else 0xFFFFFFFF
        place, left = base, abs(offset) - 1
        while 0 <= place < 32:
            if mask >> place & 1:
                if left == 0:
                    return place
                left -= 1
            place += 1 if offset > 0 else -1
        return 0xFFFFFFFF

    cases = [
        (mask, base, offset)
        for mask in (0, 1, 0x80000000, 0xAAAAAAAA, 0xFFFFFFFF, 0x12345678)
        for base in (0, 1, 5, 31)
        for offset in (0, 1, 2, 5, 33, -1, -3)
    ]
    masks, bases, offsets = (list(column) for column in zip(*cases, strict=True))
    assert run("fns.b32", masks, bases, offsets) == [search(*case) for case in cases]


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bfe(kind: str) -> None:
    """9.7.1.19 bfe: bit i of d is bit pos + i of a inside the field and the word, else the sign of the field."""
    _, width = as_type(kind)

    def extract(a: int, position: int, length: int) -> int:
        if width == 32:  # code for 64 bits that ptxas makes takes them whole
            position, length = position & 255, length & 255
        sign = 0
        if kind[0] == "s" and length:
            sign = a >> min(position + length - 1, width - 1) & 1
        bits = [a >> (position + i) & 1 if i < length and position + i < width else sign for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    cases = [
        (a, position, length)
        for a in (0x8000000180000001, 0x7FEDCBA976543210, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0)
        for position in (0, 1, 4, 16, 31, 32, 40, 63, 64, 255, 256)
        for length in (0, 1, 4, 15, 31, 32, 33, 63, 64, 255, 257)
    ]
    words, positions, lengths = (list(column) for column in zip(*cases, strict=True))
    words = [word & ((1 << width) - 1) for word in words]
    expected = [extract(*case) for case in zip(words, positions, lengths, strict=True)]
    assert run(f"bfe.{kind}", words, positions, lengths) == expected


@pytest.mark.parametrize("width", [32, 64])
def test_bfi(width: int) -> None:
    """9.7.1.20 bfi: bits pos to pos + len - 1 of b replaced by low bits of a, as far as the word goes."""

    def insert(a: int, b: int, position: int, length: int) -> int:
        for i in range(min(length & 255, width)):
            place = (position & 255) + i
            if place < width:
                b = b & ~(1 << place) | (a >> i & 1) << place
        return b

    cases = [
        (0xDEADBEEFCAFEF00D & ((1 << width) - 1), b & ((1 << width) - 1), position, length)
        for b in (0, 0xFFFFFFFFFFFFFFFF, 0x123456789ABCDEF0)
        for position in (0, 1, 8, 31, 32, 63, 64, 255)
        for length in (0, 1, 8, 31, 32, 63, 64, 255)
    ]
    columns = [list(column) for column in zip(*cases, strict=True)]
    assert run(f"bfi.b{width}", *columns) == [insert(*case) for case in cases]


def test_szext_and_bmsk() -> None:
    """9.7.1.21 szext and 9.7.1.22 bmsk in both modes."""
    counts = [0, 1, 7, 31, 32, 33, 63, 64, 0xFFFFFFFF]
    a, b = [x for x in values(32) for _ in counts], [y for _ in values(32) for y in counts]

    def extended(x: int, n: int, kind: str, mode: str) -> int:
        if n >= 32 and mode == "clamp":
            return x
        n %= 32
        low = x & ((1 << n) - 1)
        return signed(low, n) & 0xFFFFFFFF if kind == "s32" and n else low

    for mode in ("clamp", "wrap"):
        for kind in ("u32", "s32"):
            expected = [extended(x, n, kind, mode) for x, n in zip(a, b, strict=True)]
            assert run(f"szext.{mode}.{kind}", a, b) == expected, (mode, kind)
    starts, widths = [x for x in counts for _ in counts], [y for _ in counts for y in counts]
    limit = {"clamp": lambda x: min(x, 32), "wrap": lambda x: x % 32}
    for mode, f in limit.items():
        expected = [((1 << f(y)) - 1 << f(x)) & 0xFFFFFFFF for x, y in zip(starts, widths, strict=True)]
        assert run(f"bmsk.{mode}.b32", starts, widths) == expected, mode


@pytest.mark.parametrize("left", ["u32", "s32"])
@pytest.mark.parametrize("right", ["u32", "s32"])
def test_dot_products(left: str, right: str) -> None:
    """9.7.1.23 dp4a, .24 dp2a: bytes and halves of either sign, the sum wrapping."""
    a, b = pairs(32)
    c = [0xFFFFFFF0] * len(a)

    def part(x: int, index: int, width: int, kind: str) -> int:
        field = x >> index * width & ((1 << width) - 1)
        return signed(field, width) if kind == "s32" else field

    def four(x: int, y: int) -> int:
        return sum(part(x, i, 8, left) * part(y, i, 8, right) for i in range(4))

    def two(x: int, y: int, start: int) -> int:
        return sum(part(x, i, 16, left) * part(y, start + i, 8, right) for i in range(2))

    zipped = list(zip(a, b, strict=True))
    assert run(f"dp4a.{left}.{right}", a, b, c) == [(c[0] + four(x, y)) & 0xFFFFFFFF for x, y in zipped]
    assert run(f"dp2a.lo.{left}.{right}", a, b, c) == [(c[0] + two(x, y, 0)) & 0xFFFFFFFF for x, y in zipped]
    assert run(f"dp2a.hi.{left}.{right}", a, b, c) == [(c[0] + two(x, y, 2)) & 0xFFFFFFFF for x, y in zipped]


def carry_chain(name: str, *sources: list[int]) -> tuple[list[int], list[int]]:
    value, flag = run(name, *sources)
    return value, flag


def test_carry_chains() -> None:
    """9.7.2: 96-bit sums, differences and a 64-bit product accumulated through the condition code."""
    rng = random.Random(3)
    words = [[rng.choice((0, 0xFFFFFFFF, rng.getrandbits(32))) for _ in range(40)] for _ in range(6)]
    low, middle, high, low2, middle2, high2 = words
    a = [x | y << 32 | z << 64 for x, y, z in zip(low, middle, high, strict=True)]
    b = [x | y << 32 | z << 64 for x, y, z in zip(low2, middle2, high2, strict=True)]
    for first, next_, f in (("add", "addc", lambda x, y: x + y), ("sub", "subc", lambda x, y: x - y)):
        d0, carry = carry_chain(f"{first}.cc.u32", low, low2)
        d1, carry = carry_chain(f"{next_}.cc.u32", middle, middle2, carry)
        d2 = run(f"{next_}.u32", high, high2, carry)
        joined = [x | y << 32 | z << 64 for x, y, z in zip(d0, d1, d2, strict=True)]
        assert joined == [f(x, y) & ((1 << 96) - 1) for x, y in zip(a, b, strict=True)], first
    d0, carry = carry_chain("mad.lo.cc.u32", low, low2, middle)
    d1 = run("madc.hi.u32", low, low2, high, carry)
    product = [x * y + (m | h << 32) & ((1 << 64) - 1) for x, y, m, h in zip(low, low2, middle, high, strict=True)]
    assert [x | y << 32 for x, y in zip(d0, d1, strict=True)] == product
    compiled = specialise("addc.cc.u64")
    assert (compiled.carry_in, compiled.carry_out, compiled.dst) == (True, True, ("b64", "pred"))


@pytest.mark.parametrize("name", ["add.f16x3", "mul.s32", "mul.wide.u64", "add.lo.s32", "min.relu.u32", "popc.u32"])
def test_refused(name: str) -> None:
    """What is no PTX raises with the line, and is never executed as something else."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
