"""From floats to the codes of small formats, and codes to packed words; the same bits as the host quantisers.

The 4- and 6-bit formats round exact midpoints to the smaller magnitude, which no conversion instruction does, so
they are made with integer arithmetic on every arch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from cubinery.runtime.ops.paged_decode.formats import FloatFormat, midpoints

inline = cute.arch.inline_ptx

REGULAR_DIVISOR = 2.0**40
"""`divide` is quick for divisors from its reciprocal to it."""
REGULAR_BITS = (127 + 60) << 7
"""... and for bf16 dividends below 2^60: their magnitudes' bits are less than this."""


def literal(value: float) -> str:
    """An fp32 constant as PTX spells it."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def magnitude_bits_bf16(words: Sequence[Uint32]) -> Uint32:
    """Bits of the largest |x| among bf16 pairs; those of NaN exceed those of infinity."""
    pairs = [word & Uint32(0x7FFF7FFF) for word in words]
    top = pairs[0]
    for pair in pairs[1:]:
        top = inline("max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[top, pair])
    low, high = top & Uint32(0xFFFF), top >> Uint32(16)
    return cutlass.select_(low > high, low, high)


def divide_slowly(x: Float32, divisor: Float32) -> Float32:
    """x / divisor, correctly rounded, whatever they are."""
    return inline("div.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, divisor])


def reciprocal(x: Float32) -> Float32:
    """1 / x, correctly rounded."""
    return inline("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def multiply(a: Float32, b: Float32) -> Float32:
    """a * b, correctly rounded, and never contracted with a later addition."""
    return inline("mul.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b])


def divide_quickly(x: Float32, divisor: Float32, inverse: Float32) -> Float32:
    """x / divisor from the divisor's correctly rounded reciprocal: five instructions, and the same result.

    Markstein's theorem: where q is within one unit of x / d and y is RN(1 / d), RN(q + y RN(x - q d)) is RN(x / d).
    The first correction brings q within one unit, the second rounds. Exact remainders need operands far from
    overflow and underflow; below 2^-103 x may miss by some units, where every format's code is 0, and the sign of a
    zero may be lost.
    """
    return inline(
        "{ .reg .f32 q, r, n; neg.f32 n, {$r1}; mul.rn.f32 q, {$r0}, {$r2}; "
        "fma.rn.f32 r, n, q, {$r0}; fma.rn.f32 q, r, {$r2}, q; "
        "fma.rn.f32 r, n, q, {$r0}; fma.rn.f32 {$w0}, r, {$r2}, q; }",
        write_only_types=[Float32],
        read_only_args=[x, divisor, inverse],
    )


@cute.jit
def divide(values: Sequence[Float32], top_bits: Uint32, divisor: Float32) -> list[Float32]:
    """RN(x / divisor) of fp32 values that were bf16, the largest magnitude of which has `top_bits`."""
    found = list(values)
    if (divisor >= 1 / REGULAR_DIVISOR) & (divisor <= REGULAR_DIVISOR) & (top_bits < REGULAR_BITS):
        inverse = reciprocal(divisor)
        found = [divide_quickly(x, divisor, inverse) for x in values]
    else:
        found = [divide_slowly(x, divisor) for x in values]
    return found


# -- e4m3 ----------------------------------------------------------------------------------------


def encode_e4m3(x: Float32) -> Uint32:
    """The e4m3 code: nearest, ties to even, saturating; NaN becomes 0x7F."""
    return inline(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, {$r0}; cvt.u32.u16 {$w0}, pair; }",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


def decode_e4m3(code: Uint32) -> Float32:
    """The value of an e4m3 code in the low byte."""
    return inline(
        "{ .reg .b16 code, low, high; .reg .b32 pair; cvt.u16.u32 code, {$r0}; cvt.rn.f16x2.e4m3x2 pair, code; "
        "mov.b32 {low, high}, pair; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[code],
    )


def pack_e4m3x4(x: Sequence[Float32], signs: Sequence[Float32]) -> Uint32:
    """Four e4m3 codes in a word, as `encode_e4m3` makes them, with the signs of other values."""
    return inline(
        "{ .reg .f32 a, b, c, d; .reg .b16 low, high; copysign.f32 a, {$r4}, {$r0}; copysign.f32 b, {$r5}, {$r1}; "
        "copysign.f32 c, {$r6}, {$r2}; copysign.f32 d, {$r7}, {$r3}; cvt.rn.satfinite.e4m3x2.f32 low, b, a; "
        "cvt.rn.satfinite.e4m3x2.f32 high, d, c; mov.b32 {$w0}, {low, high}; }",
        write_only_types=[Uint32],
        read_only_args=[*x, *signs],
    )


# -- formats of 4 and 6 bits ---------------------------------------------------------------------


def encode_small(x: Float32, fmt: FloatFormat) -> Uint32:
    """The nearest code of a format of 4 or 6 bits, midpoints to the smaller magnitude; NaN becomes the largest.

    Scaled by 2^(bias - 127) the format's exponent field is fp32's own, subnormals included; what that product loses
    of a subnormal is rounded up, so that a midpoint is met only by what does not exceed it. Adding one less than
    half a unit and truncating then rounds. Only what exceeds the first midpoint gets a sign.
    """
    dropped = 23 - fmt.mantissa_bits
    return inline(
        "{ .reg .f32 a; .reg .b32 m; .reg .pred negative; abs.f32 a, {$r0}; "
        f"min.f32 a, a, {literal(fmt.max)}; mul.rp.f32 a, a, {literal(2.0 ** (fmt.bias - 127))}; "
        f"mov.b32 m, a; add.u32 m, m, {(1 << (dropped - 1)) - 1}; shr.u32 m, m, {dropped}; "
        f"setp.lt.f32 negative, {{$r0}}, {literal(-float(midpoints(fmt)[0]))}; "
        f"@negative or.b32 m, m, {1 << (fmt.bits - 1)}; "
        "mov.b32 {$w0}, m; }",
        write_only_types=[Uint32],
        read_only_args=[x],
    )


def pack_codes(codes: Sequence[Uint32], bits: int) -> list[Uint32]:
    """Codes to words: code i starts at bit `bits * i`, low bit first. The codes fill whole words."""
    words = [Uint32(0)] * (len(codes) * bits // 32)
    for i, code in enumerate(codes):
        word, bit = divmod(bits * i, 32)
        words[word] = words[word] + (code << Uint32(bit))  # adding, a shift costs nothing
        if bit + bits > 32:
            words[word + 1] = code >> Uint32(32 - bit)
    return words


def gather_quad(words: Sequence[Uint32], lane: Int32) -> list[Uint32]:
    """Three words of each of four lanes as four consecutive words for each of the first three, in the lanes' order.

    All lanes of the warp take part; what the fourth of four lanes gets means nothing.
    """
    place = lane & 3
    found: list[Any] = []
    for i in range(4):
        # Lane j takes word 4 j + i of the twelve, which lane (4 j + i) // 3 = j + (j + i) // 3 holds.
        sent = words[i % 3]
        for j in range(3):
            source, word = divmod(4 * j + i, 3)
            sent = cutlass.select_(place == source, words[word], sent)
        carry = cutlass.select_(place + i >= 3, Int32(1), Int32(0))
        carry = cutlass.select_(place + i >= 6, Int32(2), carry)
        found.append(cute.arch.shuffle_sync(sent, offset=lane + carry))
    return found
