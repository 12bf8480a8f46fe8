"""Consumers that exchange P, so that each sums columns of its own over all keys of a stage.

A warp scores its keys, and puts its P, relative to its maximum, into shared memory. Behind one barrier a stage all
warps know all maxima, take the largest, and multiply the whole P by their columns of V. So O lies in registers once,
instead of once a warp, and a short step that has read its last key has nothing left to add up.
"""

from __future__ import annotations

from functools import reduce

import cutlass
from cutlass import Float32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_compute import Consumer
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MmaConfig


class ExchangingConsumer(Consumer):
    """The computing warps of a CTA with `MmaConfig.exchanges_p`: 8 query rows, keys first."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        assert self.warp_keys == self.step_keys, "a warp scores its keys of a stage at once"
        self.k_blocks = config.stage_keys // 16
        self.own_k_blocks = self.warp_keys // 16
        self.v_loads = self.format.v_loads // config.key_warps
        self.peaks = self.exchange + 2 * config.p_bytes

    def v_lane(self, smem, warp, lane, slice_key, col_group):
        """This warp's columns of a stage's first 16 keys."""
        found = self.format.v_lane(smem + self.ring, 0, lane, col_group)
        return [self.format.chunk_address(found[0], warp * (2 * self.v_loads)), *found[1:]]

    @cute.jit
    def attend(
        self, smem, warp, lane, q_address, q_frags, k_lane, v_lane, exp_scale, cap_scales, length, depth, limits, key,
        o, m, l, stage, phase,
    ):  # fmt: skip
        """One stage of K and one of V, as `Consumer.attend`. Between stages all warps have the same m."""
        c = self.config
        k_offset, k_empty, v_offset, v_full, v_empty, v_phase, stage, phase = self.wait_for_k(smem, stage, phase, depth)
        stage_key = key - warp * self.warp_keys - self.operands.first_key(lane)
        parity = stage_key // c.stage_keys % 2
        p_area, peaks = smem + self.exchange + parity * c.p_bytes, smem + self.peaks + parity * c.peak_bytes

        scores = self.scores(self.format.move(k_lane, k_offset, 0), q_address, q_frags)
        if cutlass.const_expr(limits is None or self.mask.may_be_early):
            self.release(lane, (k_empty,))
        if cutlass.const_expr(c.softcap):
            scores = self.mask.cap(scores, cap_scales)
        if cutlass.const_expr(limits is not None):
            scores = self.mask.mask_scores(scores, key, limits)
        p, own_m, l, _ = self.softmax(scores, m, l, exp_scale, [])
        for t, pair in enumerate(p):
            ptx.store_shared_v2(p_area + ((warp * self.own_k_blocks + t) * 32 + lane) * 8, pair)
        rows = self.operands.rows(lane)
        if self.operands.is_first(lane):
            for j in cutlass.range_constexpr(2):
                ptx.store_shared_f32(peaks + (rows[j] * c.key_warps + warp) * 4, own_m[j])
        cute.arch.sync_warp()
        self.sync_consumers()
        p = [list(ptx.load_shared_b64(p_area + (s * 32 + lane) * 8)) for s in range(self.k_blocks)]
        p, m, l, o = self.to_common_maximum(peaks, lane, p, own_m, m, l, exp_scale, o)
        ptx.mbarrier_wait(v_full, v_phase)
        keep = None
        if cutlass.const_expr(limits is not None):
            keep = length - stage_key - lane % 4 * 2
        o = self.accumulate(self.format.move(v_lane, v_offset, 0), p, keep, o)
        if cutlass.const_expr(limits is None or self.mask.may_be_early):
            self.release(lane, (v_empty,))
        return o, m, l, stage, phase

    @cute.jit
    def to_common_maximum(self, peaks, lane, p, own_m, m, l, exp_scale, o):
        """Bring P of all warps, this warp's l, and O to the largest maximum; returns P, m, l, O.

        P is an operand whose lanes have row lane // 4; O and m are by `Operands.rows`.
        """
        c = self.config
        address = peaks + lane // 4 * (c.key_warps * 4)
        of_warps = [x for n in range(0, c.key_warps, 4) for x in ptx.load_shared_f32x4(address + n * 4)]
        peak = reduce(cute.arch.fmax, of_warps)
        new = [cute.arch.shuffle_sync(peak, offset=row * 4) for row in self.operands.rows(lane)]
        if cute.arch.vote_any_sync((new[0] != m[0]) | (new[1] != m[1])):
            # Of lane // 4, from a lane that has that row.
            scales = [cute.arch.shuffle_sync(x, offset=lane // 8) for x in exp_scale]
            scale = cutlass.select_(lane // 4 % 2 == 0, scales[0], scales[1])
            base = self.base(peak)
            factors = [ptx.exp2((x - base) * scale) for x in of_warps]
            p = [[self.scaled(x, factors[s // self.own_k_blocks]) for x in pair] for s, pair in enumerate(p)]
            bases = [self.base(x) for x in new]
            alpha = [ptx.exp2((m[j] - bases[j]) * exp_scale[j]) for j in (0, 1)]
            o = [x * alpha[self.operands.row(n % 4)] for n, x in enumerate(o)]
            l = [x * ptx.exp2((own_m[j] - bases[j]) * exp_scale[j]) for j, x in enumerate(l)]
            m = new
        return p, m, l, o

    def scaled(self, pair, factor):
        """Two values of P times a factor."""
        unpack = ptx.unpack_f16x2 if self.mma_dtype == "f16" else ptx.unpack_bf16x2
        return ptx.pack_f32x2(self.mma_dtype, *(x * factor for x in unpack(pair)))

    def accumulate(self, v_lane, p, keep, o):
        """O += P V over all keys of a stage, in two sums side by side."""
        fmt = self.format
        sums = [list(o), [Float32(0.0)] * len(o)]
        for s, operand in enumerate(p):
            masks = None if keep is None else [self.row_mask(keep - 16 * s - 8 * h) for h in (0, 1)]
            for load in range(self.v_loads):
                fragments = fmt.v_fragments(fmt.move(v_lane, 0, 16 * s), load, masks)
                self.operands.accumulate(self.mma_dtype, operand, fragments, sums[s % 2])
        return [a + b for a, b in zip(*sums, strict=True)]
