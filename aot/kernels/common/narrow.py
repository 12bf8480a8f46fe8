"""From floats to the codes of small formats, and codes to packed words; the same bits as the host quantisers.

The 4- and 6-bit formats round exact midpoints to the smaller magnitude, which no conversion instruction does: they
are made from truncated f16, several codes in a register, on every arch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.runtime.ops.paged_decode.formats import FloatFormat

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

UPWARDS = 2.0**-40
"""What `divide_for_codes` adds to a reciprocal, relatively."""


def double_reciprocal(x: Float32) -> tuple[Float32, Float32]:
    """(1 / x, correctly rounded; the rest of (1 + UPWARDS) / x), together within 2^-46; x is far from the ends."""
    high = reciprocal(x)
    low = inline(
        "{ .reg .f32 n, r; neg.f32 n, {$r0}; fma.rn.f32 r, n, {$r1}, 0f3F800000; mul.rn.f32 r, r, {$r1}; "
        f"fma.rn.f32 {{$w0}}, {{$r1}}, {literal(UPWARDS)}, r; }}",
        write_only_types=[Float32],
        read_only_args=[x, high],
    )
    return high, low


def clamp_bf16x2(pairs: Sequence[Uint32], limit: Float32) -> list[Uint32]:
    """bf16 pairs with magnitudes of at most `limit`, rounded to bf16; NaN becomes the positive limit."""
    high = inline("cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r0};", write_only_types=[Uint32], read_only_args=[limit])
    return [
        inline(
            "{ .reg .b32 t, low; xor.b32 low, {$r1}, 0x80008000; min.bf16x2 t, {$r0}, {$r1}; "
            "max.bf16x2 {$w0}, t, low; }",
            write_only_types=[Uint32],
            read_only_args=[pair, high],
        )
        for pair in pairs
    ]


def multiply_double(x: Float32, high: Float32, low: Float32) -> Float32:
    """x (high + low), rounded to nearest after an error of 2^-48 at most."""
    return inline(
        "{ .reg .f32 t; mul.rn.f32 t, {$r0}, {$r2}; fma.rn.f32 {$w0}, {$r0}, {$r1}, t; }",
        write_only_types=[Float32],
        read_only_args=[x, high, low],
    )


@cute.jit
def divide_for_codes(pairs: Sequence[Uint32], divisor: Float32, fmt: FloatFormat) -> list[Float32]:
    """Quotients of bf16 pairs, of at most 1.01 times the format's maximum, on the right side of every midpoint.

    A quotient exceeds a midpoint m exactly where RN(x / divisor) does, which is where x / divisor exceeds
    m + ulp(m) / 2. With 8 bits of x, 24 of the divisor and 5 of m, x / divisor is either above that bound or below it
    by 2^-32 of it or more (`test_append` counts them out), so that a product with a reciprocal that is 2^-40 too
    large, give or take 2^-46, is on the same side, and rounds accordingly. NaN becomes the positive maximum.
    """
    found = [x for pair in pairs for x in ptx.unpack_bf16x2(pair)]
    if (divisor >= 1 / REGULAR_DIVISOR) & (divisor <= REGULAR_DIVISOR):
        high, low = double_reciprocal(divisor)
        # From one bf16 above or below the maximum's multiple, codes are those of the maximum.
        clamped = clamp_bf16x2(pairs, multiply(divisor, Float32(fmt.max)))
        found = [multiply_double(x, high, low) for pair in clamped for x in ptx.unpack_bf16x2(pair)]
    else:
        found = [clamp(divide_slowly(x, divisor), fmt.max) for x in found]
    return found


def clamp(x: Float32, limit: float) -> Float32:
    """x with a magnitude of at most `limit`; NaN becomes `limit`."""
    return inline(
        f"{{ .reg .f32 t; min.f32 t, {{$r0}}, {literal(limit)}; max.f32 {{$w0}}, t, {literal(-limit)}; }}",
        write_only_types=[Float32],
        read_only_args=[x],
    )


def truncate_f16x2(low: Float32, high: Float32, fmt: FloatFormat) -> Uint32:
    """Two quotients as f16x2, towards zero, scaled so that f16's exponent field is the format's, subnormals included.

    A midpoint becomes less than itself, and what exceeds it does not, so that halves may round away from zero.
    """
    factor = literal(2.0 ** (fmt.bias - 15) * (1 - 2.0**-24))
    return inline(
        f"{{ .reg .f32 a, b; mul.rz.f32 a, {{$r0}}, {factor}; mul.rz.f32 b, {{$r1}}, {factor}; "
        "cvt.rz.f16x2.f32 {$w0}, b, a; }",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


def select_bits(a: Uint32, b: Uint32, mask: int) -> Uint32:
    """The bits of `a` where `mask` has ones, elsewhere those of `b`."""
    return inline(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {mask:#x}, 0xe4;", write_only_types=[Uint32], read_only_args=[a, b]
    )


def with_signs(magnitudes: Uint32, signs: Uint32, bits: int, width: int) -> Uint32:
    """Codes in fields of `width` bits: `signs` counts, in their place, where a magnitude is not 0."""
    fields = sum(1 << i for i in range(0, 32, width))
    top = 1 << (bits - 1)
    return inline(
        f"{{ .reg .b32 t; add.u32 t, {{$r0}}, {(top - 1) * fields:#x}; "
        f"lop3.b32 t, t, {{$r1}}, {top * fields:#x}, 0x80; or.b32 {{$w0}}, {{$r0}}, t; }}",
        write_only_types=[Uint32],
        read_only_args=[magnitudes, signs],
    )


ODD_BYTES = (1, 3, 5, 7)
"""The upper bytes of the halves of two registers."""


def pack_small(quotients: Sequence[Float32], fmt: FloatFormat) -> list[Uint32]:
    """Codes of quotients from `divide_for_codes` in words: code i starts at bit `bits * i`, low bit first.

    Midpoints go to the smaller magnitude; zeros have no sign. Quotients come in multiples of 16.
    """
    pack, size = (_pack_4bit, 8) if fmt.bits == 4 else (_pack_6bit, 16)
    return [word for i in range(0, len(quotients), size) for word in pack(quotients[i : i + size], fmt)]


def _pack_4bit(x: Sequence[Float32], fmt: FloatFormat) -> list[Uint32]:
    """A word of eight codes. Bytes are sign, 000, exponent, mantissa and the bit below, which rounds."""
    even, odd = (
        ptx.select_bytes(truncate_f16x2(x[i], x[i + 2], fmt), truncate_f16x2(x[i + 4], x[i + 6], fmt), ODD_BYTES)
        + Uint32(0x01010101)
        for i in (0, 1)
    )
    low_nibbles = 0x0F0F0F0F
    magnitudes = select_bits(even >> Uint32(1), odd << Uint32(3), low_nibbles)
    return [with_signs(magnitudes, select_bits(even >> Uint32(4), odd, low_nibbles), 4, 4)]


def _pack_6bit(x: Sequence[Float32], fmt: FloatFormat) -> list[Uint32]:
    """Three words of sixteen codes."""
    quads = []
    for i in range(0, 16, 4):
        halves = (truncate_f16x2(x[i], x[i + 1], fmt), truncate_f16x2(x[i + 2], x[i + 3], fmt))
        # The code's last bit becomes a half's bit 8, and what is below rounds.
        low, high = ((half << Uint32(fmt.mantissa_bits - 2)) + Uint32(0x00800080) for half in halves)
        signs = ptx.select_bytes(halves[0], halves[1], ODD_BYTES)
        magnitudes = ptx.select_bytes(low, high, ODD_BYTES) & Uint32(0x1F1F1F1F)
        codes = with_signs(magnitudes, signs >> Uint32(2), 6, 8)
        twelves = select_bits(codes, codes >> Uint32(2), 0x003F003F)
        quads.append(select_bits(twelves, twelves >> Uint32(4), 0x00000FFF))
    a, b, c, d = quads
    return [
        ptx.select_bytes(a, b, (0, 1, 2, 4)),
        ptx.select_bytes(b, c, (1, 2, 4, 5)),
        ptx.select_bytes(c, d, (2, 4, 5, 6)),
    ]


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
