"""The producer of the tensor-memory kernel: pages of K and V into the ring, by TMA."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import load_i32
from cubinery.aot.kernels.paged_decode import block_scales
from cubinery.aot.kernels.paged_decode.tcgen05_tile import EMPTY, FULL, PACKED_EMPTY, PACKED_FULL, Tile
from cubinery.runtime.ops.paged_decode.decode_config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM

EVICT_FIRST = 0x12F0000000000000
"""The L2 policy of lines that are read once."""


class Producer(Tile):
    """One warp that keeps the ring full: K0, K1, V0, K2, V1, ..., a stage for each 128 elements of head_dim."""

    @property
    def policy(self) -> int | None:
        """How L2 keeps the lines of K and V."""
        return EVICT_FIRST if self.config.kv_evict_first else None

    @cute.jit
    def produce(
        self, smem, lane, k_map, v_map, block_table, table_row, head, num_pages, key_begin, key_end, tiles, scales
    ):  # fmt: skip
        """Load the tiles of a chunk. Lane i issues the box of a stage's page i. `scales`: see `head_scales`."""
        first = key_begin + lane * self.config.page_size  # of the lane's page, in the first tile
        place = (block_table, table_row, num_pages, key_end)
        page = self.look_up(place, lane, first)
        previous = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # the first pass over the ring waits for nothing
        for i in cutlass.range(tiles + 1, unroll=1):
            # Looked up one tile ahead, so that the latency hides behind the wait for a stage.
            following = self.look_up(place, lane, first + (i + 1) * TILE_KEYS)
            if cutlass.const_expr(self.config.l2_prefetch):
                self.prefetch(place, lane, k_map, v_map, head, first, i)
            if i < tiles:
                source = (k_map, head, page, None if scales is None else scales[0])
                stage, phase = self.load(smem, lane, place, source, key_begin + i * TILE_KEYS, stage, phase)
            if i > 0:
                source = (v_map, head, previous, None if scales is None else scales[1])
                stage, phase = self.load(smem, lane, place, source, key_begin + (i - 1) * TILE_KEYS, stage, phase)
            previous = page
            page = following

    def load(self, smem, lane, place, source, key, stage, phase):
        """K or V of the tile that begins at `key`; returns the next stage and its phase."""
        if self.config.packed_stages:
            return self.load_packed(smem, lane, place, source, key, stage, phase)
        row = self.first_row(place[3], key + lane * self.config.page_size)
        return self.load_blocks(smem, lane, source, row, stage, phase)

    def first_row(self, key_end, first):
        """Row at which the box of the page begins whose first key is `first`: below 0 where not all rows have keys.

        So zeros take the place of rows past the end, and come first. Only a sequence's last page is meant: chunks end
        where tiles do, or sequences; and past a chunk pages are out of bounds whatever the row.
        """
        if not self.keys_end_page:
            return Int32(0)
        return cutlass.min(key_end - first - self.config.page_size, 0)

    @cute.jit
    def load_packed(self, smem, lane, place, source, key, slot, phase):
        """A tile's codes as they lie in the cache, and their block scales, for the converter."""
        c = self.config
        tensor_map, head, page, (base, page_bytes, row_bytes) = source
        for part in cutlass.range(self.blocks // c.packed_blocks, unroll=1):
            full = smem + PACKED_FULL + slot * 8
            ptx.mbarrier_wait(smem + PACKED_EMPTY + slot * 8, phase)
            # Boxes and scales of other lanes may land first: until lane 0 arrives, the phase cannot end. Every lane
            # arrives for its scales, so none falls behind.
            if lane == 0:
                ptx.mbarrier_arrive_expect_tx(full, c.packed_tx_bytes)
            buffer = smem + self.packed + slot * c.packed_stage_bytes
            if lane < self.page_boxes:
                coordinates = (part * c.packed_row_bytes, Int32(0), head, page)
                target = buffer + lane * (c.page_size * c.packed_row_bytes)
                ptx.tma_load_4d(target, tensor_map.get_ptr(), coordinates, full, self.policy)
            block_scales.copy_scales(
                buffer + c.packed_tx_bytes, lane, (base + part * c.packed_scale_bytes, page_bytes, row_bytes),
                block_scales.owner_by_shuffle(page, c.page_size), place[2], key, place[3], keys=TILE_KEYS,
                page_size=c.page_size, scale_bytes=c.packed_scale_bytes,
            )  # fmt: skip
            ptx.mbarrier_arrive_after_copies(full)
            slot, phase = self.advance(slot, phase, c.packed_stages)
        return slot, phase

    @cute.jit
    def load_blocks(self, smem, lane, source, row, stage, phase):
        """A tile's blocks straight into the ring; `row` is where this lane's boxes begin."""
        c = self.config
        tensor_map, head, page, _ = source
        for block in cutlass.range(self.blocks, unroll=1):
            full = smem + FULL + stage * 8
            ptx.mbarrier_wait(smem + EMPTY + stage * 8, phase)
            if lane == 0:
                ptx.mbarrier_arrive_expect_tx(full, c.stage_tx_bytes)
            # Nobody misses a lane without a box: two phases late it would wait for a parity that never comes back.
            cute.arch.sync_warp()
            if lane < self.page_boxes:
                target = smem + self.ring + stage * c.STAGE_BYTES + lane * (c.page_size * BLOCK_DIM)
                coordinates = (block * BLOCK_DIM, row, head, page)
                ptx.tma_load_4d(target, tensor_map.get_ptr(), coordinates, full, self.policy)
            stage, phase = self.advance(stage, phase, self.stages)
        return stage, phase

    @cute.jit
    def prefetch(self, place, lane, k_map, v_map, head, first, i):
        """Ask L2 for K and V of the tile that lies `l2_prefetch` ahead of tile i, before the first also those between.

        Neither past the chunk nor past the sequence's last page: there is nothing to fetch.
        """
        depth = self.config.l2_prefetch
        begin = cutlass.select_(i == 0, Int32(1), i + depth)
        for ahead in cutlass.range(begin, i + depth + 1, unroll=1):
            key = first + ahead * TILE_KEYS
            page = self.look_up(place, lane, key)
            if self.wanted(place, lane, key):
                for block in cutlass.range(self.blocks, unroll=1):
                    coordinates = (block * BLOCK_DIM, Int32(0), head, page)
                    ptx.prefetch_4d(k_map.get_ptr(), coordinates)
                    ptx.prefetch_4d(v_map.get_ptr(), coordinates)

    @cute.jit
    def look_up(self, place, lane, key):
        """Page of a box by its first key; past the chunk one out of bounds, which loads zeros."""
        block_table, table_row, num_pages, _ = place
        page = Int32(num_pages)
        if self.wanted(place, lane, key):
            page = load_i32(block_table, table_row + key // self.config.page_size)
        return page

    def wanted(self, place, lane, key):
        """Whether this lane has a page to load that begins at `key`, which may lie past the range of an int32."""
        return (Uint32(key) < Uint32(place[3])) & (lane < self.page_boxes)
