"""How a captured call is replayed; that it is timed right needs a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import timing
from benchmarks.timing import GRAPHS, GpuTimer


def test_a_captured_call_has_several_graphs_in_turn_the_last_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call allocates is another tensor in every graph; the caller of `capture` knows the last."""
    captured: list[int] = []
    replayed: list[int] = []

    def graph(self: GpuTimer, call: Callable[[], object]) -> Callable[[], object]:
        call()
        number = len(captured)
        return lambda: replayed.append(number)

    monkeypatch.setattr(GpuTimer, "_graph", graph)
    replay = GpuTimer.__new__(GpuTimer).capture(lambda: captured.append(0))
    assert GRAPHS > 1
    assert len(captured) == GRAPHS
    for _ in range(2 * GRAPHS + 1):
        replay()
    once = list(range(GRAPHS, 0, -1))
    assert replayed == [*once, *once, GRAPHS]


def test_calls_in_turn_give_what_they_return() -> None:
    call = timing.in_turn([lambda: "a", lambda: "b"])
    assert [call() for _ in range(3)] == ["a", "b", "a"]
