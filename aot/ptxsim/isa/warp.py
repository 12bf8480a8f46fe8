"""Instructions that look across the lanes of a warp, as functions of arrays (warps, 32) (PTX ISA 9.7.9 and 9.7.13).

Each takes the executing lanes where they matter (`Compiled.active`). A member is a lane that executes and whose bit
is set in the member mask; the machine sees to it that all members arrive together (`Compiled.converged`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import FULL_MASK, Compiled, Immediate, Instr, Modifiers, Operation, Pair
from cubinery.aot.ptxsim.isa.values import Array, canonical32

LANES = np.arange(32, dtype=np.uint32)
_WEIGHTS = np.uint32(1) << LANES


def ballot(lanes: Array) -> Array:
    """Bools (..., 32) as the 32-bit mask of each warp, shape (..., 1)."""
    return np.where(lanes, _WEIGHTS, np.uint32(0)).sum(-1, dtype=np.uint32, keepdims=True)


def members(active: Array, mask: Array) -> Array:
    """The lanes that execute and that the member mask names."""
    return active & ((mask >> LANES) & 1 != 0)


def membership(instr: Instr, index: int) -> Callable[[Array, Array], Array]:
    """`members`, or where the operand is the constant of all lanes, simply those that execute."""
    operand = instr.operands[index] if index < len(instr.operands) else None
    if isinstance(operand, Immediate) and operand.value & FULL_MASK == FULL_MASK:
        return lambda active, _mask: active
    return members


def _full(value: Array, active: Array) -> Array:
    return np.broadcast_to(value, active.shape)


# -- shuffle ---------------------------------------------------------------------------------------


def shuffle_source(mode: str, lane_operand: Array, clamp_operand: Array) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether that lies in its segment (else it reads itself)."""
    lanes = LANES.astype(np.int64)
    by, clamp = (lane_operand & 31).astype(np.int64), (clamp_operand & 31).astype(np.int64)
    segment = ((clamp_operand >> 8) & 31).astype(np.int64)
    first = lanes & segment
    last = first | (clamp & ~segment)
    if mode == "up":
        source = lanes - by
        inside = source >= last
    else:
        source = {"down": lanes + by, "bfly": lanes ^ by, "idx": first | (by & ~segment)}[mode]
        inside = source <= last
    return np.where(inside, source, lanes), inside


def shfl(instr: Instr) -> Compiled:
    """9.7.9.6 shfl.sync: idx, up, down or bfly within segments; p tells whether the source lane was in range.

    A lane that reads one that does not execute gets what that lane's register holds; PTX leaves it undefined.
    """
    mods = Modifiers(instr)
    mods.expect("sync")
    mode = mods.expect("up", "down", "bfly", "idx")
    mods.expect("b32")
    mods.done()
    with_predicate = isinstance(instr.operands[0], Pair)
    fixed = None
    match instr.operands[2:4]:
        case (Immediate(distance), Immediate(limit)):
            fixed = shuffle_source(mode, np.uint32(distance & 0xFFFFFFFF), np.uint32(limit & 0xFFFFFFFF))

    def shuffle(a: Array, by: Array, clamp: Array, _mask: Array) -> Any:
        source, inside = fixed or shuffle_source(mode, by, clamp)
        if a.shape[-1:] != (32,):
            a = np.broadcast_to(a, (*a.shape[:-1], 32))
        if source.ndim == 1:
            value = a[..., source]
        else:
            shape = np.broadcast_shapes(a.shape, source.shape)
            value = np.take_along_axis(np.broadcast_to(a, shape), np.broadcast_to(source, shape), -1)
        return (value, np.broadcast_to(inside, value.shape)) if with_predicate else value

    results = ("b32", "pred") if with_predicate else ("b32",)
    return Compiled(results, ("b32",) * 4, shuffle, converged=True, membermask=3)


# -- votes, matches and reductions -----------------------------------------------------------------


def _uniform(member: Array, value: Array) -> Array:
    """Whether a predicate is the same in all members."""
    return (value | ~member).all(-1, keepdims=True) | (~value | ~member).all(-1, keepdims=True)


def vote(instr: Instr) -> Compiled:
    """9.7.13.9 vote.sync: whether all, any, or equally many (uni) members hold a predicate; ballot: which do."""
    mods = Modifiers(instr)
    mods.expect("sync")
    mode = mods.expect("all", "any", "uni", "ballot")
    mods.expect("b32" if mode == "ballot" else "pred")
    mods.done()
    members_of = membership(instr, 2)

    def poll(active: Array, value: Array, mask: Array) -> Array:
        member = members_of(active, mask)
        if mode == "ballot":
            return ballot(member & value)
        if mode == "any":
            return (member & value).any(-1, keepdims=True)
        return (value | ~member).all(-1, keepdims=True) if mode == "all" else _uniform(member, value)

    result = "b32" if mode == "ballot" else "pred"
    return Compiled((result,), ("pred", "b32"), poll, active=True, converged=True, membermask=1)


def match(instr: Instr) -> Compiled:
    """9.7.13.10 match.sync: any: the members with the lane's value; all: the member mask and p if all agree, else 0."""
    mods = Modifiers(instr)
    mode = mods.expect("any", "all")
    mods.expect("sync")
    kind = mods.expect("b32", "b64")
    mods.done()
    with_predicate = isinstance(instr.operands[0], Pair)
    if with_predicate and mode == "any":
        instr.unknown("match.any has no predicate")
    members_of = membership(instr, 2)

    def compare(active: Array, value: Array, mask: Array) -> Any:
        member = members_of(active, mask)
        value = _full(value, active)
        if mode == "any":
            same = (value[..., :, None] == value[..., None, :]) & member[..., None, :]
            return np.where(same, _WEIGHTS, np.uint32(0)).sum(-1, dtype=np.uint32)
        first = np.take_along_axis(value, member.argmax(-1)[..., None], -1)
        agree = ((value == first) | ~member).all(-1, keepdims=True)
        found = np.where(agree, ballot(member), np.uint32(0))
        return (found, agree) if with_predicate else found

    results = ("b32", "pred") if with_predicate else ("b32",)
    return Compiled(results, (kind, "b32"), compare, active=True, converged=True, membermask=1)


_REDUCTIONS: dict[tuple[str, str], tuple[Any, int]] = {
    ("add", "u32"): (np.add, 0),
    ("add", "s32"): (np.add, 0),
    ("min", "u32"): (np.minimum, 0xFFFFFFFF),
    ("max", "u32"): (np.maximum, 0),
    ("min", "s32"): (np.minimum, 0x7FFFFFFF),
    ("max", "s32"): (np.maximum, -(1 << 31)),
    ("and", "b32"): (np.bitwise_and, 0xFFFFFFFF),
    ("or", "b32"): (np.bitwise_or, 0),
    ("xor", "b32"): (np.bitwise_xor, 0),
}
"""Ufunc and neutral element by operation and type."""


def redux(instr: Instr) -> Compiled:
    """9.7.13.12 redux.sync: sum, extreme or bitwise combination over the members; f32: min and max, .abs, .NaN."""
    mods = Modifiers(instr)
    mods.expect("sync")
    name = mods.expect("add", "min", "max", "and", "or", "xor")
    absolute, propagate = mods.take("abs"), mods.take("NaN")
    kind = mods.expect("u32", "s32", "b32", "f32")
    mods.done()
    members_of = membership(instr, 2)
    if kind == "f32" and name in ("min", "max"):
        reduce = _reduce_f32(members_of, name == "max", absolute, propagate)
    elif (name, kind) in _REDUCTIONS and not absolute and not propagate:
        ufunc, neutral = _REDUCTIONS[name, kind]
        dtype = np.int32 if kind == "s32" else np.uint32

        def reduce(active: Array, value: Array, mask: Array) -> Array:
            chosen = np.where(members_of(active, mask), value.view(dtype), dtype(neutral))
            return ufunc.reduce(chosen, axis=-1, dtype=dtype, keepdims=True).view(np.uint32)
    else:
        instr.unknown("no such reduction")
    return Compiled(("b32",), ("b32", "b32"), reduce, active=True, converged=True, membermask=1)


def _reduce_f32(
    members_of: Callable[[Array, Array], Array], largest: bool, absolute: bool, propagate: bool
) -> Callable[[Array, Array, Array], Array]:
    """min or max over f32 members: -0 below +0; NaN loses to numbers unless `propagate`; canonical NaN if all are."""

    def reduce(active: Array, value: Array, mask: Array) -> Array:
        bits = value & 0x7FFFFFFF if absolute else value
        # Numbers in the order of their values as signed integers: the magnitude's bits inverted for negative ones.
        signed = bits.view(np.int32)
        ordered = np.where(signed < 0, signed ^ np.int32(0x7FFFFFFF), signed).astype(np.int64)
        number = bits & 0x7FFFFFFF <= 0x7F800000
        member = members_of(active, mask)
        neutral = np.int64(-(1 << 40) if largest else 1 << 40)
        chosen = np.where(member & number, ordered, neutral)
        best = (chosen.max if largest else chosen.min)(axis=-1, keepdims=True)
        nan = (member & ~number).any(-1, keepdims=True) if propagate else best == neutral
        best = np.where(nan, 0, best).astype(np.int32)
        result = np.where(best < 0, best ^ np.int32(0x7FFFFFFF), best).view(np.float32)
        return canonical32(np.where(nan, np.float32(np.nan), result))

    return reduce


def activemask(instr: Instr) -> Compiled:
    """9.7.13.11 activemask: the lanes that execute."""
    mods = Modifiers(instr)
    mods.expect("b32")
    mods.done()
    return Compiled(("b32",), (), ballot, active=True)


def elect(instr: Instr) -> Compiled:
    """9.7.13.14 elect.sync: the lowest member is elected: its lane number, and a predicate true there alone."""
    mods = Modifiers(instr)
    mods.expect("sync")
    mods.done()
    members_of = membership(instr, 1)

    def choose(active: Array, mask: Array) -> tuple[Array, Array]:
        leader = members_of(active, mask).argmax(-1).astype(np.uint32)[..., None]
        return np.broadcast_to(leader, active.shape), (leader == LANES) & active

    return Compiled(("b32", "pred"), ("b32",), choose, active=True, converged=True, membermask=0)


OPCODES: dict[str, Operation] = {
    "shfl": Operation(shfl),
    "vote": Operation(vote),
    "match": Operation(match),
    "redux": Operation(redux),
    "activemask": Operation(activemask),
    "elect": Operation(elect),
}
