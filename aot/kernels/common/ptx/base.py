"""What every file of this package is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import cute

inline = cute.arch.inline_ptx
Fragment = Sequence[Any]
