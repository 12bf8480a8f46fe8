"""A kernel that only reads, in Triton. In a file of its own: importing it needs Triton, and nothing else does."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def read(x, never, count, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    """Sum `count` int32 of `x`, and store the sum only if it is a value that it never has."""
    start = tl.program_id(0).to(tl.int64) * LOADS * BLOCK
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(LOADS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, mask=at < count, other=0)
    one = tl.sum(total)
    if one == 123456789:
        tl.store(never, one)
