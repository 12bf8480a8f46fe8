"""Segments to Python: one function a segment, registers as local variables over (warps, 32) arrays.

Every array has two dimensions of which either may be 1: (1, 1) is the same in all warps of the gang, (warps, 1)
is uniform in each warp. NumPy broadcasting then does the work of a uniform datapath.

A segment's function is `segment(F, g, rt)`: `F` the gang's registers by slot, `g` the gang (`g.mask` is None or
the lanes that execute), `rt` the machine. It returns the predicate of the branch at its end, or the operands of the
instruction at which the warp may wait, or None. Values are never written in place, so a register copied is
a name copied and a diverged lane's garbage is dropped when its gang joins another.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import (
    DTYPES,
    VIEWS,
    Address,
    Compiled,
    Discard,
    Guard,
    Immediate,
    Instr,
    Not,
    Operand,
    Operation,
    Register,
    Special,
    Symbol,
    flatten,
)
from cubinery.aot.ptxsim.memory import wide
from cubinery.aot.ptxsim.program import CONDITION, Segment

_BITS = {"pred": 1, "b8": 16, "b16": 16, "b32": 32, "b64": 64, "b128": 128}
_RAW_VIEW = {"b8": "u16", "b16": "u16", "b32": "u32", "b64": "u64"}


@dataclass(slots=True)
class Value:
    """What holds a register now: a local variable for each type as which it has been looked at."""

    kind: str
    names: dict[str, str]
    """By view (f32, s32, ...); "raw" is the bits."""


class _Argument:
    """An operand in a text template: `{0}` its bits, `{0:f32}` a view."""

    def __init__(self, scope: Scope, value: Value) -> None:
        self.scope, self.value = scope, value

    def __format__(self, view: str) -> str:
        return self.scope.view(self.value, view or "raw")


@dataclass(slots=True)
class Scope:
    """The function under construction: emitted lines, names in use, constants."""

    program: Any
    """Anything with `slots` (register -> slot), `symbol(Symbol) -> expression | int`, `index(instr) -> int`."""
    lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    values: dict[Register, Value] = field(default_factory=dict)
    immediates: dict[tuple[int, str], Value] = field(default_factory=dict)
    specials: dict[str, Value] = field(default_factory=dict)
    counter: int = 0

    # -- names ---------------------------------------------------------------------------------

    def name(self) -> str:
        self.counter += 1
        return f"t{self.counter}"

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def let(self, expression: str) -> str:
        """A new local variable with this value."""
        name = self.name()
        self.lines.append(f"{name} = {expression}")
        return name

    def constant(self, value: Any) -> str:
        """A name under which the function finds a Python object."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    # -- reading operands ----------------------------------------------------------------------

    def register(self, register: Register) -> Value:
        found = self.values.get(register)
        if found is None:
            name = self.let(f"F[{self.program.slots[register]}]")
            found = self.values[register] = Value(register.type, {"raw": name})
        return found

    def view(self, value: Value, view: str) -> str:
        """The local variable with a value seen as `view`."""
        if view == _RAW_VIEW.get(value.kind):
            view = "raw"
        found = value.names.get(view)
        if found is None:
            source = next(iter(value.names.values()))
            dtype = np.dtype(DTYPES[value.kind] if view == "raw" else VIEWS[view])
            if source in self.constants:
                found = self.constant(self.constants[source].view(dtype))
            else:
                found = self.let(f"{source}.view(np.{dtype.name})")
            value.names[view] = found
        return found

    def read(self, operand: Operand, kind: str) -> Value:
        """A source operand as a value of a register type (truncated or extended with zeros where it differs)."""
        match operand:
            case Register():
                value = self.register(operand)
            case Not(register):
                value = Value("pred", {"raw": self.let(f"~{self.view(self.register(register), 'raw')}")})
            case Immediate():
                return self.immediate(operand, kind)
            case Special(name):
                value = self.special(name)
            case Symbol():
                address = self.program.symbol(operand)
                if isinstance(address, int):
                    return self.immediate(Immediate(address), kind)
                value = Value("b64", {"raw": self.let(address)})
            case _:
                raise AssertionError(f"{operand} is no scalar source")
        return self.convert(value, kind)

    def convert(self, value: Value, kind: str) -> Value:
        """A value in another register type."""
        if value.kind == kind or {value.kind, kind} <= {"b8", "b16"}:
            return value
        if "pred" in (value.kind, kind):
            raise ValueError("a predicate where a number is expected, or the reverse")
        if "b128" in (value.kind, kind):
            raise ValueError("128 bits where fewer are expected, or the reverse")
        dtype = np.dtype(DTYPES[kind]).name
        return Value(kind, {"raw": self.let(f"{self.view(value, 'raw')}.astype(np.{dtype})")})

    def immediate(self, operand: Immediate, kind: str) -> Value:
        bits = constant_bits(operand, kind)
        found = self.immediates.get((bits, kind))
        if found is None:
            array = wide128(bits) if kind == "b128" else np.full((1, 1), bits, DTYPES[kind])
            array.setflags(write=False)
            found = self.immediates[bits, kind] = Value(kind, {"raw": self.constant(array)})
        return found

    def special(self, name: str) -> Value:
        found = self.specials.get(name)
        if found is None:
            kind = "b64" if name.endswith("64") or name == "globaltimer" else "b32"
            kind = "pred" if name == "is_explicit_cluster" else kind
            found = Value(kind, {"raw": self.let(f"rt.special(g, {name!r})")})
            if not name.startswith(("clock", "globaltimer")):  # those are read anew each time
                self.specials[name] = found
        return found

    def raw(self, operand: Operand, kind: str) -> str:
        """The local variable with an operand's bits."""
        return self.view(self.read(operand, kind), "raw")

    def address(self, operand: Operand, instr: Instr, kind: str = "") -> str:
        """An address in bytes, of 32 bits where the register has 32 and of 64 otherwise."""
        if not isinstance(operand, Address):
            instr.unknown("expected an address in brackets")
        base = operand.base
        if isinstance(base, Symbol):
            found = self.program.symbol(Symbol(base.name, base.offset + operand.offset))
            if isinstance(found, int):
                return self.raw(Immediate(found), kind or "b64")
            return self.view(self.convert(Value("b64", {"raw": self.let(found)}), kind or "b64"), "raw")
        if isinstance(base, Immediate):
            return self.raw(Immediate(base.value + operand.offset), kind or "b64")
        value = self.register(base)
        if kind:
            value = self.convert(value, kind)
        name = self.view(value, "raw")
        if operand.offset:
            name = self.let(f"{name} + {self.raw(Immediate(operand.offset), value.kind)}")
        return name

    # -- writing results -----------------------------------------------------------------------

    def write(self, operand: Operand, value: Value, guard: str | None) -> None:
        """Set a destination; under a guard lanes outside keep the old value."""
        if isinstance(operand, Discard):
            return
        assert isinstance(operand, Register), operand
        value = self.convert(value, operand.type)
        if guard is not None:
            old = self.view(self.register(operand), "raw")
            value = Value(operand.type, {"raw": self.let(f"np.where({guard}, {self.view(value, 'raw')}, {old})")})
        self.values[operand] = value

    def write_all(self, operand: Operand, names: list[str], kinds: list[str], guard: str | None) -> None:
        """Set the scalars of a destination to local variables that hold bits."""
        for target, name, kind in zip(flatten(operand), names, kinds, strict=True):
            self.write(target, Value(kind, {"raw": name}), guard)

    def guard(self, guard: Guard | None) -> str | None:
        """The local variable with the lanes that a guard lets through."""
        if guard is None:
            return None
        name = self.view(self.register(guard.register), "raw")
        return self.let(f"~{name}") if guard.negated else name

    def mask(self, guard: str | None) -> str:
        """The lanes that execute: None for all."""
        return "m" if guard is None else self.let(f"rt.lanes(g, {guard})")


def constant_bits(operand: Immediate, kind: str) -> int:
    """The bits of a constant as a register type; a decimal float becomes f32 where 32 bits are expected."""
    if kind == "pred":
        return int(operand.value != 0)
    if operand.width == 64 and kind == "b32":
        (number,) = struct.unpack("<d", struct.pack("<Q", operand.value))
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    if operand.width not in (0, _BITS[kind]):
        raise ValueError(f"a {operand.width}-bit float where {kind} is expected")
    return operand.value & ((1 << _BITS[kind]) - 1)


def wide128(bits: int) -> Any:
    """A constant of 128 bits."""
    low, high = (np.full((1, 1), part & (2**64 - 1), np.uint64) for part in (bits, bits >> 64))
    return wide(low, high)


# -- pure instructions -----------------------------------------------------------------------------


def emit_pure(scope: Scope, instr: Instr, operation: Operation) -> None:
    """One instruction of registers alone."""
    compiled = operation.specialise(instr)
    guard = scope.guard(instr.guard)
    sources = [scalar for operand in instr.operands[1:] for scalar in flatten(operand)]
    targets = list(flatten(instr.operands[0]))
    if compiled.carry_in:
        sources.append(CONDITION)
    if compiled.carry_out:
        targets.append(CONDITION)
    if len(sources) != len(compiled.src):
        instr.unknown(f"expected {len(compiled.src)} source operands, found {len(sources)}")
    try:
        values = [scope.read(operand, kind) for operand, kind in zip(sources, compiled.src, strict=True)]
    except ValueError as error:
        instr.unknown(str(error))
    if len(targets) > len(compiled.dst):
        instr.unknown(f"expected {len(compiled.dst)} results, found {len(targets)}")
    if compiled.text:
        name = scope.let(compiled.text.format(*(_Argument(scope, value) for value in values)))
        key = "raw" if compiled.view in ("", _RAW_VIEW.get(compiled.dst[0])) else compiled.view
        scope.write(targets[0], Value(compiled.dst[0], {key: name}), guard)
        return
    names = _call(scope, compiled, values, scope.mask(guard) if compiled.active else "")
    for target, name, kind in zip(targets, names, compiled.dst, strict=False):  # setp p and shfl d may drop a result
        scope.write(target, Value(kind, {"raw": name}), guard)


def _call(scope: Scope, compiled: Compiled, values: list[Value], mask: str) -> list[str]:
    arguments = [scope.view(value, "raw") for value in values]
    if compiled.converged or compiled.active:  # these look across lanes, so they get all lanes
        arguments = [scope.let(f"rt.full(g, {name})") for name in arguments]
    if compiled.active:
        arguments.insert(0, scope.let(f"rt.active(g, {mask})"))
    call = f"{scope.constant(compiled.fn)}({', '.join(arguments)})"
    if len(compiled.dst) == 1:
        name = scope.let(call)
        return [name]
    names = [scope.name() for _ in compiled.dst]
    scope.emit(f"{', '.join(names)}, = {call}")
    return names


# -- moves -----------------------------------------------------------------------------------------


def emit_move(scope: Scope, instr: Instr) -> None:
    """mov (PTX ISA 9.7.9): a name copied; packing and unpacking of vectors."""
    (kind,) = instr.modifiers or ("",)
    bits = kind if kind == "pred" else f"b{kind[1:]}"
    if bits not in ("pred", "b16", "b32", "b64", "b128"):
        instr.unknown("type is not executed")
    guard = scope.guard(instr.guard)
    target, source = instr.operands
    targets, sources = flatten(target), flatten(source)
    try:
        if len(targets) == len(sources) == 1:
            scope.write(target, scope.read(source, bits), guard)
        elif len(targets) == 1:
            scope.write(target, _pack(scope, sources, bits), guard)
        elif len(sources) == 1:
            _unpack(scope, targets, scope.read(source, bits), bits, guard)
        else:
            instr.unknown("vector to vector")
    except ValueError as error:
        instr.unknown(str(error))


def _pack(scope: Scope, sources: tuple[Operand, ...], kind: str) -> Value:
    width = _BITS[kind] // len(sources)
    part = f"b{max(width, 16)}"
    if kind == "b128":
        if width != 64:
            raise ValueError("128 bits are packed from two registers")
        halves = ", ".join(scope.raw(source, part) for source in sources)
        return Value(kind, {"raw": scope.let(f"{scope.constant(wide)}({halves})")})
    dtype = np.dtype(DTYPES[kind]).name
    terms = []
    for i, source in enumerate(sources):
        term = f"{scope.raw(source, part)}.astype(np.{dtype})"
        terms.append(f"({term} << {scope.raw(Immediate(i * width), kind)})" if i else term)
    return Value(kind, {"raw": scope.let(" | ".join(terms))})


def _unpack(scope: Scope, targets: tuple[Operand, ...], value: Value, kind: str, guard: str | None) -> None:
    width = _BITS[kind] // len(targets)
    part = f"b{max(width, 16)}"
    source = scope.view(value, "raw")
    if kind == "b128":
        if width != 64:
            raise ValueError("128 bits are unpacked to two registers")
        halves = [scope.let(f"{source}[{half!r}]") for half in ("low", "high")]
        for target, name in zip(targets, halves, strict=True):
            scope.write(target, Value(part, {"raw": name}), guard)
        return
    for i, target in enumerate(targets):
        if isinstance(target, Discard):
            continue
        shifted = f"({source} >> {scope.raw(Immediate(i * width), kind)})" if i else source
        name = scope.let(f"{shifted}.astype(np.{np.dtype(DTYPES[part]).name})")
        scope.write(target, Value(part, {"raw": name}), guard)


# -- segments --------------------------------------------------------------------------------------

Emitter = Callable[[Scope, Instr], None]


def segment_source(scope: Scope, segment: Segment, emit: Emitter, wait: Callable[[Scope, Instr], str]) -> str:
    """The source of a segment's function. `emit` emits one instruction, `wait` the operands of the last one."""
    for instr in segment.instrs:
        emit(scope, instr)
    returns = "None"
    if segment.wait is not None:
        returns = wait(scope, segment.wait)
    elif segment.branch is not None and segment.branch.guard is not None:
        returns = scope.guard(segment.branch.guard) or "None"
    kept = sorted(
        (scope.program.slots[register], scope.view(value, "raw"))
        for register, value in scope.values.items()
        if register in segment.live_out
    )
    for slot, name in kept:
        scope.emit(f"F[{slot}] = {name}")
    body = "".join(f"    {line}\n" for line in ["m = g.mask", *scope.lines, f"return {returns}"])
    return f"def segment(F, g, rt):\n{body}"


@lru_cache(maxsize=2048)
def _code(source: str, name: str) -> CodeType:
    """A kernel that is translated again with a line changed, as a mutant is, has most segments unchanged."""
    code: CodeType = compile(source, name, "exec")
    return code


def build(source: str, name: str, constants: dict[str, Any]) -> Callable[..., Any]:
    """Compile a segment's source to a function."""
    code = _code(source, name)
    space: dict[str, Any] = {"np": np, **constants}
    exec(code, space)
    function: Callable[..., Any] = space["segment"]
    return function
