"""Split sequences of the decode kernel on the simulator: whichever CTA ends last merges, and counters wrap to zero."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")
SCHEDULES = ("fair:0", "late:0", "delays:1", "priorities:2")
ONE_ROW = MmaConfig(head_dim=64, page_size=16, kv_format="fp8")
TWO_TILES = MmaConfig(head_dim=64, page_size=16, kv_format="fp8", q_len=3)
WARP_A_ROW = MmaConfig(head_dim=64, page_size=16, kv_format="fp8", row_tile=8, ctas_per_sm=1)


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("splits")
    return simulate([ONE_ROW, TWO_TILES, WARP_A_ROW], request.param, folder)


def problem(lengths: Sequence[int], **fields: Any) -> Problem:
    return Problem(list(lengths), np.random.default_rng(5), torch, **({"h_q": 4, "h_k": 2, "d": 64} | fields))


def plan_of(simulated: Simulated, p: Problem, config: MmaConfig = ONE_ROW, **options: Any) -> Plan:
    call = PagedDecode(
        simulated.library, head_dim=p.d, page_size=p.page_size, kv_format=p.kv_format, q_len=p.q_len,
        row_tile=config.row_tile, ctas_per_sm=config.ctas_per_sm,
    )  # fmt: skip
    return call.plan(p.lengths, **p.heads, **options)


def run(plan: Plan, p: Problem, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan, hold the result to the reference, and see that all counters are zero again."""
    o, lse = plan.run(*p.tensors, **options)
    expected = paged_attention(*p.tensors, p.lengths, q_len=p.q_len, causal=True, kv_format=p.kv_format)
    found = deviation(o.double().numpy(), lse.numpy(), *expected)
    assert found.within(PAGED_DECODE["mma"]), f"{plan!r}: {found}"
    assert plan._partials.counters
    assert not any(counters.any() for counters in plan._partials.counters.values())
    return o, lse


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_plan_launched_again_and_again(simulated: Simulated, schedule: str) -> None:
    """Sequences of one, three and four chunks; another workspace; other lengths, which count elsewhere. Bits are those
    of the fair schedule: who merges must not show."""
    driver, p = simulated.driver, problem([509, 0, 257, 100], h_k=1)
    with watching(driver):
        driver.register_tensors(q=p.q, k=p.k, v=p.v, block_table=p.table)
        driver.schedule = partial(named_schedule, "fair:0")
        plan = plan_of(simulated, p, force_splits=4, pad_to=12)
        assert plan.splits.splits[:, 0].tolist() == [4, 1, 3, 1]
        fair = run(plan, p)
        driver.schedule = partial(named_schedule, schedule)
        workspace = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8)
        for _ in range(2):
            for found, expected in zip(run(plan, p, workspace=workspace), fair, strict=True):
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        p.lengths = [128, 0, 200, 1]
        plan.update(p.lengths)
        assert plan.splits.splits[:, 0].tolist() == [1, 1, 2, 1]
        run(plan, p, workspace=workspace)
    assert len(plan._partials.counters) == 2


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fair:0", "priorities:2"])
def test_each_row_tile_has_a_counter(simulated: Simulated, schedule: str) -> None:
    """Causal tokens in two row tiles, in some chunks of which rows see nothing."""
    driver, p = simulated.driver, problem([257, 2], h_q=7, h_k=1, q_len=3)
    with watching(driver):
        driver.register_tensors(q=p.q, k=p.k, v=p.v, block_table=p.table)
        driver.schedule = partial(named_schedule, schedule)
        plan = plan_of(simulated, p, force_splits=3)
        run(plan, p)
        run(plan, p)
    (counters,) = plan._partials.counters.values()
    assert len(counters) == plan.partial_slots * 2


@pytest.mark.slow
@pytest.mark.parametrize("splits", [5, 33])
@pytest.mark.parametrize("config", [ONE_ROW, WARP_A_ROW], ids=["four rows a warp", "one row a warp"])
def test_batches_of_splits(simulated: Simulated, config: MmaConfig, splits: int) -> None:
    """More than are merged at once, and more than there are lanes."""
    driver, p = simulated.driver, problem([splits * 128 - 7], h_q=7, h_k=1)
    with watching(driver):
        driver.register_tensors(q=p.q, k=p.k, v=p.v, block_table=p.table)
        driver.schedule = partial(named_schedule, "fair:0")
        run(plan_of(simulated, p, config, force_splits=splits), p)
