"""mma.sync and movmatrix: matrix products over the registers of a warp (PTX ISA 9.7.14.5).

A fragment spreads a matrix over 32 lanes. With lane = 4 * g + t (g "groupID", t "threadID_in_group") and e elements
in a 32-bit register, all shapes m16n8 follow one rule (9.7.14.5.7 to 9.7.14.5.12): register r, element i of
- A (16 x K) is row g + 8 * (r % 2), column t * e + i + 4 * e * (r // 2);
- B (K x 8) is row t * e + i + 4 * e * r, column g;
- C and D (16 x 8), 32-bit: row g + 8 * (r // 2), column 2 * t + r % 2; f16: row g + 8 * r, column 2 * t + i.
So fragments become matrices by reshaping and transposing, for all warps at once. For rounding and order of sums see
multiply.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation
from cubinery.aot.ptxsim.isa.multiply import (
    BITS,
    CODES,
    FP8,
    INT8,
    accumulator_bits,
    accumulator_values,
    register_values,
)

Array = Any
GROUPS, THREADS = 8, 4
"""Groups of lanes in a warp, lanes in a group."""


@dataclass(frozen=True, slots=True)
class MmaForm:
    """One variant of mma.sync, M = 16 and N = 8."""

    k: int
    a_type: str
    b_type: str
    acc: str
    """Type of C and D: f32, f16 or s32."""
    satfinite: bool = False

    @property
    def bits(self) -> int:
        return BITS[self.a_type]

    @property
    def a_registers(self) -> int:
        """32-bit registers of A."""
        return 16 * self.k * self.bits // (32 * 32)

    @property
    def b_registers(self) -> int:
        """32-bit registers of B."""
        return 8 * self.k * self.bits // (32 * 32)

    @property
    def c_registers(self) -> int:
        """32-bit registers of C and of D."""
        return 2 if self.acc == "f16" else 4


def a_matrix(registers: Array, bits: int) -> Array:
    """Codes (warps, 16, K) of A from registers (warps, r, 32) of uint32."""
    warps, count, _ = registers.shape
    elements = 32 // bits
    codes = registers.view(CODES[bits]).reshape(warps, count // 2, 2, GROUPS, THREADS, elements)
    return codes.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, -1)


def c_matrix(registers: Array, acc: str) -> Array:
    """Bits (warps, 16, N) of an accumulator from registers (warps, r, 32), N = 8 for every 4 (f16: 2) registers."""
    warps = registers.shape[0]
    if acc == "f16":
        halves = registers.view(np.uint16).reshape(warps, -1, 2, GROUPS, THREADS, 2)
        return halves.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 16, -1)
    words = registers.reshape(warps, -1, 2, 2, GROUPS, THREADS)
    return words.transpose(0, 2, 4, 1, 5, 3).reshape(warps, 16, -1)


def c_registers(matrix: Array, acc: str) -> Array:
    """The inverse of c_matrix: registers (warps, r, 32) of uint32."""
    warps, _, n = matrix.shape
    if acc == "f16":
        halves = matrix.reshape(warps, 2, GROUPS, n // 8, THREADS, 2).transpose(0, 3, 1, 2, 4, 5)
        return np.ascontiguousarray(halves).view(np.uint32).reshape(warps, -1, 32)
    words = matrix.reshape(warps, 2, GROUPS, n // 8, THREADS, 2).transpose(0, 3, 1, 5, 2, 4)
    return words.reshape(warps, -1, 32)


def multiplier(form: MmaForm) -> Callable[..., tuple[Array, ...]]:
    """The function of the flattened registers of A, B and C, each (warps, 32), that returns those of D.

    The registers of one operand are stacked in front, so that stacking and unstacking copy whole arrays; each operand
    is then transposed and widened to float64 in one pass.
    """
    first, second = form.a_registers, form.a_registers + form.b_registers
    elements = 32 // form.bits
    half = form.acc == "f16"

    def run(*registers: Array) -> tuple[Array, ...]:
        a = register_values(np.stack(registers[:first]), form.a_type)
        b = register_values(np.stack(registers[first:second]), form.b_type)
        warps = a.shape[1]
        a = a.reshape(-1, 2, warps, GROUPS, THREADS, elements).transpose(2, 1, 3, 0, 4, 5)
        b = b.reshape(-1, warps, GROUPS, THREADS, elements).transpose(1, 2, 0, 3, 4)
        left = a.astype(np.float64, order="C").reshape(warps, 16, form.k)
        right = b.astype(np.float64, order="C").reshape(warps, GROUPS, form.k)
        product = left @ right.transpose(0, 2, 1)
        c = np.stack(registers[second:])
        if half:  # (register, warp, g, t, element)
            parts = product.reshape(warps, 2, GROUPS, THREADS, 2).transpose(1, 0, 2, 3, 4)
        else:  # (row half, column, warp, g, t)
            parts = product.reshape(warps, 2, GROUPS, THREADS, 2).transpose(1, 4, 0, 2, 3)
        old = accumulator_values(c.view(np.uint16) if half else c, form.acc).reshape(parts.shape)
        d = np.ascontiguousarray(accumulator_bits(parts + old, form.acc, form.satfinite))
        return tuple(d.view(np.uint32).reshape(-1, warps, 32))

    return run


_FLOAT_K = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8)}


def mma_form(instr: Instr) -> MmaForm:
    """Read shape and types of an mma.sync; refuse what the simulator does not execute."""
    mods = Modifiers(instr)
    mods.expect("sync")
    mods.expect("aligned")
    k = int(mods.expect("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32").rpartition("k")[2])
    mods.expect("row")
    mods.expect("col")
    satfinite = mods.take("satfinite")
    if len(mods.left) != 4:
        instr.unknown("expected four types")
    d, a, b, c = mods.left
    known = (
        (a == b and k in _FLOAT_K.get(a, ()) and (d == "f32" or (a == "f16" and d == "f16")))
        or (a in FP8 and b in FP8 and k in (16, 32) and d in ("f32", "f16"))
        or (a in INT8 and b in INT8 and k in (16, 32) and d == "s32")
    )
    if not known or c != d or (satfinite and d != "s32"):
        instr.unknown("shape and types are not executed together")
    return MmaForm(k, a, b, d, satfinite)


def mma(instr: Instr) -> Compiled:
    """9.7.14.5.14 mma: D = A B + C."""
    form = mma_form(instr)
    count = form.c_registers
    sources = form.a_registers + form.b_registers + count
    return Compiled(("b32",) * count, ("b32",) * sources, multiplier(form), converged=True)


def transpose8(register: Array) -> Array:
    """An 8 x 8 matrix of b16 whose row g lies in the lanes of group g, transposed; (warps, 32) of uint32."""
    rows = np.ascontiguousarray(register).view(np.uint16).reshape(-1, 8, 8)
    return np.ascontiguousarray(rows.transpose(0, 2, 1)).view(np.uint32).reshape(-1, 32)


def move_matrix(instr: Instr) -> Compiled:
    """9.7.14.5.17 movmatrix: transpose across the registers of a warp."""
    mods = Modifiers(instr)
    for word in ("sync", "aligned", "m8n8", "trans", "b16"):
        mods.expect(word)
    mods.done()
    return Compiled(("b32",), ("b32",), transpose8, converged=True)


OPCODES = {"mma": Operation(mma), "movmatrix": Operation(move_matrix)}
