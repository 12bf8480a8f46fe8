"""Caches below 8 bits and e4m3 queries: every key, every page size, poison, strides, and what rounding costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu.problems import same_bits
from gpu.reference import attention
from gpu.running import ACCURACY, Gpu, check, run
from gpu.stored import load, poison, store

from cubinery.runtime.ops.paged_decode.config import KV_BITS
from cubinery.runtime.ops.paged_decode.formats import element
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS
from cubinery.runtime.ops.paged_decode.quantize import QuantizedKv, decode, dequantize_kv, quantize_kv, quantize_q

pytestmark = pytest.mark.gpu
NARROW = pytest.mark.parametrize("kv_format", ["e3m2", "e2m3", "e2m1", "nvfp4"])
FORMATS = pytest.mark.parametrize("kv_format", list(KV_BITS))
Q_DTYPES = pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
SHAPES = pytest.mark.parametrize(("d", "page_size"), [(64, 16), (128, 16), (128, 32), (128, 64), (128, 128), (256, 16),
                                                      (512, 16)])  # fmt: skip
BORDERS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 1023, 1025]


@NARROW
@SHAPES
def test_edge_31_lengths_on_borders(gpu: Gpu, kv_format: str, d: int, page_size: int) -> None:
    """Everything past the end of a sequence, in its last page too, holds NaN or the largest value."""
    for index, layout in enumerate(LAYOUTS):
        case = gpu.case(BORDERS, kv_format=kv_format, d=d, page_size=page_size, layout=layout, seed=index)
        gpu.solve(case, force_splits=(0, 1, 3, 5)[index])


@NARROW
@SHAPES
def test_every_key_of_a_tile(gpu: Gpu, kv_format: str, d: int, page_size: int) -> None:
    """A needle at every position modulo 128 among keys of zero: O is its value to the bit."""
    positions = [i + 128 * (i % 3) for i in range(128)]
    high = 6.0 if kv_format != "e3m2" else 16.0
    for force_splits in (1, 3):
        case = gpu.case([384] * 128, kv_format=kv_format, d=d, page_size=page_size, h_q=2, h_k=1)
        case.q.fill_(64.0)
        case.fill("k", 0.0)
        for seq, position in enumerate(positions):
            case.write("k", seq, [position], high)
        plan = gpu.plan(case, force_splits=force_splits)
        out, lse = run(plan, case)
        values = torch.stack([case.read("v", seq, [p])[0] for seq, p in enumerate(positions)])
        assert torch.equal(case.rows_of(out).float(), values[:, :, None, None].expand(128, 1, 1, 2, d))
        score = 64.0 * high * math.sqrt(d)
        assert (lse.double() - score).abs().max() < 1e-6 * score


@NARROW
@pytest.mark.parametrize("d", [64, 128, 256, 512])
def test_every_code_in_every_column(gpu: Gpu, kv_format: str, d: int) -> None:
    """Each key holds one code in one column of V and zeros elsewhere; its query sees it alone, scaled by nothing."""
    codes = torch.arange(1 << element(kv_format).bits, dtype=torch.uint8)
    values = [v for v in decode(codes, element(kv_format)).tolist() if v]
    case = gpu.case([d] * len(values), kv_format=kv_format, d=d, h_q=1, h_k=1)
    case.q.zero_()
    for seq, value in enumerate(values):
        case.write("v", seq, range(d), torch.diag(torch.full((d,), value))[:, None])
    out, _ = run(gpu.plan(case, force_splits=1), case)
    # All keys weigh the same, so each column averages its one code with zeros.
    expected = torch.stack([case.read("v", seq, range(d))[:, 0].sum(0) for seq in range(len(values))]) / d
    assert bool(expected.all())
    assert torch.equal(case.rows_of(out)[:, 0, 0, 0].float(), expected)


@NARROW
@Q_DTYPES
@pytest.mark.parametrize("d", [128, 256])
@pytest.mark.parametrize("force_splits", [1, 3])
def test_descales_and_scores_of_any_size(gpu: Gpu, kv_format: str, q_dtype: str, d: int, force_splits: int) -> None:
    case = gpu.case([1000, 129, 0, 3], kv_format=kv_format, d=d, q_dtype=q_dtype)
    ones = {name: torch.rand(4, 2, device=gpu.device) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    gpu.solve(case, run_options=ones, force_splits=force_splits)
    for factor in (1e-30, 1e-3, 30.0):
        options = {"softmax_scale": factor, "v_descale": torch.full((1,), 1e3, device=gpu.device)}
        gpu.solve(case, run_options=options, force_splits=force_splits)


@FORMATS
@pytest.mark.parametrize("d", [128, 256])
def test_e4m3_queries_are_what_their_values_are(gpu: Gpu, kv_format: str, d: int) -> None:
    """Codes of every magnitude, as float8 and as uint8; bf16 queries of the same values give the same to rounding."""
    case = gpu.case([700, 130, 0, 5], kv_format=kv_format, d=d, q_dtype="e4m3")
    case.q.view(torch.uint8)[0] = (torch.arange(case.q[0].numel(), device=gpu.device) % 126).view(case.q[0].shape)
    scale = {"softmax_scale": 1e-3}
    out, lse = gpu.solve(case, run_options=scale)
    plan = gpu.plan(case)
    codes, code_lse = plan.run(case.q.view(torch.uint8), case.k, case.v, case.table, **case.extras, **scale)
    assert same_bits(codes, out)
    assert same_bits(code_lse, lse)
    other = gpu.case([700, 130, 0, 5], kv_format=kv_format, d=d)
    other.q.copy_(case.q.float())
    found, found_lse = gpu.solve(other, run_options=scale)
    assert torch.allclose(found.float(), out.float(), rtol=2e-2, atol=1e-3)
    assert torch.allclose(found_lse, lse, atol=1e-3)


@NARROW
@pytest.mark.parametrize("length", [130, 1, 127, 255, 63])
def test_edge_07_poison_past_the_end_of_the_last_page(gpu: Gpu, kv_format: str, length: int) -> None:
    """The same bits whatever lies there, NaN scales of blocks included."""
    case = gpu.case([length], kv_format=kv_format, page_size=64)
    poisoned = gpu.solve(case)
    zero = store(torch.zeros(case.d, device=gpu.device), kv_format)
    for name in "kv":
        case.put(name, ~case.live, zero)
    clean = gpu.solve(case)
    case.put("k", ~case.live, poison(kv_format, case.d, gpu.device))
    only_k = gpu.solve(case)
    for o, lse in (clean, only_k):
        assert same_bits(o, poisoned[0])
        assert same_bits(lse, poisoned[1])


def test_edge_30_nvfp4_of_ones_and_zeros(gpu: Gpu) -> None:
    """Ones are exact with a global scale of 1 / 2688; zeros average to zero, and their LSE counts keys."""
    case = gpu.case([300], kv_format="nvfp4")
    ones = torch.ones(case.live.shape[0], case.page_size, case.h_k, case.d, device=gpu.device)
    stored = quantize_kv(ones, "nvfp4")
    assert stored.block_scales is not None
    assert bool((stored.block_scales == 0x7E).all())
    assert bool((stored.data == 0x77).all())
    plan = gpu.plan(case)
    scales = {"k_scales": stored.block_scales, "v_scales": stored.block_scales}
    out, lse = plan.run(case.q, stored.data, stored.data, case.table, k_descale=stored.scale, v_descale=stored.scale,
                        **scales)  # fmt: skip
    assert bool((out == 1.0).all())
    sums = case.q.double().sum(-1).reshape(1, 2, 4) / math.sqrt(case.d) + math.log(300)
    assert (lse.double() - sums).abs().max() < 1e-4
    for name in "kv":
        case.fill(name, 0.0)
    out, lse = gpu.solve(case)
    assert not out.any()
    assert (lse.double() - math.log(300)).abs().max() < 1e-5


@NARROW
def test_k_and_v_of_different_strides_and_offsets(gpu: Gpu, kv_format: str) -> None:
    """Rows, heads and pages further apart than needed, differently in K, in V and in the scales of their blocks."""
    case = gpu.case([300, 77], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=2)
    expected = run(plan, case)
    pages, ps, heads, row = case.k.shape
    wide_k = case.k.new_full((pages + 1, ps, heads + 1, 2 * row), 0)[1:, :, 1:, row:]
    wide_v = case.v.new_full((pages, heads + 2, ps, row + 96), 0)[:, :heads, :, :row].transpose(1, 2)
    wide_k.copy_(case.k)
    wide_v.copy_(case.v)
    extras = dict(case.extras)
    for index, (name, scales) in enumerate(case.scales.items()):
        wide = scales.new_full((pages, heads + index, ps + 1, 16), 0x7F)[:, :heads, :ps, 8 * index : 8 * index + 8]
        extras[name] = wide.transpose(1, 2)
        extras[name].copy_(scales)
    out, lse = plan.run(case.q, wide_k, wide_v, case.table, **extras)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@NARROW
@pytest.mark.parametrize("length", [4096, 20011])
def test_long_sequences_count_their_keys(gpu: Gpu, kv_format: str, length: int) -> None:
    case = gpu.case([length, 77], kv_format=kv_format, h_q=16, h_k=2)
    case.fill("k", 0.0)
    case.fill("v", 1.0)
    stored = case.read("v", 0, [0]).bfloat16()[0, 0, 0]  # nvfp4 has no block of ones
    for options in ({"force_splits": 1}, {}, {"force_splits": 64}):
        out, lse = run(gpu.plan(case, **options), case)
        assert bool((lse[0].double().exp().round() == length).all())
        assert bool((out == stored).all())


@FORMATS
@Q_DTYPES
@pytest.mark.parametrize("d", [128, 256])
def test_accuracy_against_unquantised_attention(gpu: Gpu, kv_format: str, q_dtype: str, d: int) -> None:
    """The error is that of rounding K, V and Q, measured on the reference; the kernel adds next to none."""
    generator = torch.Generator(gpu.device).manual_seed(9)
    case = gpu.case([4096, 1000], kv_format=kv_format, d=d, q_dtype=q_dtype, h_q=16, h_k=4)
    pages = case.live.shape[0]
    k, v = (torch.randn((pages, 16, 4, d), generator=generator, device=gpu.device) for _ in "kv")
    q = torch.randn((2, 1, 16, d), generator=generator, device=gpu.device)
    caches = [quantize_kv(x, kv_format) for x in (k, v)]
    options: dict[str, Any] = {"k_descale": caches[0].scale, "v_descale": caches[1].scale}
    stored_q, values = q.bfloat16(), q.bfloat16().float()
    if q_dtype == "e4m3":
        stored_q, options["q_descale"] = quantize_q(q, 4)
        values = stored_q.float()
    scales = {
        f"{name}_scales": c.block_scales for name, c in zip("kv", caches, strict=True) if c.block_scales is not None
    }
    out, lse = gpu.plan(case).run(stored_q, caches[0].data, caches[1].data, case.table, **options, **scales)
    exact, exact_lse = attention(q, k, v, case.table, case.lengths)
    k_values, v_values = (plain(c) for c in caches)
    rounded, rounded_lse = attention(values, k_values, v_values, case.table, case.lengths, **options)

    def distance(o: torch.Tensor) -> float:
        return float((o.double() - exact).norm() / exact.norm())

    ACCURACY[kv_format, q_dtype, d] = (distance(out), distance(rounded), float((lse - exact_lse).abs().max()))
    assert distance(out) < distance(rounded) + 3e-3
    assert (lse - rounded_lse).abs().max() < 1e-3


def plain(cache: QuantizedKv) -> torch.Tensor:
    """What the kernel sees of a cache, before descales."""
    found: torch.Tensor = dequantize_kv(cache, scaled=False)
    return found


@NARROW
def test_stored_rows_come_back(gpu: Gpu, kv_format: str) -> None:
    """What these tests write into a cache is what they read from it, and what the reference sees."""
    case = gpu.case([40], kv_format=kv_format)
    largest = element(kv_format).max
    case.write("v", 0, [7], torch.linspace(-largest, largest, case.d))
    row = case.read("v", 0, [7])
    assert float(row.max()) == largest
    assert bool(load(poison(kv_format, case.d, gpu.device), kv_format).isnan().all()) == (kv_format == "nvfp4")
    plan = gpu.plan(case)
    check(plan, case, *run(plan, case))
