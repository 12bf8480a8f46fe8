"""Comparison and selection (PTX ISA 9.7.6, and 9.7.7 for halves).

Float comparisons: eq, ne, lt, le, gt, ge are false where an operand is NaN (ordered; `ne` too); equ, neu, ltu, leu,
gtu, geu are true there; num asks that neither is NaN, nan that one is. Unsigned lo, ls, hi, hs are lt, le, gt, ge.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, Pair, register_type
from cubinery.aot.ptxsim.isa.formats import decode
from cubinery.aot.ptxsim.isa.values import FLOATS, INTEGERS, Array, flush32, split16

_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_FLOAT_TEXT = {
    "ne": "(({a} < {b}) | ({a} > {b}))",
    "equ": "~(({a} < {b}) | ({a} > {b}))",
    "neu": "({a} != {b})",
    "ltu": "~({a} >= {b})",
    "leu": "~({a} > {b})",
    "gtu": "~({a} <= {b})",
    "geu": "~({a} < {b})",
    "num": "(({a} == {a}) & ({b} == {b}))",
    "nan": "(({a} != {a}) | ({b} != {b}))",
}
_COMPARISONS = (*_SIGNS, *_UNSIGNED, *(name for name in _FLOAT_TEXT if name not in _SIGNS))
_BOOLEANS = {"and": "&", "or": "|", "xor": "^"}
_INTEGER_TYPES = tuple(name for name, kind in INTEGERS.items() if kind.width > 8)
_TYPES = (*_INTEGER_TYPES, *(name for name in FLOATS if name != "f32x2"))


def comparison(instr: Instr, name: str, kind: str) -> str:
    """The expression of a comparison over `{a}` and `{b}`."""
    if kind in FLOATS:
        if name in _FLOAT_TEXT:
            return _FLOAT_TEXT[name]
        if name in _UNSIGNED:
            instr.unknown(f".{name} does not compare floats")
        return f"({{a}} {_SIGNS[name]} {{b}})"
    name = _UNSIGNED.get(name, name) if not INTEGERS[kind].signed else name
    if name not in _SIGNS:
        instr.unknown(f".{name} does not compare .{kind}")
    if kind.startswith("b") and name not in ("eq", "ne"):
        instr.unknown("bits are compared with .eq or .ne")
    return f"({{a}} {_SIGNS[name]} {{b}})"


def _values(kind: str, ftz: bool) -> Callable[[Array], Array]:
    """Raw bits of a float type as values to compare."""
    scalar = kind.removesuffix("x2")
    if scalar == "f32":
        return (lambda a: flush32(a.view(np.float32))) if ftz else (lambda a: a.view(np.float32))
    if scalar == "f64":
        return lambda a: a.view(np.float64)
    if ftz:
        return lambda a: _flushed_half(decode(a, scalar))
    return lambda a: decode(a, scalar)


def _flushed_half(value: Array) -> Array:
    return value * (np.abs(value) >= 2.0**-14)


def _compiled_test(text: str, kind: str, ftz: bool) -> Callable[[Array, Array], Array]:
    code = text.format(a="a", b="b")
    test: Callable[[Array, Array], Array] = eval(f"lambda a, b: {code}")  # text of comparison() alone
    look = _values(kind, ftz)
    return lambda a, b: test(look(a), look(b))


def _plain_text(text: str, kind: str, ftz: bool) -> str:
    """The comparison as an expression of the sources, empty where it needs a function."""
    if kind in INTEGERS:
        view = INTEGERS[kind].view
    elif kind in ("f32", "f64", "f16") and not ftz:
        view = kind
    else:
        return ""
    return text.format(a=f"{{0:{view}}}", b=f"{{1:{view}}}")


def _parse(instr: Instr, results: tuple[str, ...]) -> tuple[str, str, bool, str, str]:
    """Comparison, boolean operator, ftz, result type (set only) and compared type."""
    mods = Modifiers(instr)
    name, boolean, ftz = mods.expect(*_COMPARISONS), mods.choose(*_BOOLEANS), mods.take("ftz")
    to = mods.expect(*results) if results else ""
    kind = mods.expect(*_TYPES)
    mods.done()
    if ftz and kind not in ("f32", "f16", "f16x2"):
        instr.unknown(".ftz applies to .f32, .f16 and .f16x2")
    return name, boolean, ftz, to, kind


def setp(instr: Instr) -> Compiled:
    """9.7.6.2 setp (halves 9.7.7.2): p = (a cmp b) boolop c, and q the same of the negated comparison.

    For packed halves p is the comparison of the lower halves and q that of the upper ones.
    """
    name, boolean, ftz, _, kind = _parse(instr, ())
    text = comparison(instr, name, kind)
    register = register_type(kind)
    count = 2 + bool(boolean)
    sources = (register, register, "pred")[:count]
    pair = len(instr.operands) > 0 and isinstance(instr.operands[0], Pair)
    if kind.endswith("x2"):
        return Compiled(("pred", "pred"), sources, _packed(_compiled_test(text, kind, ftz), boolean))
    plain = _plain_text(text, kind, ftz)
    if plain and not pair:
        return Compiled(("pred",), sources, text=f"{plain} {_BOOLEANS[boolean]} {{2}}" if boolean else plain)
    test = _compiled_test(text, kind, ftz) if kind in FLOATS else _integer_test(text, kind)
    join = _boolean(boolean)
    if not pair:
        return Compiled(("pred",), sources, lambda a, b, *c: join(test(a, b), *c))

    def both(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        true = test(a, b)
        return join(true, *c), join(~true, *c)

    return Compiled(("pred", "pred"), sources, both)


def _integer_test(text: str, kind: str) -> Callable[[Array, Array], Array]:
    code = text.format(a="a", b="b")
    test: Callable[[Array, Array], Array] = eval(f"lambda a, b: {code}")  # text of comparison() alone
    dtype = INTEGERS[kind].dtype
    return lambda a, b: test(a.view(dtype), b.view(dtype))


def _boolean(name: str) -> Callable[..., Array]:
    if not name:
        return lambda value: value
    ufuncs: dict[str, Callable[[Array, Array], Array]] = {
        "and": np.logical_and,
        "or": np.logical_or,
        "xor": np.logical_xor,
    }
    return ufuncs[name]


def _packed(test: Callable[[Array, Array], Array], boolean: str) -> Callable[..., tuple[Array, Array]]:
    join = _boolean(boolean)

    def halves(a: Array, b: Array, *c: Array) -> tuple[Array, Array]:
        (a_low, a_high), (b_low, b_high) = split16(a), split16(b)
        return join(test(a_low, b_low), *c), join(test(a_high, b_high), *c)

    return halves


_TRUE = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


def set_(instr: Instr) -> Compiled:
    """9.7.6.1 set (halves 9.7.7.1): all ones, or 1.0 for a float result, where the comparison holds, else 0."""
    results = ("u32", "s32", "f32", "u16", "s16", "f16", "bf16", "f16x2", "bf16x2")
    name, boolean, ftz, to, kind = _parse(instr, results)
    packed = kind.endswith("x2")
    half = to in ("u16", "s16", "f16", "bf16")
    if (to.endswith("x2") and not packed) or (packed and not to.endswith("x2") and to not in ("u32", "s32")):
        instr.unknown("packed results come from packed sources")
    if to in ("u16", "s16") and kind not in ("f16", "bf16"):
        instr.unknown("16-bit integers come from halves")
    text = comparison(instr, name, kind)
    test = _compiled_test(text, kind, ftz) if kind in FLOATS else _integer_test(text, kind)
    join = _boolean(boolean)
    register, source = register_type(to), register_type(kind)
    word = np.uint16 if packed or half else np.uint32
    true = word(_TRUE.get(to, 0xFFFF if word is np.uint16 else 0xFFFFFFFF))

    def one(a: Array, b: Array, *c: Array) -> Array:
        return np.where(join(test(a, b), *c), true, word(0))

    def two(a: Array, b: Array, *c: Array) -> Array:
        (a_low, a_high), (b_low, b_high) = split16(a), split16(b)
        return one(a_low, b_low, *c).astype(np.uint32) | (one(a_high, b_high, *c).astype(np.uint32) << 16)

    sources = (source, source, *(("pred",) if boolean else ()))
    return Compiled((register,), sources, two if packed else one)


def selp(instr: Instr) -> Compiled:
    """9.7.6.3 selp: a where the predicate holds, else b."""
    mods = Modifiers(instr)
    register = register_type(mods.expect(*_INTEGER_TYPES, "f32", "f64"))
    mods.done()
    return Compiled((register,), (register, register, "pred"), text="np.where({2}, {0}, {1})")


def slct(instr: Instr) -> Compiled:
    """9.7.6.4 slct: a where c >= 0 (-0 included), else b; b where c is NaN."""
    mods = Modifiers(instr)
    ftz = mods.take("ftz")
    register = register_type(mods.expect(*_INTEGER_TYPES, "f32", "f64"))
    kind = mods.expect("s32", "f32")
    mods.done()
    if ftz and kind != "f32":
        instr.unknown(".ftz applies to .f32")
    # Flushing turns a negative subnormal into -0, which is >= 0.
    sign = "({2:f32} > -np.float32(2.0**-126))" if ftz else f"({{2:{kind}}} >= 0)"
    return Compiled((register,), (register, register, "b32"), text=f"np.where({sign}, {{0}}, {{1}})")


OPCODES: dict[str, Operation] = {
    "setp": Operation(setp),
    "set": Operation(set_),
    "selp": Operation(selp),
    "slct": Operation(slct),
}
