"""Which operand of the MMA the query rows are, and what a lane's accumulators then hold.

An MMA has 16 rows and 8 columns. `RowsFirst`: Q and P are its A, and keys (for S) or columns of the head (for O) its 8
columns. `KeysFirst`: operands change places, S^T = K Q^T and O^T = V^T P^T, so that 8 packed rows leave no half of a
product to padding. Formats need not know: the B fragments of two neighbouring blocks of 8 are the A fragment of both.
Lane numbers: g = lane // 4, quad = lane % 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_formats import Pair
from cubinery.runtime.ops.paged_decode.config import MmaConfig

Blocks = Callable[[int], Sequence[Pair]]
"""From the number of a block of 8 keys to its B fragments, one for each step of 16 columns."""


class Operands(ABC):
    """What a warp does with fragments, and where its lanes find what they hold.

    A score tile is the four accumulators of one MMA. A lane holds scores, and columns of O, of two rows.
    """

    warp_rows: int
    """Query rows of a warp."""
    sharers: tuple[int, ...]
    """Distances to shuffle over, to meet all lanes that share a row."""
    q_steps: int
    """Steps of 16 columns of Q that one `ldmatrix` reads."""

    @abstractmethod
    def rows(self, lane: Any) -> list[Any]:
        """The two rows of a lane, among those of its warp."""

    @abstractmethod
    def is_first(self, lane: Any) -> Any:
        """Whether a lane is the first of those that share its rows."""

    @property
    def first_lanes(self) -> int:
        """How many lanes of a warp are: each has two rows."""
        return self.warp_rows // 2

    @abstractmethod
    def first_key(self, lane: Any) -> Any:
        """A lane's first key of S."""

    @abstractmethod
    def value_key(self, lane: Any, key: Any) -> Any:
        """A lane's first key in a fragment of V, by its first key of S."""

    @abstractmethod
    def score_tiles(self, keys: int) -> int:
        """Score tiles of so many keys."""

    @abstractmethod
    def score_key(self, tile: int, element: int) -> int:
        """Distance of an element of a score tile from the lane's first key."""

    @abstractmethod
    def row(self, element: int) -> int:
        """Which of a lane's rows one of the four accumulators of an MMA belongs to."""

    @abstractmethod
    def outputs(self, unit_codes: int, columns: int) -> list[tuple[int, list[list[int]]]]:
        """(first column, for each of its neighbours in the lane the registers of O by the lane's rows).

        Block i of a chunk of 8 `unit_codes` columns holds code i of each 16-bit unit.
        """

    @abstractmethod
    def output_step(self, lane: Any, unit_codes: int) -> Any:
        """Columns from the first lane's to this lane's."""

    @abstractmethod
    def q_lane(self, lane: Any) -> tuple[Any, Any]:
        """(row, chunk of 16 bytes) whose address a lane gives to the first `ldmatrix` of Q."""

    @abstractmethod
    def multiply_keys(self, dtype: str, q: Sequence[Any], blocks: Blocks, tiles: list[list[Any]]) -> None:
        """S += steps of Q times those of the keys."""

    @abstractmethod
    def probabilities(self, dtype: str, exps: Sequence[Sequence[Any]]) -> list[Any]:
        """Operands of P, 16 keys each, from a lane's values of each row, in the order of tiles and elements."""

    @abstractmethod
    def accumulate(self, dtype: str, p: Any, fragments: Sequence[tuple[int, Pair]], o: list[Any]) -> None:
        """O += P times 16 keys of V, by (block of columns, B fragment)."""


class RowsFirst(Operands):
    """S = Q K^T, O = P V. A lane has rows g and g + 8, keys 2 quad and 2 quad + 1 of 8, those columns of O."""

    warp_rows = 16
    sharers = (1, 2)
    q_steps = 1

    def rows(self, lane: Any) -> list[Any]:
        return [lane // 4, lane // 4 + 8]

    def is_first(self, lane: Any) -> Any:
        return lane % 4 == 0

    def first_key(self, lane: Any) -> Any:
        return lane % 4 * 2

    def value_key(self, lane: Any, key: Any) -> Any:
        return key

    def score_tiles(self, keys: int) -> int:
        return keys // 8

    def score_key(self, tile: int, element: int) -> int:
        return 8 * tile + element % 2

    def row(self, element: int) -> int:
        return element // 2

    def outputs(self, unit_codes: int, columns: int) -> list[tuple[int, list[list[int]]]]:
        u = unit_codes
        found = []
        for chunk in range(columns // (8 * u)):
            registers = [[4 * (u * chunk + i) + 2 * j + e for j in (0, 1)] for e in (0, 1) for i in range(u)]
            found += [(8 * u * chunk + n, registers[n : n + 4]) for n in range(0, 2 * u, 4)]
        return found

    def output_step(self, lane: Any, unit_codes: int) -> Any:
        return 2 * unit_codes * (lane % 4)

    def q_lane(self, lane: Any) -> tuple[Any, Any]:
        return lane // 8 % 2 * 8 + lane % 8, lane // 16

    def multiply_keys(self, dtype: str, q: Sequence[Any], blocks: Blocks, tiles: list[list[Any]]) -> None:
        for t in range(len(tiles)):
            for a, b in zip(q, blocks(t), strict=True):
                tiles[t] = ptx.mma_m16n8k16(dtype, a, b, tiles[t])

    def probabilities(self, dtype: str, exps: Sequence[Sequence[Any]]) -> list[Any]:
        # Two tiles of S are one A fragment of P.
        return [
            [ptx.pack_f32x2(dtype, exps[j][n + 2 * h], exps[j][n + 2 * h + 1]) for h in (0, 1) for j in (0, 1)]
            for n in range(0, len(exps[0]), 4)
        ]

    def accumulate(self, dtype: str, p: Any, fragments: Sequence[tuple[int, Pair]], o: list[Any]) -> None:
        for block, b in fragments:
            o[4 * block : 4 * block + 4] = ptx.mma_m16n8k16(dtype, p, b, o[4 * block : 4 * block + 4])


class KeysFirst(Operands):
    """S^T = K Q^T, O^T = V^T P^T. A lane has rows 2 quad and the next, keys g and g + 8 of 16, those columns of O."""

    warp_rows = 8
    sharers = (4, 8, 16)
    q_steps = 2

    def rows(self, lane: Any) -> list[Any]:
        return [lane % 4 * 2, lane % 4 * 2 + 1]

    def is_first(self, lane: Any) -> Any:
        return lane < 4

    def first_key(self, lane: Any) -> Any:
        return lane // 4

    def value_key(self, lane: Any, key: Any) -> Any:
        return key - lane // 4 + lane % 4 * 2

    def score_tiles(self, keys: int) -> int:
        return keys // 16

    def score_key(self, tile: int, element: int) -> int:
        return 16 * tile + element // 2 * 8

    def row(self, element: int) -> int:
        return element % 2

    def outputs(self, unit_codes: int, columns: int) -> list[tuple[int, list[list[int]]]]:
        u = unit_codes
        found = []
        for chunk in range(columns // (8 * u)):
            registers = [[2 * (u * chunk + i) + j for j in (0, 1)] for i in range(u)]
            found += [(8 * u * chunk + n, registers[n : n + 4]) for n in range(0, u, 4)]
        return found

    def output_step(self, lane: Any, unit_codes: int) -> Any:
        return unit_codes * (lane // 4)

    def q_lane(self, lane: Any) -> tuple[Any, Any]:
        return lane % 8, lane // 8

    def multiply_keys(self, dtype: str, q: Sequence[Any], blocks: Blocks, tiles: list[list[Any]]) -> None:
        for t in range(len(tiles)):
            for b, low, high in zip(q, blocks(2 * t), blocks(2 * t + 1), strict=True):
                tiles[t] = ptx.mma_m16n8k16(dtype, _as_a(low, high), b, tiles[t])

    def probabilities(self, dtype: str, exps: Sequence[Sequence[Any]]) -> list[Any]:
        # A lane has two rows of a key and needs two keys of a row: eight keys are one 8x8 matrix, transposed.
        blocks = [ptx.transpose_8x8(ptx.pack_f32x2(dtype, *pair)) for pair in zip(*exps, strict=True)]
        return [blocks[n : n + 2] for n in range(0, len(blocks), 2)]

    def accumulate(self, dtype: str, p: Any, fragments: Sequence[tuple[int, Pair]], o: list[Any]) -> None:
        for (block, low), (_, high) in zip(fragments[::2], fragments[1::2], strict=True):
            o[2 * block : 2 * block + 4] = ptx.mma_m16n8k16(dtype, _as_a(low, high), p, o[2 * block : 2 * block + 4])


def _as_a(low: Pair, high: Pair) -> tuple[Any, ...]:
    """The A fragment of 16 rows whose halves are B fragments of 8 columns."""
    return low[0], high[0], low[1], high[1]


def operands_of(config: MmaConfig) -> Operands:
    """Which operands serve a configuration."""
    return KeysFirst() if config.keys_first else RowsFirst()
