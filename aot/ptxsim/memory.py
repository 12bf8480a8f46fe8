"""State spaces as bytes, reached by arrays of addresses.

Global addresses are addresses of this process: allocations of the simulated device and buffers that were
registered (CPU tensors). Shared memory is one array over the resident CTAs, so that a gang's gather is one
NumPy call whatever CTAs its warps belong to.
"""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from cubinery.aot.ptxsim.isa.base import WIDE
from cubinery.aot.ptxsim.syntax import Variable

_VIEWS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
WIDTHS: dict[int, Any] = {**_VIEWS, 16: WIDE}
"""The type of an element by its bytes."""
FULL = {width: np.iinfo(dtype).max for width, dtype in _VIEWS.items()}
"""Marks of an element that has been written as a whole."""
SHARED_BASE = 0x400
"""Where a CTA's shared memory starts in its window: the hardware keeps what lies below."""
RANK_SHIFT = 24
"""Shared addresses hold the CTA's rank in its cluster from this bit up."""
WINDOW = 0x0100_0000_0000_0000
"""Generic addresses of shared memory are this plus the shared address; of parameters and local, the next two."""
GENERIC = {"shared": WINDOW, "param": 2 * WINDOW, "local": 3 * WINDOW}
POISON = 0xFF
"""Byte in memory that nothing wrote: NaN in every float format."""


def wide(low: Any, high: Any) -> Any:
    """128 bits from their halves."""
    result = np.empty(np.broadcast_shapes(low.shape, high.shape), WIDE)
    result["low"], result["high"] = low, high
    return result


class AccessError(Exception):
    """An access that cannot be; `lanes` (warps, 32) are those at fault. The machine adds the place."""

    def __init__(self, kind: str, lanes: Any, message: Callable[[int], str]) -> None:
        super().__init__(kind)
        self.kind, self.lanes, self.message = kind, lanes, message


class Block:
    """Bytes with views of every width, and a mark for each byte that has been written."""

    __slots__ = ("_views", "_written", "data", "written")

    def __init__(self, data: Any, written: Any = None) -> None:
        self.data = data
        """uint8, one dimension; starts and ends on 8 bytes."""
        self.written = written
        """uint8 like `data`, 255 where written; None where everything counts as written."""
        self._views = {width: data.view(dtype) for width, dtype in _VIEWS.items()}
        self._written = None if written is None else {w: written.view(dtype) for w, dtype in _VIEWS.items()}

    def load(self, index: Any, width: int, count: int) -> tuple[Any, ...]:
        """`count` elements of `width` bytes from byte `index` (any shape)."""
        if width == 16:
            halves = self.load(index, 8, 2 * count)
            return tuple(wide(low, high) for low, high in zip(halves[::2], halves[1::2], strict=True))
        view, at = self._views[width], index // width if width > 1 else index
        return tuple(view.take(at + i if i else at) for i in range(count))

    def unwritten(self, index: Any, width: int, count: int, wanted: tuple[bool, ...]) -> Any:
        """Where an element that is wanted holds a byte never written; None where nothing does."""
        if self._written is None:
            return None
        if width == 16:
            return self.unwritten(index, 8, 2 * count, tuple(w for w in wanted for _ in range(2)))
        view, at = self._written[width], index // width
        full = FULL[width]
        bad = None
        for i in range(count):
            if wanted[i]:
                marks = view.take(at + i) != full
                bad = marks if bad is None else bad | marks
        return bad

    def store(self, index: Any, width: int, values: tuple[Any, ...]) -> None:
        """Elements of `width` bytes to byte `index` (one dimension); where indices repeat the last one stays."""
        if width == 16:
            self.store(index, 8, tuple(v[half] for v in values for half in ("low", "high")))
            return
        view, at = self._views[width], index // width
        for i, value in enumerate(values):
            view[at + i] = value
            if self._written is not None:
                self._written[width][at + i] = FULL[width]

    def mark(self, start: int, stop: int) -> None:
        """Count bytes as written."""
        if self.written is not None:
            self.written[start:stop] = POISON


class Allocation:
    """A piece of global memory."""

    __slots__ = ("base", "block", "name", "origin", "owner", "size")

    def __init__(
        self, base: int, size: int, initialised: bool, name: str, owner: Any = None, track: bool = True
    ) -> None:
        self.base, self.size, self.name, self.owner = base, size, name, owner
        # Views of eight bytes need an aligned start: begin there, and let bounds be checked by base and size.
        self.origin = base & ~63
        span = -(-(base - self.origin + size) // 64) * 64
        # The rest of the last 64 bytes lies in the same page as the allocation's own last byte.
        data = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(self.origin))
        written = None if initialised or not track else np.zeros(span, np.uint8)
        self.block = Block(data, written)

    @property
    def end(self) -> int:
        return self.base + self.size

    def initialise(self) -> None:
        """Count everything as written."""
        self.block = Block(self.block.data)


class Snapshot(Protocol):
    """Somebody who wants to know what memory was before a launch."""

    def keep(self, allocation: Allocation) -> None: ...


class GlobalMemory:
    """Allocations by address."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._allocations: list[Allocation] = []
        self._variables: dict[tuple[str, str], int] = {}
        self.constants: list[tuple[int, int]] = []
        """[start, end) of constant variables, which live among the global ones here."""
        self.snapshot: Snapshot | None = None
        """Where set, it learns of every allocation before a kernel writes to it."""

    def allocate(self, size: int, name: str = "allocation") -> int:
        """Uninitialised memory of the simulated device, aligned as cudaMalloc aligns; returns its address."""
        raw = np.full(max(size, 1) + 512, POISON, np.uint8)
        base = -(-raw.ctypes.data // 256) * 256
        self.add(Allocation(base, size, False, name, owner=raw))
        return base

    def variable(self, module: str, v: Variable) -> int:
        """The address of a module's variable; made at first use, with its initial value, or zeros."""
        found = self._variables.get((module, v.name))
        if found is None:
            found = self._variables[module, v.name] = self.allocate(v.size, v.name)
            held = self.find(found)
            assert held is not None
            held.block.data[found - held.origin :][: v.size] = np.frombuffer(
                (v.data or b"").ljust(v.size, b"\0"), np.uint8
            )
            held.initialise()
            if v.space == "const":
                self.constants.append((found, found + v.size))
        return found

    def register(
        self, address: int, size: int, *, initialised: bool = True, name: str = "host buffer", owner: Any = None
    ) -> None:
        """Make memory of this process accessible; replaces registrations that it overlaps.

        It must stay alive: `owner` is kept for as long as the registration.
        """
        if size > 0:
            self.add(Allocation(address, size, initialised, name, owner))

    def add(self, allocation: Allocation) -> None:
        first = bisect.bisect_right(self._bases, allocation.base)
        if first and self._allocations[first - 1].end > allocation.base:
            first -= 1
        last = first
        while last < len(self._bases) and self._bases[last] < allocation.end:
            last += 1
        self._bases[first:last] = [allocation.base]
        self._allocations[first:last] = [allocation]

    def remove(self, base: int) -> None:
        """Forget the allocation that starts at `base`. Raises KeyError where none does."""
        at = bisect.bisect_left(self._bases, base)
        if at == len(self._bases) or self._bases[at] != base:
            raise KeyError(base)
        del self._bases[at], self._allocations[at]

    def writes(self, allocation: Allocation) -> Any:
        """The block of an allocation that a kernel is about to write to."""
        if self.snapshot is not None:
            self.snapshot.keep(allocation)
        return allocation.block

    def find(self, address: int) -> Allocation | None:
        """The allocation that holds an address."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at >= 0 and address < self._allocations[at].end:
            return self._allocations[at]
        return None

    def at(self, base: int) -> Allocation:
        """The allocation that starts at `base`. Raises KeyError where none does."""
        found = self.find(base)
        if found is None or found.base != base:
            raise KeyError(base)
        return found

    def bytes(self, address: int, size: int) -> Any:
        """The bytes from `address` (a view). Raises KeyError where they are not in one allocation."""
        found = self.find(address)
        if found is None or address + size > found.end:
            raise KeyError(address)
        start = address - found.origin
        return found.block.data[start : start + size]

    def pieces(self, address: Any, lanes: Any, size: int) -> list[tuple[Allocation, Any]]:
        """(allocation, lanes of it) for the addresses of `lanes` (both of one shape). Raises AccessError."""
        rest = lanes
        result = []
        while rest.any():
            low = int(address[rest].min())
            found = self.find(low)
            if found is None:
                bad = rest & (address == low)
                raise AccessError(
                    "bounds", bad, lambda a: f"{size} bytes at {a:#x}: no allocation holds them{self._near(a)}"
                )
            inside = rest & (address < found.end)
            over = inside & (address + np.uint64(size) > found.end)
            if over.any():
                raise AccessError("bounds", over, partial(_past, size, found.name, found.end))
            result.append((found, inside))
            rest = rest & ~inside
        return result

    def _near(self, address: int) -> str:
        """Words for an allocation close by, which makes a bad index obvious."""
        at = bisect.bisect_right(self._bases, address) - 1
        if at >= 0 and address - self._allocations[at].end < 1 << 20:
            found = self._allocations[at]
            return f" ({address - found.end} bytes past the end of {found.name})"
        if at + 1 < len(self._bases) and self._bases[at + 1] - address < 1 << 20:
            return f" ({self._bases[at + 1] - address} bytes before {self._allocations[at + 1].name})"
        return ""


def _past(size: int, name: str, end: int, address: int) -> str:
    return f"{size} bytes at {address:#x} reach past the end of {name}, {end:#x}"


class SharedMemory:
    """Shared memory of all resident CTAs. `size` counts from address 0 of a CTA's window."""

    def __init__(self, ctas: int, size: int, *, track: bool) -> None:
        self.size = size
        self.stride = -(-size // 1024) * 1024
        data = np.full(ctas * self.stride, POISON, np.uint8)
        self.block = Block(data, np.zeros(len(data), np.uint8) if track else None)
        self.chunks = data.reshape(-1, 16)
        """The same bytes in pieces of 16."""

    def reset(self, cta: int) -> None:
        """Poison a CTA's memory: a new CTA takes its place."""
        start = cta * self.stride
        self.block.data[start : start + self.stride] = POISON
        if self.block.written is not None:
            self.block.written[start : start + self.stride] = 0

    def of(self, cta: int) -> Any:
        """A CTA's bytes, a view."""
        return self.block.data[cta * self.stride : cta * self.stride + self.size]

    def check(self, address: Any, lanes: Any, size: int) -> None:
        """Bounds of addresses within the window (rank bits already removed). Raises AccessError."""
        low, high = SHARED_BASE, self.size - size
        bad = (address < low) | (address > high)
        if lanes is not None:
            bad = bad & lanes
        if bad.any():
            raise AccessError(
                "bounds", bad, lambda a: f"{size} bytes at shared address {a:#x}: expected {low:#x} to {high:#x}"
            )
