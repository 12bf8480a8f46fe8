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

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import tensor_map as tm

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import load_f32, load_i32
from cubinery.aot.kernels.paged_decode.abi import optional_params, scale_params
from cubinery.aot.kernels.paged_decode.mma_compute import Consumer
from cubinery.aot.kernels.paged_decode.mma_load import Producer
from cubinery.aot.kernels.paged_decode.mma_mask import Mask
from cubinery.aot.kernels.paged_decode.mma_store import Epilogue
from cubinery.aot.kernels.paged_decode.mma_tile import CONSUMER_BARRIER, EMPTY, FULL, OUT_SCALE, MmaTile
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import DecodeConfig


class PagedDecodeMma(MmaTile):
    """Traces the decode kernel of one configuration."""

    def __init__(self, config: DecodeConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.producer, self.consumer = Producer(config, arch), Consumer(config, arch)
        self.epilogue, self.mask = Epilogue(config, arch), Mask(config, arch)

    @cute.jit
    def __call__(
        self,
        kv: cute.Pointer,
        q: cute.Pointer,
        block_table: cute.Pointer,
        seq_lens: cute.Pointer,
        work: cute.Pointer,
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
        window: Int32 | None,
        sinks: cute.Pointer | None,
        softcap: Float32 | None,
        q_lens: cute.Pointer | None,
        scales: tuple[Any, ...] | None,
        stream: cuda.CUstream,
    ) -> None:
        """Fix the order and types of the kernel's parameters, and the attributes of its launch.

        What belongs to an axis that is off is None, and no parameter of the kernel.
        """
        c = self.config
        # The runtime encodes the real maps from the manifest; here only the parameters' type matters.
        tensor_map = tm.create_tensor_map_tiled(
            Int64(kv.toint()), Uint8, [c.head_dim, c.page_size, 1, 1], [16, 16, 16], [128, 16, 1, 1]
        )
        self.kernel.set_name_prefix("cubinery_paged_decode_mma", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tensor_map, tensor_map, q, block_table, seq_lens, work, q_descale, k_descale, v_descale,
            o, lse, o_partial, m_partial, l_partial, num_kv_heads, n_q, group_size, num_pages, block_table_stride,
            q_seq, q_token, q_head, o_seq, o_token, o_head, q_descale_seq, q_descale_head, k_descale_seq,
            k_descale_head, v_descale_seq, v_descale_head, scale_qs, scale_o, window, sinks, softcap, q_lens, scales,
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
        window: Int32 | None,
        sinks: cute.Pointer | None,
        softcap: Float32 | None,
        q_lens: cute.Pointer | None,
        scales: tuple[Any, ...] | None,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        row_block, head, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()

        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            if lane < self.stages:
                ptx.mbarrier_init(smem + FULL + lane * 8, 33 if c.scale_bytes else 1)  # scales: each lane
                ptx.mbarrier_init(smem + EMPTY + lane * 8, c.consumer_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        # Each role looks its work item up for itself: nothing but indices lives across the split of registers.
        if warp >= c.consumer_warps:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == c.consumer_warps:
                seq, key_begin, key_end, _ = self.work_item(work, item)
                num_stages = self.num_stages(key_begin, key_end)
                table_row = Int64(seq) * block_table_stride
                first_key = Int32(0)
                if cutlass.const_expr(c.window):
                    if seq >= 0:
                        tokens = self.mask.tokens(q_lens, seq, n_q)
                        first_key = self.mask.first_key((load_i32(seq_lens, Int64(seq)), tokens, window))
                self.producer.produce(
                    smem, lane, k_map, v_map, block_table, table_row, head, num_pages, key_begin, key_end, first_key,
                    num_stages, self.head_scales(scales, head),
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            seq, key_begin, key_end, slot = self.work_item(work, item)
            if seq >= 0:  # a padding item writes nothing
                num_stages = self.num_stages(key_begin, key_end)
                row0 = row_block * c.row_tile
                q_base = q.toint() + (Int64(seq) * q_seq + Int64(head * group_size) * q_head) * self.q_element_bytes
                score_scale = (
                    scale_qs
                    * load_f32(q_descale, Int64(seq) * q_descale_seq + head * q_descale_head)
                    * load_f32(k_descale, Int64(seq) * k_descale_seq + head * k_descale_head)
                )
                if tidx == 0:
                    out_scale = load_f32(v_descale, Int64(seq) * v_descale_seq + head * v_descale_head)
                    ptx.store_shared_f32(smem + OUT_SCALE, out_scale)
                # Without a causal mask or a window every key of the chunk is visible to every row.
                length = load_i32(seq_lens, Int64(seq)) if cutlass.const_expr(c.q_len > 1 or c.window) else key_end
                tokens = self.mask.tokens(q_lens, seq, n_q)
                live_rows = self.mask.live_rows(tokens, n_q, group_size)
                if cutlass.const_expr(c.sinks):
                    is_first = self.mask.first_item(length, window, key_begin)
                    self.mask.stage_sinks(smem, tidx, sinks, head, group_size, row0, live_rows, is_first)
                self.consumer.stage_q(smem, warp, lane, q_base, row0, live_rows, group_size, q_token, q_head)
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)
                place = self.consumer.consume(
                    smem, warp, lane, row0, group_size, (length, tokens, window), softcap, key_begin, num_stages,
                    score_scale,
                )  # fmt: skip
                self.epilogue.merge(smem, lane, *place)

                # The result of an unsplit sequence goes to O and LSE, that of a chunk to the partial buffers.
                is_split = slot >= 0
                self.epilogue.finish_rows(smem, tidx, score_scale, softcap, live_rows - row0, scale_o, is_split)
                cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)
                stat_row = (Int64(seq) * num_kv_heads + head) * n_q
                part_row = (Int64(slot) * num_kv_heads + head) * n_q
                self.epilogue.store_stats(
                    smem, tidx, row0, n_q, is_split, lse, m_partial, l_partial, stat_row, part_row
                )
                o_base = o.toint() + (Int64(seq) * o_seq + Int64(head * group_size) * o_head) * 2
                part_base = o_partial.toint() + part_row * (c.head_dim * 4)
                self.epilogue.store_o(smem, tidx, row0, n_q, group_size, is_split, o_base, o_token, o_head, part_base)

    def head_scales(self, scales, head):
        """What the producer must know of K's and of V's block scales; None where there are none."""
        if scales is None:
            return None
        parts = (scales[0:4], scales[4:8])
        return [(start.toint() + Int64(head) * step, page, row) for start, page, row, step in parts]

    def work_item(self, work, item):
        """(sequence, first key, end key, partial slot) as `SplitPlan.device_work` defines them."""
        return ptx.load_global_i32x4(work.toint() + Int64(item) * 16)

    def num_stages(self, key_begin, key_end):
        """Ring stages of K (and of V) that hold the keys of a work item."""
        return (key_end - key_begin + (self.config.stage_keys - 1)) // self.config.stage_keys


def entry(config: DecodeConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""

    def pointer(dtype: Any) -> cute.Pointer:
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)

    i32, f32 = Int32, Float32
    pointers = [Uint8, BFloat16, i32, i32, i32, f32, f32, f32, BFloat16, f32, f32, f32, f32]
    scalars = [Int32(1)] * 17 + [Float32(1.0)] * 2
    on = {name for name, _ in optional_params(config)}
    optional = {"window": Int32(1), "sinks": pointer(f32), "softcap": Float32(1.0), "q_lens": pointer(i32)}
    extras = [value if name in on else None for name, value in optional.items()]
    kinds = {"pointer": lambda: pointer(Uint8), "i32": lambda: Int32(1)}
    scales = tuple(kinds[kind]() for _, kind in scale_params(config)) or None
    return PagedDecodeMma(config, arch), (*map(pointer, pointers), *scalars, *extras, scales, cuda.CUstream(0))
