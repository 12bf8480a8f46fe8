"""Shared-memory matrix descriptors of wgmma and tcgen05, and where the elements they describe lie.

PTX ISA 9.7.15.5.1.2 (wgmma), 9.7.16.4.1 (tcgen05) and the canonical layouts of 9.7.15.5.1 and 9.7.16.5. Both
generations share one 64-bit format; Blackwell adds a version, a mode for the leading offset and one more swizzle:

    0-13 start address / 16       16-29 leading byte offset / 16       32-45 stride byte offset / 16
    46-48 version (1 on Blackwell)     49-51 base offset     52 leading offset is absolute     61-63 swizzle

A matrix is read as rows of 16-byte chunks. With T elements in a chunk and W the swizzle's span in bytes:
- K-major: row i of A (column of B), chunk c along K lies at (i % 8) * W + (i // 8) * SBO + 16 c; without swizzle at
  (i % 8) * 16 + (i // 8) * SBO + c * LBO;
- MN-major: k-row k, chunk c along M or N lies at (k % 8) * W + (k // 8) * SBO + (c % (W / 16)) * 16 + (c // (W / 16))
  * LBO; without swizzle at (k % 8) * 16 + (k // 8) * LBO + c * SBO. With 32-byte atomicity groups hold 4 k-rows.
The swizzle then xors the absolute address.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import DescriptorFault
from cubinery.aot.ptxsim.isa.swizzle import SWIZZLES, Swizzle

Array = Any
_LAYOUTS = {0: "none", 1: "128B_atom_32B", 2: "128B", 4: "64B", 6: "32B"}


@dataclass(frozen=True, slots=True)
class SmemDescriptor:
    """A decoded shared-memory descriptor; offsets and start in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle
    base_offset: int = 0
    version: int = 0
    absolute_leading: bool = False

    def encode(self) -> int:
        """The 64 bits; handy in tests and for messages."""
        layout = next(code for code, name in _LAYOUTS.items() if name == self.swizzle.name)
        return (
            (self.start >> 4)
            | (self.leading >> 4) << 16
            | (self.stride >> 4) << 32
            | self.version << 46
            | self.base_offset << 49
            | int(self.absolute_leading) << 52
            | layout << 61
        )


def _field(value: int, low: int, bits: int) -> int:
    return value >> low & ((1 << bits) - 1)


def decode(value: int, blackwell: bool) -> SmemDescriptor:
    """Read 64 bits; raises DescriptorFault for bits that no descriptor of that generation has."""
    field = partial(_field, value)
    layout, version = field(61, 3), field(46, 3)
    if layout not in _LAYOUTS or (layout == 1 and not blackwell):
        raise DescriptorFault(f"shared-memory descriptor {value:#018x}: swizzle code {layout} does not exist")
    if version != int(blackwell):
        raise DescriptorFault(
            f"shared-memory descriptor {value:#018x}: bits 46 to 48 are {version}, expected {int(blackwell)}"
        )
    if field(14, 2) or field(30, 2) or field(53, 8) or (field(52, 1) and not blackwell):
        raise DescriptorFault(f"shared-memory descriptor {value:#018x}: reserved bits are set")
    if field(49, 3) and not SWIZZLES[_LAYOUTS[layout]].bits:
        raise DescriptorFault(f"shared-memory descriptor {value:#018x}: a base offset, and no swizzle")
    if field(52, 1):
        raise DescriptorFault(f"shared-memory descriptor {value:#018x}: absolute leading offsets need K = 96")
    return SmemDescriptor(
        start=field(0, 14) << 4,
        leading=field(16, 14) << 4,
        stride=field(32, 14) << 4,
        swizzle=SWIZZLES[_LAYOUTS[layout]],
        base_offset=field(49, 3),
        version=version,
    )


@lru_cache(maxsize=512)
def _offsets(leading: int, stride: int, swizzle: Swizzle, rows: int, columns: int, mn_major: bool) -> Array:
    """Unswizzled byte offsets of chunks: (rows, columns), rows along M or N (mn_major: along K)."""
    i = np.arange(rows, dtype=np.int64)[:, None]
    c = np.arange(columns, dtype=np.int64)[None, :]
    group = 4 if mn_major and swizzle.atom == 32 else 8
    within, outer = i % group, i // group
    if not mn_major:
        step = leading if not swizzle.bits else 16
        result = within * swizzle.span + outer * stride + c * step
    elif not swizzle.bits:
        result = within * 16 + outer * leading + c * stride
    else:
        wide = swizzle.span // 16
        result = within * swizzle.span + outer * stride + c % wide * 16 + c // wide * leading
    result.setflags(write=False)
    return result


def operand_chunks(descriptor: SmemDescriptor, mn: int, k: int, bits: int, mn_major: bool) -> Array:
    """Shared addresses of an operand's 16-byte chunks, an int64 array.

    (mn, k * bits / 128) where K-major, (k, mn * bits / 128) where MN-major. `bits` is what an element takes in memory
    (8 for sub-byte elements in padded containers). These are also the bytes that the instruction reads, for checks of
    bounds, initialisation, races and proxies.
    """
    rows, columns = (k, mn * bits // 128) if mn_major else (mn, k * bits // 128)
    swizzle = descriptor.swizzle
    flat = _offsets(descriptor.leading, descriptor.stride, swizzle, rows, columns, mn_major)
    return swizzle.apply(flat + descriptor.start, descriptor.base_offset)


def fetch(shared: Array, chunks: Array, low: int = 0) -> Array:
    """The bytes of chunks (rows, columns) as (rows, columns, 16) from one CTA's shared memory.

    `shared` is uint8, indexed by shared address; `low` the first address that a kernel may use. Raises
    DescriptorFault where a chunk lies outside.
    """
    first, last = int(chunks.min()), int(chunks.max()) + 16
    if first < low or last > len(shared):
        raise DescriptorFault(
            f"a matrix in shared memory reaches from {first:#x} to {last:#x}: expected {low:#x} to {len(shared):#x}"
        )
    return shared[: len(shared) & ~15].reshape(-1, 16).take(chunks >> 4, axis=0)
