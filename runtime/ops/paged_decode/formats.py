"""Element formats of the KV cache: fields, value tables and packing along head_dim.

A code is sign | exponent | mantissa, sign on top. With M mantissa bits and bias B, exponent 0 means
m / 2^M * 2^(1 - B), any other e means (1 + m / 2^M) * 2^(e - B).
Needs numpy; every function also takes torch tensors, on any device, without importing torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode.config import NVFP4_BLOCK as NVFP4_BLOCK

Array = Any
"""A numpy array or a torch tensor."""


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A small floating-point format."""

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_nan: bool = False
    """All ones after the sign is NaN (e4m3fn); otherwise every code is a finite number."""


E4M3 = FloatFormat("e4m3", 8, 4, 3, 7, 448.0, has_nan=True)
E3M2 = FloatFormat("e3m2", 6, 3, 2, 3, 28.0)
E2M3 = FloatFormat("e2m3", 6, 2, 3, 1, 7.5)
E2M1 = FloatFormat("e2m1", 4, 2, 1, 1, 6.0)

ELEMENTS: dict[str, FloatFormat] = {"fp8": E4M3, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1, "nvfp4": E2M1}
"""Element of K and V by kv_format (bf16 is not a coded format); nvfp4 adds an e4m3 scale per 16 elements."""

KV_FORMATS = ("bf16", *ELEMENTS)


def element(kv_format: str) -> FloatFormat:
    """The element format of a coded kv_format. Raises ArgumentError."""
    if kv_format not in ELEMENTS:
        raise ArgumentError(f"kv_format = {kv_format!r}: expected one of {', '.join(ELEMENTS)}")
    return ELEMENTS[kv_format]


@cache
def values(fmt: FloatFormat) -> NDArray[np.float32]:
    """The value of each of the 2^bits codes, fp32 (all are exact). Do not write to it."""
    codes = np.arange(1 << fmt.bits)
    mantissa = (codes & ((1 << fmt.mantissa_bits) - 1)) / 2.0**fmt.mantissa_bits
    exponent = (codes >> fmt.mantissa_bits) & ((1 << fmt.exponent_bits) - 1)
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, 1 - fmt.bias), np.ldexp(1.0 + mantissa, exponent - fmt.bias))
    table = np.where(codes >> (fmt.bits - 1), -magnitude, magnitude).astype(np.float32)
    if fmt.has_nan:
        half = 1 << (fmt.bits - 1)
        table[[half - 1, 2 * half - 1]] = np.nan
    table.flags.writeable = False
    return table


@cache
def midpoints(fmt: FloatFormat) -> NDArray[np.float32]:
    """Midpoints between neighbouring magnitudes, ascending, fp32 (all are exact)."""
    table = values(fmt)[: 1 << (fmt.bits - 1)]
    magnitudes = table[~np.isnan(table)]
    middle: NDArray[np.float32] = (magnitudes[:-1] + magnitudes[1:]) / np.float32(2)
    middle.flags.writeable = False
    return middle


def row_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one packed row. Raises ArgumentError if it is not whole."""
    if head_dim * bits % 8:
        raise ArgumentError(f"head_dim = {head_dim}: a row of {bits}-bit codes is not a whole number of bytes")
    return head_dim * bits // 8


def pack(codes: Array, bits: int) -> Array:
    """Pack uint8 codes (..., d) to bytes (..., d * bits / 8): code i starts at bit `bits * i`, low bit first.

    `bits` is 4, 6 or 8. Raises ArgumentError if d does not fill whole bytes (fp6: whole groups of four).
    """
    group = _group(bits)
    if codes.shape[-1] % group:
        raise ArgumentError(f"{codes.shape[-1]} codes of {bits} bits: expected a multiple of {group}")
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., 0::2] & 15 | (codes[..., 1::2] & 15) << 4
    a, b, c, d = (codes[..., i::4] & 63 for i in range(4))
    return _interleave([a | (b & 3) << 6, b >> 2 | (c & 15) << 4, c >> 4 | d << 2])


def unpack(packed: Array, bits: int) -> Array:
    """Inverse of `pack`: bytes (..., n) to uint8 codes (..., n * 8 / bits)."""
    group_bytes = _group(bits) * bits // 8
    if packed.shape[-1] % group_bytes:
        raise ArgumentError(f"{packed.shape[-1]} bytes of {bits}-bit codes: expected a multiple of {group_bytes}")
    if bits == 8:
        return packed
    if bits == 4:
        return _interleave([packed & 15, packed >> 4])
    x, y, z = (packed[..., i::3] for i in range(3))
    return _interleave([x & 63, x >> 6 | (y & 15) << 2, y >> 4 | (z & 3) << 4, z >> 2])


def _group(bits: int) -> int:
    """Codes that fill whole bytes together."""
    groups = {4: 2, 6: 4, 8: 1}
    if bits not in groups:
        raise ArgumentError(f"bits = {bits}: expected 4, 6 or 8")
    return groups[bits]


def _interleave(parts: list[Array]) -> Array:
    """Arrays (..., n) to (..., n * len(parts)), taking one element of each in turn."""
    if isinstance(parts[0], np.ndarray):
        stacked: Array = np.stack(parts, axis=-1)
    else:
        import torch

        stacked = torch.stack(parts, dim=-1)
    return stacked.reshape(*parts[0].shape[:-1], parts[0].shape[-1] * len(parts))
