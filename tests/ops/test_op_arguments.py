"""Wrong arguments of the public call: refused before a launch, by one line with name, value and expectation."""

from __future__ import annotations

import gc
import os
import threading
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import host_kernels
import numpy as np
import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver

from cubinery.runtime.errors import (
    ArchError,
    ArgumentError,
    CaptureError,
    ConfigError,
    CubineryError,
    ForkError,
    KernelNotFoundError,
    PlanError,
)
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode import plan as plans
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan
from cubinery.runtime.ops.paged_decode.tensors import strides

Make = Callable[..., tuple[PagedDecode, FakeDriver]]


F8, BF = torch.float8_e4m3fn, torch.bfloat16
Q = torch.zeros(3, 8, 128, dtype=BF)
KV = torch.zeros(118, 16, 2, 128).to(F8)

BAD: list[tuple[str, Any, str]] = [
    ("q", None, "q is a NoneType: expected a torch tensor"),
    ("q", np.zeros((3, 8, 128), np.float32), "q is a ndarray: expected a torch tensor"),
    ("q", Q.float(), "q has dtype torch.float32: expected torch.bfloat16"),
    ("q", Q[:2], "q has shape (2, 8, 128): expected (3, 8, 128) or (3, 1, 8, 128)"),
    ("q", Q.reshape(3, 4, 2, 128), "q has shape (3, 4, 2, 128): expected"),
    ("q", torch.zeros(3, 8, 256, dtype=BF)[..., ::2], "q has stride 2 along head_dim: expected 1"),
    ("q", torch.zeros(3, 8, 132, dtype=BF)[..., :128],
     "q has a stride of 264 bytes along head: expected a multiple of 16"),
    ("q", torch.zeros(3, 8 * 128 + 4, dtype=BF)[:, :1024].unflatten(1, (8, 128)),
     "q has a stride of 2056 bytes along token: expected a multiple of 16"),
    ("q", torch.zeros(3 * 1024 + 1, dtype=BF)[1:].view(3, 8, 128), "q lies at address 0x"),
    ("q", Q.to("meta"), "q is on meta: expected cpu"),
    ("k_cache", KV.float(), "k_cache has dtype torch.float32: expected torch.float8_e4m3fn or torch.uint8"),
    ("k_cache", KV[:, :8], "k_cache has shape (118, 8, 2, 128): expected (num_pages, 16, 2, 128)"),
    ("k_cache", KV[:0], "k_cache has shape (0, 16, 2, 128): expected (num_pages, 16, 2, 128)"),
    ("k_cache", KV[0], "k_cache has shape (16, 2, 128): expected"),
    ("k_cache", KV.view(torch.uint8), "v_cache has dtype torch.float8_e4m3fn: expected torch.uint8"),
    ("k_cache", torch.zeros(118, 16, 2, 132).to(F8)[..., :128],
     "k_cache has a stride of 264 bytes along row: expected a multiple of 16"),
    ("v_cache", torch.zeros(118, 16, 2, 256).to(F8)[..., ::2], "v_cache has stride 2 along head_dim: expected 1"),
    ("v_cache", KV[:100], "v_cache has 100 pages: expected 118, as k_cache has"),
    ("v_cache", torch.zeros(118, 16, 2, 128, dtype=BF), "v_cache has dtype torch.bfloat16: expected"),
    ("v_cache", torch.zeros(1, dtype=torch.uint8).view(F8).as_strided((118, 16, 2, 128), (0, 0, 0, 0)),
     "v_cache has stride 0 along head_dim: expected 1"),
    ("block_table", torch.zeros(3, 96, dtype=torch.int64), "block_table has dtype torch.int64: expected torch.int32"),
    ("block_table", torch.zeros(4, 96, dtype=torch.int32), "block_table has shape (4, 96): expected (3, max_blocks)"),
    ("block_table", torch.zeros(3, 0, dtype=torch.int32), "block_table has shape (3, 0): expected (3, max_blocks)"),
    ("block_table", torch.zeros(3, 93, dtype=torch.int32),
     "block_table has 93 columns of 16 keys: expected at least 94, as the longest sequence has 1500 keys"),
    ("block_table", torch.zeros(96, 3, dtype=torch.int32).T, "block_table has stride 3 along block: expected 1"),
    ("q_descale", torch.ones(1, dtype=torch.float64), "q_descale has dtype torch.float64: expected torch.float32"),
    ("k_descale", torch.ones(3), "k_descale has shape (3,): expected 1 element, (2,) or (3, 2)"),
    ("v_descale", torch.ones(2, 3), "v_descale has shape (2, 3): expected 1 element, (2,) or (3, 2)"),
    ("k_descale", 0.0, "k_descale = 0.0: expected a number above 0"),
    ("q_descale", float("nan"), "q_descale = nan: expected a finite number"),
    ("v_descale", True, "v_descale = True: expected a finite number"),
    ("v_descale", "1", "v_descale is a str: expected None, a number or a torch tensor"),
    ("k_descale", 1e-60,
     "softmax_scale times the descales that are numbers = 8.83883e-62: expected at least 1.17549e-38"),
    ("k_cache", torch.zeros(118, 16, 2, 128).to_sparse(),
     "k_cache has layout torch.sparse_coo: expected torch.strided"),
    ("out", torch.zeros(1, 8, 128, dtype=BF).expand(3, 8, 128),
     "out has strides (0, 128, 1): expected elements that do not share memory"),
    ("out", torch.zeros(8192, dtype=BF).as_strided((3, 8, 128), (512, 128, 1)),
     "out has strides (512, 128, 1): expected elements that do not share memory"),
    ("softmax_scale", -0.1, "softmax_scale = -0.1: expected a number above 0"),
    ("softmax_scale", "auto", "softmax_scale = 'auto': expected a finite number"),
    ("out_scale", float("inf"), "out_scale = inf: expected a finite number"),
    ("out", torch.zeros(3, 8, 128), "out has dtype torch.float32: expected torch.bfloat16"),
    ("out", torch.zeros(2, 8, 128, dtype=BF), "out has shape (2, 8, 128): expected (3, 8, 128)"),
    ("out", torch.zeros(3, 8, 256, dtype=BF)[..., ::2], "out has stride 2 along head_dim: expected 1"),
    ("lse", torch.zeros(3, 8), "lse has shape (3, 8): expected (3, 2, 4), (num_seqs, num_kv_heads, n_q)"),
    ("lse", torch.zeros(3, 2, 4, dtype=BF), "lse has dtype torch.bfloat16: expected torch.float32"),
    ("lse", torch.zeros(3, 4, 2).transpose(1, 2), "lse has strides (8, 1, 2): expected a contiguous tensor"),
    ("workspace", torch.zeros(64), "workspace has 256 bytes: expected at least"),
    ("workspace", torch.zeros(1 << 24, dtype=torch.uint8)[1:], "workspace lies at address 0x"),
    ("workspace", torch.zeros(1 << 12, 1 << 12, dtype=torch.uint8).T, "workspace has strides (1, 4096)"),
    ("workspace", 4096, "workspace is a int: expected a torch tensor"),
    ("stream", "default", "stream = 'default': expected a torch stream, a raw handle or None"),
    ("stream", -1, "stream = -1: expected a torch stream"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), BAD, ids=[f"{i}-{name}" for i, (name, _, _) in enumerate(BAD)])
def test_bad_argument(made: tuple[Plan, FakeDriver], p: Problem, name: str, value: Any, message: str) -> None:
    plan, driver = made
    arguments: dict[str, Any] = dict(zip(("q", "k_cache", "v_cache", "block_table"), p.tensors, strict=True))
    with pytest.raises(ArgumentError) as error:
        plan.run(**(arguments | {name: value}))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert driver.launches == []
    plan.run(**arguments)  # and nothing is spoilt
    assert len(driver.launches) == 1


def test_a_bad_argument_after_a_good_run_is_refused_too(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    plan, driver = made
    out, lse = plan.run(*p.tensors)
    plan.run(*p.tensors, out=out, lse=lse)
    count = len(driver.launches)
    for name, value, _ in BAD:
        if name in ("q", "out", "lse", "block_table"):
            arguments = dict(zip(("q", "k_cache", "v_cache", "block_table"), p.tensors, strict=True))
            with pytest.raises(ArgumentError):
                plan.run(**(arguments | {"out": out, "lse": lse} | {name: value}))
    assert len(driver.launches) == count


def test_strides_beyond_int32_are_refused() -> None:
    far = torch.empty(1, dtype=torch.uint8, device="meta").as_strided((118, 16, 2, 128), (2**31, 256, 128, 1))
    with pytest.raises(ArgumentError, match="k_cache has stride 2147483648 along page: expected 0 to 2147483647"):
        strides("k_cache", far, ("page", "row", "head", "head_dim"))


def test_one_row_tensors_with_meaningless_strides(make_decode: Make) -> None:
    """DLPack leaves stride 1 on axes of one element; nothing is stepped along them."""
    p = Problem(lengths=[5], rng=np.random.default_rng(2), torch=torch, h_q=1, h_k=1)
    decode, driver = make_decode((1,))
    plan = decode.plan([5], num_q_heads=1, num_kv_heads=1)
    q = p.q.as_strided((1, 1, 128), (1, 1, 1))
    k, v = (x[:1].as_strided((1, 16, 1, 128), (1, 128, 1, 1)) for x in (p.k, p.v))
    table = torch.zeros(1, 1, dtype=torch.int32).as_strided((1, 1), (1, 1))
    plan.run(q, k, v, table)
    values = driver.launches[0].values
    assert values["q_head"] % 8 == values["q_seq"] % 8 == 0
    assert all(stride % 16 == 0 for stride in values["k_map"].strides)


def test_out_of_range_block_table_on_request(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    plan, driver = made
    plan.run(*p.tensors, check_block_table=True)  # garbage past the ends is fine
    p.table[1, 1] = 118
    with pytest.raises(ArgumentError, match=r"block_table\[1, 1\] = 118: expected a page, 0 to 117; 1 such entries"):
        plan.run(*p.tensors, check_block_table=True)
    p.table[2, 93] = -1
    with pytest.raises(ArgumentError, match="2 such entries"):
        plan.run(*p.tensors, check_block_table=True)
    assert len(driver.launches) == 1
    out, lse = plan.run(*p.tensors)  # not asked for
    with pytest.raises(ArgumentError):
        plan.run(*p.tensors, out=out, lse=lse, check_block_table=True)
    driver.capturing.add(0)
    with pytest.raises(CaptureError, match="check_block_table waits for the device"):
        plan.run(*p.tensors, check_block_table=True)


# -- plan and update -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_q_heads": 25}, PlanError, "num_q_heads = 25: expected a multiple of num_kv_heads = 2"),
        ({"num_kv_heads": 0}, PlanError, "num_kv_heads = 0: expected an integer of at least 1"),
        ({"num_q_heads": 8.0}, PlanError, "num_q_heads = 8.0: expected an integer"),
        ({"seq_lens": []}, PlanError, "seq_lens has shape (0,)"),
        ({"policy": "fast"}, PlanError, "policy = 'fast': expected one of thor, balanced"),
        ({"pad_to": 2}, PlanError, "pad_to = 2: 3 sequences need at least as many"),
        ({"num_q_heads": 64}, KernelNotFoundError, "paged_decode-sm_90a-mma-d128-p16-kvfp8-t32"),
    ],
)
def test_bad_plans(make_decode: Make, options: dict[str, Any], error: type[CubineryError], message: str) -> None:
    decode, _ = make_decode()
    with pytest.raises(error) as caught:
        decode.plan(**({"seq_lens": [300, 17, 1500], "num_q_heads": 8, "num_kv_heads": 2} | options))
    assert message in str(caught.value)


def test_bad_problems_are_refused_at_once(make_decode: Make) -> None:
    decode, _ = make_decode()
    library = decode.library
    for options, message in (
        ({"page_size": 48}, "page_size = 48 is not supported"),
        ({"head_dim": 192}, "head_dim = 192 is not supported"),
        ({"q_len": 17}, "q_len = 17 is not supported"),
        ({"impl": "mmb"}, "impl = 'mmb'"),
    ):
        with pytest.raises(ConfigError, match=message):
            PagedDecode(library, **({"head_dim": 128, "page_size": 16, "kv_format": "fp8"} | options))
    with pytest.raises(ArgumentError, match="device = 'gpu7': expected an index or a torch device"):
        PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8", device="gpu7")
    alien = FakeDriver(["sm_100a"])
    with pytest.raises(ArchError, match="runs sm_100a or sm_100f"):
        PagedDecode(Library(library.bundles, alien), head_dim=128, page_size=16, kv_format="fp8")


def test_a_miss_is_recorded(make_decode: Make) -> None:
    decode, _ = make_decode()
    with pytest.raises(KernelNotFoundError):
        decode.plan([5], num_q_heads=64, num_kv_heads=2)
    assert [miss["key"] for miss in decode.library.misses] == ["paged_decode-sm_90a-mma-d128-p16-kvfp8-t32-cps1"]


def test_bad_updates_change_nothing(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    plan, _ = made
    before = plan._upload.tensor.clone()
    splits = plan.splits
    for lengths, message in (
        ([1, 2], "seq_lens has 2 sequences: expected 3"),
        ([1, -2, 3], r"seq_lens\[1\] = -2"),
    ):
        with pytest.raises(PlanError, match=message):
            plan.update(lengths)
    assert torch.equal(plan._upload.tensor, before)
    assert plan.splits is splits


def test_updates_that_outgrow_a_captured_table_are_refused(make_decode: Make, p: Problem) -> None:
    decode, _ = make_decode()
    plan = decode.plan(p.lengths, **p.heads, capturable=True)
    plan.run(*p.tensors)
    room = p.table.shape[1] * 16
    plan.update([room, 1, 1])
    with pytest.raises(PlanError, match=f"seq_lens reach {room + 1} keys: .* has room for {room}"):
        plan.update([room + 1, 1, 1])
    eager = decode.plan(p.lengths, **p.heads)
    out, lse = eager.run(*p.tensors)
    eager.run(*p.tensors, out=out, lse=lse)
    eager.update([room + 1, 1, 1])
    with pytest.raises(ArgumentError, match="block_table has 96 columns of 16 keys: expected at least 97"):
        eager.run(*p.tensors, out=out, lse=lse)


def test_bad_device_updates(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    plan = decode.plan([1500] * 3, **p.heads, capturable=True)
    for bad, message in (
        ([1, 2, 3], "seq_lens is a list: expected a torch tensor"),
        (torch.zeros(3), r"seq_lens has dtype torch.float32: expected torch.int32 or torch.int64"),
        (torch.zeros(4, dtype=torch.int32), r"seq_lens has shape \(4,\) .*: expected \(3,\)"),
        (torch.zeros(3, 1, dtype=torch.int32), r"seq_lens has shape \(3, 1\) .*: expected \(3,\), contiguous"),
        (torch.zeros(6, dtype=torch.int32)[::2], r"strides \(2,\): expected \(3,\), contiguous"),
    ):
        with pytest.raises(ArgumentError, match=message):
            plan.update_on_device(bad)
    driver.capturing.add(0)
    with pytest.raises(CaptureError, match=r"paged_decode-sm_90a-plan is not loaded .*preload"):
        plan.update_on_device(torch.zeros(3, dtype=torch.int32))
    driver.capturing.clear()
    decode.preload(4)
    driver.capturing.add(0)
    plan.update_on_device(torch.zeros(3, dtype=torch.int32))
    assert len(driver.launches) == 1


def test_tables_hold_what_a_device_update_may_bring(make_decode: Make, p: Problem) -> None:
    """The bound of the first device update counts, even where the host has planned shorter lengths since."""
    decode, driver = make_decode()
    driver.on_launch = lambda launch: host_kernels.plan(launch) if host_kernels.is_plan(launch) else None
    plan = decode.plan([1500] * 3, **p.heads, capturable=True)
    plan.update_on_device(torch.tensor([1500, 99_999, -7]))
    assert plan.device_arrays[8 * plan.num_work :].tolist() == [1500, 1500, 0]
    plan.update([16, 16, 16])
    with pytest.raises(ArgumentError, match="block_table has 1 columns of 16 keys: expected at least 94"):
        plan.run(p.q, p.k, p.v, p.table[:, :1].contiguous())


def test_a_table_is_checked_against_the_lengths_on_the_device(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    driver.on_launch = lambda launch: host_kernels.plan(launch) if host_kernels.is_plan(launch) else None
    plan = decode.plan([1500] * 3, **p.heads, capturable=True)
    plan.update_on_device(torch.tensor(p.lengths))
    plan.run(*p.tensors, check_block_table=True)  # the garbage past each sequence's end is no error
    plan.update_on_device(torch.tensor([1500, 1500, 1500]))
    with pytest.raises(ArgumentError, match=r"block_table\[\d, \d+\] = -2147483648"):
        plan.run(*p.tensors, check_block_table=True)


@pytest.mark.parametrize("policy", ["thor", "balanced"])
def test_capturable_plans_keep_their_grid(make_decode: Make, p: Problem, policy: str) -> None:
    decode, driver = make_decode()
    plan = decode.plan([0, 0, 0], **p.heads, capturable=True, policy=policy)
    rng = np.random.default_rng(3)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, 4)
    table = torch.zeros(3, 4096, dtype=torch.int32)
    for _ in range(20):
        plan.update(rng.integers(0, 65536, 3))
        assert plan.splits.num_partials <= plan.partial_slots
        plan.run(p.q, p.k, p.v, table, out=out, lse=lse)
    assert {launch.grid for launch in driver.launches} == {(1, 2, 135)}
    assert len({launch.params for launch in driver.launches}) == 1
    assert plan.splits.max_splits > 1


def test_thor_plans_by_its_own_policy(make_decode: Make, p: Problem) -> None:
    decode, _ = make_decode(archs=("sm_110a",))
    plan = decode.plan([131072], num_q_heads=16, num_kv_heads=4)
    assert (plan.splits.chunk_tiles, plan.splits.max_splits) == (103, 10)


# -- capture, devices, threads, host time ----------------------------------------------------------------


def test_capture(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    driver.capturing.add(0)
    with pytest.raises(CaptureError, match="plan copies from the host"):
        decode.plan(p.lengths, **p.heads)
    driver.capturing.clear()
    plan = decode.plan(p.lengths, **p.heads)
    loads = len(driver.loads)
    driver.capturing.add(0)
    plan.run(*p.tensors)  # everything is loaded already
    assert len(driver.loads) == loads
    with pytest.raises(CaptureError, match="update copies from the host"):
        plan.update(p.lengths)


@pytest.mark.parametrize("pdl", [False, True])
def test_report_pdl_dependent_launches_only_where_asked_for(make_decode: Make, p: Problem, pdl: bool) -> None:
    """Kernels were launched as programmatic dependents whether or not they waited for what came before."""
    decode, driver = make_decode(pdl=pdl)
    decode.plan(p.lengths, **p.heads, force_splits=2).run(*p.tensors)
    assert [launch.config.pdl for launch in driver.launches] == [pdl]
    assert ("pdlon" in decode.keys(4)[0]) is pdl


def test_preload_loads_all_that_a_plan_needs(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    decode.preload(4)
    assert len(driver.loads) == 3
    decoding = "paged_decode-sm_90a-mma-d128-p16-kvfp8-t8"
    assert decode.keys(4) == (decoding, f"{decoding}-cps1", "paged_decode-sm_90a-plan")
    for options in ({}, {"max_splits": 1}):
        plan = decode.plan(p.lengths, **p.heads, **options)
        plan.run(*p.tensors)
        plan.update_on_device(torch.tensor(p.lengths, dtype=torch.int32))
    assert len(driver.loads) == 3


def test_each_device_gets_its_own_kernel(make_decode: Make, p: Problem) -> None:
    first, driver = make_decode(archs=("sm_90a", "sm_110a"))
    second = PagedDecode(first.library, head_dim=128, page_size=16, kv_format="fp8", device=1)
    for decode in (first, second, first):
        decode.plan(p.lengths, **p.heads, max_splits=1).run(*p.tensors)
    assert [launch.device for launch in driver.launches] == [0, 1, 0]
    assert second.plan(p.lengths, **p.heads).keys[0] == "paged_decode-sm_110a-tcgen05-d128-p16-kvfp8"


def test_streams_reach_the_launch(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    plan, driver = made

    class Stream:
        cuda_stream = 77

    plan.run(*p.tensors, stream=55)
    plan.run(*p.tensors, stream=Stream())
    plan.run(*p.tensors)
    assert [launch.stream for launch in driver.launches] == [55, 77, 0]


def test_threads_with_a_plan_each(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            plan = decode.plan(p.lengths, **p.heads)
            out, lse = plan.run(*p.tensors)
            for _ in range(20):
                plan.run(*p.tensors, out=out, lse=lse)
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(driver.launches) == 4 * 21
    assert len(driver.loads) == 1


def test_kept_launches_are_bounded(made: tuple[Plan, FakeDriver], p: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_CALLS", 3)
    plan, _ = made
    held = []
    for _ in range(8):
        held.append(p.k.clone())
        plan.run(p.q, held[-1], p.v, p.table)
    assert len(plan._calls) == 3


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of threads, which the child leaves alone
def test_a_child_of_a_fork_refuses_a_run_that_its_parent_repeated(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    """A repeated run looks at nothing else that would tell, and CUDA does not survive a fork."""
    plan, driver = made
    out, lse = plan.run(*p.tensors)
    child = os.fork()
    if child == 0:
        code = 99
        try:
            plan.run(*p.tensors, out=out, lse=lse)
        except ForkError:
            code = len(driver.launches)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    plan.run(*p.tensors, out=out, lse=lse)  # the parent goes on
    assert len(driver.launches) == 2


def test_a_plan_holds_no_tensor_of_its_caller(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    plan, _ = made
    q = p.q.clone()
    out, lse = plan.run(q, p.k, p.v, p.table)
    gone = weakref.ref(q), weakref.ref(out), weakref.ref(lse)
    del q, out, lse
    assert [ref() for ref in gone] == [None, None, None]


def test_a_plan_leaves_no_cycle(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    """Plans come and go with every step; their memory must not wait for the garbage collector."""
    decode = made[0].decode
    gc.collect()
    gc.disable()
    try:
        plan = decode.plan(p.lengths, **p.heads)
        out, lse = plan.run(*p.tensors)
        plan.run(*p.tensors, out=out, lse=lse)
        plan.run(p.q.clone(), p.k[:], *p.tensors[2:])
        alive = weakref.ref(plan), weakref.ref(plan._upload.tensor)
        assert len(plan._recent) == 1
        del plan
        assert [ref() for ref in alive] == [None, None]
        gc.set_debug(gc.DEBUG_SAVEALL)  # threads of other tests may leave something just now
        gc.collect()
        modules = [str(getattr(x, "__module__", None) or type(x).__module__) for x in gc.garbage]
        assert not [name for name in modules if name.startswith(("cubinery", "torch"))]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_host_time(made: tuple[Plan, FakeDriver], p: Problem) -> None:
    """Loose bounds for shared test machines; benchmarks hold the real ones."""
    plan, driver = made

    class Prepared:
        def __init__(self, layout: list[tuple[int, int]]) -> None:
            self.params = memoryview(bytearray(max(at + size for at, size in layout)))

        def set_grid(self, grid: tuple[int, int, int]) -> None: ...

        def launch(self, stream: int) -> None: ...

    driver.prepare = lambda _kernel, _config, layout: Prepared(layout)  # type: ignore[method-assign, assignment]
    out, lse = plan.run(*p.tensors)

    def best(statement: Callable[[], object]) -> float:
        return min(timeit.repeat(statement, number=50, repeat=20)) / 50

    unchanged = best(lambda: plan.run(*p.tensors, out=out, lse=lse))
    assert unchanged < 50e-6
    assert unchanged < 0.5 * best(lambda: plan.run(*p.tensors))  # the checks are skipped
