"""Barriers, mbarriers and tensor copies: who waits, who goes on, and what is reported when they are misused."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine, run

from cubinery.aot.ptxsim.faults import (
    BarrierFault,
    DeadlockFault,
    DescriptorFault,
    DivergedFault,
    Fault,
    ProxyFault,
    RaceFault,
    TransactionFault,
)
from cubinery.aot.ptxsim.tensormap import TensorMap

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

MINE = "mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2;"
"""%r1 is shared memory, %r2 this thread's word of it."""
LEADER = "setp.eq.b32 %p1, %r9, 0;"


# -- bar -------------------------------------------------------------------------------------------


@each_schedule
def test_bar_sync_orders_stores_before_loads(schedule: str) -> None:
    body = f"""{MINE} st.shared.b32 [%r2], %r9; bar.sync 0; xor.b32 %r3, %r2, 256;
    ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd9], %r4;"""
    assert (run(body, 128, threads=128, schedule=schedule) == (np.arange(128) ^ 64)).all()


def test_without_the_barrier_it_is_a_race() -> None:
    body = (
        f"{MINE} st.shared.b32 [%r2], %r9; xor.b32 %r3, %r2, 256; ld.shared.b32 %r4, [%r3]; st.global.b32 [%rd9], %r4;"
    )
    with pytest.raises(RaceFault, match=r"reads shared address 0x[45]00, written by warp \d"):
        run(body, 128, threads=128)


def test_two_warps_that_store_at_the_same_time() -> None:
    body = "mov.b32 %r1, smem; st.shared.b32 [%r1], %r9;"
    run(body)
    with pytest.raises(RaceFault, match="writes shared address 0x400, written by warp"):
        run(body, 64, threads=64)


def test_atomics_race_with_stores_and_not_with_each_other() -> None:
    clear = "mov.b32 %r1, smem; setp.eq.b32 %p1, %r9, 0; @%p1 st.shared.b32 [%r1], 0;"
    add = "atom.shared.add.u32 %r2, [%r1], 1; st.global.b32 [%rd9], %r2;"
    assert sorted(run(f"{clear} bar.sync 0; {add}", 64, threads=64).tolist()) == list(range(64))
    with pytest.raises(RaceFault, match="updates shared address 0x400, written by lane 0 of warp 0"):
        run(f"{clear} {add}", 64, threads=64)


def test_a_write_after_a_read_needs_a_barrier_too() -> None:
    body = f"""{MINE} st.shared.b32 [%r2], %r9; bar.sync 0; xor.b32 %r3, %r2, 256; ld.shared.b32 %r4, [%r3];
    %BAR st.shared.b32 [%r2], %r4; """
    run(body.replace("%BAR", "bar.sync 1;"), 128, threads=128)
    with pytest.raises(RaceFault, match=r"writes shared address 0x4\w+, read by warp"):
        run(body.replace("%BAR", ""), 128, threads=128)


@each_schedule
def test_arrive_and_sync_make_a_producer_and_a_consumer(schedule: str) -> None:
    body = """
    mov.b32 %r1, smem; setp.ge.u32 %p1, %r9, 32; mov.b32 %r5, 0; mov.b32 %r6, 0;
    LOOP:
    @%p1 bra CONSUMER;
    bar.sync 2, 64;
    st.shared.b32 [%r1], %r5;
    bar.arrive 1, 64;
    bra NEXT;
    CONSUMER: bar.arrive 2, 64;
    bar.sync 1, 64;
    ld.shared.b32 %r3, [%r1]; add.s32 %r6, %r6, %r3;
    NEXT: add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 5;
    @%p2 bra LOOP;
    st.global.b32 [%rd9], %r6;
    """
    assert run(body, 64, threads=64, schedule=schedule).tolist() == [0] * 32 + [10] * 32


def test_bar_red() -> None:
    body = "setp.lt.u32 %p1, %r9, 40; bar.red.popc.u32 %r1, 0, %p1; st.global.b32 [%rd9], %r1;"
    assert (run(body, 64, threads=64) == 40).all()


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("setp.lt.u32 %p1, %r9, 32; @%p1 bar.sync 1, 64; @!%p1 bar.sync 2, 64;", DeadlockFault,
         r"warps 0 wait for barrier 1 at line 10; .*warps 1 wait for barrier 2.*barrier 1 .* has 32 of 64"),
        ("setp.lt.u32 %p1, %r9, 32; @%p1 bar.sync 1, 64; @!%p1 bar.arrive 1, 96;", BarrierFault,
         "barrier 1 with .* threads, while"),
        ("bar.sync 1, 40;", BarrierFault, "expected a multiple of 32"),
        ("bar.sync 16;", BarrierFault, "expected 0 to 15"),
        ("setp.lt.u32 %p1, %r9, 8; @%p1 bar.sync 0;", DivergedFault, "not all lanes"),
        ("setp.lt.u32 %p1, %r9, 8; @%p1 bra A; bar.sync 0; bra B; A: bar.sync 0; B:", DivergedFault, "lanes 0 to 7"),
    ],
)  # fmt: skip
def test_misuse_of_bar(body: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(body, 64, threads=64)


# -- clusters --------------------------------------------------------------------------------------


@each_schedule
def test_distributed_shared_memory(schedule: str) -> None:
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2; st.shared.b32 [%r2], %r6;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;
    ld.shared::cluster.b32 %r5, [%r4]; st.global.b32 [%rd9], %r5;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    assert (run(body, 128, blocks=4, cluster=2, schedule=schedule) == (np.arange(128) ^ 32)).all()


def test_distributed_shared_memory_without_the_barrier() -> None:
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2; st.shared.b32 [%r2], %r6;
    mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;
    ld.shared::cluster.b32 %r5, [%r4]; st.global.b32 [%rd9], %r5;
    """
    with pytest.raises(RaceFault, match="of CTA 1 of the cluster"):
        run(body, 64, blocks=2, cluster=2)


def test_waiting_at_the_cluster_barrier_without_arriving() -> None:
    with pytest.raises(BarrierFault, match="without having arrived"):
        run("barrier.cluster.wait.aligned;", 64, blocks=2, cluster=2)


# -- mbarrier --------------------------------------------------------------------------------------

INIT = (
    f"mov.b32 %r1, smem; {LEADER} @%p1 mbarrier.init.shared::cta.b64 [%r1], 1; "
    "fence.mbarrier_init.release.cluster; bar.sync 0;"
)


def wait(parity: str, address: str = "%r1") -> str:
    return (
        "{ .reg .pred done; WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, "
        f"[{address}], {parity}; @!done bra WAIT; }}"
    )


@each_schedule
def test_phases_of_an_mbarrier(schedule: str) -> None:
    """One warp counts up in shared memory, the others read each value once: full and empty barriers by turns."""
    body = f"""
    mov.b32 %r1, smem; add.s32 %r2, %r1, 8; {LEADER} @%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r2], 64; bar.sync 0;
    mov.b32 %r5, 0; mov.b32 %r6, 0; setp.ge.u32 %p2, %r9, 32;
    LOOP: and.b32 %r4, %r5, 1; xor.b32 %r3, %r4, 1;
    @%p2 bra READER;
    {wait("%r3", "%r2")}
    @%p1 st.shared.b32 [%r1+16], %r5;
    @%p1 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];
    bra NEXT;
    READER: {wait("%r4")}
    ld.shared.b32 %r10, [%r1+16]; mad.lo.s32 %r6, %r6, 10, %r10;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r2];
    NEXT: add.s32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 6;
    @%p3 bra LOOP;
    st.global.b32 [%rd9], %r6;
    """
    assert run(body, 96, threads=96, schedule=schedule).tolist() == [0] * 32 + [12345] * 64


def test_a_lone_try_wait_does_not_block() -> None:
    body = f"""{INIT} mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r1], 0; selp.b32 %r3, 1, 0, %p2;
    mbarrier.test_wait.parity.shared::cta.b64 %p3, [%r1], 1; selp.b32 %r4, 2, 0, %p3; or.b32 %r3, %r3, %r4;
    st.global.b32 [%rd9], %r3;"""
    assert (run(body) == 2).all()


def test_waiting_by_state() -> None:
    body = f"""{INIT} @!%p1 bra OUT; mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
    W: mbarrier.try_wait.shared::cta.b64 %p2, [%r1], %rd1; @%p2 bra OUT; bra W;
    OUT: st.global.b32 [%rd9], 1;"""
    assert (run(body) == 1).all()


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        (f"{INIT} {wait('0')}", DeadlockFault,
         r"wait for the mbarrier at 0x400, phase 0 at line 10; .*misses 1 of 1 arrivals and 0 bytes"),
        (f"{INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64; {wait('0')}", DeadlockFault,
         "0 of 1 arrivals and 64 bytes"),
        (f"{INIT} @%p1 mbarrier.arrive.shared::cta.b64 _, [%r1], 2;", BarrierFault, "at 0x400: 2 arrivals.* misses 1"),
        (f"{INIT} mbarrier.arrive.shared::cta.b64 _, [%r1+8];", BarrierFault,
         "no mbarrier was initialised at shared address 0x408"),
        (f"{INIT} @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 64;", TransactionFault,
         "ends with a transaction count of 64"),
        (f"{INIT} @%p1 mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 1048576;", TransactionFault,
         "at most 1048575"),
        (f"mov.b32 %r1, smem; {LEADER} @%p1 mbarrier.init.shared::cta.b64 [%r1], 0;", BarrierFault, "expected 1 to"),
        (INIT.replace("bar.sync 0;", "") + "setp.eq.b32 %p2, %r9, 40; @%p2 mbarrier.arrive.shared::cta.b64 _, [%r1];",
         RaceFault, "reads shared address 0x400, written by warp 0"),
    ],
)  # fmt: skip
def test_misuse_of_an_mbarrier(body: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(body, 64, threads=64)


# -- tensor copies ---------------------------------------------------------------------------------

LOAD = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r3, %r4}], [%r1];"
TMA = f"""{INIT} mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1; add.s32 %r2, %r1, 1024; mov.b32 %r3, 4; mov.b32 %r4, 1;
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512;
@%p1 {LOAD}
{wait("0")}
shl.b32 %r5, %r9, 2; add.s32 %r5, %r2, %r5; ld.shared.b32 %r10, [%r5]; st.global.b32 [%rd9], %r10;
"""


def tensor(array: np.ndarray) -> bytes:
    """A map of a 2-D array of uint32, boxes of 16 columns by 8 rows."""
    rows, columns = array.shape
    return TensorMap("uint32", array.ctypes.data, (columns, rows), (columns * 4,), (16, 8), (1, 1)).encode()


def tma(body: str, schedule: str = "fair", threads: int = 128) -> np.ndarray:
    image = np.zeros(32 * 32 + 8, np.uint32)
    image = image[(-image.ctypes.data // 4) % 8 :][:1024].reshape(32, 32)  # on 32 bytes
    image[:] = np.arange(1000, 2024).reshape(32, 32)
    data = np.zeros(threads, np.uint32)
    options = {"tensor_map": tensor(image), "extra": (image,), "threads": threads, "shared": 4096}
    machine(body, data, schedule=schedule, **options).run()
    return data


@each_schedule
def test_a_tensor_load_lands_before_the_wait_ends(schedule: str) -> None:
    expected = np.arange(1000, 2024).reshape(32, 32)[1:9, 4:20].ravel()
    assert (tma(TMA, schedule) == expected).all()


def test_boxes_reach_over_the_edge() -> None:
    out = tma(TMA.replace("mov.b32 %r3, 4", "mov.b32 %r3, -8").replace("mov.b32 %r4, 1", "mov.b32 %r4, 30")).reshape(
        8, 16
    )
    assert (out[:2, 8:] == np.arange(1000, 2024).reshape(32, 32)[30:, :8]).all()
    out[:2, 8:] = 0
    assert (out == 0).all()


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("_, [%r1], 512", "_, [%r1], 256", DeadlockFault, "-256 bytes"),
        ("_, [%r1], 512", "_, [%r1], 1024", DeadlockFault, "and 512 bytes"),
        (wait("0"), "", RaceFault, "reads shared address 0x800, written by an asynchronous copy"),
        (wait("0"), wait("1"), (RaceFault, DeadlockFault), "."),
        ("fence.mbarrier_init.release.cluster;", "", ProxyFault, "not made visible to the async proxy"),
        ("cvta.param.u64 %rd1, %rd1;", "mov.b64 %rd1, %rd8;", DescriptorFault, "hold no tensor map"),
        ("[%rd1, {%r3, %r4}], [%r1]", "[%rd1, {%r3, %r4}], [%r1+8]", BarrierFault, "no mbarrier"),
    ],
)
def test_broken_tensor_loads(old: str, new: str, kind: type[Exception], message: str) -> None:
    assert old in TMA
    with pytest.raises(kind, match=message):
        tma(TMA.replace(old, new))


def test_leaving_with_a_copy_under_way() -> None:
    body = TMA[: TMA.index("{ .reg")]
    with pytest.raises(TransactionFault, match="exits while 1 copies"):
        tma(body, "late")


def test_a_stage_overwritten_while_it_is_read() -> None:
    """The second load of a stage needs the readers' arrival, not only the first load's end."""
    again = f"""@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], 512; @%p1 {LOAD} {wait("1")}"""
    with pytest.raises(RaceFault, match=r"writes shared address 0x8\w+, read by lane 1 of warp 0"):
        tma(TMA + again)
    tma(f"{TMA} bar.sync 0; {again}")


STORE = f"""mov.b32 %r1, smem; add.s32 %r2, %r1, 1024; mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1; {LEADER}
shl.b32 %r5, %r9, 2; add.s32 %r5, %r2, %r5; st.shared.b32 [%r5], %r9;
fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra OUT;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {{0, 30}}], [%r2];
cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
OUT: """


@each_schedule
def test_a_tensor_store(schedule: str) -> None:
    image = np.zeros(1024 + 8, np.uint32)
    image = image[(-image.ctypes.data // 4) % 8 :][:1024].reshape(32, 32)
    data = np.zeros(128, np.uint32)
    options = {"tensor_map": tensor(image), "extra": (image,), "threads": 128, "shared": 4096}
    machine(STORE, data, schedule=schedule, **options).run()
    assert (image[30:, :16] == np.arange(32).reshape(2, 16)).all()
    assert (image[:30] == 0).all()
    assert (image[:, 16:] == 0).all()


@pytest.mark.parametrize(
    ("old", "kind", "message"),
    [
        ("fence.proxy.async.shared::cta;", ProxyFault, "is read by the async proxy without fence.proxy.async"),
        ("bar.sync 0;", RaceFault, "reads shared address 0x8\\w+, written by lane 1 of warp 0"),
    ],
)
def test_broken_tensor_stores(old: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tma(STORE.replace(old, ""))


def test_shared_memory_reused_before_a_store_has_read_it() -> None:
    with pytest.raises(RaceFault, match="read by an asynchronous copy"):
        tma(STORE.replace("cp.async.bulk.wait_group.read 0;", "st.shared.b32 [%r5], 1;"))
    tma(STORE.replace("OUT:", "st.shared.b32 [%r5], 1; OUT:"))


READS_PEER = """mov.b32 %r1, smem; shl.b32 %r2, %r9, 2; add.s32 %r2, %r1, %r2; st.shared.b32 [%r2], %r6;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
mov.u32 %r3, %cluster_ctarank; xor.b32 %r3, %r3, 1; mapa.shared::cluster.u32 %r4, %r2, %r3;
setp.eq.b32 %p1, %r3, 0; @%p1 ld.shared::cluster.b32 %r5, [%r4]; @%p1 st.global.b32 [%rd9], %r5; """


@each_schedule
def test_a_cta_must_not_exit_while_another_reads_its_shared_memory(schedule: str) -> None:
    """CTA 1 reads from CTA 0, which leaves at once unless they meet once more."""
    last = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    run(READS_PEER + last, 64, blocks=2, cluster=2, schedule=schedule)
    with pytest.raises(
        Fault, match=r"exits while its shared memory at 0x400 is read by|of the cluster that has exited"
    ):
        run(READS_PEER, 64, blocks=2, cluster=2, schedule=schedule)
    with pytest.raises(
        Fault, match=r"exits while its shared memory at 0x400 is read by|of the cluster that has exited"
    ):
        run(READS_PEER + "barrier.cluster.arrive.aligned;", 64, blocks=2, cluster=2, schedule=schedule)
