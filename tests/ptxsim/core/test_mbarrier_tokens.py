"""State tokens of mbarriers, pending counts, and arrivals that must not end a phase (PTX ISA 9.7.13.15)."""

from __future__ import annotations

import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import BarrierFault

SETUP = """
mov.b32 %r1, smem; setp.eq.b32 %p1, %r9, 0; setp.ne.b32 %p2, %r9, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r1], 32; bar.warp.sync -1;
"""


@pytest.mark.parametrize("schedule", ["fair", "delays:1", "priorities:1"])
def test_a_token_counts_arrivals_and_is_waited_for(schedule: str) -> None:
    """Lane i arrives when 32 - i arrivals are pending; every token's phase ends."""
    body = """
    mbarrier.arrive.shared::cta.b64 %rd1, [%r1];
    mbarrier.pending_count.b64 %r2, %rd1;
    SPIN: mbarrier.try_wait.shared::cta.b64 %p4, [%r1], %rd1; @!%p4 bra SPIN;
    st.global.b32 [%rd9], %r2;
    """
    assert run(SETUP + body, 32, schedule=schedule).tolist() == list(range(32, 0, -1))


def test_a_lone_test_says_no_before_the_phase_ends() -> None:
    body = """
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %rd1, [%r1], 1;
    """
    with pytest.raises(BarrierFault, match="noComplete would end the phase"):
        run(SETUP + body, 32)
    body = """
    @!%p1 bra END;
    mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %rd1, [%r1], 31;
    mbarrier.test_wait.shared::cta.b64 %p4, [%r1], %rd1; selp.b32 %r2, 1, 2, %p4;
    mbarrier.arrive.shared::cta.b64 %rd2, [%r1];
    mbarrier.test_wait.shared::cta.b64 %p5, [%r1], %rd2; selp.b32 %r3, 4, 8, %p5;
    add.s32 %r2, %r2, %r3; st.global.b32 [%rd9], %r2;
    END:
    """
    assert run(SETUP + body, 32)[0] == 2 + 4


def test_a_stale_token() -> None:
    phase = "mbarrier.arrive.shared::cta.b64 _, [%r1], 32;"
    body = f"@!%p1 bra END; mbarrier.arrive.shared::cta.b64 %rd1, [%r1], 32; {phase} {phase}"
    with pytest.raises(BarrierFault, match="test of phase 0 in phase 3"):
        run(SETUP + body + "mbarrier.test_wait.shared::cta.b64 %p4, [%r1], %rd1; END:", 32)
