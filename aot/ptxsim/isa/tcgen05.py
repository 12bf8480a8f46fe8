"""tcgen05.mma: matrix products of a CTA or a pair of CTAs into tensor memory (PTX ISA 9.7.16.10).

Data paths (9.7.16.10.5), as (lane, column) of row m, column n of D, within the CTA that holds the row:
- one CTA, M = 128: (m, n); M = 64: (32 * (m // 16) + m % 16, n);
- two CTAs: each holds half of the rows. M = 256: (m % 128, n); M = 128: (m % 64 + 64 * (n // (N / 2)), n % (N / 2));
- .ws: M = 128: (m, n); M = 64: (m + 64 * (n // (N / 2)), n % (N / 2)); M = 32: (m + 32 * (n // (N / 4)), n % (N / 4)).
Where columns are folded into lanes, A in tensor memory must stand there once for each fold, and each fold reads its
own. With two CTAs each brings its rows of A and half of B's N. f16 results sit in the low half of their cell.

Scales of block-scaled kinds (9.7.16.10.7): cell (m % 32, m // 32) from the scale address on holds in its four bytes the
scales of row m of A along K (N for B), from the byte that the instruction descriptor names. All 32-lane quarters must
hold them; each quarter of D reads its own. Folded data paths have the scales of their own columns of B.

For the machine. `decode` an instruction's idesc once per execution, then `multiply` when the machine decides that it
happens: the tensor pipe is a queue, so tcgen05.mma, cp and shift of one CTA (pair) happen in the order of issue, at any
time between issue and what waits for them:
- tcgen05.commit makes its mbarrier track all earlier asynchronous tcgen05 operations of the thread: one arrival when
  they are done, at the same offset in each CTA of the mask with .multicast::cluster. It implies
  fence::before_thread_sync.
- tcgen05.ld and st are asynchronous too, towards registers: wait::ld before the registers are used, wait::st before
  anyone else may count on the cells.
- tcgen05.fence::before_thread_sync and ::after_thread_sync order them with the synchronisation in between.
D is read and written, A in tensor memory and scales are read: `Footprint` lists cells and chunks for such checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.faults import DescriptorFault
from cubinery.aot.ptxsim.isa import descriptors
from cubinery.aot.ptxsim.isa.containers import widen, widen4
from cubinery.aot.ptxsim.isa.descriptors import fetch, operand_chunks
from cubinery.aot.ptxsim.isa.instruction_descriptors import InstructionDescriptor
from cubinery.aot.ptxsim.isa.multiply import (
    BITS,
    CODES,
    accumulator_bits,
    accumulator_values,
    scale_values,
    values,
)
from cubinery.aot.ptxsim.isa.tensor_memory import COLUMNS, LANES, split

Array = Any


@dataclass(frozen=True, slots=True)
class Cta:
    """What one CTA of the group brings."""

    shared: Array
    """Its shared memory, uint8 by address."""
    cells: Array
    """Its tensor memory, uint32 (128, 512)."""
    low: int = 0
    """First shared address that a kernel may use."""


@dataclass(frozen=True, slots=True)
class Operands:
    """The operands of one tcgen05.mma as values. Addresses are of tensor memory, descriptors of shared memory."""

    d: int
    a: int
    b: int
    a_in_tensor_memory: bool = False
    enable_d: bool = True
    """enable-input-d: D = A B + D instead of A B."""
    scale_d: int = 0
    """scale-input-d: D is divided by 2 to this power before the sum."""
    disabled: int = 0
    """disable-output-lane: bit i keeps lane i of D as it is (128 bits a CTA, the leader's first)."""
    a_scales: int = 0
    b_scales: int = 0
    vector: int = 0
    """Scales along K of one row: 1, 2 or 4 (.scale_vec::nX)."""


@dataclass(frozen=True, slots=True)
class DataPath:
    """Where rows and columns of D lie within a CTA."""

    rows: int
    """Rows of A and D that each CTA holds."""
    lanes: Array
    """(folds, rows): the lane of each row, for each fold of the columns."""

    @property
    def folds(self) -> int:
        return len(self.lanes)


@lru_cache(maxsize=16)
def data_path(m: int, group: int, ws: bool) -> DataPath:
    """The data path of an instruction, by M and the CTAs that take part."""
    rows = m // group
    row = np.arange(rows)
    if group == 1 and not ws and m == 64:
        return DataPath(rows, (32 * (row // 16) + row % 16)[None])
    return DataPath(rows, row + rows * np.arange(LANES // rows)[:, None])


def storage_bits(kind: str, element: str) -> int:
    """Bits that an element of A or B takes in memory: sub-byte elements of f8f6f4 stand in byte-sized containers."""
    return 4 if kind in ("mxf4", "mxf4nvf4") else max(BITS[element], 8)


def _columns(path: DataPath, idesc: InstructionDescriptor, address: int) -> tuple[Array, Array]:
    """(lanes (folds, rows), first column) of D, checked."""
    lane, column = split(address)
    lanes = path.lanes + lane
    last = column + idesc.n // path.folds
    half = path.folds == 1 and path.rows == 64
    if lane not in ((0, 16) if half else (0,)) or last > COLUMNS:
        raise DescriptorFault(f"D of M {idesc.m}, N {idesc.n} at {address:#x} does not lie in tensor memory")
    return lanes, column


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one CTA's part of an instruction touches."""

    a_chunks: Array | None
    """Shared addresses of 16-byte chunks; None where A is in tensor memory."""
    b_chunks: Array
    d_lanes: Array
    d_columns: tuple[int, int]
    """First and last + 1 column of D."""
    a_columns: tuple[int, int] | None
    scale_columns: tuple[tuple[int, int], ...]
    """Columns of the scales of A and of B, in all lanes."""


def footprint(idesc: InstructionDescriptor, group: int, ws: bool, o: Operands) -> Footprint:
    """The same for every CTA of the group. Raises DescriptorFault."""
    path = data_path(idesc.m, group, ws)
    lanes, column = _columns(path, idesc, o.d)
    a_bits, b_bits = storage_bits(idesc.kind, idesc.a_type), storage_bits(idesc.kind, idesc.b_type)
    b = operand_chunks(descriptors.decode(o.b, True), idesc.n // group, idesc.k, b_bits, idesc.b_mn_major)
    a = a_columns = None
    if o.a_in_tensor_memory:
        first = split(o.a)[1]
        a_columns = (first, first + idesc.k * a_bits // 32)
        if a_columns[1] > COLUMNS or idesc.a_mn_major:
            raise DescriptorFault(f"A at {o.a:#x} does not lie in tensor memory by rows")
    else:
        a = operand_chunks(descriptors.decode(o.a, True), path.rows, idesc.k, a_bits, idesc.a_mn_major)
    scales: tuple[tuple[int, int], ...] = ()
    if o.vector:
        sizes = ((o.a_scales, path.rows), (o.b_scales, idesc.n // path.folds))
        scales = tuple((split(at)[1], split(at)[1] + -(-count // 32)) for at, count in sizes)
        if any(last > COLUMNS for _, last in scales):
            raise DescriptorFault(f"scales at {o.a_scales:#x} and {o.b_scales:#x} reach past column {COLUMNS - 1}")
    return Footprint(a, b, lanes, (column, column + idesc.n // path.folds), a_columns, scales)


def _codes(data: Array, kind: str, element: str, packed_rows: bool) -> Array:
    """(rows, bytes) of K-major data to element codes (rows, k). `packed_rows`: from shared memory."""
    if kind in ("mxf4", "mxf4nvf4"):
        return widen4(data)
    bits = BITS[element]
    if bits >= 8:
        return np.ascontiguousarray(data).view(CODES[bits])
    if packed_rows:  # padded containers of 16 elements, as TMA writes them
        source = "b4x16_p64" if bits == 4 else "b6x16_p32"
        return widen(data.reshape(len(data), -1, 16), source).reshape(len(data), -1)
    return data & ((1 << bits) - 1)


def _shared_values(cta: Cta, chunks: Array, kind: str, element: str, mn_major: bool) -> Array:
    data = fetch(cta.shared, chunks, cta.low).reshape(len(chunks), -1)
    codes = _codes(data, kind, element, True)
    return values(codes.T if mn_major else codes, element)


def _tensor_values(cta: Cta, lanes: Array, columns: tuple[int, int], kind: str, element: str) -> Array:
    words = np.ascontiguousarray(cta.cells[lanes, columns[0] : columns[1]])
    return values(_codes(words.view(np.uint8), kind, element, False), element)


def _scales(cta: Cta, lanes: Array, column: int, byte: int, vector: int, kind: str) -> Array:
    """(rows, vector) scales from cells (lane, column + row // 32)."""
    words = cta.cells[lanes, column + np.arange(len(lanes)) // 32]
    shifts = 8 * (byte + np.arange(vector))
    return scale_values((words[:, None] >> shifts.astype(np.uint32)).astype(np.uint8), kind)


def _expand(scales: Array, k: int) -> Array:
    return np.repeat(scales, k // scales.shape[1], axis=1)


def check_vector(idesc: InstructionDescriptor, vector: int) -> None:
    """Which scale vectors and scale bytes go together (9.7.16.10.7, Table of scale_vec sizes)."""
    kinds = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4) if idesc.scale_type == "ue8m0" else (4,)}
    allowed = kinds.get(idesc.kind, (0,))
    if vector not in allowed:
        found = f"scale_vec::{vector}X for kind::{idesc.kind} with {idesc.scale_type or 'no scales'}"
        raise DescriptorFault(f"{found}: expected one of {allowed}")
    if vector:
        steps = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[vector]
        if idesc.a_scale_byte not in steps or idesc.b_scale_byte not in steps:
            found = f"{idesc.a_scale_byte} and {idesc.b_scale_byte}"
            raise DescriptorFault(f"scale bytes {found} for scale_vec::{vector}X: expected one of {steps}")


def multiply(idesc: InstructionDescriptor, group: int, ws: bool, ctas: Sequence[Cta], o: Operands) -> None:
    """Carry out one tcgen05.mma on the tensor memory of its CTAs (the leader's first)."""
    check_vector(idesc, o.vector)
    marks = footprint(idesc, group, ws, o)
    path = data_path(idesc.m, group, ws)
    b = np.concatenate(
        [_shared_values(cta, marks.b_chunks, idesc.kind, idesc.b_type, idesc.b_mn_major) for cta in ctas]
    )
    negate = idesc.a_negate != idesc.b_negate
    width = idesc.n // path.folds
    results = []
    for cta in ctas:
        fixed = None
        if marks.a_chunks is not None:
            fixed = _shared_values(cta, marks.a_chunks, idesc.kind, idesc.a_type, idesc.a_mn_major)
        for fold in range(path.folds):
            a = fixed
            if a is None:
                assert marks.a_columns is not None
                lanes = path.lanes[fold] + split(o.a)[0]
                a = _tensor_values(cta, lanes, marks.a_columns, idesc.kind, idesc.a_type)
            part = b[fold * width : (fold + 1) * width]
            product = _product(idesc, cta, path.lanes[fold], a, part, o)
            results.append(0.0 - product if negate else product)  # a sum of zeros is +0
    for index, product in enumerate(results):
        place, fold = divmod(index, path.folds)
        _accumulate(idesc, ctas[place], marks.d_lanes[fold], marks.d_columns, product, o, o.disabled >> 128 * place)


def _product(idesc: InstructionDescriptor, cta: Cta, lanes: Array, a: Array, b: Array, o: Operands) -> Array:
    """A times B transposed for one fold, with the scales that each quarter of the lanes holds."""
    if not o.vector:
        return a @ b.T
    row, column = np.arange(len(a)), np.arange(len(b))
    quarters = lanes // 32
    a_lanes = 32 * quarters + row % 32
    a_scales = _scales(cta, a_lanes, split(o.a_scales)[1], idesc.a_scale_byte, o.vector, idesc.scale_type)
    a = a * _expand(a_scales, idesc.k)
    result = np.empty((len(a), len(b)))
    for quarter in np.unique(quarters):
        b_lanes = 32 * quarter + column % 32
        b_scales = _scales(cta, b_lanes, split(o.b_scales)[1], idesc.b_scale_byte, o.vector, idesc.scale_type)
        mine = quarters == quarter
        result[mine] = a[mine] @ (b * _expand(b_scales, idesc.k)).T
    return result


def _accumulate(
    idesc: InstructionDescriptor,
    cta: Cta,
    lanes: Array,
    columns: tuple[int, int],
    product: Array,
    o: Operands,
    disabled: int,
) -> None:
    half = idesc.d_type == "f16"
    region = (lanes, slice(*columns))
    if o.enable_d:
        old = np.ascontiguousarray(cta.cells[region])
        bits = old.astype(np.uint16) if half else old
        product = product + accumulator_values(bits, idesc.d_type).astype(np.float64) * 2.0**-o.scale_d
    new = accumulator_bits(product, idesc.d_type, idesc.saturate).astype(np.uint32)
    if disabled & (1 << LANES) - 1:
        kept = np.array([disabled >> int(lane) & 1 for lane in lanes], bool)
        new = np.where(kept[:, None], cta.cells[region], new)
    cta.cells[region] = new
