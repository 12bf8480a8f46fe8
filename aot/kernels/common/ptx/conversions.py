"""Conversions, bytes and bits of registers, and the functions that are approximate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from cubinery.aot.kernels.common.ptx.base import inline


def e4m3x4_to_f16x2x2(codes: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 codes to two f16x2 registers (low pair, high pair); exact, NaN stays NaN."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[codes],
    )


def e2m1x8_to_f16x2x4(codes: Uint32) -> tuple[Uint32, ...]:
    """Eight e2m1 codes to four f16x2 registers of 2^-14 times their value, exactly: code i below, code i + 4 above.

    Sign to bit 15, exponent and mantissa to bits 11 to 9. Odd codes, then even ones, are brought together in bytes
    (a select), so that one mask cleans a register of two.
    """
    return inline(
        "{ .reg .b32 s, t, odd, even; "
        "shr.u32 t, {$r0}, 3; lop3.b32 odd, {$r0}, t, 0x80808080, 0xe4; "
        "shl.b32 s, {$r0}, 4; shl.b32 t, {$r0}, 1; lop3.b32 even, s, t, 0x80808080, 0xe4; "
        "and.b32 {$w3}, odd, 0x8e008e00; and.b32 {$w2}, even, 0x8e008e00; "
        "shl.b32 s, odd, 8; shl.b32 t, even, 8; "
        "and.b32 {$w1}, s, 0x8e008e00; and.b32 {$w0}, t, 0x8e008e00; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[codes],
    )


def widen_codes(codes: Uint32, bit: int, *, bits: int, exponent_bits: int) -> Uint32:
    """The codes of `bits` bits that start at `bit` of both halves, as f16x2: 2^(their bias - 15) times their value.

    Sign to bit 15, exponent and mantissa to where f16's exponent ends; exact, subnormals included.
    """

    def shift(name: str, by: int) -> str:
        return f"sh{'l' if by >= 0 else 'r'}.b32 {name}, {{$r0}}, {abs(by)}; ".replace("shr.b32", "shr.u32")

    magnitude = (1 << (9 + exponent_bits + 1)) - (1 << (9 + exponent_bits - bits + 2))
    return inline(
        "{ .reg .b32 s, t; "
        + shift("s", 16 - bit - bits)
        + shift("t", 11 + exponent_bits - bit - bits)
        + f"and.b32 t, t, {magnitude * 0x10001:#x}; "
        + "lop3.b32 {$w0}, s, 0x80008000, t, 0xea; }",
        write_only_types=[Uint32],
        read_only_args=[codes],
    )


def nvfp4_scales(pair: Uint32) -> tuple[Uint32, ...]:
    """Two e4m3 block scales in the low half: an eighth of each, twice in an f16x2 register; exact."""
    return inline(
        "{ .reg .b16 codes, lo, hi; .reg .b32 both, eighth; cvt.u16.u32 codes, {$r0}; cvt.rn.f16x2.e4m3x2 both, codes; "
        "mov.b32 eighth, 0x30003000; mul.rn.f16x2 both, both, eighth; mov.b32 {lo, hi}, both; "
        "mov.b32 {$w0}, {lo, lo}; mov.b32 {$w1}, {hi, hi}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[pair],
    )


def nvfp4_to_e4m3(codes: Int32, scale: Uint32) -> tuple[Uint32, ...]:
    """Eight e2m1 codes times an f16x2 scale, rounded once to e4m3 (nearest even, saturating): eight bytes in order."""
    pairs = range(4)
    return inline(
        "{ .reg .b8 c0, c1, c2, c3; .reg .b16 h0, h1, h2, h3; .reg .b32 p0, p1, p2, p3; "
        "mov.b32 {c0, c1, c2, c3}, {$r0}; "
        + "".join(
            f"cvt.rn.f16x2.e2m1x2 p{i}, c{i}; mul.rn.f16x2 p{i}, p{i}, {{$r1}}; "
            f"cvt.rn.satfinite.e4m3x2.f16x2 h{i}, p{i}; "
            for i in pairs
        )
        + "mov.b32 {$w0}, {h0, h1}; mov.b32 {$w1}, {h2, h3}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[codes, scale],
    )


def pack_f32x2(dtype: str, low: Float32, high: Float32) -> Uint32:
    """Two fp32 values rounded to nearest even as one f16x2 or bf16x2 register."""
    return inline(
        f"cvt.rn.{dtype}x2.f32 " + "{$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def unpack_bf16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """(low, high) of a bf16x2 register as fp32; exact."""
    return inline(
        "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def unpack_f16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """(low, high) of an f16x2 register as fp32; exact."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def spread_halves(pair: Uint32) -> tuple[Uint32, ...]:
    """A register with two times the low half, another with two times the high half."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; mov.b32 {$w0}, {lo, lo}; mov.b32 {$w1}, {hi, hi}; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[pair],
    )


def permute_bytes(value: Uint32, selector: int) -> Uint32:
    """The bytes of `value` that the nibbles of `selector` name, lowest first."""
    return inline(f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#06x};", write_only_types=[Uint32], read_only_args=[value])


def select_bytes(low: Uint32, high: Uint32, which: Sequence[int]) -> Uint32:
    """Four bytes, lowest first, of eight: 0 to 3 are those of `low`, 4 to 7 those of `high`."""
    selector = sum(byte << 4 * n for n, byte in enumerate(which))
    return inline(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#06x};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def select_bytes_by(low: Uint32, high: Uint32, selector: Int32) -> Uint32:
    """`select_bytes` by a selector in a register: a nibble for each byte of the result, lowest first."""
    return inline(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, selector]
    )


def multiply_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """The products of two f16x2 registers, subnormals included."""
    return inline("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def exp2(x: Float32) -> Float32:
    """2**x, approximate (2 ulp), subnormals flushed to zero."""
    return inline("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def reciprocal(x: Float32) -> Float32:
    """1 / x, approximate (1 ulp); 0 for infinity."""
    return inline("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x: Float32) -> Float32:
    """log2 of x, approximate: 2**-22 absolute near 1, else relative; -inf for 0."""
    return inline("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def here(x: Any) -> Any:
    """The same integer, of which the front end knows nothing more.

    It then neither keeps in registers, across a loop, what is cheap to compute again from this, nor puts off to a
    branch what leads to it. ptxas may still move either.
    """
    kind = type(x)
    width = 64 if kind is Int64 else 32
    return inline(f"mov.b{width} " + "{$w0}, {$r0};", write_only_types=[kind], read_only_args=[x])


def float_bits(x: Float32) -> Int32:
    """The bits of an fp32 value."""
    return inline("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def bits_to_float(bits: Int32) -> Float32:
    """The fp32 value with these bits."""
    return inline("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])
