"""tcgen05 instructions as calls of the machine (tensorcore.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope, Value
from cubinery.aot.ptxsim.isa.base import Address, Instr, Operand
from cubinery.aot.ptxsim.isa.tcgen05_forms import Access, Allocation, Commit, Copy, Mma, Order, Shift, form


def tensor(scope: Scope, instr: Instr) -> None:
    """Any tcgen05 instruction at which no warp waits."""
    found = form(instr)
    guard = scope.guard(instr.guard)
    lead = f"g, {scope.mask(guard)}, {scope.program.index(instr)}"
    match found:
        case Mma():
            _mma(scope, instr, found, lead)
        case Access():
            _access(scope, instr, found, lead, guard)
        case Copy():
            address = scope.address(found.address, instr, "b32")
            descriptor = scope.raw(found.descriptor, "b64")
            scope.emit(f"rt.tensor_cp({lead}, {scope.constant(found)}, {address}, {descriptor})")
        case Shift():
            scope.emit(f"rt.tensor_shift({lead}, {found.group}, {scope.address(found.address, instr, 'b32')})")
        case Commit():
            ranks = "None" if found.mask is None else scope.raw(found.mask, "b16")
            barrier = scope.address(found.barrier, instr, "b32")
            scope.emit(f"rt.tensor_commit({lead}, {found.group}, {barrier}, {ranks})")
        case Allocation(operation="dealloc"):
            assert found.address is not None
            assert found.columns is not None
            address, columns = scope.raw(found.address, "b32"), scope.raw(found.columns, "b32")
            scope.emit(f"rt.tensor_dealloc({lead}, {address}, {columns})")
        case Allocation(operation="relinquish_alloc_permit"):
            scope.emit(f"rt.tensor_relinquish(g, {scope.mask(guard)})")
        case Order():
            scope.emit(f"rt.tensor_fence(g, {scope.mask(guard)}, {found.what == 'fence::before_thread_sync'})")
        case _:
            instr.unknown("is not executed")


def _operand(scope: Scope, instr: Instr, operand: Operand | None) -> str:
    """A descriptor, or the tensor memory address in brackets."""
    if isinstance(operand, Address):
        return scope.address(operand, instr, "b32")
    assert operand is not None
    return scope.raw(operand, "b64")


def _mma(scope: Scope, instr: Instr, found: Mma, lead: str) -> None:
    values = [_operand(scope, instr, operand) for operand in (found.d, found.a, found.b)]
    values += [scope.raw(found.descriptor, "b32"), scope.raw(found.enable_d, "pred")]
    disabled = "".join(f"{scope.raw(lane, 'b32')}, " for lane in found.disabled)
    scales = "".join(f"{_operand(scope, instr, at)}, " for at in (found.a_scales, found.b_scales) if at is not None)
    scope.emit(f"rt.tensor_mma({lead}, {scope.constant(found)}, {', '.join(values)}, ({disabled}), ({scales}))")


def _access(scope: Scope, instr: Instr, found: Access, lead: str, guard: str | None) -> None:
    address, name = scope.address(found.address, instr, "b32"), scope.constant(found)
    if found.store:
        values = "".join(f"{scope.raw(register, 'b32')}, " for register in found.registers)
        scope.emit(f"rt.tensor_st({lead}, {name}, {address}, ({values}))")
        return
    targets = [*found.registers, *([found.reduced] if found.reduced is not None else [])]
    names = [scope.name() for _ in targets]
    scope.emit(f"{', '.join(names)}, = rt.tensor_ld({lead}, {name}, {address})")
    for target, result in zip(targets, names, strict=True):
        scope.write(target, Value("b32", {"raw": result}), guard)


def tensor_wait(scope: Scope, instr: Instr, guard: str) -> str:
    """alloc, wait::ld and wait::st: the operands that the segment returns."""
    found = form(instr)
    if isinstance(found, Allocation) and found.columns is not None:
        address = _operand(scope, instr, found.address)
        return f"({guard}, {address}, {scope.raw(found.columns, 'b32')})"
    if not isinstance(found, Order):
        instr.unknown("is not executed")
    return f"({guard}, {found.what!r})"
