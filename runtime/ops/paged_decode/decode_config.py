"""The compile-time axes that every decode kernel has, and what the planner and the public call ask of one.

Shared by the builder and the runtime; imports neither torch nor the compiler.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig, axis
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig

TILE_KEYS = 128
"""Keys of one tile: the unit in which the planner cuts sequences into chunks."""

NVFP4_BLOCK = 16
"""Consecutive elements along head_dim that share one nvfp4 scale."""

KV_BITS = {"bf16": 16, "fp8": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4, "nvfp4": 4}
"""Bits of one stored K or V element, by kv_format."""

HEAD_DIMS = (64, 128, 256, 512)
"""Elements of one head that the kernels are written for."""

MAX_SPLITS = 1024
"""Most chunks that one sequence may be cut into: more than the CTAs of any GPU here. Merging loops over them."""

LARGEST_COST = 1 << 16
"""What a tile or an item may cost the planner, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig(KernelConfig, ABC):
    """A decode kernel of any implementation. Each redeclares the axes whose values it serves only in part."""

    family: ClassVar[str] = "paged_decode"

    head_dim: int = axis("d", choices=HEAD_DIMS, doc="elements of one head")
    page_size: int = axis("p", choices=(16, 32, 64, 128), doc="keys in one page of the cache")
    kv_format: str = axis("kv", choices=tuple(KV_BITS), doc="stored element of K and V")
    q_dtype: str = axis("qt", choices=("bf16", "e4m3"), default="bf16", doc="element of Q")
    q_len: int = axis("q", choices=tuple(range(1, 17)), default=1, doc="new tokens per sequence")
    causal: bool = axis("causal", choices=(True, False), default=True, doc="token i sees keys up to L - q_len + i")
    row_tile: int = axis("t", choices=(8, 16, 32, 64, 128), default=16, doc="packed query rows of one CTA")
    ctas_per_sm: int = axis("cps", choices=(1, 2), default=2, doc="CTAs that must fit one SM")
    pdl: bool = axis("pdl", choices=(True, False), default=False, doc="programmatic dependent launch")
    window: bool = axis("win", choices=(True, False), default=False, doc="token i sees so many keys up to its last")
    sinks: bool = axis("sink", choices=(True, False), default=False, doc="a logit a head in the softmax sum alone")
    softcap: bool = axis("cap", choices=(True, False), default=False, doc="scores are cap * tanh(score / cap)")
    q_lens: bool = axis("ql", choices=(True, False), default=False, doc="a sequence brings q_len tokens or fewer")
    cluster: int = axis("cl", choices=(1, 16), default=1, doc="CTAs that may share a sequence and merge among them")

    def canonical(self) -> Self:
        """Without a causal mask the kernel does not depend on q_len, and with one token there is no mask."""
        if not self.causal:
            return dataclasses.replace(self, q_len=1, causal=True)
        return self

    def requires(self) -> tuple[KernelConfig, ...]:
        """The kernel that plans on the device."""
        return (PlanConfig(),)

    def reject(self, what: str) -> ConfigError:
        """The error of a rule that this configuration breaks; `what` gives the values and the expectation."""
        return ConfigError(f"{self.family}.{self.impl}: {what}")

    # -- derived, never enumerated -------------------------------------------------------------

    @property
    def row_bytes(self) -> int:
        """Bytes of one key's K or V of one head, packed."""
        return self.head_dim * KV_BITS[self.kv_format] // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of one key's block scales."""
        return self.head_dim // NVFP4_BLOCK if self.kv_format == "nvfp4" else 0

    @property
    def kv_align(self) -> int:
        """Bytes on which the caches' addresses and their page, row and head strides must lie, for TMA."""
        return 16

    @property
    def expected_keys(self) -> bool:
        """Whether a launch says how many keys each sequence probably has: pages are then looked up at once."""
        return self.cluster > 1 and not self.window

    @property
    @abstractmethod
    def threads(self) -> int:
        """Threads of one CTA."""

    @property
    @abstractmethod
    def lone_tile_cost(self) -> int:
        """For the planner (see its LONE_TILE_COST)."""

    @property
    def item_cost(self) -> int:
        """For the planner (see its ITEM_COST): what an SM reads in that time, in sixteenths of a tile of K and V.

        By plans of several waves on an H200, 10 us where an SM has one CTA; where it has two, the other goes on.
        """
        read = (352 if self.ctas_per_sm == 1 else 160) * 1024
        return 16 * read // (2 * TILE_KEYS * (self.row_bytes + self.scale_bytes))

    @abstractmethod
    def ring_depth(self, arch: Arch, ctas: int) -> int:
        """Ring stages to use in a grid of so many CTAs."""

    @abstractmethod
    def smem_bytes(self, arch: Arch) -> int:
        """Dynamic shared memory that a launch passes."""

    def tmem_columns(self, arch: Arch) -> int:
        """Columns of tensor memory that one CTA allocates: 0, or a power of two from 32."""
        return 0
