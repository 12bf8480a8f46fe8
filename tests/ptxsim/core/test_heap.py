"""Memory that NumPy frees stays in the process."""

from __future__ import annotations

import ctypes

from cubinery.aot.ptxsim.heap import keep_freed_memory


def test_glibc_takes_the_setting_and_others_are_left_alone() -> None:
    assert keep_freed_memory() is hasattr(ctypes.CDLL(None), "mallopt")
