"""The planning kernel on a GPU: the host planner's arrays, integer for integer, eager and captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.running import Gpu

from cubinery.aot.problems import Subject
from cubinery.aot.problems.paged_decode import plan as problems
from cubinery.aot.problems.paged_decode.plan import H200, THOR, Case
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window

pytestmark = pytest.mark.gpu


def on_device(gpu: Gpu) -> Any:
    def place(**tensors: Any) -> dict[str, Any]:
        found = {name: tensor.to(gpu.device) for name, tensor in tensors.items()}
        gpu.synchronize()  # the kernel runs on the default stream
        return found

    return place


def test_the_cases_of_verification(gpu: Gpu) -> None:
    finding = problems.check(Subject.of(gpu.library, gpu.library.key_for(PlanConfig()), on_device(gpu)))
    assert finding.ok, finding.text


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 256, 1000, 1024, 1025, 4096])
@pytest.mark.parametrize("machine", [H200, THOR])
def test_equal_to_the_host_planner(gpu: Gpu, count: int, machine: dict[str, Any]) -> None:
    """Hundreds of random batches: lengths of every scale, both policies, windows, limits and padding."""
    rng = np.random.default_rng(count)
    for _ in range(40):
        lengths = rng.integers(0, int(rng.choice([1, 300, 20_000, 200_000])) + 1, count)
        if rng.random() < 0.3:
            lengths[rng.integers(count)] = rng.choice([131072, 2**31 - 128])
        options = machine | {
            "policy": str(rng.choice(["balanced", "thor"])), "num_kv_heads": int(rng.choice([1, 2, 8])),
            "max_splits": [None, 1, 4][rng.integers(3)], "force_splits": int(rng.choice([0, 0, 0, 3])),
            "min_chunk_tiles": int(rng.choice([1, 1, 4])),
        }  # fmt: skip
        window = [EVERYTHING, EVERYTHING, Window(1, 1), Window(4096, 4)][rng.integers(4)]
        case = Case(
            lengths=lengths.tolist(), spare=int(rng.choice([0, 7])), window=window, wide=bool(rng.integers(2)),
            options=options,
        )  # fmt: skip
        assert problems.run(gpu.library, case, on_device(gpu)) == ""


@pytest.mark.parametrize("policy", ["balanced", "thor"])
def test_replays_plan_as_the_host_does(gpu: Gpu, policy: str) -> None:
    """Two plans of one batch, one updated by the host and one by a captured launch: the same memory each time."""
    case = gpu.case([2000] * 24)
    plans = [gpu.plan(case, capturable=True, policy=policy) for _ in range(2)]
    gpu.decode(case).preload(case.group)
    seq_lens = torch.zeros(24, dtype=torch.int32, device=gpu.device)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        plans[1].update_on_device(seq_lens)
    rng = np.random.default_rng(1)
    for step in range(20):
        lengths = rng.integers(0, 2001, 24) if step % 2 else np.where(rng.random(24) < 0.2, 2000, 3)
        seq_lens.copy_(torch.from_numpy(lengths.astype(np.int32)))
        graph.replay()
        plans[0].update(lengths)
        assert torch.equal(*(plan.device_arrays for plan in plans))
