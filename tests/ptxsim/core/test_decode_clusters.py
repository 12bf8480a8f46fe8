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
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.plan import Plan

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")
BESIDE = MmaConfig(head_dim=64, page_size=16, kv_format="fp8", row_tile=8, cluster=16)
"""With room for the warps' O beside the ring."""
WITHIN = MmaConfig(
    head_dim=256,
    page_size=32,
    kv_format="bf16",
    row_tile=16,
    ctas_per_sm=1,
    sinks=True,
    cluster=16,
    q_len=2,
    q_lens=True,
)
"""Without: they go where the last stage was."""
EXCHANGING = MmaConfig(
    head_dim=256,
    page_size=32,
    kv_format="bf16",
    row_tile=8,
    ctas_per_sm=1,
    sinks=True,
    cluster=16,
    q_len=2,
    q_lens=True,
)
"""Warps exchange P, and have columns of their own. CTAs of small clusters merge shares of several rows, with sinks."""
NARROW = MmaConfig(head_dim=256, page_size=16, kv_format="fp8", row_tile=8, ctas_per_sm=1, cluster=16)
SIZES = pytest.mark.parametrize("size", CLUSTER_SIZES)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("clusters")
    return simulate([BESIDE, WITHIN, EXCHANGING, NARROW], request.param, folder)


def problem(config: MmaConfig, lengths: list[int], **heads: int) -> Problem:
    return Problem(
        lengths, np.random.default_rng(7), torch, d=config.head_dim, page_size=config.page_size, q_len=config.q_len,
        kv_format=config.kv_format, **heads,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "size"),
    [
        ("fair:0", 16),
        ("fair:0", 2),
        ("delays:1", 2),
        ("delays:1", 8),
        ("priorities:1", 4),
        ("priorities:1", 16),
        ("late:1", 8),
    ],
)
def test_row_tiles_of_sequences_that_leave_ctas_without_keys(simulated: Simulated, schedule: str, size: int) -> None:
    """No key; one tile, for one CTA; two and a bit, for three; a tile or two each. The last row tile is half full."""
    assert BESIDE.slices_beside(resolve(simulated.arch))
    simulated.driver.schedule = partial(named, schedule)
    o, lse = simulated.check(BESIDE, problem(BESIDE, [0, 17, 300, 1100], h_q=12, h_k=1), cluster=size)
    assert not o[0].any()
    assert bool((lse[0] == -torch.inf).all())


@pytest.mark.parametrize("heads", [1, 5])
def test_clusters_of_two_merge_odd_numbers_of_shares(simulated: Simulated, heads: int) -> None:
    """A warp takes two at once, of which the last may have no second: it must not read what nobody sent."""
    simulated.driver.schedule = partial(named, "delays:1")
    simulated.check(BESIDE, problem(BESIDE, [200], h_q=heads, h_k=1), cluster=2)


@pytest.mark.parametrize("lengths", [[1100, 0], [513, 128]])
def test_warps_that_exchange_p_end_with_a_mask(simulated: Simulated, lengths: list[int]) -> None:
    """A masked stage of one token is the last one, and never released; P of fp8 carries a factor."""
    simulated.driver.schedule = partial(named, "priorities:6")
    simulated.check(NARROW, problem(NARROW, lengths, h_q=6, h_k=1), cluster=4)


@pytest.mark.parametrize("expected", [1, 300, 1099, 1100])
def test_a_launch_may_expect_any_number_of_keys(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch, expected: int
) -> None:
    """Pages that were looked up by it are used for the sequence that has as many keys, and by no other."""
    monkeypatch.setattr(Plan, "_expected_keys", lambda self: expected)
    simulated.driver.schedule = partial(named, "priorities:3")
    simulated.check(BESIDE, problem(BESIDE, [300, 1, 1100], h_q=8, h_k=1))


@SIZES
@pytest.mark.parametrize("config", [WITHIN, EXCHANGING])
def test_sinks_join_where_a_row_is_merged(simulated: Simulated, config: MmaConfig, size: int) -> None:
    assert not config.slices_beside(resolve(simulated.arch))
    assert config.exchanges_p == (config == EXCHANGING)
    simulated.driver.schedule = partial(named, "priorities:2")
    p = problem(config, [0, 300], h_q=3, h_k=1)
    sinks = torch.tensor([3.0, -2.0, 0.5])
    lens = torch.tensor([1, 2], dtype=torch.int32)
    _, lse = simulated.check(config, p, sinks=sinks, q_lens=lens, cluster=size)
    assert torch.allclose(lse[0].flatten()[:3], sinks, atol=1e-5), "an empty sequence has nothing but its sinks"


@pytest.mark.parametrize("schedule", ["fair:0", "delays:2", "priorities:4", "late:2"])
def test_warps_that_exchange_p_agree_on_every_maximum(simulated: Simulated, schedule: str) -> None:
    """Scores that grow with the key, so that every stage brings a larger maximum, scores that fall, and masks."""
    simulated.driver.schedule = partial(named, schedule)
    p = problem(EXCHANGING, [700, 650], h_q=4, h_k=1)
    ramp = torch.linspace(0.1, 6.0, 700)
    for seq, order in enumerate((ramp, ramp.flip(0))):
        for key in range(p.lengths[seq]):
            p.k[p.table[seq, key // 32], key % 32] *= order[key]
    simulated.check(EXCHANGING, p, sinks=torch.zeros(4), q_lens=torch.tensor([2, 1], dtype=torch.int32), cluster=2)
