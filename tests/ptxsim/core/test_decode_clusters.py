"""Decodes whose CTAs form clusters on the simulator, for Hopper and for Thor: races, early exits and values.

The simulator lets what a CTA sends land at any time, and faults on an access to a CTA that has ended, on shared memory
that nobody wrote, and on a barrier that gets more or fewer bytes than it expects.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.aot.ptxsim.schedule import schedule as named
from cubinery.runtime.arch import resolve
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.plan import Plan

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")
BESIDE = MmaConfig(head_dim=64, page_size=16, kv_format="fp8", row_tile=8, cluster=8)
"""With room for the warps' O beside the ring."""
WITHIN = MmaConfig(
    head_dim=256, page_size=32, kv_format="bf16", row_tile=8, ctas_per_sm=1, sinks=True, cluster=8, q_len=2, q_lens=True
)
"""Without: they go where the last stage was. Every CTA merges shares of several rows, and adds their sinks."""
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("clusters")
    return simulate([BESIDE, WITHIN], request.param, folder)


def problem(config: MmaConfig, lengths: list[int], **heads: int) -> Problem:
    return Problem(
        lengths, np.random.default_rng(7), torch, d=config.head_dim, page_size=config.page_size, q_len=config.q_len,
        kv_format=config.kv_format, **heads,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["fair:0", "delays:1", "priorities:1", "late:1"])
def test_row_tiles_of_sequences_that_leave_ctas_without_keys(simulated: Simulated, schedule: str) -> None:
    """No key; one tile, for one CTA; two and a bit, for three; a tile or two each. The last row tile is half full."""
    assert BESIDE.slices_beside(resolve(simulated.arch))
    simulated.driver.schedule = partial(named, schedule)
    o, lse = simulated.check(BESIDE, problem(BESIDE, [0, 17, 300, 1100], h_q=12, h_k=1))
    assert not o[0].any()
    assert bool((lse[0] == -torch.inf).all())


@pytest.mark.parametrize("expected", [1, 300, 1099, 1100])
def test_a_launch_may_expect_any_number_of_keys(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    """Pages that were looked up by it are used for the sequence that has as many keys, and by no other."""
    monkeypatch.setattr(Plan, "_expected_keys", lambda self: expected)
    simulated.driver.schedule = partial(named, "priorities:3")
    simulated.check(BESIDE, problem(BESIDE, [300, 1, 1100], h_q=8, h_k=1))


def test_sinks_join_where_a_row_is_merged(simulated: Simulated) -> None:
    assert not WITHIN.slices_beside(resolve(simulated.arch))
    simulated.driver.schedule = partial(named, "priorities:2")
    p = problem(WITHIN, [0, 300], h_q=3, h_k=1)
    sinks = torch.tensor([3.0, -2.0, 0.5])
    _, lse = simulated.check(WITHIN, p, sinks=sinks, q_lens=torch.tensor([1, 2], dtype=torch.int32))
    assert torch.allclose(lse[0].flatten()[:3], sinks, atol=1e-5), "an empty sequence has nothing but its sinks"
