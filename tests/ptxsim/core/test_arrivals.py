"""Arrivals at an mbarrier that nothing orders after its phase before: reported in every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.arrivals import Arrivals
from cubinery.aot.ptxsim.faults import RaceFault
from cubinery.aot.ptxsim.machine import Checks

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

SETUP = """
mov.b32 %r1, smem; and.b32 %r2, %r9, 31; setp.eq.b32 %p1, %r9, 0; setp.eq.b32 %p2, %r2, 0; setp.lt.u32 %p3, %r9, 32;
@%p1 mbarrier.init.shared::cta.b64 [%r1], COUNT; bar.sync 0;
"""
ARRIVE = "@%p2 mbarrier.arrive.shared::cta.b64 _, [%r1];"
WAIT = "SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r1], 0; @!%p4 bra SPIN;"
EARLY = r"arrives at the mbarrier at 0x400 in phase \d, with nothing that orders it after the arrival by lane \d+"


def arrivals(*body: str, count: int = 2, threads: int = 64, **options: object) -> None:
    run("\n".join((SETUP.replace("COUNT", str(count)), *body)), threads, threads=threads, **options)


@each_schedule
@pytest.mark.parametrize("between", [WAIT, "bar.sync 0;"])
def test_an_arrival_after_the_phase_before(between: str, schedule: str) -> None:
    """The wait tells of all arrivals, and so does any other barrier that all pass after they arrived."""
    arrivals(ARRIVE, between, ARRIVE, schedule=schedule)


@each_schedule
def test_an_arrival_that_might_end_the_phase_before(schedule: str) -> None:
    """Each of two warps arrives twice: both arrivals of one may end the first phase."""
    with pytest.raises(RaceFault, match=EARLY + r" of warp \d in the phase before"):
        arrivals(ARRIVE, ARRIVE, schedule=schedule)


@each_schedule
def test_only_one_of_two_waits_before_it_arrives_again(schedule: str) -> None:
    """Warp 0 goes on without: whether that goes wrong is a matter of luck, which no schedule needs."""
    with pytest.raises(RaceFault, match=EARLY):
        arrivals(ARRIVE, f"@%p3 bra AGAIN; {WAIT} AGAIN:", ARRIVE, schedule=schedule)


def test_a_thread_knows_its_own_arrivals() -> None:
    arrivals(f"@!%p3 bra END; {ARRIVE} {ARRIVE} {ARRIVE} END:", count=1)


def test_lanes_of_a_warp_are_ordered_by_bar_warp_sync_alone() -> None:
    """Lane 0 arrives in the first phase, lane 1 in the second."""
    second = "setp.eq.b32 %p5, %r2, 1; @%p5 mbarrier.arrive.shared::cta.b64 _, [%r1];"
    arrivals(ARRIVE, "bar.warp.sync -1;", second, count=1, threads=32)
    with pytest.raises(RaceFault, match=EARLY + " of warp 0"):
        arrivals(ARRIVE, second, count=1, threads=32)


def test_a_phase_that_was_started_anew_asks_for_nothing() -> None:
    anew = "bar.sync 0; @%p1 mbarrier.inval.shared::cta.b64 [%r1]; @%p1 mbarrier.init.shared::cta.b64 [%r1], 2;"
    arrivals(ARRIVE, anew, "bar.sync 0;", ARRIVE)


COMMIT = "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];"
COPIED = "@%p2 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r1];"


@each_schedule
@pytest.mark.parametrize("arrive", [COMMIT, COPIED])
def test_arrivals_that_come_later_follow_as_of_their_issue(arrive: str, schedule: str) -> None:
    one = f"@!%p3 bra FIRST; {arrive} FIRST:"
    other = f"@%p3 bra SECOND; {arrive} SECOND:"
    with pytest.raises(RaceFault, match=EARLY):
        arrivals(one, other, count=1, schedule=schedule)
    arrivals(one, f"@%p3 bra SECOND; {WAIT} {arrive} SECOND:", count=1, schedule=schedule)


def test_without_the_race_check_nothing_is_said() -> None:
    arrivals(ARRIVE, ARRIVE, checks=Checks(races=False))


def test_who_is_late() -> None:
    """Columns 1 and 4 arrived in stretches 3 and 5 of the phase before."""
    made = Arrivals()
    assert made.late(np.zeros(6, np.int32), 0) == -1, "there was no phase before"
    made.now = [(1, 3), (4, 5)]
    made.end()
    assert made.late(np.array([0, 3, 0, 0, 5, 0], np.int32), 0) == -1
    assert made.late(np.array([0, 3, 0, 0, 4, 0], np.int32), 0) == 4
    assert made.late(np.array([0, 2, 0, 0, 4, 0], np.int32), 0) == 1
    assert made.late(np.array([0, 2, 0, 0, 4, 0], np.int32), 1) == 4, "a thread knows its own"
    assert made.late(np.array([0, 2, 0, 0, 5, 0], np.int32), 1) == -1
    made.end()
    assert made.late(np.zeros(6, np.int32), 0) == -1, "the phase before had no arrival"
