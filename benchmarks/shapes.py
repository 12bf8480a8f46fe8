"""The decode problems that are measured, and their tensors."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from cubinery.runtime.ops.paged_decode.formats import ELEMENTS, NVFP4_BLOCK
from cubinery.runtime.ops.paged_decode.layouts import kv_views, storage_shapes
from cubinery.runtime.ops.paged_decode.quantize import QuantizedKv, dequantize_kv, quantize_kv

DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
"""Formats with a dtype of their own in torch, which peers serve too."""

NARROW = ("e3m2", "e2m3", "e2m1", "nvfp4")
"""Packed formats, narrower than a byte."""


def row_bytes(kv_format: str, head_dim: int) -> int:
    """Bytes of one key's K, or V, of one head, without block scales."""
    bits = 16 if kv_format == "bf16" else ELEMENTS[kv_format].bits
    return head_dim * bits // 8


def scale_bytes(kv_format: str, head_dim: int) -> int:
    """Bytes of block scales beside one such row."""
    return head_dim // NVFP4_BLOCK if kv_format == "nvfp4" else 0


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
        """Bytes of K and V, packed, with their block scales, that one step must read."""
        return sum(self.lens) * self.h_k * 2 * (row_bytes(kv_format, self.d) + scale_bytes(kv_format, self.d))


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

    `kv` is (num_pages, 2, num_kv_heads, page_size, row), the layout that FlashInfer calls HND; row is head_dim
    elements, or the packed bytes of a narrow format. `k` and `v` are its logical views. `k_scales` and `v_scales`
    are e4m3 (num_pages, page_size, num_kv_heads, head_dim / 16) views for nvfp4, else None. Every descale is 1.
    `table` is int32 (num_seqs, max_blocks); `q` is bf16 (tokens, num_q_heads, head_dim).
    """

    def __init__(self, shape: Shape, kv_format: str, device: torch.device, seed: int = 0) -> None:
        self.shape, self.kv_format, self.device = shape, kv_format, device
        self.kv_dtype = DTYPES.get(kv_format, torch.uint8)
        random = torch.Generator(device).manual_seed(seed)
        order = torch.Generator().manual_seed(seed)
        self.blocks = [math.ceil(keys / shape.page_size) for keys in shape.lens]
        pages = sum(self.blocks)
        self.k_scales: torch.Tensor | None = None
        self.v_scales: torch.Tensor | None = None
        if kv_format in DTYPES:
            size = (pages, 2, shape.h_k, shape.page_size, shape.d)
            self.kv = torch.randn(size, generator=random, device=device, dtype=torch.bfloat16).to(self.kv_dtype)
            self.k, self.v = kv_views("hnd", self.kv)
        else:
            self._quantize(pages, random)
        shuffled = torch.randperm(pages, generator=order).to(torch.int32)
        self.host_table = torch.zeros((len(self.blocks), max(self.blocks)), dtype=torch.int32)
        taken = 0
        for row, count in enumerate(self.blocks):
            self.host_table[row, :count] = shuffled[taken : taken + count]
            taken += count
        self.table = self.host_table.to(device)
        tokens = len(shape.lens) * shape.q_len
        self.q = torch.randn((tokens, shape.h_q, shape.d), generator=random, device=device, dtype=torch.bfloat16)

    def _quantize(self, pages: int, random: torch.Generator) -> None:
        """K, V and block scales of a narrow format, from random bf16."""
        s = self.shape

        def storage(row: int) -> torch.Tensor:
            (size,) = storage_shapes("hnd", num_pages=pages, page_size=s.page_size, num_kv_heads=s.h_k, row=row)
            return torch.empty(size, dtype=torch.uint8, device=self.device)

        self.kv = storage(row_bytes(self.kv_format, s.d))
        self.k, self.v = kv_views("hnd", self.kv)
        scales = None
        if self.kv_format == "nvfp4":
            scales = kv_views("hnd", storage(scale_bytes(self.kv_format, s.d)))
            self.k_scales, self.v_scales = (view.view(torch.float8_e4m3fn) for view in scales)
        one = torch.ones(1 if scales else s.h_k, device=self.device)
        for which, view in enumerate((self.k, self.v)):
            x = torch.randn(
                (pages, s.page_size, s.h_k, s.d), generator=random, device=self.device, dtype=torch.bfloat16
            )
            found = quantize_kv(x, self.kv_format, one)
            view.copy_(found.data)
            if scales:
                scales[which].copy_(found.block_scales)

    def _values(self, which: int, seq: int, head: int) -> torch.Tensor:
        """What one head of a sequence's K (0) or V (1) stands for: float64 (keys, head_dim)."""
        pages = self.table[seq, : self.blocks[seq]].long()
        codes = self.kv.view(torch.uint8)[pages, which, head]  # fp8 tensors know few operations
        if self.kv_format in DTYPES:
            found = codes.view(self.kv_dtype).float()
        else:
            scales = (self.k_scales, self.v_scales)[which]
            block = None if scales is None else scales.view(torch.uint8)[pages, :, head, None]
            one = torch.ones(1, device=self.device)
            found = dequantize_kv(QuantizedKv(self.kv_format, codes[:, :, None], one, block))
        return found.reshape(-1, self.shape.d)[: self.shape.lens[seq]].double()

    def reference(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one sequence over the stored values, in float64 on the problem's device.

        Returns o (q_len, num_q_heads, head_dim) and lse (num_kv_heads, q_len * group_size), natural log, in the
        row order of `Plan.run`. Causal: token i sees keys up to L - q_len + i.
        """
        s = self.shape
        keys, group = s.lens[seq], s.h_q // s.h_k
        q = self.q.view(len(s.lens), s.q_len, s.h_k, group, s.d)[seq].double()
        o = torch.empty_like(q)
        lse = torch.empty((s.h_k, s.q_len * group), dtype=torch.float64, device=self.device)
        position = torch.arange(keys, device=self.device)
        last_seen = keys - s.q_len + torch.arange(s.q_len, device=self.device)
        hidden = (position > last_seen[:, None]).repeat_interleave(group, 0)
        for head in range(s.h_k):
            k, v = (self._values(which, seq, head) for which in (0, 1))
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
