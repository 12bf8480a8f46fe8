"""The public call against the reference, through kernels that run on the host from recorded launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from host_kernels import HostKernels, is_plan

from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS, Layout
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

Make = Callable[..., tuple[PagedDecode, Any]]


def make_problem(**options: Any) -> Problem:
    return Problem(**({"lengths": [300, 17, 1500], "rng": np.random.default_rng(2), "torch": torch} | options))


def host(driver: Any, plan: Plan) -> None:
    driver.on_launch = HostKernels(plan.num_seqs, plan.config.row_tile, plan.decode.q_len, plan.decode.causal)


def check(p: Problem, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
    expected = paged_attention(p.q, p.k, p.v, p.table, p.lengths, q_len=p.q_len, **options)
    found = deviation(out.reshape(p.q.shape).double().numpy(), lse.numpy(), *expected)
    assert found.within(PAGED_DECODE["mma"]), str(found)


@pytest.mark.parametrize("force_splits", [0, 1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_splits(make_decode: Make, layout: Layout, force_splits: int) -> None:
    p = make_problem(layout=layout)
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads, force_splits=force_splits)
    host(driver, plan)
    out, lse = plan.run(*p.tensors)
    check(p, out, lse)
    assert len(driver.launches) == 1
    assert out.shape == p.q.shape
    assert out.dtype == torch.bfloat16
    assert lse.shape == (3, 2, 4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("four_axes", [True, False])
def test_several_tokens(make_decode: Make, causal: bool, four_axes: bool) -> None:
    """h_q 40, q_len 4: 40 packed rows a KV head; lengths below q_len leave rows empty (cases 9, 10, 13)."""
    p = make_problem(lengths=[2, 0, 257], q_len=4, h_q=20)
    decode, driver = make_decode((10,), q_len=4, causal=causal)
    plan = decode.plan(p.lengths, **p.heads, force_splits=3)
    host(driver, plan)
    q = p.q.reshape(3, 4, 20, 128) if four_axes else p.q
    out, lse = plan.run(q, p.k, p.v, p.table)
    assert out.shape == q.shape
    check(p, out, lse, causal=causal)
    assert not out.reshape(3, -1)[1].any()
    assert torch.isinf(lse[1]).all()
    if causal:
        assert torch.isinf(lse.reshape(3, 2, 4, 10)[0, :, :2]).all()


def test_row_tiles_beyond_one_cta(make_decode: Make) -> None:
    p = make_problem(lengths=[40], q_len=16, h_q=32)
    decode, driver = make_decode((16,), q_len=16)
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    check(p, *plan.run(*p.tensors))
    assert driver.launches[0].grid == (2, 2, plan.num_work)


def test_bf16_cache_and_wider_heads(make_decode: Make) -> None:
    p = make_problem(kv_format="bf16", d=256, page_size=64)
    decode, driver = make_decode(kv_format="bf16", head_dim=256, page_size=64)
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    check(p, *plan.run(*p.tensors))


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 2), None])
def test_descales_in_every_granularity(make_decode: Make, shape: tuple[int, ...] | None) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    scales: dict[str, Any] = {
        name: 0.5 + i if shape is None else torch.from_numpy(p.rng.uniform(0.5, 2, shape).astype(np.float32))
        for i, name in enumerate(("q_descale", "k_descale", "v_descale"))
    }
    options = {"softmax_scale": 0.1, "out_scale": -1.5}
    check(p, *plan.run(*p.tensors, **scales, **options), **scales, **options)


def test_descale_strides_are_followed(make_decode: Make) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    wide = torch.rand(3, 2, 4) + 0.5
    check(p, *plan.run(*p.tensors, k_descale=wide[..., 1]), k_descale=wide[..., 1])
    check(p, *plan.run(*p.tensors, v_descale=wide[0, :, 2]), v_descale=wide[0, :, 2])


def test_padded_q_and_out_rows(make_decode: Make) -> None:
    """Sequences and heads further apart than needed; what lies between is untouched (case 24)."""
    p = make_problem(q_len=2)
    decode, driver = make_decode(q_len=2)
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    wide_q = torch.full((3, 2, 9, 136), float("nan"), dtype=torch.bfloat16)
    wide_o = torch.full((3, 2, 10, 144), 7.0, dtype=torch.bfloat16)
    q, out = wide_q[:, :, :8, :128], wide_o[:, :, :8, :128]
    q.copy_(p.q.reshape(3, 2, 8, 128))
    got, lse = plan.run(q, p.k, p.v, p.table, out=out)
    assert got is out
    check(p, out, lse)
    out.fill_(7.0)
    assert bool((wide_o == 7).all())


def test_garbage_in_outputs_and_workspace_does_not_matter(make_decode: Make) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    assert plan.splits.num_partials > 0
    guard = 64
    memory = torch.full((plan.workspace_bytes() + guard,), 0xFF, dtype=torch.uint8)
    out = torch.full(p.q.shape, float("nan"), dtype=torch.bfloat16)
    lse = torch.full((3, 2, 4), float("nan"))
    got = plan.run(*p.tensors, out=out, lse=lse, workspace=memory[: plan.workspace_bytes()])
    assert got[0] is out
    assert got[1] is lse
    check(p, out, lse)
    assert bool((memory[-guard:] == 0xFF).all())


def test_uint8_codes_serve_as_fp8(make_decode: Make) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    check(p, *plan.run(p.q, p.k.view(torch.uint8), p.v.view(torch.uint8), p.table))


def test_updates_rewrite_the_same_memory(make_decode: Make) -> None:
    """Case 38: the recorded launch stays valid for new lengths in the same grid."""
    p = make_problem(lengths=[300, 17, 1500])
    decode, driver = make_decode()
    plan = decode.plan([1, 1, 1], **p.heads, capturable=True)
    host(driver, plan)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, 4)
    plan.run(*p.tensors, out=out, lse=lse)
    captured = list(driver.launches)
    assert len(captured) == 1
    for lengths in ([300, 17, 1500], [0, 0, 0], [256, 3, 1], [300, 17, 1500]):
        plan.update(lengths)
        for launch in captured:  # what a graph replays
            driver.on_launch(launch)
        p.lengths = lengths
        check(p, out, lse)
    assert len(driver.launches) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_updates_on_the_device_rewrite_the_same_memory(make_decode: Make, dtype: torch.dtype) -> None:
    """Lengths that the host never sees: what a graph replays plans for what they hold at that moment."""
    p = make_problem(lengths=[300, 17, 1500])
    decode, driver = make_decode()
    plan = decode.plan([1500, 1500, 1500], **p.heads, capturable=True)
    host(driver, plan)
    seq_lens = torch.zeros(3, dtype=dtype)
    plan.update_on_device(seq_lens)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, 4)
    plan.run(*p.tensors, out=out, lse=lse)
    planning, *decoding = list(driver.launches)
    assert is_plan(planning)
    for lengths in ([300, 17, 1500], [0, 0, 0], [256, 3, 1], [300, 17, 1500]):
        seq_lens.copy_(torch.tensor(lengths))
        for launch in (planning, *decoding):
            driver.on_launch(launch)
        p.lengths = lengths
        check(p, out, lse)
    plan.update([300, 17, 1500])  # and the host may plan again
    for launch in decoding:
        driver.on_launch(launch)
    check(p, out, lse)


def test_a_device_update_of_an_unsplit_plan(make_decode: Make) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan([1500] * 3, **p.heads, max_splits=1)
    host(driver, plan)
    plan.update_on_device(torch.tensor(p.lengths))
    check(p, *plan.run(*p.tensors))
    assert [is_plan(launch) for launch in driver.launches] == [True, False]


def test_the_fast_path_launches_the_same(make_decode: Make) -> None:
    p = make_problem()
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, 4)
    for _ in range(3):
        out.fill_(0)
        plan.run(*p.tensors, out=out, lse=lse)
        check(p, out, lse)
    assert len({launch.params for launch in driver.launches}) == 1
    assert len(driver.encoded) == 2


def test_one_plan_serves_every_layer(make_decode: Make) -> None:
    layers = [make_problem(rng=np.random.default_rng(seed)) for seed in range(4)]
    decode, driver = make_decode()
    plan = decode.plan(layers[0].lengths, **layers[0].heads)
    host(driver, plan)
    out, lse = torch.empty_like(layers[0].q), torch.empty(3, 2, 4)
    for _ in range(2):
        for p in layers:
            plan.run(*p.tensors, out=out, lse=lse)
            check(p, out, lse)
    assert len(driver.encoded) == 2 * len(layers)


def test_exchanged_tensors_are_noticed(make_decode: Make) -> None:
    """Same caches with other Q, O, LSE, table, scales, workspace: each must reach the launch."""
    p, other = make_problem(), make_problem(rng=np.random.default_rng(9))
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    host(driver, plan)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, 4)
    plan.run(*p.tensors, out=out, lse=lse)
    out2, lse2 = torch.zeros_like(p.q), torch.zeros(3, 2, 4)
    plan.run(other.q, p.k, p.v, p.table, out=out2, lse=lse2)
    p.q = other.q
    check(p, out2, lse2)
    check(p, *plan.run(*p.tensors, out=out, lse=lse, softmax_scale=0.5), softmax_scale=0.5)
    check(p, *plan.run(*p.tensors, out=out, lse=lse, v_descale=2.0), v_descale=2.0)
    check(p, *plan.run(*p.tensors, out=out, lse=lse, v_descale=3.0), v_descale=3.0)
    check(p, *plan.run(*p.tensors, out=out, lse=lse))
    p.table = p.table.clone()
    p.table[0, :18] = p.table[0, :18].flip(0)
    check(p, *plan.run(*p.tensors, out=out, lse=lse))
    p.table.set_(p.table.clone())  # the same object over other memory
    p.table[0, :18] = p.table[0, :18].flip(0)
    check(p, *plan.run(*p.tensors, out=out, lse=lse))
    own = driver.launches[-1].values
    workspace = torch.empty(plan.workspace_bytes(), dtype=torch.uint8)
    plan.run(*p.tensors, out=out, lse=lse, workspace=workspace)
    theirs = driver.launches[-1].values
    assert theirs["o_partial"] == workspace.data_ptr()
    assert theirs["counters"] != own["counters"]
    del workspace
    plan.run(*p.tensors, out=out, lse=lse)
    check(p, out, lse)
    assert driver.launches[-1].values["counters"] == own["counters"]


@pytest.mark.parametrize("q_len", [1, 16])
def test_whichever_chunk_ends_last_merges_and_leaves_zero_counters(make_decode: Make, q_len: int) -> None:
    """One launch a run, however a sequence is split; its counters serve the next run, and other lengths."""
    p = make_problem(lengths=[300, 17, 900], q_len=q_len, h_q=32)
    decode, driver = make_decode((16,), q_len=q_len)
    plan = decode.plan(p.lengths, **p.heads, force_splits=3, pad_to=12)
    host(driver, plan)
    workspace = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8)
    out, lse = torch.empty_like(p.q), torch.empty(3, 2, q_len * 16)
    for lengths in (p.lengths, p.lengths, [128, 0, 700]):
        plan.update(lengths)
        p.lengths = lengths
        for driver.on_launch.backwards in (False, True):
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            plan.run(*p.tensors, out=out, lse=lse, workspace=workspace)
            check(p, out, lse)
            assert not any(counters.any() for counters in plan._partials.counters.values())
    assert len(driver.launches) == 6
    assert len(plan._partials.counters) == 1
