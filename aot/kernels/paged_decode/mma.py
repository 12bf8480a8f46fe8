"""Paged decode with warp-level MMA: one source for sm_90a, sm_100a, sm_103a and sm_110a.

One CTA computes `row_tile` packed query rows of one KV head over one chunk of one sequence.

Roles
    consumers  `row_warps` x `key_warps` warps. Each owns 16 query rows and a slice of every stage's
               keys, with a running softmax of its own: no barrier but the ring's in the main loop. The
               slices are merged through shared memory at the end.
    producer   the first warp of the last warpgroup. Looks pages up, issues one TMA box per page and
               128 bytes of head_dim. The rest of its warpgroup idles: registers move between whole
               warpgroups, and the consumers need the producer's.

The ring alternates stages of K and V: K0, V0, K1, V1, ... One full and one empty mbarrier each.

Numerics. bf16 caches: bf16 MMA. fp8 caches: codes widen exactly to f16 in registers and the MMA is
f16; Q is scaled by a power of two per row so that its largest element lies in [2^14, 2^15), which
keeps every bf16 Q exact down to 2^-29 of the row's maximum, and P carries a factor of 2^15, so that
probabilities down to 2^-29 stay normal. Both factors leave exactly. The running maximum is kept in
raw score units; a row that sees nothing keeps m = -inf and l = 0, which gives O = 0 and LSE = -inf.
"""

from __future__ import annotations

import math
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import tensor_map as tm

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import load_f32, load_i32, store_f32
from cubinery.aot.kernels.paged_decode.abi import kv_map
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
NEG_INF = -math.inf

# Byte offsets in the fixed part of shared memory.
FULL, EMPTY = 0, 128  # 16 mbarriers each
ROW_SCALE = 256  # fp32 [row_tile]: factor that undoes the scaling of Q
ROW_RESULT = 512  # fp32 [row_tile][2]: output factor and LSE (or partial m and l)
ROW_STATS = 1024  # fp32 [key_warps][row_tile][2]: m and l of each warp's slice
CONSUMER_BARRIER = 1


class PagedDecodeMma:
    """Traces the decode kernel of one configuration."""

    def __init__(self, config: DecodeConfig, arch: Arch) -> None:
        self.config = config
        self.stages = config.stages(arch)
        self.smem_bytes = config.smem_bytes(arch)
        self.registers = config.registers(arch)
        self.is_fp8 = config.kv_format == "fp8"
        self.mma_dtype = "f16" if self.is_fp8 else "bf16"
        self.p_log2_scale = 15.0 if self.is_fp8 else 0.0
        self.box = kv_map(config, "k").box
        self.d_boxes = config.head_dim * config.kv_bytes // 128
        self.pages_per_stage = config.stage_keys // self.box[1]
        self.boxes = self.pages_per_stage * self.d_boxes
        assert self.boxes <= 32, "one lane issues one box"
        self.consumer_threads = 32 * config.consumer_warps
        self.warp_keys = config.stage_keys // config.key_warps
        # Keys of one softmax step: more amortise its shuffles, fewer leave registers to O.
        self.step_keys = min(self.warp_keys, 32 if config.head_dim <= 128 else 16)
        # 16-byte chunks of one key row; four of them feed one ldmatrix.x4.
        self.k_chunks = config.head_dim * config.kv_bytes // 16
        self.q_steps = config.head_dim // 16
        self.q_in_registers = config.head_dim <= 128
        self.o_tiles = config.head_dim // 8
        self.o_pad = config.merge_pitch
        self.q_smem = config.FIXED_SMEM
        self.ring = config.FIXED_SMEM + config.q_bytes

    # -- host side: only fixes the order and types of parameters ---------------------------------

    @cute.jit
    def __call__(
        self,
        kv: cute.Pointer,
        q: cute.Pointer,
        block_table: cute.Pointer,
        seq_lens: cute.Pointer,
        work: cute.Pointer,
        splits: cute.Pointer,
        q_descale: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        num_pages: Int32,
        block_table_stride: Int32,
        q_seq: Int32,
        q_token: Int32,
        q_head: Int32,
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        q_descale_seq: Int32,
        q_descale_head: Int32,
        k_descale_seq: Int32,
        k_descale_head: Int32,
        v_descale_seq: Int32,
        v_descale_head: Int32,
        scale_qs: Float32,
        scale_o: Float32,
        stream: cuda.CUstream,
    ) -> None:
        # The runtime encodes the real maps from the manifest; here only the parameters' type matters.
        c = self.config
        tensor_map = tm.create_tensor_map_tiled(
            Int64(kv.toint()), Uint8, [c.head_dim, c.page_size, 1, 1], [16, 16, 16], [128, 16, 1, 1]
        )
        self.kernel.set_name_prefix("cubinery_paged_decode_mma", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tensor_map, tensor_map, q, block_table, seq_lens, work, splits, q_descale, k_descale, v_descale,
            o, lse, o_partial, m_partial, l_partial, num_kv_heads, n_q, group_size, num_pages, block_table_stride,
            q_seq, q_token, q_head, o_seq, o_token, o_head, q_descale_seq, q_descale_head, k_descale_seq,
            k_descale_head, v_descale_seq, v_descale_head, scale_qs, scale_o,
        ).launch(
            grid=(1, 1, 1),
            block=(c.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=c.pdl,
        )  # fmt: skip

    # -- device side -----------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        k_map: cutlass.GridConstant[tm.TensorMap],
        v_map: cutlass.GridConstant[tm.TensorMap],
        q: cute.Pointer,
        block_table: cute.Pointer,
        seq_lens: cute.Pointer,
        work: cute.Pointer,
        splits: cute.Pointer,
        q_descale: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        num_pages: Int32,
        block_table_stride: Int32,
        q_seq: Int32,
        q_token: Int32,
        q_head: Int32,
        o_seq: Int32,
        o_token: Int32,
        o_head: Int32,
        q_descale_seq: Int32,
        q_descale_head: Int32,
        k_descale_seq: Int32,
        k_descale_head: Int32,
        v_descale_seq: Int32,
        v_descale_head: Int32,
        scale_qs: Float32,
        scale_o: Float32,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        row_block, head, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()

        if warp == 0:
            if lane < self.stages:
                ptx.mbarrier_init(smem + FULL + lane * 8, 1)
                ptx.mbarrier_init(smem + EMPTY + lane * 8, c.consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # Each role looks its work item up for itself: nothing but indices lives across the split of registers.
        if warp >= c.consumer_warps:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == c.consumer_warps:
                seq, length, key_begin, num_stages = self.chunk(work, seq_lens, item)
                table_row = Int64(seq) * block_table_stride
                self.produce(
                    smem, lane, k_map, v_map, block_table, table_row, head, num_pages, length, key_begin, num_stages
                )
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            seq, length, key_begin, num_stages = self.chunk(work, seq_lens, item)
            if num_stages >= 0:  # a padding item writes nothing
                row0 = row_block * c.row_tile
                q_base = q.toint() + (Int64(seq) * q_seq + Int64(head * group_size) * q_head) * 2
                self.stage_q(smem, warp, lane, q_base, row0, n_q, group_size, q_token, q_head)
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)

                score_scale = (
                    scale_qs
                    * load_f32(q_descale, Int64(seq) * q_descale_seq + head * q_descale_head)
                    * load_f32(k_descale, Int64(seq) * k_descale_seq + head * k_descale_head)
                )
                self.consume(smem, warp, lane, row0, group_size, length, key_begin, num_stages, score_scale)

                # The result of an unsplit sequence goes to O and LSE, that of a chunk to the partial buffers.
                is_split = load_i32(splits, Int64(seq) * 2) > 1
                slot = load_i32(work, Int64(item) * 4 + 3)
                out_scale = load_f32(v_descale, Int64(seq) * v_descale_seq + head * v_descale_head)
                self.finish_rows(smem, tidx, score_scale, out_scale, scale_o, is_split)
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)
                stat_row = (Int64(seq) * num_kv_heads + head) * n_q
                part_row = (Int64(slot) * num_kv_heads + head) * n_q
                self.store_stats(smem, tidx, row0, n_q, is_split, lse, m_partial, l_partial, stat_row, part_row)
                o_base = o.toint() + (Int64(seq) * o_seq + Int64(head * group_size) * o_head) * 2
                part_base = o_partial.toint() + part_row * (c.head_dim * 4)
                self.store_o(smem, tidx, row0, n_q, group_size, is_split, o_base, o_token, o_head, part_base)

    @cute.jit
    def chunk(self, work, seq_lens, item):
        """(sequence, its length, first key, ring stages of K) of a work item; -1 stages for a padding item."""
        c = self.config
        seq = load_i32(work, Int64(item) * 4)
        tile_begin = load_i32(work, Int64(item) * 4 + 1)
        tile_end = load_i32(work, Int64(item) * 4 + 2)
        length = load_i32(seq_lens, Int64(seq))
        key_begin = tile_begin * TILE_KEYS
        keys = cutlass.max(cutlass.min(tile_end * TILE_KEYS, length) - key_begin, 0)
        num_stages = (keys + (c.stage_keys - 1)) // c.stage_keys
        return seq, length, key_begin, cutlass.select_(tile_begin < tile_end, num_stages, Int32(-1))

    @cute.jit
    def produce(self, smem, lane, k_map, v_map, block_table, table_row, head, num_pages, length, key_begin, num_stages):
        """Fill the ring. Lane i issues box i of a stage: page i // d_boxes, 128-byte column i % d_boxes."""
        c = self.config
        page_in_stage = lane // self.d_boxes
        column = lane % self.d_boxes
        box_rows = self.box[1]
        destination = (column * c.stage_keys + page_in_stage * box_rows) * 128
        page = self.look_up(block_table, table_row, num_pages, length, key_begin + page_in_stage * box_rows)
        stage = Int32(0)
        phase = Int32(1)  # the first pass over the ring waits for nothing
        for i in cutlass.range(num_stages, unroll=1):
            key = key_begin + i * c.stage_keys + page_in_stage * box_rows
            # Looked up one stage ahead, so that the latency hides behind the wait for a slot.
            next_page = self.look_up(block_table, table_row, num_pages, length, key + c.stage_keys)
            for which in cutlass.range_constexpr(2):
                full = smem + FULL + stage * 8
                ptx.mbarrier_wait(smem + EMPTY + stage * 8, phase)
                if lane == 0:
                    ptx.mbarrier_arrive_expect_tx(full, c.stage_bytes)
                cute.arch.sync_warp()
                if lane < self.boxes:
                    coordinates = (column * self.box[0], key % c.page_size, head, page)
                    target = smem + self.ring + stage * c.stage_bytes + destination
                    ptx.tma_load_4d(target, (k_map, v_map)[which].get_ptr(), coordinates, full)
                stage, phase = self.advance(stage, phase)
            page = next_page

    @cute.jit
    def look_up(self, block_table, table_row, num_pages, length, key):
        """Page of a key; past the sequence's end an index that is out of bounds, which loads zeros."""
        page = Int32(num_pages)
        if key < length:
            page = load_i32(block_table, table_row + key // self.config.page_size)
        return page

    def advance(self, stage, phase):
        """The next ring slot and its phase."""
        following = stage + 1
        wrapped = following == self.stages
        return (
            cutlass.select_(wrapped, Int32(0), following),
            cutlass.select_(wrapped, phase ^ 1, phase),
        )

    @cute.jit
    def stage_q(self, smem, warp, lane, q_base, row0, n_q, group_size, q_token, q_head):
        """Q tile to shared memory, 16-byte chunks swizzled by row; rows past n_q become zeros.

        fp8: each row is scaled by a power of two and its elements are reordered within every 16, so
        that the four consecutive codes one lane holds of K meet the right columns of the A fragment.
        """
        c = self.config
        lanes = c.head_dim // 8  # lanes of one row, 8 elements each
        vector = lane % lanes
        rows_per_pass = 32 // lanes
        passes = c.row_tile // (c.consumer_warps * rows_per_pass)
        for i in cutlass.range_constexpr(passes):
            row = (warp * passes + i) * rows_per_pass + lane // lanes
            n = row0 + row
            pairs = (Uint32(0), Uint32(0), Uint32(0), Uint32(0))
            if n < n_q:
                token = n // group_size
                address = q_base + (Int64(token) * q_token + Int64(n - token * group_size) * q_head) * 2
                pairs = ptx.load_global_v4(address + vector * 16)
            row_smem = smem + self.q_smem + row * (c.head_dim * 2)
            if cutlass.const_expr(self.is_fp8):
                values = [x for pair in pairs for x in ptx.unpack_bf16x2(pair)]
                amax = Float32(0.0)
                for x in values:
                    amax = cute.arch.fmax(amax, cute.arch.fmax(x, -x))
                for distance in self.row_shuffles(lanes):
                    amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, offset=distance))
                exponent = cutlass.min(cutlass.max(ptx.float_bits(amax) >> 23, 15), 254)
                up = ptx.bits_to_float((268 - exponent) << 23)
                p0, p1, p2, p3 = [ptx.pack_f32x2("f16", values[2 * j] * up, values[2 * j + 1] * up) for j in (0, 1, 2, 3)]
                chunk = vector // 2 * 2
                half = vector % 2 * 8
                ptx.store_shared_v2(row_smem + (chunk ^ (row & 7)) * 16 + half, (p0, p2))
                ptx.store_shared_v2(row_smem + ((chunk + 1) ^ (row & 7)) * 16 + half, (p1, p3))
                if vector == 0:
                    ptx.store_shared_f32(smem + ROW_SCALE + row * 4, ptx.bits_to_float((exponent - 14) << 23))
            else:
                ptx.store_shared_v4(row_smem + (vector ^ (row & 7)) * 16, pairs)
                if vector == 0:
                    ptx.store_shared_f32(smem + ROW_SCALE + row * 4, Float32(1.0))

    def row_shuffles(self, lanes):
        return [1 << i for i in range(lanes.bit_length() - 1)]

    @cute.jit
    def consume(self, smem, warp, lane, row0, group_size, length, key_begin, num_stages, score_scale):
        """Online softmax over this warp's slice of every stage; leaves O in the merge buffer."""
        c = self.config
        row_group = warp % c.row_warps
        key_group = warp // c.row_warps
        i, r = lane // 8, lane % 8  # matrix and row whose address this lane gives to ldmatrix
        g, quad = lane // 4, lane % 4
        q_address = smem + self.q_smem + (row_group * 16 + (i % 2) * 8 + r) * (c.head_dim * 2) + ((i // 2) ^ r) * 16
        slice_key = key_group * self.warp_keys
        k_lane = smem + self.ring + (slice_key + r) * 128 + (i ^ r) * 16
        v_lane = smem + self.ring + (slice_key + (i % 2) * 8 + r) * 128 + ((i // 2) ^ r) * 16

        row = row_group * 16 + g
        exp_scale = [
            score_scale * LOG2E * ptx.load_shared_f32(smem + ROW_SCALE + (row + 8 * j) * 4) for j in (0, 1)
        ]
        # Keys below limits[j] are visible to this lane's row j; all rows see keys below `all_visible`.
        if cutlass.const_expr(c.q_len > 1):
            limits = [
                cutlass.min(length - c.q_len + 1 + (row0 + row + 8 * j) // group_size, length) for j in (0, 1)
            ]
            all_visible = length - c.q_len + 1
        else:
            limits = [length, length]
            all_visible = length
        num_full = cutlass.min(cutlass.max(all_visible - key_begin, 0) // c.stage_keys, num_stages)

        q_frags = self.load_q(q_address) if self.q_in_registers else None
        state = ([Float32(0.0)] * (4 * self.o_tiles), [Float32(NEG_INF)] * 2, [Float32(0.0)] * 2)
        o, m, l = state
        stage, phase = Int32(0), Int32(0)
        key = key_begin + slice_key + 2 * quad
        for _ in cutlass.range(num_full, unroll=1):
            o, m, l, stage, phase = self.attend(
                smem, lane, q_address, q_frags, k_lane, v_lane, exp_scale, None, length, key, o, m, l, stage, phase
            )
            key += c.stage_keys
        for _ in cutlass.range(num_stages - num_full, unroll=1):
            o, m, l, stage, phase = self.attend(
                smem, lane, q_address, q_frags, k_lane, v_lane, exp_scale, limits, length, key, o, m, l, stage, phase
            )
            key += c.stage_keys
        self.merge(smem, lane, key_group, row, exp_scale, o, m, l)

    def load_q(self, q_address):
        return [self.load_q_step(q_address, s) for s in range(self.q_steps)]

    def load_q_step(self, q_address, step):
        """A fragment of 16 columns of Q: chunks 2 step and 2 step + 1, swizzled in groups of eight."""
        return ptx.ldmatrix_x4((q_address ^ (32 * step % 128)) + 32 * step // 128 * 128)

    @cute.jit
    def attend(
        self, smem, lane, q_address, q_frags, k_lane, v_lane, exp_scale, limits, length, key, o, m, l, stage, phase
    ):
        """One stage of K and one of V. `limits` masks scores and the rows of V past the end; None: all visible."""
        c = self.config
        k_offset, k_full, k_empty = stage * c.stage_bytes, smem + FULL + stage * 8, smem + EMPTY + stage * 8
        ptx.mbarrier_wait(k_full, phase)
        stage, phase = self.advance(stage, phase)
        v_offset, v_full, v_empty = stage * c.stage_bytes, smem + FULL + stage * 8, smem + EMPTY + stage * 8
        v_phase = phase
        stage, phase = self.advance(stage, phase)
        for step in cutlass.range(self.warp_keys // self.step_keys, unroll=1):
            first = step * self.step_keys
            scores = self.scores(k_lane + k_offset + first * 128, q_address, q_frags)
            if cutlass.const_expr(limits is not None):
                scores = [self.mask_scores(tile, key + first + 8 * t, limits) for t, tile in enumerate(scores)]
            p, m, l, alpha, changed = self.softmax(scores, m, l, exp_scale)
            o = self.rescale(o, alpha, changed)
            ptx.mbarrier_wait(v_full, v_phase)
            keep = None if cutlass.const_expr(limits is None) else length - key - first
            o = self.accumulate(v_lane + v_offset + first * 128, p, keep, o)
        self.release(k_empty, lane)
        self.release(v_empty, lane)
        return o, m, l, stage, phase

    @cute.jit
    def release(self, barrier, lane):
        """This warp is done reading a stage."""
        cute.arch.sync_warp()
        if lane == 0:
            ptx.mbarrier_arrive(barrier)

    def scores(self, k_address, q_address, q_frags):
        """S[16 rows][step_keys] as accumulator tiles of 8 keys: a lane has rows g, g + 8 and keys 2c, 2c + 1."""
        c = self.config
        tiles = [[Float32(0.0)] * 4 for _ in range(self.step_keys // 8)]
        mma_per_load = 4 if self.is_fp8 else 2  # 16-column steps in four 16-byte chunks
        for j in range(self.k_chunks // 4):
            q_steps = range(j * mma_per_load, (j + 1) * mma_per_load)
            q_now = [q_frags[s] if q_frags is not None else self.load_q_step(q_address, s) for s in q_steps]
            for t in range(self.step_keys // 8):
                address = (k_address ^ (64 * (j % 2))) + (j // 2 * c.stage_keys + 8 * t) * 128
                regs = ptx.ldmatrix_x4(address)
                if self.is_fp8:
                    b_frags = [ptx.e4m3x4_to_f16x2x2(reg) for reg in regs]
                else:
                    b_frags = [regs[0:2], regs[2:4]]
                for a, b in zip(q_now, b_frags, strict=True):
                    tiles[t] = ptx.mma_m16n8k16(self.mma_dtype, a, b, tiles[t])
        return tiles

    def mask_scores(self, tile, key, limits):
        """-inf where this lane's keys (key, key + 1) are not visible to its two rows."""
        return [
            cutlass.select_(key + e % 2 < limits[e // 2], tile[e], Float32(NEG_INF)) for e in range(4)
        ]

    def softmax(self, scores, m, l, exp_scale):
        """Fold a step's scores into the running maximum and sum; returns P, m, l, alpha, and whether m moved."""
        new_m, new_l, alpha, exps = [], [], [], []
        for j in (0, 1):
            row = [tile[2 * j + e] for tile in scores for e in (0, 1)]
            peak = m[j]
            for s in row:
                peak = cute.arch.fmax(peak, s)
            for distance in (1, 2):
                peak = cute.arch.fmax(peak, cute.arch.shuffle_sync_bfly(peak, offset=distance))
            # A row that has seen nothing keeps -inf; subtracting 0 instead avoids inf - inf.
            base = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
            alpha.append(ptx.exp2((m[j] - base) * exp_scale[j]))
            row = [ptx.exp2((s - base) * exp_scale[j] + self.p_log2_scale) for s in row]
            total = l[j] * alpha[j]
            for p in row:
                total = total + p
            new_m.append(peak)
            new_l.append(total)
            exps.append(row)
        changed = (new_m[0] != m[0]) | (new_m[1] != m[1])
        # Two accumulator tiles of S are one A fragment of P, 16 keys deep.
        p = [
            [
                ptx.pack_f32x2(self.mma_dtype, exps[j][4 * t + 2 * h], exps[j][4 * t + 2 * h + 1])
                for h in (0, 1)
                for j in (0, 1)
            ]
            for t in range(len(scores) // 2)
        ]
        return p, new_m, new_l, alpha, changed

    @cute.jit
    def rescale(self, o, alpha, changed):
        """O *= alpha, skipped while no row of the warp has a new maximum (every alpha is then 1)."""
        if cute.arch.vote_any_sync(changed):
            o = [x * alpha[n % 4 // 2] for n, x in enumerate(o)]
        return o

    def accumulate(self, v_address, p, keep, o):
        """O += P V. `keep` (or None): how many keys from this lane's first on are inside the sequence.

        fp8: a lane reads pairs of neighbouring columns; after a byte shuffle one conversion gives the
        B fragment of the even columns of 16, another that of the odd ones.
        """
        c = self.config
        o = list(o)
        for t, a in enumerate(p):
            masks = None if keep is None else [self.row_mask(keep - 16 * t - 8 * h) for h in (0, 1)]
            for j in range(self.k_chunks // 2):
                address = (v_address ^ (32 * (j % 4))) + (j // 4 * c.stage_keys + 16 * t) * 128
                regs = ptx.ldmatrix_x4(address, transpose=True)
                if masks is not None:
                    regs = [reg & masks[n % 2] for n, reg in enumerate(regs)]
                for half in (0, 1):
                    low, high = regs[2 * half], regs[2 * half + 1]
                    chunk = 2 * j + half
                    if self.is_fp8:
                        even_low, odd_low = ptx.e4m3x4_to_f16x2x2(ptx.permute_bytes(low, 0x3120))
                        even_high, odd_high = ptx.e4m3x4_to_f16x2x2(ptx.permute_bytes(high, 0x3120))
                        frags = {2 * chunk: (even_low, even_high), 2 * chunk + 1: (odd_low, odd_high)}
                    else:
                        frags = {chunk: (low, high)}
                    for tile, b in frags.items():
                        o[4 * tile : 4 * tile + 4] = ptx.mma_m16n8k16(self.mma_dtype, a, b, o[4 * tile : 4 * tile + 4])
        return o

    def row_mask(self, keep):
        """Bits of a register holding keys k (low half) and k + 1 (high half) of which `keep` from k on exist."""
        return cutlass.select_(
            keep >= 2, Uint32(0xFFFFFFFF), cutlass.select_(keep == 1, Uint32(0x0000FFFF), Uint32(0))
        )

    # -- merging and writing -----------------------------------------------------------------------

    @cute.jit
    def merge(self, smem, lane, key_group, row, exp_scale, o, m, l):
        """Bring the key slices of a row to one maximum and put their O side by side in the ring's memory."""
        c = self.config
        quad = lane % 4
        for distance in (1, 2):
            l = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in l]
        # Also keeps anyone from overwriting a stage that another warp still reads.
        if quad == 0:
            for j in cutlass.range_constexpr(2):
                ptx.store_shared_f32x2(self.stats(smem, key_group, row + 8 * j), (m[j], l[j]))
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)
        for j in cutlass.range_constexpr(2):
            peak = Float32(NEG_INF)
            for k in cutlass.range_constexpr(c.key_warps):
                peak = cute.arch.fmax(peak, ptx.load_shared_f32(self.stats(smem, k, row + 8 * j)))
            base = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
            factor = ptx.exp2((m[j] - base) * exp_scale[j])
            target = smem + self.ring + ((key_group * c.row_tile + row + 8 * j) * self.o_pad) * 4
            for tile in cutlass.range_constexpr(self.o_tiles):
                if cutlass.const_expr(self.is_fp8):
                    if cutlass.const_expr(tile % 2 == 0):
                        even, odd = o[4 * tile + 2 * j :][:2], o[4 * (tile + 1) + 2 * j :][:2]
                        values = [x * factor for x in (even[0], odd[0], even[1], odd[1])]
                        ptx.store_shared_f32x4(target + (tile * 8 + 4 * quad) * 4, values)
                else:
                    values = [x * factor for x in o[4 * tile + 2 * j :][:2]]
                    ptx.store_shared_f32x2(target + (tile * 8 + 2 * quad) * 4, values)

    def stats(self, smem, key_group, row):
        return smem + ROW_STATS + (key_group * self.config.row_tile + row) * 8

    @cute.jit
    def finish_rows(self, smem, tidx, score_scale, out_scale, scale_o, is_split):
        """One thread a row: total its slices into an output factor and the LSE, or the partial m and l."""
        c = self.config
        if tidx < c.row_tile:
            natural = score_scale * ptx.load_shared_f32(smem + ROW_SCALE + tidx * 4)
            peak = Float32(NEG_INF)
            for k in cutlass.range_constexpr(c.key_warps):
                peak = cute.arch.fmax(peak, ptx.load_shared_f32(self.stats(smem, k, tidx)))
            base = cutlass.select_(peak == NEG_INF, Float32(0.0), peak)
            total = Float32(0.0)
            for k in cutlass.range_constexpr(c.key_warps):
                m = ptx.load_shared_f32(self.stats(smem, k, tidx))
                l = ptx.load_shared_f32(self.stats(smem, k, tidx) + 4)
                total = total + l * ptx.exp2((m - base) * (natural * LOG2E))
            total = total * 2.0**-self.p_log2_scale
            factor = out_scale * 2.0**-self.p_log2_scale
            first = natural * peak
            if not is_split:
                factor = cutlass.select_(total == 0.0, Float32(0.0), factor * scale_o / total)
                first = cutlass.select_(total == 0.0, Float32(NEG_INF), natural * base + cute.math.log(total))
            ptx.store_shared_f32x2(smem + ROW_RESULT + tidx * 8, (factor, first))
            ptx.store_shared_f32(smem + ROW_SCALE + tidx * 4, total)

    @cute.jit
    def store_stats(self, smem, tidx, row0, n_q, is_split, lse, m_partial, l_partial, stat_row, part_row):
        """LSE of the tile's rows, or their partial m and l."""
        n = row0 + tidx
        if tidx < self.config.row_tile and n < n_q:
            first = ptx.load_shared_f32(smem + ROW_RESULT + tidx * 8 + 4)
            if is_split:
                store_f32(m_partial, part_row + n, first)
                store_f32(l_partial, part_row + n, ptx.load_shared_f32(smem + ROW_SCALE + tidx * 4))
            else:
                store_f32(lse, stat_row + n, first)

    @cute.jit
    def store_o(self, smem, tidx, row0, n_q, group_size, is_split, o_base, o_token, o_head, part_base):
        """Sum the key slices of the merge buffer and write O rows, four columns a thread, coalesced."""
        c = self.config
        vectors = c.head_dim // 4
        for i in cutlass.range(c.row_tile * vectors // self.consumer_threads, unroll=4):
            index = tidx + i * self.consumer_threads
            row = index // vectors
            column = index % vectors
            n = row0 + row
            if n < n_q:
                factor = ptx.load_shared_f32(smem + ROW_RESULT + row * 8)
                source = smem + self.ring + row * (self.o_pad * 4) + column * 16
                values = ptx.load_shared_f32x4(source)
                for k in cutlass.range_constexpr(1, c.key_warps):
                    more = ptx.load_shared_f32x4(source + k * (c.row_tile * self.o_pad * 4))
                    values = [x + y for x, y in zip(values, more, strict=True)]
                values = [x * factor for x in values]
                if is_split:
                    ptx.store_global_f32x4(part_base + Int64(n) * (c.head_dim * 4) + column * 16, values)
                else:
                    token = n // group_size
                    address = o_base + (Int64(token) * o_token + Int64(n - token * group_size) * o_head) * 2
                    pairs = [ptx.pack_f32x2("bf16", values[e], values[e + 1]) for e in (0, 2)]
                    ptx.store_global_v2(address + column * 8, pairs)


def entry(config: DecodeConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""

    def pointer(dtype: Any) -> cute.Pointer:
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)

    i32, f32 = Int32, Float32
    pointers = [Uint8, BFloat16, i32, i32, i32, i32, f32, f32, f32, BFloat16, f32, f32, f32, f32]
    scalars = [Int32(1)] * 17 + [Float32(1.0)] * 2
    return PagedDecodeMma(config, arch), (*map(pointer, pointers), *scalars, cuda.CUstream(0))
