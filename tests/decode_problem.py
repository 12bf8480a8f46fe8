"""Random tensors of a decode problem in any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cubinery.runtime.ops.paged_decode.layouts import Layout, kv_views, storage_shapes
from cubinery.runtime.ops.paged_decode.quantize import quantize_kv


@dataclass
class Problem:
    """CPU tensors; unused pages hold NaN (or a format's largest value), table padding garbage."""

    lengths: list[int]
    rng: np.random.Generator
    torch: Any
    h_q: int = 8
    h_k: int = 2
    d: int = 128
    page_size: int = 16
    q_len: int = 1
    kv_format: str = "fp8"
    q_dtype: str = "bf16"
    layout: Layout = "nhd"
    q: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)
    table: Any = field(init=False)
    scales: dict[str, Any] = field(init=False, default_factory=dict)
    """Block scales of nvfp4, by their names in `Plan.run`."""

    def __post_init__(self) -> None:
        torch = self.torch
        blocks = [-(-n // self.page_size) for n in self.lengths]
        pages = sum(blocks) + 3
        order = self.rng.permutation(pages)
        table = np.full((len(self.lengths), max(blocks) + 2), -(2**31), np.int32)
        taken = 0
        for row, count in enumerate(blocks):
            table[row, :count] = order[taken : taken + count]
            taken += count
        self.table = torch.from_numpy(table)
        scale = None if self.kv_format == "bf16" else torch.ones(1 if self.kv_format == "nvfp4" else self.h_k)
        stored = []
        for _ in "kv":
            values = torch.from_numpy(
                self.rng.standard_normal((pages, self.page_size, self.h_k, self.d)).astype(np.float32)
            )
            values[order[taken:]] = float("nan")
            stored.append(quantize_kv(values, self.kv_format, scale))
        row, dtype = stored[0].data.shape[-1], stored[0].data.dtype
        shapes = storage_shapes(self.layout, num_pages=pages, page_size=self.page_size, num_kv_heads=self.h_k, row=row)
        self.k, self.v = kv_views(self.layout, *[torch.zeros(shape).to(dtype) for shape in shapes])
        self.k.copy_(stored[0].data)
        self.v.copy_(stored[1].data)
        if self.kv_format == "nvfp4":
            self.scales = {"k_scales": stored[0].block_scales, "v_scales": stored[1].block_scales}
        shape = (len(self.lengths) * self.q_len, self.h_q, self.d)
        q = torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32))
        self.q = q.bfloat16() if self.q_dtype == "bf16" else q.to(torch.float8_e4m3fn)

    def poison_tails(self) -> None:
        """NaN past each sequence's end in its last page, also in block scales; bytes of 0x7F where there is none."""
        for seq, length in enumerate(self.lengths):
            if length % self.page_size:
                page, row = int(self.table[seq, length // self.page_size]), length % self.page_size
                for cache in (self.k, self.v, *self.scales.values()):
                    tail = cache[page, row:]
                    tail.copy_(self.torch.full_like(tail, float("nan") if tail.is_floating_point() else 0x7F))

    @property
    def heads(self) -> dict[str, int]:
        return {"num_q_heads": self.h_q, "num_kv_heads": self.h_k}

    @property
    def tensors(self) -> tuple[Any, Any, Any, Any]:
        return self.q, self.k, self.v, self.table
