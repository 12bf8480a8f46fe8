"""Reductions, sums and sorting by all threads of a CTA, through shared memory.

`scratch` is an int32 tensor in shared memory of at least 64 elements, which calls share: each ends with all threads
past their last access to it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

WARP = 32


def warp_sum(value: Int32) -> Int32:
    """Sum over a warp, in every lane."""
    return cute.arch.warp_redux_sync(value, "add")


def warp_max(value: Int32) -> Int32:
    """Maximum over a warp, in every lane."""
    return cute.arch.warp_redux_sync(value, "max")


def warp_min_wide(value: Int64) -> Int64:
    """Minimum over a warp of numbers in [0, 2^62), in every lane."""
    high = Int32(value >> 31)
    low = Int32(value & 0x7FFFFFFF)
    top = cute.arch.warp_redux_sync(high, "min")
    low = cutlass.select_(high == top, low, Int32(0x7FFFFFFF))
    return (Int64(top) << 31) + Int64(cute.arch.warp_redux_sync(low, "min"))


@cute.jit
def cta_sum_and_max(addend: Int32, value: Int32, scratch: cute.Tensor, tidx: Int32, warps: int) -> tuple[Any, Any]:
    """(int64 sum of `addend`, maximum of `value`) over the CTA, in every thread.

    Both are not negative, and a warp's sum is an int32.
    """
    lane, warp = tidx % WARP, tidx // WARP
    part, top = warp_sum(addend), warp_max(value)
    if lane == 0:
        scratch[warp] = part
        scratch[WARP + warp] = top
    cute.arch.sync_threads()
    part, top = Int32(0), Int32(0)
    if lane < warps:
        part = scratch[lane]
        top = scratch[WARP + lane]
    cute.arch.sync_threads()
    high = warp_sum(part >> 16)
    return (Int64(high) << 16) + Int64(warp_sum(part & 0xFFFF)), warp_max(top)


@cute.jit
def cta_prefix(value: Int32, scratch: cute.Tensor, tidx: Int32, warps: int) -> tuple[Any, Any]:
    """(sum over the threads before this one, sum over all), int32."""
    lane, warp = tidx % WARP, tidx // WARP
    ends = value
    for distance in (1, 2, 4, 8, 16):
        before = cute.arch.shuffle_sync_up(ends, offset=distance)
        ends = ends + cutlass.select_(lane >= distance, before, Int32(0))
    if lane == WARP - 1:
        scratch[warp] = ends
    cute.arch.sync_threads()
    part = Int32(0)
    if lane < warps:
        part = scratch[lane]
    cute.arch.sync_threads()
    before = warp_sum(cutlass.select_(lane < warp, part, Int32(0)))
    return before + ends - value, warp_sum(part)


@cute.jit
def cta_sort(keys: cute.Tensor, size: Int32, tidx: Int32, threads: int) -> None:
    """Sort `size` int64 in shared memory, a power of two of at least 2, ascending; begins and ends with a barrier.

    A bitonic network. At distances below a warp's width a warp exchanges only what it wrote itself.
    """
    cute.arch.sync_threads()
    run = Int32(2)
    while run <= size:
        distance = run // 2
        while distance > 0:
            for pair in cutlass.range(tidx, size // 2, threads, unroll=1):
                low = pair & (distance - 1)
                first = 2 * (pair - low) + low
                a, b = keys[first], keys[first + distance]
                if (a > b) == ((first & run) == 0):
                    keys[first] = b
                    keys[first + distance] = a
            if distance > WARP:
                cute.arch.sync_threads()
            else:
                cute.arch.sync_warp()
            distance = distance // 2
        run = run * 2
        # What follows may begin at a distance of several warps.
        if run > 2 * WARP:
            cute.arch.sync_threads()
    cute.arch.sync_threads()
