"""Planning on the device: what is launched for a plan, and when. tests/ptxsim/core/test_plan.py runs the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import host_kernels
import pytest
import torch
from fake_driver import FakeDriver

from cubinery.aot.kernels.paged_decode import plan_abi
from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.device_planner import EVERY_KEY
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig

Make = Callable[..., tuple[PagedDecode, FakeDriver]]
HEADS = {"num_q_heads": 8, "num_kv_heads": 2}


def test_the_launch_has_the_plans_options(make_decode: Make) -> None:
    decode, driver = make_decode()
    plan = decode.plan([1500, 200], **HEADS, pad_to=9, min_chunk_tiles=2, policy="thor")
    plan.update_on_device(torch.zeros(2, dtype=torch.int64))
    (launch,) = driver.launches
    arrays = plan._upload.tensor.data_ptr()
    expected = {
        "work": arrays, "lengths": arrays + 9 * 32, "seq_len_bytes": 8, "num_seqs": 2, "num_work": 9,
        "max_length": 1500, "is_thor": 1, "ctas": 2, "sm_count": decode.info.sm_count,
        "ctas_per_sm": plan.config.ctas_per_sm, "lone_tile_cost": plan.config.lone_tile_cost,
        "item_cost": plan.config.item_cost, "max_splits": 16, "force_splits": 0, "min_chunk_tiles": 2,
        "window_span": EVERY_KEY,
    }  # fmt: skip
    assert {name: launch.values[name] for name in expected} == expected
    assert launch.grid == (1, 1, 1)
    assert launch.config.block == (PlanConfig.THREADS, 1, 1)
    assert launch.config.dynamic_smem == PlanConfig().smem_bytes


def test_each_call_reads_its_own_lengths(make_decode: Make) -> None:
    decode, driver = make_decode()
    plan = decode.plan([1500, 200], **HEADS, capturable=True)
    first, second = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    for seq_lens in (first, second, first):
        plan.update_on_device(seq_lens)
    found = [(launch.values["seq_lens"], launch.values["seq_len_bytes"]) for launch in driver.launches]
    assert found == [(first.data_ptr(), 8), (second.data_ptr(), 4), (first.data_ptr(), 8)]


@pytest.mark.parametrize("options", [{"force_splits": 3}, {"policy": "thor"}, {"max_splits": 1}, {"capturable": True}])
def test_the_arrays_are_those_of_an_update_by_the_host(make_decode: Make, options: dict[str, Any]) -> None:
    """Through the stand-in, which knows nothing but the launch: every option arrives."""
    decode, driver = make_decode()
    driver.on_launch = host_kernels.plan
    plans = [decode.plan([1500, 1500, 1500], **HEADS, **options) for _ in range(2)]
    for lengths in ([1500, 0, 1], [300, 300, 129], [1500, 1500, 1500]):
        plans[0].update(lengths)
        plans[1].update_on_device(torch.tensor(lengths))
        assert torch.equal(*(plan.device_arrays for plan in plans))


def test_an_older_bundle_is_refused(make_decode: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel knows no cost of an item, and would plan something else than the host."""
    pack = plan_abi.pack_params
    monkeypatch.setattr(plan_abi, "pack_params", lambda *params: pack(*(p for p in params if p[0] != "item_cost")))
    decode, driver = make_decode()
    plan = decode.plan([1500, 200], **HEADS)
    with pytest.raises(
        PlanError, match=r"paged_decode-sm_\w+-plan was built by an older cubinery.*build the bundle again"
    ):
        plan.update_on_device(torch.zeros(2, dtype=torch.int64))
    assert driver.launches == []


def test_too_many_sequences(make_decode: Make) -> None:
    decode, driver = make_decode()
    count = PlanConfig.MAX_SEQS + 1
    plan = decode.plan([1] * count, **HEADS)
    with pytest.raises(PlanError, match=f"{count} sequences: plans on the device have at most {count - 1}"):
        plan.update_on_device(torch.ones(count, dtype=torch.int32))
    assert driver.launches == []
