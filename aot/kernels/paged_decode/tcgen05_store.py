"""The end of the tensor-memory kernel: total the rows, write O and LSE, or a chunk's partial results."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.common.memory import store_f32
from cubinery.aot.kernels.paged_decode.constants import NEG_INF
from cubinery.aot.kernels.paged_decode.tcgen05_tile import (
    MAXIMA,
    O_DONE,
    ROW_FACTOR,
    ROW_OFFSET,
    ROW_SCALE,
    SOFTMAX_WARPS,
    SUMS,
    Tile,
)


class Epilogue(Tile):
    """What the softmax warps do after the last tile."""

    @cute.jit
    def finish_rows(
        self, smem, tidx, row0, n_q, group_size, score_scale, out_scale, scale_o, is_split, target, part
    ):  # fmt: skip
        """One thread a row: its LSE, or partial m and l, to global memory; factor and place of its O to shared."""
        self.sync_softmax()
        _, o_token, o_head, lse, stat_row = target
        _, m_partial, l_partial, part_row = part
        n = row0 + tidx
        if tidx < self.rows and n < n_q:
            scaled = Float32(0.0)
            for warp in cutlass.range_constexpr(SOFTMAX_WARPS):
                scaled = scaled + ptx.load_shared_f32(smem + SUMS + (warp * self.rows + tidx) * 4)
            total = scaled * 2.0**-self.p_log2_scale
            peak = ptx.load_shared_f32(smem + MAXIMA + tidx * 4)
            peak = cute.arch.fmax(peak, ptx.load_shared_f32(smem + MAXIMA + (self.rows + tidx) * 4))
            natural = score_scale
            if cutlass.const_expr(self.widens):
                natural = self.at_least_tiny(natural * ptx.load_shared_f32(smem + ROW_SCALE + tidx * 4))
            m = natural * peak
            factor = out_scale * 2.0**-self.p_log2_scale
            if is_split:
                store_f32(m_partial, part_row + n, m)
                store_f32(l_partial, part_row + n, total)
            else:
                # A row that saw no key gives 0 and -inf.
                store_f32(lse, stat_row + n, cutlass.select_(total == 0.0, Float32(NEG_INF), m + cute.math.log(total)))
                factor = cutlass.select_(total == 0.0, Float32(0.0), out_scale * scale_o / scaled)
            token = n // group_size
            offset = (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
            ptx.store_shared_f32(smem + ROW_FACTOR + tidx * 4, factor)
            ptx.store_shared_i64(smem + ROW_OFFSET + tidx * 8, offset)
        self.sync_softmax()

    @cute.jit
    def store_o(self, smem, tidx, tmem, tiles, row0, n_q, is_split, target, part):
        """O, a thread an element of head_dim, so that a warp's stores of a row coalesce."""
        o_base, _, _, _, _ = target
        o_partial, _, _, part_row = part
        last = tiles - 1
        ptx.mbarrier_wait(smem + O_DONE + (last & 1) * 8, (last >> 1) & 1)
        tc.fence_after()
        lanes = tmem + (tidx // 32 << 21)
        for block in cutlass.range(self.blocks, unroll=1):
            values = tc.load(lanes + self.o_column(block), self.rows)
            column = block * 128 + tidx
            if is_split:
                address = o_partial.toint() + ((part_row + row0) * self.config.head_dim + column) * 4
                for row in cutlass.range_constexpr(self.rows):
                    if row0 + row < n_q:
                        factor = ptx.load_shared_f32(smem + ROW_FACTOR + row * 4)
                        ptx.store_global_f32(address + row * (self.config.head_dim * 4), values[row] * factor)
            else:
                for row in cutlass.range_constexpr(self.rows):
                    if row0 + row < n_q:
                        factor = ptx.load_shared_f32(smem + ROW_FACTOR + row * 4)
                        offset = ptx.load_shared_i64(smem + ROW_OFFSET + row * 8)
                        ptx.store_global_bf16(o_base + offset + column * 2, values[row] * factor)

    @cute.jit
    def free(self, tidx, tmem):
        """Give tensor memory back, once every warp has read O."""
        tc.fence_before()
        self.sync_softmax()
        if cute.arch.make_warp_uniform(tidx // 32) == Int32(0):
            tc.fence_after()
            tc.free(tmem, self.tmem_columns)
