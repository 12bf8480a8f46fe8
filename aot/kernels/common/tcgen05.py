"""The fifth-generation tensor core as trace-time functions: tensor memory, matrix products, descriptors.

For sm_100a, sm_103a and sm_110a, one CTA at a time (cta_group::1). Shared addresses are `Int32` in the shared window,
tensor-memory addresses `Int32` of lane << 16 | column. Formats are those of the PTX ISA, 9.7.16; whoever accesses
tensor memory that another thread (or the pipe) accessed fences on both sides of what orders the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Uint32, cute

inline = cute.arch.inline_ptx

ELEMENT_CODES = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5, "f16": 0, "bf16": 1}
"""Element types of A and B in an instruction descriptor: kind::f8f6f4 up to e2m1, then kind::f16."""

SWIZZLE_CODES = {"none": 0, "128B": 2, "64B": 4, "32B": 6}

# -- descriptors ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix in shared memory: what a descriptor says, apart from where it starts.

    `leading` and `stride` are byte offsets. K-major with a swizzle of 128 bytes: `stride` leads from eight rows to the
    next eight. MN-major with that swizzle: `stride` leads from eight k-rows to the next; without swizzle `leading`
    does, and `stride` leads from 16 bytes along M or N to the next.
    """

    swizzle: str
    leading: int
    stride: int

    @property
    def high(self) -> int:
        """The upper 32 bits of a descriptor."""
        return self.stride >> 4 | 1 << 14 | SWIZZLE_CODES[self.swizzle] << 29

    def low(self, address: Int32) -> Int32:
        """The lower 32 bits; adding bytes / 16 moves the start."""
        return ((address >> 4) & 0x3FFF) | (self.leading >> 4 << 16)


def instruction(a: str, b: str, m: int, n: int, *, a_mn_major: bool = False, b_mn_major: bool = False) -> int:
    """The instruction descriptor of a product A (m rows, of type `a`) times B (n columns) with fp32 sums."""
    types = 1 << 4 | ELEMENT_CODES[a] << 7 | ELEMENT_CODES[b] << 10
    return types | a_mn_major << 15 | b_mn_major << 16 | n >> 3 << 17 | m >> 4 << 24


# -- products ------------------------------------------------------------------------------------


def mma(
    kind: str, d: Int32, a: tuple[Matrix, Int32], b: tuple[Matrix, Int32], descriptor: int, accumulate: Any
) -> None:
    """Start D = A B (+ D unless `accumulate` is 0) by one thread; D in tensor memory, A and B in shared memory.

    A and B are matrices with the low words of their descriptors. Products of a thread happen in the order of issue.
    """
    inline(
        "{ .reg .pred p; .reg .b32 high, idesc; .reg .b64 a, b; setp.ne.b32 p, {$r3}, 0; "
        f"mov.b32 high, {a[0].high:#x}; mov.b64 a, {{{{$r1}}, high}}; "
        f"mov.b32 high, {b[0].high:#x}; mov.b64 b, {{{{$r2}}, high}}; mov.b32 idesc, {descriptor:#x}; "
        f"tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], a, b, idesc, p; }}",
        read_only_args=[d, a[1], b[1], Int32(accumulate)],
    )


def mma_ts(kind: str, d: Int32, a: Int32, b: tuple[Matrix, Int32], descriptor: int, accumulate: Any) -> None:
    """Like `mma`, with A in tensor memory: row m in lane m, K packed along columns."""
    inline(
        "{ .reg .pred p; .reg .b32 high, idesc; .reg .b64 b; setp.ne.b32 p, {$r3}, 0; "
        f"mov.b32 high, {b[0].high:#x}; mov.b64 b, {{{{$r2}}, high}}; mov.b32 idesc, {descriptor:#x}; "
        f"tcgen05.mma.cta_group::1.kind::{kind} [{{$r0}}], [{{$r1}}], b, idesc, p; }}",
        read_only_args=[d, a, b[1], Int32(accumulate)],
    )


def commit(barrier: Int32) -> None:
    """One arrival at an mbarrier once all earlier products of this thread are done."""
    inline(
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{$r0}];",
        read_only_args=[barrier],
    )


# -- tensor memory -------------------------------------------------------------------------------


def allocate(result: Int32, columns: int) -> None:
    """Allocate columns (a power of two from 32 to 512), by one whole warp; their address goes to shared memory."""
    inline(
        f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [{{$r0}}], {columns}; "
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        read_only_args=[result],
    )


def free(address: Int32, columns: int) -> None:
    """Free what `allocate` gave, by one whole warp, once everybody is done with it."""
    inline(f"tcgen05.dealloc.cta_group::1.sync.aligned.b32 {{$r0}}, {columns};", read_only_args=[address])


def fence_before() -> None:
    """What this thread did to tensor memory comes before what it does next to order others after it."""
    inline("tcgen05.fence::before_thread_sync;")


def fence_after() -> None:
    """What this thread does to tensor memory from now on comes after what ordered it."""
    inline("tcgen05.fence::after_thread_sync;")


def _registers(kind: str, first: int, count: int) -> str:
    return ", ".join(f"{{${kind}{first + i}}}" for i in range(count))


def load(address: Int32, columns: int) -> list[Float32]:
    """`columns` (a power of two) fp32 of this thread's own lane, from the warp's 32 lanes at `address`; waits."""
    return list(
        inline(
            f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{_registers('w', 0, columns)}}}, [{{$r0}}]; "
            "tcgen05.wait::ld.sync.aligned;",
            write_only_types=[Float32] * columns,
            read_only_args=[address],
        )
    )


def load_quads(address: Int32, columns: int, parts: Sequence[int] = (0, 1)) -> list[list[Float32]]:
    """A warp's 32 lanes by `columns` fp32 as accumulator fragments; waits.

    Lane 4g + t gets, for each of four rows g, g + 8, g + 16 and g + 24 in turn, columns 8i + 2t and 8i + 2t + 1 for
    i = 0, 1, ... `parts` may be (0,) or (1,) for the first or the last two rows alone.
    """
    half = columns // 2
    text = " ".join(
        f"tcgen05.ld.sync.aligned.16x256b.x{columns // 8}.b32 {{{_registers('w', n * half, half)}}}, [{{$r{n}}}];"
        for n in range(len(parts))
    )
    found = inline(
        text + " tcgen05.wait::ld.sync.aligned;",
        write_only_types=[Float32] * (half * len(parts)),
        read_only_args=[address + (16 * part << 16) for part in parts],
    )
    return [[found[n * half + i] for i in _quad_registers(row, columns)] for n in range(len(parts)) for row in range(2)]


def store_quads(address: Int32, rows: Sequence[Sequence[Float32]], parts: Sequence[int] = (0, 1)) -> None:
    """The inverse of `load_quads`; `wait_store` before anyone may count on it."""
    columns = 4 * len(rows[0])
    half, count = columns // 2, len(parts)
    registers: list[Any] = [None] * (half * count)
    for n, row in enumerate(rows):
        for value, i in zip(row, _quad_registers(n % 2, columns), strict=True):
            registers[n // 2 * half + i] = value
    text = " ".join(
        f"tcgen05.st.sync.aligned.16x256b.x{columns // 8}.b32 [{{$r{n}}}], "
        f"{{{_registers('r', count + n * half, half)}}};"
        for n in range(count)
    )
    inline(text, read_only_args=[*(address + (16 * part << 16) for part in parts), *registers])


def _quad_registers(row: int, columns: int) -> list[int]:
    """Registers of 16x256b that hold row g (0) or g + 8 (1), by column."""
    return [4 * i + 2 * row + e for i in range(columns // 8) for e in range(2)]


def store_quad_words(address: Int32, words: Sequence[Uint32]) -> None:
    """Words to 16 of a warp's lanes as `load_quads` arranges them: `wait_store` before anyone may count on them.

    Lane 4g + t stores, for i = 0, 1, ..., columns 8i + 2t and 8i + 2t + 1 of row g, then of row g + 8.
    """
    count = len(words)
    inline(
        f"tcgen05.st.sync.aligned.16x256b.x{count // 4}.b32 [{{$r0}}], {{{_registers('r', 1, count)}}};",
        read_only_args=[address, *words],
    )


def store_words(address: Int32, words: Sequence[Uint32]) -> None:
    """Words to consecutive columns of this thread's own lane; `wait_store` before anyone may count on them."""
    count = len(words)
    inline(
        f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r0}}], {{{_registers('r', 1, count)}}};",
        read_only_args=[address, *words],
    )


def wait_store() -> None:
    """Wait until this thread's stores to tensor memory have landed."""
    inline("tcgen05.wait::st.sync.aligned;")
