"""How stored K and V become operands of the MMA: what all formats share, and those of 4, 8 and 16 bits.

All formats share two ideas. A register is two 16-bit halves, and codes at the same place of both halves widen
together: of one key (K, where the halves are two columns) or of two neighbouring keys (V). And any order of columns
will do, as long as Q is staged in the order that K's fragments come in, and the epilogue knows where V's columns went.

Lane numbers: g = lane // 4 is a fragment's row or column of 8, quad = lane % 4 its pair of the 16-deep axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from cubinery.aot.kernels.common import ptx
from cubinery.runtime.ops.paged_decode.config import MmaConfig

Pair = tuple[Any, Any]
"""The two registers of a B fragment: 16 (deep) by 8."""


class Format:
    """What the kernel asks of a format. This class serves rows that `ldmatrix` can read, swizzled by TMA."""

    mma_dtype: ClassVar[str] = "f16"
    p_log2_scale: ClassVar[int] = 15
    """P carries a factor of 2 to this, so that small probabilities stay normal f16 numbers."""
    unit_codes: int
    """Codes of 16 bits."""
    k_log2 = v_log2 = 0
    """Operands of K and V lack a factor of 2 to this; the scales of the scores and of O make up for it."""
    k_groups = 1
    """Parts that the registers of one load of K are widened in."""

    def __init__(self, config: MmaConfig) -> None:
        self.pitch = config.box_bytes
        self.pitches: tuple[int, ...] = (self.pitch,)
        """Bytes from one key to the next, by the addresses that a lane has."""
        self.column_bytes = config.stage_keys * config.box_bytes
        chunks = config.row_bytes // 16
        self.box_chunks = config.box_bytes // 16
        # One ldmatrix.x4 reads four 16-byte chunks of 8 keys for K, two of 16 keys for V.
        self.k_loads, self.v_loads = max(1, chunks // 4), chunks // 2 // config.col_warps
        self.group_steps = config.head_dim // 16 // (self.k_loads * self.k_groups)
        self.warp_bytes = config.boxes_per_row // config.col_warps * self.column_bytes

    # -- Q -------------------------------------------------------------------------------------

    q_pairs: ClassVar[tuple[tuple[int, int], ...]] = ((0, 1), (2, 3), (4, 5), (6, 7))
    """Elements of eight neighbours in a row of Q that share a register."""

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """Eight elements of Q, from `vector` * 8 on, to their places in a row of 16-byte chunks, swizzled by row."""
        raise NotImplementedError

    # -- K and V -------------------------------------------------------------------------------

    def swizzle(self, row: Any) -> Any:
        """What TMA's swizzle flips in the number of a chunk, by the row of the box."""
        return (row >> {8: 0, 4: 1, 2: 2}[self.box_chunks]) & (self.box_chunks - 1)

    def move(self, lane: Sequence[Any], offset: Any, keys: Any) -> list[Any]:
        """What `k_lane` or `v_lane` gave, some bytes and some keys further on."""
        moved = [a + offset + keys * pitch for a, pitch in zip(lane, self.pitches, strict=False)]
        return [*moved, *lane[len(moved) :]]

    def chunk_address(self, address: Any, chunk: int) -> Any:
        """`address` of a row's first chunk, moved to another one."""
        return (address ^ (chunk % self.box_chunks * 16)) + chunk // self.box_chunks * self.column_bytes

    def k_lane(self, stage: Any, key: Any, lane: Any) -> list[Any]:
        """Addresses at which a lane reads K of the keys from `key`, a multiple of 8, on, in the stage at an address."""
        i, r = lane // 8, lane % 8  # matrix and row whose address this lane gives to ldmatrix
        return [stage + (key + r) * self.pitch + (i % self.box_chunks ^ self.swizzle(r)) * 16]

    def k_load(self, lane: Sequence[Any], load: int) -> Sequence[Any]:
        """Registers with a part of 8 keys' rows: load `load` of `k_loads`, by what `k_lane` gave."""
        if self.box_chunks == 2:
            return ptx.ldmatrix_x2(lane[0])
        return ptx.ldmatrix_x4(self.chunk_address(lane[0], 4 * load))

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """B fragments of K^T, `group_steps` of them, of part `group` of what `k_load` gave."""
        raise NotImplementedError

    def v_lane(self, stage: Any, key: Any, lane: Any, col_group: Any) -> list[Any]:
        """Addresses at which a lane reads V of the keys from `key`, a multiple of 16, on: its warp's columns."""
        i, r = lane // 8, lane % 8
        row = (key + (i % 2) * 8 + r) * self.pitch
        return [stage + col_group * self.warp_bytes + row + ((i // 2) ^ self.swizzle(r)) * 16]

    def v_fragments(self, lane: Sequence[Any], load: int, masks: Sequence[Any] | None) -> list[tuple[int, Pair]]:
        """(block of 8 columns of O, B fragment) of V for 16 keys and the columns of load `load` of `v_loads`.

        `masks` (or None): which of keys 2 quad and 2 quad + 1 exist, and of those 8 further on.
        """
        registers = ptx.ldmatrix_x4(self.chunk_address(lane[0], 2 * load), transpose=True)
        if masks is not None:
            registers = tuple(register & masks[n % 2] for n, register in enumerate(registers))
        found: list[tuple[int, Pair]] = []
        for half in (0, 1):
            low, high = (self.v_codes(register) for register in registers[2 * half : 2 * half + 2])
            found += enumerate(zip(low, high, strict=True), (2 * load + half) * self.unit_codes)
        return found

    def v_codes(self, register: Any) -> Sequence[Any]:
        """One register for each code of a 16-bit unit, from a register with that unit of two keys."""
        raise NotImplementedError

    # -- O -------------------------------------------------------------------------------------

    def merge_offset(self, column: Any) -> Any:
        """Where a column of O (a multiple of 4 but for bf16) lies in its row, in bytes, while slices are merged."""
        return column * 4


class Bf16(Format):
    """16-bit elements: no conversion, bf16 MMA."""

    mma_dtype = "bf16"
    p_log2_scale = 0
    unit_codes = 1

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """In order."""
        ptx.store_shared_v4(row_address + (vector ^ (row & 7)) * 16, pairs)

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """Columns 2 quad, 2 quad + 1 of each chunk."""
        return [(registers[0], registers[1]), (registers[2], registers[3])]

    def v_codes(self, register: Any) -> Sequence[Any]:
        """The units themselves."""
        return (register,)


class Fp8(Format):
    """e4m3, widened exactly to f16 by the conversion instruction."""

    unit_codes = 2

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """One lane gets four neighbours of K, two for each half of a 16-column step."""
        chunk, half = vector // 2 * 2, vector % 2 * 8
        ptx.store_shared_v2(row_address + (chunk ^ (row & 7)) * 16 + half, (pairs[0], pairs[2]))
        ptx.store_shared_v2(row_address + ((chunk + 1) ^ (row & 7)) * 16 + half, (pairs[1], pairs[3]))

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """Four neighbouring columns a register."""
        return [ptx.e4m3x4_to_f16x2x2(register) for register in registers]

    def v_codes(self, register: Any) -> Sequence[Any]:
        """Even columns, odd columns."""
        return ptx.e4m3x4_to_f16x2x2(ptx.permute_bytes(register, 0x3120))


class E2m1(Format):
    """4-bit codes: four to a half register, moved into f16's bits, which makes 2^-14 of their value."""

    unit_codes = 4
    k_log2 = v_log2 = 14
    q_pairs = ((0, 4), (1, 5), (2, 6), (3, 7))

    def __init__(self, config: MmaConfig) -> None:
        self.k_groups = 1 if config.head_dim == 64 else 2  # two registers each
        super().__init__(config)

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """A word of eight codes gives four pairs, code i and code i + 4: one quad's share of four chunks."""
        for i, pair in enumerate(pairs):
            chunk = vector // 4 * 4 + i
            ptx.store_shared_b32(row_address + (chunk ^ (row & 7)) * 16 + vector % 4 * 4, pair)

    def k_pairs(self, registers: Sequence[Any], group: int) -> list[Pair]:
        """Eight neighbouring columns a register, two fragments."""
        codes = [ptx.e2m1x8_to_f16x2x4(register) for register in registers[2 * group : 2 * group + 2]]
        return [pair for c in codes for pair in ((c[0], c[1]), (c[2], c[3]))]

    def v_codes(self, register: Any) -> Sequence[Any]:
        """Columns 0 to 3 of each unit."""
        return ptx.e2m1x8_to_f16x2x4(register)

    def merge_offset(self, column: Any) -> Any:
        """Quads store every other 16 bytes: two of four take the ones between, so that they meet in no bank.

        With keys first, lanes store neighbouring ones, and meet in none either way.
        """
        chunk = column >> 2
        return (chunk ^ ((chunk >> 2) & 1)) * 16
