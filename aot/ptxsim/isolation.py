"""Global memory as it was before a launch, so that each share starts from there and their writes are put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.dependent import READ, WRITTEN
from cubinery.aot.ptxsim.faults import Place, RaceFault
from cubinery.aot.ptxsim.memory import POISON, Allocation, GlobalMemory


@dataclass(frozen=True, slots=True)
class Change:
    """What a share changed in one allocation; offsets count from its base."""

    index: Any
    """Bytes that have another value: int64."""
    values: Any
    written: Any
    """Bytes that were written for the first time: int64."""


Changes = Mapping[int, Change]
"""By the base of the allocation."""


class Snapshot:
    """What global memory and the marks of what was written are like before a launch.

    Only allocations that the launch writes to are copied, when it first does: others may be registrations of tensors
    that are gone, whose bytes belong to somebody else by now.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[Allocation, Any, Any]] = {}

    def keep(self, allocation: Allocation) -> None:
        """Remember an allocation as it is, if it is not held already."""
        if allocation.base not in self._held:
            marks = _written(allocation)
            copied = None if marks is None else marks.copy()
            self._held[allocation.base] = allocation, _bytes(allocation).copy(), copied

    def changes(self) -> dict[int, Change]:
        """What is different now."""
        found = {}
        for base, (allocation, data, written) in self._held.items():
            now, marks = _bytes(allocation), _written(allocation)
            index = np.flatnonzero(now != data)
            first = np.zeros(0, np.int64) if marks is None else np.flatnonzero(marks != written)
            if index.size or first.size:
                found[base] = Change(index, now[index], first)
        return found

    def restore(self, changes: Changes) -> None:
        """Undo changes."""
        for base, change in changes.items():
            allocation, data, written = self._held[base]
            _bytes(allocation)[change.index] = data[change.index]
            if written is not None:
                _written(allocation)[change.written] = written[change.written]

    def apply(self, memory: GlobalMemory, changes: Changes) -> None:
        """Make changes, those of another process perhaps."""
        for base, change in changes.items():
            allocation = memory.at(base)
            self.keep(allocation)
            _bytes(allocation)[change.index] = change.values
            if change.written.size:
                _written(allocation)[change.written] = POISON

    def check(self, kernel: str, blocks: Sequence[str], changes: Sequence[Changes], touched: Sequence[Any]) -> None:
        """Raise RaceFault where shares write different values to a byte, or one reads what another changes.

        `blocks` names the CTAs of each share, `touched` are the marks of a share's footprint by allocation, or None.
        """
        owners: dict[int, tuple[Any, Any]] = {}
        for share, made in enumerate(changes):
            for base, change in made.items():
                owner, values = owners.setdefault(base, self._nobody(base))
                before = owner[change.index]
                clash = (before >= 0) & (values[change.index] != change.values)
                if clash.any():
                    at = int(change.index[clash][0])
                    what = f"{blocks[owner[at]]} and {blocks[share]} write different values"
                    self._race(kernel, what, base, at)
                owner[change.index], values[change.index] = share, change.values
        for share, marks in enumerate(touched):
            for base, (owner, _) in owners.items():
                if marks is not None and base in marks:
                    allocation = self._held[base][0]
                    own = marks[base][base - allocation.origin :][: allocation.size]
                    others = (owner >= 0) & (owner != share)
                    if base in changes[share]:
                        others[changes[share][base].index] = False  # compared above
                    for mark, what in ((WRITTEN, "write another value than"), (READ, "read what")):
                        clash = others & ((own & mark) != 0)
                        if clash.any():
                            at = int(np.flatnonzero(clash)[0])
                            self._race(kernel, f"{blocks[share]} {what} {blocks[owner[at]]} write", base, at)

    def _nobody(self, base: int) -> tuple[Any, Any]:
        size = self._held[base][0].size
        return np.full(size, -1, np.int32), np.zeros(size, np.uint8)

    def _race(self, kernel: str, what: str, base: int, at: int) -> None:
        name = self._held[base][0].name
        raise RaceFault(f"{what}, byte {at} of {name}, and nothing orders CTAs of this kernel", Place(kernel))


def _bytes(allocation: Allocation) -> Any:
    """An allocation's own bytes: its block is wider, and what lies around belongs to others."""
    start = allocation.base - allocation.origin
    return allocation.block.data[start : start + allocation.size]


def _written(allocation: Allocation) -> Any:
    start = allocation.base - allocation.origin
    marks = allocation.block.written
    return None if marks is None else marks[start : start + allocation.size]
