"""Merging the chunks of a split sequence, by the CTA that finishes the last of them.

Every CTA that has written a chunk's partial result counts it, in a counter for each sequence, KV head and row tile.
Who completes the count merges all chunks. The counter wraps to 0 by itself, so that one zeroing serves for ever.
"""

from __future__ import annotations

import operator
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import store_f32
from cubinery.aot.kernels.paged_decode.constants import LOG2E, NEG_INF

FEW_SPLITS = 4
"""Up to so many splits, a warp merges several rows at once."""


class SplitMerge:
    """What the computing warps of any decode kernel do after a part of a split sequence."""

    def __init__(
        self, *, head_dim: int, row_tile: int, warps: int, barrier: int, is_last: int, in_flight: int = 64
    ) -> None:
        """For `warps` warps, from warp 0 on, that meet at a named barrier; `is_last`: where in shared memory one tells
        the others whether this CTA merges, an int32; `in_flight`: registers of O that a thread requests at once.
        """
        self.head_dim, self.row_tile, self.warps = head_dim, row_tile, warps
        self.barrier, self.flag, self.in_flight = barrier, is_last, in_flight

    def meet(self):
        """A barrier of the warps."""
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=32 * self.warps)

    @cute.jit
    def is_last(self, smem, tidx, counter, n_splits):
        """Whether this CTA's chunk is the last of its sequence to be written; all chunks are then visible to it."""
        self.meet()  # thread 0 releases what all have written
        if tidx == 0:
            finished = ptx.atomic_wrapping_increment(counter, n_splits - 1)
            ptx.store_shared_i32(smem + self.flag, cutlass.select_(finished == n_splits - 1, Int32(1), Int32(0)))
        self.meet()
        return ptx.load_shared_i32(smem + self.flag) != 0

    @cute.jit
    def merge(
        self, warp, lane, row0, n_q, group_size, n_splits, rows, o_partial, m_partial, l_partial, first_row, scale_o,
        target,
    ):  # fmt: skip
        """O and LSE of the tile's rows. A warp takes rows, a lane four columns of every 128.

        `first_row` is the first row of this head in the sequence's first partial slot; slots are `rows` rows apart.
        """
        place = (o_partial, m_partial, l_partial, first_row, rows, n_splits)
        # Many first: in the other order, ptxas spills a value in one kernel of the proof set (sm_110a, every axis on).
        if n_splits > FEW_SPLITS:
            for row in cutlass.range(warp, self.row_tile, self.warps, unroll=1):
                self.merge_many(lane, row0 + row, n_q, group_size, place, scale_o, target)
        else:
            for row in cutlass.range(warp * self.few_rows, self.row_tile, self.warps * self.few_rows, unroll=1):
                self.merge_few(lane, row0 + row, n_q, group_size, place, scale_o, target)

    @cute.jit
    def merge_few(self, lane, n0, n_q, group_size, place, scale_o, target):
        """Merge `few_rows` rows of few chunks from `n0` on, whose requests are under way together.

        Lane FEW_SPLITS * i + j holds m and l of row i and chunk j.
        """
        o_partial, m_partial, l_partial, first_row, rows, n_splits = place
        _, _, _, lse, stat_row = target
        if n0 < n_q:
            first = first_row + n0
            live = [cutlass.select_(n0 + r < n_q, n_splits, Int32(0)) for r in range(self.few_rows)]
            ahead = self.load_os(o_partial, first, rows, lane, Int32(0), live, FEW_SPLITS)
            row, split = lane // FEW_SPLITS, lane % FEW_SPLITS
            exists = (row < self.few_rows) & (n0 + row < n_q)
            own = cutlass.select_(exists, split, n_splits)
            m = self.load_stat(m_partial, first + row, rows, own, n_splits, NEG_INF)
            l = self.load_stat(l_partial, first + row, rows, own, n_splits, 0.0)
            peak = self.across(FEW_SPLITS, m, cute.arch.fmax)
            weight = ptx.exp2((m - cutlass.select_(peak == NEG_INF, Float32(0.0), peak)) * LOG2E)
            total = self.across(FEW_SPLITS, weight * l, operator.add)
            # A row that saw no key in any chunk gives 0 and -inf.
            weight = weight * cutlass.select_(total == 0.0, Float32(0.0), scale_o / total)
            token = n0 // group_size
            head = n0 - token * group_size
            for r in cutlass.range_constexpr(self.few_rows):
                acc = self.add([Float32(0.0)] * self.columns, ahead[r], weight, FEW_SPLITS * r)
                if (n0 + r < n_q) & (lane < self.lanes):
                    self.store_row(lane, token, head, target, acc)
                ends = head == group_size - 1
                token, head = cutlass.select_(ends, token + 1, token), cutlass.select_(ends, Int32(0), head + 1)
            if exists & (split == 0):
                log_sum = self.log_sum(peak, total)
                store_f32(lse, stat_row + n0 + row, log_sum)

    def store_row(self, lane, token, head, target, values):
        """This lane's columns of a row of O."""
        o_base, o_token, o_head, _, _ = target
        address = o_base + (Int64(token) * o_token + Int64(head) * o_head) * 2 + lane * 8
        for v in range(self.columns // 4):
            row = values[4 * v : 4 * v + 4]
            ptx.store_global_v2(address + v * 256, [ptx.pack_f32x2("bf16", row[e], row[e + 1]) for e in (0, 2)])

    @cute.jit
    def merge_many(self, lane, n, n_q, group_size, place, scale_o, target):
        """Merge a row of any number of chunks, in batches of 32 under a running maximum, a lane a chunk."""
        o_partial, m_partial, l_partial, first_row, rows, n_splits = place
        _, _, _, lse, stat_row = target
        if n < n_q:
            base, total = Float32(NEG_INF), Float32(0.0)
            acc = [Float32(0.0)] * self.columns
            first = first_row + n
            for batch in cutlass.range((n_splits + 31) // 32, unroll=1):
                split0 = batch * 32
                # Requested before the weights are known: one round trip to memory instead of two.
                ahead = self.load_os(o_partial, first, rows, lane, split0, [n_splits], self.depth)[0]
                m = self.load_stat(m_partial, first, rows, split0 + lane, n_splits, NEG_INF)
                l = self.load_stat(l_partial, first, rows, split0 + lane, n_splits, 0.0)
                peak = cute.arch.fmax(self.across(32, m, cute.arch.fmax), base)
                zero = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
                alpha = ptx.exp2((base - zero) * LOG2E)
                weight = ptx.exp2((m - zero) * LOG2E)
                subtotal = self.across(32, weight * l, operator.add)
                total = total * alpha + subtotal
                base = peak
                acc = self.add([x * alpha for x in acc], ahead, weight, 0)
                for group in cutlass.range_constexpr(1, 32 // self.depth):
                    if split0 + group * self.depth < n_splits:
                        j0 = group * self.depth
                        values = self.load_os(o_partial, first, rows, lane, split0 + j0, [n_splits], self.depth)
                        acc = self.add(acc, values[0], weight, j0)
            # A row that saw no key in any chunk gives 0 and -inf.
            factor = cutlass.select_(total == 0.0, Float32(0.0), scale_o / total)
            token = n // group_size
            if lane < self.lanes:
                self.store_row(lane, token, n - token * group_size, target, [x * factor for x in acc])
            if lane == 0:
                log_sum = self.log_sum(base, total)
                store_f32(lse, stat_row + n, log_sum)

    def across(self, lanes, value, combine):
        """The values of so many neighbouring lanes, a power of two, combined; each of them gets it."""
        for i in range(lanes.bit_length() - 1):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=1 << i))
        return value

    def log_sum(self, peak, total):
        """LSE of a row by its maximum and sum; -inf where it saw no key."""
        return cutlass.select_(total == 0.0, Float32(NEG_INF), peak + cute.math.log(total))

    @property
    def few_rows(self) -> int:
        """Rows that a warp merges at once where splits are few."""
        return max(1, min(self.row_tile // self.warps, self.in_flight // (FEW_SPLITS * self.columns)))

    @property
    def columns(self) -> int:
        """Columns of a row that one lane merges."""
        return max(4, self.head_dim // 32)

    @property
    def lanes(self) -> int:
        """Lanes of a warp that have columns."""
        return min(32, self.head_dim // 4)

    @property
    def depth(self) -> int:
        """Splits whose O a warp requests at once."""
        return min(16, self.in_flight // self.columns)

    def add(self, acc, values, weights, first_lane):
        """acc + weight * O for consecutive splits, whose weights the lanes from `first_lane` on hold."""
        for j, row in enumerate(values):
            weight = cute.arch.shuffle_sync(weights, offset=first_lane + j)
            acc = [x + weight * y for x, y in zip(acc, row, strict=True)]
        return acc

    def load_os(self, o_partial, first, rows, lane, split0, live, count):
        """For rows from `first` on, each with `live` chunks: this lane's columns in `count` chunks from `split0` on.

        Zeros past a row's last chunk and in lanes without columns.
        """
        row_bytes = self.head_dim * 4
        address = o_partial.toint() + (first + Int64(split0) * rows) * row_bytes + lane * 16
        left = [cutlass.select_(lane < self.lanes, chunks - split0, Int32(0)) for chunks in live]
        found: list[list[Any]] = [[] for _ in live]
        for j in range(count):
            for r, chunks in enumerate(left):
                found[r].append(self.load_o(address + r * row_bytes, chunks > j))
            address = address + Int64(rows) * row_bytes
        return found

    @cute.jit
    def load_o(self, address, wanted):
        """This lane's columns of one row, or zeros."""
        values = [Float32(0.0)] * self.columns
        if wanted:
            values = [x for v in range(self.columns // 4) for x in ptx.load_global_f32x4(address + v * 512)]
        return values

    @cute.jit
    def load_stat(self, pointer, first, rows, split, n_splits, absent):
        """m or l of a split, `absent` past the last one."""
        value = Float32(absent)
        if split < n_splits:
            value = ptx.load_global_f32(pointer.toint() + (first + Int64(split) * rows) * 4)
        return value
