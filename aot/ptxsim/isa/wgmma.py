"""wgmma.mma_async: a warpgroup's matrix product from shared memory (PTX ISA 9.7.15.5).

D (64 x N, in the registers of four warps) = A (64 x K, in shared memory or registers) times B (K x N, in shared memory)
plus D where scale-d is true. Warp w of the group holds rows 16 w to 16 w + 15, spread as an m16n8 accumulator is, 8
columns for every 4 registers (f16: 2); A in registers is spread as the A of m16n8k(K) is.

For the machine. All four warps issue together; `instr` is decoded once by `form`, then `multiply` is called when the
machine decides that the product happens: at any time from the issue to the `wgmma.wait_group` that covers it, in order
within the warpgroup (the tensor pipe is a queue). Until then
- the accumulator registers (and A in registers) belong to the tensor core: reading or writing them is a fault, except
  that wgmma of the same shape may name the same accumulator;
- the shared memory in `operands(...)` must not change. It is read by the async proxy: writes by ordinary stores need
  fence.proxy.async first.
`wgmma.fence` orders register accesses before the first mma_async and must stand before it; `commit_group` makes a group
of what the warp issued, `wait_group N` waits for all but the newest N (async_copy.CopyGroups of each warp; a group is
complete when all four warps have committed it and its products are done).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa import descriptors
from cubinery.aot.ptxsim.isa.base import Immediate, Instr, Modifiers, Operand, Vector
from cubinery.aot.ptxsim.isa.descriptors import fetch, operand_chunks
from cubinery.aot.ptxsim.isa.matrix import a_matrix, c_matrix, c_registers
from cubinery.aot.ptxsim.isa.multiply import BITS, CODES, FP8, INT8, accumulator_bits, accumulator_values, values

Array = Any
M, WARPS = 64, 4


@dataclass(frozen=True, slots=True)
class WgmmaForm:
    """One wgmma.mma_async as written."""

    n: int
    k: int
    acc: str
    a_type: str
    b_type: str
    d: Operand
    a: Operand
    """A 64-bit register with a descriptor, or a vector of registers."""
    b: Operand
    scale_d: Operand
    a_sign: int = 1
    b_sign: int = 1
    a_mn_major: bool = False
    b_mn_major: bool = False
    satfinite: bool = False

    @property
    def registers(self) -> int:
        """32-bit accumulator registers of a thread."""
        return self.n // (4 if self.acc == "f16" else 2)

    @property
    def a_in_registers(self) -> bool:
        return isinstance(self.a, Vector)


def form(instr: Instr) -> WgmmaForm:
    """Read a wgmma.mma_async; refuse types and shapes that do not exist (9.7.15.2, 9.7.15.3)."""
    mods = Modifiers(instr)
    for word in ("mma_async", "sync", "aligned"):
        mods.expect(word)
    shape = mods.next()
    satfinite = mods.take("satfinite")
    if len(mods.left) != 3 or not shape.startswith("m64n"):
        instr.unknown("expected a shape m64nNkK and three types")
    n, k = (int(part) for part in shape[4:].split("k"))
    acc, a, b = mods.left
    integer = a in INT8
    known = (
        (a == b and a in ("f16", "bf16", "tf32") and (acc == "f32" or (a == acc == "f16")))
        or (a in FP8 and b in FP8 and acc in ("f32", "f16"))
        or (integer and b in INT8 and acc == "s32")
    )
    steps = n % 8 == 0 and 8 <= n <= 256 and not (integer and n > 32 and n % 16)
    if not known or k * BITS.get(a, 0) != 256 or not steps or (satfinite and not integer):
        instr.unknown("shape and types are not executed together")
    if len(instr.operands) < 4:
        instr.unknown("operands not understood")
    d, first, second, scale_d = instr.operands[:4]
    return _operands(instr, WgmmaForm(n, k, acc, a, b, d, first, second, scale_d, satfinite=satfinite))


def _operands(instr: Instr, bare: WgmmaForm) -> WgmmaForm:
    rest = []
    for operand in instr.operands[4:]:
        if not isinstance(operand, Immediate):
            instr.unknown("expected constants after scale-d")
        rest.append(operand.value)
    integer = bare.acc == "s32"
    turns = (1 if bare.a_in_registers else 2) if BITS[bare.a_type] == 16 else 0
    count = 0 if integer else 2 + turns
    if len(rest) != count or any(sign not in (1, -1) for sign in rest[:2]) or any(t not in (0, 1) for t in rest[2:]):
        instr.unknown(f"expected {count} constants after scale-d: two signs, then {turns} transpositions")
    targets = bare.d.elements if isinstance(bare.d, Vector) else ()
    wrong_a = isinstance(bare.a, Vector) and len(bare.a.elements) != 4
    if len(targets) != bare.registers or wrong_a:
        instr.unknown(f"expected {bare.registers} accumulator registers and A as a descriptor or four registers")
    if integer:
        return bare
    a_turn = bool(rest[2]) if turns == 2 else False
    b_turn = bool(rest[-1]) if turns else False
    return WgmmaForm(
        bare.n, bare.k, bare.acc, bare.a_type, bare.b_type, bare.d, bare.a, bare.b, bare.scale_d, rest[0], rest[1],
        a_turn, b_turn, bare.satfinite,
    )  # fmt: skip


def operands(f: WgmmaForm, a_descriptor: int | None, b_descriptor: int) -> tuple[Array | None, Array]:
    """Shared addresses of the 16-byte chunks of A (None: in registers) and of B. Raises DescriptorFault."""
    bits = BITS[f.a_type]
    b = operand_chunks(descriptors.decode(b_descriptor, False), f.n, f.k, bits, f.b_mn_major)
    if a_descriptor is None:
        return None, b
    return operand_chunks(descriptors.decode(a_descriptor, False), M, f.k, bits, f.a_mn_major), b


def matrix_codes(shared: Array, chunks: Array, bits: int, mn_major: bool, low: int = 0) -> Array:
    """Element codes (mn, k) of an operand in shared memory."""
    data = fetch(shared, chunks, low).reshape(len(chunks), -1).view(CODES[bits])
    return data.T if mn_major else data


def multiply(
    f: WgmmaForm,
    shared: Array,
    a: int | Array,
    b: int,
    accumulator: Array,
    scale_d: bool,
    low: int = 0,
) -> Array:
    """The new accumulator (4 warps, registers, 32) of uint32.

    `a` is a descriptor, or the registers (4 warps, 4, 32); `shared` the CTA's memory by address, `low` its first legal
    address; `accumulator` like the result.
    """
    bits = BITS[f.a_type]
    a_chunks, b_chunks = operands(f, a if isinstance(a, int) else None, b)
    if a_chunks is None:
        a_codes = a_matrix(np.ascontiguousarray(a), bits).reshape(M, f.k)
    else:
        a_codes = matrix_codes(shared, a_chunks, bits, f.a_mn_major, low)
    b_codes = matrix_codes(shared, b_chunks, bits, f.b_mn_major, low)
    product = values(a_codes, f.a_type) @ values(b_codes, f.b_type).T
    if f.a_sign != f.b_sign:
        product = 0.0 - product  # a sum of zeros is +0
    total = product.reshape(WARPS, 16, f.n)
    if scale_d:
        total = total + accumulator_values(c_matrix(np.ascontiguousarray(accumulator), f.acc), f.acc)
    return c_registers(accumulator_bits(total, f.acc, f.satfinite), f.acc)
