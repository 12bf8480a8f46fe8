"""Branches, loops, divergence and reconvergence; special registers; predication."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import DivergedFault, TrapFault
from cubinery.aot.ptxsim.isa.base import UnknownInstruction

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_loop_as_often_as_they_like_and_meet_again(schedule: str) -> None:
    body = """
    mov.b32 %r1, 0;
    mov.b32 %r2, %r9;
    LOOP: add.s32 %r1, %r1, %r2;
    sub.s32 %r2, %r2, 1;
    setp.gt.s32 %p1, %r2, 0;
    @%p1 bra LOOP;
    shfl.sync.idx.b32 %r3, %r1, 31, 31, -1;
    add.s32 %r1, %r1, %r3;
    st.global.b32 [%rd9], %r1;
    """
    lanes = np.arange(96)
    lanes = np.where(lanes > 0, lanes, 0)
    total = lanes * (lanes + 1) // 2
    expected = total + np.repeat(total[31::32], 32)
    assert (run(body, 96, threads=96, schedule=schedule) == expected).all()


def test_nested_branches_keep_values_of_other_lanes() -> None:
    body = """
    mov.b32 %r1, 7;
    and.b32 %r2, %r9, 1;
    setp.eq.b32 %p1, %r2, 0;
    @%p1 bra EVEN;
    setp.gt.u32 %p2, %r9, 16;
    @%p2 bra JOIN;
    add.s32 %r1, %r9, 100;
    bra JOIN;
    EVEN: add.s32 %r1, %r9, 1000;
    JOIN: st.global.b32 [%rd9], %r1;
    """
    lane = np.arange(32)
    expected = np.where(lane % 2 == 0, lane + 1000, np.where(lane > 16, 7, lane + 100))
    assert (run(body) == expected).all()


def test_a_guard_keeps_the_old_value() -> None:
    body = "mov.b32 %r1, 5; setp.lt.u32 %p1, %r9, 3; @%p1 add.s32 %r1, %r9, 50; @!%p1 st.global.b32 [%rd9], %r1;"
    assert run(body).tolist() == [0, 0, 0] + [5] * 29


def test_threads_that_return_early_leave_the_others_alone() -> None:
    body = "setp.lt.u32 %p1, %r9, 40; @%p1 ret; bar.sync 0; st.global.b32 [%rd9], 1;"
    assert run(body, 96, threads=96).tolist() == [0] * 40 + [1] * 56


def test_blocks_and_special_registers() -> None:
    body = """
    mov.u32 %r1, %nctaid.x; mov.u32 %r2, %laneid; mov.u32 %r3, %lanemask_lt;
    mad.lo.s32 %r4, %r8, 1000, %r1; mad.lo.s32 %r4, %r4, 32, %r2; xor.b32 %r4, %r4, %r3; st.global.b32 [%rd9], %r4;
    """
    block, lane = np.divmod(np.arange(3 * 64), 64)
    lane = lane % 32
    expected = ((block * 1000 + 3) * 32 + lane) ^ ((1 << lane) - 1)
    assert (run(body, 192, blocks=3, threads=64, resident=2) == expected).all()


def test_a_block_of_less_than_a_warp() -> None:
    body = """
    setp.eq.b32 %p1, %r9, %r9; vote.sync.ballot.b32 %r1, %p1, -1; shfl.sync.up.b32 %r2, %r9, 1, 0, -1;
    add.s32 %r1, %r1, %r2; st.global.b32 [%rd9], %r1;
    """
    assert run(body, 20, threads=20).tolist() == [(1 << 20) - 1 + max(i - 1, 0) for i in range(20)]


def test_elect_in_a_diverged_warp_is_reported() -> None:
    body = """
    setp.eq.b32 %p1, %r9, 0;
    @!%p1 bra OUT;
    elect.sync _|%p2, -1;
    @%p2 st.global.b32 [%rd9], 1;
    OUT:
    """
    with pytest.raises(DivergedFault, match=r"lanes 0 wait for the rest of their warp at line 13") as found:
        run(body.replace("OUT:", "OUT: bar.warp.sync -1;"))
    assert found.value.place.line == 13


def test_elect_after_reconvergence() -> None:
    body = (
        "setp.lt.u32 %p1, %r9, 5; @%p1 bra A; mov.b32 %r1, 1; A: elect.sync %r2|%p2, -1; @%p2 st.global.b32 [%rd9], 7;"
    )
    assert run(body).tolist() == [7] + [0] * 31


def test_a_member_mask_of_some_lanes() -> None:
    body = """
    setp.lt.u32 %p1, %r9, 8; mov.b32 %r3, 255; @!%p1 bra OUT;
    shfl.sync.bfly.b32 %r1, %r9, 1, 31, %r3; st.global.b32 [%rd9], %r1;
    OUT:
    """
    assert run(body).tolist() == [1, 0, 3, 2, 5, 4, 7, 6] + [0] * 24


def test_a_lane_outside_its_member_mask() -> None:
    with pytest.raises(DivergedFault, match="without being in its member mask"):
        run("mov.b32 %r3, 255; shfl.sync.bfly.b32 %r1, %r9, 1, 31, %r3;")


def test_trap() -> None:
    with pytest.raises(TrapFault, match="lane 3") as found:
        run("setp.eq.b32 %p1, %r9, 3; @%p1 trap;")
    assert (found.value.place.lane, found.value.place.warp, found.value.place.line) == (3, 0, 10)


@pytest.mark.parametrize(
    "line", ["frobnicate.b32 %r1, %r2", "add.s32.wild %r1, %r2, %r3", "bar.sync.odd 0", "ld.global.odd.b32 %r1, [%rd8]"]
)
def test_what_is_not_known_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(UnknownInstruction, match=f"PTX line 10: .*{line.split()[0]}"):
        run(f"{line};")
