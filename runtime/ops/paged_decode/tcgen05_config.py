"""Compile-time axes of the tensor-memory decode kernel, and the budgets that follow from them.

Shared by the builder and the runtime; imports neither torch nor the compiler.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import axis
from cubinery.runtime.ops.paged_decode.decode_config import KV_BITS, NVFP4_BLOCK, TILE_KEYS, DecodeConfig

BLOCK_DIM = 128
"""Elements of head_dim in one ring stage: an MMA has this many rows of V, and 128 bytes are a swizzle's span."""

MAX_KV_STAGES = 16
"""Ring stages that there are barriers for: more than fit beside any Q."""

MAX_CONVERT_STAGES = 8
"""Widened stages in tensor memory that there are barriers for."""

ENOUGH_REGISTERS = 112
"""Registers that a softmax thread of up to 16 query rows needs."""

AUTO = "auto"
"""Value of `convert_warpgroups` that stands for what Q, the cache and `ctas_per_sm` ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tcgen05Config(DecodeConfig):
    """The `tcgen05` decode kernel: TMA, tensor memory and tcgen05.mma, for sm_100a, sm_103a and sm_110a.

    Scores are S^T = K Q^T with 128 keys as rows and `row_tile` columns; O^T = V^T P with 128 elements of head_dim as
    rows. With an e4m3 Q the tensor core reads the TMA ring (nvfp4: its converted copy); with a bf16 Q converter
    warpgroups widen e4m3 into tensor memory. Axes that no code here serves have one value: the selector then takes
    `mma`.
    """

    impl: ClassVar[str] = "tcgen05"

    head_dim: int = axis("d", choices=(128, 256, 512), doc="elements of one head")
    kv_format: str = axis("kv", choices=("fp8", "e3m2", "e2m3", "e2m1", "nvfp4"), doc="stored element of K and V")
    cluster: int = axis("cl", choices=(1,), default=1, doc="CTAs that may share a sequence and merge among them")
    row_tile: int = axis("t", choices=(8, 16, 32), default=16, doc="packed query rows of one CTA: the MMA's N")
    window: bool = axis("win", choices=(False,), default=False, doc="served by mma")
    sinks: bool = axis("sink", choices=(False,), default=False, doc="served by mma")
    softcap: bool = axis("cap", choices=(False,), default=False, doc="served by mma")
    q_lens: bool = axis("ql", choices=(False,), default=False, doc="served by mma")
    convert_warpgroups: int | str = axis(
        "cw", choices=(AUTO, 0, 1, 2), default=AUTO, doc="warpgroups that widen K and V; see `converters`"
    )
    max_kv_stages: int = axis(
        "st", choices=(0, *range(2, MAX_KV_STAGES + 1)), default=0, doc="most ring stages; 0 is the default depth"
    )
    l2_prefetch: int = axis("pf", choices=tuple(range(9)), default=0, doc="tiles that L2 prefetches run ahead")
    kv_evict_first: bool = axis("ef", choices=(True, False), default=False, doc="L2 evicts K and V first")

    def check(self) -> None:
        """Raise ConfigError naming the rule: what the conversion, the tensor core or the prefetch can't do."""
        if self.q_dtype == "bf16":
            if self.kv_format != "fp8":
                raise self.reject(
                    f"kv_format {self.kv_format} with q_dtype bf16: expected fp8, the format that is widened to f16; "
                    "the others take q_dtype e4m3"
                )
            if self.convert_warpgroups == 0:
                raise self.reject("convert_warpgroups = 0 with q_dtype bf16: expected at least 1, which widens K and V")
            if self.convert_warpgroups != AUTO and self.head_dim // BLOCK_DIM % self.converters:
                raise self.reject(
                    f"convert_warpgroups = {self.convert_warpgroups} with head_dim {self.head_dim}: expected a divisor "
                    f"of head_dim / {BLOCK_DIM}, so that each widens the same blocks of every tile"
                )
            return
        if self.row_tile % 16:
            raise self.reject(f"row_tile = {self.row_tile} with q_dtype e4m3: expected a multiple of 16, the MMA's N")
        expected = 1 if self.kv_format == "nvfp4" else 0
        if self.convert_warpgroups not in (AUTO, expected):
            raise self.reject(
                f"convert_warpgroups = {self.convert_warpgroups} with q_dtype e4m3 and {self.kv_format}: expected "
                f"{expected}, as the tensor core reads {'converted blocks' if expected else 'the ring itself'}"
            )
        if self.kv_format == "nvfp4" and self.l2_prefetch:
            raise self.reject(
                f"l2_prefetch = {self.l2_prefetch} with nvfp4: expected 0, as its scales are not prefetched"
            )

    def canonical(self) -> Self:
        """Like every decode's; converters that are asked for and are those of `auto` are spelt so."""
        config = DecodeConfig.canonical(self)
        automatic = dataclasses.replace(config, convert_warpgroups=AUTO)
        return automatic if automatic.converters == config.converters else config

    def check_arch(self, arch: Arch) -> None:
        """Tensor memory, registers and shared memory must suffice. Raises ConfigError naming the budget."""
        if not arch.tmem_columns:
            raise self.reject(
                f"{arch.name} ({arch.chip}) has no tensor memory: expected one that has; impl mma serves it"
            )
        where = f"at ctas_per_sm {self.ctas_per_sm} on {arch.name}"
        columns = self.accumulator_columns + (64 if self.q_dtype == "bf16" else 0)
        if columns > arch.tmem_columns // self.ctas_per_sm:
            raise self.reject(
                f"row_tile {self.row_tile} of head_dim {self.head_dim} takes {columns} columns of tensor memory: "
                f"{arch.tmem_columns // self.ctas_per_sm} are a CTA's {where}"
            )
        moved, launch = self.registers(arch), self.launch_registers(arch)
        if moved is not None and moved[-1] < max(96, launch):
            raise self.reject(
                f"row_tile {self.row_tile} with {self.converters} converting warpgroups leaves {moved[-1]} registers a "
                f"thread to the softmax {where}: expected at least {max(96, launch)}"
            )
        stages = self.kv_stages(arch)
        if stages < 2:
            raise self.reject(
                f"head_dim {self.head_dim} with {self.kv_format} and row_tile {self.row_tile} leaves {stages} ring "
                f"stages {where}: expected at least 2"
            )

    # -- roles ---------------------------------------------------------------------------------

    @property
    def converters(self) -> int:
        """Warpgroups that convert: widening e4m3 for a bf16 Q, or multiplying nvfp4 with its scales.

        Two where a lone CTA of the SM has several blocks of a tile to widen.
        """
        if self.convert_warpgroups != AUTO:
            return int(self.convert_warpgroups)
        if self.q_dtype == "e4m3":
            return 1 if self.kv_format == "nvfp4" else 0
        return 2 if self.head_dim > BLOCK_DIM and self.ctas_per_sm == 1 else 1

    @property
    def warpgroups(self) -> int:
        """One of softmax, correction and epilogue, the converters, and one whose warps issue MMAs and copies."""
        return 2 + self.converters

    @property
    def threads(self) -> int:
        """Threads of one CTA."""
        return 128 * self.warpgroups

    def launch_registers(self, arch: Arch) -> int:
        """Registers of every thread at launch, so that `ctas_per_sm` CTAs fit."""
        return min(255, arch.registers_per_sm // (self.threads * self.ctas_per_sm)) // 8 * 8

    def registers(self, arch: Arch) -> tuple[int, int, int] | None:
        """Registers of an (MMA and copy, converter, softmax) thread once they have been moved.

        None where they stay as launched: 32 query rows make the softmax warpgroup short of them, and converters where
        two CTAs share an SM. Each role gets what it compiles to without spills.
        """
        launch = self.launch_registers(arch)
        if self.row_tile < 32 and launch >= ENOUGH_REGISTERS:
            return None
        issuing = 72
        if self.ctas_per_sm == 2 and self.converters:
            issuing = 40 if self.row_tile == 32 and self.head_dim > 128 else 48
        issuing = min(launch, issuing)
        converting = min(launch, 112 if self.ctas_per_sm == 1 else 64)
        softmax = launch * self.warpgroups - issuing - converting * self.converters
        return issuing, converting, min(256, softmax // 8 * 8)

    # -- tensor memory -------------------------------------------------------------------------

    @property
    def accumulator_columns(self) -> int:
        """fp32 columns of two stages of S and of O, one block of 128 elements of head_dim after the other."""
        return (2 + self.head_dim // BLOCK_DIM) * self.row_tile

    CONVERT_COLUMNS: ClassVar[int] = 64
    """Columns of one block of K or V widened to f16: 128 lanes of 128 elements."""

    def convert_stages(self, arch: Arch) -> int:
        """Widened blocks that fit in tensor memory beside the accumulators; 0 where nothing is widened."""
        if self.q_dtype != "bf16":
            return 0
        room = arch.tmem_columns // self.ctas_per_sm - self.accumulator_columns
        return min(room // self.CONVERT_COLUMNS, 4 if self.row_tile == 32 else MAX_CONVERT_STAGES)

    def tmem_columns(self, arch: Arch) -> int:
        """Columns that a CTA allocates: what it uses, rounded up to a power of two."""
        used = self.accumulator_columns + self.CONVERT_COLUMNS * self.convert_stages(arch)
        return max(32, 1 << (used - 1).bit_length())

    # -- shared memory -------------------------------------------------------------------------

    FIXED_SMEM: ClassVar[int] = 2048
    """Barriers, then statistics of columns and what warps hand each other; a multiple of the swizzle's 1024 bytes."""

    STAGE_BYTES: ClassVar[int] = TILE_KEYS * BLOCK_DIM
    """One ring stage: 128 keys by 128 elements of K or of V, a byte each; TMA spreads narrower codes over bytes."""

    @property
    def padded(self) -> bool:
        """Whether codes below 8 bits travel as the padded types of tensor maps: 16 codes in 16 bytes."""
        return self.kv_format in ("e3m2", "e2m3", "e2m1")

    @property
    def kv_align(self) -> int:
        """Padded tensor maps want addresses and strides on 32 bytes."""
        return 32 if self.padded else 16

    @property
    def stage_tx_bytes(self) -> int:
        """What TMA credits for one stage: bytes read from memory, which shared memory may hold padded."""
        bits = 8 if self.kv_format == "nvfp4" else KV_BITS[self.kv_format]
        return self.STAGE_BYTES * bits // 8

    @property
    def packed_stages(self) -> int:
        """Stages of packed nvfp4, each of K or of V, ahead of the converter; 0 elsewhere."""
        return 2 if self.kv_format == "nvfp4" else 0

    @property
    def packed_blocks(self) -> int:
        """Blocks of 128 elements in a packed stage: a whole tile of K or V, half of one for long heads."""
        return min(2, self.head_dim // BLOCK_DIM)

    @property
    def packed_row_bytes(self) -> int:
        """Codes of one key in a packed stage."""
        return self.packed_blocks * BLOCK_DIM // 2

    @property
    def packed_scale_bytes(self) -> int:
        """Block scales of one key in a packed stage."""
        return self.packed_blocks * BLOCK_DIM // NVFP4_BLOCK

    @property
    def packed_tx_bytes(self) -> int:
        """What TMA credits for one packed stage: its codes."""
        return TILE_KEYS * self.packed_row_bytes

    @property
    def packed_stage_bytes(self) -> int:
        """One packed stage: the codes of 128 keys, then their block scales."""
        return self.packed_tx_bytes + TILE_KEYS * self.packed_scale_bytes

    @property
    def q_element_bytes(self) -> int:
        """Bytes of an element of Q, and of P."""
        return 2 if self.q_dtype == "bf16" else 1

    @property
    def q_bytes(self) -> int:
        """Shared memory for the query tile."""
        return self.row_tile * self.head_dim * self.q_element_bytes

    @property
    def p_bytes(self) -> int:
        """One of the two buffers of P: `row_tile` by 128 keys."""
        return self.row_tile * TILE_KEYS * self.q_element_bytes

    @property
    def tile_stages(self) -> int:
        """Ring stages of one tile, K and V."""
        return 2 * self.head_dim // BLOCK_DIM

    @property
    def _beside_ring(self) -> int:
        return self.FIXED_SMEM + self.q_bytes + 2 * self.p_bytes + self.packed_stages * self.packed_stage_bytes

    def kv_stages(self, arch: Arch) -> int:
        """Ring stages that the kernel has: `max_kv_stages`, or what measurements favour; as many as fit.

        By default one tile, two for a lone CTA, and whole tiles: other depths make K and V drift through the slots
        and cost DRAM streaming. With 6-bit codes of head_dim 256 two stages beat every deeper ring. So it was measured
        on Thor; a chip with more bandwidth gets as many tiles as keep it busy, by `Arch.latency_bytes`, while half of
        the ring is being read (estimated: see docs/notes/estimates.md).

        Warpgroups that widen take blocks by turns, and each must be served by stages of its own: one that meets a stage
        every other time cannot tell by a barrier's parity whether the copy for the other has landed.
        """
        depth = self._ring_room(arch)
        if self.q_dtype == "bf16":
            depth -= depth % self.converters
        return depth

    def _ring_room(self, arch: Arch) -> int:
        """Ring stages wanted, as far as they fit."""
        room = (arch.smem_budget(self.ctas_per_sm) - self._beside_ring) // self.STAGE_BYTES
        if self.max_kv_stages:
            return min(self.max_kv_stages, room)
        busy = -(-2 * arch.latency_bytes // (self.ctas_per_sm * self.stage_tx_bytes))
        if KV_BITS[self.kv_format] == 6 and self.ctas_per_sm == 2 and self.head_dim == 256 and busy <= 2:
            return min(2, room)
        tiles = max(3 - self.ctas_per_sm, -(-busy // self.tile_stages))
        depth = min(tiles * self.tile_stages, room, MAX_KV_STAGES)
        return depth if depth < self.tile_stages else depth // self.tile_stages * self.tile_stages

    def smem_bytes(self, arch: Arch) -> int:
        """Dynamic shared memory that a launch passes."""
        return self._beside_ring + self.kv_stages(arch) * self.STAGE_BYTES

    # -- the planner ---------------------------------------------------------------------------

    def ring_depth(self, arch: Arch, ctas: int) -> int:
        """All ring stages, whatever the grid: their number is the configuration's."""
        return self.kv_stages(arch)

    @property
    def lone_tile_cost(self) -> int:
        """For the planner (see its LONE_TILE_COST): that of `mma` where memory sets its pace, as it does here."""
        return 13 if self.head_dim <= 128 else 15
