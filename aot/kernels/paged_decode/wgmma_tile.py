"""What every role of the warpgroup-level MMA kernel knows beside what `mma` knows."""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.mma_tile import MmaTile
from cubinery.aot.kernels.paged_decode.wgmma_format import PITCH
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import WgmmaConfig


class WgmmaTile(MmaTile):
    """Constants of one configuration, derived once."""

    config: WgmmaConfig

    def __init__(self, config: WgmmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.wide = self.ring + self.stages * config.stage_bytes
        """Where widened tiles begin, behind the ring."""
        self.block_bytes = config.stage_keys * PITCH
        """Bytes of 64 columns of a widened tile."""
