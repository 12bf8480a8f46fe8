"""Order of accesses to tensor memory: found in every schedule, whether or not the values come out right."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import RaceFault, TensorMemoryFault, UninitialisedFault
from cubinery.aot.ptxsim.machine import Checks

SCHEDULES = ("fair", "late:1", "priorities:1")
each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

# Warp 0 allocates 32 columns; %r20 is their address, %r30 that of each warp's lanes, %p2 says "warp 0".
SETUP = """
mov.b32 %r1, smem; setp.lt.u32 %p2, %r9, 32;
@!%p2 bra ALLOCATED;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ALLOCATED: bar.sync 0; ld.shared.b32 %r20, [%r1];
shr.u32 %r30, %r9, 5; shl.b32 %r30, %r30, 21; add.s32 %r30, %r20, %r30;
"""
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r9};"
STORED = "tcgen05.wait::st.sync.aligned;"
LOAD = (
    "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r31}, [%r30]; tcgen05.wait::ld.sync.aligned; st.global.b32 [%rd9], %r31;"
)
FREE = "@!%p2 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 32; END:"


def program(*parts: str) -> str:
    return "\n".join(parts)


@each_schedule
def test_a_barrier_before_the_free(schedule: str) -> None:
    body = program(SETUP, STORE, STORED, LOAD, "bar.sync 1;", FREE)
    assert run(body, 64, threads=64, schedule=schedule).tolist() == list(range(64))


@pytest.mark.parametrize("schedule", ["fair", "priorities:1"])
def test_freed_by_one_warp_while_another_uses_it(schedule: str) -> None:
    """Without the barrier nothing keeps warp 0 from freeing what warp 1 still loads."""
    with pytest.raises(
        (RaceFault, TensorMemoryFault), match=r"frees tensor memory .* by warp 1|not allocated|may still write"
    ):
        run(program(SETUP, STORE, STORED, LOAD, FREE), 64, threads=64, schedule=schedule)


@each_schedule
def test_loaded_before_the_store_was_waited_for(schedule: str) -> None:
    with pytest.raises(TensorMemoryFault, match=r"wait::st"):
        run(program(SETUP, STORE, LOAD, STORED, "bar.sync 1;", FREE), 64, threads=64, schedule=schedule)


def test_columns_that_change_hands_start_anew() -> None:
    """Two allocations one after the other, by different warps, with only the allocator between."""
    body = """
    mov.b32 %r1, smem; shr.u32 %r2, %r9, 5; shl.b32 %r3, %r2, 4; add.s32 %r1, %r1, %r3;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;
    ld.shared.b32 %r20, [%r1]; shl.b32 %r30, %r2, 21; add.s32 %r30, %r20, %r30;
    """
    free = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r20, 512;"
    assert run(program(body, STORE, STORED, LOAD, free), 64, threads=64).tolist() == np.arange(64).tolist()


# Warps 0 and 4 reach the same lanes. Warp 0 stores, warp 4 loads; both stand at barrier 1 in between.
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;", "tcgen05.fence::after_thread_sync;"
HAND_OVER = """
mov.b32 %r1, smem; setp.lt.u32 %p2, %r9, 32; setp.ge.u32 %p3, %r9, 128; and.b32 %r4, %r9, 31;
@!%p2 bra ALLOCATED; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
ALLOCATED: bar.sync 0; ld.shared.b32 %r30, [%r1]; mov.b32 %r31, 7;
@!%p2 bra STORED; tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r4}; tcgen05.wait::st.sync.aligned; BEFORE
STORED: bar.sync 1; @!%p3 bra LOADED; AFTER
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r31}, [%r30]; EARLY tcgen05.wait::ld.sync.aligned; SECOND
LOADED: bar.sync 2; @!%p2 bra END; THIRD tcgen05.st.sync.aligned.32x32b.x1.b32 [%r30], {%r9};
tcgen05.wait::st.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r30, 32;
END: @%p3 st.global.b32 [%rd9], %r31;
"""


NONE = dict.fromkeys(("BEFORE", "AFTER", "SECOND", "THIRD"), "")
"""Every fence left out."""
LENIENT = Checks(tensor_fences=False)


def hand_over(schedule: str = "fair", checks: Checks = Checks(), **without: str) -> list[int]:  # noqa: B008 - immutable
    """Fences by their places, each left out or replaced if it is named; what warp 4 found."""
    text = HAND_OVER.replace("EARLY", without.pop("EARLY", "").replace(";", "; "))
    for place, fence in (("BEFORE", BEFORE), ("AFTER", AFTER), ("SECOND", BEFORE), ("THIRD", AFTER)):
        text = text.replace(place, without.get(place, fence))
    return run(text, 160, threads=160, schedule=schedule, checks=checks)[128:].tolist()


@each_schedule
def test_tensor_memory_handed_over_with_fences(schedule: str) -> None:
    assert hand_over(schedule) == list(range(32))


@each_schedule
def test_a_kernel_without_any_fence_is_held_to_them_too(schedule: str) -> None:
    with pytest.raises(RaceFault, match=r"written by warp 0, without tcgen05\.fence on both sides"):
        hand_over(schedule, **NONE)


@each_schedule
def test_fences_are_not_asked_for_where_the_machine_is_told_so(schedule: str) -> None:
    """For public examples, which are generated without any; a barrier is asked for all the same."""
    assert hand_over(schedule, LENIENT, **NONE) == list(range(32))
    assert hand_over(schedule, LENIENT, BEFORE="") == list(range(32))
    text = HAND_OVER.replace("bar.sync 1;", "")
    for place in ("EARLY", *NONE):
        text = text.replace(place, "")
    with pytest.raises(
        (RaceFault, TensorMemoryFault, UninitialisedFault),
        match=r"with nothing that orders the two|wait::st is missing|tensor memory that nothing wrote",
    ):
        run(text, 160, threads=160, schedule=schedule, checks=LENIENT)


@each_schedule
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("BEFORE", "loads tensor memory .* written by warp 0, without tcgen05.fence on both sides"),
        ("AFTER", "loads tensor memory .* written by warp 0, without tcgen05.fence on both sides"),
        ("SECOND", "stores over tensor memory .* read by warp 4, without tcgen05.fence on both sides"),
        ("THIRD", "stores over tensor memory .* read by warp 4, without tcgen05.fence on both sides"),
    ],
)
def test_one_fence_left_out(place: str, message: str, schedule: str) -> None:
    with pytest.raises(RaceFault, match=message):
        hand_over(schedule, **{place: ""})


@each_schedule
def test_the_wait_for_a_load_left_out(schedule: str) -> None:
    text = HAND_OVER.replace("tcgen05.wait::ld.sync.aligned;", "")
    for place, fence in (("EARLY", ""), ("BEFORE", BEFORE), ("AFTER", AFTER), ("SECOND", BEFORE), ("THIRD", AFTER)):
        text = text.replace(place, fence)
    text = text.replace("@%p3 st.global.b32 [%rd9], %r31;", "")  # which would use the register
    with pytest.raises(RaceFault, match=r"stores over tensor memory .* loaded by warp 4, before its tcgen05\.wait::ld"):
        run(text, 160, threads=160, schedule=schedule)


def test_a_register_used_before_the_wait_for_its_load() -> None:
    assert hand_over(EARLY="mov.b32 %r33, %r31;") == list(range(32))
    with pytest.raises(TensorMemoryFault, match=r"uses a register that tcgen05\.ld fills, before tcgen05\.wait::ld"):
        hand_over(EARLY="add.s32 %r33, %r31, 1;")
    with pytest.raises(TensorMemoryFault, match=r"uses a register that tcgen05\.ld fills, before tcgen05\.wait::ld"):
        hand_over(EARLY="mov.b32 %r33, %r31; add.s32 %r34, %r33, 1;")
    assert hand_over(checks=LENIENT, EARLY="add.s32 %r33, %r31, 1;", **NONE) == list(range(32))
