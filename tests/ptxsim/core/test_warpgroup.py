"""wgmma in the machine: products of a warpgroup, groups, and operands overwritten too early."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import DescriptorFault, ProxyFault, RaceFault, UninitialisedFault

SCHEDULES = ("fair", "delays:1", "priorities:1", "late:1")

# smem: A (64 x 16 bf16, no swizzle) at 1024, B (8 x 16) at 4096.
SETUP = """
mov.b32 %r1, smem; and.b32 %r10, %r9, 3; cvt.rn.f32.u32 %r11, %r10; cvt.rn.bf16x2.f32 %r12, %r11, %r11;
shl.b32 %r13, %r9, 4; add.s32 %r14, %r1, %r13; mov.b32 %r15, 0x3F803F80; setp.lt.u32 %p3, %r9, 16;
st.shared.v4.b32 [%r14+1024], {%r12, %r12, %r12, %r12};
@%p3 st.shared.v4.b32 [%r14+4096], {%r15, %r15, %r15, %r15};
"""
PROXY = "fence.proxy.async.shared::cta;"
SYNC = "bar.sync 0;"
DESCRIPTORS = f"""
add.s32 %r21, %r1, 1024; shr.u32 %r21, %r21, 4; cvt.u64.u32 %rd1, %r21; or.b64 %rd1, %rd1, {64 << 16 | 8 << 32};
add.s32 %r22, %r1, 4096; shr.u32 %r22, %r22, 4; cvt.u64.u32 %rd2, %r22; or.b64 %rd2, %rd2, {8 << 16 | 8 << 32};
mov.b32 %r31, 0x3F800000; mov.b32 %r32, %r31; mov.b32 %r33, %r31; mov.b32 %r34, %r31; setp.eq.b32 %p5, %r9, %r9;
"""
MMA = """
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r31, %r32, %r33, %r34}, %rd1, %rd2, %p5, 1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r31, %r32, %r33, %r34}, %rd1, %rd2, %p5, -1, 1, 0, 0;
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r31, %r32, %r33, %r34}, %rd1, %rd2, %p5, 1, 1, 0, 0;
wgmma.commit_group.sync.aligned;
"""
WAIT = "wgmma.wait_group.sync.aligned 0;"
END = "st.global.b32 [%rd9], %r31;"


def launch(*parts: str, schedule: str = "fair") -> Any:
    return run("\n".join(parts), 128, threads=128, shared=8192, schedule=schedule).view(np.float32)


def rows() -> list[int]:
    """The row of D that a thread's first register holds."""
    return [16 * (t // 32) + t % 32 // 4 for t in range(128)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_products_add_up_in_order(schedule: str) -> None:
    """A's row i holds i % 4 everywhere: threads 0 to 63 wrote its first chunks, 64 to 127 the second."""
    got = launch(SETUP, PROXY, SYNC, DESCRIPTORS, MMA, WAIT, END, schedule=schedule)
    assert got.tolist() == [1.0 + 16.0 * (row % 4) for row in rows()]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_from_registers(schedule: str) -> None:
    body = MMA.replace("%rd1, %rd2", "{%r15, %r15, %r15, %r15}, %rd2").replace(", 0, 0;", ", 0;")
    got = launch(SETUP, PROXY, SYNC, DESCRIPTORS, body, WAIT, END, schedule=schedule)
    assert got.tolist() == [17.0] * 128


def test_operands_overwritten_before_the_wait() -> None:
    again = "bar.sync 0; st.shared.b32 [%r14+1024], %r12;"
    assert launch(SETUP, PROXY, SYNC, DESCRIPTORS, MMA, WAIT, again, END)[4] == 17.0
    with pytest.raises(RaceFault, match="read by an asynchronous"):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS, MMA, again, WAIT, END)


def test_operands_need_fence_barrier_and_contents() -> None:
    with pytest.raises(ProxyFault):
        launch(SETUP, SYNC, DESCRIPTORS, MMA, WAIT, END)
    with pytest.raises(RaceFault):
        launch(SETUP, PROXY, DESCRIPTORS, MMA, WAIT, END)
    with pytest.raises(UninitialisedFault):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS.replace("4096", "6144"), MMA, WAIT, END)
    with pytest.raises(DescriptorFault, match="expected 0x400 to"):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS.replace("4096", "12288"), MMA, WAIT, END)


@pytest.mark.parametrize(
    ("broken", "detail"),
    [
        (MMA.replace("wgmma.fence.sync.aligned;", "") + WAIT, "touched after the last wgmma.fence"),
        (MMA, "no wgmma.wait_group has waited for"),
        (MMA + WAIT.replace(" 0;", " 1;"), "no wgmma.wait_group has waited for"),
        (MMA.replace("wgmma.commit_group.sync.aligned;", "") + WAIT, "no wgmma.wait_group has waited for"),
        (MMA + "mov.b32 %r33, 0;" + WAIT, "no wgmma.wait_group has waited for"),
        (MMA + WAIT + "add.f32 %r32, %r32, %r32;" + MMA.replace("wgmma.fence.sync.aligned;", "") + WAIT, "wgmma.fence"),
    ],
)
def test_registers_of_a_product_are_not_touched(broken: str, detail: str) -> None:
    with pytest.raises(RaceFault, match=detail):
        launch(SETUP, PROXY, SYNC, DESCRIPTORS, broken, END)


def test_a_group_that_was_waited_for_is_free_in_a_loop() -> None:
    """Two groups in flight: the wait of each round frees the registers of the round before."""
    second = MMA.replace("%r31, %r32, %r33, %r34", "%r41, %r42, %r43, %r44")
    body = f"""
    mov.b32 %r41, %r31; mov.b32 %r42, %r31; mov.b32 %r43, %r31; mov.b32 %r44, %r31; mov.b32 %r50, 0;
    LOOP: {MMA} {second} wgmma.wait_group.sync.aligned 1; add.f32 %r60, %r31, %r32;
    {WAIT} add.u32 %r50, %r50, 1; setp.lt.u32 %p6, %r50, 3; @%p6 bra LOOP;
    """
    assert launch(SETUP, PROXY, SYNC, DESCRIPTORS, body, END)[0] == 1.0
