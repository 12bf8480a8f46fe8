"""Decode problems on any device: caches in every layout, with poison wherever a kernel must not look.

Unused pages and rows past a sequence's end hold NaN, in K and in V; padding of the block table holds garbage;
outputs and workspace start as NaN between guard bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from gpu.stored import Rows, is_packed, load, poison, row_dtype, row_length, store

from cubinery.runtime.ops.paged_decode.layouts import Layout, kv_views, storage_shapes

GARBAGE = np.array([-1, 2**31 - 1, -(2**31), 123456789], np.int32)
"""What fills a block table past the sequence's end."""
GUARD = 0xA5
GUARD_BYTES = 512


@dataclass
class Case:
    """One problem. The same fields and seed give the same content in every layout."""

    lengths: Sequence[int]
    device: torch.device
    h_q: int = 8
    h_k: int = 2
    d: int = 128
    page_size: int = 16
    kv_format: str = "fp8"
    q_dtype: str = "bf16"
    q_len: int = 1
    causal: bool = True
    layout: Layout = "hnd"
    seed: int = 0
    k_std: float = 1.0
    spare_blocks: int = 2
    """Columns of the block table past the longest sequence."""
    shared_pages: bool = False
    """All sequences read the same pages, so tails of shorter ones hold values instead of NaN."""
    window: int | None = None
    """Keys that a token sees; pages before that hold poison, and their entries of the block table garbage."""
    softcap: float | None = None
    with_sinks: bool = False
    with_q_lens: bool = False
    """Sequences bring 0 to q_len tokens; the queries of the others hold NaN."""
    sinks: torch.Tensor | None = field(init=False, default=None)
    q_lens: torch.Tensor | None = field(init=False, default=None)
    q: torch.Tensor = field(init=False)
    k: torch.Tensor = field(init=False)
    """The logical view (num_pages, page_size, h_k, d) that a kernel is given."""
    v: torch.Tensor = field(init=False)
    raw: dict[str, torch.Tensor] = field(init=False)
    """The same memory as `k` and `v` in a dtype that torch can index: uint8 codes or packed bytes, or bfloat16."""
    scales: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    """Block scales of nvfp4, e4m3 codes (num_pages, page_size, h_k, d / 16), by their names in `Plan.run`."""
    table: torch.Tensor = field(init=False)
    live: torch.Tensor = field(init=False)
    """(num_pages, page_size): rows that some sequence holds."""

    def __post_init__(self) -> None:
        self.lengths = [int(n) for n in self.lengths]
        rng = np.random.default_rng(self.seed)
        generator = torch.Generator(self.device).manual_seed(self.seed)
        tokens = self._axes()
        table, live = self._place(rng)
        if self.window is not None:
            self._forget(table, live, tokens)
        self.table = torch.from_numpy(table).to(self.device)
        self.live = torch.from_numpy(live).to(self.device)
        logical = (len(live), self.page_size, self.h_k, self.d)
        shapes = storage_shapes(
            self.layout, num_pages=len(live), page_size=self.page_size, num_kv_heads=self.h_k,
            row=row_length(self.kv_format, self.d),
        )  # fmt: skip
        dtype = row_dtype(self.kv_format)
        views = kv_views(self.layout, *[torch.empty(shape, dtype=dtype, device=self.device) for shape in shapes])
        self.raw = dict(zip("kv", views, strict=True))
        if self.kv_format == "nvfp4":
            self.scales = {f"{name}_scales": self._block_scales(logical) for name in "kv"}
        everything = torch.ones_like(self.live)
        for name, std in (("k", self.k_std), ("v", 1.0)):
            values = torch.randn(logical, generator=generator, device=self.device) * std
            stored = store(values, self.kv_format)
            self.put(name, everything, Rows(*(x if x is None else x.flatten(0, 1) for x in stored)))
            self.put(name, ~self.live, poison(self.kv_format, self.d, self.device))
        self.k, self.v = (self.kernel_view(self.raw[name]) for name in "kv")
        shape = (len(self.lengths) * self.q_len, self.h_q, self.d)
        q = torch.randn(shape, generator=generator, device=self.device)
        for seq, count in enumerate(tokens):
            q.view(len(tokens), self.q_len, self.h_q, self.d)[seq, count:] = float("nan")
        self.q = q.bfloat16() if self.q_dtype == "bf16" else q.to(torch.float8_e4m3fn)

    def _axes(self) -> list[int]:
        """Sinks and new tokens of each sequence, from a generator of their own; returns the latter."""
        rng = np.random.default_rng(self.seed + 77)
        tokens = [self.q_len] * len(self.lengths)
        if self.with_sinks:
            self.sinks = torch.from_numpy(rng.uniform(-2, 4, self.h_q).astype(np.float32)).to(self.device)
        if self.with_q_lens:
            tokens = rng.integers(0, self.q_len + 1, len(tokens)).tolist()
            self.q_lens = torch.tensor(tokens, dtype=torch.int32, device=self.device)
        return tokens

    def _forget(self, table: np.ndarray, live: np.ndarray, tokens: Sequence[int]) -> None:
        """Let go of the pages that lie wholly before the window of their sequence's first token."""
        assert self.window is not None
        assert not self.shared_pages, "a page that one sequence lets go would be another's"
        for seq, (length, count) in enumerate(zip(self.lengths, tokens, strict=True)):
            gone = max(0, length - count + 1 - self.window) // self.page_size
            live[table[seq, :gone]] = False
            table[seq, :gone] = GARBAGE[np.arange(gone) % len(GARBAGE)]

    def _block_scales(self, logical: tuple[int, int, int, int]) -> torch.Tensor:
        """Room for block scales, heads outside of rows where the cache has it so."""
        pages, rows, heads, d = logical
        if self.layout in ("nhd", "flashinfer"):
            return torch.empty((pages, rows, heads, d // 16), dtype=torch.uint8, device=self.device)
        return torch.empty((pages, heads, rows, d // 16), dtype=torch.uint8, device=self.device).transpose(1, 2)

    def _place(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """(block table, live rows): pages in random order, garbage past each sequence's end."""
        blocks = [-(-n // self.page_size) for n in self.lengths]
        used = max(blocks) if self.shared_pages else sum(blocks)
        order = rng.permutation(used + 3).astype(np.int32)
        shape = (len(blocks), max(blocks) + self.spare_blocks)
        table = GARBAGE[rng.integers(0, len(GARBAGE), shape)]
        live = np.zeros((used + 3, self.page_size), bool)
        taken = 0
        for seq, (count, length) in enumerate(zip(blocks, self.lengths, strict=True)):
            pages = order[:count] if self.shared_pages else order[taken : taken + count]
            table[seq, :count] = pages
            keys = np.arange(length)
            live[pages[keys // self.page_size], keys % self.page_size] = True
            taken += count
        return table, live

    # -- content -------------------------------------------------------------------------------

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Floats as the cache stores them; for formats of at least 8 bits, whose rows need not be whole."""
        assert not is_packed(self.kv_format)
        return store(values, self.kv_format).data

    def put(self, name: str, where: Any, rows: Rows) -> None:
        """Stored rows of K or V, with their block scales, at an index of (num_pages, page_size)."""
        self.raw[name][where] = rows.data
        if rows.scales is not None:
            self.scales[f"{name}_scales"][where] = rows.scales

    def kernel_view(self, raw: torch.Tensor) -> torch.Tensor:
        """Stored elements as a kernel takes them."""
        return raw.view(torch.float8_e4m3fn) if self.kv_format == "fp8" else raw

    def fill(self, name: str, value: float) -> None:
        """One value in every live row of K or V; poison stays."""
        self.put(name, self.live, store(torch.full((self.d,), value, device=self.device), self.kv_format))

    def rows(self, seq: int, positions: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """(page, row in page) of keys of a sequence."""
        keys = torch.as_tensor(positions, device=self.device, dtype=torch.long)
        return self.table[seq].long()[keys // self.page_size], keys % self.page_size

    def held(self, seq: int, positions: Sequence[int]) -> list[int]:
        """Those of a sequence's keys whose page it still has: a window lets the ones before it go."""
        pages = self.table[seq].tolist()
        return [key for key in positions if 0 <= pages[key // self.page_size] < len(self.live)]

    def write(self, name: str, seq: int, positions: Sequence[int], values: torch.Tensor | float) -> None:
        """Rows of K or V at some keys of a sequence; `values` broadcasts to (len(positions), h_k, d)."""
        rows = torch.as_tensor(values, dtype=torch.float32, device=self.device)
        rows = rows.expand(torch.broadcast_shapes(rows.shape, (self.d,)))
        self.put(name, self.rows(seq, positions), store(rows, self.kv_format))

    def read(self, name: str, seq: int, positions: Sequence[int]) -> torch.Tensor:
        """fp32 (len(positions), h_k, d) of K or V at some keys of a sequence."""
        where = self.rows(seq, positions)
        scales = self.scales[f"{name}_scales"][where] if self.scales else None
        return load(Rows(self.raw[name][where], scales), self.kv_format)

    # -- for the call --------------------------------------------------------------------------

    @property
    def group(self) -> int:
        return self.h_q // self.h_k

    @property
    def heads(self) -> dict[str, int]:
        return {"num_q_heads": self.h_q, "num_kv_heads": self.h_k}

    @property
    def extras(self) -> dict[str, torch.Tensor]:
        """What `Plan.run` takes besides `tensors`, for the axes that this problem uses."""
        found = {"sinks": self.sinks, "q_lens": self.q_lens}
        return self.scales | {name: tensor for name, tensor in found.items() if tensor is not None}

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v, self.table

    def rows_of(self, out: torch.Tensor) -> torch.Tensor:
        """O as (num_seqs, h_k, q_len, group, d)."""
        split = out.reshape(len(self.lengths), self.q_len, self.h_k, self.group, self.d)
        return split.transpose(1, 2)


class Guarded:
    """A contiguous tensor of 0xFF bytes (NaN in bf16 and fp32) between guard bytes."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        size = int(np.prod(shape)) * dtype.itemsize
        self.memory = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        inner = self.memory[GUARD_BYTES : GUARD_BYTES + size]
        inner.fill_(0xFF)
        self.tensor = inner.view(dtype).view(tuple(shape))

    def check(self, what: str) -> None:
        """Nothing was written outside. Waits for the device."""
        edges = torch.cat([self.memory[:GUARD_BYTES], self.memory[-GUARD_BYTES:]])
        assert bool((edges == GUARD).all()), f"bytes beside {what} were overwritten"


def same_bits(a: Any, b: Any) -> bool:
    """Equal shape and equal bytes: distinguishes zeros by sign, and NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
