"""cp.async and bulk copies of plain bytes in the machine, under every schedule."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine, run

from cubinery.aot.ptxsim.faults import (
    BarrierFault,
    MisalignedFault,
    OutOfBoundsFault,
    ProxyFault,
    RaceFault,
    TransactionFault,
    UninitialisedFault,
)

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

MINE = """mov.b32 %r1, smem; shl.b32 %r2, %r9, 4; add.s32 %r2, %r1, %r2;
mul.wide.u32 %rd1, %r9, 16; add.s64 %rd1, %rd8, %rd1;"""
BACK = "ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [%r2]; st.global.v4.b32 [%rd1+512], {%r3, %r4, %r5, %r6};"


def copied(body: str, schedule: str = "fair") -> tuple[list[int], list[int]]:
    """128 words in; what 32 threads copy to the 128 words after them."""
    data = np.zeros(256, np.uint32)
    data[:128] = np.arange(1, 129)
    machine(f"{MINE} {body}", data, schedule=schedule).run()
    return data[:128].tolist(), data[128:].tolist()


@each_schedule
@pytest.mark.parametrize("wait", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_cp_async(wait: str, schedule: str) -> None:
    source, target = copied(f"cp.async.cg.shared.global [%r2], [%rd1], 16; {wait} {BACK}", schedule)
    assert target == source
    for size, words in ((4, 1), (8, 2)):
        before = "st.shared.v4.b32 [%r2], {%r9, %r9, %r9, %r9};"
        body = f"{before} cp.async.ca.shared.global [%r2], [%rd1], {size}; {wait} {BACK}"
        source, target = copied(body, schedule)
        assert target == [w if i % 4 < words else i // 4 for i, w in enumerate(source)]


def test_cp_async_fills_with_zeros() -> None:
    wait = f"cp.async.wait_all; {BACK}"
    source, target = copied(f"cp.async.cg.shared.global [%r2], [%rd1], 16, 6; {wait}")
    assert target == [(w, w & 0xFFFF, 0, 0)[i % 4] for i, w in enumerate(source)]
    odd = "and.b32 %r7, %r9, 1; shl.b32 %r7, %r7, 4;"
    source, target = copied(f"{odd} cp.async.cg.shared.global [%r2], [%rd1], 16, %r7; {wait}")
    assert target == [w if i // 4 % 2 else 0 for i, w in enumerate(source)]
    source, target = copied(f"setp.lt.u32 %p1, %r9, 8; cp.async.cg.shared.global [%r2], [%rd1], 16, %p1; {wait}")
    assert target == [0 if i // 4 < 8 else w for i, w in enumerate(source)]


def test_cp_async_without_a_wait() -> None:
    with pytest.raises((UninitialisedFault, RaceFault)):
        copied(f"cp.async.cg.shared.global [%r2], [%rd1], 16; cp.async.commit_group; {BACK}", "late:1")


@each_schedule
def test_cp_async_arrives_at_a_barrier(schedule: str) -> None:
    body = """
    add.s32 %r8, %r1, 768; setp.eq.b32 %p1, %r9, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r8], 32; bar.warp.sync -1;
    cp.async.cg.shared.global [%r2], [%rd1], 16;
    cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];
    SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r8], 0; @!%p4 bra SPIN;
    """
    source, target = copied(body + BACK, schedule)
    assert target == source


def test_cp_async_arrives_once_too_often() -> None:
    body = """
    add.s32 %r8, %r1, 768; setp.eq.b32 %p1, %r9, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r8], 1; bar.warp.sync -1;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 16;
    @%p1 cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r8];
    """
    with pytest.raises(BarrierFault, match="expects no arrival"):
        copied(body)


BARRIER = """
add.s32 %r8, %r1, 768; setp.eq.b32 %p1, %r9, 0; @!%p1 bra READY;
mbarrier.init.shared::cta.b64 [%r8], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r8], 512;
BULK
READY: bar.warp.sync -1;
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r8], 0; @!%p4 bra SPIN;
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd8], 512, [%r8];"


@each_schedule
def test_bulk_load_and_store(schedule: str) -> None:
    body = BARRIER.replace("BULK", LOAD)
    source, target = copied(body + BACK, schedule)
    assert target == source
    store = """
    fence.proxy.async.shared::cta; @!%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd8+512], [%r1], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    source, target = copied(body + store, schedule)
    assert target == source
    masked = store.replace("bulk_group [", "bulk_group.cp_mask [").replace("512;\n    cp", "512, 0xFF;\n    cp")
    source, target = copied(body + masked, schedule)
    assert target == [w if i % 4 < 2 else 0 for i, w in enumerate(source)]


@each_schedule
def test_bulk_reduction(schedule: str) -> None:
    body = (
        BARRIER.replace("BULK", LOAD)
        + """
    @!%p1 bra DONE;
    cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd8], [%r1], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    )
    source, _ = copied(body, schedule)
    assert source == [2 * i for i in range(1, 129)]


def test_bulk_misuse() -> None:
    for change, kind in (
        (LOAD.replace("[%rd8]", "[%rd8+4]"), MisalignedFault),
        (LOAD.replace("[%rd8]", "[%rd8+768]"), OutOfBoundsFault),
        (LOAD.replace("[%r1]", "[%r1+65536]"), OutOfBoundsFault),
        (LOAD.replace("512", "496"), TransactionFault),
    ):
        body = BARRIER.replace("BULK", change)
        if kind is TransactionFault:
            body = body.replace("SPIN:", "bra END; SPIN:") + "END:"
        with pytest.raises(kind):
            copied(body)


def test_prefetch_changes_nothing() -> None:
    assert (run("cp.async.bulk.prefetch.L2.global [%rd8], 64;") == 0).all()


def test_the_barrier_of_a_bulk_load_needs_its_fence() -> None:
    with pytest.raises(ProxyFault, match="not made visible to the async proxy"):
        copied(BARRIER.replace("fence.mbarrier_init.release.cluster;", "").replace("BULK", LOAD))


def test_shared_memory_that_a_bulk_copy_reads_needs_the_proxy_fence() -> None:
    copy = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r1], [%r1+1024], 512, [%r8];"
    fill = "st.shared.v4.b32 [%r2+1024], {%r9, %r9, %r9, %r9}; fence.proxy.async.shared::cta; bar.warp.sync -1;"
    body = f"{fill} {BARRIER.replace('BULK', copy)} {BACK}"
    data = np.zeros(256, np.uint32)
    machine(f"{MINE} {body}", data, shared=4096).run()
    assert data[128:].tolist() == [i // 4 for i in range(128)]
    with pytest.raises(ProxyFault, match=r"without fence\.proxy\.async"):
        machine(f"{MINE} {body.replace('fence.proxy.async.shared::cta;', '')}", data, shared=4096).run()


@pytest.mark.parametrize("missing", ["cp.async.bulk.wait_group 0;", "cp.async.bulk.commit_group;"])
def test_a_block_does_not_exit_before_its_copies_have_read(missing: str) -> None:
    store = """
    bar.warp.sync -1; fence.proxy.async.shared::cta; @!%p1 bra DONE;
    cp.async.bulk.global.shared::cta.bulk_group [%rd8+512], [%r1], 512;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    DONE:
    """
    with pytest.raises(RaceFault, match="may still read its shared memory"):
        copied(BARRIER.replace("BULK", LOAD) + store.replace(missing, ""))


def test_a_bulk_load_over_ordinary_stores_needs_the_proxy_fence() -> None:
    fill = "st.shared.v4.b32 [%r2], {%r9, %r9, %r9, %r9}; fence.proxy.async.shared::cta; bar.warp.sync -1;"
    body = f"{fill} {BARRIER.replace('BULK', LOAD)} {BACK}"
    source, target = copied(body)
    assert target == source
    with pytest.raises(ProxyFault, match="is overwritten by the async proxy"):
        copied(body.replace("fence.proxy.async.shared::cta;", ""))
