"""Merge the partial results of split sequences: one CTA a query row, each warp every fourth split.

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
from cubinery.aot.kernels.common.memory import load_f32, load_i32, store_f32
from cubinery.aot.kernels.paged_decode.abi import REDUCE_WARPS, reduce_smem_bytes
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import ReduceConfig

LOG2E = math.log2(math.e)
NEG_INF = -math.inf


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

        n_splits = load_i32(splits, Int64(seq) * 2)
        if n_splits > 1:
            rows = num_kv_heads * n_q
            first = Int64(load_i32(splits, Int64(seq) * 2 + 1)) * rows + row

            # Every warp finds the row's maximum and sum for itself: at most eight loads a lane.
            peak = Float32(NEG_INF)
            for j in cutlass.range(lane, n_splits, 32, unroll=1):
                peak = cute.arch.fmax(peak, load_f32(m_partial, first + Int64(j) * rows))
            for distance in (1, 2, 4, 8, 16):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=distance))
            base = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
            total = Float32(0.0)
            for j in cutlass.range(lane, n_splits, 32, unroll=1):
                weight = ptx.exp2((load_f32(m_partial, first + Int64(j) * rows) - base) * LOG2E)
                total = total + weight * load_f32(l_partial, first + Int64(j) * rows)
            for distance in (1, 2, 4, 8, 16):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=distance)

            acc = [Float32(0.0)] * (4 * self.vectors)
            for j in cutlass.range(warp, n_splits, REDUCE_WARPS, unroll=4):
                weight = ptx.exp2((load_f32(m_partial, first + Int64(j) * rows) - base) * LOG2E)
                source = o_partial.toint() + ((first + Int64(j) * rows) * d + lane * 4) * 4
                values = [x for v in range(self.vectors) for x in ptx.load_global_f32x4(source + v * 512)]
                acc = [x + weight * y for x, y in zip(acc, values, strict=True)]
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
            for v in cutlass.range_constexpr(self.vectors):
                column = tidx + v * 128
                value = Float32(0.0)
                for w in cutlass.range_constexpr(REDUCE_WARPS):
                    value = value + ptx.load_shared_f32(smem + (w * d + column) * 4)
                cute.make_tensor(o + (target + column), cute.make_layout(1))[0] = (value * factor).to(BFloat16)
            if tidx == 0:
                result = cutlass.select_(total == 0.0, Float32(NEG_INF), base + cute.math.log(total))
                store_f32(lse, Int64(seq) * rows + row, result)


def entry(config: ReduceConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""
    pointers = [
        make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)
        for dtype in (Float32, Float32, Float32, Int32, BFloat16, Float32)
    ]
    return PagedDecodeReduce(config), (*pointers, *[Int32(1)] * 6, Float32(1.0), cuda.CUstream(0))
