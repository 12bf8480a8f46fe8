"""Split-KV planning on the device, from lengths that the host has not seen: a fixed run of tensor operations.

They have shapes that depend on the plan alone, wait for nothing and read nothing back, so that a CUDA graph may
capture them together with the decode that they plan. Tensors are used by their methods, so torch is not imported.

The result is the one of the host's policy `balanced`, integer for integer (see planner.py, which says why).
"""

from __future__ import annotations

from typing import Any

from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.planner import CHUNK_FACTORS, ITEM_COST, SPLIT_COST
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window

Tensor = Any


class DevicePlanner:
    """Writes the arrays of one plan. Constants are made once, outside of any capture."""

    def __init__(
        self, arrays: Tensor, *, num_work: int, num_seqs: int, max_length: int, max_splits: int, min_chunk_tiles: int,
        ctas: int, sm_count: int, ctas_per_sm: int, lone_tile_cost: int, window: Window = EVERYTHING,
    ) -> None:  # fmt: skip
        """`arrays` is the plan's int32 memory: work (num_work, 8), lengths (num_seqs,), ...

        Lengths above `max_length` are cut to it: a kernel must not look beyond what the block table holds.
        `ctas` is KV heads times query tiles; the other options are those of `plan_splits`. `num_work` is at least
        `num_seqs`.
        """
        self._work = arrays[: 8 * num_work].view(num_work, 8)
        self._lengths = arrays[8 * num_work : 8 * num_work + num_seqs]
        self._window = window
        self.max_length = max_length
        self._max_splits, self._min_chunk_tiles = max_splits, min_chunk_tiles
        self._ctas, self._sm_count, self._ctas_per_sm, self._lone = ctas, sm_count, ctas_per_sm, lone_tile_cost
        self._factors = arrays.new_tensor(CHUNK_FACTORS).long()
        self._index = arrays.new_ones(num_work).long().cumsum(0) - 1
        self._ones = arrays.new_ones(num_seqs).long()

    def write(self, seq_lens: Tensor) -> None:
        """Plan for these lengths, integers (num_seqs,) on the device of the arrays, on the current stream."""
        lengths = seq_lens.long().clamp(0, self.max_length)
        starts = self._window.first_tiles(lengths) if self._window.keys else lengths * 0
        tiles = ((lengths + (TILE_KEYS - 1)) // TILE_KEYS - starts).clamp(min=1)
        counts = self._counts(tiles)
        base = tiles // counts
        extra = tiles - base * counts
        ends = counts.cumsum(0)
        owned = counts * (counts > 1)
        first_slot = (owned.cumsum(0) - owned) * (counts > 1)

        valid = self._index < ends[-1]
        # Every sequence has an item at least, so its number is how many sequences have begun, less one.
        first = ends - counts
        seq = self._index.new_zeros(self._index.shape).scatter(0, first, self._ones).cumsum(0) - 1
        index = self._index - first[seq]
        begin = index * base[seq] + index.minimum(extra[seq]) + starts[seq]
        size = base[seq] + (index < extra[seq])
        keys = lengths[seq]
        slot = (first_slot[seq] + index) * (counts > 1)[seq]
        end = ((begin + size) * TILE_KEYS).minimum(keys)
        columns = (seq, begin * TILE_KEYS, end, keys, slot, counts[seq], first_slot[seq], index * 0)
        order = size.where(valid, -1).argsort(dim=0, descending=True, stable=True)
        for column, values in enumerate(columns):
            self._work[:, column].copy_(values.where(valid, -1)[order])
        self._lengths.copy_(lengths)

    def _counts(self, tiles: Tensor) -> Tensor:
        """Items of each sequence, as `planner._balanced_counts` finds them."""
        total, longest = tiles.sum(0, keepdim=True), tiles.amax(0, keepdim=True)
        most = (tiles // self._min_chunk_tiles).clamp(1, self._max_splits)
        share = 16 * total * self._ctas // self._sm_count
        chunks = longest.repeat(len(self._factors) + 1)
        chunks[:-1] = ((self._factors * share + 255) >> 8).clamp(min=1).minimum(longest)
        counts = ((tiles + (chunks[:, None] - 1)) // chunks[:, None]).minimum(most)
        items = counts.sum(1)
        peak = ((tiles + (counts - 1)) // counts).amax(1)
        even = (16 * total + ITEM_COST * items) * self._ctas // self._sm_count
        grid = items * self._ctas
        beside = ((grid + (self._sm_count - 1)) // self._sm_count).clamp(max=self._ctas_per_sm)
        estimate = even.maximum(self._lone * peak * beside)
        estimate = estimate + (self._lone * peak * 3 >> 2) * (grid > self._sm_count * self._ctas_per_sm)
        estimate = estimate + SPLIT_COST * counts.amax(1)
        estimate = estimate.where(items <= len(self._index), 1 << 50)
        good = 50 * estimate <= 51 * estimate.amin(0)
        best = len(chunks) - 1 - good.flip(0).long().argmax(0, keepdim=True)
        return counts.index_select(0, best)[0]
