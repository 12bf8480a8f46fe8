"""Tensor memory: allocation, and which cells tcgen05.ld, st, cp and shift reach (PTX ISA 9.7.16.1 to 9.7.16.3, .8).

A CTA has 128 lanes x 512 columns of 32-bit cells; an address is lane << 16 | column. `Allocator` keeps the columns of
one CTA. The layouts come as cell indices relative to the instruction's address, cell = lane * 512 + column, so that
the machine can keep the tensor memory of all CTAs as one flat uint32 array and serve a gang with one gather:
`load(memory, base, form)` with base = cta * CELLS + lane * 512 + column of each warp. The indices also say which cells
to check (allocated, written, ordered).

Lane 4g + t of the warp holds, in register r (figures of 9.7.16.2.3.1):
- 32x32b: lane 4g+t, column r.
- 16x64b: lane g + 8 (t % 2), column 2r + t // 2.
- 16x128b: lane g + 8 (r % 2), column 4 (r // 2) + t.
- 16x256b: lane g + 8 (r // 2 % 2), column 8 (r // 4) + 2t + r % 2.
- 16x32bx2: lane (4g+t) % 16, column r, for the upper 16 threads plus the half-split offset.
With pack::16b (unpack::16b) a register joins the low halves of two neighbouring columns, the lower column low; a store
clears the upper halves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import DescriptorFault, TensorMemoryFault
from cubinery.aot.ptxsim.isa.containers import widen
from cubinery.aot.ptxsim.isa.descriptors import SmemDescriptor, fetch, operand_chunks

Array = Any
LANES, COLUMNS = 128, 512
CELLS = LANES * COLUMNS


def split(address: int) -> tuple[int, int]:
    """(lane, column) of an address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


# -- allocation ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Allocator:
    """The columns of one CTA (9.7.16.7.1). cta_group::2 allocates in both CTAs of the pair; the machine calls both."""

    columns: int = COLUMNS
    taken: dict[int, int] = field(default_factory=dict)
    """First column -> columns."""
    relinquished: bool = False
    declared: int = COLUMNS
    """Columns that the launch says a CTA takes; the CTAs that fit an SM were counted by it."""

    def alloc(self, count: int) -> int | None:
        """The address of `count` columns, or None where the warp has to wait until some are freed."""
        self._check(count)
        if self.relinquished:
            raise TensorMemoryFault("alloc after relinquish_alloc_permit")
        taken = sum(self.taken.values())
        if self.declared < self.columns and taken + count > self.declared:
            beside = f" beside {taken}" if taken else ""
            raise TensorMemoryFault(f"alloc of {count} columns{beside}: the launch declares {self.declared}")
        start = 0
        for first in sorted(self.taken):
            if first - start >= count:
                break
            start = first + self.taken[first]
        if start + count > self.columns:
            return None
        self.taken[start] = count
        return start

    def dealloc(self, address: int, count: int) -> None:
        """Free exactly what one alloc returned."""
        self._check(count)
        lane, first = split(address)
        if lane or self.taken.get(first) != count:
            have = ", ".join(f"{size} at {at:#x}" for at, size in sorted(self.taken.items())) or "nothing"
            raise TensorMemoryFault(f"dealloc of {count} columns at {address:#x}: allocated are {have}")
        del self.taken[first]

    def relinquish(self) -> None:
        """9.7.16.7.1 relinquish_alloc_permit: this CTA allocates no more."""
        self.relinquished = True

    def leaked(self) -> str:
        """Words for what a CTA leaves allocated at exit, or nothing."""
        return ", ".join(f"{size} columns at {at:#x}" for at, size in sorted(self.taken.items()))

    def require(self, first: int, last: int, what: str) -> None:
        """Refuse an access to columns [first, last) that do not lie in live allocations."""
        at = first
        while at < last:
            found = next((start + size for start, size in self.taken.items() if start <= at < start + size), None)
            if found is None:
                raise TensorMemoryFault(f"{what} touches column {at}, which is not allocated")
            at = found

    def _check(self, count: int) -> None:
        if not 32 <= count <= self.columns or count & (count - 1):
            raise TensorMemoryFault(f"{count} columns: expected a power of two from 32 to {self.columns}")


# -- loads and stores ------------------------------------------------------------------------------

_PER = {"32x32b": (1, 1), "16x32bx2": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8)}
"""Registers and columns of one repetition."""


@dataclass(frozen=True, slots=True)
class AccessForm:
    """Shape of a tcgen05.ld or tcgen05.st."""

    shape: str
    count: int
    """Repetitions: .x1 to .x128."""
    pack: bool = False
    half_offset: int = 0
    """16x32bx2: columns from the first to the second half."""

    @property
    def registers(self) -> int:
        return _PER[self.shape][0] * self.count

    @property
    def columns(self) -> int:
        """Columns from the address to the last one touched."""
        width = _PER[self.shape][1] * self.count * (2 if self.pack else 1)
        return width + (self.half_offset if self.shape == "16x32bx2" else 0)

    @property
    def lanes(self) -> int:
        return int(self.shape[:2])


@lru_cache(maxsize=256)
def cells(form: AccessForm) -> Array:
    """Cell indices (1 or 2, registers, 32) relative to the address; two parts, low and high half, where packed."""
    lane: Array = np.arange(32)[None, :]
    r: Array = np.arange(form.registers)[:, None]
    g, t = lane // 4, lane % 4
    row: Array
    column: Array
    shift: Array = 0
    match form.shape:
        case "32x32b":
            row, column = lane, r
        case "16x32bx2":
            row, column, shift = lane % 16, r, lane // 16 * form.half_offset
        case "16x64b":
            row, column = g + 8 * (t % 2), 2 * r + t // 2
        case "16x128b":
            row, column = g + 8 * (r % 2), 4 * (r // 2) + t
        case _:
            row, column = g + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * t + r % 2
    row, column = np.broadcast_arrays(row, column)
    parts = [2 * column, 2 * column + 1] if form.pack else [column]
    result = np.stack([row * COLUMNS + part + shift for part in parts])
    result.setflags(write=False)
    return result


def check_access(form: AccessForm, address: int, warp: int) -> tuple[int, int]:
    """(lane, column) of a ld or st by a warp of its CTA; raises TensorMemoryFault where the warp may not reach it.

    A warp reaches the 32 lanes of its place in the warpgroup; shapes of 16 lanes start at the first or the 17th.
    """
    lane, column = split(address)
    home = 32 * (warp % 4)
    starts = (home,) if form.lanes == 32 else (home, home + 16)
    if lane not in starts:
        expected = " or ".join(map(str, starts))
        raise TensorMemoryFault(f"{form.shape} at lane {lane} in warp {warp}: expected lane {expected}")
    if column + form.columns > COLUMNS:
        raise TensorMemoryFault(f"{form.shape}.x{form.count} at column {column} reaches past column {COLUMNS - 1}")
    return lane, column


def load(memory: Array, base: Array, form: AccessForm) -> Array:
    """Registers (warps, registers, 32) from flat cells; `base` (warps,) is the cell of each warp's address."""
    where = base[:, None, None, None] + cells(form)
    found = memory.take(where)
    if not form.pack:
        return found[:, 0]
    return (found[:, 0] & np.uint32(0xFFFF)) | (found[:, 1] << np.uint32(16))


def store(memory: Array, base: Array, form: AccessForm, registers: Array) -> None:
    """Write registers (warps, registers, 32) to flat cells."""
    where = base[:, None, None, None] + cells(form)
    if not form.pack:
        memory[where[:, 0]] = registers
        return
    memory[where[:, 0]] = registers & np.uint32(0xFFFF)
    memory[where[:, 1]] = registers >> np.uint32(16)


def reduce_registers(registers: Array, operation: str, kind: str, absolute: bool = False, nan: bool = False) -> Array:
    """tcgen05.ld.red: min or max over a thread's own registers, (warps, registers, 32) to (warps, 32).

    Without .NaN numbers win over NaN; .abs compares (and returns) magnitudes.
    """
    if kind != "f32":
        typed = registers.view({"u32": np.uint32, "s32": np.int32}[kind])
        result = typed.min(axis=1) if operation == "min" else typed.max(axis=1)
        return result.view(np.uint32)
    values = registers.view(np.float32)
    if absolute:
        values = np.abs(values)
    functions = {("min", False): np.fmin, ("max", False): np.fmax, ("min", True): np.minimum, ("max", True): np.maximum}
    result = functions[operation, nan].reduce(values, axis=1)
    return np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32))


# -- copies from shared memory, shifts ---------------------------------------------------------------

_COPIES: dict[tuple[str, str], tuple[int, int]] = {
    ("128x256b", ""): (128, 2),
    ("4x256b", ""): (4, 2),
    ("128x128b", ""): (128, 1),
    ("64x128b", "warpx2::02_13"): (64, 1),
    ("64x128b", "warpx2::01_23"): (64, 1),
    ("32x128b", "warpx4"): (32, 1),
}
"""Rows, and chunks of 16 bytes in a row, by shape and multicast."""


@dataclass(frozen=True, slots=True)
class CopyForm:
    """Shape of a tcgen05.cp (9.7.16.8.2)."""

    shape: str
    multicast: str = ""
    source: str = ""
    """b4x16_p64 or b6x16_p32 where elements are widened to bytes."""

    @property
    def exists(self) -> bool:
        return (self.shape, self.multicast) in _COPIES

    @property
    def rows(self) -> int:
        return _COPIES[self.shape, self.multicast][0]

    @property
    def columns(self) -> int:
        """Columns of tensor memory that a row fills."""
        return 4 * _COPIES[self.shape, self.multicast][1]

    def lanes(self) -> Array:
        """Destination lanes (copies, rows), relative to the address."""
        row = np.arange(self.rows)
        if self.shape == "4x256b":
            return (32 * row)[None]  # one row for each warp of a warpgroup
        if self.multicast == "warpx2::01_23":
            first = row % 32 + 64 * (row // 32)
            return np.stack([first, first + 32])
        return np.stack([row + start for start in range(0, LANES, self.rows)])


def copy_chunks(form: CopyForm, descriptor: SmemDescriptor) -> Array:
    """Shared addresses of the 16-byte chunks that a tcgen05.cp reads: (rows, chunks), K-major."""
    return operand_chunks(descriptor, form.rows, form.columns * 4, 8, False)


def copy(form: CopyForm, descriptor: SmemDescriptor, shared: Array, cells_: Array, address: int, low: int = 0) -> None:
    """Carry out a tcgen05.cp within one CTA; `cells_` is its tensor memory (128, 512)."""
    lane, column = split(address)
    lanes = lane + form.lanes()
    if int(lanes.max()) >= LANES or column + form.columns > COLUMNS:
        raise DescriptorFault(f"tcgen05.cp.{form.shape} to {address:#x} reaches outside of tensor memory")
    data = fetch(shared, copy_chunks(form, descriptor), low)
    if form.source:
        data = widen(data, form.source)
    words = np.ascontiguousarray(data).reshape(form.rows, -1).view(np.uint32)
    for target in lanes:
        cells_[target, column : column + form.columns] = words


def shift_down(cells_: Array, address: int) -> None:
    """9.7.16.8.3 tcgen05.shift.down: in 8 columns each of 31 rows takes the next row's content; the last stays."""
    lane, column = split(address)
    if lane % 32 or lane >= LANES or column + 8 > COLUMNS:
        raise TensorMemoryFault(f"tcgen05.shift at {address:#x}: expected a lane that is a multiple of 32")
    block = cells_[lane : lane + 32, column : column + 8]
    block[:-1] = block[1:].copy()
