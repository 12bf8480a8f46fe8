"""Accuracy pitfalls that kernels of this kind have been seen with."""

from __future__ import annotations

import math

import pytest
import torch
from gpu.running import Gpu, check, run

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
DIMS = pytest.mark.parametrize("d", [128, 256])


@FORMATS
@DIMS
@pytest.mark.parametrize("peak", [0, 1000, 2047])
@pytest.mark.parametrize("force_splits", [1, 5])
def test_a_tail_of_small_probabilities_counts(gpu: Gpu, kv_format: str, d: int, peak: int, force_splits: int) -> None:
    """One logit 0 and 2047 at -7: an unscaled 8-bit P loses the tail, and LSE does not show it."""
    case = gpu.case([2048], kv_format=kv_format, d=d)
    case.q.zero_()
    case.q[..., 0] = 1.0
    key = torch.zeros(d)
    key[0] = -7.0
    case.write("k", 0, range(2048), key)
    case.write("k", 0, [peak], 0.0)
    tail = 2047 * math.exp(-7.0)
    for value_at_peak, expected in ((1.0, 1.0), (0.0, tail / (1 + tail)), (2.0, (2 + tail) / (1 + tail))):
        case.fill("v", 1.0)
        case.write("v", 0, [peak], value_at_peak)
        plan = gpu.plan(case, force_splits=force_splits)
        out, lse = run(plan, case, softmax_scale=1.0)
        check(plan, case, out, lse, softmax_scale=1.0)
        assert (out.double() - expected).abs().max() < 4e-3 * expected
        assert (lse.double() - math.log(1 + tail)).abs().max() < 1e-4


@FORMATS
@DIMS
def test_rising_and_constant_scores(gpu: Gpu, kv_format: str, d: int) -> None:
    """A new maximum in every tile rescales each time; constant scores never do."""
    case = gpu.case([128 * 20 + 9], kv_format=kv_format, d=d)
    length = case.lengths[0]
    case.q.zero_()
    case.q[..., 0] = 1.0
    for step in (1.0, -1.0, 0.0):
        keys = torch.zeros(length, 1, d)
        keys[:, 0, 0] = torch.arange(length) // 128 * step * 4
        case.write("k", 0, range(length), keys)
        for force_splits in (1, 4):
            gpu.solve(case, run_options={"softmax_scale": 0.25}, force_splits=force_splits)


@FORMATS
@DIMS
@pytest.mark.parametrize("std", [1e-3, 0.1, 30.0])
def test_scores_of_any_size(gpu: Gpu, kv_format: str, d: int, std: float) -> None:
    """Queries from tiny to large; fp8 kernels scale them by powers of two, which must leave no trace."""
    case = gpu.case([1000, 129, 3], kv_format=kv_format, d=d)
    case.q.mul_(std)
    case.q[0].mul_(2.0**-60)
    gpu.solve(case)


@FORMATS
def test_one_large_element_among_small_ones_in_q(gpu: Gpu, kv_format: str) -> None:
    """Elements of one query row that differ by 2^12 all count."""
    case = gpu.case([700, 128], kv_format=kv_format)
    case.q.mul_(2.0**-6)
    case.q[..., 5] = 64.0
    raw = case.raw["k"]
    raw[..., 5] = torch.where(case.live[:, :, None], case.encode(torch.zeros((), device=gpu.device)), raw[..., 5])
    # That column of K is zero, so scores come from the small elements alone.
    gpu.solve(case, run_options={"softmax_scale": 4.0})


@FORMATS
@DIMS
def test_zero_queries_and_keys(gpu: Gpu, kv_format: str, d: int) -> None:
    """Random data hides mistakes of the mask: here every key that leaks in weighs as much as a right one."""
    case = gpu.case([1, 15, 16, 17, 127, 129, 300, 0], kv_format=kv_format, d=d)
    case.q.zero_()
    gpu.solve(case)
    gpu.solve(case, force_splits=3)
    case.q.normal_()
    case.fill("k", 0.0)
    gpu.solve(case)


@FORMATS
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("pad_to", [0, 9])
def test_all_lengths_zero(gpu: Gpu, kv_format: str, page_size: int, pad_to: int) -> None:
    """No page is looked up: the cache is all NaN and the table all garbage."""
    case = gpu.case([0, 0, 0], kv_format=kv_format, page_size=page_size)
    assert not case.live.any()
    out, lse = gpu.solve(case, pad_to=pad_to)
    assert not out.any()
    assert bool((lse == -math.inf).all())


@FORMATS
def test_single_rows_with_odd_strides(gpu: Gpu, kv_format: str) -> None:
    """DLPack gives axes of one element a stride of 1, which is no multiple of anything and never stepped along."""
    case = gpu.case([13], kv_format=kv_format, h_q=1, h_k=1, layout="nhd", spare_blocks=0)
    expected, lse = gpu.solve(case)
    d, ps = case.d, case.page_size
    page = int(case.table[0, 0])
    q = case.q.as_strided((1, 1, d), (1, 1, 1))
    k, v = (case.kernel_view(case.raw[name][page : page + 1].as_strided((1, ps, 1, d), (1, d, 1, 1),
            case.raw[name][page].storage_offset())) for name in "kv")  # fmt: skip
    table = torch.zeros(1, 1, dtype=torch.int32, device=gpu.device).as_strided((1, 1), (1, 1))
    out = torch.empty(d, dtype=torch.bfloat16, device=gpu.device).as_strided((1, 1, d), (1, 1, 1))
    sums = torch.empty(1, device=gpu.device).as_strided((1, 1, 1), (1, 1, 1))
    gpu.plan(case).run(q, k, v, table, out=out, lse=sums)
    assert torch.equal(out, expected)
    assert torch.equal(sums, lse)
    gpu.plan(case).run(q[None], k, v, table, out=out[None], lse=sums)
    assert torch.equal(out, expected)


@FORMATS
@DIMS
def test_negative_and_zero_output_scales(gpu: Gpu, kv_format: str, d: int) -> None:
    case = gpu.case([300, 5], kv_format=kv_format, d=d)
    for force_splits in (1, 3):
        gpu.solve(case, run_options={"out_scale": -3.0}, force_splits=force_splits)
        out, _ = gpu.solve(case, run_options={"out_scale": 0.0}, force_splits=force_splits)
        assert not out.any()


@FORMATS
@DIMS
@pytest.mark.parametrize("force_splits", [1, 3])
def test_zero_queries_under_tiny_descales(gpu: Gpu, kv_format: str, d: int, force_splits: int) -> None:
    """A scale product that underflows must not turn a maximum of -inf into NaN; padded rows of a graph are zero."""
    case = gpu.case([300, 0, 129], kv_format=kv_format, d=d)
    case.q[:, ::2] = 0
    for tiny in (1e-6, 1e-12, 1e-30, 1e-38):
        k_descale = torch.full((1,), tiny, device=case.q.device)
        plan = gpu.plan(case, force_splits=force_splits)
        out, lse = run(plan, case, k_descale=k_descale)
        check(plan, case, out, lse, k_descale=k_descale)
