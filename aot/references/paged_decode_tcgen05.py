"""What the `tcgen05` decode computes: attention tile by tile, with P rounded as its tensor cores take it, in float64.

Beyond paged attention it models the running maximum over tiles of 128 keys, P as e4m3(448 p) or f16(2^15 p) relative to
it, the sum of unrounded p, chunks merged by their maxima, and nvfp4 rounded again to e4m3(code * scale / 8). Not
modelled: the order of sums, the fast exponential and the rounding of O to bf16; the tolerances allow for those.
Takes numpy arrays or torch tensors (copied to the host); returns numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubinery.aot.references.paged_decode import Doubles, per_seq_head, stored_doubles, to_doubles, to_host
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.formats import E4M3
from cubinery.runtime.ops.paged_decode.quantize import NVFP4_SHIFT, decode, encode

P_SCALE = 448.0
"""What p is multiplied by before it is rounded to e4m3: its largest value, so that small p keep their bits."""

F16_SCALE = 2.0**15
"""The same where P is f16, with a bf16 Q."""

Chunks = Sequence[Sequence[tuple[int, int]]]
"""(first tile, end tile) of each chunk, by sequence; the chunks of a sequence lie side by side."""


def chunks_of(work: Any, num_seqs: int) -> list[list[tuple[int, int]]]:
    """The chunks of every sequence, in order, from a plan's work list (num_work, 4): `SplitPlan.work`."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_seqs)]
    for seq, begin, end, _ in to_host(work).tolist():
        if end > begin:
            found[seq].append((begin, end))
    return [sorted(chunks) for chunks in found]


def round_p(p: Doubles, q_dtype: str) -> Doubles:
    """p in [0, 1] as the second product takes it, undoing the scale: e4m3(448 p) / 448, or f16(2^15 p) / 2^15."""
    if q_dtype == "e4m3":
        return np.asarray(decode(encode(np.asarray(p * P_SCALE, np.float32), E4M3), E4M3), np.float64) / P_SCALE
    return np.asarray(p * F16_SCALE, np.float32).astype(np.float16).astype(np.float64) / F16_SCALE


def emulated_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    chunks: Chunks,
    q_dtype: str,
    q_len: int = 1,
    causal: bool = True,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    out_scale: float = 1.0,
    kv_format: str = "fp8",
    k_scales: Any = None,
    v_scales: Any = None,
) -> tuple[Doubles, Doubles]:
    """(o, lse) of one decode step; arguments, shapes and empty rows as in `paged_decode.paged_attention`.

    `chunks` are those of the plan (see `chunks_of`) and cover every sequence; `q_dtype`, "bf16" or "e4m3", says how P
    is rounded. Values of nvfp4 are those that the converter gives, e4m3(code * scale / 8) times 8, so descales are
    those of the exact values.
    """
    lengths = [int(n) for n in to_host(seq_lens)]
    table, num_seqs = to_host(block_table), len(lengths)
    head_dim, num_kv_heads, page_size = q.shape[-1], k_cache.shape[2], k_cache.shape[1]
    queries = to_doubles(q).reshape(num_seqs, q_len, num_kv_heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
    group = queries.shape[3]
    queries = queries.reshape(num_seqs, num_kv_heads, q_len * group, head_dim)
    sigma = (head_dim**-0.5 if softmax_scale is None else softmax_scale) * (
        per_seq_head(q_descale, num_seqs, num_kv_heads) * per_seq_head(k_descale, num_seqs, num_kv_heads)
    )
    gain = out_scale * per_seq_head(v_descale, num_seqs, num_kv_heads)
    o, lse = np.zeros(queries.shape), np.full(queries.shape[:3], -np.inf)
    tokens = np.arange(q_len).repeat(group)
    for seq, length in enumerate(lengths):
        pages = [int(page) for page in table[seq, : -(-length // page_size)]]
        last_seen = length - q_len + tokens if causal else np.full(len(tokens), length - 1)
        for head in range(num_kv_heads):
            k, v = (
                _converted(c[pages, :, head], kv_format, None if s is None else s[pages, :, head])
                .reshape(-1, head_dim)[:length]
                for c, s in ((k_cache, k_scales), (v_cache, v_scales))
            )  # fmt: skip
            parts = [
                _chunk(queries[seq, head], k, v, last_seen, float(sigma[seq, head]), tiles, q_dtype)
                for tiles in chunks[seq]
            ]
            o[seq, head], lse[seq, head] = _merge(parts)
    o *= gain[:, :, None, None]
    shaped = o.reshape(num_seqs, num_kv_heads, q_len, group, head_dim).transpose(0, 2, 1, 3, 4)
    return shaped.reshape(tuple(q.shape)), lse


def _converted(rows: Any, kv_format: str, scales: Any) -> Doubles:
    """float64 of stored rows as the tensor cores get them."""
    exact = stored_doubles(rows, kv_format, scales)
    if kv_format != "nvfp4":
        return exact
    codes = encode(np.asarray(exact * NVFP4_SHIFT, np.float32), E4M3)  # code * scale has six bits: exact in fp32
    return np.asarray(decode(codes, E4M3), np.float64) / NVFP4_SHIFT


def _chunk(
    q: Doubles, k: Doubles, v: Doubles, last_seen: NDArray[np.int64], sigma: float, tiles: tuple[int, int], q_dtype: str
) -> tuple[Doubles, Doubles, Doubles]:
    """(o, m, l) of a chunk of tiles: unnormalised O (rows, d), the maximum in LSE units and the sum (rows,)."""
    o, m, l = np.zeros(q.shape), np.full(len(q), -np.inf), np.zeros(len(q))  # noqa: E741 - the field's name
    for tile in range(*tiles):
        keys = slice(tile * TILE_KEYS, min((tile + 1) * TILE_KEYS, len(k)))
        seen = np.arange(keys.start, max(keys.start, keys.stop)) <= last_seen[:, None]
        scores = np.where(seen, sigma * (q @ k[keys].T), -np.inf)
        top = np.maximum(m, scores.max(axis=1, initial=-np.inf))
        shift = np.where(np.isneginf(top), 0.0, top)
        p, fade = np.exp(scores - shift[:, None]), np.exp(m - shift)
        l = fade * l + p.sum(axis=1)  # noqa: E741
        o = fade[:, None] * o + round_p(p, q_dtype) @ v[keys]
        m = top
    return o, m, l


def _merge(parts: Sequence[tuple[Doubles, Doubles, Doubles]]) -> tuple[Doubles, Doubles]:
    """(o (rows, d), lse (rows,)) of all chunks of a sequence; 0 and -inf of rows that no chunk has a key for."""
    os, ms, ls = (np.stack(x) for x in zip(*parts, strict=True))
    top = ms.max(axis=0)
    weights = np.exp(ms - np.where(np.isneginf(top), 0.0, top))
    total = (weights * ls).sum(axis=0)
    sums = (weights[:, :, None] * os).sum(axis=0)
    seen = total > 0
    with np.errstate(divide="ignore"):
        return np.where(seen[:, None], sums / np.where(seen, total, 1.0)[:, None], 0.0), top + np.log(total)
