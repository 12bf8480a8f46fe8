"""Graph capture: preload, replay, plans updated in place; what `run` must not do while it is captured."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import Case, same_bits
from gpu.running import Gpu, check, run

from cubinery.runtime.errors import CaptureError, PlanError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])


class Captured:
    """A graph of one plan's run, and the memory that it writes."""

    def __init__(self, plan: Plan, *cases: Case, seq_lens: torch.Tensor | None = None, **options: Any) -> None:
        """With `seq_lens`, lengths on the device, the graph plans for itself."""
        self.plan, self.cases, device = plan, cases, cases[0].device
        self.outs = [torch.full_like(case.q, float("nan")) for case in cases]
        self.lses = [torch.full(plan.shape.lse, float("nan"), device=device) for _ in cases]
        self.workspace = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=device)
        self.graph = torch.cuda.CUDAGraph()
        if seq_lens is not None:
            plan.update_on_device(seq_lens)
        if plan._partials.counters:  # of another workspace; the run makes those of this one
            plan.run(*cases[0].tensors, out=self.outs[0], lse=self.lses[0], workspace=self.workspace, **options)
            self.outs[0].fill_(float("nan"))
            self.lses[0].fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            if seq_lens is not None:
                plan.update_on_device(seq_lens)
            for case, out, lse in zip(cases, self.outs, self.lses, strict=True):
                plan.run(*case.tensors, out=out, lse=lse, workspace=self.workspace, **options)

    def replay(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        for x in (*self.outs, *self.lses):
            x.fill_(float("nan"))
        self.graph.replay()
        return [(out.clone(), lse.clone()) for out, lse in zip(self.outs, self.lses, strict=True)]


@FORMATS
@pytest.mark.parametrize("force_splits", [1, 4])
def test_replay_equals_eager(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    """Three layers of one plan on one workspace."""
    cases = [gpu.case([300, 0, 1500, 17], kv_format=kv_format, seed=seed) for seed in range(3)]
    plan = gpu.plan(cases[0], force_splits=force_splits)
    eager = [run(plan, case) for case in cases]
    captured = Captured(plan, *cases)
    assert captured.outs[0].isnan().all(), "a capture must not run anything"
    for _ in range(3):
        for case, (out, lse), (o_eager, lse_eager) in zip(cases, captured.replay(), eager, strict=True):
            assert same_bits(out, o_eager)
            assert same_bits(lse, lse_eager)
            check(plan, case, out, lse)


def with_lengths(case: Case, lengths: list[int]) -> Case:
    """The same tensors seen as a step of other lengths."""
    other = copy.copy(case)
    other.lengths = lengths
    return other


STEPS = [
    [2000, 2000, 2000, 2000],
    [1, 0, 129, 2000],
    [0, 0, 0, 0],
    [128, 128, 128, 128],
    [2000, 1, 1, 1],
    [500, 501, 502, 503],
]


@pytest.mark.parametrize(
    ("kv_format", "choices"),
    [(f, {"pdl": pdl, "ctas_per_sm": 2}) for f in ("fp8", "bf16") for pdl in (False, True)]
    + [("fp8", {"pdl": pdl, "ctas_per_sm": 1}) for pdl in (False, True)],
)
@pytest.mark.parametrize("how", ["capturable", "pad_to", "unsplit"])
def test_edge_38_a_graph_follows_plans_updated_in_place(
    gpu: Gpu, kv_format: str, how: str, choices: dict[str, Any]
) -> None:
    """Splits come and go from step to step; each replay matches the reference and a fresh launch."""
    case = gpu.case(STEPS[0], kv_format=kv_format)
    options: dict[str, Any] = {
        "capturable": {"capturable": True}, "pad_to": {"pad_to": 40}, "unsplit": {"max_splits": 1},
    }[how]  # fmt: skip
    captured = Captured(gpu.plan(case, choices, **options), case)
    counts = set()
    for lengths in STEPS:
        step = with_lengths(case, lengths)
        captured.plan.update(lengths)
        ((out, lse),) = captured.replay()
        check(captured.plan, step, out, lse)
        counts.add(captured.plan.splits.num_items)
        fresh = gpu.plan(step, choices, **options)
        o_fresh, lse_fresh = run(fresh, step)
        assert np.array_equal(fresh.splits.work, captured.plan.splits.work)
        assert same_bits(out, o_fresh)
        assert same_bits(lse, lse_fresh)
    assert len(counts) > 1 or how == "unsplit"


@FORMATS
@pytest.mark.parametrize("how", ["capturable", "unsplit"])
def test_a_graph_plans_from_lengths_on_the_device(gpu: Gpu, kv_format: str, how: str) -> None:
    """One graph of planning and decode; between replays only the lengths in device memory change."""
    case = gpu.case(STEPS[0], kv_format=kv_format)
    options: dict[str, Any] = {"capturable": {"capturable": True}, "unsplit": {"max_splits": 1}}[how]
    seq_lens = torch.zeros(4, dtype=torch.int32, device=gpu.device)
    captured = Captured(gpu.plan(case, **options), case, seq_lens=seq_lens)
    for lengths in STEPS * 2:
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        ((out, lse),) = captured.replay()
        check(captured.plan, with_lengths(case, lengths), out, lse)


def test_planning_on_the_device_waits_for_nothing(gpu: Gpu) -> None:
    case = gpu.case(STEPS[0])
    plan = gpu.plan(case, capturable=True)
    seq_lens = torch.tensor(STEPS[1], dtype=torch.int32, device=gpu.device)
    plan.update_on_device(seq_lens)
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    refuse_waiting(True)
    try:
        torch.cuda._sleep(200_000_000)
        plan.update_on_device(seq_lens)
        running = not torch.cuda.current_stream().query()
    finally:
        refuse_waiting(False)
    assert running, "planning waited for the work before it"
    out, lse = run(plan, case)
    check(plan, with_lengths(case, STEPS[1]), out, lse)


@FORMATS
def test_updates_and_replays_queue_up_in_order(gpu: Gpu, kv_format: str) -> None:
    """Nothing waits between steps: each replay still reads its own step's schedule."""
    case = gpu.case(STEPS[0], kv_format=kv_format)
    captured = Captured(gpu.plan(case, capturable=True), case)
    results = []
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)  # the host runs ahead
    for lengths in STEPS * 4:
        captured.plan.update(lengths)
        results.append((lengths, *captured.replay()[0]))
    for lengths, out, lse in results:
        check(captured.plan, with_lengths(case, lengths), out, lse)


def test_a_graph_whose_block_table_is_too_narrow_refuses_the_update(gpu: Gpu) -> None:
    case = gpu.case([100, 100], spare_blocks=0)
    captured = Captured(gpu.plan(case, capturable=True), case)
    expected = captured.replay()[0]
    with pytest.raises(PlanError, match="has room for 112"):
        captured.plan.update([100, 113])
    assert same_bits(captured.replay()[0][0], expected[0])


def test_replays_on_another_stream(gpu: Gpu) -> None:
    case = gpu.case([2000, 2000])
    captured = Captured(gpu.plan(case, capturable=True), case)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        captured.plan.update([129, 1999])
        ((out, lse),) = captured.replay()
    side.synchronize()
    check(captured.plan, with_lengths(case, [129, 1999]), out, lse)


# -- preload and capture -----------------------------------------------------------------------


def counted(bundle: Path) -> tuple[Library, list[int]]:
    """A library of its own, and the devices of the modules that it loads."""
    library = Library.open(bundle)
    loads: list[int] = []
    load = library.driver.load_module

    def counting(device: int, image: bytes) -> Any:
        loads.append(device)
        return load(device, image)

    library.driver.load_module = counting  # type: ignore[method-assign]
    return library, loads


def operator(library: Library, gpu: Gpu, case: Case) -> PagedDecode:
    return PagedDecode(
        library, head_dim=case.d, page_size=case.page_size, kv_format=case.kv_format, device=gpu.device.index
    )


def test_after_preload_nothing_is_loaded(gpu: Gpu, bundle: Path) -> None:
    library, loads = counted(bundle)
    case = gpu.case([300, 2000])
    decode = operator(library, gpu, case)
    assert loads == []
    decode.preload(case.group)
    assert len(loads) == 4  # decode, for many and for few CTAs and in clusters, and planning
    plan = decode.plan(case.lengths, **case.heads, force_splits=3)
    check(plan, case, *run(plan, case))
    captured = Captured(decode.plan(case.lengths, **case.heads, capturable=True), case)
    check(captured.plan, case, *captured.replay()[0])
    assert len(loads) == 4


def test_preloading_everything(gpu: Gpu, bundle: Path) -> None:
    library, loads = counted(bundle)
    count = library.preload()
    served = [artifact for artifact in map(library.artifact, library) if artifact.arch in library.archs_for()]
    assert count == len(served)
    assert len(loads) == len({artifact.cubin.sha256 for artifact in served})
    library.preload()
    case = gpu.case([300, 2000])
    plan = operator(library, gpu, case).plan(case.lengths, **case.heads)
    check(plan, case, *run(plan, case))
    assert len(loads) == len({artifact.cubin.sha256 for artifact in served})


def test_capture_without_preload_says_so_and_spoils_nothing(gpu: Gpu, bundle: Path) -> None:
    library, loads = counted(bundle)
    case = gpu.case([300, 2000])
    decode = operator(library, gpu, case)
    ready = gpu.plan(case)
    expected = run(ready, case)
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    workspace = torch.empty(max(1, ready.workspace_bytes()), dtype=torch.uint8, device=gpu.device)
    ready.run(*case.tensors, out=out, lse=lse, workspace=workspace)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        with pytest.raises(CaptureError, match=r"preload"):
            library.kernel(decode.keys(case.group)[0], gpu.device.index, stream=stream)
        with pytest.raises(CaptureError, match="plan copies from the host"):
            decode.plan(case.lengths, **case.heads)
        with pytest.raises(CaptureError, match="update copies from the host"):
            ready.update(case.lengths)
        with pytest.raises(CaptureError, match="check_block_table waits"):
            ready.run(*case.tensors, out=out, lse=lse, workspace=workspace, check_block_table=True)
        ready.run(*case.tensors, out=out, lse=lse, workspace=workspace)
    assert loads == []
    graph.replay()
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@FORMATS
def test_a_workspace_that_no_run_has_used_cannot_be_captured(gpu: Gpu, kv_format: str) -> None:
    """Its counters would be zeroed by the graph; the error says to run once, and that then helps."""
    case = gpu.case([2000, 300], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=5)
    expected = run(plan, case)
    out, lse = torch.full_like(case.q, float("nan")), torch.full_like(expected[1], float("nan"))
    foreign = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=gpu.device)
    given: dict[str, Any] = {"out": out, "lse": lse, "workspace": foreign}
    something = torch.zeros(1, device=gpu.device)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        something.add_(1)  # torch warns of empty graphs
        for options in (given, {"out": out, "lse": lse}):
            with pytest.raises(CaptureError, match="run once with this workspace before the capture"):
                plan.run(*case.tensors, **options)
    torch.cuda.synchronize()
    assert out.isnan().all()
    plan.run(*case.tensors, **given)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(*case.tensors, **given)
    for _ in range(3):
        foreign.fill_(0xFF)
        graph.replay()
        assert same_bits(out, expected[0])
        assert same_bits(lse, expected[1])


# -- what run must not do ----------------------------------------------------------------------


def refuse_waiting(on: bool) -> None:
    """Whether torch raises at calls that wait for the device."""
    with warnings.catch_warnings(action="ignore"):  # it is a prototype, torch says
        torch.cuda.set_sync_debug_mode("error" if on else "default")


@FORMATS
@pytest.mark.parametrize("again", [False, True])
def test_run_allocates_nothing_and_waits_for_nothing(gpu: Gpu, kv_format: str, again: bool) -> None:
    """The first run with these tensors, which checks and packs, and a repeated one."""
    case = gpu.case([300, 2000, 5], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=3)
    descale = torch.full((1,), 0.5, device=gpu.device)
    out, lse = torch.empty_like(case.q), torch.empty(plan.shape.lse, device=gpu.device)
    workspace = torch.empty(plan.workspace_bytes(), dtype=torch.uint8, device=gpu.device)

    def launch() -> None:
        plan.run(*case.tensors, k_descale=descale, out=out, lse=lse, workspace=workspace)

    if again:
        launch()
    else:  # of another layer: the first run with a workspace makes its counters
        other = gpu.case([300, 2000, 5], kv_format=kv_format, seed=1)
        plan.run(*other.tensors, workspace=workspace)
    torch.cuda._sleep(1)  # its code is loaded
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    free = torch.cuda.mem_get_info()
    refuse_waiting(True)
    try:
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
        launch()
        running = not torch.cuda.current_stream().query()
    finally:
        refuse_waiting(False)
    assert running, "run waited for the work before it"
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for name in ("allocation.all.allocated", "segment.all.allocated", "num_alloc_retries"):
        assert after.get(name, 0) == before.get(name, 0), name
    if again:  # a kernel's first launch may make the driver take memory
        assert torch.cuda.mem_get_info() == free
    check(plan, case, out, lse, k_descale=descale)
