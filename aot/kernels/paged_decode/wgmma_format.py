"""How widened tiles of K and V lie in shared memory, and in which order Q and O meet them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.paged_decode.mma_formats import Format

BLOCK_COLUMNS = 64
"""f16 columns of a block: a row of 128 bytes, the span of its swizzle."""

PITCH = 128
"""Bytes from one key to the next in a block."""


class Widened(Format):
    """f16 tiles that tensor cores read by descriptor: blocks of 64 columns, [keys][128 bytes], swizzled."""

    unit_codes = 1

    def store_q(self, row_address: Any, row: Any, vector: Any, pairs: Sequence[Any]) -> None:
        """In order."""
        ptx.store_shared_v4(row_address + (vector ^ (row & 7)) * 16, pairs)

    def k_lane(self, stage: Any, key: Any, lane: Any) -> list[Any]:
        """Address of the keys from `key`, a multiple of 8, on; the same for every lane."""
        return [stage + key * PITCH]

    def v_lane(self, stage: Any, key: Any, lane: Any, col_group: Any) -> list[Any]:
        """As for K."""
        return [stage + key * PITCH]
