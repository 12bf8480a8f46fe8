"""Loads, stores, atomics, matrices in shared memory, and addresses, as calls of the machine (access.py, copies.py)."""

from __future__ import annotations

import numpy as np

from cubinery.aot.ptxsim.codegen import Scope, Value
from cubinery.aot.ptxsim.emit_words import SCOPES, SPACES, TYPES, index_of, memory_words, vector_of, width_of
from cubinery.aot.ptxsim.isa import matrix_memory
from cubinery.aot.ptxsim.isa.async_copy import combine
from cubinery.aot.ptxsim.isa.atomics import atomic as atomic_operation
from cubinery.aot.ptxsim.isa.base import (
    DTYPES,
    Address,
    Discard,
    Immediate,
    Instr,
    Modifiers,
    Operand,
    Register,
    Symbol,
    flatten,
    register_type,
)
from cubinery.aot.ptxsim.memory import RANK_SHIFT


def load(scope: Scope, instr: Instr) -> None:
    """9.7.9.8 ld: `count` elements, each extended to its register."""
    mods = Modifiers(instr)
    space, order = memory_words(mods)
    hint = mods.take("L2::cache_hint")
    mods.take("unified")
    count, kind = vector_of(mods), mods.expect(*TYPES)
    mods.done()
    target, source = instr.operands[:2]
    if len(instr.operands) != 2 + hint:
        instr.unknown("operands not understood")
    targets = flatten(target)
    if len(targets) != count:
        instr.unknown(f"expected {count} registers")
    guard = scope.guard(instr.guard)
    mask, width = scope.mask(guard), width_of(kind)
    names = [scope.name() for _ in range(count)]
    wanted = tuple(isinstance(t, Register) and t in scope.program.wanted(instr) for t in targets)
    address = scope.address(source, instr, "b32" if space == "shared" else "b64")
    if space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        space = "fixed_param"
    scope.emit(
        f"{', '.join(names)}, = rt.load_{space}(g, {mask}, {index_of(scope, instr)}, {address}, {width}, {count}, "
        f"{scope.constant(wanted)}, {order in ('acquire', 'volatile', 'relaxed', 'mmio')})"
    )
    for operand, name in zip(targets, names, strict=True):
        if isinstance(operand, Register):
            scope.write(operand, _extended(scope, name, kind, operand.type), guard)


def _extended(scope: Scope, name: str, kind: str, register: str) -> Value:
    """A loaded element (its memory width) as a register."""
    own, wide = width_of(kind), np.dtype(DTYPES[register])
    if wide.itemsize == own:
        return Value(register, {"raw": name})
    if kind.startswith("s"):
        name = scope.let(f"{name}.view(np.int{8 * own}).astype(np.int{8 * wide.itemsize}).view(np.{wide.name})")
    else:
        name = scope.let(f"{name}.astype(np.{wide.name})")
    return Value(register, {"raw": name})


def _stored(scope: Scope, operand: Operand, kind: str) -> str:
    """A source as an array of its memory width."""
    name = scope.raw(operand, register_type(kind))
    return scope.let(f"{name}.astype(np.uint8)") if width_of(kind) == 1 else name


def store(scope: Scope, instr: Instr) -> None:
    """9.7.9.11 st."""
    mods = Modifiers(instr)
    if mods.take("async"):
        store_async(scope, instr, mods)
        return
    space, order = memory_words(mods)
    hint = mods.take("L2::cache_hint")
    count, kind = vector_of(mods), mods.expect(*TYPES)
    mods.done()
    if len(instr.operands) != 2 + hint or space == "param":
        instr.unknown("operands not understood")
    sources = flatten(instr.operands[1])
    if len(sources) != count:
        instr.unknown(f"expected {count} values")
    mask = scope.mask(scope.guard(instr.guard))
    values = ", ".join(_stored(scope, s, kind) for s in sources)
    address = scope.address(instr.operands[0], instr, "b32" if space == "shared" else "b64")
    scope.emit(
        f"rt.store_{space}(g, {mask}, {index_of(scope, instr)}, {address}, {width_of(kind)}, ({values},), "
        f"{order in ('release', 'volatile', 'relaxed', 'mmio')})"
    )


ATOMICS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")


def atomic(scope: Scope, instr: Instr) -> None:
    """9.7.13.5 atom and 9.7.13.6 red."""
    mods = Modifiers(instr)
    if mods.take("async"):
        store_async(scope, instr, mods)
        return
    space, order = memory_words(mods)
    hint = mods.take("L2::cache_hint")
    count = vector_of(mods)
    early = mods.choose(*TYPES)  # atom.global.v2.f32.add is spelt so as well
    operation = mods.expect(*ATOMICS)
    mods.take("noftz")
    hint = mods.take("L2::cache_hint") or hint
    count = max(count, vector_of(mods))
    kind = early or mods.expect(*TYPES)
    mods.done()
    atomic_operation(operation, kind)
    returns = instr.opcode == "atom"
    operands = instr.operands[1:] if returns else instr.operands
    if len(operands) != (3 if operation == "cas" else 2) + hint:
        instr.unknown("operands not understood")
    guard = scope.guard(instr.guard)
    mask = scope.mask(guard)
    if count > 1:
        _vector_atomic(scope, instr, space, order, operation, kind, count)
        return
    operands = operands[: len(operands) - hint]
    values = ", ".join(scope.raw(o, register_type(kind)) for o in operands[1:])
    address = scope.address(operands[0], instr, "b32" if space == "shared" else "b64")
    what = f"{space!r}, {operation!r}, {kind!r}"
    call = f"rt.atomic(g, {mask}, {index_of(scope, instr)}, {what}, {address}, ({values},), {order!r})"
    if not returns:
        scope.emit(call)
    elif not isinstance(instr.operands[0], Discard):
        scope.write(instr.operands[0], Value(register_type(kind), {"raw": scope.let(call)}), guard)
    else:
        scope.emit(call)


def _vector_atomic(scope: Scope, instr: Instr, space: str, order: str, operation: str, kind: str, count: int) -> None:
    """atom and red of .v2 to .v8: each element is atomic by itself (PTX ISA 9.7.13.5)."""
    returns = instr.opcode == "atom"
    place, source = instr.operands[1:3] if returns else instr.operands[:2]
    values = flatten(source)
    if space not in ("global", "generic") or len(values) != count or not isinstance(place, Address):
        instr.unknown("operands not understood")
    guard = scope.guard(instr.guard)
    mask, width, olds = scope.mask(guard), width_of(kind), []
    scope.emit(
        f"rt._check_aligned(g, {mask}, {index_of(scope, instr)}, {scope.address(place, instr, 'b64')}, {width * count})"
    )
    for i, value in enumerate(values):
        address = scope.address(Address(place.base, place.offset + i * width), instr, "b64")
        data = scope.raw(value, register_type(kind))
        what = f"{space!r}, {operation!r}, {kind!r}, {address}, ({data},), {order!r}"
        olds.append(scope.let(f"rt.atomic(g, {mask}, {index_of(scope, instr)}, {what})"))
    if returns:
        scope.write_all(instr.operands[0], olds, [register_type(kind)] * count, guard)


def store_async(scope: Scope, instr: Instr, mods: Modifiers) -> None:
    """9.7.9.12 st.async and 9.7.13.7 red.async: to shared memory of the cluster, counted in bytes at an mbarrier."""
    mods.choose("relaxed")
    mods.choose(*SCOPES)
    mods.choose("shared::cluster")
    mods.expect("mbarrier::complete_tx::bytes")
    operation = mods.expect(*ATOMICS) if instr.opcode == "red" else ""
    count, kind = vector_of(mods), mods.expect(*TYPES)
    mods.done()
    if len(instr.operands) != 3 or len(flatten(instr.operands[1])) != count:
        instr.unknown("operands not understood")
    if operation:
        combine(operation, kind, instr)
    address, barrier = (scope.address(instr.operands[i], instr, "b32") for i in (0, 2))
    values = ", ".join(scope.raw(s, register_type(kind)) for s in flatten(instr.operands[1]))
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {index_of(scope, instr)}"
    scope.emit(f"rt.store_async({lead}, {address}, ({values},), {barrier}, {operation!r}, {kind!r})")


def matrix_load(scope: Scope, instr: Instr) -> None:
    """9.7.14.5.15 ldmatrix."""
    form = matrix_memory.load_form(instr)
    targets = flatten(instr.operands[0])
    if len(targets) != form.registers:
        instr.unknown(f"expected {form.registers} registers")
    guard = scope.guard(instr.guard)
    address = scope.address(instr.operands[1], instr, "b32")
    names = [scope.name() for _ in targets]
    call = f"rt.load_matrix(g, {scope.mask(guard)}, {index_of(scope, instr)}, {address}, {scope.constant(form)})"
    scope.emit(f"{', '.join(names)}, = {call}")
    for target, name in zip(targets, names, strict=True):
        scope.write(target, Value("b32", {"raw": name}), guard)


def matrix_store(scope: Scope, instr: Instr) -> None:
    """9.7.14.5.16 stmatrix."""
    form = matrix_memory.store_form(instr)
    sources = flatten(instr.operands[1])
    if len(sources) != form.registers:
        instr.unknown(f"expected {form.registers} registers")
    address = scope.address(instr.operands[0], instr, "b32")
    values = ", ".join(scope.raw(s, "b32") for s in sources)
    mask = scope.mask(scope.guard(instr.guard))
    form_name = scope.constant(form)
    scope.emit(f"rt.store_matrix(g, {mask}, {index_of(scope, instr)}, {address}, ({values},), {form_name})")


def cta_rank(scope: Scope, instr: Instr) -> None:
    """9.7.9.24 getctarank: the CTA of the cluster that a shared address belongs to."""
    mods = Modifiers(instr)
    mods.take("shared::cluster")
    kind = register_type(mods.expect("u32", "u64"))
    mods.done()
    address = scope.raw(instr.operands[1], kind)
    name = scope.let(f"(({address} >> {RANK_SHIFT}) & 0xFF).astype(np.uint32)")
    scope.write(instr.operands[0], Value("b32", {"raw": name}), scope.guard(instr.guard))


def convert_address(scope: Scope, instr: Instr) -> None:
    """9.7.9.20 cvta: between a window and generic addresses."""
    mods = Modifiers(instr)
    to = mods.take("to")
    space = SPACES[mods.expect(*SPACES)]
    kind = register_type(mods.expect("u32", "u64"))
    mods.done()
    guard = scope.guard(instr.guard)
    value = scope.read(instr.operands[1], kind)
    if space in ("shared", "local"):
        base = scope.raw(Immediate(scope.program.window(space)), "b64")
        value = Value(kind, {"raw": scope.let(f"{scope.view(value, 'raw')} {'-' if to else '+'} {base}")})
    scope.write(instr.operands[0], value, guard)


def is_space(scope: Scope, instr: Instr) -> None:
    """9.7.9.19 isspacep: does a generic address lie in a space's window?"""
    mods = Modifiers(instr)
    space = mods.expect("const", "global", "local", "shared", "shared::cta", "shared::cluster", "param", "param::entry")
    mods.done()
    space = space.removesuffix("::entry")
    address = scope.raw(instr.operands[1], "b64")
    name = scope.let(f"rt.is_space(g, {address}, {space!r})")
    scope.write(instr.operands[0], Value("pred", {"raw": name}), scope.guard(instr.guard))


def map_shared(scope: Scope, instr: Instr) -> None:
    """9.7.9.23 mapa: the address of a shared variable in another CTA of the cluster."""
    mods = Modifiers(instr)
    generic = not mods.take("shared::cluster")
    kind = register_type(mods.expect("u32", "u64"))
    mods.done()
    address = scope.raw(instr.operands[1], kind)
    rank = scope.raw(instr.operands[2], "b32")
    name = scope.let(f"rt.map_shared(g, {index_of(scope, instr)}, {address}, {rank}, {generic})")
    scope.write(instr.operands[0], Value(kind, {"raw": name}), scope.guard(instr.guard))
