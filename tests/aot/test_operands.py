"""Where the computing warps' lanes put O before their slices are merged."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

pytest.importorskip("cutlass", reason="the compiler is not installed")

from cubinery.aot.kernels.paged_decode.mma_kv import format_of
from cubinery.aot.kernels.paged_decode.mma_operands import operands_of
from cubinery.runtime.ops.paged_decode.config import HEAD_DIMS, KV_BITS, MmaConfig

BANKS = 32
CONFLICTS = {("e3m2", True): 2, ("e2m3", True): 2, ("bf16", False): 2}
"""Lanes that meet in a bank at worst, by format and whether keys go first, where they do; once a launch."""


@pytest.mark.parametrize("row_tile", [8, 16, 32])
@pytest.mark.parametrize(("head_dim", "kv_format"), [*itertools.product(HEAD_DIMS, KV_BITS)])
def test_every_element_of_o_has_a_place_of_its_own(head_dim: int, kv_format: str, row_tile: int) -> None:
    """Each (row, column) of a warp is written once, by a store that is aligned and meets others in few banks."""
    config = MmaConfig(head_dim=head_dim, page_size=16, kv_format=kv_format, row_tile=row_tile, ctas_per_sm=1)
    operands, fmt = operands_of(config), format_of(config)
    columns, conflicts = head_dim // config.col_warps, 1
    written: Counter[tuple[int, int]] = Counter()
    registers: Counter[tuple[int, int]] = Counter()
    for (first, by_column), j in itertools.product(operands.outputs(fmt.unit_codes, columns), (0, 1)):
        width = len(by_column)
        places = []
        for lane in range(32):
            row, column = operands.rows(lane)[j], first + operands.output_step(lane, fmt.unit_codes)
            place = row * config.merge_pitch * 4 + fmt.merge_offset(column)
            assert place % (4 * width) == 0
            places.append(place)
            written.update((row, column + n) for n in range(width))
            registers.update((lane, rows[j]) for rows in by_column)
        at_once = 32 // width  # a wavefront moves 128 bytes
        for n in range(0, 32, at_once):
            banks = Counter((place // 4 + word) % BANKS for place in places[n : n + at_once] for word in range(width))
            conflicts = max(conflicts, *banks.values())
    assert conflicts == CONFLICTS.get((kv_format, config.keys_first), 1)
    assert written == Counter(itertools.product(range(operands.warp_rows), range(columns)))
    assert registers == Counter(itertools.product(range(32), range(columns * operands.warp_rows // 32)))


@pytest.mark.parametrize("row_tile", [8, 16])
def test_scores_of_a_step_are_those_of_its_rows_and_keys(row_tile: int) -> None:
    """Each (row, key) of a warp's step once; and the lane's keys of V are those that its P fragments multiply."""
    operands = operands_of(MmaConfig(head_dim=128, page_size=16, kv_format="fp8", row_tile=row_tile))
    found: Counter[tuple[int, int]] = Counter()
    for lane, tile, e in itertools.product(range(32), range(operands.score_tiles(32)), range(4)):
        key = operands.first_key(lane) + operands.score_key(tile, e)
        found[operands.rows(lane)[operands.row(e)], key] += 1
    assert found == Counter(itertools.product(range(operands.warp_rows), range(32)))
    for lane in range(32):
        assert operands.value_key(lane, operands.first_key(lane)) == lane % 4 * 2
        shared = {lane ^ sum(chosen) for n in range(4) for chosen in itertools.combinations(operands.sharers, n)}
        assert {other for other in range(32) if operands.rows(other) == operands.rows(lane)} == shared
        assert operands.is_first(lane) == (lane == min(shared))
