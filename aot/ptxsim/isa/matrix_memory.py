"""ldmatrix and stmatrix: 8- and 16-row matrices between shared memory and the registers of a warp.

PTX ISA 9.7.14.5.15 and 9.7.14.5.16. A matrix is 8 (m16n16: 16) rows of 16 bytes; lane i names the address of row i of
all matrices one after the other, so that the first `rows(form)` lanes matter. The machine fetches those rows (checks,
bank of shared memory, races) and these functions rearrange them, for all warps of a gang at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import Instr, Modifiers
from cubinery.aot.ptxsim.isa.containers import widen

Array = Any
ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class MatrixForm:
    """One variant of ldmatrix or stmatrix."""

    shape: str
    """m8n8, m16n16, m8n16; for stmatrix m8n8 or m16n8."""
    count: int
    trans: bool
    source: str = ""
    """b6x16_p32 or b4x16_p64 where the load widens elements to bytes."""

    @property
    def rows(self) -> int:
        """Rows of 16 bytes, each at the address that its lane holds (lanes from 0)."""
        return self.count * (16 if self.shape == "m16n16" else 8)

    @property
    def registers(self) -> int:
        """32-bit registers of a lane."""
        return self.count * (2 if self.shape == "m16n16" else 1)


def load_form(instr: Instr) -> MatrixForm:
    """Read the modifiers of ldmatrix."""
    mods = _start(instr)
    shape = mods.expect("m8n8", "m16n16", "m8n16")
    count = int(mods.expect("x1", "x2", "x4")[1:])
    trans = mods.take("trans")
    mods.choose("shared", "shared::cta")
    widened = mods.take("b8x16")
    source = mods.expect("b6x16_p32", "b4x16_p64") if widened else ""
    if not widened:
        mods.expect("b16" if shape == "m8n8" else "b8")
    mods.done()
    wanted = {"m8n8": (not widened, True), "m16n16": (True, trans), "m8n16": (widened, not trans)}[shape]
    if not all(wanted) or (shape == "m16n16" and count == 4):
        instr.unknown("shape, .trans and format do not go together")
    return MatrixForm(shape, count, trans, source)


def store_form(instr: Instr) -> MatrixForm:
    """Read the modifiers of stmatrix."""
    mods = _start(instr)
    shape = mods.expect("m8n8", "m16n8")
    count = int(mods.expect("x1", "x2", "x4")[1:])
    trans = mods.take("trans")
    mods.choose("shared", "shared::cta")
    mods.expect("b16" if shape == "m8n8" else "b8")
    mods.done()
    if shape == "m16n8" and not trans:
        instr.unknown(".trans is mandatory for m16n8")
    return MatrixForm(shape, count, trans)


def _start(instr: Instr) -> Modifiers:
    mods = Modifiers(instr)
    mods.expect("sync")
    mods.expect("aligned")
    return mods


def load(form: MatrixForm, rows: Array) -> Array:
    """Registers (warps, registers, 32) of uint32 from rows (warps, rows, 16) of uint8.

    m8n8: lane 4g+t gets elements 2t and 2t+1 of row g (of column g with .trans) of matrix i in register i.
    m16n16 (8-bit, always transposed): byte b of lane 4g+t in register r of a matrix is row 4t+b, column g+8r.
    m8n16 (sub-byte): byte b of lane 4g+t is row g, column 4t+b.
    """
    warps = rows.shape[0]
    rows = np.ascontiguousarray(rows)
    if form.source:
        rows = widen(rows, form.source)
    if form.shape == "m16n16":
        columns = rows.reshape(warps, form.count, 16, 16).transpose(0, 1, 3, 2)
        return np.ascontiguousarray(columns).view(np.uint32).reshape(warps, form.registers, 32)
    if form.trans:
        elements = rows.view(np.uint16).reshape(warps, form.count, 8, 8).transpose(0, 1, 3, 2)
        rows = np.ascontiguousarray(elements)
    return rows.view(np.uint32).reshape(warps, form.count, 32)


def store(form: MatrixForm, registers: Array) -> Array:
    """Rows (warps, rows, 16) of uint8 from registers (warps, count, 32) of uint32.

    m8n8 is the inverse of the load. m16n8 (8-bit, always transposed): byte b of lane 4g+t goes to row 2t + b % 2 of
    its matrix in memory, column g + 8 * (b // 2): the accumulator fragment of m16n8, stored by columns.
    """
    warps = registers.shape[0]
    registers = np.ascontiguousarray(registers)
    if form.shape == "m16n8":
        elements = registers.view(np.uint8).reshape(warps, form.count, 8, 4, 2, 2)  # matrix, g, t, column, row
        rows = elements.transpose(0, 1, 3, 5, 4, 2)  # matrix, t, row, column half, g
        return rows.reshape(warps, form.rows, ROW_BYTES)
    if form.trans:
        elements = registers.view(np.uint16).reshape(warps, form.count, 8, 8).transpose(0, 1, 3, 2)
        registers = np.ascontiguousarray(elements)
    return registers.view(np.uint8).reshape(warps, form.rows, ROW_BYTES)
