"""The converters of the tensor-memory kernel: K and V widened from e4m3 to f16, from the ring into tensor memory.

A block is 128 keys by 128 elements. In tensor memory both operands have what the product sums along as columns, two
elements a column: K has keys as lanes, V has elements of head_dim as lanes, so it is transposed on the way.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.paged_decode.tcgen05_tile import EMPTY, FULL, WIDE_EMPTY, WIDE_FULL, Tile

CHUNK = 16
"""Bytes that one access to shared memory takes of a row."""

PARTS = 4
"""Steps of a block's conversion: registers are few."""


class Converter(Tile):
    """What a converting warpgroup does; with several, they take blocks in turn."""

    @cute.jit
    def convert(self, smem, thread, tmem, which, tiles):
        """All blocks of a chunk that warpgroup `which` of the converters takes: K0, K1, V0, K2, V1, ..."""
        lane, warp = thread % 32, cute.arch.make_warp_uniform(thread // 32)
        fixed = (smem, lane, warp, tmem + (warp << 21))
        # The first pass over tensor memory waits for nothing.
        state = (Int32(which), Int32(0), Int32(which), Int32(1))
        state = self.blocks_of(fixed, self.load_keys, self.store_keys, state)
        for i in cutlass.range(tiles, unroll=1):
            if i + 1 < tiles:
                state = self.blocks_of(fixed, self.load_keys, self.store_keys, state)
            state = self.blocks_of(fixed, self.load_values, self.store_values, state)

    @cute.jit
    def blocks_of(self, fixed, load, store, state):
        """This warpgroup's blocks of K or of V of one tile; returns the next stages and phases of both rings."""
        smem, lane, warp, lanes = fixed
        stage, phase, slot, parity = state
        step = self.config.converters
        for _ in cutlass.range(self.blocks // step, unroll=1):
            ptx.mbarrier_wait(smem + FULL + stage * 8, phase)
            ptx.mbarrier_wait(smem + WIDE_EMPTY + slot * 8, parity)
            tc.fence_after()
            for part in cutlass.range_constexpr(PARTS):
                codes = load(smem + self.ring + stage * self.config.STAGE_BYTES, lane, warp, part)
                if cutlass.const_expr(part == PARTS - 1):
                    self.arrive(smem + EMPTY + stage * 8)
                store(lanes + self.wide_column(slot), part, self.widen(codes))
            tc.wait_store()
            tc.fence_before()
            self.arrive(smem + WIDE_FULL + slot * 8)
            stage, phase = self.advance(stage, phase, self.stages, step)
            slot, parity = self.advance(slot, parity, self.wide_stages, step)
        return stage, phase, slot, parity

    def widen(self, codes):
        """f16 pairs of codes, two registers for one."""
        return [pair for word in codes for pair in ptx.e4m3x4_to_f16x2x2(word)]

    # -- K: a thread takes a key -----------------------------------------------------------------

    def load_keys(self, block, lane, warp, part):
        """A quarter of the codes of this thread's key, four a register."""
        row = block + (warp * 32 + lane) * 128
        chunks = (2 * part, 2 * part + 1)
        return [code for chunk in chunks for code in ptx.load_shared_i32x4(row + (chunk ^ (lane % 8)) * CHUNK)]

    def store_keys(self, address, part, words):
        """Pairs of elements to 16 columns of this thread's lane."""
        tc.store_words(address + 16 * part, words)

    # -- V: a warp takes 32 elements of every key ------------------------------------------------

    def load_values(self, block, lane, warp, part):
        """Codes of 16 elements and 64 keys, four consecutive keys a register: see `ldmatrix_x2_bytes`."""
        chunk, first = 2 * warp + part // 2, part % 2 * 64
        row = block + (first + lane) * 128 + (chunk ^ (lane % 8)) * CHUNK
        return [*ptx.ldmatrix_x2_bytes(row), *ptx.ldmatrix_x2_bytes(row + 32 * 128)]

    def store_values(self, address, part, words):
        """Pairs of keys to 32 columns of 16 lanes."""
        tc.store_quad_words(address + (part // 2 * 16 << 16) + part % 2 * 32, words)
