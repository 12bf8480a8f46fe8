"""Logic and shift instructions (PTX ISA 9.7.8), and the byte permutation of 9.7.9."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Immediate, Instr, Modifiers, Operation, ternary
from cubinery.aot.ptxsim.isa.values import INTEGERS, Array

TYPES = frozenset({*INTEGERS, "pred"})


def _bits(instr: Instr, *names: str) -> tuple[str, Modifiers]:
    mods = Modifiers(instr)
    return mods.expect(*(names or ("pred", "b16", "b32", "b64"))), mods


def _bitwise(sign: str) -> Callable[[Instr], Compiled]:
    def specialise(instr: Instr) -> Compiled:
        """9.7.8.1 and, 9.7.8.2 or, 9.7.8.3 xor: also of predicates."""
        kind, mods = _bits(instr)
        mods.done()
        return Compiled((kind,), (kind, kind), text=f"{{0}} {sign} {{1}}")

    return specialise


def not_(instr: Instr) -> Compiled:
    """9.7.8.4 not: every bit inverted."""
    kind, mods = _bits(instr)
    mods.done()
    return Compiled((kind,), (kind,), text="~{0}")


def cnot(instr: Instr) -> Compiled:
    """9.7.8.5 cnot: 1 where the source is 0, else 0."""
    kind, mods = _bits(instr, "b16", "b32", "b64")
    mods.done()
    return Compiled((kind,), (kind,), text=f"({{0}} == 0).astype(np.{INTEGERS[kind].bits.__name__})")


def lookup3(table: int) -> str:
    """The expression of a three-input logic function: the minterms whose bit in `table` is set, or their complement.

    Bit 4a + 2b + c of the table is the function's value at (a, b, c).
    """
    known = {0: "{0} & 0", 0xFF: "{0} | 0xffffffff", 0xF0: "{0} | 0", 0xCC: "{1} | 0", 0xAA: "{2} | 0"}
    known |= {0x80: "{0} & {1} & {2}", 0xFE: "{0} | {1} | {2}", 0x96: "{0} ^ {1} ^ {2}"}
    known |= {0xC0: "{0} & {1}", 0xFC: "{0} | {1}", 0x3C: "{0} ^ {1}", 0xF8: "{0} | ({1} & {2})"}
    known |= {0xEA: "({0} & {1}) | {2}", 0x6A: "({0} & {1}) ^ {2}", 0xCA: "({0} & {1}) | (~{0} & {2})"}
    if table in known:
        return known[table]
    inverted = table.bit_count() > 4
    chosen = table ^ 0xFF if inverted else table
    terms = []
    for index in range(8):
        if chosen >> index & 1:
            signs = ("" if index & 4 else "~", "" if index & 2 else "~", "" if index & 1 else "~")
            terms.append(f"({signs[0]}{{0}} & {signs[1]}{{1}} & {signs[2]}{{2}})")
    text = " | ".join(terms)
    return f"~({text})" if inverted else text


def lop3(instr: Instr) -> Compiled:
    """9.7.8.6 lop3: any logic function of three words, by truth table; with .or or .and also whether it is nonzero."""
    mods = Modifiers(instr)
    combine = mods.choose("or", "and")
    mods.expect("b32")
    mods.done()
    table = instr.operands[4] if len(instr.operands) > 4 else None
    if not isinstance(table, Immediate):
        instr.unknown("lop3 needs its table as a constant")
    text = lookup3(table.value & 0xFF)
    if not combine:
        return Compiled(("b32",), ("b32",) * 4, text=text)
    code = text.format("a", "b", "c")
    logic: Callable[[Array, Array, Array], Array] = eval(f"lambda a, b, c: {code}")  # text of lookup3 alone
    join = np.logical_or if combine == "or" else np.logical_and

    def both(a: Array, b: Array, c: Array, _table: Array, q: Array) -> tuple[Array, Array]:
        value = logic(a, b, c)
        return value, join(value != 0, q)

    return Compiled(("b32", "pred"), ("b32", "b32", "b32", "b32", "pred"), both)


def shl(instr: Instr) -> Compiled:
    """9.7.8.8 shl: shifts of the width or more give 0. NumPy defines them so too."""
    kind, mods = _bits(instr, "b16", "b32", "b64")
    mods.done()
    width = INTEGERS[kind].width
    # A 16-bit register must not be shifted by a 32-bit count as it stands: NumPy would widen the result.
    count = f"np.minimum({{1}}, {width}).astype(np.uint{width})" if width != 32 else "{1}"
    return Compiled((kind,), (kind, "b32"), text=f"np.left_shift({{0}}, {count})")


def shr(instr: Instr) -> Compiled:
    """9.7.8.9 shr: signed types fill with the sign; shifts of the width or more give 0 or the sign everywhere."""
    names = [f"{letter}{width}" for letter in "bus" for width in (16, 32, 64)]
    name, mods = _bits(instr, *names)
    mods.done()
    kind = INTEGERS[name]
    if kind.signed:
        count = f"np.minimum({{1}}, {kind.width - 1}).astype(np.int{kind.width})"
        text = f"np.right_shift({{0:{kind.view}}}, {count})"
        return Compiled((kind.register,), (kind.register, "b32"), text=text, view=kind.view)
    count = f"np.minimum({{1}}, {kind.width}).astype(np.uint{kind.width})" if kind.width != 32 else "{1}"
    return Compiled((kind.register,), (kind.register, "b32"), text=f"np.right_shift({{0}}, {count})")


def shf(instr: Instr) -> Compiled:
    """9.7.8.7 shf: 32 bits of the pair (b, a) shifted left (its upper word) or right (its lower word)."""
    mods = Modifiers(instr)
    left = mods.expect("l", "r") == "l"
    clamp = mods.expect("clamp", "wrap") == "clamp"
    mods.expect("b32")
    mods.done()

    def shift(a: Array, b: Array, c: Array) -> Array:
        count = (np.minimum(c, 32) if clamp else c & 31).astype(np.uint64)
        pair = (b.astype(np.uint64) << 32) | a
        return ((pair << count) >> 32 if left else pair >> count).astype(np.uint32)

    return ternary("b32", shift)


# -- bytes -----------------------------------------------------------------------------------------

_PERMUTATIONS = {
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}
"""Source byte of result bytes 0 to 3, by mode and by c modulo 4 (table of 9.7.9.7)."""


def _permute_by(selector: int) -> str:
    """The expression of a general prmt whose selector is known: shifts and masks."""
    signs: list[str] = []
    merged: dict[str, int] = {}  # bytes that move by the same distance move together
    for place in range(4):
        nibble = selector >> 4 * place & 0xF
        source, shift = f"{{{nibble >> 2 & 1}}}", 8 * (nibble & 3)
        if nibble & 8:  # the byte's sign, eight times
            signs.append(f"((({source} >> {shift + 7}) & 1) * {0xFF << 8 * place:#x})")
        else:
            by = 8 * place - shift
            moved = f"({source} << {by})" if by > 0 else f"({source} >> {-by})" if by < 0 else source
            merged[moved] = merged.get(moved, 0) | 0xFF << 8 * place
    return " | ".join([*(f"({moved} & {mask:#x})" for moved, mask in merged.items()), *signs])


def permute(a: Array, b: Array, c: Array) -> Array:
    """prmt without a mode: each nibble of c picks one of the eight bytes of (b, a), or spreads its sign."""
    pair = (b.astype(np.uint64) << 32) | a
    result = np.zeros_like(pair)
    for place in range(4):
        nibble = (c >> 4 * place).astype(np.uint64)
        byte = (pair >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(0xFF)
        spread = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
        result = result | np.where(nibble & np.uint64(8), spread, byte) << (8 * place)
    return result.astype(np.uint32)


def prmt(instr: Instr) -> Compiled:
    """9.7.9.7 prmt: four bytes chosen from eight, by selector or by one of the fixed modes."""
    mods = Modifiers(instr)
    mods.expect("b32")
    mode = mods.choose(*_PERMUTATIONS)
    mods.done()
    selector = instr.operands[3] if len(instr.operands) == 4 else None
    if isinstance(selector, Immediate):
        value = selector.value
        if mode:
            value = sum(source << 4 * place for place, source in enumerate(_PERMUTATIONS[mode][value & 3]))
        return Compiled(("b32",), ("b32",) * 3, text=_permute_by(value & 0xFFFF))
    if not mode:
        return ternary("b32", permute)
    selectors = np.array(
        [sum(source << 4 * place for place, source in enumerate(row)) for row in _PERMUTATIONS[mode]], np.uint32
    )
    return ternary("b32", lambda a, b, c: permute(a, b, selectors[c & 3]))


OPCODES: dict[str, Operation] = {
    "and": Operation(_bitwise("&")),
    "or": Operation(_bitwise("|")),
    "xor": Operation(_bitwise("^")),
    "not": Operation(not_),
    "cnot": Operation(cnot),
    "lop3": Operation(lop3),
    "shl": Operation(shl),
    "shr": Operation(shr),
    "shf": Operation(shf),
    "prmt": Operation(prmt),
}
