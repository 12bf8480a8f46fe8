"""wgmma instructions as calls of the machine (warpgroup.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope, Value
from cubinery.aot.ptxsim.isa.base import Immediate, Instr, Vector, flatten
from cubinery.aot.ptxsim.isa.wgmma import form


def warpgroup(scope: Scope, instr: Instr) -> None:
    """wgmma.mma_async, fence and commit_group."""
    words = instr.modifiers
    if words == ("fence", "sync", "aligned"):
        return  # registers are values here: there is no access to order
    guard = scope.guard(instr.guard)
    mask = scope.mask(guard)
    if words == ("commit_group", "sync", "aligned"):
        scope.emit(f"rt.commit_group(g, {mask}, 'wgmma')")
        return
    found = form(instr)
    targets = flatten(found.d)
    old = "".join(f"{scope.raw(register, 'b32')}, " for register in targets)
    if isinstance(found.a, Vector):
        a = "(" + "".join(f"{scope.raw(register, 'b32')}, " for register in found.a.elements) + ")"
    else:
        a = scope.raw(found.a, "b64")
    b, keep = scope.raw(found.b, "b64"), scope.raw(found.scale_d, "pred")
    names = [scope.name() for _ in targets]
    scope.emit(
        f"{', '.join(names)}, = rt.warpgroup_mma(g, {mask}, {scope.program.index(instr)}, {scope.constant(found)}, "
        f"({old}), {a}, {b}, {keep})"
    )
    for target, name in zip(targets, names, strict=True):
        scope.write(target, Value("b32", {"raw": name}), guard)


def warpgroup_wait(instr: Instr, guard: str) -> str:
    """wgmma.wait_group: the operands that the segment returns."""
    if instr.modifiers != ("wait_group", "sync", "aligned") or not isinstance(instr.operands[0], Immediate):
        instr.unknown("is not executed")
    return f"({guard}, 'wgmma', {instr.operands[0].value})"
