"""Programmatic dependent launches: what a launch may not touch before its griddepcontrol.wait (PTX ISA 9.7.13).

A launch with the attribute may start as soon as its predecessor allowed it (griddepcontrol.launch_dependents), while
that one still runs. The simulator runs launches one after the other, so it checks instead: until a CTA has waited,
it must not read what the predecessor wrote, nor write what the predecessor read or wrote. What the predecessor's
bulk copies read is not recorded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.memory import FULL, WIDTHS, Allocation

READ, WRITTEN = np.uint8(1), np.uint8(2)


class Footprint:
    """The global memory that a launch touched: a mark a byte, by allocation."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[Allocation, Any]] = {}

    def record(self, allocation: Allocation, index: Any, size: int, mark: np.uint8) -> None:
        """`size` bytes from each byte `index` (a multiple of the access) of an allocation are read or written."""
        marks, width = self._of(allocation), math.gcd(size, 8)
        view, at = marks.view(WIDTHS[width]), index // width
        every = view.dtype.type(int(mark) * (FULL[width] // 0xFF))
        for i in range(size // width):
            view[at + i] |= every

    def span(self, allocation: Allocation, start: int, stop: int, mark: np.uint8) -> None:
        """Bytes [start, stop) of an allocation are read or written."""
        self._of(allocation)[start:stop] |= mark

    def touched(self, allocation: Allocation, index: Any, size: int, mark: np.uint8) -> Any:
        """Where any of those bytes has one of the marks: an array like `index`, or None where none has."""
        found = self._marks.get(allocation.base)
        if found is None or found[0].size != allocation.size:
            return None
        bad = np.zeros(np.shape(index), bool)
        for i in range(size):
            bad |= (found[1][index + i] & mark) != 0
        return bad if bad.any() else None

    def marks(self) -> dict[int, Any]:
        """The marks by the base of their allocation."""
        return {base: marks for base, (_, marks) in self._marks.items()}

    def add(self, allocation: Allocation, marks: Any) -> None:
        """Take over what another footprint marked in an allocation."""
        np.bitwise_or(self._of(allocation), marks, out=self._of(allocation))

    def _of(self, allocation: Allocation) -> Any:
        found = self._marks.get(allocation.base)
        if found is None or found[0].size != allocation.size or found[0].origin != allocation.origin:
            found = self._marks[allocation.base] = allocation, np.zeros(len(allocation.block.data), np.uint8)
        return found[1]
