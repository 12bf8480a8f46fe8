"""Order of accesses to tensor memory: found in every schedule, whether or not the values come out right."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import RaceFault, TensorMemoryFault

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
