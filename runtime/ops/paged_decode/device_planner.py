"""Split-KV planning on the device, from lengths that the host has not seen: a fixed run of tensor operations.

They have shapes that depend on the plan alone, wait for nothing and read nothing back, so that a CUDA graph may
capture them together with the decode that they plan. Tensors are used by their methods, so torch is not imported.

The cut is one chunk length for the batch, the shortest whose items fit the plan's work list; the chunks of a
sequence then differ by at most one tile, and longer items start first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window

Tensor = Any

CANDIDATES = 96
"""Chunk lengths that are tried: neighbours differ by one tile, or by a few per cent where there are more."""


def chunk_candidates(longest: int, min_chunk_tiles: int) -> list[int]:
    """Ascending chunk lengths in tiles, from the least allowed to `longest`, which leaves every sequence whole."""
    least = min(min_chunk_tiles, longest)
    if longest - least < CANDIDATES:
        return list(range(least, longest + 1))
    return [int(c) for c in np.unique(np.rint(np.geomspace(least, longest, CANDIDATES)).astype(np.int64))]


class DevicePlanner:
    """Writes the arrays of one plan. Constants are made once, outside of any capture."""

    def __init__(
        self, arrays: Tensor, *, num_work: int, num_seqs: int, max_length: int, max_splits: int,
        min_chunk_tiles: int, window: Window = EVERYTHING,
    ) -> None:  # fmt: skip
        """`arrays` is the plan's int32 memory: work (num_work, 4), splits (num_seqs, 2), lengths (num_seqs,), ...

        Lengths above `max_length` are cut to it: a kernel must not look beyond what the block table holds.
        `num_work` is at least `num_seqs`.
        """
        split_at, lengths_at = 4 * num_work, 4 * num_work + 2 * num_seqs
        self._work = arrays[:split_at].view(num_work, 4)
        self._splits = arrays[split_at:lengths_at].view(num_seqs, 2)
        self._lengths = arrays[lengths_at : lengths_at + num_seqs]
        self._window = window
        self.max_length, self._max_splits, self._min_chunk_tiles = max_length, max_splits, min_chunk_tiles
        longest = max(1, -(-max_length // TILE_KEYS))
        self._chunks = arrays.new_tensor(chunk_candidates(longest, min_chunk_tiles)).long()
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
        first = ends - counts
        is_split = counts > 1
        owned = counts * is_split
        first_slot = (owned.cumsum(0) - owned) * is_split

        # Every sequence has an item at least, so its number is how many sequences have begun, less one.
        seq = self._index.new_zeros(self._index.shape).scatter(0, first, self._ones).cumsum(0) - 1
        valid = self._index < ends[-1]
        index = self._index - first[seq]
        begin = index * base[seq] + index.minimum(extra[seq]) + starts[seq]
        size = base[seq] + (index < extra[seq])
        begin_key = begin * TILE_KEYS
        end_key = ((begin + size) * TILE_KEYS).minimum(lengths[seq])
        slot = (first_slot[seq] + index).where(is_split[seq], -1)
        order = size.where(valid, -1).argsort(dim=0, descending=True, stable=True)
        for column, values in enumerate((seq, begin_key, end_key, slot)):
            self._work[:, column].copy_(values.where(valid, -1)[order])
        self._splits[:, 0].copy_(counts)
        self._splits[:, 1].copy_(first_slot)
        self._lengths.copy_(lengths)

    def _counts(self, tiles: Tensor) -> Tensor:
        """Items of each sequence under the shortest chunk that keeps to the work list and to the most splits."""
        most = (tiles // self._min_chunk_tiles).clamp(min=1)
        counts = ((tiles + (self._chunks[:, None] - 1)) // self._chunks[:, None]).minimum(most)
        fits = (counts.sum(1) <= len(self._index)) & (counts.amax(1) <= self._max_splits)
        chunk = self._chunks.gather(0, fits.long().argmax(0, keepdim=True))  # the first that fits; the last one does
        return ((tiles + (chunk - 1)) // chunk).minimum(most)
