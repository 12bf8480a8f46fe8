"""Compile-time axes of the cache writer; imports neither numpy, torch nor the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cubinery.runtime.config import KernelConfig, axis


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendConfig(KernelConfig):
    """The kernel that quantises new K and V and appends them to a paged cache of any page size and layout."""

    family: ClassVar[str] = "paged_decode"
    impl: ClassVar[str] = "append"

    head_dim: int = axis("d", choices=(64, 128, 256, 512), doc="elements of one head")
    kv_format: str = axis(
        "kv", choices=("bf16", "fp8", "e3m2", "e2m3", "e2m1", "nvfp4"), doc="stored element of K and V"
    )
    pdl: bool = axis("pdl", choices=(True, False), default=False, doc="programmatic dependent launch")

    # -- derived, never enumerated -------------------------------------------------------------

    THREADS: ClassVar[int] = 256
    """Threads of a CTA."""

    @property
    def thread_elements(self) -> int:
        """Consecutive elements of one row of K, and of the same row of V, that a thread reads and stores.

        16 are a block of nvfp4, and fill whole words in every coded format; 8 of bf16 are one vector access.
        """
        return 8 if self.kv_format == "bf16" else 16

    @property
    def row_threads(self) -> int:
        """Threads that share one row: a power of two, at least 4."""
        return self.head_dim // self.thread_elements

    def ctas(self, rows: int) -> int:
        """CTAs for so many rows (tokens times KV heads)."""
        return -(-rows * self.row_threads // self.THREADS)
