"""Split-KV planning on the device, from lengths that the host has not seen: the launch of one kernel.

It writes what the host planner would upload for the same lengths, integer for integer, waits for nothing and reads
nothing back, so that a CUDA graph may capture it together with the decode that it plans. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cubinery.runtime.errors import PlanError
from cubinery.runtime.kernel import BoundLaunch, Kernel
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.planner import DEFAULT_MAX_SPLITS
from cubinery.runtime.ops.paged_decode.windows import Window

EVERY_KEY = 2**31 - 1
"""The span of a window that leaves nothing out."""


class DevicePlanner:
    """Rewrites the arrays of one plan. For one thread at a time."""

    def __init__(
        self, kernel: Kernel, *, work: int, num_work: int, num_seqs: int, max_length: int, window: Window,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """`work` is the address of the plan's arrays, int32: work (num_work, 8), then lengths (num_seqs,).

        Lengths above `max_length` are cut to it: a kernel must not look beyond what the block table holds. `options`
        are those of `planner.plan_splits`. Where the host would refuse a plan that is longer than the work list,
        nothing is split instead. Raises PlanError.
        """
        if num_seqs > PlanConfig.MAX_SEQS:
            raise PlanError(f"{num_seqs} sequences: plans on the device have at most {PlanConfig.MAX_SEQS}")
        if "item_cost" not in kernel.names:
            raise PlanError(
                f"{kernel.key} was built by an older cubinery, whose plans are not those of the host: build the bundle "
                "again, or update plans from the host (Plan.update)"
            )
        policy = options["policy"]
        self.max_length = max_length
        self._kernel = kernel
        self._values = {
            "work": work,
            "lengths": work + 32 * num_work,
            "num_seqs": num_seqs,
            "num_work": num_work,
            "max_length": max_length,
            "is_thor": int(policy == "thor"),
            "ctas": options["num_kv_heads"] * options["q_tiles"],
            "sm_count": options["sm_count"],
            "ctas_per_sm": options["ctas_per_sm"],
            "lone_tile_cost": options["lone_tile_cost"],
            "item_cost": options["item_cost"],
            "max_splits": options["max_splits"] or DEFAULT_MAX_SPLITS[policy],
            "force_splits": options["force_splits"],
            "min_chunk_tiles": options["min_chunk_tiles"],
            "window_span": window.q_len - 1 + window.keys if window.keys else EVERY_KEY,
        }
        self._bound: BoundLaunch | None = None

    def launch(self, seq_lens: int, size: int, stream: int) -> None:
        """Plan for the integers of `size` bytes (4 or 8), one a sequence, at address `seq_lens`, on a raw stream."""
        given = {"seq_lens": seq_lens, "seq_len_bytes": size}
        if self._bound is None:
            self._bound = self._kernel.bind(self._values | given)
        else:
            self._bound.update(**given)
        self._bound.launch(stream)
