"""The consumers of the warp-level MMA kernel: Q staging, scores, online softmax, output accumulation."""

from __future__ import annotations

import operator
from functools import partial, reduce

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_mask import Mask
from cubinery.aot.kernels.paged_decode.mma_tile import EMPTY, FULL, LOG2E, NEG_INF, ROW_SCALE, MmaTile
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MmaConfig


class Consumer(MmaTile):
    """The computing warps, until their slices' results lie in registers."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.mask = Mask(config, arch)

    @cute.jit
    def stage_q(self, smem, warp, lane, q_base, row0, n_q, group_size, q_token, q_head):
        """Q tile to shared memory, 16-byte chunks swizzled by row; rows past n_q become zeros.

        Elements go where the format's fragments of K want them. For an f16 MMA, each row of bf16 is scaled by a
        power of two; e4m3 fits f16 and bf16 as it is.
        """
        c = self.config
        rows_at_once = max(1, 256 // c.head_dim)
        rows_per_warp = max(rows_at_once, c.row_tile // c.consumer_warps)
        if warp * rows_per_warp < c.row_tile:  # few short rows leave some warps without any
            for i in cutlass.range_constexpr(rows_per_warp // rows_at_once):
                row = warp * rows_per_warp + i * rows_at_once
                self.stage_rows(smem, lane, q_base, row, row0, n_q, group_size, q_token, q_head)

    @cute.jit
    def stage_rows(self, smem, lane, q_base, row, row0, n_q, group_size, q_token, q_head):
        """The rows of Q that a warp moves at once, from `row` on: 8 elements a lane, twice that of long heads."""
        c = self.config
        lanes = min(32, c.head_dim // 8)  # lanes of one row
        row = row + lane // lanes
        n = row0 + row
        vectors = [lane % lanes + 32 * i for i in range(max(1, c.head_dim // 256))]  # of 8 elements each
        words = [Uint32(0)] * (2 * self.q_element_bytes * len(vectors))
        if n < n_q:
            token = n // group_size
            element = Int64(token) * q_token + Int64(n - token * group_size) * q_head
            address = q_base + element * self.q_element_bytes
            words = [w for vector in vectors for w in self.load_q_vector(address + vector * 8 * self.q_element_bytes)]
        row_smem = smem + self.q_smem + row * (c.head_dim * 2)
        down = Float32(2.0**self.format.k_log2)  # undoes the scaling of the row
        pairs = words
        if cutlass.const_expr(c.q_dtype == "e4m3"):
            halves = [pair for word in words for pair in ptx.e4m3x4_to_f16x2x2(word)]
            pairs = self.format_pairs([x for pair in halves for x in ptx.unpack_f16x2(pair)])
        elif cutlass.const_expr(self.mma_dtype == "f16"):
            values = [x for word in words for x in ptx.unpack_bf16x2(word)]
            amax = Float32(0.0)
            for x in values:
                amax = cute.arch.fmax(amax, cute.arch.fmax(x, -x))
            for distance in self.row_shuffles(lanes):
                amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=distance))
            # From 2^-63 down a row counts as zero: its factor must not drive the score scale to zero.
            exponent = cutlass.min(cutlass.max(ptx.float_bits(amax) >> 23, 64), 254)
            up = ptx.bits_to_float((268 - exponent) << 23)
            down = ptx.bits_to_float((exponent - 14 + self.format.k_log2) << 23)
            pairs = self.format_pairs([x * up for x in values])
        for i, vector in enumerate(vectors):
            self.format.store_q(row_smem, row, vector, pairs[4 * i : 4 * i + 4])
        if lane % lanes == 0:
            ptx.store_shared_f32(smem + ROW_SCALE + row * 4, down)

    def load_q_vector(self, address):
        """Eight elements of Q."""
        return (ptx.load_global_v4 if self.q_element_bytes == 2 else ptx.load_global_b64)(address)

    def format_pairs(self, values):
        """Elements of Q, eight by eight, as the registers that the format stores."""
        eights = range(0, len(values), 8)
        return [
            ptx.pack_f32x2(self.mma_dtype, values[n + a], values[n + b]) for n in eights for a, b in self.format.q_pairs
        ]

    def row_shuffles(self, lanes):
        return [1 << i for i in range(lanes.bit_length() - 1)]

    @cute.jit
    def consume(self, smem, warp, lane, row0, group_size, span, softcap, key_begin, num_stages, depth, score_scale):
        """Online softmax over this warp's slice of every stage; returns its place, scales, O, m and l.

        `span` is what `Mask` takes, `depth` how many slots of the ring are in use.
        """
        c = self.config
        row_group = warp % c.row_warps
        col_group = warp // c.row_warps % c.col_warps
        key_group = warp // (c.row_warps * c.col_warps)
        q_row, q_chunk = self.operands.q_lane(lane)
        first_row = row_group * self.operands.warp_rows
        q_address = smem + self.q_smem + (first_row + q_row) * (c.head_dim * 2) + (q_chunk ^ lane % 8) * 16
        slice_key = key_group * self.warp_keys
        k_lane = self.format.k_lane(smem + self.ring, slice_key, lane)
        v_lane = self.v_lane(smem, warp, lane, slice_key, col_group)

        rows = [first_row + row for row in self.operands.rows(lane)]
        scales = [score_scale * LOG2E * ptx.load_shared_f32(smem + ROW_SCALE + row * 4) for row in rows]
        cap_scales = None
        if cutlass.const_expr(c.softcap):
            cap_scales, scales = self.mask.cap_scales(scales, softcap), [softcap * LOG2E] * 2
        exp_scale = [self.at_least_tiny(scale) for scale in scales]
        limits = self.mask.limits(span, [row0 + row for row in rows], group_size)
        first_full, num_full = self.mask.full_stages(span, key_begin, num_stages)
        num_rest = num_stages - first_full - num_full

        q_frags = self.load_q(q_address) if self.q_in_registers else None
        state = ([Float32(0.0)] * self.o_registers, [Float32(NEG_INF)] * 2, [Float32(0.0)] * 2)
        o, m, l = state
        stage, phase = Int32(0), Int32(0)
        key = key_begin + slice_key + self.operands.first_key(lane)
        fixed = (smem, warp, lane, q_address, q_frags, k_lane, v_lane, exp_scale, cap_scales, span[0], depth)
        if cutlass.const_expr(c.window):
            # Masked stages lie at the beginning too. The same two loops walk both ends, so that the code does not grow.
            for turn in cutlass.range(2, unroll=1):
                full = cutlass.select_(turn == 0, Int32(0), num_full)
                masked = cutlass.select_(turn == 0, first_full, num_rest)
                key, o, m, l, stage, phase = self.walk(fixed, limits, full, masked, key, o, m, l, stage, phase)
        else:
            key, o, m, l, stage, phase = self.walk(fixed, limits, num_full, num_rest, key, o, m, l, stage, phase)
        return key_group, col_group, rows, exp_scale, o, m, l

    def v_lane(self, smem, warp, lane, slice_key, col_group):
        """Where a lane reads V in the first slot of the ring."""
        return self.format.v_lane(smem + self.ring, slice_key, lane, col_group)

    @cute.jit
    def walk(self, fixed, limits, num_full, num_masked, key, o, m, l, stage, phase):
        """Stages that every row sees in full, then stages with masks."""
        for _ in cutlass.range(num_full, unroll=1):
            o, m, l, stage, phase = self.attend(*fixed, None, key, o, m, l, stage, phase)
            key += self.config.stage_keys
        for _ in cutlass.range(num_masked, unroll=1):
            o, m, l, stage, phase = self.attend(*fixed, limits, key, o, m, l, stage, phase)
            key += self.config.stage_keys
        return key, o, m, l, stage, phase

    def load_q(self, q_address):
        """Fragments of Q, 16 columns each."""
        return [fragment for load in range(self.q_loads) for fragment in self.load_q_steps(q_address, load)]

    def load_q_steps(self, q_address, load):
        """Fragments of the columns that one `ldmatrix` reads; chunks are swizzled in groups of eight."""
        steps = self.operands.q_steps
        start = 32 * steps * load
        found = ptx.ldmatrix_x4((q_address ^ (start % 128)) + start // 128 * 128)
        return [found[n : n + 4 // steps] for n in range(0, 4, 4 // steps)]

    @cute.jit
    def attend(
        self, smem, warp, lane, q_address, q_frags, k_lane, v_lane, exp_scale, cap_scales, length, depth, limits, key,
        o, m, l, stage, phase,
    ):  # fmt: skip
        """One stage of K and one of V. `limits` masks scores and the rows of V past the end; None: all visible."""
        c = self.config
        k_offset, k_empty, v_offset, v_full, v_empty, v_phase, stage, phase = self.wait_for_k(smem, stage, phase, depth)
        for step in cutlass.range(self.warp_keys // self.step_keys, unroll=1):
            first = step * self.step_keys
            scores = self.scores(self.format.move(k_lane, k_offset, first), q_address, q_frags)
            if cutlass.const_expr(self.frees_k_early and (limits is None or self.mask.may_be_early)):
                self.release(lane, (k_empty,))
            if cutlass.const_expr(c.softcap):
                scores = self.mask.cap(scores, cap_scales)
            if cutlass.const_expr(limits is not None):
                scores = self.mask.mask_scores(scores, key + first, limits)
            p, m, l, o = self.softmax(scores, m, l, exp_scale, o)
            ptx.mbarrier_wait(v_full, v_phase)
            keep = None if cutlass.const_expr(limits is None) else length - self.operands.value_key(lane, key) - first
            o = self.accumulate(self.format.move(v_lane, v_offset, first), p, keep, o)
        if cutlass.const_expr(limits is None or self.mask.may_be_early):
            self.release(lane, (v_empty,) if self.frees_k_early else (k_empty, v_empty))
        return o, m, l, stage, phase

    def wait_for_k(self, smem, stage, phase, depth):
        """Wait for a stage's K; returns its offset in the ring and empty barrier, V's offset, barriers and phase, and
        the slot and phase behind them.
        """
        size = self.config.stage_bytes
        k_offset, k_empty = stage * size, smem + EMPTY + stage * 8
        ptx.mbarrier_wait(smem + FULL + stage * 8, phase)
        stage, v_phase = self.advance(stage, phase, depth)
        v_offset, v_full, v_empty = stage * size, smem + FULL + stage * 8, smem + EMPTY + stage * 8
        return k_offset, k_empty, v_offset, v_full, v_empty, v_phase, *self.advance(stage, v_phase, depth)

    @cute.jit
    def release(self, lane, barriers):
        """This warp is done reading the stages of these barriers."""
        cute.arch.sync_warp()
        if lane == 0:
            for barrier in barriers:
                ptx.mbarrier_arrive(barrier)

    def scores(self, k_lane, q_address, q_frags):
        """S of a warp's rows and `step_keys` keys, as score tiles."""
        fmt = self.format
        tiles = [[Float32(0.0)] * 4 for _ in range(self.operands.score_tiles(self.step_keys))]
        for load in range(fmt.k_loads):
            registers = [fmt.k_load(fmt.move(k_lane, 0, 8 * t), load) for t in range(self.step_keys // 8)]
            for group in range(fmt.k_groups):
                first = (load * fmt.k_groups + group) * fmt.group_steps
                q = self.q_now(q_address, q_frags, first, fmt.group_steps)
                self.operands.multiply_keys(self.mma_dtype, q, partial(self.widen_block, registers, group), tiles)
        return tiles

    def q_now(self, q_address, q_frags, first, count):
        """Fragments of Q from one on: from registers, or from shared memory."""
        if q_frags is not None:
            return q_frags[first : first + count]
        steps = self.operands.q_steps
        loads = range(first // steps, (first + count) // steps)
        return [fragment for load in loads for fragment in self.load_q_steps(q_address, load)]

    def widen_block(self, registers, group, t):
        """B fragments of block `t` of 8 keys."""
        return self.format.k_pairs(registers[t], group)

    @cute.jit
    def softmax(self, scores, m, l, exp_scale, o):
        """Fold a step's scores into the running maximum and sum, and O; returns P, m, l, O.

        Lanes that share a row agree on its maximum only when one of them has found a larger one, which few steps do.
        """
        rows = [[x for tile in scores for e, x in enumerate(tile) if self.operands.row(e) == j] for j in (0, 1)]
        peaks = [reduce(cute.arch.fmax, row, peak) for row, peak in zip(rows, m, strict=True)]
        if cute.arch.vote_any_sync((peaks[0] != m[0]) | (peaks[1] != m[1])):
            for distance in self.operands.sharers:
                peaks = [cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=distance)) for x in peaks]
            alpha = [ptx.exp2((m[j] - self.base(peaks[j])) * exp_scale[j]) for j in (0, 1)]
            o = [x * alpha[self.operands.row(n % 4)] for n, x in enumerate(o)]
            l = [x * a for x, a in zip(l, alpha, strict=True)]
            m = peaks
        exps = []
        for row, peak, scale in zip(rows, m, exp_scale, strict=True):
            offset = self.p_log2_scale - self.base(peak) * scale  # one multiply-add an element
            exps.append([ptx.exp2(s * scale + offset) for s in row])
        l = [reduce(operator.add, row, total) for row, total in zip(exps, l, strict=True)]
        return self.operands.probabilities(self.mma_dtype, exps), m, l, o

    def accumulate(self, v_lane, p, keep, o):
        """O += P V. `keep` (or None): how many keys from this lane's first of V on are inside the sequence."""
        fmt = self.format
        o = list(o)
        for t, operand in enumerate(p):
            masks = None if keep is None else [self.row_mask(keep - 16 * t - 8 * h) for h in (0, 1)]
            for load in range(fmt.v_loads):
                fragments = fmt.v_fragments(fmt.move(v_lane, 0, 16 * t), load, masks)
                self.operands.accumulate(self.mma_dtype, operand, fragments, o)
        return o

    def row_mask(self, keep):
        """Bits of a register holding keys k (low half) and k + 1 (high half) of which `keep` from k on exist."""
        return cutlass.select_(keep >= 2, Uint32(0xFFFFFFFF), cutlass.select_(keep == 1, Uint32(0x0000FFFF), Uint32(0)))
