"""tcgen05 in the machine: allocation, the pipe, commits and waits, and what is reported when one is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import (
    BarrierFault,
    DeadlockFault,
    ProxyFault,
    RaceFault,
    TensorMemoryFault,
    UninitialisedFault,
)

SCHEDULES = ("fair", "delays:1", "delays:2", "priorities:1", "late:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

# smem: 0 the tensor memory address, 16 the mbarrier, 1024 A (128 x 16 bf16, no swizzle), 5120 B (8 x 16).
SETUP = """
mov.b32 %r1, smem; add.s32 %r2, %r1, 16; setp.eq.b32 %p1, %r9, 0; setp.lt.u32 %p2, %r9, 32; setp.lt.u32 %p3, %r9, 8;
@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;
@!%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
and.b32 %r10, %r9, 3; cvt.rn.f32.u32 %r11, %r10; cvt.rn.bf16x2.f32 %r12, %r11, %r11;
shl.b32 %r13, %r9, 4; add.s32 %r14, %r1, %r13;
st.shared.v4.b32 [%r14+1024], {%r12, %r12, %r12, %r12}; st.shared.v4.b32 [%r14+3072], {%r12, %r12, %r12, %r12};
mov.b32 %r15, 0x3F803F80;
@%p3 st.shared.v4.b32 [%r14+5120], {%r15, %r15, %r15, %r15};
@%p3 st.shared.v4.b32 [%r14+5248], {%r15, %r15, %r15, %r15};
"""
PROXY = "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;"
SYNC = "bar.sync 0; ld.shared.b32 %r20, [%r1];"
# Descriptors: start / 16, leading offset of the second chunk of K, stride of 8 rows, version 1.
DESCRIPTORS = f"""
add.s32 %r21, %r1, 1024; shr.u32 %r21, %r21, 4; cvt.u64.u32 %rd1, %r21;
or.b64 %rd1, %rd1, {128 << 16 | 8 << 32 | 1 << 46};
add.s32 %r22, %r1, 5120; shr.u32 %r22, %r22, 4; cvt.u64.u32 %rd2, %r22;
or.b64 %rd2, %rd2, {8 << 16 | 8 << 32 | 1 << 46};
mov.b32 %r23, {1 << 4 | 1 << 7 | 1 << 10 | 1 << 17 | 8 << 24}; setp.ne.b32 %p5, %r9, %r9;
"""
MMA = "@%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd1, %rd2, %r23, %p5;"
AGAIN = "setp.eq.b32 %p6, %r9, %r9; @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], %rd1, %rd2, %r23, %p6;"
COMMIT = "@%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
WAIT = "SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r2], 0; @!%p4 bra SPIN;"
BASE = "shr.u32 %r30, %r9, 5; shl.b32 %r30, %r30, 21; add.s32 %r30, %r20, %r30;"
LOAD = f"""
tcgen05.fence::after_thread_sync; {BASE}
tcgen05.ld.sync.aligned.32x32b.x8.b32 {{%r31, %r32, %r33, %r34, %r35, %r36, %r37, %r38}}, [%r30];
tcgen05.wait::ld.sync.aligned;
st.global.b32 [%rd9], %r38;
"""
FREE = "bar.sync 0; @!%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; END:"
WHOLE = (SETUP, PROXY, SYNC, DESCRIPTORS, MMA, AGAIN, COMMIT, WAIT, LOAD, FREE)


def launch(*parts: str, schedule: str = "fair", **options: Any) -> Any:
    return run("\n".join(parts), 128, threads=128, shared=8192, schedule=schedule, **options).view(np.float32)


def without(part: str, *instead: str) -> list[str]:
    at = WHOLE.index(part)
    return [*WHOLE[:at], *instead, *WHOLE[at + 1 :]]


@each_schedule
def test_two_products_one_after_the_other(schedule: str) -> None:
    assert launch(*WHOLE, schedule=schedule).tolist() == [32.0 * (i % 4) for i in range(128)]


def test_columns_beyond_those_that_the_launch_declares() -> None:
    launch(*WHOLE, tensor_columns=32)
    with pytest.raises(TensorMemoryFault, match=r"alloc of 32 columns: the launch declares 0.*tcgen05.alloc"):
        launch(*WHOLE, tensor_columns=0)


STORE = f"""
{BASE} mov.b32 %r40, 0x40400000;
tcgen05.st.sync.aligned.32x32b.x8.b32 [%r30], {{%r40, %r40, %r40, %r40, %r40, %r40, %r40, %r40}};
"""
STORED = """tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0;
tcgen05.fence::after_thread_sync;"""


@each_schedule
def test_a_stored_accumulator_is_added_to(schedule: str) -> None:
    got = launch(*without(MMA, STORE, STORED), schedule=schedule)
    assert got.tolist() == [3.0 + 16.0 * (i % 4) for i in range(128)]


def test_a_store_nobody_waited_for() -> None:
    with pytest.raises(TensorMemoryFault, match=r"columns 0 to 7 while line \d+ may still write .*wait::st"):
        launch(*without(MMA, STORE, "bar.sync 0;"), schedule="late:1")


def test_an_accumulator_read_before_its_commit() -> None:
    with pytest.raises(TensorMemoryFault, match="a wait for its commit is missing"):
        launch(*without(WAIT), schedule="late:1")


def test_accumulating_onto_nothing() -> None:
    with pytest.raises(UninitialisedFault, match="accumulator that nothing wrote"):
        launch(*without(MMA))


def from_tensor_memory(columns: int) -> tuple[str, ...]:
    """A of the first product from columns 16 to 23, of which `columns` were stored: bf16 ones."""
    store = f"""{BASE} add.s32 %r30, %r30, 16; mov.b32 %r40, 0x3F803F80;
    tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r30], {{{", ".join(["%r40"] * columns)}}};
    tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;
    """
    mma = "add.s32 %r41, %r20, 16; @%p1 tcgen05.mma.cta_group::1.kind::f16 [%r20], [%r41], %rd2, %r23, %p5;"
    return (SETUP, PROXY, SYNC, DESCRIPTORS, store, mma, COMMIT, WAIT, LOAD, FREE)


def test_a_matrix_in_tensor_memory_must_have_been_written() -> None:
    assert launch(*from_tensor_memory(8)).tolist() == [16.0] * 128
    with pytest.raises(UninitialisedFault, match="multiplies a matrix in tensor memory that nothing wrote"):
        launch(*from_tensor_memory(4))


def test_operands_need_the_proxy_fence() -> None:
    with pytest.raises(ProxyFault, match=r"fence\.proxy\.async"):
        launch(*without(PROXY))


def test_operands_must_be_written() -> None:
    with pytest.raises(UninitialisedFault, match="a matrix reads shared memory"):
        launch(*without(DESCRIPTORS, DESCRIPTORS.replace("%r1, 5120", "%r1, 6144")))


def test_a_commit_that_never_comes() -> None:
    with pytest.raises(DeadlockFault, match="mbarrier"):
        launch(*without(COMMIT))


def test_a_commit_that_no_arrival_is_expected_of() -> None:
    early = "@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], 16;"
    with pytest.raises(BarrierFault, match="expects no arrival"):
        launch(*without(COMMIT, early, COMMIT))


def test_a_leak() -> None:
    with pytest.raises(TensorMemoryFault, match=r"block \(0, 0, 0\) exits with .* allocated: 32 columns at 0x0"):
        launch(*without(FREE))


def test_a_use_after_free() -> None:
    early = "bar.sync 0; @!%p2 bra FREED; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; FREED: bar.sync 0;"
    with pytest.raises(TensorMemoryFault, match="column 0, which is not allocated"):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS, MMA, AGAIN, COMMIT, WAIT, early, LOAD)


def test_freed_while_an_mma_runs() -> None:
    early = "@!%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; END:"
    with pytest.raises(TensorMemoryFault, match="commit is missing"):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS, MMA, AGAIN, early, schedule="late:1")


@each_schedule
def test_an_alloc_waits_for_columns(schedule: str) -> None:
    """Two warps want 512 columns each; the second gets them when the first frees them."""
    body = """
    mov.b32 %r1, smem; shr.u32 %r2, %r9, 5; shl.b32 %r3, %r2, 4; add.s32 %r1, %r1, %r3;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
    ld.shared.b32 %r4, [%r1];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;
    add.s32 %r4, %r4, 7; st.global.b32 [%rd9], %r4;
    """
    assert (run(body, 64, threads=64, schedule=schedule) == 7).all()
    stuck = body.replace("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r4, 512;", "")
    with pytest.raises(DeadlockFault, match="columns of tensor memory"):
        run(stuck, 64, threads=64, schedule=schedule)


def test_a_warp_reaches_only_its_lanes() -> None:
    with pytest.raises(TensorMemoryFault, match="32x32b at lane 0 in warp 1: expected lane 32"):
        launch(*without(LOAD, LOAD.replace("add.s32 %r30, %r20, %r30", "mov.b32 %r30, %r20")))


def test_the_greatest_of_a_threads_registers() -> None:
    red = LOAD.replace("tcgen05.ld.", "tcgen05.ld.red.").replace("x8.b32", "x8.max.f32").replace("}, [", "}, %r39, [")
    got = launch(*without(LOAD, red.replace("%r38;", "%r39;")))
    assert got.tolist() == [32.0 * (i % 4) for i in range(128)]


# -- clusters ------------------------------------------------------------------------------------------

REMOTE = """
mov.b32 %r1, smem; mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; setp.eq.b32 %p1, %r9, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 1;
FENCE barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
mapa.shared::cluster.u32 %r3, %r1, %r2;
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r3];
SPIN: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r1], 0; @!%p4 bra SPIN;
barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;
"""


def test_a_relaxed_arrival_publishes_what_a_fence_before_it_covers() -> None:
    fenced = REMOTE.replace("FENCE", "fence.mbarrier_init.release.cluster;")
    run(fenced, 64, blocks=2, cluster=2)
    with pytest.raises(RaceFault, match="of CTA"):
        run(REMOTE.replace("FENCE", ""), 64, blocks=2, cluster=2)


def test_lanes_may_come_to_the_fence_one_after_the_other() -> None:
    """An arrival publishes what each of its threads knew at its own fence, and no more."""
    fence = "fence.mbarrier_init.release.cluster;"
    run(REMOTE.replace("FENCE", f"@%p1 {fence} @!%p1 {fence}"), 64, blocks=2, cluster=2)
    with pytest.raises(RaceFault, match="of CTA"):
        run(REMOTE.replace("FENCE", f"@!%p1 {fence}"), 64, blocks=2, cluster=2)
