"""The tensor core's part of the kernel: one thread that issues every product.

S(i) is a tile's scores, 128 keys by `row_tile` rows; PV(i) adds its values to O, 128 elements of head_dim by
`row_tile` rows a block. The order is S(0), S(1), PV(0), S(2), PV(1), ...: scores of the next tile run under the softmax
of this one. S and P have two buffers. A buffer of S is free once the P made of it has been waited for, so that no
barrier says so.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.paged_decode.tcgen05_tile import (
    EMPTY,
    FULL,
    O_DONE,
    P_FULL,
    Q_FULL,
    S_FULL,
    WIDE_EMPTY,
    WIDE_FULL,
    Tile,
)
from cubinery.runtime.ops.paged_decode.decode_config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM

STEP_BYTES = 32
"""Bytes along K of one product."""

WIDE_COLUMNS = 8
"""Columns of tensor memory along K of one product of f16."""


class Issuer(Tile):
    """What the issuing thread does."""

    @cute.jit
    def issue(self, smem, tmem, tiles):
        """All products of a chunk."""
        stage, phase = Int32(0), Int32(0)
        ptx.mbarrier_wait(smem + Q_FULL, Int32(0))
        stage, phase = self.scores(smem, tmem, Int32(0), stage, phase)
        for i in cutlass.range(tiles, unroll=1):
            if i + 1 < tiles:
                stage, phase = self.scores(smem, tmem, (i + 1) & 1, stage, phase)
            stage, phase = self.outputs(smem, tmem, i, stage, phase)

    @cute.jit
    def scores(self, smem, tmem, slot, stage, phase):
        """S of one tile into a buffer; returns the next ring stage and its phase."""
        d = tmem + self.s_column(slot)
        for block in cutlass.range(self.blocks, unroll=1):
            k, stage, phase, empty = self.take(smem, tmem, stage, phase)
            width = BLOCK_DIM * self.config.q_element_bytes
            q = self.q_matrix.low(smem + self.q_smem + block * (self.rows * width))
            for step in cutlass.range_constexpr(width // STEP_BYTES):
                # Rows of Q lie in pieces of 128 bytes, one behind the other.
                piece, rest = divmod(step * STEP_BYTES, 128)
                b = (self.q_matrix, q + (piece * self.rows * 128 + rest) // 16)
                a = k + (step * WIDE_COLUMNS if self.widens else step * STEP_BYTES // 16)
                self.multiply(d, a, b, self.score_instruction, True if step > 0 else block)
            tc.commit(empty)
        tc.commit(smem + S_FULL + slot * 8)
        return stage, phase

    @cute.jit
    def outputs(self, smem, tmem, i, stage, phase):
        """PV of tile i; returns the next ring stage and its phase."""
        slot = i & 1
        ptx.mbarrier_wait(smem + P_FULL + slot * 8, (i >> 1) & 1)
        tc.fence_after()
        p = self.p_matrix.low(smem + self.p_smem + slot * self.config.p_bytes)
        for block in cutlass.range(self.blocks, unroll=1):
            v, stage, phase, empty = self.take(smem, tmem, stage, phase)
            d = tmem + self.o_column(block)
            keys = STEP_BYTES // self.config.q_element_bytes
            for step in cutlass.range_constexpr(TILE_KEYS // keys):
                a = v + (step * WIDE_COLUMNS if self.widens else step * keys * 8)
                b = (self.p_matrix, p + step * keys)
                self.multiply(d, a, b, self.output_instruction, True if step > 0 else i)
            tc.commit(empty)
        tc.commit(smem + O_DONE + slot * 8)
        return stage, phase

    def multiply(self, d, a, b, instruction, accumulate):
        """One product with a block of K or V, whose place `a` is as `take` gives it."""
        if self.widens:
            tc.mma_ts(self.kind, d, a, b, instruction, accumulate)
        else:
            tc.mma(self.kind, d, (self.kv_matrix, a), b, instruction, accumulate)

    @cute.jit
    def take(self, smem, tmem, stage, phase):
        """Wait for a block of K or V: (its place, the next stage and phase, the barrier that frees it).

        The place is the low word of a descriptor of shared memory, or columns of tensor memory where it is widened.
        """
        full, free = (WIDE_FULL, WIDE_EMPTY) if self.widens else (FULL, EMPTY)
        ptx.mbarrier_wait(smem + full + stage * 8, phase)
        tc.fence_after()
        if cutlass.const_expr(self.widens):
            found = tmem + self.wide_column(stage)
        else:
            found = self.kv_matrix.low(smem + self.ring + stage * self.config.STAGE_BYTES)
        empty = smem + free + stage * 8
        stage, phase = self.advance(stage, phase, self.wide_stages if self.widens else self.stages)
        return found, stage, phase, empty
