"""The arithmetic of matrix instructions: element codes to numbers, products and sums, one rounding at the end.

Order and width. The PTX ISA leaves order, width and rounding of the sums open (9.7.14.5.14, 9.7.15.5.2, 9.7.16.10).
Here every product and sum is taken in float64 and the result is rounded once, to nearest even. That is exact for
integers, and for the rest differs from the chip by what the chip loses: with f32 accumulators by at most about
2**-22 * (|c| + sum |a b|); with f16 accumulators by an ulp of f16 of the same sum; FP8 `wgmma` on Hopper keeps only
about 14 bits while it adds, 2**-12 * (|c| + sum |a b|).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.values import NAN16, canonical32

Array = Any

BITS = {
    "f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "s8": 8, "u8": 8,
}  # fmt: skip
"""Bits of an element of A or B."""
CODES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32}
"""The NumPy type of element codes by the width at which they lie in a register or in memory."""
FP8 = ("e4m3", "e5m2")
FP6 = ("e3m2", "e2m3")
INT8 = ("s8", "u8")


@cache
def _table(name: str) -> Array:
    """float64 value of every code of a type of at most 16 bits."""
    if name in INT8:
        values = np.arange(256, dtype=np.uint8)
        return (values.view(np.int8) if name == "s8" else values).astype(np.float64)
    codes = np.arange(1 << 16, dtype=np.uint16) if name in ("f16", "bf16") else np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return formats.decode(codes, name).astype(np.float64)


def values(codes: Array, name: str) -> Array:
    """Element codes to float64, exactly. tf32 ignores the low 13 bits of its register (PTX ISA 5.2.3)."""
    if name == "tf32":
        return (codes & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if name == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return _table(name).take(codes)


def register_values(registers: Array, name: str) -> Array:
    """All elements of 32-bit registers (..., n), the lowest first, as float32 (..., n * elements), exactly."""
    if name == "bf16":
        pairs = np.empty((*registers.shape, 2), np.uint32)
        np.left_shift(registers, 16, out=pairs[..., 0])
        np.bitwise_and(registers, 0xFFFF0000, out=pairs[..., 1])
        return pairs.view(np.float32)
    if name == "tf32":
        return (registers & np.uint32(0xFFFFE000)).view(np.float32)
    if name == "f16":
        return registers.view(np.float16).astype(np.float32)
    return _narrow(name).take(registers.view(np.uint8))


@cache
def _narrow(name: str) -> Array:
    return _table(name).astype(np.float32)


def scale_values(codes: Array, name: str) -> Array:
    """Scale factors to float64: `ue8m0`, or `ue4m3`, which is e4m3 whose sign bit is ignored."""
    if name == "ue8m0":
        return formats.ue8m0_value(codes).astype(np.float64)
    return _table("e4m3").take(codes & 0x7F)


def accumulator_values(bits: Array, name: str) -> Array:
    """Accumulator bits (f32, f16 or s32, as uint32 or uint16) to floats that hold them exactly."""
    if name == "f32":
        return bits.view(np.float32)  # widened by whatever it is added to
    if name == "s32":
        return bits.view(np.int32).astype(np.float64)
    return _table("f16").take(bits)


def accumulator_bits(result: Array, name: str, satfinite: bool = False) -> Array:
    """float64 sums to accumulator bits, rounded once; NaN canonical; s32 wraps, or clamps with `satfinite`."""
    if name == "s32":
        if satfinite:
            result = np.clip(result, -(2.0**31), 2.0**31 - 1)
        return result.astype(np.int64).astype(np.uint32)
    if name == "f32":
        return canonical32(result.astype(np.float32, order="C"))
    half = result.astype(np.float16, order="C")
    return np.where(np.isnan(half), NAN16, half.view(np.uint16))
