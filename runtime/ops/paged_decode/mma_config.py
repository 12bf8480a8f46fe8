"""Compile-time axes of the warp-level MMA decode kernel, and the budgets that follow from them.

Shared by the builder and the runtime; imports neither torch nor the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import axis
from cubinery.runtime.ops.paged_decode.decode_config import KV_BITS, TILE_KEYS, DecodeConfig

MOST_WARPS = 8
"""Warps of an SM that compute, shared out among its CTAs: as many as its registers feed."""

MOST_CLUSTER_ROWS = 32
"""Query rows of a CTA whose cluster merges: a warp sends m and l of all of them, a lane a row."""

MOST_STAGES = 12
"""Ring stages that there are barriers for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MmaConfig(DecodeConfig):
    """The `mma` decode kernel: TMA loads, warp-level mma.sync, split-KV; one source for every arch."""

    impl: ClassVar[str] = "mma"

    row_tile: int = axis("t", choices=(8, 16, 32, 64, 128), default=16, doc="packed query rows of one CTA")

    def check(self) -> None:
        """A window ends at each token's own key, so it takes a causal mask. Raises ConfigError."""
        if self.window and not self.causal:
            raise self.reject("window = True with causal = False: expected causal = True")

    def check_arch(self, arch: Arch) -> None:
        """The warps, the ring and the buffers that share its memory must fit. Raises ConfigError naming the budget."""
        if self.row_warps * self.col_warps * self.ctas_per_sm > MOST_WARPS:
            raise self.reject(
                f"row_tile {self.row_tile} of head_dim {self.head_dim} takes at least "
                f"{self.row_warps * self.col_warps} computing warps a CTA: {MOST_WARPS} fit an SM, at ctas_per_sm "
                f"{self.ctas_per_sm}"
            )
        if self.cluster > 1 and self.row_tile > MOST_CLUSTER_ROWS:
            raise self.reject(
                f"row_tile {self.row_tile} with cluster {self.cluster}: expected at most {MOST_CLUSTER_ROWS} rows, or "
                "cluster 1"
            )
        stages = self.stages(arch)
        if stages < 3:
            raise self.reject(
                f"head_dim {self.head_dim} with {self.kv_format} and row_tile {self.row_tile} leaves "
                f"{stages} ring stages at ctas_per_sm {self.ctas_per_sm} on {arch.name}: expected at least 3"
            )
        if not self.slices_beside(arch) and self.merge_bytes > stages * self.stage_bytes:
            raise self.reject(
                f"merging {self.row_tile} rows of head_dim {self.head_dim} takes {self.merge_bytes} "
                f"bytes of shared memory, and the ring has {stages * self.stage_bytes} at ctas_per_sm "
                f"{self.ctas_per_sm} on {arch.name}"
            )

    # -- derived, never enumerated -------------------------------------------------------------

    @property
    def box_bytes(self) -> int:
        """Bytes of a row that one TMA box takes: a swizzle's span, or 128 codes of 6 bits, which are not swizzled."""
        return min(96 if KV_BITS[self.kv_format] == 6 else 128, self.row_bytes)

    @property
    def boxes_per_row(self) -> int:
        """TMA boxes side by side that make up a row."""
        return self.row_bytes // self.box_bytes

    @property
    def stage_keys(self) -> int:
        """Keys of one ring stage: a tile, half of one where so much K is large for a ring, a quarter for long heads.

        Two tiles where eight warps share up to 16 query rows and a key has at most 128 bytes: each warp then takes 32
        keys, a whole softmax step.
        """
        if self.head_dim > 256:
            return TILE_KEYS // (2 if self.row_bytes <= 256 and self.ctas_per_sm == 1 else 4)
        most = 16 * 1024 if self.ctas_per_sm == 2 else (32 if self.row_tile > 64 else 64) * 1024  # beside Q
        if self.ctas_per_sm == 1 and self.row_tile <= 16 and self.row_bytes <= 128 and self.head_dim <= 128:
            return 2 * TILE_KEYS
        return TILE_KEYS if TILE_KEYS * self.row_bytes <= most else TILE_KEYS // 2

    @property
    def keys_first(self) -> bool:
        """Whether keys are the rows of the MMA and query rows its columns, all of them in each warp."""
        return self.row_tile == 8

    @property
    def row_warps(self) -> int:
        """Groups of query rows, each of which is served by `col_warps * key_warps` warps."""
        return 1 if self.keys_first else self.row_tile // 16

    @property
    def col_warps(self) -> int:
        """Warps that share the columns of O, each with all of the scores: one warp's registers hold 256 columns."""
        return max(1, self.head_dim // 256)

    @property
    def key_warps(self) -> int:
        """Warps that share a stage's keys, each with a running softmax of its own.

        Two CTAs of an SM share its registers; a warp takes 16 keys at least (one MMA's depth).
        """
        return min(MOST_WARPS // self.ctas_per_sm // (self.row_warps * self.col_warps), self.stage_keys // 16)

    @property
    def consumer_warps(self) -> int:
        """Warps that compute: whole warpgroups, since registers are moved between those."""
        return self.row_warps * self.col_warps * self.key_warps

    @property
    def widening_warps(self) -> int:
        """Warps between the computing ones and those that load: whole warpgroups."""
        return 0

    @property
    def ring_readers(self) -> int:
        """Warps that read the stages of the ring."""
        return self.widening_warps or self.consumer_warps

    @property
    def loading_warp(self) -> int:
        """The warp that fills the ring."""
        return self.consumer_warps + self.widening_warps

    @property
    def threads(self) -> int:
        """The consumers, those that widen for them, and one warpgroup whose first warp loads."""
        return 32 * (self.loading_warp + 4)

    def registers(self, arch: Arch) -> tuple[int, ...]:
        """Registers a thread of (loading, computing) warps after the loading warpgroup gave its own away."""
        groups = self.threads // 128
        at_launch = min(248, arch.registers_per_sm // (self.threads * self.ctas_per_sm) // 8 * 8)
        loading = 56
        computing = (at_launch * groups - loading) // (groups - 1) // 8 * 8
        return loading, min(240, computing)

    @property
    def lone_tile_cost(self) -> int:
        """For the planner (see its LONE_TILE_COST), by the time of a tile on an H200.

        Arithmetic weighs more against memory the more rows there are, and the fewer bits a code has.
        """
        least = 13 if self.head_dim <= 128 else 16
        if self.row_warps == 1:
            return {"e2m1": 27, "nvfp4": 31, "e3m2": 22, "e2m3": 22}.get(self.kv_format, least)
        each = {"bf16": 3, "fp8": 8, "nvfp4": 22, "e2m1": 19, "e3m2": 16, "e2m3": 16}
        return max(least, each[self.kv_format] * self.row_warps)

    @property
    def code_bytes(self) -> int:
        """Bytes of a ring stage that TMA fills."""
        return self.stage_keys * self.row_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes of one ring stage, which holds keys of K or of V; their block scales lie behind them."""
        return self.code_bytes + self.stage_keys * self.scale_bytes

    @property
    def q_bytes(self) -> int:
        """Shared memory for the query tile, two bytes an element."""
        return self.row_tile * self.head_dim * 2

    @property
    def merge_pitch(self) -> int:
        """fp32 elements from one row to the next where warps' O are merged; the padding avoids bank conflicts."""
        return self.head_dim + (4 if self.keys_first else 16)

    @property
    def merge_bytes(self) -> int:
        """Bytes that hold every warp's O: of the ring, once its last stage was read, or behind it (`slices_beside`)."""
        return 4 * self.merge_pitch * self.row_tile * self.key_warps

    SHARE_COLUMNS: ClassVar[int] = 32
    """Columns of a row that a CTA of a cluster merges at once."""
    SHARE_PITCH: ClassVar[int] = 144
    """Bytes from one part of a share to the next: its columns, m and l in fp32, up to a multiple of 16."""

    @property
    def inbox_bytes(self) -> int:
        """Shared memory for what the CTAs of a cluster send each other, of which each merges a share of the rows.

        As much for any number of CTAs: fewer of them send more shares each.
        """
        return 0 if self.cluster == 1 else self.row_tile * self.head_dim // self.SHARE_COLUMNS * self.SHARE_PITCH

    @property
    def exchanges_p(self) -> bool:
        """Whether the warps of a cluster's CTA exchange P, so that each sums some columns of O over all keys.

        Their slices of O need not be added up then, which long heads gain from; short ones lose more by a barrier a
        stage. A warp's columns of V are what `ldmatrix` reads, 32 bytes or twice that; narrow formats have less.
        """
        return (
            self.cluster > 1 and self.keys_first and self.head_dim == 256 and self.ctas_per_sm == 1
            and self.kv_format in ("bf16", "fp8")
        )  # fmt: skip

    @property
    def p_bytes(self) -> int:
        """Shared memory for P of a stage, where warps exchange it."""
        return self.stage_keys * self.row_tile * 2

    @property
    def peak_bytes(self) -> int:
        """Shared memory for the warps' maxima of a stage, where they exchange P."""
        return self.key_warps * self.row_tile * 4

    @property
    def column_pitch(self) -> int:
        """fp32 elements from one row to the next of the columns that a warp sends; the padding avoids conflicts."""
        return self.head_dim // self.key_warps + 4

    @property
    def exchange_bytes(self) -> int:
        """Shared memory where warps exchange P: two stages of P and maxima, and the columns that they send."""
        return 2 * (self.p_bytes + self.peak_bytes) + 4 * self.column_pitch * self.row_tile * self.key_warps

    def slices_beside(self, arch: Arch) -> bool:
        """Whether a CTA of a cluster has room for every warp's O beside the ring: none then waits to put it there."""
        if self.cluster == 1 or self.exchanges_p:
            return False
        return self._room(arch) - self.merge_bytes >= 4 * self.stage_bytes

    def beside_bytes(self, arch: Arch) -> int:
        """Shared memory of a CTA of a cluster for what its warps exchange, or for their O where that fits."""
        return self.exchange_bytes if self.exchanges_p else self.slices_beside(arch) * self.merge_bytes

    def cluster_bytes(self, arch: Arch) -> int:
        """Shared memory behind the ring: the inbox, and what lies beside it."""
        return self.inbox_bytes + self.beside_bytes(arch)

    def _room(self, arch: Arch) -> int:
        """What buffers that are always there leave of the shared memory."""
        return arch.smem_budget(self.ctas_per_sm) - self.FIXED_SMEM - self.q_bytes - self.inbox_bytes

    FIXED_SMEM: ClassVar[int] = 3072
    """Barriers, row scales and results, then row statistics; a multiple of the swizzle's 1024 bytes."""

    def stages(self, arch: Arch) -> int:
        """Ring stages that fit beside the other buffers, at most MOST_STAGES."""
        room = self._room(arch) - self.beside_bytes(arch)
        return min(MOST_STAGES, room // self.stage_bytes)

    def ring_depth(self, arch: Arch, ctas: int) -> int:
        """Ring stages to use in a grid of so many CTAs: what keeps the memory busy, and no more.

        On an H200 more than 128 KiB of loads in flight an SM cost 1 to 3 % of the bandwidth.
        """
        beside = min(self.ctas_per_sm, -(-ctas // arch.sms))
        return min(self.stages(arch), max(3, 128 * 1024 // (beside * self.stage_bytes)))

    def smem_bytes(self, arch: Arch) -> int:
        """Dynamic shared memory that a launch passes."""
        return self.FIXED_SMEM + self.q_bytes + self.stages(arch) * self.stage_bytes + self.cluster_bytes(arch)
