"""Exact rounding: directed modes and fused operations by way of float64 and an error term.

Method. Products of two f32 are exact in float64 (48 of 53 bits; exponents from -298 to 256). A float64 sum s has
an error e that is itself a float64, which Knuth's two-sum finds with six additions. Replacing s by the one of its
two neighbours around s + e that has an odd last bit (*rounding to odd*) keeps, in 53 bits, all that any further
rounding to 24 bits or fewer has to know (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
proved algorithms using rounding to odd", IEEE Transactions on Computers 57(4), 2008). So round to odd, then once
more in the mode wanted, and the result equals a single rounding of the exact value, subnormals included.

`fma_nearest` takes the short way first: rounding s to f32 can differ from rounding s + e only where s sits
exactly between two f32 values. Where the result is normal that is a pattern in the last 29 bits, one in 2**29
of random values; those few, and results below 2**-126, are done again by rounding to odd. On a busy two-core host
80 warps take 20 microseconds (add.f32: 7), and elements that need the long way some 100 more together.
"""

from __future__ import annotations

import numpy as np

from cubinery.aot.ptxsim.isa.values import Array, canonical32

MODES = ("rn", "rz", "rm", "rp")
"""To nearest even, towards zero, towards minus infinity, towards plus infinity (PTX ISA 9.7.3)."""

_LOW28 = np.uint64(0x0FFFFFFF)
_LOW = np.uint64(0x1FFFFFFF)
_HALF = np.uint64(0x10000000)
_SUBNORMAL = np.uint32(0x00FFFFFE)


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """The float64 sum and its exact error; the error is 0 where the sum is not finite."""
    total = a + b
    virtual = total - a
    error = (a - (total - virtual)) + (b - virtual)
    return total, np.where(np.isfinite(total), error, 0.0)


def to_odd(total: Array, error: Array) -> Array:
    """The exact value total + error, |error| at most half an ulp of total, rounded to odd in float64."""
    bits = np.asarray(total).view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact_even, bits + step, bits).view(np.float64)


def to_odd_f32(value: Array) -> Array:
    """float64 values (exact, or rounded to odd) as raw bits of f32, rounded to odd."""
    nearest = np.asarray(value.astype(np.float32))
    back = nearest.astype(np.float64)
    bits = nearest.view(np.int32)
    step = np.where((value > back) == (value > 0), 1, -1).astype(np.int32)
    return np.where((back != value) & (bits & 1 == 0), bits + step, bits).view(np.uint32)


def to_f32(value: Array, mode: str) -> Array:
    """float64 values (exact, or rounded to odd) to f32 in a rounding mode."""
    nearest = value.astype(np.float32)
    if mode == "rn":
        return nearest
    back = nearest.astype(np.float64)
    down, up = np.float32(-np.inf), np.float32(np.inf)
    if mode == "rm":
        return np.where(back > value, np.nextafter(nearest, down), nearest)
    if mode == "rp":
        return np.where(back < value, np.nextafter(nearest, up), nearest)
    return np.where(np.abs(back) > np.abs(value), np.nextafter(nearest, np.float32(0)), nearest)


def fix_zero(total: Array, a: Array, b: Array, mode: str) -> Array:
    """The sign of an exact zero sum in rounding mode rm: -0 unless both addends are +0 (IEEE 754, 6.3)."""
    if mode != "rm":
        return total
    positive = ~np.signbit(a) & ~np.signbit(b)
    return np.where((total == 0) & (a == -b) & ~positive, total.dtype.type(-0.0), total)


def add_f32(a: Array, b: Array, mode: str) -> Array:
    """f32 sum in a directed mode (to nearest, `a + b` does)."""
    left, right = a.astype(np.float64), b.astype(np.float64)
    rounded = to_f32(to_odd(*two_sum(left, right)), mode)
    return fix_zero(rounded, left, right, mode)


def mul_f32(a: Array, b: Array, mode: str) -> Array:
    """f32 product in a directed mode."""
    return to_f32(np.multiply(a, b, dtype=np.float64), mode)


def fma_f32(a: Array, b: Array, c: Array, mode: str) -> Array:
    """a * b + c with one rounding, in any mode, always the long way. Sources are f32 (or float64 of f32 values)."""
    product = np.multiply(a, b, dtype=np.float64)
    addend = c.astype(np.float64)
    rounded = to_f32(to_odd(*two_sum(product, addend)), mode)
    return fix_zero(rounded, product, addend, mode)


def fma_nearest(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of f32 with one rounding to nearest even; a NaN is the canonical one.

    Nine NumPy calls where the last 28 bits of no float64 sum are all zero, which is necessary for a tie of f32 values,
    normal or subnormal, and which zeros, infinities and NaN have as well: those take a closer look.
    """
    total = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    result = total.astype(np.float32)
    if np.count_nonzero(total.view(np.uint64) & _LOW28) == total.size:
        return result
    return _settled(total, result, (a, b, c))


def _settled(total: Array, result: Array, sources: tuple[Array, Array, Array]) -> Array:
    """fma_nearest's result with doubtful elements done the long way: ties, and what lies below 2**-126."""
    doubtful = np.asarray((total.view(np.uint64) & _LOW) == _HALF)
    doubtful |= (result.view(np.uint32) << 1) - np.uint32(1) <= _SUBNORMAL
    if np.count_nonzero(doubtful):
        a, b, c = (np.broadcast_to(source, total.shape)[doubtful] for source in sources)
        result = np.array(result)
        result[doubtful] = fma_f32(a, b, c, "rn")
    return canonical32(result).view(np.float32)


def div_f32(a: Array, b: Array, mode: str) -> Array:
    """f32 quotient in any mode: the nearest one, moved by one where the exact remainder's sign says so."""
    nearest = np.divide(a, b, dtype=np.float32)
    if mode == "rn":
        return nearest
    # The remainder is exact in float64, since quotient * b agrees with a in all but the last bits.
    remainder = a.astype(np.float64) - nearest.astype(np.float64) * b.astype(np.float64)
    above = np.where(np.signbit(b), -remainder, remainder)  # sign of (exact quotient - nearest)
    inexact = np.isfinite(a) & np.isfinite(b) & (b != 0)
    return _moved(nearest, np.where(inexact, above, 0.0), mode, np.signbit(a) ^ np.signbit(b))


def sqrt_f32(a: Array, mode: str) -> Array:
    """f32 square root in any mode."""
    nearest = np.sqrt(a.astype(np.float32))
    if mode == "rn":
        return nearest
    remainder = a.astype(np.float64) - nearest.astype(np.float64) ** 2
    return _moved(nearest, np.where(np.isfinite(a) & (a > 0), remainder, 0.0), mode, np.zeros_like(nearest, np.bool_))


def _moved(nearest: Array, above: Array, mode: str, negative: Array) -> Array:
    """The directed neighbour of a nearest value, given the sign of (exact - nearest) and of the exact value.

    A nearest infinity of finite operands is an overflow: the remainder is then infinite with the sign that pulls
    the value back, which is what nextafter does.
    """
    down, up = np.nextafter(nearest, np.float32(-np.inf)), np.nextafter(nearest, np.float32(np.inf))
    if mode == "rm":
        return np.where(above < 0, down, nearest)
    if mode == "rp":
        return np.where(above > 0, up, nearest)
    inward = np.where(negative, above > 0, above < 0)
    return np.where(inward, np.where(negative, up, down), nearest)
