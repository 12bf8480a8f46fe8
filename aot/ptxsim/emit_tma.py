"""cp.async.bulk.tensor and its kin as calls of the machine (copies.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope
from cubinery.aot.ptxsim.emit_words import index_of
from cubinery.aot.ptxsim.isa.base import Address, Instr, Modifiers, Operand
from cubinery.aot.ptxsim.isa.copy_forms import TensorCopy, form


def _tensor_operand(scope: Scope, instr: Instr, operand: Operand, count: int) -> tuple[str, str]:
    """(address of the tensor map, coordinates) of `[map, {c0, c1}]`."""
    if not isinstance(operand, Address) or operand.coords is None or len(operand.coords) != count or operand.offsets:
        instr.unknown(f"expected a tensor map with {count} coordinates")
    coords = ", ".join(scope.raw(c, "b32") for c in operand.coords)
    return scope.address(Address(operand.base, operand.offset), instr, "b64"), f"({coords},)"


def _tensor_words(mods: Modifiers, *leading: str) -> int:
    """The rank, after the words that every tensor copy has."""
    for word in ("async", "bulk", *leading, "tensor"):
        mods.expect(word)
    return int(mods.expect("1d", "2d", "3d", "4d", "5d")[0])


def _mode(mods: Modifiers, rank: int, four: str) -> tuple[str, int]:
    """(mode, number of coordinates): tile, or four rows chosen one by one."""
    if mods.take(f"tile::{four}"):
        return "gather4", 5
    mods.take("tile")
    return "tile", rank


def tensor_load(scope: Scope, instr: Instr) -> None:
    """9.7.9.27.1.2 cp.async.bulk.tensor, global to shared memory."""
    mods = Modifiers(instr)
    rank = _tensor_words(mods)
    mods.expect("shared::cluster", "shared::cta")
    mods.expect("global")
    mode, count = _mode(mods, rank, "gather4")
    mods.expect("mbarrier::complete_tx::bytes")
    multicast = mods.take("multicast::cluster")
    pair = mods.choose("cta_group::1", "cta_group::2") == "cta_group::2"
    hint = mods.take("L2::cache_hint")
    mods.done()
    operands = instr.operands
    if len(operands) != 3 + multicast + hint:
        instr.unknown("operands not understood")
    tensor, coords = _tensor_operand(scope, instr, operands[1], count)
    destination = scope.address(operands[0], instr, "b32")
    barrier = scope.address(operands[2], instr, "b32")
    ranks = scope.raw(operands[3], "b16") if multicast else "None"
    mask = scope.mask(scope.guard(instr.guard))
    scope.emit(
        f"rt.tensor_load(g, {mask}, {index_of(scope, instr)}, {destination}, {tensor}, {coords}, {mode!r}, "
        f"{barrier}, {ranks}, {pair})"
    )


def tensor_store(scope: Scope, instr: Instr) -> None:
    """9.7.9.27.1.2 cp.async.bulk.tensor and 9.7.9.27.1.3 cp.reduce.async.bulk.tensor, shared to global memory."""
    found = form(instr)
    if not isinstance(found, TensorCopy) or found.shared is None:
        instr.unknown("operands not understood")
    tile = found.mode == "tile"
    tensor, coords = _tensor_operand(scope, instr, found.tensor, found.rank if tile else 5)
    source = scope.address(found.shared, instr, "b32")
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {index_of(scope, instr)}, {tensor}, {coords}"
    scope.emit(f"rt.tensor_store({lead}, {'tile' if tile else 'gather4'!r}, {source}, {found.reduction!r})")


def tensor_prefetch(scope: Scope, instr: Instr) -> None:
    """9.7.9.27.1.4 cp.async.bulk.prefetch.tensor."""
    mods = Modifiers(instr)
    rank = _tensor_words(mods, "prefetch")
    mods.expect("L2")
    mods.expect("global")
    mode, count = _mode(mods, rank, "gather4")
    hint = mods.take("L2::cache_hint")
    mods.done()
    if len(instr.operands) != 1 + hint:
        instr.unknown("operands not understood")
    tensor, coords = _tensor_operand(scope, instr, instr.operands[0], count)
    mask = scope.mask(scope.guard(instr.guard))
    scope.emit(f"rt.tensor_prefetch(g, {mask}, {index_of(scope, instr)}, {tensor}, {coords}, {mode!r})")
