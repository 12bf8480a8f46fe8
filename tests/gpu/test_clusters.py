"""Decodes whose CTAs form clusters: when plans take them, how sequences are shared out, graphs, streams, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import same_bits
from gpu.running import Gpu, check, run
from gpu.test_graphs import STEPS, Captured, with_lengths
from gpu.test_streams import run_at_once

from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES
from cubinery.runtime.ops.paged_decode.config import MmaConfig

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
HEADS: list[dict[str, Any]] = [
    {"d": 128, "h_q": 8, "h_k": 1}, {"d": 128, "h_q": 16, "h_k": 1}, {"d": 256, "h_q": 6, "h_k": 1},
    {"d": 64, "h_q": 8, "h_k": 1},
]  # fmt: skip
SIXTEEN = {"cluster": 16}


@FORMATS
def test_plans_of_batches_that_do_not_fill_the_chip_take_clusters(gpu: Gpu, kv_format: str) -> None:
    """The public call picks the kernel and the size where they were measured to be faster; other plans get another."""

    def size(lengths: list[int], choices: dict[str, Any] | None = None, **options: Any) -> int:
        case = gpu.case([min(n, 100) for n in lengths], h_q=8, h_k=1, kv_format=kv_format)
        plan = gpu.decode(case, **(choices or {})).plan(lengths, **case.heads, **options)
        assert isinstance(plan.config, MmaConfig)
        if plan.cluster > 1:
            assert plan.workspace_bytes() == 0
            assert plan.splits.max_splits == 1
        return plan.cluster

    assert size([4000] * 4) == size([0]) == size([16384] * 3) == 16
    for options in ({"force_splits": 2}, {"max_splits": 1}, {"pad_to": 4}, {"capturable": True}):
        assert size([4000] * 4, **options) == 1
    assert [size([4000] * batch) for batch in (8, 16, 17, 32, 36, 66, 67)] == [8, 8, 4, 4, 2, 2, 1]
    assert size([100_000]) == size([16385]) == size([9000] * 32) == size([100_000] + [100] * 63) == 1
    assert size([100_000] * 64) == 2
    assert size([100_000] * 40) == 1
    assert size([4000], {"cluster": 1}) == 1
    assert size([100_000] * 40, SIXTEEN) == 16


@FORMATS
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", CLUSTER_SIZES)
def test_every_length_around_tiles_and_clusters(gpu: Gpu, kv_format: str, heads: dict[str, Any], size: int) -> None:
    """No key, less than a tile, a tile for some CTAs and none for others, one or several for each, uneven ends."""
    borders = [128 * tiles + more for tiles in (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 48) for more in (-1, 0, 1)]
    lengths = [0, 1, 2, 17, 64, 65, 100, *borders, 7000]
    case = gpu.case(lengths, kv_format=kv_format, **heads)
    plan = gpu.plan(case, {"cluster": size})
    assert plan.cluster == size
    out, lse = run(plan, case)
    check(plan, case, out, lse)
    for _ in range(20):
        again = run(plan, case)
        assert same_bits(out, again[0])
        assert same_bits(lse, again[1])


@FORMATS
def test_a_result_does_not_depend_on_the_batch(gpu: Gpu, kv_format: str) -> None:
    """Sequences of 13 batches, alone and together: more clusters than the device holds at once, to the same bits."""
    lengths = np.random.default_rng(3).integers(0, 9000, 52).tolist()
    case = gpu.case(lengths, kv_format=kv_format, h_q=8, h_k=2)
    out, lse = gpu.solve(case, SIXTEEN)
    for first in range(0, 52, 4):
        part = gpu.decode(case, **SIXTEEN).plan(lengths[first : first + 4], **case.heads)
        rows = slice(first, first + 4)
        o, s = part.run(case.q[rows], case.k, case.v, case.table[rows])
        assert same_bits(o, out[rows])
        assert same_bits(s, lse[rows])


@FORMATS
def test_a_graph_follows_updates_in_place(gpu: Gpu, kv_format: str) -> None:
    """From the host and on the device; the plan keeps its kernel, whatever the lengths become."""
    case = gpu.case(STEPS[0], kv_format=kv_format, h_q=8, h_k=1)
    seq_lens = torch.zeros(4, dtype=torch.int32, device=gpu.device)
    by_host = Captured(gpu.plan(case, SIXTEEN, capturable=True), case)
    by_device = Captured(gpu.plan(case, SIXTEEN, capturable=True), case, seq_lens=seq_lens)
    assert by_host.plan.keys[0].endswith("-cl16")
    for lengths in STEPS:
        by_host.plan.update(lengths)
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        ((out, lse),) = by_host.replay()
        check(by_host.plan, with_lengths(case, lengths), out, lse)
        ((again, again_lse),) = by_device.replay()
        assert same_bits(out, again)
        assert same_bits(lse, again_lse)


@FORMATS
def test_a_launch_may_expect_other_lengths_than_there_are(gpu: Gpu, kv_format: str) -> None:
    """A captured launch still names the keys that sequences had; where that is wrong, pages are looked up again."""
    case = gpu.case([2000] * 3, kv_format=kv_format, h_q=8, h_k=1)
    captured = Captured(gpu.plan(case, SIXTEEN, capturable=True), case)
    for lengths in ([2000] * 3, [2000, 1, 700], [1999] * 3, [128] * 3, [0, 0, 2000], [0] * 3, [1920, 1921, 1919]):
        captured.plan.update(lengths)
        ((out, lse),) = captured.replay()
        check(captured.plan, with_lengths(case, lengths), out, lse)


@FORMATS
def test_launches_on_two_streams_at_once(gpu: Gpu, kv_format: str) -> None:
    """Clusters of two grids compete for the same SMs; nobody waits for what the other keeps away."""
    cases = [gpu.case([3000, 17, 900, 2000], kv_format=kv_format, h_q=16, h_k=2, seed=seed) for seed in (1, 2)]
    plans = [gpu.plan(case, {"cluster": size}) for case, size in zip(cases, (16, 4), strict=True)]
    run_at_once(gpu, plans, cases, 100)


def test_a_cluster_does_not_split(gpu: Gpu) -> None:
    case = gpu.case([300], h_q=8, h_k=1)
    for options in ({"force_splits": 2}, {"max_splits": 3}):
        with pytest.raises(PlanError, match=rf"{next(iter(options))} = \d with cluster = 16: expected none"):
            gpu.plan(case, SIXTEEN, **options)
    assert gpu.plan(case, SIXTEEN, force_splits=1, max_splits=1).config.cluster == 16


def test_the_driver_says_how_many_clusters_fit(gpu: Gpu) -> None:
    case = gpu.case([300], h_q=8, h_k=1)
    decode = gpu.decode(case, **SIXTEEN)
    kernel = decode.kernel(decode.config(8), cluster=16, stream=torch.cuda.current_stream().cuda_stream)
    alone = gpu.decode(gpu.case([300], h_q=6, h_k=1, d=256), **SIXTEEN)
    fewer = alone.kernel(alone.config(6), cluster=16, stream=torch.cuda.current_stream().cuda_stream)
    assert 1 <= fewer.max_clusters <= alone.info.sm_count // 16, "a CTA an SM, by its shared memory"
    assert fewer.max_clusters < kernel.max_clusters <= 2 * decode.info.sm_count // 16
    assert kernel.in_clusters_of(2).max_clusters == 2 * decode.info.sm_count // 2
