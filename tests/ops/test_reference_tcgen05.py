"""The reference of the tcgen05 decode: exact attention but for P, which it rounds by tile as tensor cores take it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem

from cubinery.aot.references import paged_decode_tcgen05 as emulation
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.paged_decode_tcgen05 import chunks_of, emulated_attention, round_p
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation, paged_decode
from cubinery.runtime.ops.paged_decode.formats import unpack
from cubinery.runtime.ops.paged_decode.planner import plan_splits
from cubinery.runtime.ops.paged_decode.quantize import QuantizedKv, nvfp4_converted

LENGTHS = [300, 0, 1, 257, 2]
DESCALES: dict[str, Any] = {"q_descale": 0.5, "k_descale": 1.5, "v_descale": 2.0, "out_scale": 0.25}


def problem(q_dtype: str = "e4m3", **fields: Any) -> Problem:
    return Problem(LENGTHS, np.random.default_rng(3), torch, d=64, q_dtype=q_dtype, **fields)


def chunks(force_splits: int) -> list[list[tuple[int, int]]]:
    plan = plan_splits(LENGTHS, num_kv_heads=2, q_tiles=1, sm_count=20, force_splits=force_splits, pad_to=20)
    return chunks_of(plan.work, len(LENGTHS))


def test_chunks_are_those_of_the_work_list() -> None:
    assert chunks(3) == [[(0, 1), (1, 2), (2, 3)], [(0, 1)], [(0, 1)], [(0, 1), (1, 2), (2, 3)], [(0, 1)]]
    assert chunks(1) == [[(0, 3)], [(0, 1)], [(0, 1)], [(0, 3)], [(0, 1)]]


@pytest.mark.parametrize("force_splits", [1, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_format", ["fp8", "e3m2"])
def test_with_exact_p_it_is_attention(
    kv_format: str, causal: bool, force_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulation, "round_p", lambda p, q_dtype: p)
    p = problem(kv_format=kv_format, q_len=4)
    options = {"q_len": 4, "causal": causal, "kv_format": kv_format, **DESCALES}
    expected = paged_attention(*p.tensors, LENGTHS, **options)
    found = emulated_attention(*p.tensors, LENGTHS, chunks=chunks(force_splits), q_dtype="e4m3", **options)
    assert np.allclose(found[0], expected[0], rtol=1e-12, atol=1e-14)
    assert np.allclose(found[1], expected[1], rtol=1e-12, atol=1e-14)
    if causal:  # tokens of the two keys that see none
        assert not found[0].reshape(5, 4, 8, 64)[4, :2].any()
        assert np.isneginf(found[1].reshape(5, 2, 4, 4)[4, :, :2]).all()


@pytest.mark.parametrize(("q_dtype", "at_least", "at_most"), [("bf16", 5e-5, 5e-4), ("e4m3", 1e-2, 6.25e-2)])
def test_rounding_p_costs_what_its_bits_say(q_dtype: str, at_least: float, at_most: float) -> None:
    p = problem(q_dtype)
    exact = paged_attention(*p.tensors, LENGTHS, kv_format="fp8")
    found = emulated_attention(*p.tensors, LENGTHS, chunks=chunks(2), q_dtype=q_dtype)
    off = deviation(*found, *exact)
    assert at_least < off.o_relative_l2 < at_most
    assert off.lse_absolute < 1e-12  # the sum takes p before it is rounded


def test_p_is_rounded_relative_to_the_maximum_so_far() -> None:
    """Two tiles, of which the second has the larger score: the first one's p are scaled after rounding."""
    q, k = np.full((1, 1, 64), 1.0), np.zeros((16, 16, 1, 64))
    k[:8] = 0.1 / 64  # the first tile's scores are 0.1, the second's 0.4 but for one key
    k[8:] = 0.3 / 64
    k[8, 0] = 0.4 / 64
    v = np.zeros_like(k)
    v[8, 1] = 1.0  # p = exp(-0.1), as e4m3(448 p) / 448
    v[0, 0] = 1.0  # p = 1 in its tile
    table = np.arange(16).reshape(1, 16)
    o, lse = emulated_attention(
        q, k, v, table, [256], chunks=[[(0, 2)]], q_dtype="e4m3", softmax_scale=1.0, kv_format="bf16"
    )
    total = 128 * math.exp(-0.3) + 127 * math.exp(-0.1) + 1
    assert lse[0, 0, 0] == pytest.approx(0.4 + math.log(total), abs=1e-12)
    assert o[0, 0, 0] * total == pytest.approx(math.exp(-0.3) + 416 / 448, abs=1e-12)  # 448 exp(-0.1) = 405.4


@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
def test_p_is_rounded_as_torch_rounds(q_dtype: str) -> None:
    p = np.concatenate([np.random.default_rng(1).uniform(0, 1, 4000), np.exp(-np.linspace(0, 30, 4000)), [0.0, 1.0]])
    values = torch.from_numpy(p).float()
    scale, dtype = (2**15, torch.float16) if q_dtype == "bf16" else (448, torch.float8_e4m3fn)
    expected = (values.double() * scale).float().to(dtype)
    assert np.array_equal(round_p(p, q_dtype), expected.double().numpy() / scale)


def test_nvfp4_is_rounded_again() -> None:
    """The values are those of `nvfp4_converted`, whose descale is eight times the caller's."""
    p = problem(kv_format="nvfp4")
    found = emulated_attention(*p.tensors, LENGTHS, chunks=chunks(2), q_dtype="e4m3", kv_format="nvfp4", **p.scales)
    converted = []
    for cache, scales in ((p.k, p.scales["k_scales"]), (p.v, p.scales["v_scales"])):
        values, descale = nvfp4_converted(QuantizedKv("nvfp4", cache, torch.ones(1), scales))
        assert float(descale) == 8.0
        converted.append(values.double().numpy() * 8)
    assert unpack(p.k, 4).shape == converted[0].shape
    expected = emulated_attention(p.q, *converted, p.table, LENGTHS, chunks=chunks(2), q_dtype="e4m3", kv_format="bf16")
    assert np.array_equal(found[0], expected[0])
    exact = paged_attention(*p.tensors, LENGTHS, kv_format="nvfp4", **p.scales)
    assert deviation(*found, *exact).o_relative_l2 > 1e-2


def test_tolerances_follow_the_rounding_of_p() -> None:
    assert paged_decode("mma", "e4m3") is PAGED_DECODE["mma"]
    assert paged_decode("tcgen05", "bf16").o_relative_l2 == 5e-3
    assert paged_decode("tcgen05", "e4m3").o_relative_l2 == 3e-2
