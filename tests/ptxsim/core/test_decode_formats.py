"""Cache formats and query types of the decode kernel on the simulator, for Hopper and for Thor."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")

CONFIGS = [
    MmaConfig(head_dim=64, page_size=16, kv_format="e2m1", row_tile=8),
    MmaConfig(head_dim=128, page_size=32, kv_format="e2m1", q_dtype="e4m3", q_len=4),
    MmaConfig(head_dim=256, page_size=64, kv_format="e2m1", row_tile=32),
    MmaConfig(head_dim=512, page_size=128, kv_format="e2m1", q_dtype="e4m3"),
    MmaConfig(head_dim=64, page_size=128, kv_format="e3m2", q_dtype="e4m3", row_tile=32),
    MmaConfig(head_dim=128, page_size=16, kv_format="e3m2"),
    MmaConfig(head_dim=128, page_size=64, kv_format="e2m3", q_dtype="e4m3", q_len=3),
    MmaConfig(head_dim=256, page_size=32, kv_format="e2m3", row_tile=8),
    MmaConfig(head_dim=512, page_size=16, kv_format="e2m3"),
    MmaConfig(head_dim=64, page_size=32, kv_format="nvfp4", q_len=2),
    MmaConfig(head_dim=128, page_size=128, kv_format="nvfp4", q_dtype="e4m3"),
    MmaConfig(head_dim=256, page_size=16, kv_format="nvfp4", row_tile=32),
    MmaConfig(head_dim=512, page_size=64, kv_format="nvfp4", row_tile=8),
    MmaConfig(head_dim=128, page_size=16, kv_format="fp8", q_dtype="e4m3", row_tile=8),
    MmaConfig(head_dim=128, page_size=64, kv_format="e3m2", q_len=2, row_tile=8),
    MmaConfig(head_dim=64, page_size=32, kv_format="bf16", row_tile=8, ctas_per_sm=1),
    MmaConfig(head_dim=512, page_size=16, kv_format="bf16", row_tile=8),
    MmaConfig(head_dim=512, page_size=32, kv_format="bf16", q_dtype="e4m3", ctas_per_sm=1),
]


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("formats")
    return simulate(CONFIGS, request.param, folder)


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.key("x").removeprefix("paged_decode-x-mma-"))
def test_formats_agree_with_the_reference(simulated: Simulated, config: MmaConfig) -> None:
    """Written edge case 31: lengths inside a page, on borders and none, split or not, every layout in turn."""
    for index, lengths in enumerate(([200, 0, 1], [config.stage_keys, 2 * config.stage_keys + 77])):
        p = Problem(
            lengths, np.random.default_rng(index), torch, h_q=2 * (5 - index), h_k=2, d=config.head_dim,
            page_size=config.page_size, q_len=config.q_len, kv_format=config.kv_format, q_dtype=config.q_dtype,
            layout=LAYOUTS[(CONFIGS.index(config) + index) % len(LAYOUTS)],
        )  # fmt: skip
        p.poison_tails()
        simulated.check(config, p, force_splits=1 + index)
