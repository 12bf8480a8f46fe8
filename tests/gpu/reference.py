"""The float64 reference of paged decode in torch, on whatever device the tensors are.

Means what `cubinery.aot.references.paged_decode.paged_attention` means, and test_reference.py holds it to that;
written anew so that long sequences take milliseconds on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gpu.stored import Rows, is_packed, load

Scale = torch.Tensor | float | None


def doubles(x: torch.Tensor) -> torch.Tensor:
    """float64, exactly; uint8 holds e4m3 codes."""
    if x.dtype == torch.uint8:
        x = x.view(torch.float8_e4m3fn)
    return x.float().double()


def values(rows: torch.Tensor, scales: torch.Tensor | None, kv_format: str) -> torch.Tensor:
    """float64 (..., d) of stored rows, exactly: packed ones by their format, others by their dtype."""
    return load(Rows(rows, scales), kv_format).double() if is_packed(kv_format) else doubles(rows)


def by_seq_and_head(scale: Scale, num_seqs: int, num_kv_heads: int, device: Any) -> torch.Tensor:
    """A descale of any granularity as float64 (num_seqs, num_kv_heads)."""
    values = torch.as_tensor(1.0 if scale is None else scale, device=device).double()
    return (values.reshape(1, 1) if values.numel() == 1 else values).expand(num_seqs, num_kv_heads)


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: Sequence[int],
    *,
    q_len: int = 1,
    causal: bool = True,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    softmax_scale: float | None = None,
    out_scale: float = 1.0,
    kv_format: str = "fp8",
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    q_lens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o in the shape of `q`, lse (num_seqs, num_kv_heads, q_len * group_size)), float64 on q's device.

    Arguments as for `Plan.run`. Entries of the block table and rows of the cache at or past a sequence's end
    are never read, nor what lies in pages before the window. A row that sees no key has o = 0, and lse = -inf or its
    sink; rows past q_lens have o = 0 and lse = -inf.
    """
    num_seqs, (h_q, d), device = len(lengths), q.shape[-2:], q.device
    page_size, h_k = k_cache.shape[1:3]
    group = h_q // h_k
    sigma = by_seq_and_head(q_descale, num_seqs, h_k, device) * by_seq_and_head(k_descale, num_seqs, h_k, device)
    sigma = sigma * (d**-0.5 if softmax_scale is None else softmax_scale)
    gain = by_seq_and_head(v_descale, num_seqs, h_k, device) * out_scale
    # (num_seqs, h_k, q_len * group, d): packed rows of each KV head
    queries = doubles(q).reshape(num_seqs, q_len, h_k, group, d).transpose(1, 2).reshape(num_seqs, h_k, -1, d)
    o = torch.zeros_like(queries)
    lse = torch.full(queries.shape[:3], -torch.inf, dtype=torch.float64, device=device)
    token = torch.arange(q_len, device=device).repeat_interleave(group)
    # uint8 and bf16 can be indexed on every device, float8 cannot.
    stored = [c.view(torch.uint8) if c.element_size() == 1 else c for c in (k_cache, v_cache)]
    block_scales = (k_scales, v_scales)
    tokens = [q_len] * num_seqs if q_lens is None else q_lens.clamp(0, q_len).tolist()
    sink = None if sinks is None else sinks.double().view(h_k, 1, group).expand(h_k, q_len, group).reshape(h_k, -1, 1)
    for seq, (length, new) in enumerate(zip(lengths, tokens, strict=True)):
        start = 0 if window is None else max(0, length - new + 1 - window) // page_size
        pages = block_table[seq, start : -(-length // page_size)].long()
        k, v = (
            values(c[pages], None if s is None else s[pages], kv_format)
            .flatten(0, 1)[: length - start * page_size]
            .transpose(0, 1)
            for c, s in zip(stored, block_scales, strict=True)
        )  # (h_k, keys, d)
        scores = queries[seq] @ k.transpose(1, 2) * sigma[seq, :, None, None]
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        keys = start * page_size + torch.arange(k.shape[1], device=device)
        last = (length - new + token)[:, None]
        if causal:
            scores = scores.masked_fill(keys > last, -torch.inf)
        if window is not None:
            scores = scores.masked_fill(keys <= last - window, -torch.inf)
        logits = scores.new_full((*scores.shape[:2], 1), -torch.inf) if sink is None else sink
        logits = torch.cat([scores, logits], -1).masked_fill((token >= new)[:, None], -torch.inf)
        top = logits.amax(-1, keepdim=True)
        weights = (logits - top.nan_to_num(neginf=0.0)).exp()
        total, weights = weights.sum(-1, keepdim=True), weights[..., :-1]
        seen = total > 0
        o[seq] = torch.where(seen, weights @ v / total.where(seen, 1.0), 0.0) * gain[seq, :, None, None]
        lse[seq] = torch.where(seen, top + total.where(seen, 1.0).log(), -torch.inf)[..., 0]
    return o.reshape(num_seqs, h_k, q_len, group, d).transpose(1, 2).reshape(q.shape), lse
