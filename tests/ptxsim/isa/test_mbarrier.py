"""mbarrier state against the rules of PTX ISA 9.7.13.15."""

from __future__ import annotations

import random

import pytest

from cubinery.aot.ptxsim.faults import BarrierFault, TransactionFault
from cubinery.aot.ptxsim.isa.mbarrier import MAX_COUNT, State, token_pending, token_phase


def arrive(b: State, count: int = 1, expect: int = 0, **how: bool) -> bool:
    """mbarrier.arrive with or without .expect_tx; True where the phase ends."""
    b.add_tx(expect)
    b.take(count, **how)
    return b.settle()


def expect_tx(b: State, count: int) -> bool:
    b.add_tx(count)
    return b.settle()


def complete_tx(b: State, count: int) -> bool:
    return expect_tx(b, -count)


def test_a_phase_ends_with_its_last_arrival() -> None:
    b = State.fresh(3)
    assert [arrive(b), arrive(b, 2)] == [False, True]
    assert (b.phase, b.pending, b.tx) == (1, 3, 0)
    assert b.ended(0)
    assert not b.ended(1)


def test_bytes_keep_a_phase_open_in_any_order() -> None:
    b = State.fresh(1)
    assert not complete_tx(b, 16)  # lands before it is expected: a negative count
    assert b.tx == -16
    assert not arrive(b, expect=48)
    assert not complete_tx(b, 16)
    assert complete_tx(b, 16)
    assert (b.phase, b.tx, b.pending) == (1, 0, 1)


def test_expect_tx_comes_before_the_arrival_of_the_same_instruction() -> None:
    b = State.fresh(1)
    assert not arrive(b, expect=8)
    assert b.pending == 0
    with pytest.raises(BarrierFault, match="0 of 1"):
        arrive(b)
    assert complete_tx(b, 8)


def test_an_expected_count_that_balances_ends_the_phase_at_once() -> None:
    b = State.fresh(1)
    complete_tx(b, 8)
    assert arrive(b, expect=8)


def test_drop_lowers_later_phases() -> None:
    b = State.fresh(3)
    assert not arrive(b, drop=True)
    assert arrive(b, 2)
    assert (b.count, b.pending) == (2, 2)
    assert not arrive(b, 2, expect=4, drop=True)
    assert complete_tx(b, 4)
    assert b.count == b.pending == 0
    with pytest.raises(BarrierFault):
        arrive(b)


def test_no_complete_must_not_end_the_phase() -> None:
    b = State.fresh(3)
    assert not arrive(b, 2, may_complete=False)
    with pytest.raises(BarrierFault, match="noComplete"):
        arrive(b, 1, may_complete=False)
    assert b.pending == 1  # unchanged by the fault
    expect_tx(b, 4)
    assert not arrive(b, 1, may_complete=False)


def test_tokens_tell_phase_and_pending_arrivals() -> None:
    b = State.fresh(4)
    arrive(b)
    token = b.token
    assert (token_phase(token), token_pending(token)) == (0, 3)
    assert not b.ended_since(token)
    arrive(b, 3)
    assert b.ended_since(token)
    arrive(b, 4)
    with pytest.raises(BarrierFault, match="one before"):
        b.ended_since(token)
    with pytest.raises(BarrierFault):
        b.ended_since(b.token + (1 << 20))


def test_a_pending_copy_adds_an_arrival() -> None:
    b = State.fresh(1)
    b.add_pending()
    assert not arrive(b)
    assert arrive(b)
    assert b.pending == 1  # the next phase expects what init said


@pytest.mark.parametrize("count", [0, -1, MAX_COUNT + 1])
def test_counts_out_of_range(count: int) -> None:
    with pytest.raises(BarrierFault, match=str(MAX_COUNT)):
        State.fresh(count)
    with pytest.raises(BarrierFault):
        arrive(State.fresh(1), count)


def test_limits_of_the_transaction_count() -> None:
    b = State.fresh(1)
    expect_tx(b, MAX_COUNT)
    with pytest.raises(TransactionFault, match=str(MAX_COUNT + 1)):
        expect_tx(b, 1)
    assert b.tx == MAX_COUNT
    with pytest.raises(TransactionFault):
        expect_tx(b, -MAX_COUNT - 1)
    b = State.fresh(1)
    complete_tx(b, MAX_COUNT)
    with pytest.raises(TransactionFault):
        complete_tx(b, 1)


def test_what_is_left_over_is_reported() -> None:
    b = State.fresh(1)
    assert b.unbalanced() == ""
    expect_tx(b, 32)
    assert "32" in b.unbalanced()


def test_random_walks_against_a_count_of_events() -> None:
    """Phases end exactly when arrivals and bytes of the phase add up, whatever the order."""
    rng = random.Random(7)
    for _ in range(40):
        count, total = rng.randint(1, 5), rng.randint(0, 4) * 16
        events = ["arrive"] * count + ["land"] * (total // 16)
        rng.shuffle(events)
        b = State.fresh(count)
        expect_tx(b, total)
        for i, event in enumerate(events):
            done = arrive(b) if event == "arrive" else complete_tx(b, 16)
            assert done == (i == len(events) - 1)
        assert (b.phase, b.pending, b.tx) == (1, count, 0)
