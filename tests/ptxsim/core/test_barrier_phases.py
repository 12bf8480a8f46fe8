"""A warp that laps its partner at a named barrier."""

from __future__ import annotations

import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import BarrierFault


def test_two_arrivals_of_one_warp_do_not_stand_for_two_warps() -> None:
    """The barrier would be complete with nobody but warp 0 at it (PTX ISA 9.7.13.1: participants are counted)."""
    body = "setp.ge.u32 %p1, %r9, 32; @%p1 bra OTHER; bar.arrive 2, 64; bar.arrive 2, 64; OTHER:"
    with pytest.raises(BarrierFault, match="arrives twice at barrier 2 in one phase"):
        run(body, 64, threads=64)


def test_one_arrival_in_each_phase_is_fine() -> None:
    body = """
    setp.ge.u32 %p1, %r9, 32; @%p1 bra OTHER;
    bar.arrive 2, 64; bar.sync 3, 64; bar.arrive 2, 64; bra END;
    OTHER: bar.sync 2, 64; bar.arrive 3, 64; bar.sync 2, 64;
    END: st.global.b32 [%rd9], %r9;
    """
    assert run(body, 64, threads=64).tolist() == list(range(64))


@pytest.mark.parametrize("count", [32, 31])
def test_lanes_of_one_arrival_belong_to_one_phase(count: int) -> None:
    """With a count too small by one, the last lane's arrival counts in the next phase: what it read is unprotected."""
    body = f"""
    mov.b32 %r1, smem; setp.eq.u32 %p1, %r9, 0; @%p1 mbarrier.init.shared::cta.b64 [%r1], {count}; bar.warp.sync -1;
    mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];
    """
    if count == 32:
        run(body)
    else:
        with pytest.raises(BarrierFault, match="end a phase of 31 and go on in the next"):
            run(body)


@pytest.mark.parametrize("schedule", ["fair", "priorities:0", "priorities:1", "delays:0"])
def test_lanes_of_a_warp_arrive_at_the_cluster_barrier_one_by_one(schedule: str) -> None:
    """9.7.13.3: without .aligned the threads of a warp need not arrive together."""
    body = """
    setp.ne.u32 %p1, %r9, 0; @%p1 bra JOIN; mov.b32 %r1, 1; JOIN:
    barrier.cluster.arrive.relaxed; barrier.cluster.wait;
    setp.ne.u32 %p1, %r9, 5; @%p1 bra AGAIN; barrier.cluster.arrive; barrier.cluster.wait; bra END;
    AGAIN: barrier.cluster.arrive; barrier.cluster.wait;
    END: st.global.b32 [%rd9], %r9;
    """
    assert run(body, 64, threads=64, schedule=schedule).tolist() == list(range(64))
