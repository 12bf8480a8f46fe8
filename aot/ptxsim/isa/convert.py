"""cvt: conversion between every pair of types, and cvt.pack (PTX ISA 9.7.9.21 and 9.7.9.22).

Float values go through float64, which holds every source exactly, and are rounded once. The forms that kernels
execute most (integer widths, f32 to packed halves) have short ways.

Integers saturate when they come from floats; NaN becomes 0, or 1 << (width - 1) where source or result has 64 bits
(.f64, .s64, .u64). A result narrower than its register is extended by the sign of the result's type.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, Register, flatten
from cubinery.aot.ptxsim.isa.convert_fixed import from_fixed
from cubinery.aot.ptxsim.isa.convert_narrow import (
    NARROW,
    PAIRS,
    Conversion,
    float_value,
    from_narrow,
    to_half,
    to_narrow,
    to_pair,
    to_tf32,
)
from cubinery.aot.ptxsim.isa.rounding import to_f32, to_odd, two_sum
from cubinery.aot.ptxsim.isa.values import (
    INTEGERS,
    Array,
    IntType,
    canonical32,
    canonical64,
    flush32,
    saturate,
)

_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_TO_FLOAT = ("rn", "rz", "rm", "rp", "rna", "rs")
_PLAIN = ("f16", "bf16", "f32", "f64")
_REGISTERS = {"f16": "b16", "bf16": "b16", "f32": "b32", "tf32": "b32", "f64": "b64"}


def _parse(instr: Instr) -> Conversion:
    mods = Modifiers(instr)
    integer_rounding, rounding = mods.choose(*_TO_INTEGER), mods.choose(*_TO_FLOAT)
    flags = [mods.take(word) for word in ("ftz", "sat", "satfinite", "relu")]
    known = (*INTEGERS, *_PLAIN, *PAIRS, *NARROW, "tf32")
    to, source = mods.expect(*known), mods.expect(*known)
    mods.done()
    form = Conversion(to, source, integer_rounding, rounding, *flags)
    if integer_rounding and rounding:
        instr.unknown("two rounding modes")
    if form.sat and "bf16" in (to, source):
        instr.unknown(".sat does not apply to .bf16")
    if form.ftz and ("f32" not in (to, source) or form.relu or form.satfinite):
        instr.unknown(".ftz applies to .f32, without .relu and .satfinite")
    return form


def cvt(instr: Instr) -> Compiled:
    """9.7.9.21 cvt, and 9.7.9.22 cvt.pack."""
    if instr.modifiers[:1] == ("pack",):
        return _pack(instr)
    if "s2f6x2" in instr.modifiers[-1:]:
        return from_fixed(instr)
    form = _parse(instr)
    if form.to in NARROW:
        return to_narrow(instr, form)
    if form.source in NARROW:
        return from_narrow(instr, form)
    if form.to in PAIRS:
        return to_pair(instr, form)
    if form.to == "tf32":
        return to_tf32(instr, form)
    if form.satfinite or form.relu:
        return to_half(instr, form)
    if form.to in INTEGERS and form.source in (*INTEGERS, *_PLAIN):
        return _to_integer(instr, form)
    if form.source in PAIRS or form.source == "tf32":
        instr.unknown("no such conversion")
    return _to_float(instr, form)


# -- to integers -----------------------------------------------------------------------------------


def _integer_register(instr: Instr, kind: IntType) -> str:
    """The register type of an integer result: its own, or the wider one of the register that it is written to."""
    target = flatten(instr.operands[0])[0] if instr.operands else None
    if isinstance(target, Register) and target.type in ("b16", "b32", "b64"):
        return max(kind.register, target.type)
    return kind.register


def integer_value(bits: Array, kind: IntType) -> Array:
    """The value of a register of an integer type, as an array of that type."""
    return bits.astype(np.uint8).view(kind.dtype) if kind.width == 8 else bits.view(kind.dtype)


def _to_integer(instr: Instr, form: Conversion) -> Compiled:
    kind = INTEGERS[form.to]
    register = _integer_register(instr, kind)
    word = f"uint{register[1:]}"
    if form.source in _PLAIN:
        if not form.integer_rounding:
            instr.unknown("a float to an integer needs .rni, .rzi, .rmi or .rpi")
        convert = _float_to_integer(form, kind, np.dtype(word).type)
        return Compiled((register,), (_REGISTERS[form.source],), convert)
    if form.ftz or form.rounding or form.integer_rounding:
        instr.unknown("an integer to an integer takes no rounding and no .ftz")
    source = INTEGERS[form.source]
    if not form.sat and source.width > 8 and (kind.width == int(register[1:]) or kind.width > source.width):
        # Extended or cut by NumPy's own conversion; the sign to extend is the source's.
        extended = kind.width == int(register[1:]) or not source.signed or kind.signed
        if extended:
            return Compiled((register,), (source.register,), text=f"{{0:{source.view}}}.astype(np.{word})")
    low, high = max(kind.low, source.low), min(kind.high, source.high)

    def convert_integer(bits: Array) -> Array:
        value = integer_value(bits, source)
        if form.sat:
            value = np.clip(value, low, high)
        return value.astype(kind.dtype).astype(word)

    return Compiled((register,), (source.register,), convert_integer)


def _float_to_integer(form: Conversion, kind: IntType, word: type) -> Callable[[Array], Array]:
    wide = form.source == "f64" or kind.width == 64
    if_nan = kind.dtype(kind.low) if wide and kind.signed else kind.dtype(1 << (kind.width - 1) if wide else 0)
    round_value = _TO_INTEGER[form.integer_rounding]
    # The least float64 that is too large; for 32 bits and fewer the greatest value itself is a float64.
    limit = float(kind.high) + (0.0 if kind.width == 64 else 1.0)
    working = kind.dtype if kind.width == 64 else np.int64

    def convert(bits: Array) -> Array:
        value = round_value(float_value(bits, form.source, form.ftz))
        above, below, nan = value >= limit, value < kind.low, np.isnan(value)
        inside = np.where(above | below | nan, 0.0, value).astype(working).astype(kind.dtype)
        result = np.where(above, kind.dtype(kind.high), np.where(below, kind.dtype(kind.low), inside))
        return np.where(nan, if_nan, result).astype(word)

    return convert


# -- to floats -------------------------------------------------------------------------------------


def _exact_integer(bits: Array, kind: IntType) -> tuple[Array, Array]:
    """An integer as a float64 and the error of that."""
    value = integer_value(bits, kind)
    if kind.width < 64:
        number = value.astype(np.float64)
        return number, np.zeros_like(number)
    high = np.ldexp((value >> 32).astype(np.float64), 32)
    return two_sum(high, (value.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64))


def _store(value: Array, name: str, mode: str, ftz: bool, sat: bool) -> Array:
    """float64 values (exact or rounded to odd) to raw bits of a float type other than f64."""
    if name == "f32":
        result = to_f32(np.asarray(value), mode)
        if ftz:
            result = flush32(result)
        return canonical32(saturate(result) if sat else result)
    if sat:
        value = np.where(value > 0, np.minimum(value, 1.0), 0.0)
    return formats.encode(np.asarray(value), formats.FORMATS[name], mode).astype(np.uint16)


_MANTISSA = {"f16": 10, "bf16": 7, "f32": 23, "f64": 52}


def _nan_codes(bits: Array, source: str, to: str) -> Array:
    """NaN of one float type as those of another: sign and leading payload kept, made quiet."""
    wide = bits.astype(np.uint64)
    from_, into = _MANTISSA[source], _MANTISSA[to]
    payload = wide & np.uint64((1 << from_) - 1)
    payload = payload << np.uint64(into - from_) if into >= from_ else payload >> np.uint64(from_ - into)
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}
    sign = (wide >> np.uint64(width[source] - 1)) & np.uint64(1)
    exponent = ((1 << (width[to] - 1 - into)) - 1) << into | 1 << (into - 1)
    return payload | np.uint64(exponent) | sign << np.uint64(width[to] - 1)


def _keep_nan(convert: Callable[[Array], Array], form: Conversion) -> Callable[[Array], Array]:
    """Conversions from or to .f64, and from .bf16 to .f32, keep what they can of a NaN."""

    def function(bits: Array) -> Array:
        result = convert(bits)
        nan = np.isnan(formats.decode(bits, form.source) if form.source != "f64" else bits.view(np.float64))
        if np.count_nonzero(nan):
            result = np.where(nan, _nan_codes(bits, form.source, form.to).astype(result.dtype), result)
        return result

    return function


def _to_float(instr: Instr, form: Conversion) -> Compiled:
    register = _REGISTERS[form.to]
    if form.rounding in ("rna", "rs"):
        instr.unknown("rounding mode is not for this type")
    if form.source in INTEGERS:
        return _from_integer(instr, form, register)
    if form.integer_rounding and form.to != form.source:
        instr.unknown("rounding to an integer keeps the type")
    narrowing = _PLAIN.index(form.to) < _PLAIN.index(form.source) or (form.source, form.to) == ("f16", "bf16")
    if form.rounding and form.source != "bf16" and not narrowing:
        instr.unknown("a widening conversion takes no rounding mode")
    if narrowing and not form.rounding and not form.integer_rounding:
        instr.unknown("a narrowing conversion needs its rounding mode")
    mode = form.rounding or "rn"

    def convert(bits: Array) -> Array:
        value = float_value(bits, form.source, form.ftz and form.to != "f16")  # silicon flushes no source of an f16
        if form.integer_rounding:
            value = _TO_INTEGER[form.integer_rounding](value)
        if form.to == "f64" and form.ftz and form.source == "f32":
            value = canonical32(value.astype(np.float32)).view(np.float32).astype(np.float64)
            return np.asarray(saturate(value) if form.sat else value).view(np.uint64)
        if form.to == "f64":
            return canonical64(saturate(value) if form.sat else value)
        return _store(value, form.to, mode, form.ftz, form.sat)

    source = _REGISTERS[form.source]
    if form.source == "f32" and not (form.integer_rounding or form.ftz or form.sat) and mode == "rn":
        if form.to == "f16":
            return Compiled((register,), (source,), lambda a: formats.nearest_f16(a).astype(np.uint16))
        if form.to == "bf16":
            return Compiled((register,), (source,), lambda a: (formats.nearest_bf16(a) >> 16).astype(np.uint16))
    if not form.sat and ("f64" in (form.to, form.source) and not (form.ftz and form.source == "f32")):
        return Compiled((register,), (source,), _keep_nan(convert, form))
    if (form.source, form.to) == ("bf16", "f32") and not (form.sat or form.ftz or form.integer_rounding):
        return Compiled((register,), (source,), lambda a: a.astype(np.uint32) << 16)
    return Compiled((register,), (source,), convert)


def _from_integer(instr: Instr, form: Conversion, register: str) -> Compiled:
    kind = INTEGERS[form.source]
    if not form.rounding or form.integer_rounding:
        instr.unknown("an integer to a float needs .rn, .rz, .rm or .rp")
    if form.rounding == "rn" and not form.sat and form.to in ("f32", "f64") and kind.width > 8:
        text = f"{{0:{kind.view}}}.astype(np.float{form.to[1:]})"
        return Compiled((register,), (kind.register,), text=text, view=form.to)

    def convert(bits: Array) -> Array:
        number, error = _exact_integer(bits, kind)
        if form.to != "f64":
            return _store(to_odd(number, error), form.to, form.rounding, form.ftz, form.sat)
        value = _directed(number, error, form.rounding)
        return canonical64(saturate(value) if form.sat else value)

    return Compiled((register,), (kind.register,), convert)


def _directed(number: Array, error: Array, mode: str) -> Array:
    """number + error, number the nearest float64, rounded to float64 in a mode."""
    down, up = np.nextafter(number, -np.inf), np.nextafter(number, np.inf)
    if mode == "rn":
        return number
    lower, upper = np.where(error < 0, down, number), np.where(error > 0, up, number)
    if mode == "rz":
        return np.where(number < 0, upper, lower)
    return lower if mode == "rm" else upper


# -- cvt.pack --------------------------------------------------------------------------------------


def _pack(instr: Instr) -> Compiled:
    """9.7.9.22 cvt.pack.sat: s32 a and b clamped and packed, a above b, and c's low bits above both."""
    mods = Modifiers(instr)
    mods.take("pack")
    if not mods.take("sat"):
        instr.unknown("cvt.pack needs .sat")
    to = mods.expect("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2")
    mods.expect("s32")
    width = int(to[1:])
    appended = width < 16
    if appended:
        mods.expect("b32")
    mods.done()
    signed = to[0] == "s"
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)

    def clamp(bits: Array) -> Array:
        return np.clip(bits.view(np.int32), low, high).view(np.uint32) & ((1 << width) - 1)

    def pack(a: Array, b: Array) -> Array:
        return (clamp(a) << width) | clamp(b)

    if not appended:
        return Compiled(("b32",), ("b32",) * 2, pack)
    return Compiled(("b32",), ("b32",) * 3, lambda a, b, c: (c << 2 * width) | pack(a, b))


OPCODES: dict[str, Operation] = {"cvt": Operation(cvt)}
