"""f64 arithmetic (PTX ISA 9.7.3), bit-exact in every rounding mode.

Rounding to nearest is what NumPy does. Directed modes and fma are computed element by element in exact rational
arithmetic: right and slow, some microseconds an element, because kernels here use f64 only at their edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa import float32
from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, binary, unary
from cubinery.aot.ptxsim.isa.rounding import MODES
from cubinery.aot.ptxsim.isa.values import Array, propagate64

TYPES = frozenset({"f64"})

_SMALLEST = -1074
_LARGEST = Fraction(2) ** 1024 - Fraction(2) ** 971


def round_fraction(exact: Fraction, mode: str) -> float:
    """A nonzero rational rounded once to float64."""
    magnitude = abs(exact)
    # The exponent of the last place: 53 bits below the leading one, but never below the subnormals'.
    lead = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** lead > magnitude:
        lead -= 1
    place = max(lead - 52, _SMALLEST)
    scaled = magnitude / Fraction(2) ** place
    whole, rest = divmod(scaled, 1)
    negative = exact < 0
    if mode == "rn":
        up = rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    else:
        up = rest != 0 and mode == ("rm" if negative else "rp")
    units = int(whole) + up
    if units * Fraction(2) ** place > _LARGEST:
        nearest_or_outward = mode == "rn" or mode == ("rm" if negative else "rp")
        value = math.inf if nearest_or_outward else float(_LARGEST)
    else:
        value = math.ldexp(units, place)
    return -value if negative else value


def _elementwise(exact: Callable[..., Fraction | None], nearest: Callable[..., Any], mode: str) -> Callable[..., Array]:
    """A function of f64 values: `nearest` decides zeros, infinities and NaN, `exact` all else (None: keep nearest)."""

    def one(*values: float) -> float:
        if all(map(math.isfinite, values)):
            result = exact(*map(Fraction, values))
            if result:
                return round_fraction(result, mode)
        return float(nearest(*(np.float64(value) for value in values)))

    scalar = np.vectorize(one, otypes=[np.float64])
    return lambda *sources: np.asarray(scalar(*sources))


def _zero_sum(a: Any, b: Any, mode: str) -> Any:
    """The sum of two addends that cancel, or are zeros, infinities or NaN."""
    total = a + b
    if mode == "rm" and total == 0 and (np.signbit(a) or np.signbit(b)):
        return np.float64(-0.0)
    return total


def function(opcode: str, mode: str) -> Callable[..., Array]:
    """The function of f64 values that an opcode stands for in a rounding mode."""
    if opcode in ("fma", "mad"):
        return _elementwise(lambda a, b, c: a * b + c, lambda a, b, c: _zero_sum(a * b, c, mode), mode)
    if mode == "rn":
        nearest: dict[str, Any] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}
        return nearest[opcode]  # type: ignore[no-any-return]
    if opcode == "add":
        return _elementwise(lambda a, b: a + b, lambda a, b: _zero_sum(a, b, mode), mode)
    if opcode == "sub":
        return _elementwise(lambda a, b: a - b, lambda a, b: _zero_sum(a, -b, mode), mode)
    if opcode == "mul":
        return _elementwise(lambda a, b: a * b, lambda a, b: a * b, mode)
    return _elementwise(lambda a, b: a / b if b else None, lambda a, b: a / b, mode)


def square_root(value: Array, mode: str) -> Array:
    """f64 square roots: the nearest, moved by one place where its square says so."""
    nearest = np.sqrt(value)
    if mode == "rn":
        return nearest

    def one(x: float, root: float) -> float:
        if not math.isfinite(root) or root == 0:
            return root
        square = Fraction(root) ** 2
        if mode == "rp":
            return math.nextafter(root, math.inf) if square < Fraction(x) else root
        return math.nextafter(root, 0.0) if square > Fraction(x) else root

    return np.asarray(np.vectorize(one, otypes=[np.float64])(value, nearest))


_NAN_ORDER = {"fma": (0, 2, 1), "mad": (0, 2, 1), "div": (1, 0)}


def on_bits(fn: Callable[..., Array], order: tuple[int, ...] = (0, 1)) -> Callable[..., Array]:
    """A function of f64 values as one of raw bits; of several NaN the last in `order` is kept, as on an H200."""

    def function(*sources: Array) -> Array:
        values = [source.view(np.float64) for source in sources]
        return propagate64(fn(*values), *(values[i] for i in order if i < len(values)))

    return function


def arithmetic(instr: Instr) -> Compiled:
    """9.7.3.3 add, .4 sub, .5 mul, .6 fma, .7 mad, .8 div of f64."""
    mods = Modifiers(instr)
    optional = instr.opcode in ("add", "sub", "mul")
    mode = mods.choose(*MODES, default="rn") if optional else mods.expect(*MODES)
    mods.expect("f64")
    mods.done()
    count = 3 if instr.opcode in ("fma", "mad") else 2
    run = on_bits(function(instr.opcode, mode), _NAN_ORDER.get(instr.opcode, (0, 1)))
    return Compiled(("b64",), ("b64",) * count, run)


def _sign_only(change: Callable[..., Any]) -> Callable[[Instr], Compiled]:
    def specialise(instr: Instr) -> Compiled:
        """9.7.3.9 abs, 9.7.3.10 neg of f64: the sign bit; a NaN keeps its own, as on an H200."""
        mods = Modifiers(instr)
        mods.expect("f64")
        mods.done()
        return unary("b64", on_bits(change))

    return specialise


def min_max(instr: Instr) -> Compiled:
    """9.7.3.11 min, 9.7.3.12 max of f64: a NaN yields the other operand."""
    mods = Modifiers(instr)
    mods.expect("f64")
    mods.done()
    return binary("b64", on_bits(lambda a, b: float32.extreme(a, b, instr.opcode == "max", propagate=False)))


def reciprocal(mode: str) -> Compiled:
    """rcp of f64 in a rounding mode."""
    divide = function("div", mode)
    return unary("b64", on_bits(lambda a: divide(np.float64(1), a)))


def root(mode: str) -> Compiled:
    """sqrt of f64 in a rounding mode."""
    return unary("b64", on_bits(lambda a: square_root(a, mode)))


OPCODES: dict[str, Operation] = {
    **{name: Operation(arithmetic) for name in ("add", "sub", "mul", "fma", "mad", "div")},
    "abs": Operation(_sign_only(np.abs)),
    "neg": Operation(_sign_only(np.negative)),
    "min": Operation(min_max),
    "max": Operation(min_max),
    "copysign": Operation(float32.copysign),
    "testp": Operation(float32.testp),
}
