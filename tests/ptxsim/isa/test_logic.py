"""Logic, shifts and byte permutation, bit by bit (PTX ISA 9.7.8; prmt 9.7.9.7)."""

from __future__ import annotations

import random

import pytest
from ptx_ops import evaluate, run, specialise

from cubinery.aot.ptxsim.isa.base import Immediate, Register, UnknownInstruction, spread

RNG = random.Random(11)
WORDS = [0, 1, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFF, 0x80, 0x8000] + [RNG.getrandbits(32) for _ in range(9)]
PAIRS = ([a for a in WORDS for _ in WORDS], [b for _ in WORDS for b in WORDS])
COUNTS = [0, 1, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 0x80000000, 0xFFFFFFFF]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_bitwise(width: int) -> None:
    """9.7.8.1 and, .2 or, .3 xor, .4 not, .5 cnot."""
    mask = (1 << width) - 1
    a, b = ([x * 0x100000001 & mask for x in side] for side in PAIRS)
    assert run(f"and.b{width}", a, b) == [x & y for x, y in zip(a, b, strict=True)]
    assert run(f"or.b{width}", a, b) == [x | y for x, y in zip(a, b, strict=True)]
    assert run(f"xor.b{width}", a, b) == [x ^ y for x, y in zip(a, b, strict=True)]
    assert run(f"not.b{width}", a) == [x ^ mask for x in a]
    assert run(f"cnot.b{width}", a) == [int(x == 0) for x in a]


def test_predicates() -> None:
    """The same of predicates."""
    a, b = [0, 0, 1, 1], [0, 1, 0, 1]
    assert run("and.pred", a, b) == [0, 0, 0, 1]
    assert run("or.pred", a, b) == [0, 1, 1, 1]
    assert run("xor.pred", a, b) == [0, 1, 1, 0]
    assert run("not.pred", a) == [1, 1, 0, 0]


def test_lop3() -> None:
    """9.7.8.6 lop3: all 256 functions on the words whose bits run through all inputs, and on random words."""
    a, b, c = [0xF0F0F0F0, RNG.getrandbits(32)], [0xCCCCCCCC, RNG.getrandbits(32)], [0xAAAAAAAA, RNG.getrandbits(32)]
    for table in range(256):
        expected = [
            sum((table >> ((x >> i & 1) << 2 | (y >> i & 1) << 1 | z >> i & 1) & 1) << i for i in range(32))
            for x, y, z in zip(a, b, c, strict=True)
        ]
        assert run("lop3.b32", a, b, c, table) == expected, hex(table)


def test_lop3_predicate() -> None:
    """lop3.BoolOp: p = (d != 0) BoolOp q."""
    a, b, q = [0, 0, 3, 3], [3, 3, 1, 1], [0, 1, 0, 1]
    assert run("lop3.or.b32", a, b, a, 0xC0, q, pair=True) == ([0, 0, 1, 1], [0, 1, 1, 1])
    assert run("lop3.and.b32", a, b, a, 0xC0, q, pair=True) == ([0, 0, 1, 1], [0, 0, 0, 1])


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts(width: int) -> None:
    """9.7.8.8 shl, .9 shr: counts of the width and more clear, or fill with the sign."""
    mask = (1 << width) - 1
    a = [x * 0x100000001 & mask for x in WORDS for _ in COUNTS]
    n = [y for _ in WORDS for y in COUNTS]
    capped = [min(y, width) for y in n]
    assert run(f"shl.b{width}", a, n) == [x << y & mask for x, y in zip(a, capped, strict=True)]
    for letter in "bu":
        assert run(f"shr.{letter}{width}", a, n) == [x >> y for x, y in zip(a, capped, strict=True)]
    value = [x - (1 << width) if x >> (width - 1) else x for x in a]
    assert run(f"shr.s{width}", a, n) == [x >> y & mask for x, y in zip(value, capped, strict=True)]


def test_funnel() -> None:
    """9.7.8.7 shf: the pair (b, a) shifted, .clamp at 32, .wrap modulo 32."""
    a = [x for x in WORDS for _ in COUNTS]
    b = [x ^ 0x5A5A5A5A for x in a]
    c = [y for _ in WORDS for y in COUNTS]
    for mode in ("clamp", "wrap"):
        counts = [min(y, 32) if mode == "clamp" else y % 32 for y in c]
        wide = [y << 32 | x for x, y in zip(a, b, strict=True)]
        left = [(x << n) >> 32 & 0xFFFFFFFF for x, n in zip(wide, counts, strict=True)]
        right = [x >> n & 0xFFFFFFFF for x, n in zip(wide, counts, strict=True)]
        assert run(f"shf.l.{mode}.b32", a, b, c) == left
        assert run(f"shf.r.{mode}.b32", a, b, c) == right


def permuted(a: int, b: int, selector: int) -> int:
    source = (b << 32 | a).to_bytes(8, "little")
    result = []
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def test_prmt() -> None:
    """9.7.9.7 prmt: by nibbles of a register, and the same of a constant."""
    selectors = [0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0xFEDC, 0xBA98, 0x0000, 0x3715]
    selectors += [RNG.getrandbits(16) for _ in range(20)]
    a = [0x8091A2B3] * len(selectors)
    b = [0x04F5667F] * len(selectors)
    expected = [permuted(a[0], b[0], selector) for selector in selectors]
    assert run("prmt.b32", a, b, selectors) == expected
    assert [run("prmt.b32", a[:1], b[:1], selector)[0] for selector in selectors] == expected


MODES = {
    "f4e": ["3210", "4321", "5432", "6543"],
    "b4e": ["5670", "6701", "7012", "0123"],
    "rc8": ["0000", "1111", "2222", "3333"],
    "ecl": ["3210", "3211", "3222", "3333"],
    "ecr": ["0000", "1110", "2210", "3210"],
    "rc16": ["1010", "3232", "1010", "3232"],
}
"""Source bytes, most significant first, for c = 0 to 3: the table of 9.7.9.7."""


@pytest.mark.parametrize("mode", MODES)
def test_prmt_modes(mode: str) -> None:
    """The fixed modes choose by c modulo 4; constants and registers agree."""
    a, b, c = [0x8091A2B3] * 8, [0x04F5667F] * 8, list(range(8))
    expected = [permuted(a[0], b[0], int(MODES[mode][x % 4], 16)) for x in c]
    assert run(f"prmt.b32.{mode}", a, b, c) == expected
    assert [run(f"prmt.b32.{mode}", a[:1], b[:1], x)[0] for x in c] == expected


def test_shapes_broadcast() -> None:
    """A value that is the same in all lanes has one column, in all warps one row; results follow."""
    shl = specialise("shl.b32", Register("a", "b32"), Immediate(4))
    value, count = spread([3], "b32").reshape(1, 1), spread([4], "b32").reshape(1, 1)
    (result,) = evaluate(shl, [value, count])
    assert result.tolist() == [[48]]


@pytest.mark.parametrize("name", ["and.u32", "shl.u32", "shf.l.b32", "prmt.b32.xyz", "not.f32", "lop3.b32"])
def test_refused(name: str) -> None:
    """What is no PTX raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
