"""Merge the partial results of split sequences: one CTA a query row, its warps take turns over the splits.

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
from cubinery.aot.kernels.paged_decode.abi import REDUCE_WARPS, reduce_smem_bytes
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MAX_SPLITS, ReduceConfig

LOG2E = math.log2(math.e)
NEG_INF = -math.inf
PER_LANE = MAX_SPLITS // 32
"""Splits whose m and l one lane holds."""
AHEAD = 32 // REDUCE_WARPS
"""Splits of a warp among 32, whose O it requests at once; of the first 32 before their weights are known."""


class PagedDecodeReduce:
    """Traces the reduction of one head_dim."""

    def __init__(self, config: ReduceConfig) -> None:
        self.config = config
        self.vectors = config.head_dim // 128  # float4 of a lane

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
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        scale_o: Float32,
        stream: cuda.CUstream,
    ) -> None:
        self.kernel.set_name_prefix("cubinery_paged_decode_reduce", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            o_partial, m_partial, l_partial, splits, o, lse, num_kv_heads, n_q, group_size, o_seq, o_token, o_head,
            scale_o,
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
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        scale_o: Float32,
    ) -> None:
        d = self.config.head_dim
        tidx, _, _ = cute.arch.thread_idx()
        row, seq, _ = cute.arch.block_idx()
        warp, lane = tidx // 32, tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()
        if cutlass.const_expr(self.config.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        n_splits, first_slot = ptx.load_global_v2(splits.toint() + Int64(seq) * 8)
        if n_splits > 1:
            rows = num_kv_heads * n_q
            first = Int64(first_slot) * rows + row
            o_row = o_partial.toint() + (first * d + lane * 4) * 4
            o_step = Int64(rows) * (d * 4)

            # Everything that waits for nothing else is requested first: one round trip to memory instead of three.
            ahead = [self.load_o(o_row, o_step, warp + t * REDUCE_WARPS, n_splits) for t in range(AHEAD)]
            peaks = [self.load_stat(m_partial, first, rows, lane + 32 * k, n_splits, NEG_INF) for k in range(PER_LANE)]
            sums = [self.load_stat(l_partial, first, rows, lane + 32 * k, n_splits, 0.0) for k in range(PER_LANE)]

            # Every warp finds the row's maximum and sum for itself.
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

            acc = self.add([Float32(0.0)] * (4 * self.vectors), ahead, weights[0], warp)
            for k in cutlass.range_constexpr(1, PER_LANE):
                if n_splits > 32 * k:
                    splits_now = [32 * k + warp + t * REDUCE_WARPS for t in range(AHEAD)]
                    values = [self.load_o(o_row, o_step, split, n_splits) for split in splits_now]
                    acc = self.add(acc, values, weights[k], warp)
            for v in cutlass.range_constexpr(self.vectors):
                ptx.store_shared_f32x4(smem + (warp * d + v * 128 + lane * 4) * 4, acc[4 * v : 4 * v + 4])
            cute.arch.sync_threads()

            # No row of any split saw a key: O = 0 and LSE = -inf.
            factor = cutlass.select_(total == 0.0, Float32(0.0), scale_o / total)
            head = row // n_q
            n = row - head * n_q
            token = n // group_size
            target = (
                Int64(seq) * o_seq + Int64(token) * o_token + Int64(head * group_size + n - token * group_size) * o_head
            )
            if tidx < d:
                value = Float32(0.0)
                for w in cutlass.range_constexpr(REDUCE_WARPS):
                    value = value + ptx.load_shared_f32(smem + (w * d + tidx) * 4)
                cute.make_tensor(o + (target + tidx), cute.make_layout(1))[0] = (value * factor).to(BFloat16)
            if tidx == 0:
                result = cutlass.select_(total == 0.0, Float32(NEG_INF), base + cute.math.log(total))
                store_f32(lse, Int64(seq) * rows + row, result)

    def add(self, acc, values, weights, warp):
        """acc + weight * O of this warp's splits among 32, whose weights the 32 lanes hold."""
        for t, row in enumerate(values):
            weight = cute.arch.shuffle_sync(weights, offset=warp + t * REDUCE_WARPS)
            acc = [x + weight * y for x, y in zip(acc, row, strict=True)]
        return acc

    def load_vectors(self, address):
        """This lane's columns of one partial row of O: four of every 128."""
        return [x for v in range(self.vectors) for x in ptx.load_global_f32x4(address + v * 512)]

    @cute.jit
    def load_o(self, o_row, o_step, split, n_splits):
        """`load_vectors` of a split, zeros past the last one."""
        values = [Float32(0.0)] * (4 * self.vectors)
        if split < n_splits:
            values = self.load_vectors(o_row + Int64(split) * o_step)
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
    return PagedDecodeReduce(config), (*pointers, *[Int32(1)] * 6, Float32(1.0), cuda.CUstream(0))
