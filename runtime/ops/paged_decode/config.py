"""The paged_decode family's configurations, by implementation.

Shared by the builder and the runtime; imports neither torch nor the compiler.
"""

from __future__ import annotations

from cubinery.runtime.config import KernelConfig
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.decode_config import (
    HEAD_DIMS,
    KV_BITS,
    LARGEST_COST,
    MAX_SPLITS,
    NVFP4_BLOCK,
    TILE_KEYS,
    DecodeConfig,
)
from cubinery.runtime.ops.paged_decode.mma_config import MOST_STAGES, MOST_WARPS, MmaConfig
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.tcgen05_config import Tcgen05Config
from cubinery.runtime.ops.paged_decode.wgmma_config import WgmmaConfig

__all__ = [
    "CONFIGS",
    "HEAD_DIMS",
    "KV_BITS",
    "LARGEST_COST",
    "MAX_SPLITS",
    "MOST_STAGES",
    "MOST_WARPS",
    "NVFP4_BLOCK",
    "TILE_KEYS",
    "DecodeConfig",
    "MmaConfig",
    "Tcgen05Config",
    "WgmmaConfig",
]

CONFIGS: dict[str, type[KernelConfig]] = {
    c.impl: c for c in (MmaConfig, WgmmaConfig, Tcgen05Config, AppendConfig, PlanConfig)
}
