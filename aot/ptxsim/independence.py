"""Whether CTAs that might have spoken with each other through global memory did: what each share of a launch touched.

Each share runs alone, from memory as it was before the launch. Where no byte that one writes is read or written by
another, no CTA of one could have told CTAs of another anything, nor raced with them, and the launch may just as well
have run its shares in turn: each read what it would have read then. It is touching that counts and not a change, since
a counter may return to its old value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.dependent import READ, WRITTEN, Footprint
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.memory import Allocation, GlobalMemory

REPEATS = 256
"""Reads of one address, by one instruction of one warp, from which on it may wait for what another share never writes.
A loop over what its CTA alone knows is cut off as well where it reads one address so often; that costs time alone."""


class AwaitError(SimError):
    """A share may wait for what another of the launch would write: alone, it might never end."""


@dataclass(frozen=True, slots=True)
class Touches:
    """The global memory that a share touched."""

    marks: Mapping[int, Any]
    """READ and WRITTEN of each byte, by the base of its allocation: uint8 from its origin on."""
    copied: Any
    """Addresses [start, stop) that bulk copies and tensor maps read from, perhaps with gaps: int64 (n, 2)."""


class Touched:
    """Records what a share touches while it runs."""

    def __init__(self, warps: int) -> None:
        """`warps` are those of all CTAs that are resident."""
        self._warps = warps
        self._marks = Footprint()
        self._copied: set[tuple[int, int]] = set()
        self._reads: dict[int, Any] = {}
        """How often each warp has read, by instruction."""
        self._again: dict[tuple[int, ...], int] = {}

    def access(self, found: Allocation, index: Any, size: int, writes: bool) -> None:
        """`size` bytes from each byte `index` (a multiple of the access) of an allocation are read or written."""
        self._marks.record(found, index, size, WRITTEN if writes else READ)

    def copy_reads(self, k: int, warp: int, block: Sequence[int], start: int, size: int) -> None:
        """A copy by a warp reads some of `size` bytes from an address. Raises AwaitError."""
        self._copied.add((start, start + size))
        self._counts((k, warp, *block, start))

    def copy_writes(self, memory: GlobalMemory, starts: Any, size: int) -> None:
        """A copy writes `size` bytes from each of some addresses. Those outside any allocation fault where it lands."""
        for start in starts.tolist():
            found = memory.find(start)
            if found is not None:
                self._marks.span(found, start - found.origin, start - found.origin + size, WRITTEN)

    def repeats(self, k: int, warps: Any, blocks: Any, addresses: Any) -> None:
        """Warps (W,) of CTAs `blocks` (W, 3) have read from `addresses` (W,) by instruction `k`. Raises AwaitError."""
        reads = self._reads.get(k)
        if reads is None:
            reads = self._reads[k] = np.zeros(self._warps, np.int64)
        reads[warps] += 1
        if reads[warps].max() <= REPEATS:
            return
        for warp, block, address in zip(warps.tolist(), blocks.tolist(), addresses.tolist(), strict=True):
            self._counts((k, warp, *block, address))

    def _counts(self, read: tuple[int, ...]) -> None:
        """Instruction, warp, block and address of a read: counts, and raises AwaitError if there were too many."""
        count = self._again[read] = self._again.get(read, 0) + 1
        if count > REPEATS:
            raise AwaitError(f"block {read[2:5]} reads {read[5]:#x} again and again")

    def touches(self) -> Touches:
        """What was touched so far."""
        return Touches(self._marks.marks(), np.array(sorted(self._copied), np.int64).reshape(-1, 2))


def independent(memory: GlobalMemory, shares: Sequence[Touches]) -> bool:
    """Whether no byte that a share wrote was touched by another."""
    for base in {base for share in shares for base in share.marks}:
        marks = [share.marks.get(base) for share in shares]
        wrote = [None if m is None or not (m & WRITTEN).any() else (m & WRITTEN) != 0 for m in marks]
        writers = sum(w.astype(np.int16) for w in wrote if w is not None)
        if isinstance(writers, int):
            continue  # nobody
        users = sum((m != 0).astype(np.int16) for m in marks if m is not None)
        if ((writers > 0) & (users > 1)).any():
            return False
        origin = memory.at(base).origin
        for share, own in zip(shares, wrote, strict=True):
            others = writers > 0 if own is None else (writers > 0) & ~own
            if _copies_any(share.copied - origin, others):
                return False
    return True


def _copies_any(runs: Any, wanted: Any) -> bool:
    """Whether a run [start, stop) of `runs` (n, 2) holds an index that is wanted: bool (bytes,)."""
    if not len(runs) or not wanted.any():
        return False
    before = np.concatenate(([0], np.cumsum(wanted)))
    start, stop = np.clip(runs, 0, len(wanted)).T
    return bool((before[stop] > before[start]).any())
