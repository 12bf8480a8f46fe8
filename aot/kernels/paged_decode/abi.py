"""What a launch of each paged-decode kernel looks like: declared here, checked against the PTX at build.

Imports no compiler, so that a plan or a cached build costs nothing. Each implementation has a file of its own, so that
a change of one leaves the others' cached builds valid.
"""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.append_abi import append_record
from cubinery.aot.kernels.paged_decode.decode_abi import optional_params, scale_params
from cubinery.aot.kernels.paged_decode.mma_abi import kv_map, mma_record
from cubinery.aot.kernels.paged_decode.plan_abi import plan_record
from cubinery.aot.kernels.paged_decode.tcgen05_abi import tcgen05_kv_map, tcgen05_record
from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.manifest import KernelRecord
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import MmaConfig, Tcgen05Config
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig

__all__ = ["declare", "kv_map", "optional_params", "scale_params", "tcgen05_kv_map"]


def declare(config: KernelConfig, arch: Arch) -> KernelRecord:
    """The launch record of a configuration, without resources (the builder reads those back)."""
    if isinstance(config, AppendConfig):
        return append_record(config)
    if isinstance(config, PlanConfig):
        return plan_record(config)
    if isinstance(config, Tcgen05Config):
        return tcgen05_record(config, arch)
    assert isinstance(config, MmaConfig)
    return mma_record(config, arch)
