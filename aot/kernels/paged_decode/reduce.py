"""Merge the partial results of split sequences.

Few rows: one CTA a query row, whose warps share out the splits. Many rows: one CTA eight rows, a warp each while
the sequence has few splits, else the CTA takes one row after the other. The host picks, by `rows_per_cta`.

Any number of splits: the loop is not unrolled to a compile-time maximum. Sequences that were not split
were written by the decode kernel; their CTAs leave at once.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import store_f32
from cubinery.aot.kernels.paged_decode.abi import reduce_smem_bytes
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MAX_SPLITS, REDUCE_WARPS, ReduceConfig

LOG2E = math.log2(math.e)
NEG_INF = -math.inf
PER_LANE = MAX_SPLITS // 32
"""Splits whose m and l one lane holds."""
PER_WARP = 32 // REDUCE_WARPS
"""Splits of a warp among 32, whose O it requests at once."""
FEW_SPLITS = 16
"""Up to so many splits one warp merges a row by itself."""


class PagedDecodeReduce:
    """Traces the reduction of one head_dim."""

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config
        self.lanes = min(32, config.head_dim // 4)  # that have columns of a row
        self.vectors = max(1, config.head_dim // 128)  # float4 of a lane
        self.batch = 8 // self.vectors  # splits whose O a lone warp requests at once

    @cute.jit
    def __call__(
        self,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        splits: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        rows_per_cta: Int32,
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        scale_o: Float32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix("cubinery_paged_decode_reduce", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            o_partial, m_partial, l_partial, splits, o, lse, num_kv_heads, n_q, group_size, rows_per_cta, o_seq,
            o_token, o_head, scale_o,
        ).launch(
            grid=(1, 1, 1),
            block=(32 * REDUCE_WARPS, 1, 1),
            smem=reduce_smem_bytes(self.config),
            stream=stream,
            use_pdl=self.config.pdl,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        splits: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        rows_per_cta: Int32,
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        scale_o: Float32,
    ) -> None:
        d = self.config.head_dim
        tidx, _, _ = cute.arch.thread_idx()
        block, seq, _ = cute.arch.block_idx()
        warp, lane = tidx // 32, tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        n_splits, first_slot = ptx.load_global_v2(splits.toint() + Int64(seq) * 8)
        if n_splits > 1:
            rows = num_kv_heads * n_q
            first_row = Int64(first_slot) * rows
            o_seq_base = o.toint() + Int64(seq) * o_seq * 2
            if rows_per_cta > 1 and n_splits <= FEW_SPLITS:
                row = block * rows_per_cta + warp
                if row < rows:
                    first = first_row + row
                    weights, base, total = self.weigh(m_partial, l_partial, first, rows, lane, n_splits, 1)
                    acc = [Float32(0.0)] * (4 * self.vectors)
                    for batch in cutlass.range_constexpr(FEW_SPLITS // self.batch):
                        if n_splits > batch * self.batch:
                            splits_now = [batch * self.batch + t for t in range(self.batch)]
                            values = [self.load_o(o_partial, first, rows, lane, j, n_splits) for j in splits_now]
                            acc = self.add(acc, values, weights[0], splits_now)
                    factor = self.factor(scale_o, total)
                    target = o_seq_base + self.row_offset(row, n_q, group_size, o_token, o_head)
                    if lane < self.lanes:
                        for v in cutlass.range_constexpr(self.vectors):
                            scaled = [x * factor for x in acc[4 * v : 4 * v + 4]]
                            pairs = [ptx.pack_f32x2("bf16", scaled[e], scaled[e + 1]) for e in (0, 2)]
                            ptx.store_global_v2(target + (v * 128 + lane * 4) * 2, pairs)
                    if lane == 0:
                        store_f32(lse, Int64(seq) * rows + row, self.lse(base, total))
            else:
                for r in cutlass.range(rows_per_cta, unroll=1):
                    row = block * rows_per_cta + r
                    if row < rows:
                        first = first_row + row
                        # Asked for before the weights are known: one round trip to memory instead of two.
                        ahead = [
                            self.load_o(o_partial, first, rows, lane, warp + t * REDUCE_WARPS, n_splits)
                            for t in range(PER_WARP)
                        ]
                        weights, base, total = self.weigh(m_partial, l_partial, first, rows, lane, n_splits, PER_LANE)
                        acc = [Float32(0.0)] * (4 * self.vectors)
                        acc = self.add(acc, ahead, weights[0], [warp + t * REDUCE_WARPS for t in range(PER_WARP)])
                        for k in cutlass.range_constexpr(1, PER_LANE):
                            if n_splits > 32 * k:
                                lanes = [warp + t * REDUCE_WARPS for t in range(PER_WARP)]
                                values = [
                                    self.load_o(o_partial, first, rows, lane, 32 * k + j, n_splits) for j in lanes
                                ]
                                acc = self.add(acc, values, weights[k], lanes)
                        if lane < self.lanes:
                            for v in cutlass.range_constexpr(self.vectors):
                                sums = smem + (warp * d + v * 128 + lane * 4) * 4
                                ptx.store_shared_f32x4(sums, acc[4 * v : 4 * v + 4])
                        cute.arch.sync_threads()
                        target = o_seq_base + self.row_offset(row, n_q, group_size, o_token, o_head)
                        for first_column in cutlass.range_constexpr(0, d, 32 * REDUCE_WARPS):
                            column = first_column + tidx
                            if column < d:
                                value = Float32(0.0)
                                for w in cutlass.range_constexpr(REDUCE_WARPS):
                                    value = value + ptx.load_shared_f32(smem + (w * d + column) * 4)
                                ptx.store_global_bf16(target + column * 2, value * self.factor(scale_o, total))
                        if tidx == 0:
                            store_f32(lse, Int64(seq) * rows + row, self.lse(base, total))
                        cute.arch.sync_threads()  # before the next row overwrites the sums

    def weigh(self, m_partial, l_partial, first, rows, lane, n_splits, per_lane):
        """(weights of splits lane + 32 k, the maximum or 0, the row's sum), which every warp finds for itself."""
        peaks = [self.load_stat(m_partial, first, rows, lane + 32 * k, n_splits, NEG_INF) for k in range(per_lane)]
        sums = [self.load_stat(l_partial, first, rows, lane + 32 * k, n_splits, 0.0) for k in range(per_lane)]
        peak = peaks[0]
        for m in peaks[1:]:
            peak = cute.arch.fmax(peak, m)
        for distance in (1, 2, 4, 8, 16):
            peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=distance))
        base = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
        weights = [ptx.exp2((m - base) * LOG2E) for m in peaks]
        total = Float32(0.0)
        for weight, l in zip(weights, sums, strict=True):
            total = total + weight * l
        for distance in (1, 2, 4, 8, 16):
            total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)
        return weights, base, total

    def factor(self, scale_o, total):
        """What the weighted sum of O is multiplied by: 0 where no row of any split saw a key."""
        return cutlass.select_(total == 0.0, Float32(0.0), scale_o / total)

    def lse(self, base, total):
        """The row's LSE, -inf where it saw no key."""
        return cutlass.select_(total == 0.0, Float32(NEG_INF), base + cute.math.log(total))

    def row_offset(self, row, n_q, group_size, o_token, o_head):
        """Bytes from a sequence's O to a packed row's."""
        head = row // n_q
        n = row - head * n_q
        token = n // group_size
        q_head = head * group_size + n - token * group_size
        return (Int64(token) * o_token + Int64(q_head) * o_head) * 2

    def add(self, acc, values, weights, lanes):
        """acc + weight * O for rows whose weights these lanes hold."""
        for row, lane in zip(values, lanes, strict=True):
            weight = cute.arch.shuffle_sync(weights, offset=lane)
            acc = [x + weight * y for x, y in zip(acc, row, strict=True)]
        return acc

    def load_vectors(self, address):
        """This lane's columns of one partial row of O: four of every 128."""
        return [x for v in range(self.vectors) for x in ptx.load_global_f32x4(address + v * 512)]

    @cute.jit
    def load_o(self, o_partial, first, rows, lane, split, n_splits):
        """`load_vectors` of a split, zeros past the last one and in lanes past the row."""
        values = [Float32(0.0)] * (4 * self.vectors)
        if (split < n_splits) & (lane < self.lanes):
            row = first + Int64(split) * rows
            values = self.load_vectors(o_partial.toint() + (row * self.config.head_dim + lane * 4) * 4)
        return values

    @cute.jit
    def load_stat(self, pointer, first, rows, split, n_splits, absent):
        """m or l of a split, `absent` past the last one."""
        value = Float32(absent)
        if split < n_splits:
            value = ptx.load_global_f32(pointer.toint() + (first + Int64(split) * rows) * 4)
        return value


def entry(config: ReduceConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""
    pointers = [
        make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)
        for dtype in (Float32, Float32, Float32, Int32, BFloat16, Float32)
    ]
    return PagedDecodeReduce(config), (*pointers, *[Int32(1)] * 7, Float32(1.0), cuda.CUstream(0))
