"""Compile-time axes of the warpgroup-level MMA decode kernel for Hopper, and the budgets that follow from them.

Shared by the builder and the runtime; imports neither torch nor the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import axis
from cubinery.runtime.ops.paged_decode.mma_config import MmaConfig

WIDE_STAGES = 3
"""Widened tiles of K or V that lie ready: one that is read, one ahead, one that is being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WgmmaConfig(MmaConfig):
    """The `wgmma` decode kernel of Hopper, for many query rows a KV head.

    One warpgroup widens e4m3 keys and values to f16 in shared memory, once for all rows; two warpgroups multiply.
    """

    impl: ClassVar[str] = "wgmma"

    head_dim: int = axis("d", choices=(128,), doc="elements of one head")
    kv_format: str = axis("kv", choices=("fp8",), doc="stored element of K and V")
    row_tile: int = axis("t", choices=(64, 128), default=64, doc="packed query rows of one CTA")
    cluster: int = axis("cl", choices=(1,), default=1, doc="CTAs that may share a sequence and merge among them")
    ctas_per_sm: int = axis("cps", choices=(1,), default=1, doc="CTAs that must fit one SM")

    def check_arch(self, arch: Arch) -> None:
        """Only Hopper has these instructions. Raises ConfigError."""
        if arch.sm != 90:
            raise self.reject(f"{arch.name} has no wgmma instructions: expected sm_90a, or the implementation 'mma'")
        MmaConfig.check_arch(self, arch)

    @property
    def widening_warps(self) -> int:
        """Warps that turn loaded tiles into f16."""
        return 4

    @property
    def wide_bytes(self) -> int:
        """Bytes of one widened tile of K or V."""
        return self.stage_keys * self.head_dim * 2

    def registers(self, arch: Arch) -> tuple[int, ...]:
        """Registers a thread of (loading, computing, widening) warps after they were moved between warpgroups."""
        return 56, 184, 88

    @property
    def lone_tile_cost(self) -> int:
        """For the planner (see its LONE_TILE_COST), by the time of a tile on an H200."""
        return 17 if self.row_tile == 64 else 29

    def stages(self, arch: Arch) -> int:
        """Ring stages that fit beside the other buffers."""
        room = arch.smem_budget(self.ctas_per_sm) - self.FIXED_SMEM - self.q_bytes - WIDE_STAGES * self.wide_bytes
        return room // self.stage_bytes

    def smem_bytes(self, arch: Arch) -> int:
        """Dynamic shared memory that a launch passes."""
        ring = self.stages(arch) * self.stage_bytes
        return self.FIXED_SMEM + self.q_bytes + ring + WIDE_STAGES * self.wide_bytes
