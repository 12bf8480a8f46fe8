"""The converter of nvfp4 caches: packed tiles times their block scales, as e4m3 blocks into the ring.

An element becomes e4m3(code * scale / 8). The eighth keeps the product, at most 6 * 448, within e4m3; it leaves with
the scale of the scores and that of O.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.tcgen05_tile import EMPTY, FULL, PACKED_EMPTY, PACKED_FULL, Tile
from cubinery.runtime.ops.paged_decode.decode_config import NVFP4_BLOCK, TILE_KEYS
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM

THREADS = 128
CHUNK = 32
"""Elements of a row that a thread takes at once: 16 bytes of codes, two scales, 32 bytes of e4m3."""


class Nvfp4Converter(Tile):
    """What the converting warpgroup does."""

    @cute.jit
    def convert(self, smem, thread, tmem, which, tiles):
        """All packed stages of a chunk, K and V, in the order in which they are loaded and used."""
        c = self.config
        slot, parity = Int32(0), Int32(0)
        stage, phase = Int32(0), Int32(1)  # the first pass over the ring waits for nothing
        for _ in cutlass.range(2 * tiles * (self.blocks // c.packed_blocks), unroll=1):
            ptx.mbarrier_wait(smem + PACKED_FULL + slot * 8, parity)
            buffer = smem + self.packed + slot * c.packed_stage_bytes
            for block in cutlass.range(c.packed_blocks, unroll=1):
                ptx.mbarrier_wait(smem + EMPTY + stage * 8, phase)
                codes = buffer + block * (BLOCK_DIM // 2)
                scales = buffer + c.packed_tx_bytes + block * (BLOCK_DIM // NVFP4_BLOCK)
                self.convert_block(codes, scales, smem + self.ring + stage * c.STAGE_BYTES, thread)
                ptx.fence_async_shared()
                self.arrive(smem + FULL + stage * 8)
                stage, phase = self.advance(stage, phase, self.stages)
            self.arrive(smem + PACKED_EMPTY + slot * 8)
            slot, parity = self.advance(slot, parity, c.packed_stages)

    @cute.jit
    def convert_block(self, codes, scales, target, thread):
        """One block of 128 keys by 128 elements; four threads take a key."""
        c = self.config
        chunks = BLOCK_DIM // CHUNK
        chunk = thread % chunks
        for i in cutlass.range(TILE_KEYS * chunks // THREADS, unroll=1):
            row = i * (THREADS // chunks) + thread // chunks
            words = ptx.load_shared_i32x4(codes + row * c.packed_row_bytes + chunk * (CHUNK // 2))
            pair = ptx.load_shared_u16(scales + row * c.packed_scale_bytes + chunk * (CHUNK // NVFP4_BLOCK))
            for n, scale in enumerate(ptx.nvfp4_scales(pair)):
                found = [word for code in words[2 * n : 2 * n + 2] for word in ptx.nvfp4_to_e4m3(code, scale)]
                place = (chunk * 2 + n) ^ (row % 8)  # the ring's swizzle
                ptx.store_shared_v4(target + row * BLOCK_DIM + place * 16, found)
