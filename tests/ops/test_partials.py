"""Workspaces of plans, and the counters by which the last chunk of a sequence knows itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver

from cubinery.runtime.errors import CaptureError
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.partials import Partials
from cubinery.runtime.ops.paged_decode.streams import Upload

Make = Callable[..., tuple[PagedDecode, FakeDriver]]


def test_plans_that_split_nothing_need_no_workspace(make_decode: Make, p: Problem) -> None:
    """Case 21; and an update of such a plan splits nothing either."""
    decode, driver = make_decode()
    for options in ({"max_splits": 1}, {"max_splits": 1, "capturable": True}, {"force_splits": 1}):
        driver.launches.clear()
        plan = decode.plan(p.lengths, **p.heads, **options)
        assert plan.workspace_bytes() == 0
        assert plan.keys == ("paged_decode-sm_90a-mma-d128-p16-kvfp8-t8-cps1",)  # one CTA an SM
        plan.run(*p.tensors)
        plan.update([1500, 1500, 1500])
        assert plan.splits.num_partials == 0
        plan.run(*p.tensors)
        assert [launch.grid for launch in driver.launches] == [(1, 2, 3)] * 2


def test_the_workspace_covers_every_split(make_decode: Make) -> None:
    decode, _ = make_decode()
    rng = np.random.default_rng(4)
    for _ in range(30):
        lengths = (2 ** rng.uniform(0, 17, rng.integers(1, 40))).astype(int)
        plan = decode.plan(lengths, num_q_heads=8, num_kv_heads=2)
        assert plan.splits.num_partials <= plan.partial_slots
        if plan.splits.num_partials:
            rows = plan.partial_slots * 2 * 4
            assert plan.workspace_bytes() == rows * 128 * 4 + rows * 8 + 16


def test_no_workspace_without_room_for_a_split(make_decode: Make, p: Problem) -> None:
    decode, _ = make_decode()
    plan = decode.plan(p.lengths, **p.heads, pad_to=3)
    assert plan.splits.num_partials == 0
    assert plan.workspace_bytes() == 0


def test_counters_are_made_before_a_capture(make_decode: Make, p: Problem) -> None:
    """A graph would zero them at each replay, and not where the runs before the capture left them."""
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads, force_splits=2)
    workspaces = [torch.empty(plan.workspace_bytes(), dtype=torch.uint8) for _ in range(2)]
    driver.capturing.add(0)
    plan.run(*p.tensors, workspace=workspaces[0])  # those of a plan's first workspace came with the plan
    plan.run(*p.tensors, workspace=workspaces[0])
    for foreign in (workspaces[1], None):
        with pytest.raises(CaptureError, match="run once with this workspace before the capture"):
            plan.run(*p.tensors, workspace=foreign)
    assert len(driver.launches) == 2
    driver.capturing.clear()
    plan.run(*p.tensors, workspace=workspaces[1])
    driver.capturing.add(0)
    plan.run(*p.tensors, workspace=workspaces[1])
    counters = [launch.values["counters"] for launch in driver.launches]
    assert counters[0] == counters[1] != counters[2] == counters[3]


def test_plans_that_split_nothing_may_be_captured_at_once(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads, max_splits=1)
    driver.capturing.add(0)
    plan.run(*p.tensors)
    assert len(driver.launches) == 1
    assert not plan._partials.counters


def test_counters_come_before_the_upload(make_decode: Make, p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that follows the upload follows their zeroing too."""
    order: list[str] = []
    make, write = Partials._make_counters, Upload.write
    monkeypatch.setattr(Partials, "_make_counters", lambda self, stream: order.append("zeros") or make(self, stream))

    def noted(self: Upload, *args: Any) -> None:
        order.append("upload")
        write(self, *args)

    monkeypatch.setattr(Upload, "write", noted)
    decode, _ = make_decode()
    decode.plan(p.lengths, **p.heads, force_splits=2)
    assert order == ["zeros", "upload"]
