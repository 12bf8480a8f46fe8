"""Merging what the 2 to 16 CTAs of a cluster computed of one sequence, in their shared memory.

The results of a CTA's rows are cut into shares: 32 columns of a row, with the row's m and l. Share s belongs to the CTA
of rank s modulo the cluster, which gets it from every CTA, itself included, by asynchronous stores that are credited to
its barrier; it then writes that part of O. One trip between SMs instead of the three through L2 that partial results,
their counter and the last CTA's loads take, no workspace, and no CTA that merges while the others have gone.
"""

from __future__ import annotations

import math
import operator
from functools import partial, reduce

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cubinery.aot.kernels.common import cluster, ptx
from cubinery.aot.kernels.paged_decode.mma_store import Epilogue
from cubinery.aot.kernels.paged_decode.mma_tile import (
    INBOX_FULL,
    LOG2E,
    NEG_INF,
    OUT_SCALE,
    ROW_RESULT,
    SCORE_SCALE,
    STATS_FULL,
)
from cubinery.runtime.ops.paged_decode.config import MmaConfig

LN2 = math.log(2.0)

LANES = MmaConfig.SHARE_COLUMNS // 4
"""Lanes of a warp that take the columns of a share, four each. Each such group has the parts of other CTAs."""

GROUPS = 32 // LANES
STATS = MmaConfig.SHARE_COLUMNS * 4
"""Where m and l lie in a part of a share, in bytes."""

MOST_PARTS = 16 // GROUPS
"""Parts of a share that a group has, at most."""


class ClusterMerge(Epilogue):
    """What the threads of a CTA do for its cluster. `live`: the tile's rows that exist."""

    @cute.jit
    def init(self, smem, lane):
        """The barriers of what will come and, if another warp sends them, of m and l; made with the others."""
        if lane == 0:
            ptx.mbarrier_init(smem + INBOX_FULL, 1)
            if cutlass.const_expr(self.config.exchanges_p):
                ptx.mbarrier_init(smem + STATS_FULL, self.config.consumer_warps * self.operands.first_lanes)

    @cute.jit
    def expect(self, smem, tidx, rank, live):
        """Say how much will come."""
        if tidx == 0:
            nbytes = (self.own_shares(rank, live) << cluster.log2_size()) * (STATS + 8)
            ptx.mbarrier_arrive_expect_tx(smem + INBOX_FULL, nbytes)

    @cute.jit
    def put_slices(self, smem, lane, key_group, col_group, rows, exp_scale, o, m, l):
        """This warp's O, m and l of its keys into shared memory, as they are, if possible beside the ring.

        Without clusters they go into the ring, behind its last stage, at one maximum: short steps feel both barriers.
        """
        c = self.config
        if cutlass.const_expr(not self.slices_beside):
            self.sync_consumers()
        for distance in self.operands.sharers:
            l = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in l]
        if self.operands.is_first(lane) & (col_group == 0):
            for j in cutlass.range_constexpr(2):
                ptx.store_shared_f32x2(self.stats(smem, key_group, rows[j]), (m[j], l[j]))
        units = self.format.unit_codes
        step = self.operands.output_step(lane, units)
        for j in cutlass.range_constexpr(2):
            target = smem + self.slices + ((key_group * c.row_tile + rows[j]) * self.o_pad) * 4
            target += col_group * (self.o_columns * 4)
            for first, registers in self.operands.outputs(units, self.o_columns):
                values = [o[by_row[j]] for by_row in registers]
                ptx.store_shared_f32s(target + self.format.merge_offset(first + step), values)
        self.sync_consumers()

    @cute.jit
    def send(self, smem, tidx, rank, live, softcap):
        """Send this CTA's results of O to those that merge them."""
        c = self.config
        out_scale = ptx.load_shared_f32(smem + OUT_SCALE) * 2.0 ** (self.format.v_log2 - self.p_log2_scale)
        score_scale = ptx.load_shared_f32(smem + SCORE_SCALE)
        vectors = c.head_dim // 4
        for index in cutlass.range(tidx, live * vectors, self.consumer_threads, unroll=1):
            row, vector = index // vectors, index % vectors
            natural = self.natural_scale(smem, row, score_scale, softcap)
            values = self.weighted_part(smem, row, vector, natural, out_scale)
            address, barrier = self.destination(smem, rank, index // LANES)
            cluster.send_f32x4(address + index % LANES * 16, values, barrier)

    @cute.jit
    def merge(self, smem, tidx, lane, rank, row0, live, num_live, group_size, softcap, scale_o, target):
        """Send this CTA's results, then merge and write the shares that are its own."""
        c = self.config
        if cutlass.const_expr(not c.exchanges_p):
            self.send(smem, tidx, rank, live, softcap)
            # Last, by the last warp: O need not wait for a row's sum.
            self.send_row(smem, tidx - (self.consumer_threads - 32), rank, live, softcap, num_live)
        if cluster.log2_size() == 1:
            self.merge_shares(smem, tidx, lane, rank, row0, live, group_size, scale_o, target, True)
        else:
            self.merge_shares(smem, tidx, lane, rank, row0, live, group_size, scale_o, target, False)

    @cute.jit
    def merge_shares(
        self, smem, tidx, lane, rank, row0, live, group_size, scale_o, target, two: cutlass.Constexpr[bool]
    ):  # fmt: skip
        """Merge and write the shares that are this CTA's own, once they have come.

        The groups of a warp take four parts of a share at once; in a cluster of `two` CTAs they take two shares.
        """
        c = self.config
        o_base, o_token, o_head, lse, stat_row = target
        log2_size, at_once = (1, 2) if cutlass.const_expr(two) else (cluster.log2_size(), 1)
        own = self.own_shares(rank, live)
        part = lane // LANES % (GROUPS // at_once)
        for turn in cutlass.range(tidx // 32, (own + (at_once - 1)) // at_once, c.consumer_warps, unroll=1):
            # Where it goes, beside the merge and not behind it.
            slot = turn * at_once + lane // (32 // at_once)
            filled = cutlass.min(slot, own - 1)  # of two shares, the second may be none
            share = (slot << log2_size) + rank
            row, piece = share // self.row_shares, share % self.row_shares
            n = row0 + row
            token = n // group_size
            address = o_base + (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
            address = ptx.here(address + (piece * c.SHARE_COLUMNS + lane % LANES * 4) * 2)
            lse_address = ptx.here(lse.toint() + (stat_row + n) * 4)
            ptx.mbarrier_wait(smem + INBOX_FULL, Int32(0), scope="cluster")
            first = smem + self.inbox + ((filled << log2_size) + part) * c.SHARE_PITCH
            parts = [self.part(first, lane)] if cutlass.const_expr(two) else self.parts(first, lane, log2_size)
            columns, peak, total = self.merge_parts(smem, parts, row, GROUPS // at_once, scale_o)
            if (part == 0) & (slot < own):
                pairs = [ptx.pack_f32x2("bf16", columns[e], columns[e + 1]) for e in (0, 2)]
                ptx.store_global_v2(address, pairs)
                if (lane % LANES == 0) & (piece == 0):
                    # A row that saw no key has log2(0) = -inf.
                    ptx.store_global_f32(lse_address, peak + ptx.log2(total) * LN2)

    @cute.jit
    def send_row(self, smem, row, rank, live, softcap, num_live):
        """Send m and l of a row, if there is one of this number."""
        if (row >= 0) & (row < live):
            stats = self.row_stats(smem, row, ptx.load_shared_f32(smem + SCORE_SCALE), softcap, num_live)
            for piece in cutlass.range_constexpr(self.row_shares):
                address, barrier = self.destination(smem, rank, row * self.row_shares + piece)
                cluster.send_f32x2(address + STATS, stats, barrier)

    @cute.jit
    def send_stats(self, smem, lane, rank, live, softcap, num_live):
        """Send m and l of all rows once the computing warps have put theirs: by a warp that has nothing else to do."""
        ptx.mbarrier_wait(smem + STATS_FULL, Int32(0))
        self.send_row(smem, lane, rank, live, softcap, num_live)

    @cute.jit
    def send_columns(self, smem, warp, lane, rank, live, key_group, col_group, rows, exp_scale, o, m, l):
        """Send the columns of O that this warp has, which no other warp of the CTA does."""
        c = self.config
        for distance in self.operands.sharers:
            l = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in l]
        if self.operands.is_first(lane):
            for j in cutlass.range_constexpr(2):
                ptx.store_shared_f32x2(self.stats(smem, key_group, rows[j]), (m[j], l[j]))
            # Each lane for its own: racecheck cannot see a barrier of the warp that ptxas has found superfluous.
            ptx.mbarrier_arrive(smem + STATS_FULL)
        pitch = c.column_pitch * 4
        own = smem + self.exchange + 2 * (c.p_bytes + c.peak_bytes) + warp * (c.row_tile * pitch)
        units = self.format.unit_codes
        step = self.operands.output_step(lane, units)
        out_scale = ptx.load_shared_f32(smem + OUT_SCALE) * 2.0 ** (self.format.v_log2 - self.p_log2_scale)
        for first, registers in self.operands.outputs(units, self.o_columns):
            for j in cutlass.range_constexpr(2):
                columns = [o[by_row[j]] * out_scale for by_row in registers]
                ptx.store_shared_f32s(own + rows[j] * pitch + self.format.merge_offset(first + step), columns)
        cute.arch.sync_warp()
        vectors = self.o_columns // 4
        for index in cutlass.range(lane, live * vectors, 32, unroll=1):
            row, vector = index // vectors, index % vectors
            values = ptx.load_shared_f32x4(own + row * pitch + vector * 16)
            place = row * (c.head_dim // 4) + warp * vectors + vector
            address, barrier = self.destination(smem, rank, place // LANES)
            cluster.send_f32x4(address + place % LANES * 16, values, barrier)

    def weighted_part(self, smem, row, vector, natural, factor):
        """Four columns of a row, its key slices brought to one maximum, summed, and multiplied by `factor`."""
        c = self.config
        source = smem + self.slices + row * (self.o_pad * 4) + self.format.merge_offset(vector * 4)
        peaks = [ptx.load_shared_f32(self.stats(smem, k, row)) for k in range(c.key_warps)]
        parts = [ptx.load_shared_f32x4(source + k * (c.row_tile * self.o_pad * 4)) for k in range(c.key_warps)]
        base = self.base(reduce(cute.arch.fmax, peaks))
        weights = [factor * ptx.exp2((m - base) * (natural * LOG2E)) for m in peaks]
        return [self.dot(weights, column) for column in zip(*parts, strict=True)]

    def merge_parts(self, smem, parts, row, groups, scale_o):
        """Four columns of a row and its maximum and sum, of the parts that a lane and its likes in `groups` have."""
        across = partial(self.across, groups)
        peak = across(cute.arch.fmax, reduce(cute.arch.fmax, [m for m, _, _ in parts]))
        if self.config.sinks:
            sink = ptx.load_shared_f32(smem + ROW_RESULT + row * 8)
            peak = cute.arch.fmax(peak, sink)
        base = self.base(peak)
        weights = [ptx.exp2((m - base) * LOG2E) for m, _, _ in parts]
        total = across(operator.add, self.dot(weights, [l for _, l, _ in parts]))
        if self.config.sinks:
            total += ptx.exp2((sink - base) * LOG2E)
        # A row that saw no key in any chunk gives 0 and -inf; others have at least 1.
        factor = cutlass.select_(total == 0.0, Float32(0.0), scale_o * ptx.reciprocal(total))
        sums = [self.dot(weights, column) for column in zip(*(columns for _, _, columns in parts), strict=True)]
        return [factor * across(operator.add, x) for x in sums], peak, total

    @cute.jit
    def parts(self, first, lane, log2_size):
        """Every GROUPS-th CTA's part from that at `first` on, as many as a cluster may have.

        One that does not exist has a maximum of -inf, and zeros.
        """
        nothing = [Float32(0.0)] * 4
        found = [self.part(first, lane)] + [(Float32(NEG_INF), Float32(0.0), nothing) for _ in range(MOST_PARTS - 1)]
        if log2_size > 2:
            exist = [(i * GROUPS) >> log2_size == 0 for i in range(MOST_PARTS)]
            places = [
                cutlass.select_(there, first + i * (GROUPS * self.config.SHARE_PITCH), first)
                for i, there in enumerate(exist)
            ]
            read = [self.part(place, lane) for place in places]
            found = [
                (
                    cutlass.select_(there, m, Float32(NEG_INF)),
                    cutlass.select_(there, l, Float32(0.0)),
                    [cutlass.select_(there, x, Float32(0.0)) for x in columns],
                )
                for there, (m, l, columns) in zip(exist, read, strict=True)
            ]
        return found

    def part(self, place, lane):
        """(m, l, four columns) of the part of a share at an address."""
        return (*ptx.load_shared_f32x2(place + STATS), ptx.load_shared_f32x4(place + lane % LANES * 16))

    def destination(self, smem, rank, share):
        """Where this CTA's part of a share goes, and the barrier there."""
        log2_size = cluster.log2_size()
        slot = share >> log2_size
        owner = share - (slot << log2_size)
        own = smem + self.inbox + ((slot << log2_size) + rank) * self.config.SHARE_PITCH
        return cluster.in_cta(own, owner), cluster.in_cta(smem + INBOX_FULL, owner)

    def own_shares(self, rank, live):
        """How many shares a CTA merges."""
        log2_size = cluster.log2_size()
        return (live * self.row_shares - rank + (1 << log2_size) - 1) >> log2_size

    @property
    def row_shares(self) -> int:
        """Shares of a row."""
        return self.config.head_dim // self.config.SHARE_COLUMNS

    def across(self, groups, combine, value):
        """A value of the same lane of each of so many groups, combined; each of them gets it."""
        for i in range(groups.bit_length() - 1):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=LANES << i))
        return value

    def dot(self, weights, values):
        """Sum of products."""
        return reduce(operator.add, [w * x for w, x in zip(weights, values, strict=True)])
