"""The warpgroup that widens loaded tiles of e4m3 to f16, once for all query rows."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_tile import EMPTY, FULL, WIDE_EMPTY, WIDE_FULL
from cubinery.aot.kernels.paged_decode.wgmma_tile import WgmmaTile
from cubinery.runtime.ops.paged_decode.wgmma_config import WIDE_STAGES

ROWS_AT_ONCE = 32
"""Keys of a tile that the warpgroup reads at a time: four lanes a key, two chunks of 16 codes a lane."""


class Widener(WgmmaTile):
    """From the ring that TMA fills to the ring that tensor cores read."""

    @cute.jit
    def widen(self, smem, thread, num_stages, depth, num_keys):
        """All tiles of a work item in the ring's order, K0, V0, K1, ...

        `thread` counts within the warpgroup. Values past the sequence's end, `num_keys` keys on, may be anything; their
        probabilities are 0, so they become zeros.
        """
        c = self.config
        lane = thread % 32
        row, j = thread // 4, thread % 4
        # Neighbouring rows take their two chunks in opposite order, so that eight lanes never meet in a bank.
        odd, flip = row & 1, row & 7
        source = row * 128 + ((j + 4 * odd) ^ flip) * 16
        target = row * 128 + ((2 * j) ^ flip) * 16
        targets = (target + odd * self.block_bytes, target + (1 - odd) * self.block_bytes)
        stage, phase = Int32(0), Int32(0)
        slot, slot_phase = Int32(0), Int32(1)  # the first pass over the slots waits for nothing
        for i in cutlass.range(num_stages, unroll=1):
            left = num_keys - i * c.stage_keys
            for which in cutlass.range_constexpr(2):
                ptx.mbarrier_wait(smem + FULL + stage * 8, phase)
                ptx.mbarrier_wait(smem + WIDE_EMPTY + slot * 8, slot_phase)
                tile, wide = smem + self.ring + stage * c.stage_bytes, smem + self.wide + slot * c.wide_bytes
                self.widen_tile(tile + source, [wide + t for t in targets])
                if cutlass.const_expr(which == 1):
                    if left < c.stage_keys:
                        self.clear(row, left, [wide + t for t in targets])
                ptx.fence_async_shared()
                cute.arch.sync_warp()
                if lane == 0:
                    ptx.mbarrier_arrive(smem + WIDE_FULL + slot * 8)
                    ptx.mbarrier_arrive(smem + EMPTY + stage * 8)
                stage, phase = self.advance(stage, phase, depth)
                slot, slot_phase = self.advance(slot, slot_phase, WIDE_STAGES)

    @cute.jit
    def widen_tile(self, source, targets):
        """This thread's chunks of every ROWS_AT_ONCE-th key."""
        batches = range(self.config.stage_keys // ROWS_AT_ONCE)
        loaded = [
            ptx.load_shared_i32x4((source ^ (64 * part)) + batch * (ROWS_AT_ONCE * 128))
            for batch in batches
            for part in (0, 1)
        ]
        for batch in batches:
            for part in (0, 1):
                words = loaded[2 * batch + part]
                pairs = [pair for word in words for pair in ptx.e4m3x4_to_f16x2x2(word)]
                at = targets[part] + batch * (ROWS_AT_ONCE * 128)
                ptx.store_shared_v4(at, pairs[:4])
                ptx.store_shared_v4(at ^ 16, pairs[4:])

    @cute.jit
    def clear(self, row, left, targets):
        """Zeros over this thread's part of keys from `left` on."""
        for batch in cutlass.range_constexpr(self.config.stage_keys // ROWS_AT_ONCE):
            if row + batch * ROWS_AT_ONCE >= left:
                for target in targets:
                    at = target + batch * (ROWS_AT_ONCE * 128)
                    ptx.store_shared_v4(at, [Uint32(0)] * 4)
                    ptx.store_shared_v4(at ^ 16, [Uint32(0)] * 4)
