"""nvfp4 as operands of the MMA: e2m1 codes times an e4m3 scale for every 16 columns.

The product has six significant bits and is a multiple of 2^-10, so 2^-14 of it, which is what E2m1's operands give, is
an f16 number. Scales lie behind the codes of a stage, key by key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_formats import E2m1, Pair
from cubinery.runtime.ops.paged_decode.config import MmaConfig


class Nvfp4(E2m1):
    """A lane has, beside its codes' address, that of its scales and which of them are its own."""

    def __init__(self, config: MmaConfig) -> None:
        super().__init__(config)
        self.pitches = (config.box_bytes, config.scale_bytes)
        self.scales = config.code_bytes
        self.warp_scales = config.scale_bytes // config.col_warps

    def k_lane(self, stage: Any, key: Any, lane: Any) -> list[Any]:
        """A quad has half of each chunk's 32 columns: its scale is the first or the second of two."""
        address = stage + self.scales + (key + lane // 4) * self.pitches[1]
        return [*super().k_lane(stage, key, lane), address, 0x6420 + lane % 4 // 2 * 0x1111]

    def k_load(self, lane: Sequence[Any], load: int) -> Sequence[Any]:
        """Four registers of codes, or two of short heads, and the scale of each in both halves of another."""
        registers = super().k_load(lane, load)
        address = lane[1] + 8 * load
        words = ptx.load_shared_b64(address) if len(registers) == 4 else (ptx.load_shared_b32(address),) * 2
        pairs = ptx.e4m3x4_to_f16x2x2(ptx.select_bytes_by(words[0], words[1], lane[2]))
        scales = [s for pair in pairs for s in ptx.spread_halves(pair)]
        return [*registers, *scales[: len(registers)]]

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """As for e2m1, scaled."""
        found: list[Pair] = []
        count = len(registers) // 2
        for n in (2 * group, 2 * group + 1):
            c = [ptx.multiply_f16x2(code, registers[count + n]) for code in ptx.e2m1x8_to_f16x2x4(registers[n])]
            found += [(c[0], c[1]), (c[2], c[3])]
        return found

    def v_lane(self, stage: Any, key: Any, lane: Any, col_group: Any) -> list[Any]:
        """Lanes 0 to 15 have the first half of each chunk's 32 columns."""
        address = stage + self.scales + (key + lane % 4 * 2) * self.pitches[1] + col_group * self.warp_scales
        return [*super().v_lane(stage, key, lane, col_group), address, 0x6240 + lane // 16 * 0x1111]

    def v_fragments(self, lane: Sequence[Any], load: int, masks: Sequence[Any] | None) -> list[tuple[int, Pair]]:
        """As for e2m1, scaled. Codes are finite, so masks need only reach the scales."""
        registers = ptx.ldmatrix_x4(self.chunk_address(lane[0], 2 * load), transpose=True)
        scales = []  # of keys 2 quad and the next, then of those 8 further on; for each, of the two chunks
        for second in (0, 1):
            first, following = (
                ptx.load_shared_b32(lane[1] + (8 * second + n) * self.pitches[1] + 4 * load) for n in (0, 1)
            )
            found = ptx.e4m3x4_to_f16x2x2(ptx.select_bytes_by(first, following, lane[2]))
            scales.append(found if masks is None else [scale & masks[second] for scale in found])
        fragments: list[tuple[int, Pair]] = []
        for half in (0, 1):
            low, high = (
                [ptx.multiply_f16x2(c, scales[n][half]) for c in ptx.e2m1x8_to_f16x2x4(registers[2 * half + n])]
                for n in (0, 1)
            )
            fragments += enumerate(zip(low, high, strict=True), (2 * load + half) * self.unit_codes)
        return fragments
