"""The producer of the warp-level MMA kernel: pages of K and V into the ring, by TMA."""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import load_i32
from cubinery.aot.kernels.paged_decode import block_scales
from cubinery.aot.kernels.paged_decode.mma_tile import EMPTY, FULL, MmaTile


class Producer(MmaTile):
    """One warp that keeps the ring full."""

    @cute.jit
    def produce(
        self, smem, lane, k_map, v_map, block_table, table_row, head, num_pages, key_begin, key_end, first_key,
        num_stages, depth, scales, first_pages,
    ):  # fmt: skip
        """Fill the ring's first `depth` slots.

        Lane i issues box i of a stage: page i // boxes_per_row, column i % boxes_per_row.
        Pages that end before `first_key` are not looked up; without a window nobody asks. `scales` (nvfp4, else None):
        of K and of V, the address of the head's block scales in page 0, and the bytes from page to page and row to row.
        `first_pages`: what the function of that name gives, where that is known.
        """
        c = self.config
        page_in_stage = lane // c.boxes_per_row
        column = lane % c.boxes_per_row
        box_rows = self.box[1]
        destination = (column * c.stage_keys + page_in_stage * box_rows) * c.box_bytes
        own_key = key_begin + lane * box_rows
        if cutlass.const_expr(first_pages is None):
            first_pages = self.first_pages(lane, block_table, table_row, num_pages, first_key, key_begin, key_end)
        pages, ahead = first_pages
        in_batch = Int32(0)
        stage = Int32(0)
        phase = Int32(1)  # the first pass over the ring waits for nothing
        for i in cutlass.range(num_stages, unroll=1):
            if in_batch == 32:
                in_batch, pages = Int32(0), ahead
                own_key = own_key + self.batch_keys
                ahead = self.look_up(block_table, table_row, num_pages, first_key, key_end, own_key + self.batch_keys)
            page = cute.arch.shuffle_sync(pages, in_batch + page_in_stage)
            in_batch = in_batch + self.pages_per_stage
            key = key_begin + i * c.stage_keys + page_in_stage * box_rows
            for which in cutlass.range_constexpr(2):
                full, empty = smem + FULL + stage * 8, smem + EMPTY + stage * 8
                # Who waits for a slot also holds its next phase up, with a box or, where there are scales, with those.
                # Anyone else could be left behind, and wait for a parity that has come and gone.
                if cutlass.const_expr(c.scale_bytes):
                    ptx.mbarrier_wait(empty, phase)
                if lane < self.boxes:
                    if cutlass.const_expr(not c.scale_bytes):
                        ptx.mbarrier_wait(empty, phase)
                    # Boxes of other lanes may land first: until lane 0 arrives, the phase cannot end.
                    if lane == 0:
                        ptx.mbarrier_arrive_expect_tx(full, c.code_bytes)
                    coordinates = (column * self.box[0], key % c.page_size, head, page)
                    target = smem + self.ring + stage * c.stage_bytes + destination
                    ptx.tma_load_4d(target, (k_map, v_map)[which].get_ptr(), coordinates, full)
                if cutlass.const_expr(c.scale_bytes):
                    target = smem + self.ring + stage * c.stage_bytes + c.code_bytes
                    first = key_begin + i * c.stage_keys
                    block_scales.copy_scales(
                        target, lane, scales[which],
                        block_scales.owner_by_shuffle(page, box_rows, c.boxes_per_row), num_pages, first, key_end,
                        keys=c.stage_keys, page_size=c.page_size, scale_bytes=c.scale_bytes,
                    )  # fmt: skip
                    ptx.mbarrier_arrive_after_copies(full)
                stage, phase = self.advance(stage, phase, depth)

    def first_pages(self, lane, block_table, table_row, num_pages, first_key, key_begin, key_end):
        """A lane's page of the first batch of stages, and of the next.

        The first stages' pages are known after one round trip to memory, and later ones hide behind waits for slots.
        """
        key = key_begin + lane * self.box[1]
        row = (block_table, table_row, num_pages, first_key, key_end)
        return self.look_up(*row, key), self.look_up(*row, key + self.batch_keys)

    @cute.jit
    def look_up(self, block_table, table_row, num_pages, first_key, key_end, key):
        """Page of a box by its first key; past the chunk or before the window one out of bounds, which loads zeros."""
        page = Int32(num_pages)
        wanted = key < key_end
        if cutlass.const_expr(self.config.window):
            wanted = wanted & (key + self.box[1] > first_key)
        if wanted:
            page = load_i32(block_table, table_row + key // self.config.page_size)
        return page
