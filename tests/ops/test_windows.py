"""Plans of sliding windows, on the host and on the device: what they leave out, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.planner import plan_splits
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window, plan_visible

OPTIONS: dict[str, Any] = {"num_kv_heads": 2, "q_tiles": 1, "sm_count": 20}


def first_visible(length: int, window: int, q_len: int) -> int:
    """By the definition: the first key of token 0, whose last is length - q_len."""
    keys = range(max(0, length - q_len - window), length)
    return next((k for k in keys if k > length - q_len - window), 0)


@given(
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=20),
    window=st.sampled_from([1, 2, 100, 127, 128, 129, 1000, 2**30]),
    q_len=st.sampled_from([1, 4, 16]),
    policy=st.sampled_from(["thor", "balanced"]),
    force_splits=st.sampled_from([0, 1, 3]),
)
def test_items_begin_at_the_tile_of_the_first_visible_key(
    lengths: list[int], window: int, q_len: int, policy: str, force_splits: int
) -> None:
    span = Window(window, q_len)
    plan = plan_visible(np.array(lengths), span, policy=policy, force_splits=force_splits, **OPTIONS)
    items = plan.work[plan.work[:, 2] > 0]
    assert len(items) == plan.num_items
    for seq, length in enumerate(lengths):
        own = items[items[:, 0] == seq]
        own = own[own[:, 1].argsort()]
        start = first_visible(length, window, q_len) // TILE_KEYS
        assert own[:, 1].tolist() == [start, *own[:-1, 2]]
        assert own[-1, 2] == max(start + 1, -(-length // TILE_KEYS))
        assert len(own) == plan.splits[seq, 0]


def test_no_window_is_no_change() -> None:
    lengths = np.array([5000, 0, 300])
    plain, same = (
        plan_splits(lengths, **OPTIONS), plan_visible(lengths, EVERYTHING, **OPTIONS),
    )  # fmt: skip
    wide = plan_visible(lengths, Window(5000, 1), **OPTIONS)
    assert np.array_equal(plain.work, same.work)
    assert np.array_equal(plain.work, wide.work)


def test_padding_stays_empty() -> None:
    plan = plan_visible(np.array([1000, 2000]), Window(10, 1), pad_to=9, max_splits=1, **OPTIONS)
    assert plan.work[plan.work[:, 2] > 0, :3].tolist() == [[0, 7, 8], [1, 15, 16]]
    assert not plan.work[plan.work[:, 2] == 0].any()
