"""6-bit elements as operands of the MMA. Four codes take three bytes, so rows are read as words, not by `ldmatrix`.

TMA does not swizzle rows of 96 bytes: the words that a warp reads at once lie two to a bank at worst.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_formats import Format, Pair
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.formats import E2M3, E3M2, FloatFormat

F16_BIAS = 15


class SixBit(Format):
    """Codes moved into f16's bits, which makes 2^(bias - 15) of their value, exactly."""

    element: ClassVar[FloatFormat]
    q_pairs = ((0, 4), (1, 5), (2, 6), (3, 7))

    def __init__(self, config: MmaConfig) -> None:
        super().__init__(config)
        self.k_log2 = self.v_log2 = F16_BIAS - self.element.bias
        self.k_loads = config.head_dim // 64
        self.group_steps = 4
        # Of K, a quad has a quarter of a box's row; of V, a group of 8 lanes' has an eighth.
        self.quad_vectors = self.pitch // 24
        self.unit_codes = 2 * self.pitch // 12
        self.v_loads = config.boxes_per_row // config.col_warps

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """Three words of K are two vectors of eight codes, each four pairs: code i and code i + 4."""
        box, quad = vector // (4 * self.quad_vectors), vector // self.quad_vectors % 4
        for i, pair in enumerate(pairs):
            chunk = (box * self.quad_vectors + vector % self.quad_vectors) * 4 + i
            ptx.store_shared_b32(row_address + (chunk ^ (row & 7)) * 16 + quad * 4, pair)

    def k_lane(self, stage: Any, key: Any, lane: Any) -> list[Any]:
        """Key lane // 4, the quad's bytes of the first box."""
        return [stage + (key + lane // 4) * self.pitch + lane % 4 * (self.pitch // 4)]

    def k_load(self, lane: Sequence[Any], load: int) -> Sequence[Any]:
        """Three words, 16 codes. Pairs of words where they are aligned."""
        if self.quad_vectors == 2:
            return [ptx.load_shared_b32(lane[0] + 4 * word) for word in range(3)]
        where = lane[0] + load // 2 * self.column_bytes
        if load % 2 == 0:
            return [*ptx.load_shared_b64(where), ptx.load_shared_b32(where + 8)]
        return [ptx.load_shared_b32(where + 12), *ptx.load_shared_b64(where + 16)]

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """Each half register gets the 16 bits with two of four codes, the other half those with their partners."""
        found = []
        for low, high, first in ((registers[0], registers[1], 0), (registers[1], registers[2], 2)):
            windows = (ptx.select_bytes(low, high, [first + n + k for n in (0, 1, 3, 4)]) for k in (0, 1))
            found += [(self.widen(w, bit), self.widen(w, bit + 6)) for w, bit in zip(windows, (0, 4), strict=True)]
        return found

    def v_lane(self, stage: Any, key: Any, lane: Any, col_group: Any) -> list[Any]:
        """The first of two neighbouring keys, and the bytes of the lane's columns."""
        row = (key + lane % 4 * 2) * self.pitch
        return [stage + col_group * self.warp_bytes + row + lane // 4 * (self.pitch // 8)]

    def v_fragments(self, lane: Sequence[Any], load: int, masks: Sequence[Any] | None) -> list[tuple[int, Pair]]:
        """A box: a lane has `unit_codes` neighbouring columns of four keys."""
        where = lane[0] + load * self.column_bytes
        codes = []
        for second in (0, 1):
            halves = self.key_pair(where + 8 * second * self.pitch)
            if masks is not None:
                halves = [half & masks[second] for half in halves]
            codes.append([c for n in range(0, len(halves), 3) for c in self.widen_eight(*halves[n : n + 3])])
        return list(enumerate(zip(*codes, strict=True), load * self.unit_codes))

    def key_pair(self, address: Any) -> list[Any]:
        """16-bit units of a key in the lower halves, those of the next key in the upper ones."""
        if self.unit_codes == 8:
            units = [[ptx.load_shared_u16(address + key * self.pitch + 2 * n) for n in range(3)] for key in (0, 1)]
            return [ptx.select_bytes(a, b, (0, 1, 4, 5)) for a, b in zip(*units, strict=True)]
        words = [[ptx.load_shared_b32(address + key * self.pitch + 4 * n) for n in range(3)] for key in (0, 1)]
        halves = ((0, 1, 4, 5), (2, 3, 6, 7))
        return [ptx.select_bytes(a, b, half) for a, b in zip(*words, strict=True) for half in halves]

    def widen_eight(self, first: Any, second: Any, third: Any) -> list[Any]:
        """Eight codes of 48 bits: two of them lie in each of the 16 bits that start at byte 0, 1, 3 and 4."""
        windows = (
            first, ptx.select_bytes(first, second, (1, 4, 3, 6)), ptx.select_bytes(second, third, (1, 4, 3, 6)), third,
        )  # fmt: skip
        return [self.widen(w, bit + k) for w, bit in zip(windows, (0, 4, 0, 4), strict=True) for k in (0, 6)]

    def merge_offset(self, column: Any) -> Any:
        """Quads store every 128 bytes, or 64: each moves by its number, so that they meet in no bank.

        With keys first, two lanes meet in one, once a launch.
        """
        chunk = column >> 2
        return (chunk ^ ((chunk >> (3 if self.unit_codes == 16 else 2)) & 3)) * 16

    def widen(self, window: Any, bit: int) -> Any:
        """The codes at a bit of both halves as f16x2."""
        return ptx.widen_codes(window, bit, bits=6, exponent_bits=self.element.exponent_bits)


class E3m2(SixBit):
    """More range."""

    element = E3M2


class E2m3(SixBit):
    """More precision."""

    element = E2M3
