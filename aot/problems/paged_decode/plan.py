"""Plans made on the device, against the host planner's arrays, integer for integer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cubinery.aot.problems import Finding, Place, Subject
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.device_planner import DevicePlanner
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.planner import ITEM_COST, LONE_TILE_COST
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window, plan_visible

H200 = {"num_kv_heads": 8, "q_tiles": 1, "sm_count": 132, "ctas_per_sm": 2, "policy": "balanced"}
THOR = {"num_kv_heads": 4, "q_tiles": 1, "sm_count": 20, "ctas_per_sm": 2, "policy": "thor"}
DEFAULTS = {
    "max_splits": None, "force_splits": 0, "min_chunk_tiles": 1, "lone_tile_cost": LONE_TILE_COST,
    "item_cost": ITEM_COST, "pad_to": 0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch."""

    lengths: Sequence[int]
    spare: int = 0
    """Entries of the work list past those that the plan needs."""
    window: Window = EVERYTHING
    wide: bool = False
    """int64 lengths."""
    options: dict[str, Any] = field(default_factory=lambda: H200)
    """Of `planner.plan_splits`; `DEFAULTS` where it has none."""


def cases(seed: int) -> list[Case]:
    """What `check` runs: one sequence, none that is longer than 0, many, uneven ones; both policies; windows."""
    rng = np.random.default_rng(seed)
    mixed = rng.integers(0, 20_000, 70).tolist()
    return [
        Case(lengths=[131072]),
        Case(lengths=[0, 0, 0], spare=4, wide=True),
        Case(lengths=mixed, spare=30),
        Case(lengths=mixed, options=H200 | {"ctas_per_sm": 1, "lone_tile_cost": 17, "item_cost": 144}),
        Case(lengths=[9000] * 33, options=H200 | {"num_kv_heads": 4, "ctas_per_sm": 1, "item_cost": 36}),
        Case(lengths=[65536, *[4096] * 31], spare=1, wide=True, options=H200 | {"min_chunk_tiles": 3}),
        Case(lengths=mixed, window=Window(1024, 4), options=H200 | {"max_splits": 4}),
        Case(lengths=[131072], options=THOR, spare=6),
        Case(lengths=[65536, 65536, 65536, 128], options=THOR),
        Case(lengths=mixed[:7], options=THOR | {"force_splits": 3}, wide=True),
        Case(lengths=[5000, 0, 129], options=THOR, window=Window(300, 1), spare=1),
    ]


def check(subject: Subject) -> Finding:
    """All of `cases`: the work list and the lengths must be the host's, and nothing else may have changed."""
    found = cases(subject.seed)
    for case in found:
        wrong = run(subject.library, case, subject.place)
        if wrong:
            return Finding(False, wrong)
    return Finding(True, f"{len(found)} plans are equal")


def run(library: Library, case: Case, place: Place) -> str:
    """Plan on the device and on the host; what differs, or nothing."""
    import torch

    options = DEFAULTS | case.options
    lengths = np.asarray(case.lengths, np.int64)
    plan = plan_visible(lengths, case.window, **options)
    num_work, num_seqs = plan.num_items + case.spare, len(lengths)
    plan = plan_visible(lengths, case.window, **(options | {"pad_to": num_work}))
    narrow = lengths.astype(np.int32)
    expected = np.concatenate([plan.device_work(narrow).reshape(-1), narrow, [77]])
    placed = place(
        seq_lens=torch.from_numpy(lengths if case.wide else narrow),
        arrays=torch.full((8 * num_work + num_seqs + 1,), 77, dtype=torch.int32),
    )
    planner = DevicePlanner(
        library.kernel(library.key_for(PlanConfig()), role="plan"), work=placed["arrays"].data_ptr(),
        num_work=num_work, num_seqs=num_seqs, max_length=int(max(lengths)), window=case.window, options=options,
    )  # fmt: skip
    planner.launch(placed["seq_lens"].data_ptr(), 8 if case.wide else 4, 0)
    found = placed["arrays"].cpu().numpy()
    bad = np.flatnonzero(found != expected)
    if not len(bad):
        return ""
    entry = slice(bad[0] // 8 * 8, bad[0] // 8 * 8 + 8)
    return (
        f"{len(bad)} of {len(expected)} integers differ for {case}: entry {bad[0] // 8} of {num_work} is "
        f"{found[entry].tolist()}, expected {expected[entry].tolist()}"
    )
