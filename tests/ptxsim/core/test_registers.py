"""setmaxnreg: what warps take, others must have given back, in every order."""

from __future__ import annotations

import pytest
from ptx_bench import run

from cubinery.aot.ptxsim.faults import DeadlockFault, LaunchFault

ROLES = """setp.lt.u32 %p1, %r9, 128; @%p1 bra PRODUCER; setmaxnreg.inc.sync.aligned.u32 {more}; bra OUT;
PRODUCER: setmaxnreg.dec.sync.aligned.u32 {fewer}; OUT: bar.sync 0; st.global.b32 [%rd9], %r9;"""


@pytest.mark.parametrize("schedule", ["fair", "delays:1", "priorities:1", "priorities:2", "late:1"])
def test_two_warpgroups_take_what_one_gives(schedule: str) -> None:
    """(128 - 40) / 2 = 44 more for each thread of two warpgroups, so 168, and not 176."""
    options = {"threads": 384, "schedule": schedule, "registers": 128}
    run(ROLES.format(more=168, fewer=40), 384, **options)
    with pytest.raises(DeadlockFault, match=r"waits for ever for 176 registers .* hold \d+ of the 1536 that 12 warps"):
        run(ROLES.format(more=176, fewer=40), 384, **options)


def test_warps_that_wait_for_nobody_always_get_to_their_exit() -> None:
    """What they held is the others' then: the chip runs this."""
    run(ROLES.replace("bar.sync 0; ", "").format(more=176, fewer=40), 384, threads=384, registers=128)


def test_nothing_is_known_of_the_launch() -> None:
    run(ROLES.format(more=240, fewer=240), 384, threads=384)


@pytest.mark.parametrize(("more", "fewer"), [(100, 40), (168, 16), (264, 40), (120, 40), (168, 136)])
def test_counts_that_cannot_be(more: int, fewer: int) -> None:
    with pytest.raises(LaunchFault, match="setmaxnreg"):
        run(ROLES.format(more=more, fewer=fewer), 384, threads=384, registers=128)


def test_each_cta_begins_anew() -> None:
    run(ROLES.format(more=168, fewer=40), 384 * 3, threads=384, blocks=3, registers=128, resident=1)
