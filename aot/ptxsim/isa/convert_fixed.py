"""cvt from s2f6x2, pairs of 8-bit fixed-point numbers (PTX ISA 9.7.9.21, Blackwell).

An s2f6 number is a two's complement byte with six bits behind the point: its value is the byte divided by 64. With
.scaled::n2::ue8m0 each element is multiplied by its own power of two, the lower scale for the lower element. bf16 holds
every product exactly, so only products beyond its range leave anything to .satfinite.
"""

from __future__ import annotations

import numpy as np

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers
from cubinery.aot.ptxsim.isa.values import Array


def from_fixed(instr: Instr) -> Compiled:
    """cvt.rn.satfinite{.relu}{.scaled::n2::ue8m0}.bf16x2.s2f6x2 d, a{, scales}."""
    mods = Modifiers(instr)
    mods.expect("rn")
    mods.expect("satfinite")
    relu, scaled = mods.take("relu"), mods.take("scaled::n2::ue8m0")
    mods.expect("bf16x2")
    mods.expect("s2f6x2")
    mods.done()

    def element(bits: Array, scales: Array, shift: int) -> Array:
        value = ((bits >> shift) & 0xFF).astype(np.uint8).view(np.int8).astype(np.float64) / 64
        value = value * formats.ue8m0_value(((scales >> shift) & 0xFF).astype(np.uint8)).astype(np.float64)
        if relu:
            value = np.where((value > 0) | np.isnan(value), value, 0.0)
        return formats.encode(value, formats.FORMATS["bf16"], "rn", True).astype(np.uint32)

    def convert(bits: Array, scales: Array) -> Array:
        return (element(bits, scales, 8) << 16) | element(bits, scales, 0)

    if scaled:
        return Compiled(("b32",), ("b16", "b16"), convert)
    return Compiled(("b32",), ("b16",), lambda bits: convert(bits, np.full((1, 1), 0x7F7F, np.uint16)))
