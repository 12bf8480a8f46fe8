"""Swizzles: the exclusive-or by which tiles avoid bank conflicts in shared memory (PTX ISA 5.5.4).

Every mode takes some address bits from a higher place and xors them into a lower one. It works on absolute shared
addresses, which is why a tile must start at a multiple of its pattern (256, 512 or 1024 bytes), or say through a
descriptor's base offset how far the pattern has been moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any


@dataclass(frozen=True, slots=True)
class Swizzle:
    """`bits` address bits from bit `source` up are xored into those from bit `target` up."""

    name: str
    span: int
    """Bytes of a row of the pattern: the widest inner dimension that it can hold. 16 without swizzle."""
    bits: int
    target: int
    source: int = 7

    @property
    def atom(self) -> int:
        """Bytes that stay together."""
        return 1 << self.target

    @property
    def period(self) -> int:
        """Bytes after which the pattern repeats, and to which its start must be aligned."""
        return 1 << (self.source + self.bits) if self.bits else 16

    def apply(self, address: Array, base: int = 0) -> Array:
        """Where the byte (or aligned 16-byte chunk) of an unswizzled address lies.

        `base` (0 to 7) is a descriptor's base offset: rows are counted from it instead of from zero.
        """
        if not self.bits:
            return address
        row = (address >> self.source) - base
        return address ^ ((row & ((1 << self.bits) - 1)) << self.target)


SWIZZLES: dict[str, Swizzle] = {
    swizzle.name: swizzle
    for swizzle in (
        Swizzle("none", 16, 0, 4),
        Swizzle("32B", 32, 1, 4),
        Swizzle("64B", 64, 2, 4),
        Swizzle("128B", 128, 3, 4),
        Swizzle("128B_atom_32B", 128, 2, 5),
    )
}
"""By name as tensor maps spell it; `128B_atom_32B` is the descriptors' "128-byte swizzle with 32-byte atomicity"."""


@lru_cache(maxsize=4096)
def chunks(start: int, count: int, swizzle: Swizzle) -> Array:
    """Addresses of `count` consecutive 16-byte chunks from `start`, swizzled: (count,) of int64, read only."""
    result = swizzle.apply(start + 16 * np.arange(count, dtype=np.int64))
    result.setflags(write=False)  # stages of a ring come again and again, so the result is kept
    return result
