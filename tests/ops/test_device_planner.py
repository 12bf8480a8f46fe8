"""Plans made by tensor operations on the device, from lengths that the host never sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.device_planner import DevicePlanner, chunk_candidates


def write(lengths: list[int], num_work: int, **options: Any) -> tuple[Any, Any, list[int]]:
    """(work, splits, lengths) as the device holds them."""
    n = len(lengths)
    arrays = torch.full((4 * num_work + 3 * n + 1,), 77, dtype=torch.int32)
    limits = {"max_length": 1 << 20, "max_splits": 256, "min_chunk_tiles": 1} | options
    DevicePlanner(arrays, num_work=num_work, num_seqs=n, **limits).write(torch.tensor(lengths, dtype=torch.int32))
    assert arrays[-1] == 77
    found = arrays.numpy()
    split_at, lengths_at = 4 * num_work, 4 * num_work + 2 * n
    return found[:split_at].reshape(-1, 4), found[split_at:lengths_at].reshape(-1, 2), found[lengths_at:-1].tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 300_000), min_size=1, max_size=40),
    spare=st.integers(0, 150),
    max_splits=st.sampled_from([1, 2, 16, 256]),
    min_chunk_tiles=st.sampled_from([1, 3, 8]),
)
def test_invariants(lengths: list[int], spare: int, max_splits: int, min_chunk_tiles: int) -> None:
    num_work = len(lengths) + spare
    work, splits, told = write(lengths, num_work, max_splits=max_splits, min_chunk_tiles=min_chunk_tiles)
    assert told == lengths
    items = work[work[:, 0] >= 0]
    assert (work[len(items) :] == -1).all()  # padding comes last and says nothing
    assert splits[:, 0].sum() == len(items) <= num_work
    assert splits[:, 0].max() <= max_splits
    sizes = np.maximum(-(-(items[:, 2] - items[:, 1]) // TILE_KEYS), 1)
    assert (np.diff(sizes) <= 0).all()
    slots = []
    for seq, length in enumerate(lengths):
        own = items[items[:, 0] == seq]
        own = own[own[:, 1].argsort()]
        assert own[:, 1].tolist() == [0, *own[:-1, 2]]  # contiguous from the first key
        assert own[-1, 2] == length
        assert (own[:, 1] % TILE_KEYS == 0).all()
        count, first = splits[seq]
        assert len(own) == count
        if count == 1:
            assert (own[0, 3], first) == (-1, 0)
        else:
            assert (own[:, 1] < own[:, 2]).all()
            assert own[:, 3].tolist() == list(range(first, first + count))
            slots += own[:, 3].tolist()
            tiles = -(-(own[:, 2] - own[:, 1]) // TILE_KEYS)
            assert tiles.max() - tiles.min() <= 1
            assert tiles.min() >= min_chunk_tiles
    assert slots == list(range(len(slots)))  # compact
    assert len(slots) <= 2 * spare


def test_the_work_list_is_filled() -> None:
    """Chunks are as short as its room allows: of 6 tiles here, as 5 would take 103 + 31 * 7 items."""
    _, splits, _ = write([65536, *[4096] * 31], 32 + 264)
    assert splits[:, 0].tolist() == [86, *[6] * 31]
    _, splits, _ = write([131072], 1 + 33)
    assert 31 <= splits[0, 0] <= 34


def test_even_batches_stay_whole() -> None:
    work, splits, _ = write([2048] * 128, 128 + 16)
    assert (splits == [1, 0]).all()
    assert (work[:128, 3] == -1).all()


def test_all_lengths_zero() -> None:
    work, splits, told = write([0, 0, 0], 7)
    assert work.tolist() == [[0, 0, 0, -1], [1, 0, 0, -1], [2, 0, 0, -1], *[[-1] * 4] * 4]
    assert splits.tolist() == [[1, 0]] * 3
    assert told == [0, 0, 0]


def test_lengths_are_kept_within_what_the_table_holds() -> None:
    work, _, told = write([1000, 5, -3], 3, max_length=300)
    assert told == [300, 5, 0]
    assert work.tolist() == [[0, 0, 300, -1], [1, 0, 5, -1], [2, 0, 0, -1]]


@pytest.mark.parametrize(("longest", "least"), [(1, 1), (1, 8), (95, 1), (1024, 1), (1 << 24, 4)])
def test_candidates_end_with_the_longest(longest: int, least: int) -> None:
    found = chunk_candidates(longest, least)
    assert found == sorted(set(found))
    assert (found[0], found[-1]) == (min(least, longest), longest)
    assert len(found) <= 97
