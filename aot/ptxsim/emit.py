"""Instructions that touch memory or other warps, as calls of the machine.

Each function reads one instruction's types and modifiers when the kernel is translated, refuses what it does not
know, and emits a call `rt.…(g, mask, k, …)`: `g` the gang, `mask` the executing lanes (None for all), `k` the
instruction's index, by which the machine finds line and text for a fault.
"""

from __future__ import annotations

from collections.abc import Callable

from cubinery.aot.ptxsim.codegen import Scope, Value, emit_move, emit_pure
from cubinery.aot.ptxsim.emit_barriers import barrier_arrive, barrier_operands, fence, mbarrier, try_wait
from cubinery.aot.ptxsim.emit_copies import copy
from cubinery.aot.ptxsim.emit_memory import (
    atomic,
    convert_address,
    cta_rank,
    is_space,
    load,
    map_shared,
    matrix_load,
    matrix_store,
    store,
)
from cubinery.aot.ptxsim.emit_tensorcore import tensor, tensor_wait
from cubinery.aot.ptxsim.emit_warpgroup import warpgroup, warpgroup_wait
from cubinery.aot.ptxsim.emit_words import index_of
from cubinery.aot.ptxsim.isa.base import Immediate, Instr, flatten
from cubinery.aot.ptxsim.registry import find


def emit(scope: Scope, instr: Instr) -> None:
    """Emit one instruction of any kind but branches and those that may wait."""
    special = EMITTERS.get(instr.opcode)
    if special is not None:
        try:
            special(scope, instr)
        except ValueError as error:
            instr.unknown(str(error))
        return
    operation = find(instr)
    if operation is None:
        instr.unknown("instruction is not executed")
    emit_pure(scope, instr, operation)


def nothing(_scope: Scope, instr: Instr) -> None:
    """Hints and resource directives that change no value."""
    known = {
        "griddepcontrol": {"launch_dependents"},
        "prefetch": {
            "global", "local", "L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap", "param", "const",
        },
        "prefetchu": {"L1"},
        "discard": {"global", "L2"},
        "applypriority": {"global", "L2::evict_normal"},
    }  # fmt: skip
    if set(instr.modifiers) - known[instr.opcode]:
        instr.unknown("modifier is not executed")


def registers(scope: Scope, instr: Instr) -> None:
    """9.7.19.5 setmaxnreg."""
    words = instr.modifiers
    if words[0] not in ("inc", "dec") or words[1:] != ("sync", "aligned", "u32"):
        instr.unknown("modifier is not executed")
    count = scope.raw(instr.operands[0], "b32")
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {index_of(scope, instr)}"
    scope.emit(f"rt.set_registers({lead}, {count}, {words[0] == 'inc'})")


def trap(scope: Scope, instr: Instr) -> None:
    """9.7.19.4 trap."""
    scope.emit(f"rt.trap(g, {scope.mask(scope.guard(instr.guard))}, {index_of(scope, instr)})")


def policy(scope: Scope, instr: Instr) -> None:
    """9.7.9.18 createpolicy: an opaque cache policy, of which no value depends."""
    scope.write(instr.operands[0], scope.read(Immediate(0), "b64"), scope.guard(instr.guard))


def elect(scope: Scope, instr: Instr) -> None:
    """9.7.13.15 elect.sync: the lowest lane of the member mask leads."""
    guard = scope.guard(instr.guard)
    members = scope.raw(instr.operands[1], "b32")
    leader, chosen = scope.name(), scope.name()
    scope.emit(f"{leader}, {chosen} = rt.elect({members})")
    for target, name, kind in zip(flatten(instr.operands[0]), (leader, chosen), ("b32", "pred"), strict=True):
        scope.write(target, Value(kind, {"raw": name}), guard)


EMITTERS: dict[str, Callable[[Scope, Instr], None]] = {
    "mov": emit_move,
    "ld": load,
    "ldu": load,
    "st": store,
    "atom": atomic,
    "red": atomic,
    "cvta": convert_address,
    "isspacep": is_space,
    "mapa": map_shared,
    "getctarank": cta_rank,
    "fence": fence,
    "membar": fence,
    "bar": barrier_arrive,
    "barrier": barrier_arrive,
    "mbarrier": mbarrier,
    "ldmatrix": matrix_load,
    "stmatrix": matrix_store,
    "cp": copy,
    "setmaxnreg": registers,
    "griddepcontrol": nothing,
    "prefetch": nothing,
    "prefetchu": nothing,
    "discard": nothing,
    "applypriority": nothing,
    "createpolicy": policy,
    "trap": trap,
    "elect": elect,
    "tcgen05": tensor,
    "wgmma": warpgroup,
}


def wait(scope: Scope, instr: Instr) -> str:
    """The operands of a waiting instruction, as the tuple that the segment returns; its guard comes first."""
    guard = scope.guard(instr.guard) or "None"
    words = instr.modifiers
    match instr.opcode:
        case "bar" | "barrier" if "cluster" not in words:
            if set(words) - {"sync", "red", "popc", "and", "or", "aligned", "cta", "u32", "pred"}:
                instr.unknown("modifier is not executed")
            return f"({guard}, {', '.join(barrier_operands(scope, instr))})"
        case "barrier":
            if set(words) - {"cluster", "wait", "aligned", "acquire"}:
                instr.unknown("modifier is not executed")
            return f"({guard},)"
        case "mbarrier":
            return try_wait(scope, instr, guard)
        case "cp":
            if set(words) - {"async", "bulk", "wait_group", "wait_all", "read"}:
                instr.unknown("modifier is not executed")
            most = instr.operands[0] if instr.operands else Immediate(0)
            if not isinstance(most, Immediate):
                instr.unknown("expected a constant")
            return f"({guard}, {'bulk' if 'bulk' in words else 'cp'!r}, {most.value})"
        case "griddepcontrol" | "nanosleep":
            return f"({guard},)"
        case "tcgen05":
            return tensor_wait(scope, instr, guard)
        case "wgmma":
            return warpgroup_wait(instr, guard)
        case _:
            return instr.unknown("is not executed")
