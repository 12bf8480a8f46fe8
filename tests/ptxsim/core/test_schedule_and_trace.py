"""Schedules by name, and the Chrome trace."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from ptx_bench import machine

from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.schedule import Delays, Fair, Late, Priorities, schedule, series
from cubinery.aot.ptxsim.trace import ChromeTrace

LOOP = """
mov.b32 %r1, smem; setp.eq.b32 %p1, %r9, 0; @%p1 st.shared.b32 [%r1], 0; bar.sync 0;
mov.b32 %r2, 0;
AGAIN: atom.shared.add.u32 %r3, [%r1], 1; add.s32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 4; @%p2 bra AGAIN;
st.global.b32 [%rd9], %r3;
"""


def test_series_begins_with_the_fair_one() -> None:
    names = series(7)
    assert names[0] == "fair:0"
    assert len(set(names)) == 7
    assert {type(schedule(name)) for name in names} == {Fair, Late, Delays, Priorities}


@pytest.mark.parametrize("name", ["unfair", "late:x", ""])
def test_unknown_schedules(name: str) -> None:
    with pytest.raises(SimError, match="expected one of fair, delays, priorities, late"):
        schedule(name)


def run(name: str) -> list[int]:
    data = np.zeros(256, np.uint32)
    machine(LOOP, data, threads=128, blocks=2, schedule=name).run()
    found: list[int] = data.tolist()
    return found


def test_a_schedule_is_a_function_of_its_seed_and_seeds_differ() -> None:
    assert run("priorities:3") == run("priorities:3")
    assert len({tuple(run(f"delays:{seed}")) for seed in range(6)}) > 1


def test_a_spin_on_memory_does_not_starve_the_writer() -> None:
    """Warp 0 spins at a smaller segment than the one where warp 1 stores."""
    body = """
    setp.ge.u32 %p1, %r9, 32; @%p1 bra WRITER;
    SPIN: ld.relaxed.gpu.global.b32 %r1, [%rd8+256]; setp.eq.b32 %p2, %r1, 0; @%p2 bra SPIN;
    bra OUT;
    WRITER: st.release.gpu.global.b32 [%rd8+256], 1;
    OUT: st.global.b32 [%rd9], 1;
    """
    for name in ("fair", "delays:1", "priorities:1"):
        data = np.zeros(65, np.uint32)
        machine(body, data, threads=64, schedule=name).run()
        assert (data == 1).all()


def test_trace(tmp_path: Path) -> None:
    trace = ChromeTrace()
    data = np.zeros(256, np.uint32)
    machine(LOOP, data, threads=128, blocks=2, tracer=trace).run()
    trace.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"}
    assert len(rows) == 8  # two blocks of four warps
    names = [e["args"]["name"] for e in events if e["ph"] == "M"]
    assert names == ["1 k block (0, 0, 0)", "1 k block (1, 0, 0)"]
    for row in rows:  # a warp does one thing at a time
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == row)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
