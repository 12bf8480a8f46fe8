"""Fences, barriers and mbarriers as calls of the machine (barriers.py)."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope, Value
from cubinery.aot.ptxsim.emit_words import SCOPES, index_of
from cubinery.aot.ptxsim.isa.base import Address, Discard, Immediate, Instr, Modifiers, Operand
from cubinery.aot.ptxsim.isa.mbarrier import MAX_COUNT


def fence(scope: Scope, instr: Instr) -> None:
    """9.7.13.4 fence and membar: memory is coherent here, so only the proxy fences have work to do."""
    mods = Modifiers(instr)
    name = ""
    if instr.opcode == "membar":
        mods.expect("cta", "gl", "sys")
    elif (name := mods.choose("proxy", "mbarrier_init")) == "proxy":
        name = mods.expect(
            "async", "async::generic", "alias", "async.global", "tensormap::generic", "async.shared::cta"
        )
        mods.choose("acquire", "release")
        mods.choose("global", "shared::cta", "shared::cluster")
        mods.choose("sync_restrict::shared::cluster", "sync_restrict::shared::cta")
        mods.choose(*SCOPES)
        name = "async" if name.startswith("async") else name
    else:
        mods.choose("sc", "acq_rel", "acquire", "release")
        mods.choose("sync_restrict::shared::cluster", "sync_restrict::shared::cta")
        mods.choose(*SCOPES)
    mods.done()
    scope.emit(f"rt.fence(g, {scope.mask(scope.guard(instr.guard))}, {index_of(scope, instr)}, {name!r})")


def barrier_operands(scope: Scope, instr: Instr) -> tuple[str, str, str]:
    """(identifier, thread count or None, predicate or None) of bar and barrier."""
    operands = instr.operands[1:] if "red" in instr.modifiers else instr.operands
    predicate = "None"
    if "red" in instr.modifiers:
        predicate = scope.raw(operands[-1], "pred")
        operands = operands[:-1]
    number = scope.raw(operands[0], "b32")
    return number, scope.raw(operands[1], "b32") if len(operands) > 1 else "None", predicate


def barrier_arrive(scope: Scope, instr: Instr) -> None:
    """9.7.13.1 bar.arrive, 9.7.13.4 barrier.cluster.arrive and bar.warp.sync."""
    mask = scope.mask(scope.guard(instr.guard))
    words = instr.modifiers
    if words == ("warp", "sync"):
        scope.emit(f"rt.warp_barrier(g, {mask})")
    elif words[:2] == ("cluster", "arrive") and not set(words[2:]) - {"release", "relaxed", "aligned"}:
        scope.emit(f"rt.cluster_arrive(g, {mask}, {index_of(scope, instr)}, {'relaxed' not in words})")
    elif words[0] == "arrive" or words[:2] == ("cta", "arrive"):
        number, count, _ = barrier_operands(scope, instr)
        scope.emit(f"rt.barrier_arrive(g, {mask}, {index_of(scope, instr)}, {number}, {count})")
    else:
        instr.unknown("modifier is not executed")


def mbarrier(scope: Scope, instr: Instr) -> None:
    """9.7.13.15 mbarrier, all but the waits."""
    mods = Modifiers(instr)
    operation = mods.expect("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "pending_count")
    expect = operation in ("arrive", "arrive_drop") and mods.take("expect_tx")
    no_complete = mods.take("noComplete")
    mods.choose("relaxed", "release")
    mods.choose("cta", "cluster")
    mods.choose("shared", "shared::cta", "shared::cluster")
    mods.expect("b64")
    mods.done()
    guard = scope.guard(instr.guard)
    operands = list(instr.operands)
    if operation == "pending_count":
        token = scope.raw(operands[1], "b64")
        name = scope.let(f"({token} & {scope.raw(Immediate(MAX_COUNT), 'b64')}).astype(np.uint32)")
        scope.write(operands[0], Value("b32", {"raw": name}), guard)
        return
    if no_complete and operation not in ("arrive", "arrive_drop"):
        instr.unknown(".noComplete belongs to arrivals")
    state: Operand | None = None if isinstance(operands[0], Address) else operands.pop(0)
    address = scope.address(operands[0], instr, "b32")
    numbers = [scope.raw(o, "b32") for o in operands[1:]]
    count, tx = "None", "None"
    if operation in ("expect_tx", "complete_tx") or expect:
        tx = numbers.pop(0)
    elif numbers:
        count = numbers.pop(0)
    if numbers:
        instr.unknown("operands not understood")
    where = f"g, {scope.mask(guard)}, {index_of(scope, instr)}"
    call = f"rt.mbarrier({where}, {operation!r}, {address}, {count}, {tx}, {not no_complete})"
    if state is None or isinstance(state, Discard):
        scope.emit(call)
    else:
        scope.write(state, Value("b64", {"raw": scope.let(call)}), guard)


def try_wait(scope: Scope, instr: Instr, guard: str) -> str:
    """9.7.13.15.16 mbarrier.test_wait and try_wait; a time limit is a hint."""
    mods = Modifiers(instr)
    mods.expect("try_wait", "test_wait")
    parity = mods.take("parity")
    mods.choose("acquire", "relaxed")
    mods.choose("cta", "cluster")
    mods.choose("shared", "shared::cta")
    mods.expect("b64")
    mods.done()
    if len(instr.operands) not in (3, 4):
        instr.unknown("operands not understood")
    address = scope.address(instr.operands[1], instr, "b32")
    phase = scope.raw(instr.operands[2], "b32" if parity else "b64")
    return f"({guard}, {address}, {phase})"
