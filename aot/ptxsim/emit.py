"""Instructions that touch memory or other warps, as calls of the machine.

Each function reads one instruction's types and modifiers when the kernel is translated, refuses what it does not
know, and emits a call `rt.…(g, mask, k, …)`: `g` the gang, `mask` the executing lanes (None for all), `k` the
instruction's index, by which the machine finds line and text for a fault.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cubinery.aot.ptxsim.codegen import Scope, Value, emit_move, emit_pure
from cubinery.aot.ptxsim.emit_copies import plain_copy
from cubinery.aot.ptxsim.emit_tensorcore import tensor, tensor_wait
from cubinery.aot.ptxsim.emit_warpgroup import warpgroup, warpgroup_wait
from cubinery.aot.ptxsim.isa import matrix_memory
from cubinery.aot.ptxsim.isa.async_copy import combine
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
from cubinery.aot.ptxsim.isa.copy_forms import TensorCopy, form
from cubinery.aot.ptxsim.isa.mbarrier import MAX_COUNT
from cubinery.aot.ptxsim.memory import RANK_SHIFT
from cubinery.aot.ptxsim.registry import find

CACHE_HINTS = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip
"""Words that tell a cache what to expect: no effect on values."""
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "local": "local",
    "const": "global", "param": "param", "param::entry": "param",
}  # fmt: skip
TYPES = (
    "b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
    "f16x2", "bf16x2",
)  # fmt: skip


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


def _k(scope: Scope, instr: Instr) -> int:
    index: int = scope.program.index(instr)
    return index


def _width(kind: str) -> int:
    return {"f16x2": 4, "bf16x2": 4, "bf16": 2}.get(kind) or int(kind.lstrip("bsuf")) // 8


def _memory_words(mods: Modifiers) -> tuple[str, str]:
    """(space, ordering) of ld, st, atom and red; cache hints dropped."""
    order = mods.choose("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
    if order == "mmio":
        mods.expect("relaxed")
    space = SPACES.get(mods.choose(*SPACES), "generic")
    mods.choose(*SCOPES)
    while mods.choose(*CACHE_HINTS):
        pass
    return space, order


def _vector(mods: Modifiers) -> int:
    return int((mods.choose("v2", "v4", "v8") or "v1")[1:])


def load(scope: Scope, instr: Instr) -> None:
    """9.7.9.8 ld: `count` elements, each extended to its register."""
    mods = Modifiers(instr)
    space, order = _memory_words(mods)
    hint = mods.take("L2::cache_hint")
    mods.take("unified")
    count, kind = _vector(mods), mods.expect(*TYPES)
    mods.done()
    target, source = instr.operands[:2]
    if len(instr.operands) != 2 + hint:
        instr.unknown("operands not understood")
    targets = flatten(target)
    if len(targets) != count:
        instr.unknown(f"expected {count} registers")
    guard = scope.guard(instr.guard)
    mask, width = scope.mask(guard), _width(kind)
    names = [scope.name() for _ in range(count)]
    wanted = tuple(isinstance(t, Register) and t in scope.program.wanted(instr) for t in targets)
    address = scope.address(source, instr, "b32" if space == "shared" else "b64")
    if space == "param" and isinstance(source, Address) and isinstance(source.base, Symbol):
        space = "fixed_param"
    scope.emit(
        f"{', '.join(names)}, = rt.load_{space}(g, {mask}, {_k(scope, instr)}, {address}, {width}, {count}, "
        f"{scope.constant(wanted)}, {order in ('acquire', 'volatile', 'relaxed', 'mmio')})"
    )
    for operand, name in zip(targets, names, strict=True):
        if isinstance(operand, Register):
            scope.write(operand, _extended(scope, name, kind, operand.type), guard)


def _extended(scope: Scope, name: str, kind: str, register: str) -> Value:
    """A loaded element (its memory width) as a register."""
    own, wide = _width(kind), np.dtype(DTYPES[register])
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
    return scope.let(f"{name}.astype(np.uint8)") if _width(kind) == 1 else name


def store(scope: Scope, instr: Instr) -> None:
    """9.7.9.11 st."""
    mods = Modifiers(instr)
    if mods.take("async"):
        store_async(scope, instr, mods)
        return
    space, order = _memory_words(mods)
    hint = mods.take("L2::cache_hint")
    count, kind = _vector(mods), mods.expect(*TYPES)
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
        f"rt.store_{space}(g, {mask}, {_k(scope, instr)}, {address}, {_width(kind)}, ({values},), "
        f"{order in ('release', 'volatile', 'relaxed', 'mmio')})"
    )


_ATOMICS = ("add", "min", "max", "inc", "dec", "and", "or", "xor", "exch", "cas")


def atomic(scope: Scope, instr: Instr) -> None:
    """9.7.13.5 atom and 9.7.13.6 red."""
    mods = Modifiers(instr)
    if mods.take("async"):
        store_async(scope, instr, mods)
        return
    space, order = _memory_words(mods)
    hint = mods.take("L2::cache_hint")
    count = _vector(mods)
    early = mods.choose(*TYPES)  # atom.global.v2.f32.add is spelt so as well
    operation = mods.expect(*_ATOMICS)
    mods.take("noftz")
    hint = mods.take("L2::cache_hint") or hint
    count = max(count, _vector(mods))
    kind = early or mods.expect(*TYPES)
    mods.done()
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
    call = f"rt.atomic(g, {mask}, {_k(scope, instr)}, {what}, {address}, ({values},), {order!r})"
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
    mask, width, olds = scope.mask(guard), _width(kind), []
    scope.emit(
        f"rt._check_aligned(g, {mask}, {_k(scope, instr)}, {scope.address(place, instr, 'b64')}, {width * count})"
    )
    for i, value in enumerate(values):
        address = scope.address(Address(place.base, place.offset + i * width), instr, "b64")
        data = scope.raw(value, register_type(kind))
        what = f"{space!r}, {operation!r}, {kind!r}, {address}, ({data},), {order!r}"
        olds.append(scope.let(f"rt.atomic(g, {mask}, {_k(scope, instr)}, {what})"))
    if returns:
        scope.write_all(instr.operands[0], olds, [register_type(kind)] * count, guard)


def store_async(scope: Scope, instr: Instr, mods: Modifiers) -> None:
    """9.7.9.12 st.async and 9.7.13.7 red.async: to shared memory of the cluster, counted in bytes at an mbarrier."""
    mods.choose("relaxed")
    mods.choose(*SCOPES)
    mods.choose("shared::cluster")
    mods.expect("mbarrier::complete_tx::bytes")
    operation = mods.expect(*_ATOMICS) if instr.opcode == "red" else ""
    count, kind = _vector(mods), mods.expect(*TYPES)
    mods.done()
    if len(instr.operands) != 3 or len(flatten(instr.operands[1])) != count:
        instr.unknown("operands not understood")
    if operation:
        combine(operation, kind, instr)
    address, barrier = (scope.address(instr.operands[i], instr, "b32") for i in (0, 2))
    values = ", ".join(scope.raw(s, register_type(kind)) for s in flatten(instr.operands[1]))
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {_k(scope, instr)}"
    scope.emit(f"rt.store_async({lead}, {address}, ({values},), {barrier}, {operation!r}, {kind!r})")


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
    name = scope.let(f"rt.map_shared(g, {_k(scope, instr)}, {address}, {rank}, {generic})")
    scope.write(instr.operands[0], Value(kind, {"raw": name}), scope.guard(instr.guard))


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
    scope.emit(f"rt.fence(g, {scope.mask(scope.guard(instr.guard))}, {_k(scope, instr)}, {name!r})")


# -- barriers --------------------------------------------------------------------------------------


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
        scope.emit(f"rt.cluster_arrive(g, {mask}, {_k(scope, instr)}, {'relaxed' not in words})")
    elif words[0] == "arrive" or words[:2] == ("cta", "arrive"):
        number, count, _ = barrier_operands(scope, instr)
        scope.emit(f"rt.barrier_arrive(g, {mask}, {_k(scope, instr)}, {number}, {count})")
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
    where = f"g, {scope.mask(guard)}, {_k(scope, instr)}"
    call = f"rt.mbarrier({where}, {operation!r}, {address}, {count}, {tx}, {not no_complete})"
    if state is None or isinstance(state, Discard):
        scope.emit(call)
    else:
        scope.write(state, Value("b64", {"raw": scope.let(call)}), guard)


# -- matrices, copies, hints -----------------------------------------------------------------------


def matrix_load(scope: Scope, instr: Instr) -> None:
    """9.7.14.5.15 ldmatrix."""
    form = matrix_memory.load_form(instr)
    targets = flatten(instr.operands[0])
    if len(targets) != form.registers:
        instr.unknown(f"expected {form.registers} registers")
    guard = scope.guard(instr.guard)
    address = scope.address(instr.operands[1], instr, "b32")
    names = [scope.name() for _ in targets]
    call = f"rt.load_matrix(g, {scope.mask(guard)}, {_k(scope, instr)}, {address}, {scope.constant(form)})"
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
    scope.emit(f"rt.store_matrix(g, {mask}, {_k(scope, instr)}, {address}, ({values},), {form_name})")


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
        f"rt.tensor_load(g, {mask}, {_k(scope, instr)}, {destination}, {tensor}, {coords}, {mode!r}, "
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
    lead = f"g, {scope.mask(scope.guard(instr.guard))}, {_k(scope, instr)}, {tensor}, {coords}"
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
    scope.emit(f"rt.tensor_prefetch(g, {mask}, {_k(scope, instr)}, {tensor}, {coords}, {mode!r})")


def nothing(_scope: Scope, instr: Instr) -> None:
    """Hints and resource directives that change no value."""
    known = {
        "setmaxnreg": {"inc", "dec", "sync", "aligned", "u32"},
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


def trap(scope: Scope, instr: Instr) -> None:
    """9.7.19.4 trap."""
    scope.emit(f"rt.trap(g, {scope.mask(scope.guard(instr.guard))}, {_k(scope, instr)})")


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
    "setmaxnreg": nothing,
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


# -- instructions at which a warp may wait -----------------------------------------------------------


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
            return _try_wait(scope, instr, guard)
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


def _try_wait(scope: Scope, instr: Instr, guard: str) -> str:
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
