"""Random tensors of a decode problem in any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cubinery.runtime.ops.paged_decode.layouts import Layout, kv_views, storage_shapes


@dataclass
class Problem:
    """CPU tensors; unused pages are poisoned with NaN, table padding with garbage."""

    lengths: list[int]
    rng: np.random.Generator
    torch: Any
    h_q: int = 8
    h_k: int = 2
    d: int = 128
    page_size: int = 16
    q_len: int = 1
    kv_format: str = "fp8"
    layout: Layout = "nhd"
    q: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)
    table: Any = field(init=False)

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
        shapes = storage_shapes(
            self.layout, num_pages=pages, page_size=self.page_size, num_kv_heads=self.h_k, row=self.d
        )
        dtype = torch.bfloat16 if self.kv_format == "bf16" else torch.float8_e4m3fn
        self.k, self.v = kv_views(self.layout, *[torch.zeros(shape).to(dtype) for shape in shapes])
        for view in (self.k, self.v):
            values = torch.from_numpy(self.rng.standard_normal(tuple(view.shape)).astype(np.float32))
            values[order[taken:]] = float("nan")
            view.copy_(values.to(dtype))
        shape = (len(self.lengths) * self.q_len, self.h_q, self.d)
        self.q = torch.from_numpy(self.rng.standard_normal(shape).astype(np.float32)).bfloat16()

    @property
    def heads(self) -> dict[str, int]:
        return {"num_q_heads": self.h_q, "num_kv_heads": self.h_k}

    @property
    def tensors(self) -> tuple[Any, Any, Any, Any]:
        return self.q, self.k, self.v, self.table
