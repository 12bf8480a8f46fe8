"""The family's written edge cases, by number. Unless a case says otherwise: 24 query heads on 4 KV heads of 256."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu.problems import Case, Guarded, same_bits
from gpu.running import Gpu, check, expect, run
from gpu.stored import E4M3_NAN

from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS, pack_q, unpack_lse, unpack_o

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
PAGES = pytest.mark.parametrize("page_size", [16, 32, 64, 128])


def edge(gpu: Gpu, lengths: list[int], **fields: Any) -> Case:
    return gpu.case(lengths, **({"h_q": 24, "h_k": 4, "d": 256, "page_size": 128} | fields))


@FORMATS
def test_edge_01_one_key_returns_its_value(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [1, 1, 1], kv_format=kv_format)
    out, lse = gpu.solve(case, run_options={"v_descale": 0.5, "out_scale": 4.0})
    for seq in range(3):
        value = case.read("v", seq, [0])[0] * 2.0  # (h_k, d), exact in bf16
        assert torch.equal(case.rows_of(out)[seq, :, 0].float(), value[:, None].expand(4, 6, 256))
        score = torch.einsum(
            "hgd,hd->hg", case.q[seq].reshape(4, 6, 256).double(), case.read("k", seq, [0])[0].double()
        )
        assert (lse[seq].double() - score / 16).abs().max() < 1e-4


@pytest.mark.parametrize("force_splits", [1, 3])
@pytest.mark.parametrize("page_size", [16, 128])
@FORMATS
def test_edge_02_an_empty_sequence_disturbs_nobody(gpu: Gpu, kv_format: str, page_size: int, force_splits: int) -> None:
    case = edge(gpu, [300, 0, 513], kv_format=kv_format, page_size=page_size)
    out, lse = gpu.solve(case, force_splits=force_splits)
    assert not out[1].any()
    assert bool((lse[1] == -math.inf).all())
    # The same sequences with a neighbour that is not empty.
    other = edge(gpu, [300, 1, 513], kv_format=kv_format, page_size=page_size)
    for seq in (0, 2):
        for name in "kv":
            other.write(name, seq, range(case.lengths[seq]), case.read(name, seq, range(case.lengths[seq])))
    other.q.copy_(case.q)
    other_out, other_lse = gpu.solve(other, force_splits=force_splits)
    for seq in (0, 2):
        assert same_bits(out[seq], other_out[seq])
        assert same_bits(lse[seq], other_lse[seq])


@FORMATS
def test_edge_03_zero_keys_average_the_values(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [300, 300], kv_format=kv_format)
    case.fill("k", 0.0)
    out, lse = gpu.solve(case, run_options={"v_descale": 1.5})
    assert (lse.double() - math.log(300)).abs().max() < 1e-5
    mean = case.read("v", 0, range(300)).double().mean(0) * 1.5
    assert (case.rows_of(out)[0, :, 0].double() - mean[:, None]).abs().max() < 2e-3


@FORMATS
@PAGES
def test_edge_04_lengths_around_a_tile(gpu: Gpu, kv_format: str, page_size: int) -> None:
    case = edge(gpu, [127, 128, 129], kv_format=kv_format, page_size=page_size)
    plan = gpu.plan(case, force_splits=2)
    assert plan.splits.splits[:, 0].tolist() == [1, 1, 2]
    check(plan, case, *run(plan, case))


@FORMATS
def test_edge_05_garbage_in_block_table_padding(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [17], kv_format=kv_format, page_size=16, spare_blocks=8)
    outputs = []
    for garbage in (-1, 2**31 - 1, -(2**31), 0):
        case.table[:, 2:] = garbage
        outputs.append(gpu.solve(case))
    assert all(same_bits(o, outputs[0][0]) and same_bits(lse, outputs[0][1]) for o, lse in outputs)


@FORMATS
@PAGES
@pytest.mark.parametrize("d", [128, 256])
def test_edge_06_unreferenced_pages_hold_nan(gpu: Gpu, kv_format: str, page_size: int, d: int) -> None:
    case = edge(gpu, [300, 17, 1025, 128], kv_format=kv_format, page_size=page_size, d=d)
    unused = ~case.live.any(1)
    assert int(unused.sum()) == 3
    assert bool(case.kernel_view(case.raw["k"][unused]).float().isnan().all())
    out, lse = gpu.solve(case)
    assert not out.isnan().any()
    assert not lse.isnan().any()


@FORMATS
@PAGES
@pytest.mark.parametrize("length", [130, 1, 127, 255, 63])
def test_edge_07_nan_past_the_end_of_the_last_page(gpu: Gpu, kv_format: str, page_size: int, length: int) -> None:
    case = edge(gpu, [length], kv_format=kv_format, page_size=page_size)
    poisoned = gpu.solve(case)  # NaN in rows of K and of V past the end
    for name in "kv":
        case.raw[name][~case.live] = case.encode(torch.zeros((), device=gpu.device))
    clean = gpu.solve(case)
    case.raw["k"][~case.live] = E4M3_NAN if kv_format == "fp8" else math.nan
    only_k = gpu.solve(case)
    for o, lse in (clean, only_k):
        assert same_bits(o, poisoned[0])
        assert same_bits(lse, poisoned[1])


@FORMATS
def test_edge_08_causal_tokens_see_one_key_more_each(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [4], kv_format=kv_format, q_len=4)
    case.fill("k", 0.0)
    out, lse = gpu.solve(case, {"row_tile": 32})
    values = case.read("v", 0, range(4))
    rows = case.rows_of(out)[0].float()  # (h_k, q_len, group, d)
    assert torch.equal(rows[:, 0], values[0][:, None].expand(4, 6, 256))
    assert torch.allclose(rows[:, 3], values.mean(0)[:, None].expand(4, 6, 256), atol=2e-2, rtol=1e-2)
    seen = torch.tensor([1.0, 2, 3, 4], device=gpu.device).log()
    assert torch.allclose(lse.reshape(4, 4, 6), seen[:, None].expand(4, 4, 6), atol=1e-5)


@FORMATS
@pytest.mark.parametrize("force_splits", [0, 3])
def test_edge_09_tokens_that_see_nothing(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    case = edge(gpu, [2, 300], kv_format=kv_format, q_len=4)
    out, lse = gpu.solve(case, {"row_tile": 32}, force_splits=force_splits)
    rows, sums = case.rows_of(out)[0], lse[0].reshape(4, 4, 6)
    assert not rows[:, :2].any()
    assert bool((sums[:, :2] == -math.inf).all())
    assert torch.equal(rows[:, 2].float(), case.read("v", 0, [0])[0][:, None].expand(4, 6, 256))
    assert bool(sums[:, 2:].isfinite().all())


@FORMATS
def test_edge_10_a_last_chunk_that_most_tokens_cannot_see(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [257], kv_format=kv_format, q_len=4)
    plan = gpu.plan(case, {"row_tile": 32}, force_splits=3)
    assert sorted(plan.splits.work[:, 1:3].tolist()) == [[0, 1], [1, 2], [2, 3]]
    check(plan, case, *run(plan, case))


@FORMATS
@pytest.mark.parametrize("force_splits", [1, 3])
def test_edge_11_non_causal_tokens_are_equal(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    case = edge(gpu, [257], kv_format=kv_format, q_len=4, causal=False)
    case.q[1:] = case.q[0]
    out, lse = gpu.solve(case, force_splits=force_splits)
    rows, sums = case.rows_of(out)[0], lse[0].reshape(4, 4, 6)
    for token in (1, 2, 3):
        assert same_bits(rows[:, token], rows[:, 0])
        assert same_bits(sums[:, token], sums[:, 0])


def test_edge_12_packed_row_order(gpu: Gpu) -> None:
    case = edge(gpu, [200, 131], q_len=2)
    packed = pack_q(case.q, q_len=2, num_kv_heads=4)
    assert packed.shape == (2, 4, 12, 256)
    assert torch.equal(unpack_o(packed, q_len=2), case.q)
    assert torch.equal(packed[1, 3, 1 * 6 + 5], case.q[1 * 2 + 1, 3 * 6 + 5])
    one = edge(gpu, [200, 131])
    assert pack_q(one.q, q_len=1, num_kv_heads=4).data_ptr() == one.q.data_ptr()
    # The kernel's own order: a row whose query is zero has LSE ln(keys that it sees).
    case.q[3, 3 * 6 + 5] = 0
    _, lse = gpu.solve(case)
    assert abs(float(lse[1, 3, 11]) - math.log(131)) < 1e-5
    assert abs(float(unpack_lse(lse, q_len=2)[3, 23]) - math.log(131)) < 1e-5


@FORMATS
@pytest.mark.parametrize("force_splits", [1, 3])
def test_edge_13_rows_beyond_one_query_tile(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    """40 packed rows in two tiles of 32; guard bytes around O, LSE and workspace are checked by `run`."""
    case = edge(gpu, [300, 513], kv_format=kv_format, h_q=40, q_len=4)
    plan = gpu.plan(case, {"row_tile": 32}, force_splits=force_splits)
    assert plan.shape.n_q == 40
    check(plan, case, *run(plan, case))


@FORMATS
def test_edge_14_a_very_long_sequence_however_it_is_split(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [131072], kv_format=kv_format)
    expected = expect(case)
    for force_splits in (0, 1, 16, 256):
        plan = gpu.plan(case, force_splits=force_splits)
        check(plan, case, *run(plan, case), expected)
        assert force_splits in (0, plan.splits.max_splits)
    gpu.solve(case, expected=expected, policy="thor")


@FORMATS
def test_edge_18_an_empty_sequence_gets_one_tile(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [0, 300], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=3)
    assert plan.splits.splits[:, 0].tolist() == [1, 3]
    assert [0, 0, 1] in plan.splits.work[:, :3].tolist()
    check(plan, case, *run(plan, case))


@FORMATS
def test_edge_19_padding_items_change_nothing(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [4096, 128], kv_format=kv_format)
    options: dict[str, Any] = {"policy": "thor", "max_splits": 8}
    plain = gpu.plan(case, **options)
    assert plain.splits.splits[:, 0].tolist() == [8, 1]
    padded = gpu.plan(case, pad_to=16, **options)
    assert padded.num_work == 16
    assert not padded.splits.work[9:].any()
    first, second = run(plain, case), run(padded, case)
    check(plain, case, *first)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1], second[1])
    with pytest.raises(PlanError, match="pad_to = 8: the plan has 9 work items"):
        gpu.plan(case, pad_to=8, **options)


@FORMATS
def test_edge_20_a_workspace_of_nan(gpu: Gpu, kv_format: str) -> None:
    case = edge(gpu, [1024, 100, 2500, 0, 128], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=5)
    counts = plan.splits.splits[:, 0].tolist()
    assert min(counts) == 1
    assert max(counts) == 5
    out, lse = run(plan, case)  # fills it with NaN
    assert not out.isnan().any()
    assert not lse.isnan().any()
    check(plan, case, out, lse)


def _zero(plan: Any) -> bool:
    """Whether all counters of a plan are zero, and it has some. Waits."""
    return len(plan._partials.counters) > 0 and not any(
        bool(counters.any()) for counters in plan._partials.counters.values()
    )


@FORMATS
@pytest.mark.parametrize("q_len", [1, 4])
def test_merging_gives_the_same_bits_however_chunks_end(gpu: Gpu, kv_format: str, q_len: int) -> None:
    """A thousand runs back to back, on one workspace: which CTA merges must not show, and counters stay zero."""
    case = edge(gpu, [9000, 0, 1500, 77, 4096], kv_format=kv_format, q_len=q_len)
    plan = gpu.plan(case, force_splits=23)
    assert len(set(plan.splits.splits[:, 0].tolist())) > 3
    out, lse = run(plan, case)  # fills its workspace with NaN
    check(plan, case, out, lse)
    assert _zero(plan)
    workspace = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=gpu.device)
    outs, sums = (torch.empty((20, *x.shape), dtype=x.dtype, device=gpu.device) for x in (out, lse))
    for _ in range(50):
        outs.fill_(float("nan"))
        sums.fill_(float("nan"))
        for i in range(20):
            plan.run(*case.tensors, out=outs[i], lse=sums[i], workspace=workspace)
        assert same_bits(outs, out.expand_as(outs))
        assert same_bits(sums, lse.expand_as(sums))
    assert len(plan._partials.counters) == 2
    assert _zero(plan)


@FORMATS
def test_counters_are_zero_whatever_plan_comes_next(gpu: Gpu, kv_format: str) -> None:
    """An update moves sequences to other counters; each must find them as the last plan did."""
    case = edge(gpu, [6000, 6000, 6000], kv_format=kv_format)
    plan = gpu.plan(case, {"cluster": 1}, capturable=True)
    workspace = torch.full((plan.workspace_bytes(),), 0xFF, dtype=torch.uint8, device=gpu.device)
    for lengths in ([6000, 6000, 6000], [6000, 1, 1], [1, 6000, 0], [300, 5000, 700], [1, 1, 1], [6000, 6000, 6000]):
        case.lengths = lengths
        plan.update(lengths)
        out, lse = plan.run(*case.tensors, workspace=workspace)
        check(plan, case, out, lse)
        assert _zero(plan)
    assert len(plan._partials.counters) == 1


@FORMATS
def test_edge_21_every_plan_launches_one_kernel(gpu: Gpu, kv_format: str, launches: list[str]) -> None:
    case = edge(gpu, [1024, 300], kv_format=kv_format)
    results = {}
    for name, options in {
        "max_splits": {"max_splits": 1}, "forced": {"force_splits": 1}, "padded": {"force_splits": 1, "pad_to": 4},
        "split": {"force_splits": 4},
    }.items():  # fmt: skip
        plan = gpu.plan(case, **options)
        launches.clear()
        results[name] = run(plan, case)
        check(plan, case, *results[name])
        assert len(launches) == 1
    assert gpu.plan(case, max_splits=1).workspace_bytes() == 0
    for name in ("forced", "padded"):  # a plan that splits rounds elsewhere
        assert same_bits(results[name][0], results["max_splits"][0])
        assert same_bits(results[name][1], results["max_splits"][1])


@FORMATS
@pytest.mark.parametrize("force_splits", [1, 3])
def test_edge_22_descales_in_every_granularity(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    case = edge(gpu, [300, 513], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=force_splits)
    scales = {"q_descale": 0.75, "k_descale": 1.25, "v_descale": 0.375}
    results = []
    for shape in ((1,), (4,), (2, 4)):
        options = {name: torch.full(shape, value, device=gpu.device) for name, value in scales.items()}
        results.append(run(plan, case, **options))
        check(plan, case, *results[-1], **options)
    for other in results[1:]:
        assert same_bits(other[0], results[0][0])
        assert same_bits(other[1], results[0][1])
    doubled = run(
        plan, case, **{n: torch.full((1,), s, device=gpu.device) for n, s in (scales | {"v_descale": 0.75}).items()}
    )
    assert same_bits(doubled[0].float(), results[0][0].float() * 2)
    assert same_bits(doubled[1], results[0][1])
    one = {name: torch.full((1,), value, device=gpu.device) for name, value in scales.items()}
    by_k = run(plan, case, **(one | {"k_descale": torch.full((1,), 2.5, device=gpu.device)}))
    by_scale = run(plan, case, **one, softmax_scale=2 * case.d**-0.5)
    assert same_bits(by_k[0], by_scale[0])
    assert same_bits(by_k[1], by_scale[1])
    check(plan, case, *run(plan, case, **scales), **scales)  # as numbers
    varied = {name: torch.rand(2, 4, device=gpu.device) * 1.5 + 0.5 for name in scales}
    check(plan, case, *run(plan, case, **varied), **varied)
    wide = torch.rand(2, 4, 3, device=gpu.device) + 0.5  # strides other than the packed ones
    check(plan, case, *run(plan, case, k_descale=wide[..., 1]), k_descale=wide[..., 1])


@FORMATS
@PAGES
def test_edge_23_layouts_are_bit_identical(gpu: Gpu, kv_format: str, page_size: int) -> None:
    results = []
    for layout in LAYOUTS:
        case = edge(gpu, [300, 17, 129], kv_format=kv_format, page_size=page_size, layout=layout)
        results.append(gpu.solve(case, force_splits=2))
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@FORMATS
@pytest.mark.parametrize("force_splits", [1, 3])
def test_edge_24_strided_q_and_o(gpu: Gpu, kv_format: str, force_splits: int) -> None:
    case = edge(gpu, [300, 513], kv_format=kv_format, q_len=2)
    plan = gpu.plan(case, force_splits=force_splits)
    expected, lse = run(plan, case)
    check(plan, case, expected, lse)
    wide_q = Guarded((2, 2, 27, 264), torch.bfloat16, gpu.device).tensor
    wide_o = Guarded((2, 2, 25, 272), torch.bfloat16, gpu.device)
    q, o = wide_q[:, :, 1:25, :256], wide_o.tensor[:, :, :24, 8:264]
    q.copy_(case.q.reshape(2, 2, 24, 256))
    found, _ = plan.run(q, case.k, case.v, case.table, out=o)
    assert same_bits(found.reshape(expected.shape), expected)
    o.view(torch.int16).fill_(-1)
    assert bool((wide_o.tensor.view(torch.int16) == -1).all()), "padding of O was written"
    wide_o.check("out")


@FORMATS
def test_edge_37_dependent_launches_share_a_workspace(gpu: Gpu, kv_format: str) -> None:
    """Layer after layer on one workspace, each launch allowed to start before its predecessor has ended."""
    cases = [gpu.case([300, 2000, 17, 700], kv_format=kv_format, seed=seed) for seed in range(6)]
    plain, dependent = (gpu.plan(cases[0], {"pdl": p}, force_splits=4) for p in (False, True))
    assert dependent.keys != plain.keys
    expected = [run(plain, case) for case in cases]
    workspace = Guarded((dependent.workspace_bytes(),), torch.uint8, gpu.device).tensor
    outs = [torch.empty_like(case.q) for case in cases]
    sums = [torch.empty(dependent.shape.lse, device=gpu.device) for _ in cases]
    for _ in range(20):
        for case, out, lse in zip(cases, outs, sums, strict=True):
            dependent.run(*case.tensors, out=out, lse=lse, workspace=workspace)
    gpu.synchronize()
    for case, out, lse, (o_expected, lse_expected) in zip(cases, outs, sums, expected, strict=True):
        check(plain, case, o_expected, lse_expected)
        assert same_bits(out, o_expected)
        assert same_bits(lse, lse_expected)
