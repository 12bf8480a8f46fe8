"""f16, bf16 and their packed pairs (PTX ISA 9.7.4), each result rounded once.

Sources are widened to float64, where sums and products of halves have room: products are exact, and a sum's error
is kept by rounding to odd (rounding.py), so that the one rounding to the half is that of the exact value, for fused
multiply-add too. A NaN result is 0x7fff. `.ftz` (f16 only) flushes inputs and results; `.sat` clamps to [0, 1];
`.relu` clamps negative results to +0 and keeps NaN. `ex2` and `tanh` are rounded from float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, register_type
from cubinery.aot.ptxsim.isa.float32 import extremes_of
from cubinery.aot.ptxsim.isa.formats import decode, nearest_bf16, nearest_f16
from cubinery.aot.ptxsim.isa.rounding import to_odd, to_odd_f32, two_sum
from cubinery.aot.ptxsim.isa.values import Array, packed16

KINDS = ("f16", "f16x2", "bf16", "bf16x2")
TYPES = frozenset(KINDS)

_LEAST_NORMAL = {"f16": 2.0**-14, "bf16": 2.0**-126}


def widen(bits: Array, name: str) -> Array:
    """Raw bits of f16 or bf16 as float64."""
    return decode(bits, name).astype(np.float64)


def narrow(value: Array, name: str) -> Array:
    """float32 or float64 values (exact, or rounded to odd) as raw bits, to nearest even, NaN canonical."""
    bits = value.view(np.uint32) if value.dtype == np.float32 else to_odd_f32(value)
    return (nearest_f16(bits) if name == "f16" else nearest_bf16(bits) >> 16).astype(np.uint16)


def _flush(value: Array, name: str) -> Array:
    return value * (np.abs(value) >= _LEAST_NORMAL[name])


def _clamp_unit(value: Array) -> Array:
    return np.where(value > 0, np.minimum(value, 1.0), 0.0)


def _clamp_negative(value: Array) -> Array:
    return np.where(np.isnan(value) | (value > 0), value, 0.0)


def on_bits(
    fn: Callable[..., Array], name: str, ftz: bool = False, sat: bool = False, relu: bool = False
) -> Callable[..., Array]:
    """A function of float64 values (its result exact or rounded to odd) as one of raw bits of f16 or bf16."""

    def function(*sources: Array) -> Array:
        values = [widen(source, name) for source in sources]
        if ftz:
            values = [_flush(value, name) for value in values]
        result = fn(*values)
        if sat:
            result = _clamp_unit(result)
        if relu:
            result = _clamp_negative(result)
        if not ftz:
            return narrow(result, name)
        # Whether a result is subnormal is decided after rounding.
        return narrow(_flush(widen(narrow(result, name), name), name), name)

    return function


def _build(instr: Instr, kind: str, count: int, fn: Callable[..., Array]) -> Compiled:
    register = register_type(kind)
    return Compiled((register,), (register,) * count, packed16(fn) if kind.endswith("x2") else fn)


def _scalar(kind: str) -> str:
    return kind.removesuffix("x2")


def _sum(a: Array, b: Array) -> Array:
    return to_odd(*two_sum(a, b))


_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, -b),
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: _sum(a * b, c),
}


def _through_f32(opcode: str, name: str) -> Callable[[Array, Array], Array]:
    """add, sub or mul in f32 and rounded again, which changes nothing: f32 has 2 p + 2 bits or more for halves of p.

    Nor does it among subnormals: those of f16 are normal in f32, and what rounds to one of bf16 is exact in f32.
    """
    ufuncs: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    ufunc = ufuncs[opcode]
    return lambda a, b: narrow(ufunc(decode(a, name), decode(b, name)), name)


OOB_NAN = 0x7FF7
"""What a tensor map's NaN fill leaves out of bounds, in f16 and in bf16 (PTX ISA 5.5.6), as an H200 writes it."""


def _clear_oob(fn: Callable[..., Array]) -> Callable[..., Array]:
    """fma of which the result is 0 where a factor is the NaN of out-of-bounds elements, of either sign."""

    def function(a: Array, b: Array, c: Array) -> Array:
        return np.where(((a & 0x7FFF) == OOB_NAN) | ((b & 0x7FFF) == OOB_NAN), np.uint16(0), fn(a, b, c))

    return function


def arithmetic(instr: Instr) -> Compiled:
    """9.7.4.1 add, .2 sub, .3 mul, .4 fma, all to nearest even; fma.oob gives 0 where a factor is an OOB NaN."""
    mods = Modifiers(instr)
    fused = instr.opcode == "fma"
    if not mods.take("rn") and fused:
        instr.unknown("fma needs its rounding mode .rn")
    ftz, sat = mods.take("ftz"), mods.take("sat")
    oob = fused and mods.take("oob")
    relu = fused and mods.take("relu")
    kind = mods.expect(*KINDS)
    mods.done()
    if oob and (ftz or sat):
        instr.unknown(".oob excludes .ftz and .sat")
    if kind.startswith("bf16") and (ftz or sat):
        instr.unknown(".ftz and .sat do not apply to .bf16")
    if relu and sat:
        instr.unknown(".relu and .sat exclude each other")
    function = on_bits(_FUNCTIONS[instr.opcode], _scalar(kind), ftz, sat, relu)
    if not (fused or ftz or sat):
        function = _through_f32(instr.opcode, _scalar(kind))
    if oob:
        function = _clear_oob(function)
    return _build(instr, kind, 3 if fused else 2, function)


def _sign_only(text: str, pair: str) -> Callable[[Instr], Compiled]:
    def specialise(instr: Instr) -> Compiled:
        """9.7.4.5 neg, 9.7.4.6 abs: the sign bit, also of a NaN; .ftz flushes first."""
        mods = Modifiers(instr)
        ftz = mods.take("ftz")
        kind = mods.expect(*KINDS)
        mods.done()
        if ftz and kind.startswith("bf16"):
            instr.unknown(".ftz does not apply to .bf16")
        if not ftz:
            register = register_type(kind)
            return Compiled((register,), (register,), text=pair if kind.endswith("x2") else text)
        change = np.negative if instr.opcode == "neg" else np.abs
        return _build(instr, kind, 1, on_bits(change, _scalar(kind), ftz))

    return specialise


def min_max(instr: Instr) -> Compiled:
    """9.7.4.7 min, 9.7.4.8 max: .NaN propagates NaN, .xorsign.abs takes magnitudes and the product of signs."""
    mods = Modifiers(instr)
    ftz, propagate = mods.take("ftz"), mods.take("NaN")
    xorsign, absolute = mods.take("xorsign"), mods.take("abs")
    kind = mods.expect(*KINDS)
    mods.done()
    count = len(instr.operands) - 1
    if ftz and kind.startswith("bf16"):
        instr.unknown(".ftz does not apply to .bf16")
    if count not in (2, 3):
        instr.unknown("two or three sources are expected")
    if xorsign != absolute or (xorsign and count == 3):
        instr.unknown(".xorsign and .abs go together, with two sources")
    function = extremes_of(instr.opcode == "max", propagate, absolute, xorsign, count)
    return _build(instr, kind, count, on_bits(function, _scalar(kind), ftz))


def transcendental(instr: Instr) -> Compiled:
    """9.7.4.10 ex2, 9.7.4.9 tanh: .approx, correctly rounded here but for the error of float64's own functions.

    PTX allows f16 ex2 a relative error of 2**-9.9, bf16 2**-7, tanh 2**-10.987 and 2**-8 absolute.
    """
    mods = Modifiers(instr)
    mods.expect("approx")
    ftz = mods.take("ftz")
    kind = mods.expect(*KINDS)
    mods.done()
    bf16 = kind.startswith("bf16")
    if ftz != bf16 and instr.opcode == "ex2":
        instr.unknown("ex2 takes .ftz with .bf16 and only then")
    if ftz and instr.opcode == "tanh":
        instr.unknown("tanh takes no .ftz")
    function: Callable[..., Array] = np.exp2 if instr.opcode == "ex2" else np.tanh
    return _build(instr, kind, 1, on_bits(partial(function), _scalar(kind), ftz))


OPCODES: dict[str, Operation] = {
    **{name: Operation(arithmetic) for name in _FUNCTIONS},
    "neg": Operation(_sign_only("{0} ^ 0x8000", "{0} ^ 0x80008000")),
    "abs": Operation(_sign_only("{0} & 0x7fff", "{0} & 0x7fff7fff")),
    "min": Operation(min_max),
    "max": Operation(min_max),
    "ex2": Operation(transcendental),
    "tanh": Operation(transcendental),
}
