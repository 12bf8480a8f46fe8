"""What every role of the warp-level MMA kernel knows: the tile's shape and where things lie in shared memory."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute

from cubinery.aot.kernels.common import cluster
from cubinery.aot.kernels.paged_decode.abi import kv_map
from cubinery.aot.kernels.paged_decode.constants import LOG2E, NEG_INF, TINY
from cubinery.aot.kernels.paged_decode.mma_kv import format_of
from cubinery.aot.kernels.paged_decode.mma_operands import operands_of
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MmaConfig

__all__ = ["LOG2E", "NEG_INF", "TINY", "MmaTile"]

# Byte offsets in the fixed part of shared memory.
FULL, EMPTY = 0, 128  # MOST_STAGES mbarriers each
OUT_SCALE = 112  # fp32: v_descale, fetched early and kept out of registers too
SCORE_SCALE = 120  # fp32: of clusters, from raw scores to those of the softmax
IS_LAST = 116  # int32: whether this CTA finished a sequence's last chunk
ROW_SCALE = 256  # fp32 [row_tile]: factor that undoes the scaling of Q; at the end what a sink leaves of O
ROW_RESULT = 768  # fp32 [row_tile][2]: a row's sink; at the end the chunk's m, in units of the LSE, and l
ROW_STATS = 1792  # fp32 [key_warps][row_tile][2]: m and l of each warp's slice
WIDE_FULL, WIDE_EMPTY = 2816, 2880  # mbarriers of widened tiles, where there are any
ITEM = 2944  # int32 [8]: the work item, see `SplitPlan.device_work`, or just its sequence (clusters); not in registers
INBOX_FULL = 2976  # mbarrier: all has come that the CTAs of a cluster send
STATS_FULL = 2984  # mbarrier: all computing warps of such a CTA have put m and l into shared memory
CONSUMER_BARRIER, START_BARRIER, RING_BARRIER = 1, 2, 3


class MmaTile:
    """Constants of one configuration, derived once."""

    def __init__(self, config: MmaConfig, arch: Arch) -> None:
        self.config = config
        self.stages = config.stages(arch)
        self.smem_bytes = config.smem_bytes(arch)
        self.registers = config.registers(arch)
        self.format = format_of(config)
        self.operands = operands_of(config)
        self.mma_dtype = self.format.mma_dtype
        self.p_log2_scale = float(self.format.p_log2_scale)
        self.box = kv_map(config, "k").box
        self.pages_per_stage = config.stage_keys // self.box[1]
        self.boxes = self.pages_per_stage * config.boxes_per_row
        assert self.boxes <= 32, "one lane issues one box"
        assert 32 % self.pages_per_stage == 0, "a warp looks up the pages of whole stages"
        self.batch_keys = 32 * self.box[1]  # whose pages the loading warp looks up at once
        self.consumer_threads = 32 * config.consumer_warps
        self.warp_keys = config.stage_keys // config.key_warps
        # Keys of one softmax step: more amortise its shuffles, fewer leave registers to O.
        self.step_keys = min(self.warp_keys, 32 if config.head_dim <= 128 else 16)
        # Short steps want as much of the cache on its way as fits: a slot of K is free once its only scores are there.
        self.frees_k_early = config.cluster > 1 and self.step_keys == self.warp_keys
        self.q_element_bytes = 2 if config.q_dtype == "bf16" else 1
        self.q_loads = config.head_dim // 16 // self.operands.q_steps
        self.q_in_registers = config.head_dim <= 128
        # Columns of O that one warp holds.
        self.o_columns = config.head_dim // (config.key_warps if config.exchanges_p else config.col_warps)
        self.o_registers = self.o_columns * self.operands.warp_rows // 32
        self.o_pad = config.merge_pitch
        self.q_smem = config.FIXED_SMEM
        self.ring = config.FIXED_SMEM + config.q_bytes
        self.inbox = self.ring + self.stages * config.stage_bytes
        self.slices_beside = config.slices_beside(arch)
        self.exchange = self.inbox + config.inbox_bytes
        self.slices = self.exchange if self.slices_beside else self.ring

    def place(self):
        """This CTA's row tile, and its rank in its cluster."""
        c = self.config
        x, _, _ = cute.arch.block_idx()
        return (x, Int32(0)) if c.cluster == 1 else cluster.place()

    def num_stages(self, key_begin, key_end):
        """Ring stages of K (and of V) that hold the keys of a work item."""
        return (key_end - key_begin + (self.config.stage_keys - 1)) // self.config.stage_keys

    def sync_consumers(self):
        """A barrier of the computing warps."""
        cute.arch.barrier(barrier_id=CONSUMER_BARRIER, number_of_threads=self.consumer_threads)

    def at_least_tiny(self, scale):
        """A positive scale that underflow has not made zero, so that -inf times it stays -inf."""
        return cute.arch.fmax(scale, TINY)

    def base(self, peak):
        """What is subtracted: a row that has seen nothing keeps -inf; subtracting 0 instead avoids inf - inf."""
        return cutlass.select_(peak == NEG_INF, Float32(0.0), peak)

    def advance(self, stage, phase, depth):
        """The next of `depth` ring slots, and its phase."""
        following = stage + 1
        wrapped = following == depth
        return (
            cutlass.select_(wrapped, Int32(0), following),
            cutlass.select_(wrapped, phase ^ 1, phase),
        )
