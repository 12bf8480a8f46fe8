"""Elements narrower than a byte: how 16 of them lie in memory, and the bytes they become.

Packed. Sixteen 4-bit elements take 8 bytes, sixteen 6-bit elements 12, lowest bits first. The *padded* forms
`b4x16_p64` and `b6x16_p32` (PTX ISA 5.2.3, sub-byte packed types) fill each 16 elements up to 16 bytes, so that
such a container has the addresses of sixteen 8-bit elements. Loads that widen (`ldmatrix`, `tcgen05.cp`,
PTX ISA 9.7.14.5.15 "Optional Decompression") put an element into the low bits of its byte and zeros above.

Which bits of a byte the sub-byte operands of `mma` take is not in the text of the PTX ISA for every kind; the
functions here are consistent with each other and with the padded forms that TMA writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

DATA_BYTES = {"b4x16_p64": 8, "b6x16_p32": 12, "b4x16": 8}
"""Bytes that sixteen elements take, padding left out."""


def widen4(packed: Array) -> Array:
    """(..., n) bytes of packed 4-bit elements to (..., 2n) bytes with one element each, low half first."""
    result = np.empty((*packed.shape[:-1], packed.shape[-1] * 2), np.uint8)
    result[..., 0::2] = packed & 0xF
    result[..., 1::2] = packed >> 4
    return result


def widen6(packed: Array) -> Array:
    """(..., 3n) bytes of packed 6-bit elements to (..., 4n) bytes with one element each, lowest bits first."""
    triples = packed.reshape(*packed.shape[:-1], -1, 3).astype(np.uint32)
    word = triples[..., 0] | triples[..., 1] << 8 | triples[..., 2] << 16
    parts = [(word >> shift & 0x3F).astype(np.uint8) for shift in (0, 6, 12, 18)]
    return np.stack(parts, axis=-1).reshape(*packed.shape[:-1], -1)


def widen(containers: Array, source: str) -> Array:
    """(..., 16) padded containers of `b4x16_p64` or `b6x16_p32` to (..., 16) bytes with one element each."""
    data = containers[..., : DATA_BYTES[source]]
    return widen4(data) if source == "b4x16_p64" else widen6(data)


def narrow4(elements: Array) -> Array:
    """The inverse of widen4."""
    return (elements[..., 0::2] & 0xF) | (elements[..., 1::2] << 4)


def narrow6(elements: Array) -> Array:
    """The inverse of widen6."""
    fours = elements.reshape(*elements.shape[:-1], -1, 4).astype(np.uint32) & 0x3F
    word = fours[..., 0] | fours[..., 1] << 6 | fours[..., 2] << 12 | fours[..., 3] << 18
    parts = [(word >> shift & 0xFF).astype(np.uint8) for shift in (0, 8, 16)]
    return np.stack(parts, axis=-1).reshape(*elements.shape[:-1], -1)
