"""The floating-point formats of PTX as data, and their exact encoding and decoding (PTX ISA 5.2.2 and 5.2.3).

`encode` rounds float64 values, which hold every value of the narrower formats exactly, once, in any mode.
It scales a value so that the target's last place is 1, rounds to an integer n, and uses that a format's codes in
order of magnitude are evenly spaced within each binade: code = (exponent above the least) << mantissa bits, plus n;
a carry into the next binade comes out right by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cubinery.aot.ptxsim.isa.values import NAN16, NAN32, Array


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary format: a sign bit, then `exponent_bits`, then `mantissa_bits`."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_code: int
    """The code of the greatest finite magnitude."""
    inf_code: int | None
    nan_code: int | None
    """The canonical NaN that a conversion writes, sign bit clear."""

    @property
    def width(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def least_exponent(self) -> int:
        """The exponent of the least normal value, and of the subnormals."""
        return 1 - self.bias


FORMATS: dict[str, FloatFormat] = {
    fmt.name: fmt
    for fmt in (
        FloatFormat("f32", 8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF),
        FloatFormat("tf32", 8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF),
        FloatFormat("f16", 5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
        FloatFormat("bf16", 8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
        FloatFormat("e5m2", 5, 2, 15, 0x7B, 0x7C, 0x7F),
        FloatFormat("e4m3", 4, 3, 7, 0x7E, None, 0x7F),
        FloatFormat("e3m2", 3, 2, 3, 0x1F, None, None),
        FloatFormat("e2m3", 2, 3, 1, 0x1F, None, None),
        FloatFormat("e2m1", 2, 1, 1, 0x7, None, None),
    )
}


def _round_integer(scaled: Array, negative: Array, rounding: str, random: Array | None, random_bits: int) -> Array:
    if rounding == "rn":
        return np.rint(scaled)
    if rounding == "rz":
        return np.floor(scaled)
    if rounding == "rna":
        return np.floor(scaled + 0.5)
    if rounding == "rs":
        return np.floor(scaled + np.ldexp(np.asarray(random, np.float64), -random_bits))
    away = negative if rounding == "rm" else ~negative
    return np.where(away, np.ceil(scaled), np.floor(scaled))


def encode(
    value: Array,
    fmt: FloatFormat,
    rounding: str = "rn",
    satfinite: bool = False,
    random: Array | None = None,
    random_bits: int = 0,
) -> Array:
    """float64 values to codes (int64), rounded once.

    rounding: rn, rna (ties away from zero), rz, rm, rp, or rs, which adds `random` / 2**random_bits of a unit in
    the last place and truncates (PTX ISA 9.7.9.21, stochastic rounding). Overflow, and infinity, become the
    greatest finite value with `satfinite`, else infinity as the mode wants, or NaN in a format without infinity.
    NaN becomes the canonical NaN, or the greatest positive value in a format without NaN.
    """
    negative = np.signbit(value)
    magnitude = np.abs(value)
    finite = np.isfinite(magnitude)
    magnitude = np.where(finite, magnitude, 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1].astype(np.int64) - 1, fmt.least_exponent)
    exponent = np.where(magnitude == 0, fmt.least_exponent, exponent)
    scaled = np.ldexp(magnitude, fmt.mantissa_bits - exponent)
    steps = _round_integer(scaled, negative, rounding, random, random_bits).astype(np.int64)
    code = np.minimum(exponent - fmt.least_exponent, 1 << 20) * (1 << fmt.mantissa_bits) + steps
    infinite = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    if satfinite or infinite is None:
        code = np.where(finite, np.minimum(code, fmt.max_code), fmt.max_code)
    else:
        inward = {"rz": np.True_, "rs": np.True_, "rm": ~negative, "rp": negative}.get(rounding, np.False_)
        overflow = np.where(inward, fmt.max_code, infinite)
        code = np.where(finite, np.where(code > fmt.max_code, overflow, code), infinite)
    code = code | (negative.astype(np.int64) << (fmt.width - 1))
    return np.where(np.isnan(value), fmt.max_code if fmt.nan_code is None else fmt.nan_code, code)


def decode_one(code: int, fmt: FloatFormat) -> float:
    """The value of one code."""
    sign = -1.0 if code >> (fmt.width - 1) & 1 else 1.0
    magnitude = code & ((1 << (fmt.width - 1)) - 1)
    if magnitude > fmt.max_code:
        return sign * float("inf") if magnitude == fmt.inf_code else float("nan")
    exponent, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    hidden = (1 << fmt.mantissa_bits) if exponent else 0
    scale = max(exponent, 1) - fmt.bias - fmt.mantissa_bits
    return sign * float(hidden + mantissa) * 2.0**scale


@cache
def table(name: str) -> Array:
    """The float32 value of every code of a format of at most 8 bits, indexed by all 256 bytes.

    Bits above the code are ignored, as PTX ISA 5.2.3 pads e2m3 and e3m2 with zeros.
    """
    fmt = FORMATS[name]
    mask = (1 << fmt.width) - 1
    values = np.array([decode_one(code & mask, fmt) for code in range(256)], np.float32)
    values.setflags(write=False)
    return values


def decode(codes: Array, name: str) -> Array:
    """Codes (raw bits) of any format of at most 16 bits, or tf32 and f32 words, as float32."""
    if name == "f16":
        return _halves().take(codes)
    if name == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if name in ("f32", "tf32"):
        return codes.view(np.float32)
    if name == "ue8m0":
        return ue8m0_value(codes)
    return table(name).take(codes & 0xFF)


_LARGE = 2048
"""Elements from which a dozen NumPy calls cost less than a cast element by element."""


def nearest_f16(bits: Array) -> Array:
    """f32 bits rounded to f16 to nearest even, in the lower half of 32 bits; NaN becomes 0x7fff.

    NumPy's own cast goes element by element, which suits small arrays. In large ones a normal result is rounded as
    nearest_bf16 does and its exponent rebased; a subnormal one is left to the f32 sum with 0.5, whose last place
    is that of f16's subnormals.
    """
    if bits.size < _LARGE:
        value = bits.view(np.float32)
        half, nan = np.asarray(value.astype(np.float16)).view(np.uint16), value != value
        return (np.where(nan, NAN16, half) if np.count_nonzero(nan) else half).astype(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude + ((magnitude >> 13) & 1) + np.uint32(0xC8000FFF)) >> 13  # 0xfff, less 112 exponents
    small = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
    code = np.where(magnitude < 0x38800000, small, normal) | ((bits >> 16) & 0x8000)
    large = magnitude >= 0x477FF000
    if not np.count_nonzero(large):
        return code
    infinite = ((bits >> 16) & 0x8000) | 0x7C00
    return np.where(large, np.where(magnitude > 0x7F800000, np.uint32(NAN16), infinite), code)


@cache
def _halves() -> Array:
    """The float32 value of every f16, indexed by its bits."""
    with np.errstate(invalid="ignore"):
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    values.setflags(write=False)
    return values


def nearest_bf16(bits: Array) -> Array:
    """f32 bits rounded to bf16 to nearest even, in the upper half of 32 bits; the lower half is left over.

    Adding just under half of the last place, and one more where the last place is odd, carries as rounding does.
    """
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    rounded = bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)
    return np.where(nan, NAN32, rounded) if np.count_nonzero(nan) else rounded


# -- ue8m0: a power of two -------------------------------------------------------------------------


def ue8m0_value(codes: Array) -> Array:
    """2**(code - 127) as float32; 0xff is NaN."""
    byte = codes.astype(np.int64) & 0xFF
    return np.where(byte == 0xFF, np.nan, np.ldexp(1.0, byte - 127)).astype(np.float32)


def ue8m0_code(value: Array, rounding: str, satfinite: bool) -> Array:
    """float64 values to ue8m0 (int64): the power of two at or below (rz), or at or above (rp), the magnitude.

    There is no sign and no zero: the sign is dropped and magnitudes below 2**-127 become 2**-127. NaN, and without
    `satfinite` what lies beyond 2**127, become 0xff; with it 0xfe.
    """
    magnitude = np.abs(value)
    mantissa, exponent = np.frexp(np.where(np.isfinite(magnitude), magnitude, 1.0))
    power = exponent.astype(np.int64) - 1
    if rounding == "rp":
        power = power + (mantissa > 0.5)
    code = np.where(magnitude == 0, 0, np.maximum(power + 127, 0))
    code = np.where(np.isinf(magnitude) | (code > 0xFE), 0xFE if satfinite else 0xFF, code)
    return np.where(np.isnan(value), 0xFF, code)
