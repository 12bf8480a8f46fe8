"""What the simulator's parts share: instructions as parsed, and how an instruction group offers its opcodes.

Values. A register of a gang is an array of shape (warps, 32) of raw bits: bool for `.pred`, uint16 for `.b16` (and
`.b8`), uint32 for `.b32`, uint64 for `.b64`, and for `.b128` a pair of uint64 (WIDE). Arrays are values: no operation
writes into one that it was given.

Opcodes. A file of `isa/` exports `OPCODES: dict[str, Operation]`, keyed by the first word of the opcode
(`add`, `cvt`, `mma`). When a kernel is translated, `Operation.specialise(instr)` reads types and modifiers
once and returns a `Compiled`: either a function of the operands' arrays or the text of a NumPy expression.
Nothing is parsed at run time. What `specialise` does not know it refuses with `UnknownInstruction`:
`Modifiers` helps, because `done()` refuses every modifier that nobody took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.errors import SimError

WIDE = np.dtype([("low", np.uint64), ("high", np.uint64)])
"""128 bits, which can be moved and compared and no more."""

DTYPES: dict[str, Any] = {
    "pred": np.bool_,
    "b8": np.uint16,  # PTX has no 8-bit register arithmetic: an 8-bit value sits in 16 bits
    "b16": np.uint16,
    "b32": np.uint32,
    "b64": np.uint64,
    "b128": WIDE,
}
"""The NumPy type in which a register of each PTX type keeps its bits."""

VIEWS: dict[str, Any] = {
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.float16,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
}
"""The types as which an expression may look at a register's bits."""

FULL_MASK = 0xFFFFFFFF


class UnknownInstruction(SimError):  # noqa: N818
    """An opcode, type or modifier that the simulator does not execute; the message shows the line."""

    def __init__(self, instr: Instr, reason: str) -> None:
        super().__init__(f"PTX line {instr.line}: {reason}: {instr.text}")
        self.instr = instr


# -- operands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """A declared register. `name` is unique in the kernel (those of inner scopes are renamed)."""

    name: str
    type: str
    """pred, b16, b32, b64 or b128: a declaration as .f32 or .s32 is kept as .b32."""


@dataclass(frozen=True, slots=True)
class Not:
    """`!%p`: a predicate operand negated. Pure operations receive it already negated."""

    register: Register


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant. Integers keep their sign in `value`; floats keep their bits, of `width` 32 or 64."""

    value: int
    width: int = 0
    """0 for an integer constant; 32 for 0fXXXXXXXX; 64 for 0dXXXXXXXXXXXXXXXX and decimal floats."""


@dataclass(frozen=True, slots=True)
class Special:
    """A special register: `name` is tid.x, ctaid.y, laneid, clock64, ... without the percent sign."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A variable, parameter or label by name (`mov.b32 %r1, smem;` takes a variable's address)."""

    name: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Discard:
    """`_`: a result that nobody wants."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`{a, b, c}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Address:
    """`[base + offset]`, or with coordinates `[base, {c0, c1}]` of a tensor."""

    base: Register | Symbol | Immediate
    offset: int = 0
    coords: tuple[Operand, ...] | None = None
    """The elements of the vector after a tensor's address (for gather4: column, then four rows)."""
    offsets: tuple[Operand, ...] | None = None
    """A second vector, as im2col offsets take."""


@dataclass(frozen=True, slots=True)
class Pair:
    """`%r1|%p1`: two results, a value and a predicate."""

    first: Operand
    second: Operand


Operand = Register | Not | Immediate | Special | Symbol | Discard | Vector | Address | Pair


def flatten(operand: Operand) -> tuple[Operand, ...]:
    """The scalars of an operand in order: elements of a vector, both halves of a pair."""
    match operand:
        case Vector(elements):
            return tuple(scalar for element in elements for scalar in flatten(element))
        case Pair(first, second):
            return (*flatten(first), *flatten(second))
        case _:
            return (operand,)


# -- instructions --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guard:
    """`@%p` or `@!%p` before an instruction."""

    register: Register
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Instr:
    """One PTX instruction."""

    opcode: str
    """The first word: `mad`, `cp`, `tcgen05`."""
    modifiers: tuple[str, ...]
    """The words after it, in order, types included, without dots: ("lo", "s32"), ("async", "bulk", ...)."""
    operands: tuple[Operand, ...]
    """In the order of the text, destination first where there is one; nothing is flattened."""
    guard: Guard | None = None
    line: int = 0
    """Line in the PTX file, from 1."""
    text: str = field(default="", compare=False)
    """The instruction as written."""
    source: tuple[str, int] | None = field(default=None, compare=False)
    """File and line of the source by the `.loc` in force, where there is line information."""

    @property
    def name(self) -> str:
        """Opcode with its modifiers, as written."""
        return ".".join((self.opcode, *self.modifiers))

    def unknown(self, reason: str) -> NoReturn:
        """Refuse this instruction."""
        raise UnknownInstruction(self, reason)


class Modifiers:
    """The modifiers of one instruction, taken one by one; `done()` refuses what is left.

    >>> mods = Modifiers(instr)              # add.rn.ftz.f32
    >>> ftz = mods.take("ftz")               # True
    >>> rounding = mods.choose("rn", "rz", "rm", "rp", default="rn")
    >>> kind = mods.expect("f32", "f64")     # refuses an instruction with neither
    >>> mods.done()
    """

    __slots__ = ("_instr", "_left")

    def __init__(self, instr: Instr) -> None:
        self._instr = instr
        self._left = list(instr.modifiers)

    @property
    def left(self) -> tuple[str, ...]:
        """What nobody has taken yet, in order."""
        return tuple(self._left)

    def take(self, word: str) -> bool:
        """Take a word if it is there (its first occurrence)."""
        if word in self._left:
            self._left.remove(word)
            return True
        return False

    def choose(self, *words: str, default: str = "") -> str:
        """Take the first modifier that is one of `words`; `default` where none is."""
        for word in self._left:
            if word in words:
                self._left.remove(word)
                return word
        return default

    def expect(self, *words: str) -> str:
        """Take the first modifier that is one of `words`; refuse the instruction where none is."""
        found = self.choose(*words)
        if not found:
            self._instr.unknown(f"expected one of .{', .'.join(words)}")
        return found

    def next(self) -> str:
        """Take the next modifier, whatever it is; empty where none is left."""
        return self._left.pop(0) if self._left else ""

    def done(self) -> None:
        """Refuse the instruction if a modifier is left."""
        if self._left:
            self._instr.unknown(f"modifier .{self._left[0]} is not executed")


# -- operations ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compiled:
    """A pure instruction as specialised: registers in, registers out, no memory, no other warp.

    Exactly one of `fn` and `text` is given.

    `fn(*sources)` takes one array of raw bits a source, of the NumPy type `DTYPES[src[i]]`, broadcastable to
    (warps, 32) (a constant comes as a 0-d array or NumPy scalar), and returns one array, or a tuple
    of as many arrays as `dst` has entries, of raw bits of `DTYPES[dst[i]]` and shape (warps, 32) or
    broadcastable to it. It must tolerate garbage in lanes that do not execute: the machine runs all compiled
    code inside one `np.errstate(all="ignore")`, because arithmetic on garbage overflows.

    `text` is a Python expression for a single result. `{0}`, `{1}` stand for the raw bits of the sources;
    `{0:f32}`, `{1:s64}` for the bits seen as another type of the same width (VIEWS); `np` is NumPy. The value's
    type is `view` where given (`f32`: it is viewed as bits when needed as such), else `DTYPES[dst[0]]`.
    """

    dst: tuple[str, ...]
    """Register types of the results, flattened: the first operand's scalars."""
    src: tuple[str, ...]
    """Register types of the sources, flattened in order over the remaining operands."""
    fn: Callable[..., Any] | None = None
    text: str = ""
    view: str = ""
    active: bool = False
    """`fn` takes the executing lanes first: a bool array (warps, 32). For warp-wide instructions."""
    converged: bool = False
    """Every lane of the warp (or of `membermask`) must execute it together: `.sync`, `.aligned`."""
    membermask: int = -1
    """Index in the flattened sources of the member mask operand; -1 where all 32 lanes take part."""
    carry_in: bool = False
    """Reads the condition code (`addc`): `src` ends in an implicit `pred` that is no operand of the text."""
    carry_out: bool = False
    """Writes the condition code (`add.cc`): `dst` ends in an implicit `pred` that is no operand of the text."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One opcode of an instruction group."""

    specialise: Callable[[Instr], Compiled]
    """Read types and modifiers; raise UnknownInstruction (through `instr.unknown`) for what is not executed."""


def unary(kind: str, fn: Callable[..., Any]) -> Compiled:
    """A function of one source, all of one register type."""
    return Compiled((kind,), (kind,), fn)


def binary(kind: str, fn: Callable[..., Any]) -> Compiled:
    """A function of two sources, all of one register type."""
    return Compiled((kind,), (kind, kind), fn)


def ternary(kind: str, fn: Callable[..., Any]) -> Compiled:
    """A function of three sources, all of one register type."""
    return Compiled((kind,), (kind, kind, kind), fn)


_WIDTHS = {"pred": "pred", "f16x2": "b32", "bf16x2": "b32", "f32x2": "b64", "bf16": "b16", "tf32": "b32"}


def register_type(name: str) -> str:
    """The register type that holds a value of PTX type `name` (s32 -> b32, f16x2 -> b32, bf16 -> b16, u8 -> b16)."""
    if name in _WIDTHS:
        return _WIDTHS[name]
    width = name.lstrip("bsuf")
    return f"b{max(int(width), 16)}" if width in {"8", "16", "32", "64", "128"} else "b32"


def spread(values: Sequence[int], kind: str) -> Any:
    """Python integers as an array of raw bits of a register type; handy in tests."""
    mask = (1 << (8 * np.dtype(DTYPES[kind]).itemsize)) - 1
    return np.array([value & mask for value in values], dtype=DTYPES[kind])
