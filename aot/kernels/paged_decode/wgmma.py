"""Paged decode with warpgroup-level MMA: Hopper, fp8 caches, many query rows a KV head.

The kernel of `mma` with one role more. Its warps each widen the codes that they multiply, so four groups of 16 rows
widen everything four times. Here

    widener    one warpgroup turns tiles of e4m3 into f16 in shared memory, once for all rows
    consumers  two warpgroups multiply from there, 64 query rows each; with a row tile of 64 each has half of a
               tile's keys. They take turns at the tensor cores and at exponentials.

Everything else, numerics included, is that of `mma`.
"""

from __future__ import annotations

from typing import Any

from cutlass import cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode import mma
from cubinery.aot.kernels.paged_decode.mma_tile import WIDE_EMPTY, WIDE_FULL
from cubinery.aot.kernels.paged_decode.wgmma_compute import WgmmaConsumer
from cubinery.aot.kernels.paged_decode.wgmma_widen import Widener
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import WgmmaConfig
from cubinery.runtime.ops.paged_decode.wgmma_config import WIDE_STAGES


class PagedDecodeWgmma(mma.PagedDecodeMma):
    """Traces the decode kernel of one configuration."""

    def __init__(self, config: WgmmaConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.consumer, self.widener = WgmmaConsumer(config, arch), Widener(config, arch)

    @cute.jit
    def init_more(self, smem, lane):
        """Barriers of the widened tiles."""
        if lane < WIDE_STAGES:
            ptx.mbarrier_init(smem + WIDE_FULL + lane * 8, self.config.widening_warps)
            ptx.mbarrier_init(smem + WIDE_EMPTY + lane * 8, self.config.consumer_warps)

    @cute.jit
    def widen(self, smem, tidx, num_stages, depth, num_keys):
        """Turn the tiles of a work item into f16."""
        cute.arch.setmaxregister_decrease(self.registers[2])
        self.widener.widen(smem, tidx - 32 * self.config.consumer_warps, num_stages, depth, num_keys)


def entry(config: WgmmaConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""
    return mma.entry(config, arch, PagedDecodeWgmma)
