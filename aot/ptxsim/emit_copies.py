"""cp.async of threads and bulk copies of plain bytes as calls of the machine (bulk.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope
from cubinery.aot.ptxsim.isa.base import Address, Instr, Operand
from cubinery.aot.ptxsim.isa.copy_forms import Arrive, BulkCopy, ThreadCopy, form


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
