"""Merging the chunks of a split sequence, by the CTA that finishes the last of them.

Every CTA that has written a chunk's partial result counts it, in a counter for each sequence, KV head and row tile.
Who completes the count merges all chunks. The counter wraps to 0 by itself, so that one zeroing serves for ever.
"""

from __future__ import annotations

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

        Splits come in batches of 32, one lane holding the m and l of each, under a running maximum. `first_row` is
        the first row of this head in the sequence's first partial slot; slots are `rows` rows apart.
        """
        per_warp = self.row_tile // self.warps
        place = (o_partial, m_partial, l_partial, first_row, rows, n_splits)
        if n_splits <= FEW_SPLITS:
            # Several rows at once: their requests are under way together.
            for i in cutlass.range(per_warp // self.few_rows, unroll=1):
                n0 = row0 + (i * self.warps + warp) * self.few_rows
                self.merge_rows(
                    lane, n0, n_q, group_size, place, scale_o, target, self.few_rows, FEW_SPLITS, FEW_SPLITS
                )
        else:
            for i in cutlass.range(per_warp, unroll=1):
                n0 = row0 + i * self.warps + warp
                self.merge_rows(lane, n0, n_q, group_size, place, scale_o, target, 1, self.depth, 32)

    @cute.jit
    def merge_rows(self, lane, n0, n_q, group_size, place, scale_o, target, count, depth, batch_size):
        """Merge `count` rows from `n0` on, requesting the O of `depth` splits at once.

        `batch_size`: splits a batch, of which a lane holds one. Lanes beyond have no weight, whatever maximum they see.
        """
        o_partial, m_partial, l_partial, first_row, rows, n_splits = place
        o_base, o_token, o_head, lse, stat_row = target
        if n0 < n_q:
            bases = [Float32(NEG_INF) for _ in range(count)]
            totals = [Float32(0.0) for _ in range(count)]
            accs = [[Float32(0.0)] * self.columns for _ in range(count)]
            firsts = [first_row + cutlass.min(n0 + r, n_q - 1) for r in range(count)]
            for batch in cutlass.range((n_splits + 31) // 32, unroll=1):
                split0 = batch * 32
                # Requested before the weights are known: one round trip to memory instead of two.
                ahead = [self.load_os(o_partial, first, rows, lane, split0, n_splits, depth) for first in firsts]
                ms = [self.load_stat(m_partial, first, rows, split0 + lane, n_splits, NEG_INF) for first in firsts]
                ls = [self.load_stat(l_partial, first, rows, split0 + lane, n_splits, 0.0) for first in firsts]
                for r in cutlass.range_constexpr(count):
                    peak = ms[r]
                    for distance in (d for d in (1, 2, 4, 8, 16) if d < batch_size):
                        peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=distance))
                    peak = cute.arch.fmax(peak, bases[r])
                    zero = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
                    alpha = ptx.exp2((bases[r] - zero) * LOG2E)
                    weight = ptx.exp2((ms[r] - zero) * LOG2E)
                    subtotal = weight * ls[r]
                    for distance in (1, 2, 4, 8, 16):
                        subtotal = subtotal + cute.arch.shuffle_sync_bfly(subtotal, offset=distance)
                    totals[r] = totals[r] * alpha + subtotal
                    bases[r] = peak
                    accs[r] = self.add([x * alpha for x in accs[r]], ahead[r], weight, 0)
                    for group in cutlass.range_constexpr(1, batch_size // depth):
                        if split0 + group * depth < n_splits:
                            j0 = group * depth
                            values = self.load_os(o_partial, firsts[r], rows, lane, split0 + j0, n_splits, depth)
                            accs[r] = self.add(accs[r], values, weight, j0)
            for r in cutlass.range_constexpr(count):
                n = n0 + r
                if n < n_q:
                    # A row that saw no key in any chunk gives 0 and -inf.
                    total = totals[r]
                    factor = cutlass.select_(total == 0.0, Float32(0.0), scale_o / total)
                    token = n // group_size
                    address = o_base + (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
                    if lane < self.lanes:
                        for v in cutlass.range_constexpr(self.columns // 4):
                            row = [x * factor for x in accs[r][4 * v : 4 * v + 4]]
                            pairs = [ptx.pack_f32x2("bf16", row[e], row[e + 1]) for e in (0, 2)]
                            ptx.store_global_v2(address + (v * 128 + lane * 4) * 2, pairs)
                    if lane == 0:
                        log_sum = bases[r] + cute.math.log(total)
                        store_f32(lse, stat_row + n, cutlass.select_(total == 0.0, Float32(NEG_INF), log_sum))

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

    def load_os(self, o_partial, first, rows, lane, split0, n_splits, count):
        """This lane's columns of a row in `count` splits, zeros past the last split and in lanes without columns."""
        row_bytes = self.head_dim * 4
        address = o_partial.toint() + (first + Int64(split0) * rows) * row_bytes + lane * 16
        stride = Int64(rows) * row_bytes
        left = cutlass.select_(lane < self.lanes, n_splits - split0, Int32(0))
        found = []
        for j in range(count):
            found.append(self.load_o(address, left > j))
            address = address + stride
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
