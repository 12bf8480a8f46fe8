"""The C heap, told to keep what NumPy frees.

glibc gives freed memory at the top of its heap, and large blocks always, back to the system, and faults every page in
again for the next temporary array. With gangs of 160 warps that made an mma.sync four times slower.
"""

from __future__ import annotations

import ctypes
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
KEEP = 1 << 28
"""Bytes."""


@cache
def keep_freed_memory() -> bool:
    """Keep up to KEEP bytes of freed memory in this process; False where the C library has no such setting."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, KEEP)) and bool(mallopt(_MMAP_THRESHOLD, KEEP))
