"""f32 and packed f32x2 arithmetic (PTX ISA 9.7.3), bit-exact in every rounding mode.

A NaN result is 0x7fffffff. `.ftz` flushes inputs and results to zeros of the same sign; `.sat` clamps to [0, 1]
and turns NaN and -0 into +0. `neg` and `abs` only touch the sign bit, also of a NaN, whose payload PTX leaves open.
Sums and products to nearest are one NumPy operation, plus two that look for a NaN; fused multiply-add is described
in rounding.py. `div.approx` and `div.full`, for which PTX allows 2 ulp, are correctly rounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa import rounding
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, binary, register_type
from cubinery.aot.ptxsim.isa.formats import decode
from cubinery.aot.ptxsim.isa.values import MIN_NORMAL32, Array, canonical32, flush32, packed32, saturate

TYPES = frozenset({"f32", "f32x2"})

F32 = np.float32


def on_bits(fn: Callable[..., Array], count: int, ftz: bool = False, sat: bool = False) -> Callable[..., Array]:
    """A function of f32 values as one of raw bits: flushed and clamped as asked, NaN made canonical."""
    if ftz or sat:

        def full(*sources: Array) -> Array:
            values = [flush32(source.view(F32)) if ftz else source.view(F32) for source in sources]
            value = fn(*values)
            if ftz:
                value = flush32(value)
            return canonical32(saturate(value) if sat else value)

        return full
    # The plain cases spelt out: they are most of what kernels execute.
    if count == 1:
        return lambda a: canonical32(fn(a.view(F32)))
    if count == 2:
        return lambda a, b: canonical32(fn(a.view(F32), b.view(F32)))
    return lambda a, b, c: canonical32(fn(a.view(F32), b.view(F32), c.view(F32)))


def _subtract(a: Array, b: Array, mode: str) -> Array:
    return rounding.add_f32(a, -b, mode)


def _in_mode(opcode: str, mode: str) -> Callable[..., Array]:
    """The function of f32 values that an opcode stands for in a rounding mode."""
    if opcode in ("fma", "mad"):
        if mode == "rn":
            return rounding.fma_nearest
        return partial(rounding.fma_f32, mode=mode)
    if mode == "rn":
        nearest: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
        return nearest[opcode]  # type: ignore[no-any-return]
    directed: dict[str, Callable[..., Array]] = {"add": rounding.add_f32, "sub": _subtract, "mul": rounding.mul_f32}
    return partial(directed[opcode], mode=mode)


def _tiny_before_flush(fn: Callable[..., Array]) -> Callable[..., Array]:
    """A product (plus a sum) for .ftz: what rounds up to 2**-126 only for want of exponents is subnormal too."""
    scale = F32(2.0**64)

    def function(a: Array, b: Array, *c: Array) -> Array:
        value = fn(a, b, *c)
        edge = np.abs(value) == MIN_NORMAL32
        if not np.count_nonzero(edge):
            return value
        wide = fn(a * scale, b, *(addend * scale for addend in c))  # the same places, exponents to spare
        return np.where(edge & (np.abs(wide) < MIN_NORMAL32 * scale), value * F32(0), value)

    return function


def _fused_nearest(a: Array, b: Array, c: Array) -> Array:
    """fma.rn.f32 of raw bits; fma_nearest has seen to NaN."""
    return rounding.fma_nearest(a.view(F32), b.view(F32), c.view(F32)).view(np.uint32)


def arithmetic(instr: Instr) -> Compiled:
    """9.7.3.3 add, .4 sub, .5 mul, .6 fma, .7 mad: f32, f32x2, and f32 with f16 or bf16 factors (9.7.5).

    In the mixed forms `add.f32.f16 d, a, c` and `fma.rn.f32.f16 d, a, b, c` all but the last source are halves.
    """
    mods = Modifiers(instr)
    fused = instr.opcode in ("fma", "mad")
    mode = mods.expect(*rounding.MODES) if fused else mods.choose(*rounding.MODES, default="rn")
    ftz, sat = mods.take("ftz"), mods.take("sat")
    kind = mods.expect("f32", "f32x2")
    narrow = mods.choose("f16", "bf16") if kind == "f32" and instr.opcode in ("add", "sub", "fma") else ""
    mods.done()
    count = 3 if fused else 2
    plain = _in_mode(instr.opcode, mode)
    if ftz and instr.opcode not in ("add", "sub"):
        plain = _tiny_before_flush(plain)
    function = on_bits(plain, count, ftz, sat)
    if fused and mode == "rn" and not (ftz or sat):
        function = _fused_nearest
    if kind == "f32x2":
        if sat:
            instr.unknown(".sat does not apply to .f32x2")
        return Compiled(("b64",), ("b64",) * count, packed32(function))
    if not narrow:
        return Compiled(("b32",), ("b32",) * count, function)
    if ftz:
        instr.unknown(".ftz does not apply to mixed precision")

    def mixed(*sources: Array) -> Array:
        return function(*(decode(source, narrow).view(np.uint32) for source in sources[:-1]), sources[-1])

    return Compiled(("b32",), ("b16",) * (count - 1) + ("b32",), mixed)


def _approximate(a: Array, b: Array) -> Array:
    """div.approx: for 2**126 < |b| < 2**128 PTX gives 0, and NaN for an infinite dividend."""
    size = np.abs(b)
    huge = (size > F32(2.0**126)) & np.isfinite(b)
    zero = np.where(np.isinf(a), F32(np.nan), np.copysign(F32(0), a) * np.copysign(F32(1), b))
    return np.where(huge, np.where(np.isnan(a), a, zero), np.divide(a, b, dtype=F32))


def div(instr: Instr) -> Compiled:
    """9.7.3.8 div: .rn, .rz, .rm, .rp exact; .approx and .full within 2 ulp in PTX, correctly rounded here."""
    mods = Modifiers(instr)
    mode = mods.expect(*rounding.MODES, "approx", "full")
    ftz = mods.take("ftz")
    mods.expect("f32")
    mods.done()
    exact = "rn" if mode == "full" else mode
    function = _approximate if mode == "approx" else partial(rounding.div_f32, mode=exact)
    return binary("b32", on_bits(function, 2, ftz))


def _sign_only(text: str) -> Callable[[Instr], Compiled]:
    def specialise(instr: Instr) -> Compiled:
        """9.7.3.9 abs, 9.7.3.10 neg: the sign bit; .ftz flushes first."""
        mods = Modifiers(instr)
        ftz = mods.take("ftz")
        mods.expect("f32")
        mods.done()
        if not ftz:
            return Compiled(("b32",), ("b32",), text=text.format("{0}"))
        alone = text.format("a")
        change: Callable[[Array], Array] = eval(f"lambda a: {alone}")  # one of the two texts below
        return Compiled(("b32",), ("b32",), lambda a: change(flush32(a.view(F32)).view(np.uint32)))

    return specialise


def extreme(a: Array, b: Array, largest: bool, propagate: bool) -> Array:
    """min or max of floats of any width: -0 below +0, and one NaN yields the other operand unless `propagate`."""
    ufuncs: Any = (np.minimum, np.maximum) if propagate else (np.fmin, np.fmax)
    value = ufuncs[largest](a, b)
    if not np.count_nonzero(value == 0):
        return value
    bits = f"u{value.dtype.itemsize}"
    # Equal operands differ in the sign of a zero at most: combine their bits.
    combined = a.view(bits) & b.view(bits) if largest else a.view(bits) | b.view(bits)
    return np.where(a == b, combined, value.view(bits)).view(value.dtype)


def _with_sign(magnitude: Array, a: Array, b: Array) -> Array:
    """The magnitude with the product of the signs (.xorsign.abs)."""
    sign = np.signbit(a) ^ np.signbit(b)
    return np.where(np.isnan(magnitude), magnitude, np.where(sign, -magnitude, magnitude))


def extremes_of(largest: bool, propagate: bool, absolute: bool, xorsign: bool, count: int) -> Callable[..., Array]:
    """min or max of two or three values with the modifiers that f32 and the half types share."""
    pick = partial(extreme, largest=largest, propagate=propagate)
    if xorsign:
        return lambda a, b: _with_sign(pick(np.abs(a), np.abs(b)), a, b)
    if count == 3:
        if absolute:
            return lambda a, b, c: pick(pick(np.abs(a), np.abs(b)), np.abs(c))
        return lambda a, b, c: pick(pick(a, b), c)
    return pick


def min_max(instr: Instr) -> Compiled:
    """9.7.3.11 min, 9.7.3.12 max: .NaN propagates NaN; .xorsign.abs; three sources, then also .abs."""
    mods = Modifiers(instr)
    ftz, propagate = mods.take("ftz"), mods.take("NaN")
    xorsign, absolute = mods.take("xorsign"), mods.take("abs")
    mods.expect("f32")
    mods.done()
    count = len(instr.operands) - 1
    if count not in (2, 3):
        instr.unknown("two or three sources are expected")
    if xorsign and (count == 3 or not absolute):
        instr.unknown(".xorsign takes .abs and two sources")
    if absolute and not xorsign and count != 3:
        instr.unknown(".abs alone takes three sources")
    function = extremes_of(instr.opcode == "max", propagate, absolute, xorsign, count)
    return Compiled(("b32",), ("b32",) * count, on_bits(function, count, ftz))


def copysign(instr: Instr) -> Compiled:
    """9.7.3.2 copysign: the sign of a and the magnitude of b."""
    mods = Modifiers(instr)
    kind = register_type(mods.expect("f32", "f64"))
    mods.done()
    sign = 1 << (31 if kind == "b32" else 63)
    word = f"np.uint{kind[1:]}"
    return Compiled((kind,), (kind, kind), text=f"({{0}} & {word}({sign:#x})) | ({{1}} & {word}({sign - 1:#x}))")


def testp(instr: Instr) -> Compiled:
    """9.7.3.1 testp: the class of a value; zeros count as normal."""
    mods = Modifiers(instr)
    kinds = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    test, kind = mods.expect(*kinds), mods.expect("f32", "f64")
    mods.done()
    value, size = f"{{0:{kind}}}", f"np.abs({{0:{kind}}})"
    least = "np.float32(2.0**-126)" if kind == "f32" else "2.0**-1022"
    texts = {
        "finite": f"np.isfinite({value})",
        "infinite": f"np.isinf({value})",
        "number": f"{value} == {value}",
        "notanumber": f"{value} != {value}",
        "normal": f"(({size} >= {least}) | ({value} == 0)) & np.isfinite({value})",
        "subnormal": f"({size} < {least}) & ({value} != 0)",
    }
    return Compiled(("pred",), (register_type(kind),), text=texts[test])


OPCODES: dict[str, Operation] = {
    **{name: Operation(arithmetic) for name in ("add", "sub", "mul", "fma", "mad")},
    "div": Operation(div),
    "abs": Operation(_sign_only("{} & 0x7fffffff")),
    "neg": Operation(_sign_only("{} ^ 0x80000000")),
    "min": Operation(min_max),
    "max": Operation(min_max),
    "copysign": Operation(copysign),
    "testp": Operation(testp),
}
