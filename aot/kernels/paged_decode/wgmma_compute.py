"""The consumers of the warpgroup-level MMA kernel: scores, online softmax and output from widened tiles."""

from __future__ import annotations

import cutlass
from cutlass import cute

from cubinery.aot.kernels.common import ptx, wgmma
from cubinery.aot.kernels.paged_decode.mma_compute import Consumer
from cubinery.aot.kernels.paged_decode.mma_tile import WIDE_EMPTY, WIDE_FULL
from cubinery.aot.kernels.paged_decode.wgmma_format import BLOCK_COLUMNS, PITCH
from cubinery.aot.kernels.paged_decode.wgmma_tile import WgmmaTile
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import WgmmaConfig
from cubinery.runtime.ops.paged_decode.wgmma_config import WIDE_STAGES

STEP_KEYS = 64
"""Keys of one softmax step."""

_ATOM = 8 * PITCH
"""Bytes of eight keys of a block: the stride between groups of them."""


class WgmmaConsumer(WgmmaTile, Consumer):
    """Two warpgroups, each with 64 query rows, and with half of a tile's keys where there are no more rows."""

    def __init__(self, config: WgmmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.step_keys = STEP_KEYS
        self.ring = self.wide

    @cute.jit
    def attend(
        self, smem, warp, lane, q_address, q_frags, k_lane, v_lane, exp_scale, cap_scales, length, depth, limits, key,
        o, m, l, stage, phase,
    ):  # fmt: skip
        """One tile of K and one of V. `limits` masks scores; None: all keys are visible. V is clean past the end."""
        c = self.config
        k_tile, k_full, k_empty = stage * c.wide_bytes, smem + WIDE_FULL + stage * 8, smem + WIDE_EMPTY + stage * 8
        ptx.mbarrier_wait(k_full, phase)
        stage, phase = self.advance(stage, phase, WIDE_STAGES)
        v_tile, v_full, v_empty = stage * c.wide_bytes, smem + WIDE_FULL + stage * 8, smem + WIDE_EMPTY + stage * 8
        v_phase = phase
        stage, phase = self.advance(stage, phase, WIDE_STAGES)
        for step in cutlass.range(self.warp_keys // STEP_KEYS, unroll=1):
            first = step * STEP_KEYS
            scores = self.tile_scores(k_lane[0] + k_tile + first * PITCH, q_frags)
            if step == self.warp_keys // STEP_KEYS - 1:
                self.release(lane, (k_empty,))
            if cutlass.const_expr(c.softcap):
                scores = self.mask.cap(scores, cap_scales)
            if cutlass.const_expr(limits is not None):
                scores = self.mask.mask_scores(scores, key + first, limits)
            p, m, l, o = self.softmax(scores, m, l, exp_scale, o)
            ptx.mbarrier_wait(v_full, v_phase)
            o = self.add_values(v_lane[0] + v_tile + first * PITCH, p, o)
        self.release(lane, (v_empty,))
        return o, m, l, stage, phase

    def tile_scores(self, k, q_frags):
        """S[64 rows][STEP_KEYS], spread as tiles of 8 keys: a lane has rows g, g + 8 and keys 2c, 2c + 1."""
        columns = [16 * step for step in range(self.config.head_dim // 16)]
        steps = [x // BLOCK_COLUMNS * self.block_bytes + x % BLOCK_COLUMNS * 2 for x in columns]
        b = wgmma.descriptor(k, leading=16, stride=_ATOM)
        flat = wgmma.multiply_f16([x for fragment in q_frags for x in fragment], b, steps, STEP_KEYS)
        return [flat[n : n + 4] for n in range(0, len(flat), 4)]

    def add_values(self, v, p, o):
        """O += P V."""
        b = wgmma.descriptor(v, leading=self.block_bytes, stride=_ATOM)
        return wgmma.accumulate_f16(
            o, [x for fragment in p for x in fragment], b, [16 * PITCH * i for i in range(len(p))]
        )
