"""cvt: conversion between every pair of types, and cvt.pack (PTX ISA 9.7.9.21 and 9.7.9.22).

Float values go through float64, which holds every source exactly, and are rounded once. The forms that kernels
execute most (integer widths, f32 to packed halves) have short ways.

Integers saturate when they come from floats; NaN becomes 0, or 1 << (width - 1) where source or result has 64 bits
(.f64, .s64, .u64). A result narrower than its register is extended by the sign of the result's type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, Register, flatten
from cubinery.aot.ptxsim.isa.rounding import to_f32, to_odd, two_sum
from cubinery.aot.ptxsim.isa.values import (
    INTEGERS,
    NAN32,
    Array,
    IntType,
    canonical32,
    canonical64,
    flush32,
    saturate,
    split16,
)

_TO_INTEGER: dict[str, Callable[[Array], Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}
_TO_FLOAT = ("rn", "rz", "rm", "rp", "rna", "rs")
_PLAIN = ("f16", "bf16", "f32", "f64")
_PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
_NARROW = {f"{name}x2": name for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0")}
_REGISTERS = {"f16": "b16", "bf16": "b16", "f32": "b32", "tf32": "b32", "f64": "b64"}


@dataclass(frozen=True, slots=True)
class _Conversion:
    """The modifiers of a cvt."""

    to: str
    source: str
    integer_rounding: str
    rounding: str
    ftz: bool
    sat: bool
    satfinite: bool
    relu: bool


def _parse(instr: Instr) -> _Conversion:
    mods = Modifiers(instr)
    integer_rounding, rounding = mods.choose(*_TO_INTEGER), mods.choose(*_TO_FLOAT)
    flags = [mods.take(word) for word in ("ftz", "sat", "satfinite", "relu")]
    known = (*INTEGERS, *_PLAIN, *_PAIRS, *_NARROW, "tf32")
    to, source = mods.expect(*known), mods.expect(*known)
    mods.done()
    form = _Conversion(to, source, integer_rounding, rounding, *flags)
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
    form = _parse(instr)
    if form.to in _NARROW:
        return _to_narrow(instr, form)
    if form.source in _NARROW:
        return _from_narrow(instr, form)
    if form.to in _PAIRS:
        return _to_pair(instr, form)
    if form.to == "tf32":
        return _to_tf32(instr, form)
    if form.satfinite or form.relu:
        return _to_half(instr, form)
    if form.to in INTEGERS and form.source in (*INTEGERS, *_PLAIN):
        return _to_integer(instr, form)
    if form.source in _PAIRS or form.source == "tf32":
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


def _to_integer(instr: Instr, form: _Conversion) -> Compiled:
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


def _float_to_integer(form: _Conversion, kind: IntType, word: type) -> Callable[[Array], Array]:
    wide = form.source == "f64" or kind.width == 64
    if_nan = kind.dtype(kind.low) if wide and kind.signed else kind.dtype(1 << (kind.width - 1) if wide else 0)
    round_value = _TO_INTEGER[form.integer_rounding]
    # The least float64 that is too large; for 32 bits and fewer the greatest value itself is a float64.
    limit = float(kind.high) + (0.0 if kind.width == 64 else 1.0)
    working = kind.dtype if kind.width == 64 else np.int64

    def convert(bits: Array) -> Array:
        value = round_value(_float_value(bits, form.source, form.ftz))
        above, below, nan = value >= limit, value < kind.low, np.isnan(value)
        inside = np.where(above | below | nan, 0.0, value).astype(working).astype(kind.dtype)
        result = np.where(above, kind.dtype(kind.high), np.where(below, kind.dtype(kind.low), inside))
        return np.where(nan, if_nan, result).astype(word)

    return convert


# -- to floats -------------------------------------------------------------------------------------


def _float_value(bits: Array, name: str, ftz: bool) -> Array:
    """Raw bits of a float type as float64; `ftz` flushes subnormal f32."""
    if name == "f64":
        return bits.view(np.float64)
    value = formats.decode(bits, name)
    if ftz and name == "f32":
        value = flush32(value)
    return value.astype(np.float64)


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


def _to_float(instr: Instr, form: _Conversion) -> Compiled:
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
        value = _float_value(bits, form.source, form.ftz)
        if form.integer_rounding:
            value = _TO_INTEGER[form.integer_rounding](value)
        if form.to == "f64":
            return canonical64(saturate(value) if form.sat else value)
        return _store(value, form.to, mode, form.ftz, form.sat)

    source = _REGISTERS[form.source]
    if form.source == "f32" and not (form.integer_rounding or form.ftz or form.sat) and mode == "rn":
        if form.to == "f16":
            return Compiled((register,), (source,), lambda a: formats.nearest_f16(a).astype(np.uint16))
        if form.to == "bf16":
            return Compiled((register,), (source,), lambda a: (formats.nearest_bf16(a) >> 16).astype(np.uint16))
    return Compiled((register,), (source,), convert)


def _from_integer(instr: Instr, form: _Conversion, register: str) -> Compiled:
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


# -- to halves -------------------------------------------------------------------------------------


def _half_codes(form: _Conversion, name: str, random_bits: int) -> Callable[[Array, Array | None], Array]:
    """f32 bits (and random bits) to codes of f16 or bf16, with .relu and .satfinite."""
    fmt = formats.FORMATS[name]
    mode = form.rounding

    def convert(bits: Array, random: Array | None = None) -> Array:
        value = _clamped(_float_value(bits, "f32", form.ftz), form.relu)
        return formats.encode(value, fmt, mode, form.satfinite, random, random_bits).astype(np.uint32)

    return convert


def _clamped(value: Array, relu: bool) -> Array:
    """.relu: negative values and -0 become +0, NaN stays."""
    return np.where((value > 0) | np.isnan(value), value, 0.0) if relu else value


def _to_half(instr: Instr, form: _Conversion) -> Compiled:
    """cvt.{rn,rz}{.relu}{.satfinite}.{f16,bf16}.f32."""
    if form.to not in ("f16", "bf16") or form.source != "f32" or form.rounding not in ("rn", "rz") or form.sat:
        instr.unknown(".relu and .satfinite are not for this conversion")
    convert = _half_codes(form, form.to, 0)
    return Compiled(("b16",), ("b32",), lambda a: convert(a, None).astype(np.uint16))


def _to_pair(instr: Instr, form: _Conversion) -> Compiled:
    """cvt.{rn,rz,rs}{.relu}{.satfinite}.{f16x2,bf16x2}.f32 d, a, b: a to the upper half."""
    name = _PAIRS[form.to]
    if form.source != "f32" or form.rounding not in ("rn", "rz", "rs") or form.sat or form.ftz:
        instr.unknown("no such conversion to a pair")
    if form.rounding == "rn" and not form.relu and not form.satfinite:
        return Compiled(("b32",), ("b32", "b32"), _nearest_f16x2 if name == "f16" else _nearest_bf16x2)
    random_bits = 13 if name == "f16" else 16
    convert = _half_codes(form, name, random_bits)
    if form.rounding != "rs":
        return Compiled(("b32",), ("b32", "b32"), lambda a, b: (convert(a, None) << 16) | convert(b, None))
    mask = (1 << random_bits) - 1

    def stochastic(a: Array, b: Array, random: Array) -> Array:
        return (convert(a, (random >> 16) & mask) << 16) | convert(b, random & mask)

    return Compiled(("b32",), ("b32",) * 3, stochastic)


def _nearest_f16x2(a: Array, b: Array) -> Array:
    return (formats.nearest_f16(a) << 16) | formats.nearest_f16(b)


def _nearest_bf16x2(a: Array, b: Array) -> Array:
    return (formats.nearest_bf16(a) & 0xFFFF0000) | (formats.nearest_bf16(b) >> 16)


def _to_tf32(instr: Instr, form: _Conversion) -> Compiled:
    """cvt.{rna,rn,rz}{.relu}{.satfinite}.tf32.f32: the low 13 bits of the register are 0, a NaN is canonical."""
    if form.source != "f32" or form.rounding not in ("rna", "rn", "rz") or form.sat or form.ftz:
        instr.unknown("no such conversion to tf32")
    if form.relu and form.rounding == "rna":
        instr.unknown(".rna takes no .relu")
    fmt = formats.FORMATS["tf32"]

    def convert(bits: Array) -> Array:
        value = _clamped(bits.view(np.float32).astype(np.float64), form.relu)
        codes = formats.encode(value, fmt, form.rounding, form.satfinite).astype(np.uint32) << 13
        return np.where(np.isnan(value), NAN32, codes)

    return Compiled(("b32",), ("b32",), convert)


# -- to and from 8 bits and fewer ------------------------------------------------------------------


def _narrow_codes(form: _Conversion, name: str) -> Callable[[Array], Array]:
    """float64 values to codes of a narrow format."""
    if name == "ue8m0":
        return lambda value: formats.ue8m0_code(value, form.rounding, form.satfinite)
    fmt = formats.FORMATS[name]
    return lambda value: formats.encode(_clamped(value, form.relu), fmt, form.rounding, form.satfinite)


@cache
def _narrow_table(form: _Conversion, name: str, half: str) -> Array:
    """The code of every value of f16 or bf16, indexed by its bits. `form` gives rounding, .satfinite and .relu."""
    with np.errstate(all="ignore"):  # this is translation; the machine has not entered its own yet
        values = _float_value(np.arange(1 << 16, dtype=np.uint16), half, False)
        codes = _narrow_codes(form, name)(values).astype(np.uint16)
    codes.setflags(write=False)
    return codes


def _odd_bf16(bits: Array) -> Array:
    """f32 cut to bf16, the last bit set where something was cut off.

    That is rounding to odd with 8 bits of precision, enough for another rounding to 6 or fewer (rounding.py).
    """
    return (bits >> 16) | (bits & 0xFFFF != 0)


def _to_narrow(instr: Instr, form: _Conversion) -> Compiled:
    """cvt to e4m3x2, e5m2x2, e2m3x2, e3m2x2, e2m1x2 or ue8m0x2, from two f32 or one packed pair of halves."""
    name = _NARROW[form.to]
    scale = name == "ue8m0"
    legal = form.rounding in ("rz", "rp") and not form.relu if scale else form.rounding == "rn" and form.satfinite
    pairs = ("bf16x2",) if scale else tuple(_PAIRS)
    if not legal or form.sat or form.ftz or form.source not in ("f32", *pairs):
        instr.unknown("no such conversion to a narrow format")
    table = _narrow_table(form, name, _PAIRS.get(form.source, "bf16"))
    shift = 4 if name == "e2m1" else 8

    def from_f32(a: Array, b: Array) -> Array:
        return (table.take(_odd_bf16(a)) << shift) | table.take(_odd_bf16(b))

    if form.source == "f32":
        return Compiled(("b16",), ("b32", "b32"), from_f32)

    def from_pair(bits: Array) -> Array:
        low, high = split16(bits)
        return (table.take(high) << shift) | table.take(low)

    return Compiled(("b16",), ("b32",), from_pair)


def _from_narrow(instr: Instr, form: _Conversion) -> Compiled:
    """cvt.rn{.relu} to f16x2 (ue8m0x2: to bf16x2) from two codes; every code is exact in the result."""
    name = _NARROW[form.source]
    to = _PAIRS.get(form.to, "")
    if not to or (name == "ue8m0") != (to == "bf16") or form.rounding != "rn" or form.sat or form.ftz or form.satfinite:
        instr.unknown("no such conversion from a narrow format")
    if form.relu and name == "ue8m0":
        instr.unknown(".relu is not for .ue8m0x2")
    shift, mask = (4, 0xF) if name == "e2m1" else (8, 0xFF)
    codes = np.arange(mask + 1, dtype=np.uint16)
    values = _clamped(formats.decode(codes, name).astype(np.float64), form.relu)
    table = formats.encode(values, formats.FORMATS[to]).astype(np.uint32)

    def convert(bits: Array) -> Array:
        return (table.take((bits >> shift) & mask) << 16) | table.take(bits & mask)

    return Compiled(("b32",), ("b16",), convert)


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
