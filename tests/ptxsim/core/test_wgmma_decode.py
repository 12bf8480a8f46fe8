"""The warpgroup-level MMA decode on the simulator: borders of tiles and slots, tails, masks, and hostile schedules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.aot.ptxsim.schedule import schedule
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import WgmmaConfig
from cubinery.runtime.ops.paged_decode.select import Problem as Asked
from cubinery.runtime.ops.paged_decode.select import select
from cubinery.runtime.ops.paged_decode.wgmma_config import WIDE_STAGES

pytest.importorskip("cutlass", reason="the compiler is not installed")

PLAIN = WgmmaConfig(head_dim=128, page_size=16, kv_format="fp8", q_len=4)
WIDE = WgmmaConfig(head_dim=128, page_size=128, kv_format="fp8", q_len=3, row_tile=128, window=True, sinks=True)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("wgmma")
    return simulate([PLAIN, WIDE], "sm_90a", folder)


def problem(config: WgmmaConfig, lengths: list[int], seed: int = 1) -> Problem:
    """All rows of the tile but one token's."""
    return Problem(
        lengths, np.random.default_rng(seed), torch, h_q=config.row_tile // config.q_len - 1, h_k=1, d=128,
        page_size=config.page_size, q_len=config.q_len,
    )  # fmt: skip


@pytest.mark.parametrize("splits", [1, 2])
def test_lengths_on_borders(simulated: Simulated, splits: int) -> None:
    """Tiles enough to go around both rings, a key more and less than a tile, fewer keys than tokens, and none."""
    tiles = WIDE_STAGES + 4
    simulated.check(PLAIN, problem(PLAIN, [tiles * 128 + 1, 127, 128, 2, 0]), force_splits=splits)


def test_windows_and_sinks(simulated: Simulated) -> None:
    p = problem(WIDE, [700, 131, 0])
    sinks = torch.from_numpy(np.random.default_rng(3).uniform(-2, 4, p.h_q).astype(np.float32))
    simulated.check(WIDE, p, window=170, sinks=sinks, force_splits=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["late:0", "delays:0", "priorities:0"])
def test_hostile_schedules(simulated: Simulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated.driver, "schedule", lambda: schedule(name))
    simulated.check(PLAIN, problem(PLAIN, [900, 77]), force_splits=2)


@pytest.mark.parametrize(
    ("changes", "impl"),
    [({}, "wgmma"), ({"q_len": 4}, "mma"), ({"kv_format": "bf16"}, "mma"), ({"head_dim": 256}, "mma")],
)
def test_what_it_is_chosen_for(changes: dict[str, object], impl: str) -> None:
    asked = Asked(**({"head_dim": 128, "page_size": 16, "kv_format": "fp8", "group_size": 8, "q_len": 5} | changes))
    assert select(asked, resolve("sm_90a")).impl == impl
    assert select(asked, resolve("sm_110a")).impl != "wgmma"
    with pytest.raises(ConfigError, match="sm_110a has no wgmma"):
        PLAIN.check_arch(resolve("sm_110a"))
