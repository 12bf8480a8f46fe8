"""How the CTAs of a cluster begin: none of them waits for a work item.

A cluster shares one sequence, the one with its number, so that the number of its keys is all that a CTA must fetch. The
computing warps stage Q at once. The loading warp looks pages up by the number of keys that the launch expects, while
the actual number is on its way, and again if that differs. A third warp makes the barriers.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from cubinery.aot.kernels.common import cluster, ptx
from cubinery.aot.kernels.common.memory import load_i32
from cubinery.aot.kernels.paged_decode.block_scales import head_scales
from cubinery.aot.kernels.paged_decode.mma_load import Producer
from cubinery.aot.kernels.paged_decode.mma_mask import Mask
from cubinery.aot.kernels.paged_decode.mma_tile import RING_BARRIER, START_BARRIER, MmaTile
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, MmaConfig


class ClusterStart(MmaTile):
    """What the warps of a CTA do for its cluster before they load and compute."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.producer, self.mask = Producer(config, arch), Mask(config, arch)

    def chunk(self, rank, key_begin, key_end):
        """A CTA's run of the tiles of a sequence; runs differ by one tile at most, and may be empty."""
        log2_size = cluster.log2_size()
        tiles = (key_end - key_begin + (TILE_KEYS - 1)) // TILE_KEYS
        each = tiles >> log2_size
        longer = tiles - (each << log2_size)  # so many CTAs take a tile more
        begin = key_begin + (rank * each + cutlass.min(rank, longer)) * TILE_KEYS
        tiles = each + cutlass.select_(rank < longer, Int32(1), Int32(0))
        return begin, cutlass.max(begin, cutlass.min(key_end, begin + tiles * TILE_KEYS))

    def own_keys(self, lengths, seq, rank, window):
        """(first, end key of this CTA's part of a sequence, all its keys)."""
        length = load_i32(lengths, Int64(seq))
        begin = Int32(0)
        if self.config.window:  # from the tile of the first key that any token may see, as a plan has it
            begin = cutlass.max(length - (self.config.q_len - 1) - window, 0) // TILE_KEYS * TILE_KEYS
        return (*self.chunk(rank, begin, length), length)

    def meet(self):
        """The computing warps meet, and know that the barriers have been made."""
        cute.arch.sync_warp()
        cute.arch.barrier(barrier_id=START_BARRIER, number_of_threads=self.consumer_threads + 32)

    @cute.jit
    def load(
        self, smem, warp, lane, k_map, v_map, block_table, lengths, seq, rank, head, num_pages, depth,
        block_table_stride, n_q, window, q_lens, expected_keys, scales,
    ):  # fmt: skip
        """The loading warpgroup: its first warp keeps the ring full, its second one has made the barriers."""
        c = self.config
        if warp == c.loading_warp + 1:
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=RING_BARRIER, number_of_threads=64)
            cute.arch.barrier_arrive(barrier_id=START_BARRIER, number_of_threads=self.consumer_threads + 32)
        cluster.arrive_relaxed()  # behind the fence for the barriers
        if warp == c.loading_warp:
            table_row = Int64(seq) * block_table_stride
            if lane == 0:
                ptx.prefetch_tensor_maps(k_map, v_map)
            if cutlass.const_expr(c.expected_keys):
                likely_begin, likely_end = self.chunk(rank, Int32(0), expected_keys)
                pages, ahead = self.producer.first_pages(
                    lane, block_table, table_row, num_pages, Int32(0), likely_begin, likely_end
                )
            key_begin, key_end, length = self.own_keys(lengths, seq, rank, window)
            first_key = Int32(0)
            if cutlass.const_expr(c.window):
                first_key = self.mask.first_key((length, self.mask.tokens(q_lens, seq, n_q), window))
            first_pages = None
            if cutlass.const_expr(c.expected_keys):
                if (key_begin != likely_begin) | (key_end != likely_end):
                    pages, ahead = self.producer.first_pages(
                        lane, block_table, table_row, num_pages, first_key, key_begin, key_end
                    )
                first_pages = (pages, ahead)
            cute.arch.sync_warp()
            cute.arch.barrier(barrier_id=RING_BARRIER, number_of_threads=64)
            self.producer.produce(
                smem, lane, k_map, v_map, block_table, table_row, head, num_pages, key_begin, key_end, first_key,
                self.num_stages(key_begin, key_end), depth, head_scales(scales, head), first_pages,
            )  # fmt: skip
