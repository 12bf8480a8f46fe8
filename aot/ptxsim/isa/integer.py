"""Integer arithmetic (PTX ISA 9.7.1) and extended precision with carry (9.7.2).

Two's complement, wrapping: one pattern of bits serves both signs wherever the low bits do not depend on them.
Division and remainder by zero give all ones, as on Hopper; the least integer divided by -1 is itself.

The condition code. `add.cc` and its kin leave a carry flag that `addc`, `subc` and `madc` read. It travels as
a predicate: see `Compiled.carry_in` and `Compiled.carry_out`. `sub.cc` sets it where it borrows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, binary, ternary
from cubinery.aot.ptxsim.isa.values import ARITHMETIC, INTEGERS, Array, IntType, packed16

TYPES = frozenset({*INTEGERS, "u16x2", "s16x2"})


def _kind(mods: Modifiers, *names: str) -> IntType:
    return INTEGERS[mods.expect(*(names or ARITHMETIC))]


def _text(kind: IntType, count: int, text: str, view: str = "") -> Compiled:
    return Compiled((kind.register,), (kind.register,) * count, text=text, view=view)


# -- sums ------------------------------------------------------------------------------------------


def _clamped32(total: Array) -> Array:
    return np.clip(total, -(1 << 31), (1 << 31) - 1).astype(np.int32).view(np.uint32)


def _sum(instr: Instr, sign: str) -> Compiled:
    if "cc" in instr.modifiers:
        return _carry_chain(instr)
    mods = Modifiers(instr)
    saturating = mods.take("sat")
    pair = mods.choose("u16x2", "s16x2") if sign == "+" else ""
    kind = None if pair else _kind(mods)
    mods.done()
    if saturating and pair:
        instr.unknown(".sat applies to .s32 only")
    if kind is None:
        return Compiled(("b32",), ("b32", "b32"), packed16(np.add))
    if not saturating:
        return _text(kind, 2, f"{{0}} {sign} {{1}}")
    if kind.name != "s32":
        instr.unknown(".sat applies to .s32 only")
    ufunc = np.add if sign == "+" else np.subtract
    return binary("b32", lambda a, b: _clamped32(ufunc(a.view(np.int32), b.view(np.int32), dtype=np.int64)))


def add(instr: Instr) -> Compiled:
    """9.7.1.1 add: d = a + b; .sat clamps to the range of s32; .u16x2 and .s16x2 per half."""
    return _sum(instr, "+")


def sub(instr: Instr) -> Compiled:
    """9.7.1.2 sub: d = a - b; .sat clamps to the range of s32."""
    return _sum(instr, "-")


def add_carry(a: Array, b: Array, carry: Array) -> tuple[Array, Array]:
    """Sum of unsigned words and a carry flag, and the carry out of it."""
    low = a + b
    total = low + carry.astype(low.dtype)
    return total, (low < a) | (total < low)


def sub_borrow(a: Array, b: Array, borrow: Array) -> tuple[Array, Array]:
    """Difference of unsigned words and a borrow flag, and the borrow out of it."""
    step = borrow.astype(a.dtype)
    difference = a - b
    return difference - step, (a < b) | (difference < step)


def _carry_chain(instr: Instr) -> Compiled:
    """9.7.2 add.cc, addc, sub.cc, subc, mad.cc, madc: with the condition code read, written or both."""
    mods = Modifiers(instr)
    carry_in, carry_out = instr.opcode.endswith("c"), mods.take("cc")
    half = mods.expect("lo", "hi") if instr.opcode.startswith("mad") else ""
    kind = _kind(mods, "u32", "s32", "u64", "s64")
    mods.done()
    step = sub_borrow if instr.opcode.startswith("sub") else add_carry
    product = _product(kind, half) if half else None
    none = np.bool_(False)

    def chain(*sources: Array) -> Any:
        carry = sources[-1] if carry_in else none
        if product is None:
            value, flag = step(sources[0], sources[1], carry)
        else:
            value, flag = step(product(sources[0], sources[1]), sources[2], carry)
        return (value, flag) if carry_out else value

    register = kind.register
    count = 3 if half else 2
    return Compiled(
        (register, "pred") if carry_out else (register,),
        (register,) * count + (("pred",) if carry_in else ()),
        chain,
        carry_in=carry_in,
        carry_out=carry_out,
    )


# -- products --------------------------------------------------------------------------------------


def high64(a: Array, b: Array) -> Array:
    """The upper 64 bits of the product of uint64 words, from four products of halves."""
    mask = np.uint64(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & mask, a >> 32, b & mask, b >> 32
    middle = a_high * b_low + (a_low * b_low >> 32)
    cross = a_low * b_high + (middle & mask)
    return a_high * b_high + (middle >> 32) + (cross >> 32)


def high64_signed(a: Array, b: Array) -> Array:
    """The upper 64 bits of the product of words taken as s64: the unsigned one less each negative factor's other."""
    zero = np.uint64(0)
    negative_a, negative_b = a >> 63 != 0, b >> 63 != 0
    return high64(a, b) - np.where(negative_a, b, zero) - np.where(negative_b, a, zero)


def _product(kind: IntType, half: str) -> Callable[[Array, Array], Array]:
    """Low or high word of a product, as raw bits."""
    if half == "lo":
        return lambda a, b: a * b
    if kind.width == 64:
        return high64_signed if kind.signed else high64
    wide = INTEGERS[f"{kind.name[0]}{2 * kind.width}"].dtype

    def high(a: Array, b: Array) -> Array:
        product = np.multiply(a.view(kind.dtype), b.view(kind.dtype), dtype=wide)
        return (product >> kind.width).astype(kind.bits)

    return high


def _wide(kind: IntType, instr: Instr) -> tuple[str, IntType]:
    """The expression of a product twice as wide, and its type."""
    if kind.width == 64:
        instr.unknown(".wide takes 16- and 32-bit types")
    double = INTEGERS[f"{kind.name[0]}{2 * kind.width}"]
    text = f"np.multiply({{0:{kind.view}}}, {{1:{kind.view}}}, dtype=np.{double.dtype.__name__})"
    return text, double


def mul(instr: Instr) -> Compiled:
    """9.7.1.3 mul: low word, high word, or the whole product of 16- or 32-bit factors."""
    mods = Modifiers(instr)
    half = mods.expect("lo", "hi", "wide")
    kind = _kind(mods)
    mods.done()
    if half == "lo":
        return _text(kind, 2, "{0} * {1}")
    if half == "wide":
        text, double = _wide(kind, instr)
        return Compiled((double.register,), (kind.register,) * 2, text=text, view=double.view)
    return binary(kind.register, _product(kind, half))


def mad(instr: Instr) -> Compiled:
    """9.7.1.4 mad: a * b + c with the low, the high or the whole product; .hi.sat.s32 clamps; .cc see 9.7.2.3."""
    if "cc" in instr.modifiers:
        return _carry_chain(instr)
    mods = Modifiers(instr)
    half = mods.expect("lo", "hi", "wide")
    saturating = mods.take("sat")
    kind = _kind(mods)
    mods.done()
    if saturating and (kind.name, half) != ("s32", "hi"):
        instr.unknown(".sat applies to .hi.s32 only")
    if saturating:
        return ternary("b32", _mad_high_saturating)
    if half == "lo":
        return _text(kind, 3, "{0} * {1} + {2}")
    if half == "wide":
        text, double = _wide(kind, instr)
        sources = (kind.register, kind.register, double.register)
        return Compiled((double.register,), sources, text=f"{text} + {{2:{double.view}}}", view=double.view)
    product = _product(kind, half)
    return ternary(kind.register, lambda a, b, c: product(a, b) + c)


def _mad_high_saturating(a: Array, b: Array, c: Array) -> Array:
    product = np.multiply(a.view(np.int32), b.view(np.int32), dtype=np.int64)
    return _clamped32((product >> 32) + c.view(np.int32))


def _product24(kind: IntType, half: str) -> Callable[[Array, Array], Array]:
    """Bits 31..0 or 47..16 of the product of the low 24 bits, signed or not, as int64 or uint64."""

    def low24(a: Array) -> Array:
        if kind.signed:
            return (a << 8).view(np.int32).astype(np.int64) >> 8
        return (a & 0xFFFFFF).astype(np.uint64)

    def product(a: Array, b: Array) -> Array:
        whole = low24(a) * low24(b)
        return whole if half == "lo" else whole >> 16

    return product


def mul24(instr: Instr) -> Compiled:
    """9.7.1.5 mul24: bits 31..0 (.lo) or 47..16 (.hi) of the product of 24-bit factors."""
    mods = Modifiers(instr)
    half, kind = mods.expect("lo", "hi"), _kind(mods, "u32", "s32")
    mods.done()
    product = _product24(kind, half)
    return binary("b32", lambda a, b: product(a, b).astype(np.uint32))


def mad24(instr: Instr) -> Compiled:
    """9.7.1.6 mad24: mul24 plus c; .hi.sat.s32 clamps."""
    mods = Modifiers(instr)
    half = mods.expect("lo", "hi")
    saturating, kind = mods.take("sat"), _kind(mods, "u32", "s32")
    mods.done()
    product = _product24(kind, half)
    if not saturating:
        return ternary("b32", lambda a, b, c: product(a, b).astype(np.uint32) + c)
    if (kind.name, half) != ("s32", "hi"):
        instr.unknown(".sat applies to .hi.s32 only")

    def clamped(a: Array, b: Array, c: Array) -> Array:
        return _clamped32(product(a, b).astype(np.int32).astype(np.int64) + c.view(np.int32))

    return ternary("b32", clamped)


# -- quotients -------------------------------------------------------------------------------------


def quotient(kind: IntType) -> Callable[[Array, Array], Array]:
    """a / b rounded towards zero, as raw bits; all ones where b is zero.

    Up to 32 bits the float64 quotient serves: it lies within 2**-53 of the true one, relatively, and a true
    quotient that is no integer keeps 2**-32 away from every integer.
    """
    ones = kind.bits((1 << kind.width) - 1)

    def narrow(a: Array, b: Array) -> Array:
        value = np.trunc(np.divide(a.view(kind.dtype), b.view(kind.dtype), dtype=np.float64))
        return np.where(b == 0, ones, np.where(b == 0, 0, value).astype(np.int64).astype(kind.bits))

    def unsigned64(a: Array, b: Array) -> Array:
        return np.where(b == 0, ones, a // np.where(b == 0, np.uint64(1), b))

    def signed64(a: Array, b: Array) -> Array:
        negative_a, negative_b = a >> 63 != 0, b >> 63 != 0
        magnitude = unsigned64(np.where(negative_a, 0 - a, a), np.where(negative_b, 0 - b, b))
        return np.where(b == 0, ones, np.where(negative_a != negative_b, 0 - magnitude, magnitude))

    if kind.width < 64:
        return narrow
    return signed64 if kind.signed else unsigned64


def div(instr: Instr) -> Compiled:
    """9.7.1.8 div: towards zero."""
    mods = Modifiers(instr)
    kind = _kind(mods)
    mods.done()
    return binary(kind.register, quotient(kind))


def rem(instr: Instr) -> Compiled:
    """9.7.1.9 rem: the remainder has the sign of the dividend."""
    mods = Modifiers(instr)
    kind = _kind(mods)
    mods.done()
    divide = quotient(kind)
    ones = kind.bits((1 << kind.width) - 1)
    return binary(kind.register, lambda a, b: np.where(b == 0, ones, a - divide(a, b) * b))


# -- absolute value, extremes ----------------------------------------------------------------------


def abs_(instr: Instr) -> Compiled:
    """9.7.1.10 abs: the least integer stays as it is."""
    mods = Modifiers(instr)
    kind = _kind(mods, "s16", "s32", "s64")
    mods.done()
    return _text(kind, 1, f"np.abs({{0:{kind.view}}})", kind.view)


def neg(instr: Instr) -> Compiled:
    """9.7.1.11 neg: the least integer stays as it is."""
    mods = Modifiers(instr)
    kind = _kind(mods, "s16", "s32", "s64")
    mods.done()
    return _text(kind, 1, "0 - {0}")


def _extreme(instr: Instr) -> Compiled:
    """9.7.1.12 min, 9.7.1.13 max: .relu, for s32 and s16x2, clamps negative results to 0."""
    mods = Modifiers(instr)
    relu = mods.take("relu")
    pair = mods.choose("u16x2", "s16x2")
    kind = INTEGERS[pair[:3]] if pair else _kind(mods)
    mods.done()
    if relu and (pair or kind.name) not in ("s32", "s16x2"):
        instr.unknown(".relu applies to .s32 and .s16x2")
    ufunc: Any = np.minimum if instr.opcode == "min" else np.maximum
    if not pair:
        name = f"np.{instr.opcode}imum({{0:{kind.view}}}, {{1:{kind.view}}})"
        return _text(kind, 2, f"np.maximum({name}, 0)" if relu else name, kind.view)

    def extreme(a: Array, b: Array) -> Array:
        value = ufunc(a.view(kind.dtype), b.view(kind.dtype))
        return (np.maximum(value, 0) if relu else value).view(np.uint16)

    return binary("b32", packed16(extreme))


def sad(instr: Instr) -> Compiled:
    """9.7.1.7 sad: c + |a - b|, the difference taken without overflow, the sum wrapping."""
    mods = Modifiers(instr)
    kind = _kind(mods)
    mods.done()

    def distance(a: Array, b: Array, c: Array) -> Array:
        return c + np.where(a.view(kind.dtype) < b.view(kind.dtype), b - a, a - b)

    return ternary(kind.register, distance)


# -- dot products ----------------------------------------------------------------------------------


def _field(bits: Array, at: int, width: int, signed: bool) -> Array:
    """A field of 32-bit words, extended to 32 bits."""
    raised = bits << (32 - at - width)
    return (raised.view(np.int32) >> (32 - width)).view(np.uint32) if signed else raised >> (32 - width)


def dp4a(instr: Instr) -> Compiled:
    """9.7.1.23 dp4a: c plus four products of bytes, each operand's bytes signed or not."""
    mods = Modifiers(instr)
    left, right = _kind(mods, "u32", "s32"), _kind(mods, "u32", "s32")
    mods.done()

    def dot(a: Array, b: Array, c: Array) -> Array:
        return c + sum(_field(a, i, 8, left.signed) * _field(b, i, 8, right.signed) for i in (0, 8, 16, 24))

    return ternary("b32", dot)


def dp2a(instr: Instr) -> Compiled:
    """9.7.1.24 dp2a: c plus two products of a's 16-bit halves with the low or the high two bytes of b."""
    mods = Modifiers(instr)
    half = mods.expect("lo", "hi")
    left, right = _kind(mods, "u32", "s32"), _kind(mods, "u32", "s32")
    mods.done()
    start = 0 if half == "lo" else 16

    def dot(a: Array, b: Array, c: Array) -> Array:
        first = _field(a, 0, 16, left.signed) * _field(b, start, 8, right.signed)
        return c + first + _field(a, 16, 16, left.signed) * _field(b, start + 8, 8, right.signed)

    return ternary("b32", dot)


OPCODES: dict[str, Operation] = {
    name: Operation(function)
    for name, function in {
        "add": add,
        "sub": sub,
        "addc": _carry_chain,
        "subc": _carry_chain,
        "mul": mul,
        "mad": mad,
        "madc": _carry_chain,
        "mul24": mul24,
        "mad24": mad24,
        "div": div,
        "rem": rem,
        "abs": abs_,
        "neg": neg,
        "min": _extreme,
        "max": _extreme,
        "sad": sad,
        "dp4a": dp4a,
        "dp2a": dp2a,
    }.items()
}
