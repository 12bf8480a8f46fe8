"""Streams, threads, libraries and devices side by side."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.problems import Case, same_bits
from gpu.running import Gpu, check, run

from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])


@FORMATS
@pytest.mark.parametrize("how", ["argument", "raw handle", "context"])
def test_a_stream_that_is_not_the_default(gpu: Gpu, kv_format: str, how: str) -> None:
    """Planned on the current stream, run on another: the run follows the plan's upload by itself."""
    case = gpu.case([300, 2000], kv_format=kv_format)
    gpu.synchronize()
    torch.cuda._sleep(100_000_000)  # the upload is late
    plan = gpu.plan(case, force_splits=3)
    side = torch.cuda.Stream()
    if how == "context":
        with torch.cuda.stream(side):
            out, lse = plan.run(*case.tensors)
    else:
        out, lse = plan.run(*case.tensors, stream=side if how == "argument" else side.cuda_stream)
    side.synchronize()
    check(plan, case, out, lse)


def run_at_once(gpu: Gpu, plans: list[Plan], cases: list[Case], times: int) -> None:
    """Each plan again and again on a stream of its own: to the same bits as alone, which are held to the reference."""
    expected = [run(plan, case) for plan, case in zip(plans, cases, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    gpu.synchronize()
    for _ in range(times):
        for plan, case, stream, into in zip(plans, cases, streams, found, strict=True):
            with torch.cuda.stream(stream):
                into.append(plan.run(*case.tensors))
    gpu.synchronize()
    for results, (out, lse), plan, case in zip(found, expected, plans, cases, strict=True):
        check(plan, case, out, lse)
        assert all(same_bits(o, out) and same_bits(s, lse) for o, s in results)


@FORMATS
def test_two_streams_at_once(gpu: Gpu, kv_format: str) -> None:
    cases = [gpu.case([3000, 17, 900], kv_format=kv_format, seed=seed) for seed in (1, 2)]
    plans = [gpu.plan(case, force_splits=3 + i) for i, case in enumerate(cases)]
    run_at_once(gpu, plans, cases, 30)


@FORMATS
def test_one_plan_on_two_streams_with_a_workspace_each(gpu: Gpu, kv_format: str) -> None:
    case = gpu.case([3000, 17, 900], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=5)
    expected = run(plan, case)
    streams = [torch.cuda.Stream() for _ in range(2)]
    memory = [torch.empty(plan.workspace_bytes(), dtype=torch.uint8, device=gpu.device) for _ in streams]
    outs = [[torch.empty_like(case.q) for _ in range(20)] for _ in streams]
    gpu.synchronize()
    for i in range(20):
        for stream, workspace, out in zip(streams, memory, outs, strict=True):
            plan.run(*case.tensors, out=out[i], workspace=workspace, stream=stream)
    gpu.synchronize()
    assert all(same_bits(o, expected[0]) for side in outs for o in side)
    assert {len(c) for c in plan._partials.counters.values()} == {plan.partial_slots * case.h_k}
    assert len(plan._partials.counters) == 3  # of the two workspaces here and of the one of the first run
    assert not any(bool(c.any()) for c in plan._partials.counters.values())


def test_an_operator_is_shared_by_streams_of_which_one_is_late(gpu: Gpu) -> None:
    """What the operator keeps for all its plans must be there for each, whichever stream brought it."""
    case = gpu.case([300, 2000])
    decode = PagedDecode(gpu.library, head_dim=128, page_size=16, kv_format="fp8", device=gpu.device.index)
    late, other = torch.cuda.Stream(), torch.cuda.Stream()
    gpu.synchronize()
    with torch.cuda.stream(late):
        dirty = [torch.full((n,), float("nan"), device=gpu.device) for n in (1, 1, 64, 64)]
        del dirty  # what is allocated next on this stream starts as NaN
        torch.cuda._sleep(200_000_000)
        first = decode.plan(case.lengths, **case.heads, force_splits=3)
        first_results = first.run(*case.tensors)
    with torch.cuda.stream(other):
        second = decode.plan(case.lengths, **case.heads, force_splits=3)
        second_results = second.run(*case.tensors)
    gpu.synchronize()
    check(first, case, *first_results)
    check(second, case, *second_results)


def in_threads(count: int, work: Any) -> None:
    """Run work(i) in threads that start together; the first exception is raised here."""
    barrier, errors = threading.Barrier(count), []

    def body(index: int) -> None:
        try:
            barrier.wait()
            work(index)
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_share_a_library_that_loads_each_cubin_once(gpu: Gpu, bundle: Path) -> None:
    """Eight threads, each with a stream, a plan and a case of its own, on kernels that nobody has loaded yet."""
    library = Library.open(bundle)
    loads: list[int] = []
    load = library.driver.load_module

    def counting(device: int, image: bytes) -> Any:
        loads.append(device)
        return load(device, image)

    library.driver.load_module = counting  # type: ignore[method-assign]
    cases = [gpu.case([300, 1500, i + 1], seed=i, kv_format=("fp8", "bf16")[i % 2]) for i in range(8)]
    expected = [gpu.solve(case, force_splits=3) for case in cases]
    operators = {
        kv: PagedDecode(library, head_dim=128, page_size=16, kv_format=kv, device=gpu.device.index)
        for kv in ("fp8", "bf16")
    }
    gpu.synchronize()
    results: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def work(index: int) -> None:
        case = cases[index]
        stream = torch.cuda.Stream(gpu.device)
        with torch.cuda.stream(stream):
            plan = operators[case.kv_format].plan(case.lengths, **case.heads, force_splits=3)
            results[index] = [plan.run(*case.tensors) for _ in range(20)]
            stream.synchronize()

    in_threads(8, work)
    assert len(loads) == 2  # two decode kernels
    for index, (out, lse) in enumerate(expected):
        assert all(same_bits(o, out) and same_bits(s, lse) for o, s in results[index])


def test_two_libraries_in_one_process(gpu: Gpu, bundle: Path) -> None:
    case = gpu.case([300, 2000, 17])
    expected = gpu.solve(case, force_splits=4)
    libraries = [Library.open(bundle), Library.open(bundle)]
    libraries.append(Library.open(bundle, driver=libraries[0].driver))
    plans = [
        PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8", device=gpu.device.index).plan(
            case.lengths, **case.heads, force_splits=4
        )
        for library in libraries
    ]
    for _ in range(3):
        for plan in plans:
            out, lse = run(plan, case)
            assert same_bits(out, expected[0])
            assert same_bits(lse, expected[1])
    del plans, libraries  # code that is loaded stays loaded; the others go on
    check(gpu.plan(case), case, *gpu.solve(case))


def test_launch_from_a_thread_that_never_touched_cuda(gpu: Gpu) -> None:
    case = gpu.case([300, 2000])
    plan = gpu.plan(case)
    expected = run(plan, case)
    out, lse = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    workspace = torch.empty(plan.workspace_bytes() or 1, dtype=torch.uint8, device=gpu.device)
    raw = torch.cuda.current_stream().cuda_stream
    gpu.synchronize()
    in_threads(1, lambda _: plan.run(*case.tensors, out=out, lse=lse, workspace=workspace, stream=raw))
    gpu.synchronize()
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_another_device_than_the_current_one(gpu: Gpu) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("this machine has one GPU")
    other = torch.device("cuda", 1 - (gpu.device.index or 0))
    case = Case([300, 2000], other)
    decode = PagedDecode(gpu.library, head_dim=128, page_size=16, kv_format="fp8", device=other)
    plan = decode.plan(case.lengths, **case.heads, force_splits=3)
    out, lse = run(plan, case)
    torch.cuda.synchronize(other)
    check(plan, case, out, lse)
