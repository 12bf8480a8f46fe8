"""cvt to halves, to tf32, and to and from formats of 8 bits and fewer (PTX ISA 9.7.9.21).

convert.py reads an instruction's modifiers and comes here for these types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.base import Compiled, Instr
from cubinery.aot.ptxsim.isa.values import NAN32, Array, flush32, split16

PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}
NARROW = {f"{name}x2": name for name in ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "ue8m0")}


@dataclass(frozen=True, slots=True)
class Conversion:
    """The modifiers of a cvt."""

    to: str
    source: str
    integer_rounding: str
    rounding: str
    ftz: bool
    sat: bool
    satfinite: bool
    relu: bool


def float_value(bits: Array, name: str, ftz: bool) -> Array:
    """Raw bits of a float type as float64; `ftz` flushes subnormal f32."""
    if name == "f64":
        return bits.view(np.float64)
    value = formats.decode(bits, name)
    if ftz and name == "f32":
        value = flush32(value)
    return value.astype(np.float64)


# -- to halves -------------------------------------------------------------------------------------


def _half_codes(form: Conversion, name: str, random_bits: int) -> Callable[[Array, Array | None], Array]:
    """f32 bits (and random bits) to codes of f16 or bf16, with .relu and .satfinite."""
    fmt = formats.FORMATS[name]
    mode = form.rounding

    def convert(bits: Array, random: Array | None = None) -> Array:
        value = _clamped(float_value(bits, "f32", form.ftz), form.relu)
        return formats.encode(value, fmt, mode, form.satfinite, random, random_bits).astype(np.uint32)

    return convert


def _clamped(value: Array, relu: bool) -> Array:
    """.relu: negative values and -0 become +0, NaN stays."""
    return np.where((value > 0) | np.isnan(value), value, 0.0) if relu else value


def to_half(instr: Instr, form: Conversion) -> Compiled:
    """cvt.{rn,rz}{.relu}{.satfinite}.{f16,bf16}.f32."""
    if form.to not in ("f16", "bf16") or form.source != "f32" or form.rounding not in ("rn", "rz") or form.sat:
        instr.unknown(".relu and .satfinite are not for this conversion")
    convert = _half_codes(form, form.to, 0)
    return Compiled(("b16",), ("b32",), lambda a: convert(a, None).astype(np.uint16))


def to_pair(instr: Instr, form: Conversion) -> Compiled:
    """cvt.{rn,rz,rs}{.relu}{.satfinite}.{f16x2,bf16x2}.f32 d, a, b: a to the upper half."""
    name = PAIRS[form.to]
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


def to_tf32(instr: Instr, form: Conversion) -> Compiled:
    """cvt.{rna,rn,rz}{.relu}{.satfinite}.tf32.f32: the low 13 bits of the register are 0.

    On an H200 a NaN becomes 0x7fffe000, but with .rna its own bits without those 13.
    """
    if form.source != "f32" or form.rounding not in ("rna", "rn", "rz") or form.sat or form.ftz:
        instr.unknown("no such conversion to tf32")
    if form.relu and form.rounding == "rna":
        instr.unknown(".rna takes no .relu")
    fmt = formats.FORMATS["tf32"]

    def convert(bits: Array) -> Array:
        value = _clamped(bits.view(np.float32).astype(np.float64), form.relu)
        codes = formats.encode(value, fmt, form.rounding, form.satfinite).astype(np.uint32) << 13
        return np.where(np.isnan(value), bits & 0xFFFFE000 if form.rounding == "rna" else NAN32 & 0xFFFFE000, codes)

    return Compiled(("b32",), ("b32",), convert)


# -- to and from 8 bits and fewer ------------------------------------------------------------------


def _narrow_codes(form: Conversion, name: str) -> Callable[[Array], Array]:
    """float64 values to codes of a narrow format."""
    if name == "ue8m0":
        return lambda value: formats.ue8m0_code(value, form.rounding, form.satfinite)
    fmt = formats.FORMATS[name]
    return lambda value: formats.encode(_clamped(value, form.relu), fmt, form.rounding, form.satfinite)


@cache
def _narrow_table(form: Conversion, name: str, half: str) -> Array:
    """The code of every value of f16 or bf16, indexed by its bits. `form` gives rounding, .satfinite and .relu."""
    with np.errstate(all="ignore"):  # this is translation; the machine has not entered its own yet
        values = float_value(np.arange(1 << 16, dtype=np.uint16), half, False)
        codes = _narrow_codes(form, name)(values).astype(np.uint16)
    codes.setflags(write=False)
    return codes


def _odd_bf16(bits: Array) -> Array:
    """f32 cut to bf16, the last bit set where something was cut off.

    That is rounding to odd with 8 bits of precision, enough for another rounding to 6 or fewer (rounding.py).
    """
    return (bits >> 16) | (bits & 0xFFFF != 0)


def to_narrow(instr: Instr, form: Conversion) -> Compiled:
    """cvt to e4m3x2, e5m2x2, e2m3x2, e3m2x2, e2m1x2 or ue8m0x2, from two f32 or one packed pair of halves."""
    name = NARROW[form.to]
    scale = name == "ue8m0"
    legal = form.rounding in ("rz", "rp") and not form.relu if scale else form.rounding == "rn" and form.satfinite
    pairs = ("bf16x2",) if scale else tuple(PAIRS)
    if not legal or form.sat or form.ftz or form.source not in ("f32", *pairs):
        instr.unknown("no such conversion to a narrow format")
    table = _narrow_table(form, name, PAIRS.get(form.source, "bf16"))
    shift = 4 if name == "e2m1" else 8

    def from_f32(a: Array, b: Array) -> Array:
        return (table.take(_odd_bf16(a)) << shift) | table.take(_odd_bf16(b))

    if form.source == "f32":
        return Compiled(("b16",), ("b32", "b32"), from_f32)

    def from_pair(bits: Array) -> Array:
        low, high = split16(bits)
        return (table.take(high) << shift) | table.take(low)

    return Compiled(("b16",), ("b32",), from_pair)


def from_narrow(instr: Instr, form: Conversion) -> Compiled:
    """cvt.rn{.relu} to f16x2 (ue8m0x2: to bf16x2) from two codes; every code is exact in the result."""
    name = NARROW[form.source]
    to = PAIRS.get(form.to, "")
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
