"""cp: which copy it is; cp.async of threads and bulk copies of plain bytes as calls of the machine (bulk.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope
from cubinery.aot.ptxsim.emit_tma import tensor_load, tensor_prefetch, tensor_store
from cubinery.aot.ptxsim.isa.base import Address, Instr, Operand
from cubinery.aot.ptxsim.isa.copy_forms import Arrive, BulkCopy, ThreadCopy, form


def copy(scope: Scope, instr: Instr) -> None:
    """9.7.9.25 cp.async, cp.async.bulk and cp.async.bulk.tensor, and cp.reduce."""
    words = instr.modifiers
    if "commit_group" in words and set(words) <= {"async", "bulk", "commit_group"}:
        kind = "bulk" if "bulk" in words else "cp"
        scope.emit(f"rt.commit_group(g, {scope.mask(scope.guard(instr.guard))}, {kind!r})")
    elif "tensor" in words and "prefetch" in words:
        tensor_prefetch(scope, instr)
    elif words[:3] == ("async", "bulk", "tensor") and "bulk_group" not in words:
        tensor_load(scope, instr)
    elif "tensor" in words and "bulk_group" in words:
        tensor_store(scope, instr)
    else:
        plain_copy(scope, instr)


def plain_copy(scope: Scope, instr: Instr) -> None:
    """cp.async, cp.async.mbarrier.arrive, cp.async.bulk, cp.reduce.async.bulk and their prefetch."""
    found = form(instr)
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {scope.program.index(instr)}"

    def number(operand: Operand | None, kind: str) -> str:
        return "None" if operand is None else scope.raw(operand, kind)

    def address(operand: Address | None, space: str) -> str:
        return "None" if operand is None else scope.address(operand, instr, "b32" if space == "shared" else "b64")

    match found:
        case ThreadCopy():
            places = f"{address(found.destination, 'shared')}, {address(found.source, 'global')}"
            sizes = f"{found.size}, {number(found.source_size, 'b32')}, {number(found.ignore, 'pred')}"
            scope.emit(f"rt.thread_copy({lead}, {places}, {sizes})")
        case Arrive():
            scope.emit(f"rt.thread_copy_arrive({lead}, {address(found.barrier, 'shared')}, {found.increment})")
        case BulkCopy():
            places = f"{address(found.to, found.destination)}, {address(found.origin, found.source)}"
            rest = f"{number(found.size, 'b32')}, {address(found.barrier, 'shared')}"
            masks = f"{number(found.mask, 'b16')}, {number(found.byte_mask, 'b16')}"
            scope.emit(f"rt.bulk_copy({lead}, {scope.constant(found)}, {places}, {rest}, {masks})")
        case _:
            instr.unknown("is not executed")
