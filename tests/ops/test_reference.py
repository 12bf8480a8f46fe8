"""The float64 reference: against a loop written from the definition, and the specification's small cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from cubinery.aot.references.paged_decode import dense_attention, paged_attention, per_seq_head, to_doubles
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.ops.paged_decode.quantize import dequantize_kv, quantize_kv

RNG = np.random.default_rng(5)


def problem(lengths: list[int], *, h_q: int = 6, h_k: int = 2, d: int = 16, page: int = 16, q_len: int = 1,
            spare: int = 3) -> tuple[np.ndarray, ...]:  # fmt: skip
    """q, k, v, block_table: shuffled pages, NaN in those that no sequence uses, garbage in table padding."""
    blocks = [-(-n // page) for n in lengths]
    pages = sum(blocks) + spare
    order = RNG.permutation(pages)
    table = np.full((len(lengths), max(blocks) + 2), -77, np.int32)
    k, v = RNG.standard_normal((2, pages, page, h_k, d))
    for unused in order[sum(blocks) :]:
        k[unused] = v[unused] = np.nan
    taken = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[taken : taken + count]
        taken += count
    return RNG.standard_normal((len(lengths) * q_len, h_q, d)), k, v, table


def by_definition(q, k, v, table, lengths, q_len, causal, qd, kd, vd, scale, out_scale):  # type: ignore[no-untyped-def]
    page, h_k = k.shape[1], k.shape[2]
    h_q = q.shape[1]
    group = h_q // h_k
    o, lse = np.zeros_like(q), np.full((len(lengths), h_k, q_len * group), -math.inf)
    for b, length in enumerate(lengths):
        for i in range(q_len):
            visible = max(0, length - q_len + i + 1) if causal else length
            for h in range(h_q):
                kv = h // group
                keys = [k[table[b, j // page], j % page, kv] for j in range(visible)]
                weights = [math.exp(scale * qd[b, kv] * kd[b, kv] * float(q[b * q_len + i, h] @ key)) for key in keys]
                total = sum(weights)
                if not total:
                    continue
                lse[b, kv, i * group + h % group] = math.log(total)
                for j, w in enumerate(weights):
                    o[b * q_len + i, h] += out_scale * vd[b, kv] * w / total * v[table[b, j // page], j % page, kv]
    return o, lse


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("q_len", [1, 3])
def test_against_the_definition(q_len: int, causal: bool) -> None:
    lengths = [1, 0, 17, 50, 2]
    q, k, v, table = problem(lengths, q_len=q_len)
    qd, kd, vd = RNG.uniform(0.5, 2, (3, 5, 2))
    expected = by_definition(q, k, v, table, lengths, q_len, causal, qd, kd, vd, 0.3, 1.5)
    got = paged_attention(
        q, k, v, table, lengths, q_len=q_len, causal=causal, q_descale=qd, k_descale=kd, v_descale=vd,
        softmax_scale=0.3, out_scale=1.5,
    )  # fmt: skip
    assert np.allclose(got[0], expected[0], rtol=1e-12, atol=1e-14)
    assert np.allclose(got[1], expected[1], rtol=1e-12, atol=1e-14)
    assert np.isinf(got[1][1]).all()
    four = paged_attention(
        q.reshape(5, q_len, 6, 16), k, v, table, lengths, q_len=q_len, causal=causal, q_descale=qd, k_descale=kd,
        v_descale=vd, softmax_scale=0.3, out_scale=1.5,
    )  # fmt: skip
    assert np.array_equal(four[0].reshape(q.shape), got[0])


@pytest.mark.parametrize("window", [None, 1, 3, 20, 100])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_the_axes_against_the_definition(window: int | None, with_sinks: bool) -> None:
    """A loop over rows and keys, with all axes at once; nothing before the window is read."""
    lengths, q_lens, cap = [40, 0, 17, 2, 33], [3, 2, 0, 3, 1], 0.7
    q, k, v, table = problem(lengths, q_len=3)
    sinks = RNG.standard_normal(6) if with_sinks else None
    o, lse = np.zeros((5, 3, 6, 16)), np.full((5, 2, 3, 3), -math.inf)
    for b, (length, new) in enumerate(zip(lengths, q_lens, strict=True)):
        for i, h in itertools.product(range(new), range(6)):
            last = length - new + i
            seen = [j for j in range(length) if j <= last and (window is None or j > last - window)]
            weights = []
            for j in seen:
                score = 0.3 * float(q[b * 3 + i, h] @ k[table[b, j // 16], j % 16, h // 3])
                weights.append(math.exp(cap * math.tanh(score / cap)))
            total = sum(weights) + (0.0 if sinks is None else math.exp(sinks[h]))
            if total:
                lse[b, h // 3, i, h % 3] = math.log(total)
                for j, w in zip(seen, weights, strict=True):
                    o[b, i, h] += w / total * v[table[b, j // 16], j % 16, h // 3]
    if window is not None:
        for b, (length, new) in enumerate(zip(lengths, q_lens, strict=True)):
            table[b, : max(0, length - new + 1 - window) // 16] = -5
    got = paged_attention(
        q, k, v, table, lengths, q_len=3, softmax_scale=0.3, window=window, sinks=sinks, softcap=cap, q_lens=q_lens
    )
    assert np.allclose(got[0], o.reshape(q.shape), rtol=1e-12, atol=1e-14)
    assert np.allclose(got[1], lse.reshape(5, 2, 9), rtol=1e-12, atol=1e-14)


def test_uniform_scores_average() -> None:
    q, k, v, table = problem([300])
    o, lse = paged_attention(q, np.zeros_like(k), v, table, [300])
    assert np.allclose(lse, math.log(300))
    used = v[table[0, :19]].reshape(-1, 2, 16)[:300]
    assert np.allclose(o.reshape(2, 3, 16), used.mean(0)[:, None])


def test_causal_tokens_see_their_prefix() -> None:
    """q_len 4 with four keys: token 0 returns v0, token 3 sees all; with two keys tokens 0 and 1 see nothing."""
    q, k, v, table = problem([4, 2], q_len=4)
    o, lse = paged_attention(q, k, v, table, [4, 2], q_len=4)
    assert np.allclose(o[0].reshape(2, 3, 16), v[table[0, 0], 0][:, None])
    o = o.reshape(2, 4, 6, 16)
    assert not o[1, :2].any()
    assert np.isinf(lse.reshape(2, 2, 4, 3)[1, :, :2]).all()
    assert np.allclose(o[1, 2].reshape(2, 3, 16), v[table[1, 0], 0][:, None])


def test_huge_scores_do_not_overflow() -> None:
    k = np.zeros((64, 8))
    k[40] = 1e6
    v = RNG.standard_normal((64, 8))
    o, lse = dense_attention(np.ones((1, 2, 8)), k, v, sigma=1.0)
    assert np.allclose(o, v[40])
    assert np.allclose(lse, 8e6)


def test_long_context_is_quick_and_right() -> None:
    length = 131072
    k, v = RNG.standard_normal((2, length, 8))
    q = RNG.standard_normal((1, 4, 8))
    o, lse = dense_attention(q, k, v, sigma=0.35)
    weights = np.exp(0.35 * q[0] @ k.T)
    assert np.allclose(lse, np.log(weights.sum(-1)))
    assert np.allclose(o[0], weights @ v / weights.sum(-1, keepdims=True))


def test_eight_bit_caches_are_decoded_exactly() -> None:
    q, k, v, table = problem([40, 9])
    k8, v8 = (quantize_kv(torch.from_numpy(np.nan_to_num(x)).float(), "fp8") for x in (k, v))
    o, lse = paged_attention(q, k8.data, v8.data, table, [40, 9], k_descale=k8.scale, v_descale=v8.scale)
    exact = paged_attention(q, dequantize_kv(k8, scaled=False), dequantize_kv(v8, scaled=False), table, [40, 9],
                            k_descale=k8.scale, v_descale=v8.scale)  # fmt: skip
    assert np.array_equal(o, exact[0])
    assert np.array_equal(lse, exact[1])
    codes = paged_attention(q, k8.data.view(torch.uint8).numpy(), v8.data.view(torch.uint8), table, [40, 9],
                            k_descale=k8.scale, v_descale=v8.scale)  # fmt: skip
    assert np.array_equal(codes[0], o)


def test_descales_in_every_granularity() -> None:
    assert per_seq_head(None, 2, 3).tolist() == [[1] * 3] * 2
    assert per_seq_head(0.5, 2, 3).tolist() == [[0.5] * 3] * 2
    assert per_seq_head(torch.tensor([0.5]), 2, 3).tolist() == [[0.5] * 3] * 2
    assert per_seq_head(np.array([1, 2, 3]), 2, 3).tolist() == [[1, 2, 3]] * 2
    assert per_seq_head(np.arange(6).reshape(2, 3), 2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_doubles_are_exact() -> None:
    x = torch.randn(50).bfloat16()
    assert to_doubles(x).tolist() == [float(value) for value in x]


# -- tolerances -----------------------------------------------------------------------------------------


def test_deviation_finds_the_worst_row() -> None:
    o, lse = RNG.standard_normal((4, 3, 16)), RNG.standard_normal((4, 3))
    bad, bad_lse = o.copy(), lse.copy()
    bad[2, 1] *= 1.01
    bad_lse[3, 0] += 0.5
    found = deviation(bad, bad_lse, o, lse)
    assert found.o_row == (2, 1)
    assert found.lse_row == (3, 0)
    assert found.o_relative_l2 == pytest.approx(0.01)
    assert found.lse_absolute == pytest.approx(0.5)
    assert not found.within(PAGED_DECODE["mma"])
    assert deviation(o * 1.001, lse + 1e-4, o, lse).within(PAGED_DECODE["mma"])


def test_deviation_refuses_nan_and_wrong_infinities() -> None:
    o, lse = np.ones((2, 4)), np.array([0.0, -np.inf])
    assert deviation(o, lse, o, lse).within(PAGED_DECODE["mma"])
    for bad_o, bad_lse in ((np.full_like(o, np.nan), lse), (o, np.zeros(2)), (o, np.array([-np.inf, -np.inf]))):
        assert not deviation(bad_o, bad_lse, o, lse).within(PAGED_DECODE["mma"])
    zero = np.zeros((2, 4))
    assert deviation(zero + 1e-3, lse, zero, lse).o_relative_l2 == pytest.approx(2e-3)
    with pytest.raises(ValueError, match="do not match"):
        deviation(o, lse, o[:1], lse)


def test_one_dropped_tile_of_many_is_out_of_bounds() -> None:
    """What an absolute tolerance on O would let pass."""
    k, v, q = RNG.standard_normal((16384, 64)), RNG.standard_normal((16384, 64)), RNG.standard_normal((1, 1, 64))
    full = dense_attention(q, k, v, sigma=0.125)
    cut = dense_attention(q, k[:-128], v[:-128], sigma=0.125)
    found = deviation(cut[0], cut[1], full[0], full[1])
    assert not found.within(PAGED_DECODE["mma"])
    assert np.abs(cut[0] - full[0]).max() < 0.05
