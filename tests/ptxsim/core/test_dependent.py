"""Dependent launches that touch what their predecessor may still be at."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine

from cubinery.aot.ptxsim.faults import RaceFault

FIRST = "griddepcontrol.launch_dependents; st.global.b32 [%rd9], %r9; ld.global.b32 %r1, [%rd9+128];"
WAIT = "griddepcontrol.wait;"


def both(second: str, first: str = FIRST) -> None:
    """Launch one kernel and its dependent on the same 96 words: the first reads words 32 to 63, writes 0 to 31."""
    data = np.zeros(96, np.uint32)
    before = machine(first, data)
    before.run()
    machine(second, data, predecessor=before.footprint).run()


@pytest.mark.parametrize(
    ("touch", "detail"),
    [
        ("ld.global.b32 %r1, [%rd9];", "reads what the launch before writes"),
        ("st.global.b32 [%rd9+128], %r9;", "writes what the launch before uses"),
        ("red.global.add.u32 [%rd9], %r9;", "writes what the launch before uses"),
    ],
)
def test_the_wait_comes_first(touch: str, detail: str) -> None:
    both(WAIT + touch)
    with pytest.raises(RaceFault, match=f"without griddepcontrol.wait {detail}"):
        both(touch)


def test_other_memory_is_free_before_the_wait() -> None:
    both("ld.global.b32 %r1, [%rd9+128]; st.global.b32 [%rd9+256], %r1;")


def test_a_launch_that_never_lets_go_is_over_first() -> None:
    both("ld.global.b32 %r1, [%rd9];", FIRST.replace("griddepcontrol.launch_dependents;", ""))
