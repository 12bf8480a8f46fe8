"""Head dims, row tiles and token counts of the decode kernel on the simulator, for Hopper and for Thor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.runtime.ops.paged_decode.config import MmaConfig

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")

CONFIGS = [
    MmaConfig(head_dim=64, page_size=16, kv_format="fp8", q_len=3),
    MmaConfig(head_dim=128, page_size=64, kv_format="fp8", q_len=3, row_tile=8, ctas_per_sm=1),
    MmaConfig(head_dim=512, page_size=32, kv_format="fp8", row_tile=8),
    MmaConfig(head_dim=64, page_size=128, kv_format="fp8", row_tile=32, ctas_per_sm=1),
    MmaConfig(head_dim=64, page_size=64, kv_format="bf16", q_len=16, row_tile=128, ctas_per_sm=1),
    MmaConfig(head_dim=128, page_size=32, kv_format="fp8", q_len=2, row_tile=128, ctas_per_sm=1),
    MmaConfig(head_dim=256, page_size=16, kv_format="bf16", row_tile=128, ctas_per_sm=1),
    MmaConfig(head_dim=512, page_size=16, kv_format="fp8", q_len=9),
    MmaConfig(head_dim=512, page_size=64, kv_format="fp8", row_tile=64, ctas_per_sm=1),
    MmaConfig(head_dim=512, page_size=128, kv_format="bf16", q_len=5, row_tile=32, ctas_per_sm=1),
]


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("shapes")
    return simulate(CONFIGS, request.param, folder)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.key("x").removeprefix("paged_decode-x-mma-"))
def test_shapes_agree_with_the_reference(simulated: Simulated, config: MmaConfig) -> None:
    """Rows that fill the tile but for a few, or a second one; lengths on borders, shorter than q_len, and none."""
    group = max(1, (config.row_tile - 1) // config.q_len)
    if config.row_tile <= 16:
        group += config.row_tile // config.q_len  # a second tile
    lengths = [2 * config.stage_keys + 131, 0, 7]
    p = Problem(
        lengths, np.random.default_rng(config.head_dim + config.row_tile), torch, h_q=group, h_k=1, d=config.head_dim,
        page_size=config.page_size, q_len=config.q_len, kv_format=config.kv_format,
    )  # fmt: skip
    simulated.check(config, p, force_splits=1)
    simulated.check(config, p, force_splits=2)
