"""What every role of the tensor-memory kernel knows: the tile's shape, and where things lie."""

from __future__ import annotations

import math

import cutlass
from cutlass import cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.paged_decode.constants import TINY
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.decode_config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM, Tcgen05Config

SOFTMAX_WARPS = 4
SOFTMAX_BARRIER = 1

# Byte offsets in the fixed part of shared memory.
FULL, EMPTY = 0, 128  # mbarriers of the ring, one a stage
S_FULL, P_FULL, O_DONE = 256, 272, 288  # two mbarriers each: a buffer of S is written, one of P is, its product is done
Q_FULL = 304  # mbarrier: Q lies in shared memory
TMEM = 312  # int32: address of this CTA's tensor memory
IS_LAST = 316  # int32: whether this CTA finished a sequence's last chunk
ITEM = 320  # int32 [4]: sequence, first key, end key, keys of the sequence
ITEM_END = 336  # int32 [4]: partial slot, chunks of the sequence, its first slot
FACTORS = 352  # fp32 [2]: from raw scores to LSE units; v_descale
WIDE_FULL, WIDE_EMPTY = 384, 448  # mbarriers of the blocks that are widened in tensor memory
PACKED_FULL, PACKED_EMPTY = 512, 528  # two mbarriers each: tiles of packed codes, ahead of their converter
MAXIMA = 640  # fp32 [2][row_tile]: running maxima of raw scores; even tiles raise the first, odd ones the second
LIMITS = 896  # int32 [row_tile]: end of each row's visible keys
SUMS = 1024  # fp32 [4 warps][row_tile]: each warp's part of l
ROW_FACTOR = 1536  # fp32 [row_tile]: what O is multiplied with
ROW_OFFSET = 1664  # int64 [row_tile]: where a row of O begins, in bytes from the sequence's first
ROW_SCALE = 1920  # fp32 [row_tile]: what undoes the scaling of a row of Q, where K and V are widened


class Tile:
    """Constants of one configuration, derived once."""

    def __init__(self, config: Tcgen05Config, arch: Arch) -> None:
        self.config = config
        self.stages = config.kv_stages(arch)
        self.smem_bytes = config.smem_bytes(arch)
        self.registers = config.registers(arch)
        self.launch_registers = config.launch_registers(arch)
        self.softmax_registers = self.launch_registers if self.registers is None else self.registers[2]
        self.tmem_columns = config.tmem_columns(arch)
        self.rows = config.row_tile
        self.blocks = config.head_dim // BLOCK_DIM
        """Ring stages of K, and of V, of one tile."""
        self.page_boxes = TILE_KEYS // config.page_size
        """TMA boxes of one stage, one a page."""
        self.columns = config.row_tile // 4
        """Columns of S, P and O that one thread holds of four keys: 8i + 2t and 8i + 2t + 1, t being lane % 4."""
        self.q_smem = config.FIXED_SMEM
        self.p_smem = self.q_smem + config.q_bytes
        self.packed = self.p_smem + 2 * config.p_bytes
        self.ring = self.packed + config.packed_stages * config.packed_stage_bytes
        self.widens = config.q_dtype == "bf16"
        """Whether K and V reach the tensor core as f16 in tensor memory, K-major both."""
        self.keys_end_page = config.kv_format == "fp8"
        """Whether the keys of a sequence's last page lie at the end of the page's place in a tile, behind zeros.

        TMA then brings nothing from past the sequence's end, where memory may hold NaN: P = 0 does not undo a NaN of
        V. Codes below 8 bits have none, and nvfp4 gets scales of zero there.
        """
        self.wide_stages = config.convert_stages(arch)
        self.kind = "f16" if self.widens else "f8f6f4"
        kv = "e4m3" if config.kv_format in ("fp8", "nvfp4") else config.kv_format
        a, b = ("f16", "f16") if self.widens else (kv, "e4m3")
        self.score_instruction = tc.instruction(a, b, TILE_KEYS, self.rows)
        self.output_instruction = tc.instruction(
            a, b, BLOCK_DIM, self.rows, a_mn_major=not self.widens, b_mn_major=True
        )
        self.kv_matrix = tc.Matrix("128B", 0, 1024)
        """A ring stage: rows of 128 bytes. K-major for K, MN-major for V."""
        self.q_matrix = tc.Matrix("128B", 0, 1024)
        self.p_matrix = tc.Matrix("none", 128, 16 * TILE_KEYS)
        """P: planes of 16 bytes a key."""
        self.kv_factor = 8.0 if config.kv_format == "nvfp4" else 1.0
        """What K and V lack of their values when they reach the tensor core."""
        self.p_log2_scale = 15.0 if self.widens else math.log2(448.0)
        """P is written as f16 of 2^15 or e4m3 of 448 times itself, so that small probabilities stay normal."""

    def s_column(self, slot):
        """First column of a buffer of S."""
        return slot * self.rows

    def o_column(self, block):
        """First column of a block of O."""
        return (2 + block) * self.rows

    def wide_column(self, slot):
        """First column of a block that was widened."""
        return self.config.accumulator_columns + slot * self.config.CONVERT_COLUMNS

    def sync_softmax(self):
        """A barrier of the softmax warps."""
        cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=32 * SOFTMAX_WARPS)

    def arrive(self, barrier):
        """One arrival of a warp, after what all its lanes did."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            ptx.mbarrier_arrive(barrier)

    def at_least_tiny(self, scale):
        """A positive scale that underflow has not made zero, so that -inf times it stays -inf."""
        return cute.arch.fmax(scale, TINY)

    def advance(self, stage, phase, stages, step=1):
        """The stage `step` further in a ring of no fewer, and its phase."""
        assert step <= stages, "once around the ring at most"
        following = stage + step
        wrapped = following >= stages
        return cutlass.select_(wrapped, following - stages, following), cutlass.select_(wrapped, phase ^ 1, phase)
