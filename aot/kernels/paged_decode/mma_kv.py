"""The class that serves each kv_format."""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.mma_formats import Bf16, E2m1, Format, Fp8
from cubinery.aot.kernels.paged_decode.mma_formats_nvfp4 import Nvfp4
from cubinery.aot.kernels.paged_decode.mma_formats_six import E2m3, E3m2
from cubinery.aot.kernels.paged_decode.wgmma_format import Widened
from cubinery.runtime.ops.paged_decode.config import MmaConfig, WgmmaConfig

FORMATS: dict[str, type[Format]] = {"bf16": Bf16, "fp8": Fp8, "e3m2": E3m2, "e2m3": E2m3, "e2m1": E2m1, "nvfp4": Nvfp4}
"""By kv_format."""


def format_of(config: MmaConfig) -> Format:
    """How a configuration's stored elements become operands."""
    return Widened(config) if isinstance(config, WgmmaConfig) else FORMATS[config.kv_format](config)
