"""Planning for a sliding window: the tiles before it are no work.

With a window of W keys, the first new token of a sequence of L keys sees none before L - q_len + 1 - W, and the others
see none earlier. A plan starts at the tile of that key; the kernel masks what is left of it. Needs numpy; imports no
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.planner import Ints, SplitPlan, plan_splits

MAX_WINDOW = 2**30
"""Largest window: the kernel subtracts it from lengths in int32."""


@dataclass(frozen=True, slots=True)
class Window:
    """How far back the tokens of a plan see."""

    keys: int
    """Keys that a token sees, its own included; 0 where there is no window."""
    q_len: int
    """New tokens of a sequence, at most, as the kernel was compiled."""

    def first_keys(self, lengths: Any) -> Any:
        """The first key of each sequence that any token sees; `lengths` is an integer array or tensor."""
        return (lengths - (self.q_len - 1 + self.keys)).clip(0)

    def first_tiles(self, lengths: Any) -> Any:
        """The first tile of each sequence that there is work for."""
        return self.first_keys(lengths) // TILE_KEYS


EVERYTHING = Window(0, 1)
"""No window."""


def plan_visible(lengths: Ints, window: Window, **options: Any) -> SplitPlan:
    """`plan_splits` of the tiles that any token sees; `lengths` comes from `host_lengths`."""
    if not window.keys:
        return plan_splits(lengths, checked=True, **options)
    starts = window.first_tiles(lengths)
    plan = plan_splits(lengths - starts * TILE_KEYS, checked=True, **options)
    work = plan.work.copy()
    items = work[:, 2] > 0  # the others are padding
    work[items, 1:3] += starts.astype(np.int32).take(work[items, 0])[:, None]
    return replace(plan, work=work)
