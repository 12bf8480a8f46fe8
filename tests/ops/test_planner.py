"""The split planner: worked examples of the specification, brute force, invariants, quality, host time."""

from __future__ import annotations

import math
import statistics
import timeit
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import grid
from benchmarks.splits import Row
from cubinery.aot import tables
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode import planner
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.planner import SplitPlan, plan_splits
from cubinery.runtime.ops.paged_decode.select import Problem, choose

quick = settings(max_examples=150, deadline=None, derandomize=True)
TILE = 128


def thor(seq_lens: list[int], **options: Any) -> SplitPlan:
    """A plan for 20 SMs, two CTAs each, four KV heads, one query tile: ten slots."""
    machine = {"num_kv_heads": 4, "q_tiles": 1, "sm_count": 20, "ctas_per_sm": 2}
    return plan_splits(seq_lens, policy="thor", **(machine | options))


def sizes(plan: SplitPlan) -> list[int]:
    return [int(end - begin) for _, begin, end, _ in plan.work[: plan.num_items]]


def splits(plan: SplitPlan) -> list[int]:
    return [int(n) for n in plan.splits[:, 0]]


# -- the specification's worked examples ------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_lens", "chunk", "expected"),
    [
        ([1024], 1, [8]),
        ([131072], 103, [10]),
        ([262144], 205, [10]),
        ([4096, 128], 4, [8, 1]),
        ([65536, 65536, 65536, 128], 171, [3, 3, 3, 1]),
        ([4096] * 10, 32, [1] * 10),
    ],
)
def test_thor_worked_examples(seq_lens: list[int], chunk: int, expected: list[int]) -> None:
    plan = thor(seq_lens)
    assert (plan.slots, plan.chunk_tiles, splits(plan)) == (10, chunk, expected)


def test_thor_last_chunks() -> None:
    assert sizes(thor([131072])) == [103] * 9 + [97]
    assert sizes(thor([262144])) == [205] * 9 + [203]


def test_case_15_longest_items_first() -> None:
    plan = thor([4096, 128])
    assert plan.num_items == 9
    assert sizes(plan) == [4] * 8 + [1]
    assert plan.work[:8, 0].tolist() == [0] * 8
    assert plan.work[:8, 1].tolist() == list(range(0, 32, 4))


def test_case_16_max_splits() -> None:
    assert (thor([131072], max_splits=4).chunk_tiles, splits(thor([131072], max_splits=4))) == (256, [4])
    assert (thor([131072], max_splits=1).chunk_tiles, splits(thor([131072], max_splits=1))) == (1024, [1])


def test_case_17_forced_splits() -> None:
    plan = thor([1024, 256], force_splits=3)
    assert (plan.chunk_tiles, splits(plan), sizes(plan)) == (3, [3, 1], [3, 3, 2, 2])
    assert plan.work[:, 0].tolist() == [0, 0, 0, 1]  # ties keep sequence, then chunk order


def test_case_18_zero_length() -> None:
    plan = thor([0, 300])
    assert splits(plan) == [1, 3]
    assert [0, 0, 1, 0] in plan.work.tolist()


def test_case_19_padding() -> None:
    plan, padded = thor([4096, 128]), thor([4096, 128], pad_to=16)
    assert padded.num_work == 16
    assert padded.num_items == 9
    assert padded.work[:9].tolist() == plan.work.tolist()
    assert not padded.work[9:].any()
    with pytest.raises(PlanError, match="pad_to = 8: the plan has 9 work items"):
        thor([4096, 128], pad_to=8)


def test_partial_slots_are_global_and_compact() -> None:
    plan = thor([300, 128, 300], force_splits=3)
    assert plan.splits.tolist() == [[3, 0], [1, 0], [3, 3]]
    assert plan.num_partials == 6
    slots = {(int(s), int(b)): int(slot) for s, b, _, slot in plan.work}
    assert slots == {(0, 0): 0, (0, 1): 1, (0, 2): 2, (1, 0): 0, (2, 0): 3, (2, 1): 4, (2, 2): 5}


# -- brute force ------------------------------------------------------------------------------------


def thor_by_the_letter(
    seq_lens: list[int], slots: int, max_splits: int, force: int, min_chunk: int
) -> tuple[int, list[int], list[tuple[int, int, int]]]:
    """Section 6 of the specification in plain Python, chunk lengths tried one by one."""
    tiles = [max(1, -(-n // TILE)) for n in seq_lens]
    longest = max(tiles)
    low = max(min_chunk, -(-longest // max_splits))
    if force:
        chunk = max(low, -(-longest // force))
    elif len(tiles) >= slots or max_splits == 1:
        chunk = longest
    elif low >= longest:
        chunk = low
    else:
        chunk = next(c for c in range(low, longest + 1) if sum(-(-t // c) for t in tiles) <= slots)
    items = [(i, b, min(b + chunk, t)) for i, t in enumerate(tiles) for b in range(0, t, chunk)]
    items.sort(key=lambda item: item[1] - item[2])
    return chunk, [-(-t // chunk) for t in tiles], items


lengths = st.lists(st.one_of(st.integers(0, 3000), st.integers(0, 300_000)), min_size=1, max_size=24)


@quick
@given(lengths, st.integers(1, 16), st.integers(1, 20), st.integers(0, 20), st.integers(1, 4), st.integers(1, 64))
def test_thor_equals_the_letter(
    seq_lens: list[int], heads: int, max_splits: int, force: int, min_chunk: int, sms: int
) -> None:
    plan = plan_splits(
        seq_lens, policy="thor", num_kv_heads=heads, q_tiles=1, sm_count=sms, ctas_per_sm=2,
        max_splits=max_splits, force_splits=force, min_chunk_tiles=min_chunk,
    )  # fmt: skip
    chunk, counts, items = thor_by_the_letter(seq_lens, max(1, sms * 2 // heads), max_splits, force, min_chunk)
    assert plan.chunk_tiles == chunk
    assert splits(plan) == counts
    assert [tuple(row) for row in plan.work[:, :3].tolist()] == items


@quick
@given(
    lengths,
    st.sampled_from(planner.POLICIES),
    st.integers(1, 16),
    st.integers(1, 3),
    st.integers(1, 148),
    st.integers(1, 1024),
    st.one_of(st.just(0), st.integers(1, 1100)),
    st.integers(1, 9),
    st.booleans(),
)
def test_invariants(
    seq_lens: list[int], policy: planner.Policy, heads: int, q_tiles: int, sms: int, max_splits: int, force: int,
    min_chunk: int, pad: bool,
) -> None:  # fmt: skip
    options: dict[str, Any] = {
        "policy": policy, "num_kv_heads": heads, "q_tiles": q_tiles, "sm_count": sms, "ctas_per_sm": 2,
        "max_splits": max_splits, "force_splits": force, "min_chunk_tiles": min_chunk,
    }  # fmt: skip
    plan = plan_splits(seq_lens, **options)
    if pad:
        options["pad_to"] = plan.num_items + 5
        padded = plan_splits(seq_lens, **options)
        assert padded.num_work == plan.num_items + 5
        assert not padded.work[padded.num_items :].any()
        plan = padded
    tiles = [max(1, -(-n // TILE)) for n in seq_lens]
    items = [tuple(row) for row in plan.work[: plan.num_items].tolist()]
    assert [e - b for _, b, e, _ in items] == sorted((e - b for _, b, e, _ in items), reverse=True)
    used: list[int] = []
    for seq, count in enumerate(tiles):
        chunks = sorted((b, e, slot) for s, b, e, slot in items if s == seq)
        assert [b for b, _, _ in chunks] == [0] + [e for _, e, _ in chunks[:-1]]  # contiguous
        assert chunks[-1][1] == count
        assert all(b < e for b, e, _ in chunks)
        n, first = plan.splits[seq].tolist()
        assert n == len(chunks) <= max_splits
        if policy == "balanced":
            assert max(e - b for b, e, _ in chunks) - min(e - b for b, e, _ in chunks) <= 1
            assert n == 1 or min(e - b for b, e, _ in chunks) >= min_chunk
        if n > 1:
            assert [slot for _, _, slot in chunks] == list(range(first, first + n))
            used += range(first, first + n)
    assert used == list(range(plan.num_partials))
    assert plan.work.dtype == plan.splits.dtype == np.int32
    assert plan.work.flags.c_contiguous
    assert plan.splits.flags.c_contiguous
    assert plan.max_splits == max(splits(plan))


@quick
@given(lengths, st.integers(1, 8), st.integers(0, 40))
def test_balanced_stays_within_its_padding(seq_lens: list[int], heads: int, spare: int) -> None:
    capacity = len(seq_lens) + spare
    plan = plan_splits(seq_lens, num_kv_heads=heads, q_tiles=1, sm_count=132, ctas_per_sm=2, pad_to=capacity)
    assert plan.num_work == capacity
    assert plan.num_items <= capacity


def test_balanced_stays_within_its_padding_for_large_batches() -> None:
    seq_lens = np.random.default_rng(7).integers(0, 100_000, 200)
    for spare in (0, 1, 17, 200, 900):
        plan = plan_splits(seq_lens, num_kv_heads=1, q_tiles=1, sm_count=132, ctas_per_sm=2, pad_to=200 + spare)
        assert plan.num_items <= 200 + spare
        assert spare < 200 or plan.num_items > 200  # two pieces need about 100 more


# -- quality of the balanced policy -------------------------------------------------------------------


def h200(seq_lens: Any, heads: int, **options: Any) -> SplitPlan:
    return plan_splits(seq_lens, num_kv_heads=heads, q_tiles=1, sm_count=132, ctas_per_sm=2, **options)


@pytest.mark.parametrize(
    ("seq_lens", "heads", "least", "most"),
    [
        ([131072], 8, 14, 16),
        ([65536], 4, 24, 33),
        ([8192] * 64, 1, 2, 2),
        ([2048] * 128, 8, 1, 1),
        ([4096] * 32, 8, 1, 1),
        ([65536] + [4096] * 31, 1, 32, 32),
    ],
)
def test_what_was_measured_to_be_fastest(seq_lens: list[int], heads: int, least: int, most: int) -> None:
    """Pieces of the first sequence that were fastest on an H200, two CTAs an SM."""
    assert least <= splits(h200(seq_lens, heads))[0] <= most


@pytest.mark.parametrize("keys", [8192, 16384])
@pytest.mark.parametrize("num_seqs", [35, 36, 48, 51, 56])
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_tiles_of_32_rows_run_in_one_wave_where_that_is_faster(kv_format: str, num_seqs: int, keys: int) -> None:
    """On an H200 two or three CTAs of an SM, one after the other, took up to half as long again: each starts anew."""
    config = MmaConfig(head_dim=128, page_size=64, kv_format=kv_format, q_len=4, row_tile=32, ctas_per_sm=1)
    plan = plan_splits(
        [keys] * num_seqs, num_kv_heads=1, q_tiles=1, sm_count=132, policy="balanced",
        lone_tile_cost=config.lone_tile_cost, item_cost=config.item_cost,
    )  # fmt: skip
    assert plan.num_items <= 132
    assert plan.max_splits == 132 // num_seqs


def test_no_other_cut_was_measured_to_be_much_faster() -> None:
    """Of plans on an H200 (`make bench-splits`): where the one that is chosen was measured, beside the fastest.

    By the table that ships, which the rules' constants do not reach where a row was measured.
    """
    table = tables.rows(tables.load([("paged_decode", "sm_90a")]), "paged_decode", "sm_90a")
    times: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)
    for row in grid.read(Path(__file__).parent / "split_times_h200.csv", Row):
        batch = replace(row, splits=0, items=0, us=0.0)
        times[batch][row.items] = min(row.us, times[batch].get(row.items, math.inf))
    ratios = {}
    for batch, measured in times.items():
        group = batch.query_heads // batch.kv_heads
        problem = Problem(
            head_dim=batch.head_dim, page_size=16, kv_format=batch.kv_format, group_size=group, q_len=batch.q_len
        )
        found = choose(problem, ARCHS["sm_90a"], table=table)
        config = found.config
        chosen = plan_splits(
            batch.lens, num_kv_heads=batch.kv_heads, q_tiles=-(-problem.n_q // config.row_tile), sm_count=132,
            ctas_per_sm=config.ctas_per_sm, lone_tile_cost=found.lone_tile_cost, item_cost=config.item_cost,
        ).num_items  # fmt: skip
        if chosen in measured:
            ratios[batch] = measured[chosen] / min(measured.values())
    assert len(ratios) > 0.9 * len(times)
    assert max(ratios.values()) <= 1.2, max(ratios, key=lambda batch: ratios[batch])
    assert sum(ratio > 1.1 for ratio in ratios.values()) <= 0.03 * len(ratios)
    assert statistics.geometric_mean(ratios.values()) <= 1.016


def test_short_sequences_beside_a_long_one() -> None:
    assert set(splits(h200([65536] + [4096] * 31, 1))[1:]) == {2}
    assert set(splits(h200([131072] + [2048] * 255, 8))[1:]) == {1}


@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize("length", [131072, 1 << 20])
def test_a_long_sequence_is_spread_evenly_over_the_machine(length: int, heads: int) -> None:
    """Nearly a CTA for every SM, and as much work for each as for the next."""
    plan = h200([length], heads)
    assert 0.7 * 132 < plan.num_items * heads <= 132
    assert max(sizes(plan)) - min(sizes(plan)) <= 1


def test_more_sequences_than_slots_are_still_split_by_work() -> None:
    plan = h200([131072] + [2048] * 255, 8)
    assert plan.splits[0, 0] >= 4  # 1024 tiles, where an SM's share of the work is about 310


def makespan(plan: SplitPlan, heads: int, sms: int, ctas_per_sm: int) -> float:
    """Time to run the grid in launch order, in the time that an SM of a full machine takes for one tile.

    Running CTAs share the bandwidth evenly; one alone on its SM takes a third more than an SM's share of it at most,
    two of one SM half of that each. Those that follow others leave gaps. The last chunk of the most finely cut sequence
    merges the others.
    """
    item_cost, solo_speed = planner.START_COST / 16, 16 / planner.LONE_TILE_COST
    waiting = (plan.work[: plan.num_items, 2] - plan.work[: plan.num_items, 1] + item_cost).repeat(heads)
    waiting[sms * ctas_per_sm :] += planner.ITEM_COST / 32
    left, sm, beside, now, begun = np.empty(0), np.empty(0, np.intp), np.zeros(sms, np.intp), 0.0, 0
    while begun < len(waiting) or len(left):
        while begun < len(waiting) and beside.min() < ctas_per_sm:
            place = beside.argmin()
            beside[place] += 1
            left, sm = np.append(left, waiting[begun]), np.append(sm, place)
            begun += 1
        fastest = solo_speed / beside[sm]
        speed = np.minimum(fastest, sms / len(left))
        for _ in range(3):  # what some cannot use, others take
            slower = speed < fastest
            speed[slower] += (sms - speed.sum()) / max(1, slower.sum())
            speed = np.minimum(speed, fastest)
        step = (left / speed).min()
        now += step
        left = left - step * speed
        ended = left < 1e-6
        np.subtract.at(beside, sm[ended], 1)
        left, sm = left[~ended], sm[~ended]
    return now + planner.SPLIT_COST / 16 * plan.max_splits


BATCHES = {
    "one": [131072],
    "even": [2048] * 128,
    "uneven": [65536] + [4096] * 31,
    "outlier": [131072] + [2048] * 255,
    "pairs": [16384] * 16,
    "eights": [8192] * 64,
    "random": np.random.default_rng(3).integers(1, 65536, 64).tolist(),
    "few": np.random.default_rng(4).integers(1, 65536, 12).tolist(),
}


@pytest.mark.parametrize(
    ("batch", "heads"), [*((name, 1) for name in BATCHES), *((name, 8) for name in ("one", "uneven", "few", "even"))]
)
def test_balanced_is_near_the_best_uniform_cut(batch: str, heads: int) -> None:
    """Against cuts of the longest sequence into so many pieces, by simulating the grid."""
    seq_lens = BATCHES[batch]
    chosen = makespan(h200(seq_lens, heads), heads, 132, 2)
    best = min(makespan(h200(seq_lens, heads, force_splits=n), heads, 132, 2) for n in (1, 2, 4, 8, 16, 33, 66))
    assert chosen <= 1.15 * best


@pytest.mark.parametrize("length", [384, 1024, 2048, 4096, 8192, 16384])
def test_a_sequence_of_few_tiles_is_not_cut_into_all_of_them(length: int) -> None:
    """Where an SM's share is less than a tile, merging decides; against every number of pieces."""
    tiles = length // planner.TILE_KEYS
    chosen = makespan(h200([length], 1), 1, 132, 2)
    best = min(makespan(h200([length], 1, force_splits=n), 1, 132, 2) for n in range(1, min(tiles, 64) + 1))
    assert chosen <= 1.05 * best


def test_a_short_sequence_on_one_head() -> None:
    assert splits(h200([4096], 1)) == [16]  # chunks of two tiles; of one, merging 32 takes as long as reading


def test_the_simulated_grid() -> None:
    """What can be worked out by hand: eight tiles and what an item costs, alone and where two share an SM."""
    alone = (8 + planner.START_COST / 16) * planner.LONE_TILE_COST / 16
    merging = planner.SPLIT_COST / 16
    assert makespan(h200([1024], 1, max_splits=1), 1, 132, 2) == pytest.approx(alone + merging)
    assert makespan(h200([1024] * 8, 1, max_splits=1), 1, 4, 2) == pytest.approx(2 * 8.5 + merging)


# -- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seq_lens", "message"),
    [
        ([], "shape (0,): expected (num_seqs,) with at least one sequence"),
        ([[1, 2]], "shape (1, 2): expected (num_seqs,)"),
        (5, "shape (): expected (num_seqs,)"),
        ([1.5], "dtype float64: expected integers"),
        ([True], "dtype bool: expected integers"),
        (["12"], "expected integers"),
        ([[1], [1, 2]], "seq_lens is not an array of integers"),
        ([3, -1], "seq_lens[1] = -1: expected 0 to 2147483520"),
        ([3, 2**31 - 1], "seq_lens[1] = 2147483647: expected 0 to 2147483520"),
        ([2**40], f"seq_lens[0] = {2**40}: expected 0 to"),
        (np.array([5, 2**63 + 7], np.uint64), f"seq_lens[1] = {2**63 + 7}: expected 0 to"),
        (np.array([9, 2, -3, 4], ">i2")[::2], "seq_lens[1] = -3: expected 0 to"),
    ],
)
def test_bad_lengths(seq_lens: Any, message: str) -> None:
    with pytest.raises(PlanError) as error:
        h200(seq_lens, 1)
    assert message in str(error.value)


def test_device_lengths_are_refused() -> None:
    with pytest.raises(PlanError, match="seq_lens is on meta: expected lengths on the host"):
        h200(torch.empty(3, dtype=torch.int32, device="meta"), 1)


def test_the_longest_sequence_is_planned() -> None:
    plan = h200([planner.MAX_LENGTH], 1)
    assert plan.work[:, 2].max() == 2**24 - 1
    assert int(plan.work[:, 2].max()) * TILE < 2**31


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "best"}, "policy = 'best': expected one of thor, balanced"),
        ({"max_splits": 0}, "max_splits = 0: expected an integer of at least 1"),
        ({"max_splits": 1025}, "max_splits = 1025: expected at most 1024"),
        ({"max_splits": 1.5}, "max_splits = 1.5: expected an integer of at least 1"),
        ({"max_splits": [2]}, "max_splits = [2]: expected an integer of at least 1"),
        ({"pad_to": "9"}, "pad_to = '9': expected an integer of at least 0"),
        ({"min_chunk_tiles": True}, "min_chunk_tiles = True: expected an integer of at least 1"),
        ({"force_splits": -1}, "force_splits = -1: expected an integer of at least 0"),
        ({"min_chunk_tiles": 0}, "min_chunk_tiles = 0: expected an integer of at least 1"),
        ({"pad_to": 2}, "pad_to = 2: 3 sequences need at least as many work items"),
        ({"pad_to": 65536}, "3 sequences, pad_to = 65536: expected at most 65535 work items"),
        ({"pad_to": 4, "force_splits": 2}, "pad_to = 4: the plan has 6 work items"),
        ({"item_cost": 80.5}, "item_cost = 80.5: expected an integer of at least 1"),
        ({"item_cost": 10**30}, f"item_cost = {10**30}: expected at most 65536"),
        ({"lone_tile_cost": None}, "lone_tile_cost = None: expected an integer of at least 1"),
        ({"lone_tile_cost": 0}, "lone_tile_cost = 0: expected an integer of at least 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        h200([300, 300, 300], 1, **options)
    assert message in str(error.value)


def test_options_that_equal_good_ones_are_refused_after_these() -> None:
    """What passed once is not checked again; True and 1.0 equal 1, and have its hash."""
    h200([300, 300], 1, min_chunk_tiles=1)
    for bad in (True, 1.0, np.True_, np.float32(1)):
        with pytest.raises(PlanError, match=r"min_chunk_tiles = .*: expected an integer of at least 1"):
            h200([300, 300], 1, min_chunk_tiles=bad)
    assert (h200([300, 300], 1, min_chunk_tiles=np.int64(1)).work == h200([300, 300], 1).work).all()


def test_balanced_stays_within_the_grid_where_it_can() -> None:
    plan = h200([128] * 65500 + [2**27], 1)
    assert 65501 < plan.num_items <= planner.MAX_WORK


def test_a_plan_beyond_the_grid_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has 65792 work items: expected at most 65535; split less"):
        h200([32768] * 257, 1, force_splits=256)


def test_host_time_for_256_sequences() -> None:
    """A loose bound, for shared test machines; benchmarks hold the real one (100 us)."""
    seq_lens = np.random.default_rng(5).integers(1, 65536, 256).tolist()
    assert min(timeit.repeat(lambda: h200(seq_lens, 8), number=5, repeat=10)) / 5 < 1e-3


# -- what the kernels read -------------------------------------------------------------------------


@given(
    seq_lens=st.lists(st.integers(0, 5000), min_size=1, max_size=12), heads=st.integers(1, 8), spare=st.integers(0, 40),
    policy=st.sampled_from(["thor", "balanced"]),
)  # fmt: skip
def test_device_work_spells_the_plan_in_keys(seq_lens: list[int], heads: int, spare: int, policy: Any) -> None:
    """Keys instead of tiles, ends inside the sequence, all that a CTA must know of it, and -1 all over in padding."""
    options: dict[str, Any] = {"num_kv_heads": heads, "q_tiles": 1, "sm_count": 20, "ctas_per_sm": 2, "policy": policy}
    plan = plan_splits(seq_lens, **options)
    plan = plan_splits(seq_lens, **options, pad_to=plan.num_items + spare)
    device = plan.device_work(np.array(seq_lens, np.int32))
    assert (device.shape, device.dtype) == ((plan.num_work, 8), np.int32)
    assert (device[plan.num_items :] == -1).all()
    for row, item in zip(device[: plan.num_items].tolist(), plan.work[: plan.num_items].tolist(), strict=True):
        seq, begin, end, slot = item
        assert row[:4] == [seq, begin * TILE, min(end * TILE, seq_lens[seq]), seq_lens[seq]]
        assert row[4:] == [slot, *plan.splits[seq].tolist(), 0]
        if plan.splits[seq, 0] > 1:
            assert 0 <= slot - plan.splits[seq, 1] < plan.splits[seq, 0]
