"""Lanes of one warp that share memory: ordered by bar.warp.sync and barriers alone, not by standing together."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import RaceFault

each_schedule = pytest.mark.parametrize("schedule", ["fair", "delays:1", "priorities:1", "late:1"])

MINE = "mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2; xor.b32 %r3, %r2, 4;"
"""%r2: the address of this thread's word, %r3: that of the lane beside."""
STORE, LOAD = "st.shared.b32 [%r2], %r9;", "ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd9], %r4;"
SYNC = "bar.warp.sync -1;"


@each_schedule
def test_a_neighbours_word_after_the_warp_barrier(schedule: str) -> None:
    assert (run(f"{MINE} {STORE} {SYNC} {LOAD}", 64, threads=64, schedule=schedule) == (np.arange(64) ^ 1)).all()


@each_schedule
@pytest.mark.parametrize(
    "between", ["", "shfl.sync.idx.b32 %r5, %r9, 0, 31, -1;", "vote.sync.all.pred %p3, %p3, -1;", "fence.acq_rel.cta;"]
)
def test_nothing_else_orders_lanes(between: str, schedule: str) -> None:
    """A shuffle brings the lanes together, but orders no memory (PTX ISA 9.7.9.6)."""
    between = f"setp.eq.b32 %p3, %r9, 0; {between}"
    with pytest.raises(RaceFault, match=r"reads shared address 0x\w+, written by lane \d+ of warp 0, no bar\.warp"):
        run(f"{MINE} {STORE} {between} {LOAD}", schedule=schedule)


def test_a_neighbours_word_overwritten_after_it_was_read() -> None:
    body = f"{MINE} {STORE} {SYNC} {LOAD} {{}} st.shared.b32 [%r2], 7;"
    run(body.format(SYNC))
    with pytest.raises(RaceFault, match=r"writes shared address 0x\w+, read by lane \d+ of warp 0, no bar\.warp"):
        run(body.format(""))


def test_a_lane_may_do_with_its_own_word_what_it_likes() -> None:
    body = f"{MINE} {STORE} ld.shared.b32 %r4, [%r2]; st.shared.b32 [%r2], %r4; ld.shared.b32 %r4, [%r2];"
    assert (run(f"{body} st.global.b32 [%rd9], %r4;") == np.arange(32)).all()


def test_lanes_that_read_the_same_word_are_all_remembered() -> None:
    """Lane 31 of the readers, which share words, must be ordered before the write as well as the first."""
    body = f"{MINE} {STORE} {SYNC} and.b32 %r5, %r9, 3; shl.b32 %r5, %r5, 2; add.s32 %r5, %r1, %r5;"
    body += (
        "ld.shared.b32 %r4, [%r5]; st.global.b32 [%rd9], %r4; setp.eq.b32 %p1, %r9, 3; {} @%p1 st.shared.b32 [%r5], 9;"
    )
    run(body.replace("{}", SYNC))
    with pytest.raises(RaceFault, match="read by lane 7 of warp 0"):
        run(body.replace("{}", ""))


RING = """mov.b32 %r1, smem; add.s32 %r2, %r1, 64; setp.eq.b32 %p1, %r9, 0; setp.lt.u32 %p2, %r9, 32;
and.b32 %r6, %r9, 31; shl.b32 %r5, %r6, 2; add.s32 %r5, %r2, %r5; add.s32 %r7, %r2, 20;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 1; bar.sync 0; @!%p2 bra OTHER;
st.shared.b32 [%r5], %r9; {} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1]; bra OUT;
OTHER: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra OTHER;
ld.shared.b32 %r4, [%r7]; st.global.b32 [%rd9], %r4; OUT:"""
"""Warp 0 stores, its lane 0 arrives for it; warp 1 waits and reads what lane 5 stored."""


@each_schedule
def test_one_lane_arrives_for_its_warp(schedule: str) -> None:
    assert (run(RING.replace("{}", SYNC), 64, threads=64, schedule=schedule)[32:] == 5).all()
    with pytest.raises(RaceFault, match=r"reads shared address 0x454, written by warp 0, with nothing"):
        run(RING.replace("{}", ""), 64, threads=64, schedule=schedule)


def test_what_the_arriving_lane_did_itself_needs_no_warp_barrier() -> None:
    own = RING.replace("{}", "").replace("add.s32 %r7, %r2, 20", "mov.b32 %r7, %r2")
    assert (run(own, 64, threads=64)[32:] == 0).all()


def test_lanes_that_arrive_each_for_itself() -> None:
    each = RING.replace("{}", "").replace("[%r1], 1;", "[%r1], 32;").replace("@%p1 mbarrier.arrive", "mbarrier.arrive")
    assert (run(each, 64, threads=64)[32:] == 5).all()


def test_matrices_read_by_the_warp_and_released_by_a_lane() -> None:
    """ldmatrix reads for all lanes; the one that arrives speaks for the others only after bar.warp.sync."""
    body = """mov.b32 %r1, smem; add.s32 %r2, %r1, 1024; setp.eq.b32 %p1, %r9, 0; setp.lt.u32 %p2, %r9, 32;
    and.b32 %r6, %r9, 31; shl.b32 %r5, %r6, 4; add.s32 %r5, %r2, %r5; mov.b32 %r3, 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; st.shared.v4.b32 [%r5], {%r3, %r3, %r3, %r3}; bar.sync 0;
    @!%p2 bra OTHER;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r5]; SYNC
    @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1]; st.global.b32 [%rd9], %r10; bra OUT;
    OTHER: mbarrier.try_wait.parity.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra OTHER;
    st.shared.b32 [%r5], %r9; OUT:"""
    body = body.replace("st.shared.v4", "@%p2 st.shared.v4")
    run(body.replace("SYNC", SYNC), 64, threads=64, shared=4096)
    with pytest.raises(RaceFault, match=r"writes shared address 0x\w+, read by warp 0, with nothing"):
        run(body.replace("SYNC", ""), 64, threads=64, shared=4096)
