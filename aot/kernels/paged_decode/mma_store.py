"""The end of the warp-level MMA kernel: merge the warps' key slices and write O and LSE, or a chunk's partials."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int64, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import store_f32
from cubinery.aot.kernels.paged_decode.mma_mask import Mask
from cubinery.aot.kernels.paged_decode.mma_tile import (
    LOG2E,
    NEG_INF,
    OUT_SCALE,
    ROW_RESULT,
    ROW_SCALE,
    ROW_STATS,
    MmaTile,
)
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MmaConfig


class Epilogue(MmaTile):
    """What the computing warps do after their last stage."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.mask = Mask(config, arch)

    @cute.jit
    def merge_slices(self, smem, lane, key_group, col_group, rows, exp_scale, o, m, l):
        """Bring the key slices of a row to one maximum and put their O side by side in the ring's memory."""
        c = self.config
        for distance in self.operands.sharers:
            l = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in l]
        if self.operands.is_first(lane) & (col_group == 0):
            for j in cutlass.range_constexpr(2):
                ptx.store_shared_f32x2(self.stats(smem, key_group, rows[j]), (m[j], l[j]))
        # Also keeps anyone from overwriting a stage that another warp still reads.
        self.sync_consumers()
        for j in cutlass.range_constexpr(2):
            peak = Float32(NEG_INF)
            for k in cutlass.range_constexpr(c.key_warps):
                peak = cute.arch.fmax(peak, ptx.load_shared_f32(self.stats(smem, k, rows[j])))
            base = self.base(peak)
            factor = ptx.exp2((m[j] - base) * exp_scale[j])
            target = smem + self.ring + ((key_group * c.row_tile + rows[j]) * self.o_pad) * 4
            target += col_group * (self.o_columns * 4)
            units = self.format.unit_codes
            step = self.operands.output_step(lane, units)
            for first, registers in self.operands.outputs(units, self.o_columns):
                values = [o[by_row[j]] * factor for by_row in registers]
                ptx.store_shared_f32s(target + self.format.merge_offset(first + step), values)

    def stats(self, smem, key_group, row):
        return smem + ROW_STATS + (key_group * self.config.row_tile + row) * 8

    @cute.jit
    def finish_rows(self, smem, tidx, score_scale, softcap, num_live):
        """One thread a row: total its slices into the chunk's m, in units of the LSE, and l.

        Rows from `num_live` on hold no query: they see nothing.
        """
        c = self.config
        if tidx < c.row_tile:
            m, total = self.row_stats(smem, tidx, score_scale, softcap, num_live)
            if cutlass.const_expr(c.sinks):
                m, total, shrink = self.mask.add_sink(smem, tidx, m, total)
                ptx.store_shared_f32(smem + ROW_SCALE + tidx * 4, shrink)
            ptx.store_shared_f32x2(smem + ROW_RESULT + tidx * 8, (m, total))

    def row_stats(self, smem, row, score_scale, softcap, num_live):
        """m, in units of the LSE, and l of a row over its slices, without a sink."""
        c = self.config
        natural = self.natural_scale(smem, row, score_scale, softcap)
        peak = Float32(NEG_INF)
        for k in range(c.key_warps):
            peak = cute.arch.fmax(peak, ptx.load_shared_f32(self.stats(smem, k, row)))
        base = self.base(peak)
        total = Float32(0.0)
        for k in range(c.key_warps):
            m = ptx.load_shared_f32(self.stats(smem, k, row))
            l = ptx.load_shared_f32(self.stats(smem, k, row) + 4)
            total = total + l * ptx.exp2((m - base) * (natural * LOG2E))
        m, total = natural * peak, total * 2.0**-self.p_log2_scale
        if c.q_lens:
            m = cutlass.select_(row < num_live, m, Float32(NEG_INF))
            total = cutlass.select_(row < num_live, total, Float32(0.0))
        return m, total

    def natural_scale(self, smem, row, score_scale, softcap):
        """Factor from a row's running maximum to the units of the LSE."""
        natural = score_scale * ptx.load_shared_f32(smem + ROW_SCALE + row * 4)
        return self.at_least_tiny(softcap if self.config.softcap else natural)

    @cute.jit
    def store(self, smem, tidx, row0, n_q, group_size, scale_o, is_split, target, part):
        """Write the tile's rows, to O and LSE or, for a chunk of a sequence, to the partial results."""
        self.sync_consumers()
        self.store_stats(smem, tidx, row0, n_q, is_split, target, part)
        self.store_o(smem, tidx, row0, n_q, group_size, scale_o, is_split, target, part)

    @cute.jit
    def store_stats(self, smem, tidx, row0, n_q, is_split, target, part):
        """LSE of the tile's rows, or their partial m and l."""
        _, _, _, lse, stat_row = target
        _, m_partial, l_partial, part_row = part
        n = row0 + tidx
        if tidx < self.config.row_tile and n < n_q:
            m, total = ptx.load_shared_f32x2(smem + ROW_RESULT + tidx * 8)
            if is_split:
                store_f32(m_partial, part_row + n, m)
                store_f32(l_partial, part_row + n, total)
            else:
                # A row that saw no key has -inf.
                store_f32(lse, stat_row + n, cutlass.select_(total == 0.0, Float32(NEG_INF), m + cute.math.log(total)))

    @cute.jit
    def store_o(self, smem, tidx, row0, n_q, group_size, scale_o, is_split, target, part):
        """Sum the key slices of the merge buffer and write O rows, four columns a thread, coalesced.

        Loops end with the live rows and are not unrolled: this code runs once a launch, and comes from memory.
        """
        c = self.config
        vectors = c.head_dim // 4
        live = cutlass.min(n_q - row0, c.row_tile) * vectors
        out_scale = ptx.load_shared_f32(smem + OUT_SCALE) * 2.0 ** (self.format.v_log2 - self.p_log2_scale)
        if is_split:
            o_partial, _, _, part_row = part
            base = o_partial.toint() + (part_row + row0) * (c.head_dim * 4)
            for index in cutlass.range(tidx, live, self.consumer_threads, unroll=1):
                values = self.row_part(smem, index // vectors, index % vectors, out_scale)
                ptx.store_global_f32x4(base + index * 16, values)
        else:
            o_base, o_token, o_head, _, _ = target
            for index in cutlass.range(tidx, live, self.consumer_threads, unroll=1):
                row = index // vectors
                _, total = ptx.load_shared_f32x2(smem + ROW_RESULT + row * 8)
                factor = cutlass.select_(total == 0.0, Float32(0.0), out_scale * scale_o / total)
                values = self.row_part(smem, row, index % vectors, factor)
                n = row0 + row
                token = n // group_size
                address = o_base + (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
                pairs = [ptx.pack_f32x2("bf16", values[e], values[e + 1]) for e in (0, 2)]
                ptx.store_global_v2(address + index % vectors * 8, pairs)

    def row_part(self, smem, row, vector, factor):
        """Four columns of a row, summed over the key slices, times `factor` and what a sink leaves."""
        c = self.config
        source = smem + self.ring + row * (self.o_pad * 4) + self.format.merge_offset(vector * 4)
        values = ptx.load_shared_f32x4(source)
        for k in range(1, c.key_warps):
            more = ptx.load_shared_f32x4(source + k * (c.row_tile * self.o_pad * 4))
            values = [x + y for x, y in zip(values, more, strict=True)]
        if c.sinks:
            factor = factor * ptx.load_shared_f32(smem + ROW_SCALE + row * 4)
        return [x * factor for x in values]
