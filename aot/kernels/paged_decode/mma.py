"""Paged decode with warp-level MMA: one source for sm_90a, sm_100a, sm_103a and sm_110a.

One CTA computes `row_tile` packed query rows of one KV head over one chunk of one sequence.

Roles
    consumers  `row_warps` x `key_warps` warps. Each owns 16 query rows (8 of a row tile of 8, where Q is
               the other operand: mma_operands.py) and a slice of every stage's keys, with a running softmax
               of its own: no barrier but the ring's in the main loop. The slices are merged through shared
               memory at the end. (Some CTAs of clusters: the warps exchange P instead, mma_exchange.py.)
    producer   the first warp of the last warpgroup. Looks pages up, issues one TMA box per page and
               128 bytes of head_dim. The rest of its warpgroup idles (in clusters, one of its warps makes
               the barriers and may send m and l): registers move between whole warpgroups, and the
               consumers need the producer's.

The ring alternates stages of K and V: K0, V0, K1, V1, ... One full and one empty mbarrier each.

A sequence that was cut into chunks leaves one partial result a chunk; the CTA that finishes its last one merges them.
Where CTAs form clusters, each cluster shares a whole sequence instead: it starts without a work item
(cluster_start.py), and merges in shared memory (cluster_merge.py).

Numerics. bf16 caches: bf16 MMA. fp8 caches: codes widen exactly to f16 in registers and the MMA is
f16; Q is scaled by a power of two per row so that its largest element lies in [2^14, 2^15), which
keeps every bf16 Q exact down to 2^-29 of the row's maximum, and P carries a factor of 2^15, so that
probabilities down to 2^-29 stay normal. Both factors leave exactly. Formats below 8 bits: the same with codes
moved into f16's bits, a power of two below their value (mma_formats*.py). The running maximum is kept in raw score
units; a row that sees nothing keeps m = -inf and l = 0, which gives O = 0 and LSE = -inf.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import tensor_map as tm

from cubinery.aot.kernels.common import cluster, ptx
from cubinery.aot.kernels.common.memory import load_f32
from cubinery.aot.kernels.paged_decode.abi import optional_params, scale_params
from cubinery.aot.kernels.paged_decode.block_scales import head_scales
from cubinery.aot.kernels.paged_decode.cluster_merge import ClusterMerge
from cubinery.aot.kernels.paged_decode.cluster_start import ClusterStart
from cubinery.aot.kernels.paged_decode.mma_compute import Consumer
from cubinery.aot.kernels.paged_decode.mma_exchange import ExchangingConsumer
from cubinery.aot.kernels.paged_decode.mma_load import Producer
from cubinery.aot.kernels.paged_decode.mma_mask import Mask
from cubinery.aot.kernels.paged_decode.mma_store import Epilogue
from cubinery.aot.kernels.paged_decode.mma_tile import (
    CONSUMER_BARRIER,
    EMPTY,
    FULL,
    IS_LAST,
    ITEM,
    OUT_SCALE,
    SCORE_SCALE,
    MmaTile,
)
from cubinery.aot.kernels.paged_decode.split_merge import SplitMerge
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MmaConfig


class PagedDecodeMma(MmaTile):
    """Traces the decode kernel of one configuration."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.producer = Producer(config, arch)
        self.consumer = (ExchangingConsumer if config.exchanges_p else Consumer)(config, arch)
        self.epilogue = Epilogue(config, arch)
        self.split_merge = SplitMerge(
            head_dim=config.head_dim, row_tile=config.row_tile, warps=config.consumer_warps, barrier=CONSUMER_BARRIER,
            is_last=IS_LAST,
        )  # fmt: skip
        self.cluster_start, self.cluster_merge = ClusterStart(config, arch), ClusterMerge(config, arch)
        self.mask = Mask(config, arch)

    @cute.jit
    def __call__(
        self,
        kv: cute.Pointer,
        q: cute.Pointer,
        block_table: cute.Pointer,
        work: cute.Pointer,
        q_descale: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        counters: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        num_pages: Int32,
        ring_depth: Int32,
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
        expected_keys: Int32 | None,
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
        self.kernel.set_name_prefix(
            f"cubinery_paged_decode_{c.impl}", remove_cutlass_symbol=True, keep_mangled_name=False
        )
        self.kernel(
            tensor_map, tensor_map, q, block_table, work, q_descale, k_descale, v_descale, o, lse, o_partial,
            m_partial, l_partial, counters, num_kv_heads, n_q, group_size, num_pages, ring_depth, block_table_stride,
            q_seq, q_token, q_head, o_seq, o_token, o_head, q_descale_seq, q_descale_head, k_descale_seq,
            k_descale_head, v_descale_seq, v_descale_head, scale_qs, scale_o, window, sinks, softcap, q_lens,
            expected_keys, scales,
        ).launch(
            grid=(1, 1, 1),
            block=(c.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=c.pdl,
            cluster=(c.cluster, 1, 1),
        )  # fmt: skip

    # -- device side -----------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        k_map: cutlass.GridConstant[tm.TensorMap],
        v_map: cutlass.GridConstant[tm.TensorMap],
        q: cute.Pointer,
        block_table: cute.Pointer,
        work: cute.Pointer,
        q_descale: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        o: cute.Pointer,
        lse: cute.Pointer,
        o_partial: cute.Pointer,
        m_partial: cute.Pointer,
        l_partial: cute.Pointer,
        counters: cute.Pointer,
        num_kv_heads: Int32,
        n_q: Int32,
        group_size: Int32,
        num_pages: Int32,
        ring_depth: Int32,
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
        expected_keys: Int32 | None,
        scales: tuple[Any, ...] | None,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        _, head, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()

        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(c.cluster == 1):
            if warp == c.loading_warp:
                if lane == 0:
                    ptx.prefetch_tensor_maps(k_map, v_map)
                # Fetched while barriers are made, for every role.
                if lane < 2:
                    half = lane * 16
                    words = ptx.load_global_i32x4(work.toint() + Int64(item) * 32 + half)
                    ptx.store_shared_v4(smem + ITEM + half, words)
            if warp == 0:
                self.make_barriers(smem, lane)
            cute.arch.sync_threads()

        # Each role reads its work item for itself: nothing but indices lives across the split of registers.
        if warp >= c.consumer_warps:
            if cutlass.const_expr(c.widening_warps):
                if warp < c.loading_warp:
                    seq, key_begin, key_end, length = ptx.load_shared_i32x4(smem + ITEM)
                    self.widen(smem, tidx, self.num_stages(key_begin, key_end), ring_depth, length - key_begin)
                else:
                    self.load(
                        smem, warp, lane, k_map, v_map, block_table, head, num_pages, ring_depth,
                        block_table_stride, n_q, window, q_lens, scales,
                    )  # fmt: skip
            elif cutlass.const_expr(c.cluster > 1):
                cute.arch.setmaxregister_decrease(self.registers[0])
                if warp == c.loading_warp + 1:
                    self.make_barriers(smem, lane)
                row_block, rank = self.place()
                self.cluster_start.load(
                    smem, warp, lane, k_map, v_map, block_table, work, item, rank, head, num_pages, ring_depth,
                    block_table_stride, n_q, window, q_lens, expected_keys, scales,
                )  # fmt: skip
                if cutlass.const_expr(c.exchanges_p):
                    if warp == c.loading_warp + 1:
                        cute.arch.sync_warp()
                        cluster.wait()  # before it sends
                        row0 = row_block * c.row_tile
                        live = cutlass.min(n_q - row0, c.row_tile)
                        num_live = live
                        if cutlass.const_expr(c.q_lens):
                            tokens = self.mask.tokens(q_lens, item, n_q)
                            num_live = self.mask.live_rows(tokens, n_q, group_size) - row0
                        self.cluster_merge.send_stats(smem, lane, rank, live, softcap, num_live)
            else:
                self.load(
                    smem, warp, lane, k_map, v_map, block_table, head, num_pages, ring_depth, block_table_stride,
                    n_q, window, q_lens, scales,
                )  # fmt: skip
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            if cutlass.const_expr(c.cluster > 1):
                # Sequence and cluster have one number, and `work` are the lengths (decode_abi.py). These warps
                # made nothing that other CTAs must see.
                cluster.arrive_relaxed()
                seq = item
                key_begin, key_end, length = self.cluster_start.own_keys(work, item, self.place()[1], window)
            else:
                seq, key_begin, key_end, length = ptx.load_shared_i32x4(smem + ITEM)
            if seq >= 0:  # a padding item writes nothing
                row_block, rank = self.place()
                row0 = row_block * c.row_tile
                q_base = q.toint() + (Int64(seq) * q_seq + Int64(head * group_size) * q_head) * self.q_element_bytes
                score_scale = (
                    scale_qs
                    * load_f32(q_descale, Int64(seq) * q_descale_seq + head * q_descale_head)
                    * load_f32(k_descale, Int64(seq) * k_descale_seq + head * k_descale_head)
                )
                # Without a causal mask or a window every key of the chunk is visible to every row.
                length = length if cutlass.const_expr(c.q_len > 1 or c.window) else key_end
                tokens = self.mask.tokens(q_lens, seq, n_q)
                live_rows = self.mask.live_rows(tokens, n_q, group_size)
                if cutlass.const_expr(c.sinks):
                    # A cluster has whole sequences, and adds a row's sink where it merges the row.
                    is_first = True if c.cluster > 1 else self.mask.first_item(length, window, key_begin)
                    self.mask.stage_sinks(smem, tidx, sinks, head, group_size, row0, live_rows, is_first)
                self.consumer.stage_q(smem, warp, lane, q_base, row0, live_rows, group_size, q_token, q_head)
                # What only the end needs is fetched now and kept out of registers.
                if tidx == 0:
                    out_scale = load_f32(v_descale, Int64(seq) * v_descale_seq + head * v_descale_head)
                    ptx.store_shared_f32(smem + OUT_SCALE, out_scale)
                    if cutlass.const_expr(c.cluster > 1):
                        ptx.store_shared_f32(smem + SCORE_SCALE, score_scale)
                        ptx.store_shared_i32(smem + ITEM, seq)
                if cutlass.const_expr(c.cluster > 1):
                    self.cluster_start.meet()
                    self.cluster_merge.expect(smem, tidx, rank, cutlass.min(n_q - row0, c.row_tile))
                    cute.arch.sync_warp()
                    cluster.wait()  # every CTA has made its barriers, before anyone sends; now, while K is on its way
                else:
                    self.sync_consumers()
                place = self.consumer.consume(
                    smem, warp, lane, row0, group_size, (length, tokens, window, key_end), softcap, key_begin,
                    self.num_stages(key_begin, key_end), ring_depth, score_scale,
                )  # fmt: skip
                if cutlass.const_expr(c.cluster > 1):
                    seq = ptx.load_shared_i32(smem + ITEM)
                    if cutlass.const_expr(not c.keys_first):  # no register is left to keep what follows from it
                        tidx = ptx.here(tidx) & 1023  # divisions then know that it is positive
                        lane = tidx % 32
                    if cutlass.const_expr(c.exchanges_p):
                        live = cutlass.min(n_q - row0, c.row_tile)
                        self.cluster_merge.send_columns(smem, warp, lane, rank, live, *place)
                    else:
                        self.cluster_merge.put_slices(smem, lane, *place)
                else:
                    seq, _, _, _ = ptx.load_shared_i32x4(smem + ITEM)
                    slot, n_splits, first_slot, _ = ptx.load_shared_i32x4(smem + ITEM + 16)
                    self.epilogue.merge_slices(smem, lane, *place)
                    self.epilogue.finish_rows(smem, tidx, score_scale, softcap, live_rows - row0)

                rows = num_kv_heads * n_q
                stat_row = Int64(seq) * rows + head * n_q
                o_base = o.toint() + (Int64(seq) * o_seq + Int64(head * group_size) * o_head) * 2
                target = (o_base, o_token, o_head, lse, stat_row)
                if cutlass.const_expr(c.cluster > 1):
                    self.cluster_merge.merge(
                        smem, tidx, lane, rank, row0, cutlass.min(n_q - row0, c.row_tile), live_rows - row0,
                        group_size, softcap, scale_o, target,
                    )  # fmt: skip
                else:
                    part = (o_partial, m_partial, l_partial, Int64(slot) * rows + head * n_q)
                    # The result of an unsplit sequence goes to O and LSE, that of a chunk to the partial buffers.
                    self.epilogue.store(smem, tidx, row0, n_q, group_size, scale_o, n_splits > 1, target, part)
                    if n_splits > 1:
                        q_tiles, _, _ = cute.arch.grid_dim()
                        counter = (Int64(first_slot) * num_kv_heads + head) * q_tiles + row_block
                        if self.split_merge.is_last(smem, tidx, counters.toint() + counter * 4, n_splits):
                            first_row = Int64(first_slot) * rows + head * n_q
                            self.split_merge.merge(
                                warp, lane, row0, n_q, group_size, n_splits, rows, o_partial, m_partial, l_partial,
                                first_row, scale_o, target,
                            )  # fmt: skip

    @cute.jit
    def make_barriers(self, smem, lane):
        """All barriers of the CTA, by one warp."""
        c = self.config
        if lane < self.stages:
            ptx.mbarrier_init(smem + FULL + lane * 8, 33 if c.scale_bytes else 1)  # scales: each lane
            ptx.mbarrier_init(smem + EMPTY + lane * 8, c.ring_readers)
        self.init_more(smem, lane)
        if cutlass.const_expr(c.cluster > 1):
            self.cluster_merge.init(smem, lane)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def load(
        self, smem, warp, lane, k_map, v_map, block_table, head, num_pages, ring_depth, block_table_stride, n_q, window,
        q_lens, scales,
    ):  # fmt: skip
        """The loading warpgroup: its first warp keeps the ring full."""
        c = self.config
        cute.arch.setmaxregister_decrease(self.registers[0])
        if warp == c.loading_warp:
            seq, key_begin, key_end, length = ptx.load_shared_i32x4(smem + ITEM)
            table_row = Int64(seq) * block_table_stride
            first_key = Int32(0)
            if cutlass.const_expr(c.window):
                if seq >= 0:
                    first_key = self.mask.first_key((length, self.mask.tokens(q_lens, seq, n_q), window))
            self.producer.produce(
                smem, lane, k_map, v_map, block_table, table_row, head, num_pages, key_begin, key_end, first_key,
                self.num_stages(key_begin, key_end), ring_depth, head_scales(scales, head), None,
            )  # fmt: skip

    # What an implementation with more roles adds.

    def init_more(self, smem, lane):
        """Barriers beside those of the ring."""

    def widen(self, smem, tidx, num_stages, depth, num_keys):
        """What such warps do."""


def entry(config: MmaConfig, arch: Arch, kernel: type[PagedDecodeMma] = PagedDecodeMma) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""

    def pointer(dtype: Any) -> cute.Pointer:
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)

    i32, f32 = Int32, Float32
    pointers = [Uint8, BFloat16, i32, i32, f32, f32, f32, BFloat16, f32, f32, f32, f32, i32]
    scalars = [Int32(1)] * 18 + [Float32(1.0)] * 2
    on = {name for name, _ in optional_params(config)}
    optional = {
        "window": Int32(1), "sinks": pointer(f32), "softcap": Float32(1.0), "q_lens": pointer(i32),
        "expected_keys": Int32(1),
    }  # fmt: skip
    extras = [value if name in on else None for name, value in optional.items()]
    kinds = {"pointer": lambda: pointer(Uint8), "i32": lambda: Int32(1)}
    scales = tuple(kinds[kind]() for _, kind in scale_params(config)) or None
    return kernel(config, arch), (*map(pointer, pointers), *scalars, *extras, scales, cuda.CUstream(0))
