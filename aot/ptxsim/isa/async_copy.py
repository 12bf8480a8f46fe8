"""What the asynchronous copies do to bytes, and the groups in which they are waited for (PTX ISA 9.7.9.25).

Completion, for the machine:
- cp.async lands at any time between its issue and a wait of its thread: `CopyGroups` of that thread.
- cp.async.bulk to shared memory credits its bytes to the mbarrier when it lands; nothing else waits for it.
- bulk copies to global memory and bulk reductions belong to the `CopyGroups` of the thread; wait_group.read waits until
  their source has been read, wait_group until the destination is written. They read their source by the async proxy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from cubinery.aot.ptxsim.faults import MisalignedFault
from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.atomics import INTEGER
from cubinery.aot.ptxsim.isa.base import Instr

Array = Any
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def check_bulk(destination: int, source: int, size: int) -> None:
    """Alignment of cp.async.bulk: both addresses and the size are multiples of 16 bytes."""
    for name, value in (("destination", destination), ("source", source), ("size", size)):
        if value % 16:
            raise MisalignedFault(f"bulk copy with {name} {value:#x}: expected a multiple of 16")


def masked_copy(old: Array, new: Array, mask: int) -> Array:
    """.cp_mask: byte i of each 16 is written where bit i of the mask is set."""
    chosen = (mask >> np.arange(16) & 1).astype(bool)
    return np.where(np.tile(chosen, len(new) // 16), new, old)


def padded(data: Array, size: int) -> Array:
    """cp.async with a source size: the rest of the destination becomes zero."""
    result = np.zeros(size, np.uint8)
    result[: len(data)] = data
    return result


_INTEGER_TYPES: dict[str, Any] = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
}  # fmt: skip
_INTEGER_OPS = {name: INTEGER[name] for name in ("add", "min", "max", "and", "or", "xor", "inc", "dec")}
_FLOAT_TYPES: dict[str, Any] = {"f16": np.uint16, "bf16": np.uint16, "f32": np.float32, "f64": np.float64}


def combine(reduction: str, kind: str, instr: Instr | None = None) -> Callable[[Array, Array], Array]:
    """9.7.9.25.5.2: the function of (old, new) bytes that a bulk or tensor reduction writes, elements of type `kind`.

    Floats add with one rounding to nearest even, subnormals kept; min and max prefer numbers to NaN. Refuses pairs
    that do not exist through `instr`.
    """
    integer = kind in _INTEGER_TYPES and (kind[0] != "b" or reduction in ("and", "or", "xor"))
    integer = integer and not (reduction in ("inc", "dec") and kind[0] != "u")
    orders = reduction in ("min", "max") and kind in ("f16", "bf16")
    floating = kind in _FLOAT_TYPES and (reduction == "add" or orders)
    if not integer and not floating:
        if instr is not None:
            instr.unknown(f"reduction .{reduction} of .{kind} does not exist")
        raise ValueError(f"reduction {reduction} of {kind}")
    dtype = _INTEGER_TYPES.get(kind) or _FLOAT_TYPES[kind]
    function = _INTEGER_OPS[reduction] if integer else _float_function(reduction, kind)

    def run(old: Array, new: Array) -> Array:
        left, right = np.ascontiguousarray(old).view(dtype), np.ascontiguousarray(new).view(dtype)
        return np.asarray(function(left, right)).astype(dtype).view(np.uint8)

    return run


def _float_function(reduction: str, kind: str) -> Callable[[Array, Array], Array]:
    numbers = {"add": np.add, "min": np.fmin, "max": np.fmax}[reduction]
    if kind in ("f32", "f64"):
        return numbers

    def narrow(old: Array, new: Array) -> Array:
        left, right = (formats.decode(codes, kind).astype(np.float64) for codes in (old, new))
        return formats.encode(numbers(left, right), formats.FORMATS[kind]).astype(np.uint16)

    return narrow


Item = TypeVar("Item")


@dataclass(slots=True)
class CopyGroups(Generic[Item]):
    """Pending operations of one thread (wgmma: of one warp) in groups; items are the machine's own.

    The machine may carry out an item early, as long as it can tell when `due` hands it out again.
    """

    open: list[Item] = field(default_factory=list)
    groups: deque[list[Item]] = field(default_factory=deque)

    def add(self, item: Item) -> None:
        """An operation was issued."""
        self.open.append(item)

    def commit(self) -> None:
        """commit_group: the open operations become a group, which may be empty."""
        self.groups.append(self.open)
        self.open = []

    def due(self, keep: int, open_too: bool = False) -> list[Item]:
        """wait_group: operations that must be complete, oldest first; they leave. wait_all: those of no group too."""
        if open_too:
            self.commit()
        result: list[Item] = []
        while len(self.groups) > keep:
            result += self.groups.popleft()
        return result

    @property
    def pending(self) -> list[Item]:
        """Everything that has been issued and not waited for, oldest first."""
        return [item for group in (*self.groups, self.open) for item in group]
