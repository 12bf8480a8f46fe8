"""Floating point by definition, in rational arithmetic: the oracle for tests of the simulator's float instructions.

Nothing here shares a method with the simulator: a value is rounded by bisecting over a format's codes.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from fractions import Fraction

NAN = "nan"


@dataclass(frozen=True)
class Format:
    """Sign, exponent and mantissa widths, and what the codes above the finite ones mean."""

    exponent: int
    mantissa: int
    max_code: int
    inf: int | None
    nan: int | None
    bias: int = 0

    @property
    def sign(self) -> int:
        return 1 << (self.exponent + self.mantissa)

    @property
    def offset(self) -> int:
        return self.bias or (1 << (self.exponent - 1)) - 1

    @property
    def per_one(self) -> int:
        """The least subnormal's place below one, in bits."""
        return self.offset + self.mantissa - 1

    def units(self, code: int) -> int:
        """The value of a code without its sign in least subnormals, as if exponents went on above the finite codes."""
        exponent, mantissa = code >> self.mantissa, code & ((1 << self.mantissa) - 1)
        return mantissa if exponent == 0 else (mantissa | 1 << self.mantissa) << (exponent - 1)

    def magnitude(self, code: int) -> Fraction:
        """The value of a code without its sign."""
        return Fraction(self.units(code), 1 << self.per_one)


F64 = Format(11, 52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF8000000000000)
F32 = Format(8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF)
F16 = Format(5, 10, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = Format(8, 7, 0x7F7F, 0x7F80, 0x7FFF)
TF32 = Format(8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF)
E5M2 = Format(5, 2, 0x7B, 0x7C, 0x7F)
E4M3 = Format(4, 3, 0x7E, None, 0x7F)
E3M2 = Format(3, 2, 0x1F, None, None)
E2M3 = Format(2, 3, 0x1F, None, None)
E2M1 = Format(2, 1, 0x07, None, None)
NAMES = {"f64": F64, "f32": F32, "f16": F16, "bf16": BF16, "tf32": TF32}
NAMES |= {"e5m2": E5M2, "e4m3": E4M3, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}

Value = Fraction | float
"""A finite nonzero value exactly, or a float: a zero with its sign, an infinity, a NaN."""


def decode(bits: int, fmt: Format) -> Value:
    """The value of a code."""
    negative, code = bool(bits & fmt.sign), bits & (fmt.sign - 1)
    if code > fmt.max_code:
        if code == fmt.inf:
            return -math.inf if negative else math.inf
        return math.nan
    if code == 0:
        return -0.0 if negative else 0.0
    return -fmt.magnitude(code) if negative else fmt.magnitude(code)


def is_negative(value: Value) -> bool:
    return value < 0 if isinstance(value, Fraction) else math.copysign(1.0, value) < 0


def encode(value: Value, fmt: Format, mode: str = "rn", satfinite: bool = False) -> int:
    """The code of a value rounded once: rn, rna, rz, rm or rp."""
    if isinstance(value, float) and math.isnan(value):
        return fmt.max_code if fmt.nan is None else fmt.nan
    negative = is_negative(value)
    sign = fmt.sign if negative else 0
    overflow = fmt.max_code if satfinite or (fmt.inf is None and fmt.nan is None) else fmt.inf or fmt.nan
    assert overflow is not None
    if isinstance(value, float) and math.isinf(value):
        return sign | overflow
    exact = abs(Fraction(value))
    number, scale = exact.numerator << fmt.per_one, exact.denominator  # exact = number / scale least subnormals
    low, high = 0, fmt.max_code + 1  # units(low) <= exact < units(high), or beyond
    if number >= fmt.units(high) * scale:
        low = high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fmt.units(middle) * scale <= number else (low, middle)
    if low > fmt.max_code:
        rounded_up = True
    else:
        rest, step = number - fmt.units(low) * scale, (fmt.units(low + 1) - fmt.units(low)) * scale
        between = rest != 0
        if mode == "rn":
            rounded_up = 2 * rest > step or (2 * rest == step and low % 2 == 1)
        elif mode == "rna":
            rounded_up = 2 * rest >= step
        else:
            rounded_up = between and mode == ("rm" if negative else "rp")
    code = low + rounded_up
    if code > fmt.max_code:
        code = overflow
    if low > fmt.max_code and mode in ("rz", "rm", "rp") and mode != ("rm" if negative else "rp"):
        code = fmt.max_code
    return sign | code


def payload_kept(bits: int, *sources: int) -> int:
    """A result of f64, but the last of the sources that is a NaN, made quiet, where one is (PTX ISA 9.7.3)."""
    nans = [x for x in sources if (x & ~F64.sign) > F64.inf]
    return nans[-1] | 1 << 51 if nans else bits


def flush(bits: int, fmt: Format) -> int:
    """Subnormal codes to zeros of their sign."""
    return bits & fmt.sign if bits & (fmt.sign - 1) < 1 << fmt.mantissa else bits


def flushed(value: Value, bits: int, mode: str) -> int:
    """`bits`, the f32 of an exact value, under .ftz: flushed too if rounding with exponents to spare is subnormal."""
    if isinstance(value, Fraction) and 0 < abs(value) < 1:
        spare = decode(encode(value * (1 << 64), F32, mode), F32)
        return bits & F32.sign if abs(spare) < Fraction(1, 1 << 62) else bits
    return flush(bits, F32)


def saturated(bits: int, fmt: Format) -> int:
    """Clamped to [0, 1]; NaN and -0 to +0."""
    value = decode(bits, fmt)
    if value != value or is_negative(value) or value == 0:
        return 0
    return encode(Fraction(1), fmt) if value > 1 else bits


def fma(a: Value, b: Value, c: Value, mode: str) -> Value:
    """a * b + c exactly, or as IEEE 754 has it for zeros, infinities and NaN."""
    if all(isinstance(x, Fraction) or x == 0 for x in (a, b, c)):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact:
            return exact
        product_negative = is_negative(a) != is_negative(b)
        if product_negative == is_negative(c) and not (a and b and c):
            return -0.0 if product_negative else 0.0
        return -0.0 if mode == "rm" else 0.0
    left, right, addend = (math.copysign(1.0, x) if isinstance(x, Fraction) else x for x in (a, b, c))
    if (math.isinf(left) and right == 0) or (math.isinf(right) and left == 0):
        return math.nan
    return left * right + addend


def add(a: Value, b: Value, mode: str) -> Value:
    return fma(a, Fraction(1), b, mode)


def multiply(a: Value, b: Value, mode: str) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    left, right = (math.copysign(1.0, x) if isinstance(x, Fraction) else x for x in (a, b))
    return left * right


def negate(a: Value) -> Value:
    return -a


def divide(a: Value, b: Value, mode: str) -> Value:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    negative = is_negative(a) != is_negative(b)

    def signed(x: float) -> float:
        return -x if negative else x

    if a != a or b != b or (a == 0 and b == 0) or (abs(a) == math.inf and abs(b) == math.inf):
        return math.nan
    return signed(math.inf) if b == 0 or abs(a) == math.inf else signed(0.0)


def square_root(bits: int, fmt: Format, mode: str) -> int:
    """The code of a square root, by bisection over codes and comparison of squares."""
    value = decode(bits, fmt)
    if not isinstance(value, Fraction):
        return encode(math.nan if value == -math.inf else value, fmt)
    if value < 0:
        return encode(math.nan, fmt)
    low, high = 0, fmt.max_code
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fmt.magnitude(middle) ** 2 <= value else (low, middle)
    if fmt.magnitude(low) ** 2 == value or mode in ("rz", "rm"):
        return low
    if mode == "rp":
        return low + 1
    half = (fmt.magnitude(low) + fmt.magnitude(low + 1)) / 2
    return low + (half**2 < value)


def specials(fmt: Format) -> list[int]:
    """Zeros, subnormals, normals at the edges, one and its neighbours, large values, infinities, NaN."""
    one = fmt.offset << fmt.mantissa
    codes = [0, 1, 2, 3, (1 << fmt.mantissa) - 1, 1 << fmt.mantissa, (1 << fmt.mantissa) + 1]
    codes += [one - 1, one, one + 1, one + (1 << fmt.mantissa - 1), fmt.max_code - 1, fmt.max_code]
    codes += [code for code in (fmt.inf,) if code is not None]
    both = codes + [code | fmt.sign for code in codes]
    nans = [] if fmt.nan is None else [fmt.nan & (fmt.sign - 1)]
    return both + nans + ([nans[0] ^ 1] if nans and fmt.mantissa > 3 else [])


def sample(fmt: Format, count: int, seed: int, spread: int = 0) -> list[int]:
    """Random finite codes; `spread` limits exponents to that many around one, so that operands interact."""
    rng = random.Random(seed)
    codes = []
    for _ in range(count):
        exponent = rng.randrange(fmt.offset - spread, fmt.offset + spread + 1) if spread else None
        if exponent is None:
            code = rng.randrange(fmt.max_code + 1)
        else:
            mantissa = rng.getrandbits(fmt.mantissa)
            if rng.random() < 0.5:  # few significant bits: exact results and ties
                mantissa &= -1 << rng.randrange(fmt.mantissa)
            code = (exponent << fmt.mantissa) | mantissa
        codes.append(code | (fmt.sign if rng.random() < 0.5 else 0))
    return codes
