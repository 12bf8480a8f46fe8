"""Order in global memory: within a CTA by barriers, between CTAs by release and acquire at the scope of the GPU."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine, run

from cubinery.aot.ptxsim.faults import RaceFault
from cubinery.aot.ptxsim.machine import Checks

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

BLOCKS, THREADS = 6, 64
WORDS = BLOCKS * THREADS
COUNTER, RESULT = 4 * WORDS, 4 * WORDS + 8
FENCE = "fence.acq_rel.gpu;"
COUNT = f"atom.relaxed.gpu.global.inc.u32 %r10, [%rd8+{COUNTER}], {BLOCKS - 1};"


def last_block(
    before: str = FENCE, count: str = COUNT, after: str = FENCE, gather: str = "bar.sync 0;",
    spread: str = "bar.sync 1;", store: str = "st.global", load: str = "ld.global",
) -> str:  # fmt: skip
    """Each CTA stores its threads' numbers, counts itself, and the last to do so adds up everyone's."""
    return f"""setp.eq.b32 %p1, %r9, 0; add.s32 %r11, %r6, 1; {store}.b32 [%rd9], %r11; {gather}
    mov.b32 %r1, smem; mov.b32 %r10, 0; @!%p1 bra TOLD; {before} {count} {after} st.shared.b32 [%r1], %r10;
    TOLD: {spread} ld.shared.b32 %r10, [%r1]; setp.ne.b32 %p2, %r10, {BLOCKS - 1}; @%p2 bra OUT;
    mul.wide.u32 %rd3, %r9, 4; add.s64 %rd3, %rd8, %rd3; mov.b32 %r12, 0; mov.b32 %r13, 0;
    LOOP: {load}.b32 %r14, [%rd3]; add.s32 %r12, %r12, %r14; add.s64 %rd3, %rd3, {4 * THREADS};
    add.s32 %r13, %r13, 1; setp.lt.u32 %p3, %r13, {BLOCKS}; @%p3 bra LOOP;
    red.relaxed.gpu.global.add.u32 [%rd8+{RESULT}], %r12; OUT:"""


def execute(body: str, schedule: str = "fair", **options: object) -> np.ndarray:
    return run(body, WORDS + 4, threads=THREADS, blocks=BLOCKS, schedule=schedule, **options)


@each_schedule
@pytest.mark.parametrize("resident", [1, 2, 64])
def test_the_last_block_adds_up_the_others(schedule: str, resident: int) -> None:
    data = execute(last_block(), schedule, resident=resident)
    assert data[RESULT // 4] == WORDS * (WORDS + 1) // 2
    assert data[COUNTER // 4] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"before": "membar.gl;", "after": "membar.gl;"},
        {"before": "fence.sc.sys;", "after": "fence.acq_rel.sys;"},
        {"before": "", "after": "", "count": COUNT.replace("relaxed", "acq_rel")},
        {"before": "", "count": COUNT.replace("relaxed", "release")},
        {"after": "", "count": COUNT.replace("relaxed", "acquire")},
        {"count": COUNT.replace(".relaxed.gpu", "")},
        {"load": "ld.relaxed.gpu.global"},
    ],
)
def test_other_ways_to_say_the_same(changes: dict[str, str]) -> None:
    assert execute(last_block(**changes))[RESULT // 4] == WORDS * (WORDS + 1) // 2


@each_schedule
@pytest.mark.parametrize(
    "changes",
    [
        {"before": ""},
        {"after": ""},
        {"before": "", "after": ""},
        {"before": "fence.acq_rel.cta;"},
        {"after": "membar.cta;"},
        {"count": COUNT.replace("gpu", "cta")},
        {"before": "", "count": COUNT.replace("relaxed", "acquire")},
    ],
)
def test_a_partial_result_read_without_order(changes: dict[str, str], schedule: str) -> None:
    with pytest.raises(RaceFault, match=r"(reads|updates) data \+ 0x\w+, written by warp \d, lane \d+ of block"):
        execute(last_block(**changes), schedule)


@each_schedule
def test_what_other_threads_of_the_block_stored_needs_the_barrier(schedule: str) -> None:
    """Thread 0 counts for its CTA: without the barrier it does not speak for the others."""
    with pytest.raises(RaceFault, match=r"reads data \+ 0x\w+, written by warp \d, lane \d+ of block \(\d, 0, 0\)"):
        execute(last_block(gather=""), schedule)


def test_what_thread_0_learned_needs_a_barrier_to_reach_the_others() -> None:
    with pytest.raises(RaceFault, match=r"shared address 0x400"):
        execute(last_block(spread=""))
    spread = "bar.sync 1; bar.sync 1;"
    late = last_block(after="", spread=f"bar.sync 1; @%p1 {FENCE}").replace("TOLD:", "TOLD: ")
    with pytest.raises(RaceFault, match=r"reads data \+ 0x\w+, written by warp"):
        execute(late)
    assert execute(last_block(spread=spread))[RESULT // 4] == WORDS * (WORDS + 1) // 2


def test_partial_results_are_no_constants() -> None:
    with pytest.raises(RaceFault, match=r"reads by ld\.global\.nc data .* memory that nothing writes"):
        execute(last_block(load="ld.global.nc"))


def test_a_cluster_counts_itself_once() -> None:
    """CTAs of a cluster meet at their barrier, and its first CTA releases for all."""
    body = last_block().replace("setp.eq.b32 %p1, %r9, 0;", "setp.eq.b32 %p1, %r9, 0; mov.u32 %r15, %cluster_ctarank;")
    whole = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    body = body.replace("bar.sync 0;", f"{whole} setp.eq.and.b32 %p1, %r15, 0, %p1;", 1)
    body = body.replace("mov.b32 %r10, 0;", "mov.b32 %r10, 0; setp.eq.b32 %p4, %r9, 0; @%p4 st.shared.b32 [%r1], 77;")
    body = body.replace(f", {BLOCKS - 1};", ", 2;")
    assert execute(body, cluster=2)[RESULT // 4] == WORDS * (WORDS + 1) // 2
    with pytest.raises(RaceFault, match="written by warp"):
        execute(body.replace(whole, ""), cluster=2)


def test_a_later_wave_knows_nothing_of_an_earlier_one() -> None:
    """Block 1 runs after block 0 has exited, but nothing says that it must."""
    body = "setp.eq.b32 %p1, %r8, 0; @%p1 st.global.b32 [%rd8], 5; @%p1 bra OUT; ld.global.b32 %r1, [%rd8]; OUT:"
    with pytest.raises(RaceFault, match=r"reads data \+ 0x0, written by warp 0, lane \d+ of block \(0, 0, 0\)"):
        run(body, 4, blocks=2, resident=1)


@each_schedule
def test_flags_between_blocks(schedule: str) -> None:
    """Block 0 stores and sets a flag; block 1 polls it."""
    body = """setp.ne.b32 %p2, %r9, 0; @%p2 bra OUT; setp.ne.b32 %p1, %r8, 0; @%p1 bra POLL;
    st.global.b32 [%rd8+8], 42; RELEASE [%rd8], 1; bra OUT;
    POLL: ACQUIRE %r1, [%rd8]; setp.eq.b32 %p3, %r1, 0; @%p3 bra POLL; AFTER
    ld.global.b32 %r2, [%rd8+8]; st.global.b32 [%rd8+16], %r2; OUT:"""

    def told(release: str, acquire: str, after: str = "") -> int:
        text = body.replace("RELEASE", release).replace("ACQUIRE", acquire).replace("AFTER", after)
        return int(run(text, 8, blocks=2, schedule=schedule)[4])

    assert told("st.release.gpu.global.b32", "ld.acquire.gpu.global.b32") == 42
    assert told(f"{FENCE} st.relaxed.gpu.global.b32", "ld.relaxed.gpu.global.b32", FENCE) == 42
    assert told("membar.gl; st.volatile.global.b32", "ld.volatile.global.b32", "membar.gl;") == 42
    for broken in (
        ("st.relaxed.gpu.global.b32", "ld.acquire.gpu.global.b32"),
        ("st.release.gpu.global.b32", "ld.relaxed.gpu.global.b32"),
        ("st.release.cta.global.b32", "ld.acquire.cta.global.b32"),
        ("st.global.b32", "ld.acquire.gpu.global.b32"),
    ):
        with pytest.raises(RaceFault, match="with nothing that orders the two"):
            told(*broken)


def test_threads_of_a_block() -> None:
    swap = "xor.b32 %r1, %r9, {}; mul.wide.u32 %rd1, %r1, 4; add.s64 %rd1, %rd8, %rd1; ld.global.b32 %r2, [%rd1];"
    for distance, barrier in ((32, "bar.sync 0;"), (1, "bar.warp.sync -1;")):
        body = f"st.global.b32 [%rd9], %r9; {{}} {swap.format(distance)} {barrier} st.global.b32 [%rd9], %r2;"
        assert (run(body.format(barrier), 64, threads=64) == (np.arange(64) ^ distance)).all()
        with pytest.raises(RaceFault, match=r"reads data \+ 0x\w+, written by warp"):
            run(body.format(""), 64, threads=64)
        with pytest.raises(RaceFault, match=r"writes data \+ 0x\w+, read by warp"):
            run(body.format(barrier).replace(f"%r2, [%rd1]; {barrier}", "%r2, [%rd1];"), 64, threads=64)


def test_warps_that_store_the_same_word() -> None:
    with pytest.raises(RaceFault, match="writes data"):
        run("st.global.b32 [%rd8], %r9;", 1, threads=64)
    run("st.global.b32 [%rd8], %r9;", 1)
    run("st.global.b32 [%rd8], 4; @%p1 bra ON; ON: st.global.b32 [%rd8], 4;", 1, threads=64, blocks=3)  # no difference
    run("atom.global.exch.b32 %r1, [%rd8], %r9;", 1, threads=64, blocks=3)


def test_neighbouring_bytes_are_apart() -> None:
    body = "cvt.u64.u32 %rd1, %r6; add.s64 %rd1, %rd8, %rd1; st.global.b8 [%rd1], %r9;"
    run(body, 32, threads=64, blocks=2)


def test_nothing_is_looked_for_where_races_are_not() -> None:
    machine(last_block(before="", after=""), np.zeros(WORDS + 4, np.uint32), threads=THREADS, blocks=BLOCKS,
            checks=Checks(races=False)).run()  # fmt: skip


BULK = """setp.ne.b32 %p1, %r9, 0; mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2;
st.shared.b32 [%r2], 7;
fence.proxy.async.shared::cta; bar.warp.sync -1; @%p1 bra DONE;
cp.async.bulk.global.shared::cta.bulk_group [%rd8], [%r1], 128; cp.async.bulk.commit_group;
cp.async.bulk.wait_group{} 0; DONE: bar.warp.sync -1; ld.global.b32 %r4, [%rd9]; add.s32 %r4, %r4, 1;
st.shared.b32 [%r2], %r4;"""


def test_what_a_bulk_copy_wrote() -> None:
    """wait_group.read tells that the source was read, not that the destination is written."""
    run(BULK.replace("{}", ""), shared=4096)
    with pytest.raises(RaceFault, match=r"reads data \+ 0x0, written by a bulk copy of warp 0 of block"):
        run(BULK.replace("{}", ".read"), shared=4096)
