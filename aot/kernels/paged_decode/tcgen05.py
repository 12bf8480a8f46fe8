"""Paged decode on tensor memory: one source for sm_100a, sm_103a and sm_110a.

One CTA computes `row_tile` packed query rows of one KV head over one chunk of one sequence, 128 keys a tile. Scores are
S^T = K Q^T with keys as the MMA's rows, O^T = V^T P with elements of head_dim as rows: query rows are few, so they are
its columns, and K and V are operands as they lie in the cache.

Roles
    softmax    warpgroup 0. Stages Q, turns S into P, rescales O where a maximum grew, writes the results and merges
               the chunks of a split sequence.
    issuer     the first warp of the last warpgroup; one thread issues every product.
    producer   the second warp of that warpgroup. Looks pages up and keeps the ring full, one TMA box a page and 128
               elements.
    converters the warpgroups between, if any. With a bf16 Q they widen each block of K and V to f16 in tensor memory,
               which the products then read instead of the ring. With nvfp4 the producer fills a small ring of packed
               tiles, and they multiply those with their scales into the ring of blocks.

The ring holds blocks of 128 keys by 128 elements: K0, K1, V0, K2, V1, ... One full and one empty mbarrier each; a
product's commit empties a stage, or the converter that has read it, and a product then empties the widened one. S, P
and the maxima have two buffers, O one.

Numerics. Scores are exact products of codes with fp32 sums. The running maximum is kept in raw score units; a row that
sees nothing keeps m = -inf and l = 0, which gives O = 0 and LSE = -inf. P is rounded to e4m3 after a factor of 448, or
to f16 after one of 2^15, which leave at the end; l sums it unrounded. e4m3 fits f16, in one instruction for two codes;
a row of a bf16 Q does so once a power of two has brought its largest element to [2^14, 2^15). Of a cache that can hold
NaN nothing past a sequence's end enters a tile: see `Tile.keys_end_page`.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_ptr
from cutlass.experimental.cuda import tensor_map as tm

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.common.memory import load_f32
from cubinery.aot.kernels.paged_decode.block_scales import head_scales
from cubinery.aot.kernels.paged_decode.constants import LOG2E
from cubinery.aot.kernels.paged_decode.decode_abi import scale_params
from cubinery.aot.kernels.paged_decode.split_merge import SplitMerge
from cubinery.aot.kernels.paged_decode.tcgen05_convert import Converter
from cubinery.aot.kernels.paged_decode.tcgen05_load import Producer
from cubinery.aot.kernels.paged_decode.tcgen05_mma import Issuer
from cubinery.aot.kernels.paged_decode.tcgen05_nvfp4 import Nvfp4Converter
from cubinery.aot.kernels.paged_decode.tcgen05_softmax import Softmax
from cubinery.aot.kernels.paged_decode.tcgen05_store import Epilogue
from cubinery.aot.kernels.paged_decode.tcgen05_tile import (
    EMPTY,
    FACTORS,
    FULL,
    IS_LAST,
    ITEM,
    ITEM_END,
    O_DONE,
    P_FULL,
    PACKED_EMPTY,
    PACKED_FULL,
    Q_FULL,
    S_FULL,
    SOFTMAX_BARRIER,
    SOFTMAX_WARPS,
    TMEM,
    WIDE_EMPTY,
    WIDE_FULL,
    Tile,
)
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.decode_config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.tcgen05_config import Tcgen05Config

CONVERTER_WARPS = 4
"""Warps of the warpgroup that converts a block."""


class PagedDecodeTcgen05(Tile):
    """Traces the decode kernel of one configuration."""

    def __init__(self, config: Tcgen05Config, arch: Arch) -> None:
        super().__init__(config, arch)
        self.producer, self.issuer = Producer(config, arch), Issuer(config, arch)
        self.softmax, self.epilogue = Softmax(config, arch), Epilogue(config, arch)
        self.converter = (Nvfp4Converter if config.packed_stages else Converter)(config, arch)
        self.split_merge = SplitMerge(
            head_dim=config.head_dim, row_tile=config.row_tile, warps=SOFTMAX_WARPS, barrier=SOFTMAX_BARRIER,
            is_last=IS_LAST, in_flight=64 if self.softmax_registers > 96 else 32,
        )  # fmt: skip
        self.issuer_warp = 4 * (config.warpgroups - 1)
        self.producer_warp = self.issuer_warp + 1

    @cute.jit
    def __call__(
        self,
        kv: cute.Pointer,
        buffers: tuple[cute.Pointer, ...],
        shape: tuple[Int32, ...],
        strides: tuple[Int32, ...],
        factors: tuple[Float32, ...],
        scales: tuple[Any, ...] | None,
        stream: cuda.CUstream,
    ) -> None:
        """Fix the order and types of the kernel's parameters, and the attributes of its launch.

        A tuple is a parameter for each of its elements: see `abi`, whose order this is.
        """
        c = self.config
        # The runtime encodes the real maps from the manifest; here only the parameters' type matters.
        tensor_map = tm.create_tensor_map_tiled(
            Int64(kv.toint()), Uint8, [c.head_dim, c.page_size, 1, 1], [16, 16, 16], [128, 16, 1, 1]
        )
        self.kernel.set_name_prefix(
            "cubinery_paged_decode_tcgen05", remove_cutlass_symbol=True, keep_mangled_name=False
        )
        self.kernel(tensor_map, tensor_map, buffers, shape, strides, factors, scales).launch(
            grid=(1, 1, 1),
            block=(c.threads, 1, 1),
            smem=self.smem_bytes,
            stream=stream,
            min_blocks_per_mp=c.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=c.pdl,
        )

    # -- device side -----------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        k_map: cutlass.GridConstant[tm.TensorMap],
        v_map: cutlass.GridConstant[tm.TensorMap],
        buffers: tuple[cute.Pointer, ...],
        shape: tuple[Int32, ...],
        strides: tuple[Int32, ...],
        factors: tuple[Float32, ...],
        scales: tuple[Any, ...] | None,
    ) -> None:
        c = self.config
        work = buffers[2]
        tidx, _, _ = cute.arch.thread_idx()
        _, head, item = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = tidx % 32
        smem = cute.arch.get_dyn_smem(Uint8, 1024).toint()

        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if warp == self.producer_warp:
            if lane == 0:
                ptx.prefetch_tensor_maps(k_map, v_map)
        work_item = ptx.load_global_i32x4(work.toint() + Int64(item) * 32)
        if work_item[0] >= 0:  # a padding item writes nothing
            self.softmax.prepare(smem, tidx)
            if warp == 0:
                self.init_barriers(smem, lane)
                tc.allocate(smem + TMEM, self.tmem_columns)
            if tidx == 32:
                ptx.store_shared_v4(smem + ITEM, work_item)
            if tidx == 64:
                # (partial slot, chunks of the sequence, its first partial slot).
                ptx.store_shared_v4(smem + ITEM_END, ptx.load_global_i32x4(work.toint() + Int64(item) * 32 + 16))
            tc.fence_before()
            cute.arch.sync_threads()
            tc.fence_after()
            # Each role reads its work item and its lane for itself: nothing lives across the split of registers.
            if warp >= self.issuer_warp:
                self.move_registers(0)
                if warp == self.issuer_warp:
                    _, _, _, _, tiles = self.work_item(smem)
                    tmem = ptx.load_shared_i32(smem + TMEM)
                    with cute.arch.elect_one():
                        self.issuer.issue(smem, tmem, tiles)
                if warp == self.producer_warp:
                    seq, key_begin, key_end, _, tiles = self.work_item(smem)
                    table_row = Int64(seq) * shape[5]
                    self.producer.produce(
                        smem, cute.arch.lane_idx(), k_map, v_map, buffers[1], table_row, head, shape[3], key_begin,
                        key_end, tiles, head_scales(scales, head),
                    )  # fmt: skip
            elif warp < SOFTMAX_WARPS:
                self.move_registers(2)
                self.attend(smem, warp * 32 + cute.arch.lane_idx(), buffers, shape, strides, factors)
            elif cutlass.const_expr(c.converters > 0):
                self.move_registers(1)
                _, _, _, _, tiles = self.work_item(smem)
                tmem = ptx.load_shared_i32(smem + TMEM)
                thread = warp % 4 * 32 + cute.arch.lane_idx()
                self.converter.convert(smem, thread, tmem, (warp - SOFTMAX_WARPS) // 4, tiles)

    def work_item(self, smem):
        """(sequence, first key, end key, keys of the sequence, tiles): see `SplitPlan.device_work`."""
        seq, key_begin, key_end, length = ptx.load_shared_i32x4(smem + ITEM)
        # An empty sequence has a tile too, of which no row sees a key.
        tiles = cutlass.max((key_end - key_begin + (TILE_KEYS - 1)) // TILE_KEYS, 1)
        return seq, key_begin, key_end, length, tiles

    @cute.jit
    def init_barriers(self, smem, lane):
        """By one warp, before a barrier of the CTA."""
        c = self.config
        if lane < self.stages:
            ptx.mbarrier_init(smem + FULL + lane * 8, CONVERTER_WARPS if c.packed_stages else 1)
            ptx.mbarrier_init(smem + EMPTY + lane * 8, CONVERTER_WARPS if self.widens else 1)
        if lane < self.wide_stages:
            ptx.mbarrier_init(smem + WIDE_FULL + lane * 8, CONVERTER_WARPS)
            ptx.mbarrier_init(smem + WIDE_EMPTY + lane * 8, 1)
        if lane < c.packed_stages:
            ptx.mbarrier_init(smem + PACKED_FULL + lane * 8, 33)  # codes, and each lane's scales
            ptx.mbarrier_init(smem + PACKED_EMPTY + lane * 8, CONVERTER_WARPS)
        if lane < 2:
            ptx.mbarrier_init(smem + S_FULL + lane * 8, 1)
            ptx.mbarrier_init(smem + P_FULL + lane * 8, SOFTMAX_WARPS)
            ptx.mbarrier_init(smem + O_DONE + lane * 8, 1)
        if lane == 0:
            ptx.mbarrier_init(smem + Q_FULL, SOFTMAX_WARPS)
        cute.arch.mbarrier_init_fence()

    def move_registers(self, role):
        """Give registers away or take them, by a whole warpgroup: 0 issuing and loading, 1 converting, 2 softmax."""
        if self.registers is None:
            return
        if self.registers[role] < self.launch_registers:
            cute.arch.setmaxregister_decrease(self.registers[role])
        elif self.registers[role] > self.launch_registers:
            cute.arch.setmaxregister_increase(self.registers[role])

    @cute.jit
    def attend(self, smem, tidx, buffers, shape, strides, factors):
        """The softmax warps' part, from Q to the result."""
        q, _, _, q_descale, k_descale, v_descale, o, lse, o_partial, m_partial, l_partial, counters = buffers
        num_kv_heads, n_q, group_size, _, _, _ = shape
        q_seq, q_token, q_head, o_seq, o_token, o_head, *descale_strides = strides
        scale_qs, scale_o = factors
        seq, key_begin, key_end, length, tiles = self.work_item(smem)
        row_block, head, _ = cute.arch.block_idx()
        row0 = row_block * self.rows

        q_base = q.toint() + (Int64(seq) * q_seq + Int64(head * group_size) * q_head) * self.config.q_element_bytes
        self.softmax.stage_q(smem, tidx, q_base, row0, n_q, group_size, q_token, q_head)
        descales = [
            load_f32(pointer, Int64(seq) * descale_strides[2 * n] + head * descale_strides[2 * n + 1])
            for n, pointer in enumerate((q_descale, k_descale, v_descale))
        ]
        score_scale = self.at_least_tiny(scale_qs * descales[0] * descales[1] * self.kv_factor)
        # What only the end needs waits in shared memory, out of registers.
        if tidx == 0:
            ptx.store_shared_f32x2(smem + FACTORS, (score_scale, descales[2] * self.kv_factor))
        # Without a causal mask every key of the chunk is visible to every row.
        length = length if cutlass.const_expr(self.config.q_len > 1) else key_end
        self.softmax.stage_limits(smem, tidx, row0, group_size, length)
        self.sync_softmax()
        full = self.softmax.full_tiles(length, key_begin, tiles)
        tmem = ptx.load_shared_i32(smem + TMEM)
        exp_scale = self.at_least_tiny(score_scale * LOG2E)
        self.softmax.attend(smem, tidx, tmem, key_begin, full, tiles, exp_scale)

        seq, _, _, _, tiles = self.work_item(smem)
        slot, n_splits, first_slot, _ = ptx.load_shared_i32x4(smem + ITEM_END)
        score_scale, out_scale = ptx.load_shared_f32x2(smem + FACTORS)
        tmem = ptx.load_shared_i32(smem + TMEM)
        rows = num_kv_heads * n_q
        o_base = o.toint() + (Int64(seq) * o_seq + Int64(head * group_size) * o_head) * 2
        target = (o_base, o_token, o_head, lse, Int64(seq) * rows + head * n_q)
        part = (o_partial, m_partial, l_partial, Int64(slot) * rows + head * n_q)
        is_split = n_splits > 1
        self.epilogue.finish_rows(
            smem, tidx, row0, n_q, group_size, score_scale, out_scale, scale_o, is_split, target, part
        )
        self.epilogue.store_o(smem, tidx, tmem, tiles, row0, n_q, is_split, target, part)
        self.epilogue.free(tidx, tmem)
        # The result of an unsplit sequence went to O and LSE, that of a chunk to the partial buffers.
        if is_split:
            q_tiles, _, _ = cute.arch.grid_dim()
            counter = (Int64(first_slot) * num_kv_heads + head) * q_tiles + row_block
            if self.split_merge.is_last(smem, tidx, counters.toint() + counter * 4, n_splits):
                first_row = Int64(first_slot) * rows + head * n_q
                self.split_merge.merge(
                    cute.arch.make_warp_uniform(tidx // 32), tidx % 32, row0, n_q, group_size, n_splits, rows,
                    o_partial, m_partial, l_partial, first_row, scale_o, target,
                )  # fmt: skip


def entry(config: Tcgen05Config, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""

    def pointer(dtype: Any) -> cute.Pointer:
        return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=16)

    i32, f32 = Int32, Float32
    buffers = tuple(map(pointer, [BFloat16, i32, i32, f32, f32, f32, BFloat16, f32, f32, f32, f32, i32]))
    shape, strides = (Int32(1),) * 6, (Int32(1),) * 12
    kinds = {"pointer": lambda: pointer(Uint8), "i32": lambda: Int32(1)}
    scales = tuple(kinds[kind]() for _, kind in scale_params(config)) or None
    kernel = PagedDecodeTcgen05(config, arch)
    return kernel, (pointer(Uint8), buffers, shape, strides, (Float32(1.0),) * 2, scales, cuda.CUstream(0))
