"""Reciprocals, roots and transcendental functions of f32, and the approximate f64 reciprocals (PTX ISA 9.7.3.13 on).

The `.approx` functions are computed in float64 and rounded once to f32, so they are correctly rounded but for cases
within float64's own error of a tie. Silicon may differ from that by what PTX allows:

    rcp.approx          1 ulp          ex2.approx   2 ulp (relative 2**-22.5)
    sqrt.approx         relative 2**-23    lg2.approx   absolute 2**-22 in [0.5, 2], else relative 2**-22
    rsqrt.approx        relative 2**-22.9  sin, cos     absolute 2**-20.5 in [-pi, pi], growing outside
    tanh.approx         relative 2**-11    f64 rcp, rsqrt  relative 2**-20

An H200 agreed with correct rounding to 4e-7 relative (tanh 1e-3). `rcp` and `sqrt` with a rounding mode are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa import float32, float64, rounding
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, unary
from cubinery.aot.ptxsim.isa.values import MIN_NORMAL32, Array, canonical64

TYPES = frozenset({"f32", "f64"})


def through_double(ufunc: Callable[..., Any]) -> Callable[[Array], Array]:
    """A function of f32 computed in float64 and rounded once."""
    return lambda a: ufunc(a.astype(np.float64)).astype(np.float32)


def _reciprocal(value: Array) -> Array:
    return 1.0 / value


def _reciprocal_root(value: Array) -> Array:
    return 1.0 / np.sqrt(value)


_APPROXIMATE: dict[str, Callable[..., Any]] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rsqrt": _reciprocal_root,
    "rcp": _reciprocal,
    "sqrt": np.sqrt,
}


def approximate(instr: Instr) -> Compiled:
    """9.7.3.16 rsqrt, .18 sin, .19 cos, .20 lg2, .21 ex2, .22 tanh, and the .approx forms of rcp and sqrt."""
    mods = Modifiers(instr)
    mods.expect("approx")
    ftz = mods.take("ftz")
    if instr.opcode in ("rcp", "rsqrt") and mods.take("f64"):
        mods.done()
        if instr.opcode == "rsqrt" and not ftz:  # ptxas expands it to more than the approximation
            return unary("b64", float64.on_bits(_reciprocal_root))
        if instr.opcode == "rcp" and not ftz:
            instr.unknown("rcp.approx of .f64 takes .ftz")
        return unary("b64", _upper_half(_APPROXIMATE[instr.opcode], ftz))
    mods.expect("f32")
    mods.done()
    if ftz and instr.opcode == "tanh":
        instr.unknown("tanh takes no .ftz")
    if ftz and instr.opcode == "ex2":
        return unary("b32", float32.on_bits(_exp2_flushed, 1))
    return unary("b32", float32.on_bits(through_double(_APPROXIMATE[instr.opcode]), 1, ftz))


def _exp2_flushed(value: Array) -> Array:
    """ex2.approx.ftz, which softmax lives on: a flushed source makes no difference, and no result is negative."""
    result = np.exp2(value.astype(np.float64)).astype(np.float32)
    return np.multiply(result, result >= MIN_NORMAL32)


def _upper_half(function: Callable[..., Any], ftz: bool) -> Callable[[Array], Array]:
    """9.7.3.14 rcp.approx.ftz.f64, 9.7.3.17 rsqrt.approx.ftz.f64: of the upper 32 bits, the lower ones zero."""
    upper = np.uint64(0xFFFFFFFF00000000)

    def flush(value: Array) -> Array:
        return value * (np.abs(value) >= 2.0**-1022)

    def approximated(a: Array) -> Array:
        value = (a & upper).view(np.float64)
        result = function(flush(value) if ftz else value)
        return canonical64(flush(result) if ftz else result) & upper

    return approximated


def rounded(instr: Instr) -> Compiled:
    """9.7.3.13 rcp, 9.7.3.15 sqrt: exact with .rn, .rz, .rm or .rp; .approx as above."""
    if "approx" in instr.modifiers:
        return approximate(instr)
    mods = Modifiers(instr)
    mode = mods.expect(*rounding.MODES)
    ftz = mods.take("ftz")
    kind = mods.expect("f32", "f64")
    mods.done()
    inverse = instr.opcode == "rcp"
    if kind == "f64":
        if ftz:
            instr.unknown(".ftz does not apply to .f64")
        return float64.reciprocal(mode) if inverse else float64.root(mode)

    def reciprocal(a: Array) -> Array:
        return rounding.div_f32(np.ones_like(a), a, mode)

    def root(a: Array) -> Array:
        return rounding.sqrt_f32(a, mode)

    return unary("b32", float32.on_bits(reciprocal if inverse else root, 1, ftz))


OPCODES: dict[str, Operation] = {
    **{name: Operation(approximate) for name in ("ex2", "lg2", "sin", "cos", "tanh", "rsqrt")},
    "rcp": Operation(rounded),
    "sqrt": Operation(rounded),
}
