"""What paged decode means: attention over the exactly dequantised values, in float64.

Models paging, grouping of query heads, causal visibility, sliding windows, sinks, soft-caps, fewer tokens than q_len,
descales and empty rows. P is not rounded:
the distance of a kernel from this includes its own rounding, which the tolerances allow for.
Takes numpy arrays or torch tensors (copied to the host); returns numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubinery.runtime.ops.paged_decode.formats import E4M3, NVFP4_BLOCK, element, unpack
from cubinery.runtime.ops.paged_decode.quantize import decode

Doubles = NDArray[np.float64]


def to_doubles(x: Any) -> Doubles:
    """float64 of an array or tensor, exactly. uint8 holds e4m3 codes, as caches of 8-bit floats often do."""
    if not isinstance(x, np.ndarray):
        x = x.detach().cpu()
        if x.element_size() == 1:
            import torch

            x = x.view(torch.uint8).numpy()
        else:
            return np.asarray(x.double().numpy())
    if x.dtype == np.uint8:
        x = decode(x, E4M3)
    return np.asarray(x, np.float64)


def stored_doubles(x: Any, kv_format: str | None, scales: Any = None) -> Doubles:
    """float64 (..., head_dim) of stored K or V rows: `to_doubles`, except that formats below 8 bits come as packed
    bytes (..., head_dim * bits / 8), and those of nvfp4 with the e4m3 scales (..., head_dim / 16) of their blocks.
    """
    if kv_format is None or kv_format in ("bf16", "fp8"):
        return to_doubles(x)
    fmt = element(kv_format)
    values = decode(unpack(np.asarray(x), fmt.bits), fmt).astype(np.float64)
    if scales is not None:
        values = values * np.repeat(to_doubles(scales), NVFP4_BLOCK, axis=-1)
    return np.asarray(values)


def paged_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    q_len: int = 1,
    causal: bool = True,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    out_scale: float = 1.0,
    kv_format: str | None = None,
    k_scales: Any = None,
    v_scales: Any = None,
    window: int | None = None,
    sinks: Any = None,
    softcap: float | None = None,
    q_lens: Any = None,
) -> tuple[Doubles, Doubles]:
    """(o, lse) of one decode step.

    `q` is (num_seqs * q_len, num_q_heads, head_dim) or (num_seqs, q_len, num_q_heads, head_dim); the
    caches are logical views (num_pages, page_size, num_kv_heads, head_dim) of values (uint8 and
    float8 are e4m3 codes, unless `kv_format` names a packed format; nvfp4 comes with `k_scales` and `v_scales`,
    e4m3 (num_pages, page_size, num_kv_heads, head_dim / 16)); `block_table` is (num_seqs, max_blocks), of which only
    entries below a sequence's length are read; `seq_lens` count keys, the new tokens included. Descales are None (1),
    a number, or arrays of 1 element, (num_kv_heads,) or (num_seqs, num_kv_heads).

    `window`: a token sees the last so many of the keys that a causal one sees; block-table entries of pages wholly
    before that are not read. `sinks` (num_q_heads,): logits that join the sum of exponentials of each row.
    `softcap`: scores become softcap * tanh(score / softcap). `q_lens` (num_seqs,): new tokens of each sequence,
    the first of its q_len, of which token i sees keys up to length - q_lens + i.

    `o` has the shape of `q`; `lse` is (num_seqs, num_kv_heads, q_len * group_size) in packed row order.
    A row that sees no key has o = 0, and lse = -inf or its sink. Rows past q_lens have o = 0 and lse = -inf.
    """
    lengths = [int(n) for n in to_host(seq_lens)]
    table = to_host(block_table)
    num_seqs = len(lengths)
    shape = tuple(q.shape)
    head_dim, num_q_heads = shape[-1], shape[-2]
    num_kv_heads, page_size = k_cache.shape[2], k_cache.shape[1]
    group = num_q_heads // num_kv_heads
    queries = to_doubles(q).reshape(num_seqs, q_len, num_kv_heads, group, head_dim)
    sigma = (head_dim**-0.5 if softmax_scale is None else softmax_scale) * (
        per_seq_head(q_descale, num_seqs, num_kv_heads) * per_seq_head(k_descale, num_seqs, num_kv_heads)
    )
    gain = out_scale * per_seq_head(v_descale, num_seqs, num_kv_heads)
    o = np.zeros_like(queries)
    lse = np.full((num_seqs, num_kv_heads, q_len, group), -np.inf)
    tokens = [q_len] * num_seqs if q_lens is None else [min(max(int(n), 0), q_len) for n in to_host(q_lens)]
    logits = None if sinks is None else to_doubles(sinks).reshape(num_kv_heads, group)
    for seq, (length, new) in enumerate(zip(lengths, tokens, strict=True)):
        # Only the pages read are converted, so poisoned ones elsewhere cost nothing and cannot leak.
        start = 0 if window is None else max(0, length - new + 1 - window) // page_size
        pages = [int(page) for page in table[seq, start : -(-length // page_size)]]
        for head in range(num_kv_heads):
            k, v = (
                stored_doubles(c[pages, :, head], kv_format, None if s is None else s[pages, :, head])
                .reshape(-1, head_dim)[: length - start * page_size]
                for c, s in ((k_cache, k_scales), (v_cache, v_scales))
            )  # fmt: skip
            o[seq, :new, head], lse[seq, head, :new] = dense_attention(
                queries[seq, :new, head], k, v, sigma=float(sigma[seq, head]), gain=float(gain[seq, head]),
                causal=causal, window=window, sinks=None if logits is None else logits[head], softcap=softcap,
            )  # fmt: skip
    return o.reshape(shape), lse.reshape(num_seqs, num_kv_heads, q_len * group)


def dense_attention(
    q: Doubles, k: Doubles, v: Doubles, *, sigma: float, gain: float = 1.0, causal: bool = True,
    window: int | None = None, sinks: Doubles | None = None, softcap: float | None = None,
) -> tuple[Doubles, Doubles]:  # fmt: skip
    """(o (q_len, group, d), lse (q_len, group)) of one sequence and KV head: q (q_len, group, d), k and v (L, d).

    Scores are sigma * q.k, capped to softcap * tanh(score / softcap); token i of q_len sees keys up to L - q_len + i if
    causal, and the last `window` of these, all keys otherwise. `sinks` (group,) join the sum, and so the LSE.
    """
    q_len, group, d = q.shape
    length = len(k)
    scores = sigma * (q.reshape(-1, d) @ k.T).reshape(q_len, group, length)  # one product, not one a token
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    keys, last_seen = np.arange(length), (length - q_len + np.arange(q_len))[:, None, None]
    if causal:
        scores = np.where(keys <= last_seen, scores, -np.inf)
    if window is not None:
        scores = np.where(keys > last_seen - window, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None])
    shift = np.where(np.isinf(top), 0.0, top)
    weights = np.exp(scores - shift)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - shift)
    seen = total > 0
    sums = (weights.reshape(q_len * group, length) @ v).reshape(q.shape)
    o = gain * np.divide(sums, total, out=np.zeros(q.shape), where=np.broadcast_to(seen, q.shape))
    with np.errstate(divide="ignore"):
        lse = np.where(seen, top + np.log(total), -np.inf)
    return o, lse[..., 0]


def per_seq_head(descale: Any, num_seqs: int, num_kv_heads: int) -> Doubles:
    """A descale in any granularity, expanded to (num_seqs, num_kv_heads)."""
    if descale is None:
        return np.ones((num_seqs, num_kv_heads))
    values = np.asarray(descale if isinstance(descale, int | float) else to_host(descale), np.float64)
    if values.size == 1:
        values = values.reshape(1, 1)
    return np.broadcast_to(values, (num_seqs, num_kv_heads))


def to_host(x: Any) -> Any:
    """A host array of a list, array or tensor."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)
