"""Planted needles: one key with a huge score and a value of its own, wherever a kernel could drop or repeat a key.

Random data hides such mistakes at long contexts. With all other scores zero, O must be the needle's value to the
bit; without a needle and with zero K, every visible key has the same weight, so LSE counts them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import Case
from gpu.reference import doubles
from gpu.running import Gpu, run

from cubinery.runtime.ops.paged_decode.op import Plan

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
DIMS = pytest.mark.parametrize("d", [128, 256])
PAGES = pytest.mark.parametrize("page_size", [16, 32, 64, 128])
Q, K = 4.0, 256.0


def haystack(gpu: Gpu, lengths: list[int], **fields: Any) -> Case:
    """Every query is constant and every key zero; values are random."""
    case = gpu.case(lengths, **({"h_q": 2, "h_k": 1, "layout": "nhd"} | fields))
    case.q.fill_(Q)
    case.fill("k", 0.0)
    return case


def expect_needles(plan: Plan, case: Case, positions: list[int], **options: Any) -> None:
    """Sequence i's needle lies at positions[i]: O is its value, LSE its score."""
    for seq, position in enumerate(positions):
        case.write("k", seq, [position], K)
    out, lse = run(plan, case, **options)
    found = case.rows_of(out).float()  # (num_seqs, h_k, q_len, group, d)
    values = torch.stack([case.read("v", seq, [p])[0] for seq, p in enumerate(positions)])
    right = (found == values[:, :, None, None]).flatten(1).all(1)
    wrong = torch.nonzero(~right).flatten().tolist()
    assert not wrong, f"needles lost at {[(positions[s], case.lengths[s]) for s in wrong[:8]]} of {plan!r}"
    score = Q * K * math.sqrt(case.d)
    assert (lse.double() - score).abs().max() < 1e-6 * score


@FORMATS
@DIMS
@PAGES
def test_every_key_of_a_tile(gpu: Gpu, kv_format: str, d: int, page_size: int) -> None:
    """Every position modulo 128, in a first, a middle or a last tile; whole and split."""
    positions = [i + 128 * (i % 3) for i in range(128)]
    for force_splits in (1, 3):
        case = haystack(gpu, [384] * 128, kv_format=kv_format, d=d, page_size=page_size)
        expect_needles(gpu.plan(case, force_splits=force_splits), case, positions)


@FORMATS
@DIMS
def test_every_tile_of_a_long_sequence(gpu: Gpu, kv_format: str, d: int) -> None:
    tiles = 65
    positions = [128 * i + i * 37 % 128 for i in range(tiles)]
    for options in ({"force_splits": 1}, {"force_splits": 7}, {"policy": "thor"}, {}):
        case = haystack(gpu, [128 * tiles] * tiles, kv_format=kv_format, d=d)
        expect_needles(gpu.plan(case, **options), case, positions)


@FORMATS
@DIMS
@pytest.mark.parametrize("splits", [2, 3, 7, 33, 256])
def test_first_and_last_key_of_every_split(gpu: Gpu, kv_format: str, d: int, splits: int) -> None:
    """Keys on both sides of every border between chunks, and the ends of the sequence."""
    length = 128 * (256 if splits == 256 else 66) - 5
    case = haystack(gpu, [length], kv_format=kv_format, d=d, h_q=8)
    plan = gpu.plan(case, force_splits=splits)
    work = plan.splits.work[: plan.splits.num_items]
    assert len(work) == splits
    borders = sorted({p for _, begin, end, _ in work.tolist() for p in (128 * begin, min(128 * end, length) - 1)})
    assert len(borders) == 2 * splits
    outputs = []
    for position in borders:
        case.write("k", 0, [position], K)
        outputs.append([x.clone() for x in plan.run(*case.tensors)])
        case.write("k", 0, [position], 0.0)
    values = case.read("v", 0, borders)  # (borders, h_k, d)
    for index, (out, lse) in enumerate(outputs):
        found = case.rows_of(out)[0].float()
        assert torch.equal(found, values[index][:, None, None].expand(found.shape)), borders[index]
        assert abs(float(lse.max()) / (Q * K * math.sqrt(d)) - 1) < 1e-6


@FORMATS
@DIMS
@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("force_splits", [1, 3])
def test_edge_35_a_score_above_all_others_by_ten_thousand(
    gpu: Gpu, kv_format: str, d: int, where: str, force_splits: int
) -> None:
    length = 128 * 7 + 50
    position = {"first": 3, "middle": 128 * 3 + 64, "last": length - 1}[where]
    case = haystack(gpu, [length] * 3, kv_format=kv_format, d=d, h_q=16, h_k=2)
    for name, sign in (("positive", 1.0), ("negative", -1.0)):
        # The second time all other scores lie below zero by as much, so that a maximum that starts at 0 shows.
        if name == "negative":
            case.fill("k", -K)
        for seq in range(3):
            case.write("k", seq, [position], K if sign > 0 else 0.0)
        plan = gpu.plan(case, force_splits=force_splits)
        out, lse = run(plan, case, v_descale=0.5, out_scale=4.0)
        values = torch.stack([case.read("v", seq, [position])[0] * 2 for seq in range(3)])
        found = case.rows_of(out).float()
        assert torch.equal(found, values[:, :, None, None].expand(found.shape))
        score = Q * K * math.sqrt(d) if sign > 0 else 0.0
        assert score == 0 or score >= 1e4
        assert (lse.double() - score).abs().max() <= 1e-6 * score + 1e-6


@FORMATS
@PAGES
@DIMS
def test_every_length_counts_its_keys(gpu: Gpu, kv_format: str, page_size: int, d: int) -> None:
    """All lengths from 0 to 530 at once, zero K: LSE is ln L and O the mean of the first L values."""
    lengths = list(range(531))
    for force_splits in (1, 4):
        case = haystack(gpu, lengths, kv_format=kv_format, page_size=page_size, d=d, shared_pages=True)
        out, lse = run(gpu.plan(case, force_splits=force_splits), case)
        values = doubles(case.encode(case.read("v", 530, range(530))))[:, 0]  # (530, d)
        counts = torch.arange(1, 531, device=gpu.device, dtype=torch.float64)
        assert not out[0].any()
        assert bool((lse[0] == -math.inf).all())
        assert (lse[1:, 0].double() - counts.log()[:, None]).abs().max() < 1e-5
        means = values.cumsum(0) / counts[:, None]
        error = (case.rows_of(out)[1:, 0, 0].double() - means[:, None]).norm(dim=-1) / means.norm(dim=-1)[:, None]
        assert float(error.max()) < 3e-3


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_format", "d", "page_size"), [("fp8", 128, 16), ("bf16", 256, 64)])
def test_every_length_counts_its_keys_for_every_token(
    gpu: Gpu, kv_format: str, d: int, page_size: int, q_len: int, causal: bool
) -> None:
    lengths = list(range(280))
    fields: dict[str, Any] = {"kv_format": kv_format, "d": d, "page_size": page_size, "q_len": q_len, "causal": causal}
    for force_splits in (1, 3):
        case = haystack(gpu, lengths, shared_pages=True, h_q=4, **fields)
        out, lse = run(gpu.plan(case, force_splits=force_splits), case)
        tokens = np.arange(q_len)
        seen = np.maximum(np.array(lengths)[:, None] - (q_len - 1 - tokens if causal else 0 * tokens), 0)
        with np.errstate(divide="ignore"):
            expected = torch.from_numpy(np.log(seen)).to(gpu.device)[:, :, None].expand(-1, -1, 4)
        found = lse.reshape(len(lengths), q_len, 4).double()
        assert torch.equal(found == -math.inf, expected == -math.inf)
        some = expected > -math.inf
        assert (found[some] - expected[some]).abs().max() < 1e-5
        rows = case.rows_of(out)[:, 0].double()
        assert not rows[~some].any()
        values = doubles(case.encode(case.read("v", 279, range(279))))[:, 0]
        sums = torch.cat([torch.zeros_like(values[:1]), values.cumsum(0)])
        counts = torch.from_numpy(seen).to(gpu.device)
        means = (sums[counts] / counts.clamp(min=1)[..., None])[:, :, None]
        error = (rows - means).norm(dim=-1) / means.norm(dim=-1).clamp(min=1e-9)
        assert float(error[some].max()) < 3e-3


@FORMATS
@pytest.mark.parametrize("length", [1000, 4096, 20011])
def test_long_sequences_count_their_keys(gpu: Gpu, kv_format: str, length: int) -> None:
    """Rounded, exp(LSE) is the very number of keys, and ones average to one."""
    for options in ({"force_splits": 1}, {}, {"force_splits": 64}):
        case = haystack(gpu, [length, 77], kv_format=kv_format, h_q=16, h_k=2)
        case.fill("v", 1.0)
        out, lse = run(gpu.plan(case, **options), case)
        assert bool((lse[0].double().exp().round() == length).all())
        assert bool((out == 1.0).all())
