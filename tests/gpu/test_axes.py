"""Sliding windows, sinks, soft-caps, tokens per sequence and wide groups: values, splits, graphs, device plans."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu.problems import Case, same_bits
from gpu.running import Gpu, check, run

pytestmark = pytest.mark.gpu
SPLITS = pytest.mark.parametrize("force_splits", [0, 1, 3])
TWO = {"ctas_per_sm": 2}
"""For results that must be the same to the bit: a plan of few CTAs would else get a kernel that adds up otherwise."""
LENGTHS = [0, 1, 3, 127, 128, 129, 300, 385, 1025, 2500]
ALL: dict[str, Any] = {"window": 200, "softcap": 3.0, "with_sinks": True, "with_q_lens": True}


@SPLITS
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [1, 2, 16, 100, 128, 129, 1000, 2**30])
def test_windows(gpu: Gpu, window: int, q_len: int, force_splits: int) -> None:
    """Pages before a window hold NaN and their table entries garbage, so nothing before it is looked at."""
    case = gpu.case(LENGTHS, window=window, q_len=q_len)
    gpu.solve(case, force_splits=force_splits)


def test_a_window_that_holds_everything_changes_no_bit(gpu: Gpu) -> None:
    """Of sequences in one item each; split ones are cut alike too, as nothing lies before the window."""
    for force_splits in (1, 3):
        results = [gpu.solve(gpu.case(LENGTHS, window=w), TWO, force_splits=force_splits) for w in (None, 4000)]
        assert same_bits(results[0][0], results[1][0])
        assert same_bits(results[0][1], results[1][1])


def test_tiles_before_a_window_are_no_work(gpu: Gpu) -> None:
    case = gpu.case([100_000] * 4, window=1000)
    plan = gpu.plan(case)
    work = plan.splits.work
    tiles = (work[:, 2] - work[:, 1])[work[:, 2] > 0]
    assert tiles.sum() == 4 * 9  # keys 99,000 to 99,999 lie in tiles 773 to 781
    check(plan, case, *run(plan, case))


@SPLITS
@pytest.mark.parametrize("q_len", [1, 4])
def test_sinks(gpu: Gpu, q_len: int, force_splits: int) -> None:
    case = gpu.case(LENGTHS, with_sinks=True, q_len=q_len)
    out, lse = gpu.solve(case, force_splits=force_splits)
    assert case.sinks is not None
    # No key: no value, and the LSE is the sink, to the bit.
    assert not case.rows_of(out)[0].any()
    by_head = case.sinks.view(2, 1, 4).expand(2, q_len, 4)
    assert torch.equal(lse[0].view(2, q_len, 4), by_head)
    for value in (80.0, -80.0, -math.inf):  # far above all scores, far below, absent
        case.sinks.fill_(value)
        gpu.solve(case, force_splits=force_splits)
    if force_splits == 1:
        plain = gpu.case(LENGTHS, q_len=q_len)
        expected = gpu.solve(plain, TWO, force_splits=1)
        found = gpu.solve(case, TWO, force_splits=1)  # absent sinks change no bit
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])


@SPLITS
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("softcap", [0.01, 1.0, 30.0, 1e3])
def test_softcap(gpu: Gpu, softcap: float, q_len: int, force_splits: int) -> None:
    """Caps that all scores exceed, and that none comes near."""
    case = gpu.case(LENGTHS, softcap=softcap, q_len=q_len, k_std=4.0)
    gpu.solve(case, force_splits=force_splits)
    if force_splits == 3:
        gpu.solve(case, run_options={"softmax_scale": 30.0}, force_splits=3)


@SPLITS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 4])
def test_fewer_tokens(gpu: Gpu, q_len: int, causal: bool, force_splits: int) -> None:
    case = gpu.case(LENGTHS, with_q_lens=True, q_len=q_len, causal=causal)
    out, lse = gpu.solve(case, force_splits=force_splits)
    assert case.q_lens is not None
    for seq, tokens in enumerate(case.q_lens.tolist()):
        assert not case.rows_of(out)[seq, :, tokens:].any()
        assert bool((lse[seq].view(2, q_len, 4)[:, tokens:] == -math.inf).all())
    case.q.nan_to_num_()
    case.q_lens.copy_(torch.tensor([2**31 - 1, -1, -(2**31), 99, 5, 4, 3, 2, 1, 0]))
    gpu.solve(case, force_splits=force_splits)


def test_all_tokens_present_change_no_bit(gpu: Gpu) -> None:
    case, plain = gpu.case(LENGTHS, with_q_lens=True, q_len=4, seed=5), gpu.case(LENGTHS, q_len=4, seed=5)
    assert case.q_lens is not None
    case.q_lens.fill_(4)
    case.q.copy_(plain.q)
    for force_splits in (1, 3):
        found, expected = (gpu.solve(c, TWO, force_splits=force_splits) for c in (case, plain))
        assert same_bits(found[0], expected[0])
        assert same_bits(found[1], expected[1])


@SPLITS
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_all_at_once(gpu: Gpu, seed: int, q_len: int, force_splits: int) -> None:
    case = gpu.case(LENGTHS, seed=seed, q_len=q_len, **(ALL | {"window": [1, 130, 600, 5000][seed]}))
    gpu.solve(case, run_options={"v_descale": 0.5, "out_scale": -2.0}, force_splits=force_splits)


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("window", [128, None])
def test_gpt_oss(gpu: Gpu, window: int | None, page_size: int) -> None:
    case = gpu.case(
        [1, 100, 128, 129, 4000, 0], h_q=64, h_k=8, d=64, kv_format="bf16", page_size=page_size, window=window,
        with_sinks=True,
    )  # fmt: skip
    for force_splits in (0, 1, 4):
        gpu.solve(case, force_splits=force_splits)


@pytest.mark.parametrize("window", [4096, None])
def test_gemma_2(gpu: Gpu, window: int | None) -> None:
    case = gpu.case([1, 5000, 4096, 9000], h_q=8, h_k=4, d=256, kv_format="bf16", window=window, softcap=50.0)
    for force_splits in (0, 1, 4):
        gpu.solve(case, force_splits=force_splits)


@pytest.mark.parametrize("group", [24, 32, 33, 48, 64, 100, 128])
def test_wide_groups(gpu: Gpu, group: int) -> None:
    """Row tiles of up to 128, filled in part and whole."""
    case = gpu.case([300, 0, 1, 129, 1500], h_q=2 * group, h_k=2)
    assert gpu.decode(case).config(group).row_tile == (32 if group <= 32 else 64 if group <= 64 else 128)
    for force_splits in (1, 3):
        gpu.solve(case, force_splits=force_splits)


def test_plans_on_the_device_know_windows(gpu: Gpu) -> None:
    """Lengths that the host never sees; the window moves with them."""
    lengths = [700, 1, 3000, 129]
    case = gpu.case([3000] * 4, window=200)
    plan = gpu.plan(case, policy="balanced", capturable=True)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=gpu.device)
    plan.update_on_device(device_lengths)
    shorter = gpu.case(lengths, window=200, seed=3)
    found = plan.run(*shorter_tensors(shorter, case))
    check(plan, shorter, *found)


def shorter_tensors(case: Case, wide: Case) -> tuple[torch.Tensor, ...]:
    """The tensors of a case, its block table as wide as another's."""
    table = torch.full_like(wide.table, -7)
    columns = min(table.shape[1], case.table.shape[1])
    table[:, :columns] = case.table[:, :columns]
    return case.q, case.k, case.v, table


def test_a_captured_graph_follows_sinks_and_tokens(gpu: Gpu) -> None:
    """Their contents change in place between replays."""
    case = gpu.case([300, 1200, 77], q_len=4, **ALL)
    plan = gpu.plan(case, capturable=True)
    assert case.sinks is not None
    assert case.q_lens is not None
    case.q.nan_to_num_()
    out, lse = torch.empty_like(case.q), torch.empty(plan.shape.lse, device=gpu.device)
    workspace = torch.empty(plan.workspace_bytes(), dtype=torch.uint8, device=gpu.device)
    options: dict[str, Any] = {"out": out, "lse": lse, "workspace": workspace, **case.extras}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan.run(*case.tensors, **options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*case.tensors, **options)
    for tokens, shift in (([4, 4, 4], 0.0), ([1, 3, 0], 2.0), ([0, 0, 4], -5.0)):
        case.q_lens.copy_(torch.tensor(tokens))
        case.sinks.add_(shift)
        graph.replay()
        check(plan, case, out, lse)
