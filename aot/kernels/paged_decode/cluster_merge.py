"""Merging what the CTAs of a cluster computed of one sequence, in their shared memory.

The results of a CTA's rows are cut into shares: 32 columns of a row, with the row's m and l. Share s belongs to the CTA
of rank s modulo the cluster, which gets it from every CTA, itself included, by asynchronous stores that are credited to
its barrier; it then writes that part of O. One trip between SMs instead of the three through L2 that partial results,
their counter and the last CTA's loads take, no workspace, and no CTA that merges while the others have gone.
"""

from __future__ import annotations

import math
import operator
from functools import reduce

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cubinery.aot.kernels.common import cluster, ptx
from cubinery.aot.kernels.paged_decode.mma_store import Epilogue
from cubinery.aot.kernels.paged_decode.mma_tile import (
    INBOX_FULL,
    LOG2E,
    OUT_SCALE,
    ROW_RESULT,
    SCORE_SCALE,
    SLICES_BARRIER,
)
from cubinery.runtime.ops.paged_decode.config import MmaConfig

LN2 = math.log(2.0)

LANES = MmaConfig.SHARE_COLUMNS // 4
"""Lanes of a warp that take the columns of a share, four each; every such group takes the parts of other CTAs."""

GROUPS = 32 // LANES
STATS = MmaConfig.SHARE_COLUMNS * 4
"""Where m and l lie in a part of a share, in bytes."""


class ClusterMerge(Epilogue):
    """What the threads of a CTA do for its cluster. `live`: the tile's rows that exist."""

    @cute.jit
    def init(self, smem, lane):
        """The barrier of what will come, made with the others."""
        if lane == 0:
            ptx.mbarrier_init(smem + INBOX_FULL, 1)

    @cute.jit
    def expect(self, smem, tidx, rank, live):
        """Say how much will come."""
        if tidx == 0:
            nbytes = self.own_shares(rank, live) * (self.config.cluster * (STATS + 8))
            ptx.mbarrier_arrive_expect_tx(smem + INBOX_FULL, nbytes)

    @cute.jit
    def put_slices(self, smem, lane, key_group, col_group, rows, exp_scale, o, m, l):
        """This warp's O, m and l of its keys into shared memory, as they are, if possible beside the ring.

        `merge_slices` puts them into the ring, when all are done with its last stage, and brings them to one maximum
        before; a short step feels both barriers.
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

    @cute.jit
    def send(self, smem, tidx, rank, live, softcap):
        """Send this CTA's results of O to those that merge them, once all slices are there.

        By all its threads: those that load are done by then.
        """
        c = self.config
        cute.arch.barrier(barrier_id=SLICES_BARRIER, number_of_threads=c.threads)
        out_scale = ptx.load_shared_f32(smem + OUT_SCALE) * 2.0 ** (self.format.v_log2 - self.p_log2_scale)
        score_scale = ptx.load_shared_f32(smem + SCORE_SCALE)
        vectors = c.head_dim // 4
        for index in cutlass.range(tidx, live * vectors, c.threads, unroll=1):
            row, vector = index // vectors, index % vectors
            natural = self.natural_scale(smem, row, score_scale, softcap)
            values = self.weighted_part(smem, row, vector, natural, out_scale)
            address, barrier = self.destination(smem, rank, index // LANES)
            cluster.send_f32x4(address + index % LANES * 16, values, barrier)

    @cute.jit
    def merge(self, smem, tidx, lane, rank, row0, live, num_live, group_size, softcap, scale_o, target):
        """Send this CTA's results, then merge and write the shares that are its own."""
        c = self.config
        self.send(smem, tidx, rank, live, softcap)
        # Last, by the last warp: O need not wait for a row's sum.
        row = tidx - (self.consumer_threads - 32)
        if (row >= 0) & (row < live):
            stats = self.row_stats(smem, row, ptx.load_shared_f32(smem + SCORE_SCALE), softcap, num_live)
            for piece in cutlass.range_constexpr(self.row_shares):
                address, barrier = self.destination(smem, rank, row * self.row_shares + piece)
                cluster.send_f32x2(address + STATS, stats, barrier)
        o_base, o_token, o_head, lse, stat_row = target
        for slot in cutlass.range(tidx // 32, self.own_shares(rank, live), c.consumer_warps, unroll=1):
            # Where it goes, beside the merge and not behind it.
            share = slot * c.cluster + rank
            row, piece = share // self.row_shares, share % self.row_shares
            n = row0 + row
            token = n // group_size
            address = o_base + (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
            address = ptx.here(address + (piece * c.SHARE_COLUMNS + lane * 4) * 2)
            lse_address = ptx.here(lse.toint() + (stat_row + n) * 4)
            ptx.mbarrier_wait(smem + INBOX_FULL, Int32(0), scope="cluster")
            columns, peak, total = self.merge_share(smem, smem + self.inbox + slot * c.SHARE_PITCH, row, lane, scale_o)
            if lane < LANES:
                pairs = [ptx.pack_f32x2("bf16", columns[e], columns[e + 1]) for e in (0, 2)]
                ptx.store_global_v2(address, pairs)
            if (lane == 0) & (piece == 0):
                # A row that saw no key has log2(0) = -inf.
                ptx.store_global_f32(lse_address, peak + ptx.log2(total) * LN2)

    def weighted_part(self, smem, row, vector, natural, factor):
        """Four columns of a row, its key slices brought to one maximum, summed, and multiplied by `factor`."""
        c = self.config
        source = smem + self.slices + row * (self.o_pad * 4) + self.format.merge_offset(vector * 4)
        peaks = [ptx.load_shared_f32(self.stats(smem, k, row)) for k in range(c.key_warps)]
        parts = [ptx.load_shared_f32x4(source + k * (c.row_tile * self.o_pad * 4)) for k in range(c.key_warps)]
        base = self.base(reduce(cute.arch.fmax, peaks))
        weights = [factor * ptx.exp2((m - base) * (natural * LOG2E)) for m in peaks]
        return [self.dot(weights, column) for column in zip(*parts, strict=True)]

    @cute.jit
    def merge_share(self, smem, parts, row, lane, scale_o):
        """A share of a row that has come from all CTAs: four columns of O a lane, and the row's maximum and sum.

        `parts`: that of rank 0.
        """
        stats, values = self.load_parts(parts, lane)
        peak = self.across(reduce(cute.arch.fmax, [m for m, _ in stats]), cute.arch.fmax)
        if cutlass.const_expr(self.config.sinks):
            sink = ptx.load_shared_f32(smem + ROW_RESULT + row * 8)
            peak = cute.arch.fmax(peak, sink)
        base = self.base(peak)
        weights = [ptx.exp2((m - base) * LOG2E) for m, _ in stats]
        total = self.across(self.dot(weights, [l for _, l in stats]), operator.add)
        if cutlass.const_expr(self.config.sinks):
            total += ptx.exp2((sink - base) * LOG2E)
        # A row that saw no key in any chunk gives 0 and -inf; others have at least 1.
        factor = cutlass.select_(total == 0.0, Float32(0.0), scale_o * ptx.reciprocal(total))
        columns = [factor * self.across(self.dot(weights, x), operator.add) for x in zip(*values, strict=True)]
        return columns, peak, total

    def load_parts(self, parts, lane):
        """(m, l) and four columns of every GROUPS-th CTA's part, from this lane's group on."""
        c = self.config
        pitch = c.share_slots * c.SHARE_PITCH  # from one CTA's parts to the next one's
        first = parts + lane // LANES * pitch
        places = [first + i * GROUPS * pitch for i in range(c.cluster // GROUPS)]
        stats = [ptx.load_shared_f32x2(place + STATS) for place in places]
        return stats, [ptx.load_shared_f32x4(place + lane % LANES * 16) for place in places]

    def destination(self, smem, rank, share):
        """Where this CTA's part of a share goes, and the barrier there."""
        c = self.config
        owner = share % c.cluster
        own = smem + self.inbox + (rank * c.share_slots + share // c.cluster) * c.SHARE_PITCH
        return cluster.in_cta(own, owner), cluster.in_cta(smem + INBOX_FULL, owner)

    def own_shares(self, rank, live):
        """How many shares a CTA merges."""
        return (live * self.row_shares - rank + (self.config.cluster - 1)) // self.config.cluster

    @property
    def row_shares(self) -> int:
        """Shares of a row."""
        return self.config.head_dim // self.config.SHARE_COLUMNS

    def across(self, value, combine):
        """A value of the same lane of each group, combined; each of them gets it."""
        for i in range(GROUPS.bit_length() - 1):
            value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=LANES << i))
        return value

    def dot(self, weights, values):
        """Sum of products."""
        return reduce(operator.add, [w * x for w, x in zip(weights, values, strict=True)])
