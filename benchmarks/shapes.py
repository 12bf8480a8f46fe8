"""The decode problems that are measured, and their tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from cubinery.runtime.ops.paged_decode.layouts import kv_views

ITEM_BYTES = {"fp8": 1, "bf16": 2}
"""Bytes of one K or V element, by kv_format."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One decode step: heads, page size, keys of each sequence (new tokens included), new tokens a sequence."""

    name: str
    h_q: int
    h_k: int
    d: int
    page_size: int
    lens: tuple[int, ...]
    q_len: int = 1

    @property
    def title(self) -> str:
        """`32 x 4K, 32/8/128, page 16`."""
        counts = Counter(self.lens)
        batch = " + ".join(f"{count} x {_short(keys)}" for keys, count in counts.items())
        q_len = "" if self.q_len == 1 else f", q {self.q_len}"
        return f"{batch}, {self.h_q}/{self.h_k}/{self.d}, p{self.page_size}{q_len}"

    def kv_bytes(self, kv_format: str) -> int:
        """Bytes of K and V that one step must read."""
        return sum(self.lens) * self.h_k * self.d * 2 * ITEM_BYTES[kv_format]


def _short(keys: int) -> str:
    return f"{keys // 1024}K" if keys % 1024 == 0 else str(keys)


SHAPES = (
    Shape("llama70b_b128_2k", 64, 8, 128, 64, (2048,) * 128),
    Shape("llama8b_b32_4k", 32, 8, 128, 16, (4096,) * 32),
    Shape("qwen3_30b_b1_64k", 32, 4, 128, 64, (65536,)),
    Shape("llama8b_b1_4k", 32, 8, 128, 16, (4096,)),
    Shape("llama8b_b1_128k", 32, 8, 128, 64, (131072,)),
    Shape("llama70b_tp8_b64_8k", 8, 1, 128, 64, (8192,) * 64),
    Shape("uneven_64k_31x4k", 8, 1, 128, 64, (65536, *[4096] * 31)),
    Shape("d256_b1_8k", 24, 4, 256, 16, (8192,)),
    Shape("d256_b1_128k", 24, 4, 256, 16, (131072,)),
    Shape("qwen3_30b_b16_16k_q4", 32, 4, 128, 64, (16384,) * 16, 4),
)
"""Models that people serve, small and large batches, one long sequence, an uneven batch, speculative decode."""


class Problem:
    """Random tensors of a shape. Pages are dealt out in random order, as a serving engine's are.

    `kv` is (num_pages, 2, num_kv_heads, page_size, head_dim), the layout that FlashInfer calls HND; `k` and `v`
    are its logical views; `table` is int32 (num_seqs, max_blocks); `q` is bf16 (tokens, num_q_heads, head_dim).
    """

    def __init__(self, shape: Shape, kv_format: str, device: torch.device, seed: int = 0) -> None:
        self.shape, self.kv_format, self.device = shape, kv_format, device
        self.kv_dtype = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}[kv_format]
        random = torch.Generator(device).manual_seed(seed)
        order = torch.Generator().manual_seed(seed)
        self.blocks = [math.ceil(keys / shape.page_size) for keys in shape.lens]
        pages = sum(self.blocks)
        size = (pages, 2, shape.h_k, shape.page_size, shape.d)
        self.kv = torch.randn(size, generator=random, device=device, dtype=torch.bfloat16).to(self.kv_dtype)
        self.k, self.v = kv_views("hnd", self.kv)
        shuffled = torch.randperm(pages, generator=order).to(torch.int32)
        self.host_table = torch.zeros((len(self.blocks), max(self.blocks)), dtype=torch.int32)
        taken = 0
        for row, count in enumerate(self.blocks):
            self.host_table[row, :count] = shuffled[taken : taken + count]
            taken += count
        self.table = self.host_table.to(device)
        tokens = len(shape.lens) * shape.q_len
        self.q = torch.randn((tokens, shape.h_q, shape.d), generator=random, device=device, dtype=torch.bfloat16)

    def reference(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one sequence over the stored values, in float64 on the problem's device.

        Returns o (q_len, num_q_heads, head_dim) and lse (num_kv_heads, q_len * group_size), natural log, in the
        row order of `Plan.run`. Causal: token i sees keys up to L - q_len + i.
        """
        s = self.shape
        keys, group = s.lens[seq], s.h_q // s.h_k
        pages = self.table[seq, : self.blocks[seq]].long()
        stored = self.kv.view(torch.uint8)  # fp8 tensors know few operations
        q = self.q.view(len(s.lens), s.q_len, s.h_k, group, s.d)[seq].double()
        o = torch.empty_like(q)
        lse = torch.empty((s.h_k, s.q_len * group), dtype=torch.float64, device=self.device)
        position = torch.arange(keys, device=self.device)
        last_seen = keys - s.q_len + torch.arange(s.q_len, device=self.device)
        hidden = (position > last_seen[:, None]).repeat_interleave(group, 0)
        for head in range(s.h_k):
            k, v = (
                stored[pages, which, head].reshape(-1, stored.shape[-1]).view(self.kv_dtype)[:keys].float().double()
                for which in (0, 1)
            )
            scores = (q[:, head].reshape(-1, s.d) @ k.T * s.d**-0.5).masked_fill(hidden, -math.inf)
            o[:, head] = (scores.softmax(-1) @ v).view(s.q_len, group, s.d)
            lse[head] = scores.logsumexp(-1)
        return o.view(s.q_len, s.h_q, s.d), lse

    def rows(self, out: torch.Tensor, seq: int) -> Any:
        """A sequence's rows (q_len, num_q_heads, head_dim) of an output shaped like `q`, as a float64 array."""
        q_len = self.shape.q_len
        return out.view(self.q.shape)[seq * q_len : (seq + 1) * q_len].double().cpu().numpy()

    def checked(self) -> tuple[int, ...]:
        """Sequences that are compared with the reference: the first (the longest) and the last."""
        return tuple(dict.fromkeys((0, len(self.shape.lens) - 1)))
