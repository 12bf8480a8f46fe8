"""Shuffles, votes, matches and reductions, lane by lane (PTX ISA 9.7.9.6, 9.7.13)."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_floats import F32, decode, is_negative, specials
from ptx_ops import evaluate, run, specialise

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

RNG = random.Random(21)
FULL = 0xFFFFFFFF
ALL = [1] * 32
VALUES = [RNG.getrandbits(32) for _ in range(32)]


def shuffled(mode: str, a: list[int], b: list[int], c: list[int]) -> tuple[list[int], list[int]]:
    """The semantics of 9.7.9.6, one lane after the other."""
    values, inside = [], []
    for lane in range(32):
        by, clamp, mask = b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31
        last = lane & mask | clamp & ~mask & 31
        first = lane & mask
        if mode == "up":
            source, valid = lane - by, lane - by >= last
        elif mode == "down":
            source, valid = lane + by, lane + by <= last
        elif mode == "bfly":
            source, valid = lane ^ by, lane ^ by <= last
        else:
            source = first | by & ~mask & 31
            valid = source <= last
        values.append(a[source if valid else lane])
        inside.append(int(valid))
    return values, inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("segment", [0, 0x10, 0x18, 0x1C, 0x1E, 0x1F])
def test_shuffle(mode: str, segment: int) -> None:
    """Every distance, whole warps and segments, clamps at either end; with and without the predicate."""
    for clamp in (0, 31, 7) if mode != "up" else (0, 5):
        c = segment << 8 | clamp
        for by in (0, 1, 3, 4, 16, 31, 33):
            expected = shuffled(mode, VALUES, [by] * 32, [c] * 32)
            assert run(f"shfl.sync.{mode}.b32", VALUES, by, c, FULL, pair=True) == expected  # constants
            assert run(f"shfl.sync.{mode}.b32", VALUES, [by] * 32, [c] * 32, FULL, pair=True) == expected
            assert run(f"shfl.sync.{mode}.b32", VALUES, by, c, FULL) == expected[0]


@given(
    st.lists(st.integers(0, 63), min_size=32, max_size=32), st.lists(st.integers(0, 0x1FFF), min_size=32, max_size=32)
)
def test_shuffle_by_registers(by: list[int], clamp: list[int]) -> None:
    """Distance and clamp that differ from lane to lane."""
    for mode in ("up", "down", "bfly", "idx"):
        assert run(f"shfl.sync.{mode}.b32", VALUES, by, clamp, FULL, pair=True) == shuffled(mode, VALUES, by, clamp)


def test_shuffle_of_several_warps_and_uniform_values() -> None:
    """Warps keep apart; a value with one column, the same in all lanes, stays what it is."""
    compiled = specialise("shfl.sync.bfly.b32")
    a = np.arange(64, dtype=np.uint32).reshape(2, 32)
    one, clamp, mask = (np.full((1, 1), x, np.uint32) for x in (1, 31, FULL))
    (result,) = evaluate(compiled, [a, one, clamp, mask])
    assert result.tolist() == [[lane ^ 1 for lane in range(32)], [32 + (lane ^ 1) for lane in range(32)]]
    (result,) = evaluate(compiled, [a[:, :1], one, clamp, mask])
    assert np.broadcast_to(result, (2, 32)).tolist() == [[0] * 32, [32] * 32]
    assert (compiled.converged, compiled.membermask) == (True, 3)


ACTIVE = [ALL, [int(lane % 3 == 0) for lane in range(32)], [0] * 31 + [1]]
MASKS = [FULL, 0xFFFF, 0x80000001]
PREDICATES = [ALL, [0] * 32, [RNG.randrange(2) for _ in range(32)], [1] * 31 + [0]]


def members(active: list[int], mask: int) -> list[int]:
    return [lane for lane in range(32) if active[lane] and mask >> lane & 1]


@pytest.mark.parametrize("active", ACTIVE)
@pytest.mark.parametrize("mask", MASKS)
def test_vote(active: list[int], mask: int) -> None:
    """9.7.13.9 vote.sync over the members alone, whatever the other lanes hold."""
    chosen = members(active, mask)
    if not chosen:
        return
    for p in PREDICATES:
        held = [p[lane] for lane in chosen]
        results = {"all": all(held), "any": any(held), "uni": len(set(held)) == 1}
        for mode, expected in results.items():
            found = run(f"vote.sync.{mode}.pred", p, mask, active=active)
            assert [found[lane] for lane in chosen] == [int(expected)] * len(chosen), mode
        found = run("vote.sync.ballot.b32", p, mask, active=active)
        assert found[chosen[0]] == sum(1 << lane for lane in chosen if p[lane])


@pytest.mark.parametrize("width", [32, 64])
def test_match(width: int) -> None:
    """9.7.13.10 match.sync: who has my value; whether all agree."""
    values = [RNG.choice((1, 2, 1 << (width - 1))) for _ in range(32)]
    for active, mask in ((ALL, FULL), (ACTIVE[1], 0x0FFFFFFF)):
        chosen = members(active, mask)
        found = run(f"match.any.sync.b{width}", values, mask, active=active)
        for lane in chosen:
            assert found[lane] == sum(1 << other for other in chosen if values[other] == values[lane])
        member_bits = sum(1 << lane for lane in chosen)
        same = [7 if lane in chosen else lane for lane in range(32)]
        everyone = run(f"match.all.sync.b{width}", same, mask, active=active, pair=True)
        assert (everyone[0][chosen[0]], everyone[1][chosen[0]]) == (member_bits, 1)
        same[chosen[-1]] = 8
        nobody = run(f"match.all.sync.b{width}", same, mask, active=active, pair=True)
        assert (nobody[0][chosen[0]], nobody[1][chosen[0]]) == (0, 0)
        assert run(f"match.all.sync.b{width}", same, mask, active=active)[chosen[0]] == 0


def signed(x: int) -> int:
    return x - (1 << 32) if x >> 31 else x


REDUCTIONS: dict[str, Callable[[list[int]], int]] = {
    "add.u32": sum,
    "add.s32": sum,
    "min.u32": min,
    "max.u32": max,
    "min.s32": lambda x: min(map(signed, x)),
    "max.s32": lambda x: max(map(signed, x)),
    "and.b32": lambda x: reduce(lambda a, b: a & b, x),
    "or.b32": lambda x: reduce(lambda a, b: a | b, x),
    "xor.b32": lambda x: reduce(lambda a, b: a ^ b, x),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_redux(name: str) -> None:
    """9.7.13.12 redux.sync of integers over the members."""
    for active, mask in ((ALL, FULL), (ACTIVE[1], 0x00FFFFFF), (ALL, 2)):
        chosen = members(active, mask)
        found = run(f"redux.sync.{name}", VALUES, mask, active=active)
        assert found[chosen[0]] == REDUCTIONS[name]([VALUES[lane] for lane in chosen]) & FULL


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize("absolute", ["", ".abs"])
@pytest.mark.parametrize("nan", ["", ".NaN"])
def test_redux_f32(largest: bool, absolute: str, nan: str) -> None:
    """redux.sync of f32: -0 below +0, NaN left out or winning, .abs of magnitudes."""
    edges = specials(F32)
    for trial in range(20):
        rng = random.Random(trial)
        values = [rng.choice(edges[:-2] if trial % 2 else edges) for _ in range(32)]
        if trial == 19:
            values = [0x7FC00000] * 32
        chosen = members(ACTIVE[trial % 2], FULL)
        used = [values[lane] & 0x7FFFFFFF if absolute else values[lane] for lane in chosen]
        numbers = [x for x in used if decode(x, F32) == decode(x, F32)]
        if (nan and len(numbers) < len(used)) or not numbers:
            expected = 0x7FFFFFFF
        else:
            pick = max if largest else min
            expected = pick(numbers, key=lambda x: (decode(x, F32), not is_negative(decode(x, F32))))
        name = f"redux.sync.{'max' if largest else 'min'}{absolute}{nan}.f32"
        assert run(name, values, FULL, active=ACTIVE[trial % 2])[chosen[0]] == expected


def test_activemask_and_elect() -> None:
    """9.7.13.11 activemask: who executes; .14 elect.sync: the lowest member leads."""
    for active in ACTIVE:
        bits = sum(1 << lane for lane in range(32) if active[lane])
        assert run("activemask.b32", active=active) == [bits] * 32
    lane, leads = run("elect.sync", 0xFFFFFFF0, active=ALL, pair=True)
    assert lane == [4] * 32
    assert leads == [int(i == 4) for i in range(32)]
    assert specialise("elect.sync", pair=True).converged


@pytest.mark.parametrize(
    "name",
    [
        "vote.any.pred",
        "shfl.idx.b32",
        "shfl.sync.b32",
        "redux.sync.add.b32",
        "redux.sync.add.f32",
        "redux.sync.min.NaN.s32",
        "vote.sync.ballot.pred",
    ],
)
def test_refused(name: str) -> None:
    """What is no PTX of these chips raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
