"""Windows, sinks, soft-caps and tokens per sequence on the simulator, for Hopper and for Thor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import Simulated, simulate

from cubinery.runtime.ops.paged_decode.config import MmaConfig

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")
BASE: dict[str, Any] = {"head_dim": 64, "page_size": 16, "kv_format": "fp8"}
CONFIGS = {
    "window": MmaConfig(**BASE, window=True),
    "window4": MmaConfig(**BASE, q_len=4, window=True),
    "sinks": MmaConfig(**BASE, sinks=True),
    "softcap": MmaConfig(**BASE, softcap=True),
    "q_lens": MmaConfig(**BASE, q_len=4, q_lens=True),
    "q_lens1": MmaConfig(**BASE, q_lens=True),
    "one": MmaConfig(**BASE, window=True, q_lens=True),
    "all": MmaConfig(**BASE, q_len=4, window=True, sinks=True, softcap=True, q_lens=True),
    "all8": MmaConfig(**BASE, q_len=4, row_tile=8, window=True, sinks=True, softcap=True, q_lens=True),
    "narrow": MmaConfig(
        head_dim=128,
        page_size=32,
        kv_format="nvfp4",
        q_dtype="e4m3",
        q_len=2,
        window=True,
        sinks=True,
        softcap=True,
        q_lens=True,
    ),
    "long": MmaConfig(
        head_dim=256, page_size=64, kv_format="bf16", q_len=3, window=True, sinks=True, softcap=True, q_lens=True
    ),
}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=ARCHS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    folder: Path = tmp_path_factory.mktemp("axes")
    return simulate(CONFIGS.values(), request.param, folder)


def problem(config: MmaConfig, lengths: list[int], group: int = 3) -> Problem:
    return Problem(
        lengths, np.random.default_rng(sum(lengths)), torch, h_q=2 * group, h_k=2, d=config.head_dim,
        page_size=config.page_size, q_len=config.q_len, kv_format=config.kv_format, q_dtype=config.q_dtype,
    )  # fmt: skip


def forget_before(p: Problem, window: int, q_lens: list[int] | None = None) -> None:
    """Nobody may look before the window: pages hold NaN there (where there is one), and the block table garbage."""
    for seq, length in enumerate(p.lengths):
        tokens = p.q_len if q_lens is None else q_lens[seq]
        gone = max(0, length - tokens + 1 - window) // p.page_size
        for page in p.table[seq, :gone].tolist():
            for cache in (p.k, p.v, *p.scales.values()):
                cache[page] = (
                    torch.full(cache.shape[1:], math.nan).to(cache.dtype) if cache.is_floating_point() else 0x7F
                )
        p.table[seq, :gone] = 2**31 - 1


def sinks_of(p: Problem, low: float = -3, high: float = 5) -> torch.Tensor:
    return torch.from_numpy(p.rng.uniform(low, high, p.h_q).astype(np.float32))


@pytest.mark.parametrize("force_splits", [1, 3])
@pytest.mark.parametrize("window", [1, 100, 128, 1000])
def test_window(simulated: Simulated, window: int, force_splits: int) -> None:
    """Windows that begin inside a page, a tile and a stage, on their borders, and before the sequence."""
    config = CONFIGS["window"]
    p = problem(config, [417, 384, 5, 0])
    forget_before(p, window)
    simulated.check(config, p, window=window, force_splits=force_splits)


@pytest.mark.parametrize(("window", "force_splits"), [(2, 1), (130, 2), (253, 3)])
def test_window_of_several_tokens(simulated: Simulated, window: int, force_splits: int) -> None:
    """Tokens whose windows begin in different stages, and end in different ones."""
    config = CONFIGS["window4"]
    p = problem(config, [386, 2, 130])
    forget_before(p, window)
    simulated.check(config, p, window=window, force_splits=force_splits)


@pytest.mark.parametrize("force_splits", [1, 3])
def test_sinks_count_once(simulated: Simulated, force_splits: int) -> None:
    """Whatever the splits; a sequence without keys has its sink as LSE, and no value."""
    config = CONFIGS["sinks"]
    p = problem(config, [300, 0, 1])
    sinks = sinks_of(p)
    o, lse = simulated.check(config, p, sinks=sinks, force_splits=force_splits)
    assert not o[1].any()
    assert torch.equal(lse[1].flatten(), sinks)
    simulated.check(config, p, sinks=torch.full_like(sinks, 60.0), force_splits=force_splits)
    without = simulated.check(config, p, sinks=torch.full_like(sinks, -math.inf), force_splits=force_splits)
    assert bool((without[1][1] == -math.inf).all())


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(simulated: Simulated, softcap: float) -> None:
    """Scores far beyond the cap and far below it."""
    config = CONFIGS["softcap"]
    p = problem(config, [300, 0, 77])
    simulated.check(config, p, softcap=softcap, force_splits=2)
    simulated.check(config, p, softcap=softcap, softmax_scale=20.0)


@pytest.mark.parametrize("force_splits", [1, 2])
def test_fewer_tokens_than_compiled(simulated: Simulated, force_splits: int) -> None:
    """All, some, one and none; queries of the tokens that are not there hold NaN."""
    config = CONFIGS["q_lens"]
    p = problem(config, [300, 130, 7, 129, 2])
    q_lens = [4, 2, 1, 0, 3]
    rows = p.q.view(5, 4, -1)
    for seq, tokens in enumerate(q_lens):
        rows[seq, tokens:] = math.nan
    o, lse = simulated.check(config, p, q_lens=torch.tensor(q_lens, dtype=torch.int32), force_splits=force_splits)
    for seq, tokens in enumerate(q_lens):
        assert not o.view(5, 4, -1)[seq, tokens:].any()
        assert bool((lse.view(5, 2, 4, 3)[seq, :, tokens:] == -math.inf).all())
    beyond = torch.tensor([4, 9, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    p.q.nan_to_num_()
    simulated.check(config, p, q_lens=beyond, force_splits=force_splits)


def test_fewer_tokens_without_a_causal_mask(simulated: Simulated) -> None:
    """The kernel of one token serves several that all see everything."""
    config = CONFIGS["q_lens1"]
    p = Problem([150, 20, 0], np.random.default_rng(4), torch, h_q=4, h_k=2, d=64, q_len=5)
    simulated.check(config, p, q_lens=torch.tensor([3, 0, 5], dtype=torch.int32), causal=False, force_splits=2)
    one = problem(config, [150, 20, 0])
    simulated.check(config, one, q_lens=torch.tensor([1, 0, 1], dtype=torch.int32))


def test_too_many_tokens_do_not_widen_a_window(simulated: Simulated) -> None:
    """They are cut to q_len before the first page is looked up."""
    p = problem(CONFIGS["one"], [321, 321, 321], group=8)
    forget_before(p, 65)
    simulated.check(CONFIGS["one"], p, window=65, q_lens=torch.tensor([9, 1, 2**31 - 1], dtype=torch.int32))


@pytest.mark.parametrize("name", ["all", "all8", "long", "narrow"])
@pytest.mark.parametrize(("window", "force_splits"), [(1, 1), (140, 2), (5000, 3)])
def test_all_at_once(simulated: Simulated, name: str, window: int, force_splits: int) -> None:
    """`all8` has a second row tile that is not full, and rows of two tokens in one lane."""
    config = CONFIGS[name]
    p = problem(config, [400, 257, 0, 3])
    q_lens = [config.q_len, 2, 1, 0]
    forget_before(p, window, q_lens)
    simulated.check(
        config, p, window=window, sinks=sinks_of(p), softcap=2.0, q_lens=torch.tensor(q_lens, dtype=torch.int32),
        force_splits=force_splits, out_scale=-1.5,
    )  # fmt: skip
