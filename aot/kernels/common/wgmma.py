"""Warpgroup-level MMA of Hopper as trace-time functions (PTX ISA 9.7.15).

Each function is one group: it fences, issues its products, commits and waits, so that its accumulators are plain
registers before and after. Two warpgroups that take turns keep the tensor cores busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm

from cubinery.aot.kernels.common.ptx import inline

_HEAD = (
    "{ .reg .pred no, yes; .reg .b32 zero; .reg .b64 b; mov.b32 zero, 0; setp.ne.b32 no, zero, 0; "
    "setp.eq.b32 yes, zero, 0; wgmma.fence.sync.aligned; "
)
_TAIL = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"


def descriptor(address: Int32, *, leading: int, stride: int) -> Int64:
    """A matrix in shared memory, swizzled by 128 bytes: offsets in bytes, `address` below 2^18."""
    constant = (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 62
    return Int64(address >> 4) | constant


def _group(n: int, steps: Sequence[int], *, fresh: bool, turn: int) -> str:
    """The text of a group: one product for every four registers of A, B `steps` bytes further on each."""
    op = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16"
    target = "{" + ", ".join(f"{{$w{n}}}" for n in range(n // 2)) + "}"
    text = _HEAD
    for i, offset in enumerate(steps):
        fragment = "{" + ", ".join(f"{{$r{1 + 4 * i + n}}}" for n in range(4)) + "}"
        scale = "no" if fresh and i == 0 else "yes"
        text += f"add.s64 b, {{$r0}}, {offset >> 4}; {op} {target}, {fragment}, b, {scale}, 1, 1, {turn}; "
    return text + _TAIL


def multiply_f16(a: Sequence[Any], b: Int64, steps: Sequence[int], n: int) -> list[Float32]:
    """A B for A (64, 16 len(steps)) in registers, four for 16 columns, and K-major B of `n` columns; f16, fp32 sums."""
    text = _group(n, steps, fresh=True, turn=0)
    return list(inline(text, write_only_types=[Float32] * (n // 2), read_only_args=[b, *a]))


def accumulate_f16(acc: Sequence[Any], a: Sequence[Any], b: Int64, steps: Sequence[int]) -> list[Float32]:
    """acc + A B for B that is N-major (rows of K, contiguous along N); otherwise as `multiply_f16`."""
    text = _group(2 * len(acc), steps, fresh=False, turn=1)
    return _inline_tied(text, acc, [b, *a], "l" + "r" * len(a))


def _inline_tied(text: str, tied: Sequence[Any], inputs: Sequence[Any], kinds: str) -> list[Float32]:
    """Inline PTX whose outputs `{$w0}`, ... begin as `tied`: `inline` hands no such registers back.

    `kinds` are the register classes of `inputs`, which the text calls `{$r0}`, ...
    """
    count = len(tied)
    for n in range(count):
        text = text.replace(f"{{$w{n}}}", f"${n}")
    for n in range(len(inputs)):
        text = text.replace(f"{{$r{n}}}", f"${count + n}")
    constraints = ["=f"] * count + list(kinds) + [str(n) for n in range(count)]
    values = [Float32(x).ir_value() for x in tied]
    result = llvm.inline_asm(
        llvm.StructType.get_literal([Float32.mlir_type] * count),
        [*(x.ir_value() for x in inputs), *values],
        text,
        ",".join(constraints),
        has_side_effects=True,
    )
    return [Float32(llvm.extractvalue(Float32.mlir_type, result, [n])) for n in range(count)]
