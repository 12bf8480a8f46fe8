"""Forms of the asynchronous copies: cp.async, cp.async.bulk, cp.reduce.async.bulk (PTX ISA 9.7.9.25 to 27).

`form(instr)` reads one `cp` instruction when a kernel is translated and returns which it is, with its operands by
name; what it does not know it refuses. What the copies do is in async_copy.py and tma.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from cubinery.aot.ptxsim.isa.async_copy import REDUCTIONS, combine
from cubinery.aot.ptxsim.isa.base import Address, Immediate, Instr, Modifiers, Operand, Register

_SHARED = ("shared", "shared::cta", "shared::cluster")
_PREFETCH = ("L2::64B", "L2::128B", "L2::256B")


@dataclass(frozen=True, slots=True)
class ThreadCopy:
    """9.7.9.25.3.1 cp.async: `size` bytes of one thread, of which the first `source_size` are read, the rest zero."""

    destination: Address
    source: Address
    size: int
    source_size: Operand | None = None
    ignore: Operand | None = None
    """A predicate: where true nothing is read, and zeros are written."""


@dataclass(frozen=True, slots=True)
class Group:
    """commit_group, wait_group and wait_all of either kind."""

    bulk: bool
    commit: bool
    keep: int = 0
    """wait_group: the newest groups that may stay pending."""
    read: bool = False
    """Wait only until the sources have been read."""
    open_too: bool = False
    """wait_all: copies of no group count as well."""


@dataclass(frozen=True, slots=True)
class Arrive:
    """9.7.13.15.15 cp.async.mbarrier.arrive: an arrival when the thread's earlier cp.async have landed."""

    barrier: Address
    increment: bool
    """Without .noinc the pending count rises by one at issue (`mbarrier.State.add_pending`)."""


@dataclass(frozen=True, slots=True)
class BulkCopy:
    """9.7.9.25.5 cp.async.bulk, cp.reduce.async.bulk and cp.async.bulk.prefetch: a run of bytes."""

    destination: str
    """shared, global, or nothing for a prefetch."""
    source: str
    size: Operand
    to: Address | None
    origin: Address
    barrier: Address | None = None
    mask: Operand | None = None
    """.multicast::cluster: CTA mask."""
    byte_mask: Operand | None = None
    """.cp_mask: which bytes of each 16 are written."""
    reduction: str = ""
    type: str = ""


@dataclass(frozen=True, slots=True)
class TensorCopy:
    """9.7.9.27.1 cp.async.bulk.tensor, cp.reduce.async.bulk.tensor and the prefetch of a box."""

    direction: str
    """load, store or prefetch; a reduction is a store with `reduction`."""
    rank: int
    mode: str
    """tile, gather4 or scatter4."""
    tensor: Address
    """Address of the map; `coords` holds the coordinates."""
    shared: Address | None = None
    barrier: Address | None = None
    mask: Operand | None = None
    group: int = 0
    """cta_group of a load: with 2 the barrier may be in either CTA of the pair."""
    reduction: str = ""


Form = ThreadCopy | Group | Arrive | BulkCopy | TensorCopy


def form(instr: Instr) -> Form:
    """Read a `cp` instruction."""
    mods = Modifiers(instr)
    reduce = mods.take("reduce")
    mods.expect("async")
    if mods.take("bulk"):
        if mods.take("commit_group") or mods.take("wait_group"):
            return _group(instr, mods, bulk=True)
        prefetch = mods.take("prefetch")
        if mods.take("tensor"):
            return _tensor(instr, mods, reduce, prefetch)
        return _bulk(instr, mods, reduce, prefetch)
    if {"commit_group", "wait_group", "wait_all"} & set(mods.left):
        mods.choose("commit_group", "wait_group", "wait_all")
        return _group(instr, mods, bulk=False)
    if mods.take("mbarrier"):
        mods.expect("arrive")
        keep = mods.take("noinc")
        mods.choose("shared", "shared::cta")
        mods.expect("b64")
        mods.done()
        return Arrive(_address(instr, 0, 1), not keep)
    return _thread(instr, mods)


def _address(instr: Instr, index: int, count: int = 0) -> Address:
    operand = instr.operands[index] if index < len(instr.operands) else None
    if not isinstance(operand, Address) or (count and len(instr.operands) != count):
        instr.unknown("operands not understood")
    return operand


def _group(instr: Instr, mods: Modifiers, bulk: bool) -> Group:
    word = next(w for w in instr.modifiers if w in ("commit_group", "wait_group", "wait_all"))
    read = bulk and word == "wait_group" and mods.take("read")
    mods.done()
    keep = 0
    if word == "wait_group":
        if len(instr.operands) != 1 or not isinstance(instr.operands[0], Immediate):
            instr.unknown("expected a constant number of groups")
        keep = instr.operands[0].value
    elif instr.operands:
        instr.unknown("operands not understood")
    return Group(bulk, word == "commit_group", keep, read, word == "wait_all")


def _thread(instr: Instr, mods: Modifiers) -> ThreadCopy:
    level = mods.expect("ca", "cg")
    mods.expect("shared", "shared::cta")
    mods.expect("global")
    hint = mods.take("L2::cache_hint")
    mods.choose(*_PREFETCH)
    mods.done()
    operands = list(instr.operands)
    if hint:
        operands.pop()
    if len(operands) not in (3, 4) or not isinstance(operands[2], Immediate):
        instr.unknown("operands not understood")
    size = operands[2].value
    if size not in ((16,) if level == "cg" else (4, 8, 16)):
        instr.unknown("expected 4, 8 or 16 bytes, 16 for .cg")
    extra = operands[3] if len(operands) == 4 else None
    is_predicate = isinstance(extra, Register) and extra.type == "pred"
    return ThreadCopy(
        _address(instr, 0), _address(instr, 1), size, None if is_predicate else extra, extra if is_predicate else None
    )


def _bulk(instr: Instr, mods: Modifiers, reduce: bool, prefetch: bool) -> BulkCopy:
    if prefetch:
        mods.expect("L2")
    destination = "" if prefetch else mods.expect(*_SHARED, "global").partition("::")[0]
    source = mods.expect("shared::cta", "global").partition("::")[0]
    barrier = not prefetch and mods.expect("mbarrier::complete_tx::bytes", "bulk_group") != "bulk_group"
    multicast, hint = mods.take("multicast::cluster"), mods.take("L2::cache_hint")
    masked = mods.take("cp_mask")
    reduction = mods.expect(*REDUCTIONS) if reduce else ""
    mods.take("noftz")
    kind = mods.next() if reduce else ""
    mods.done()
    pair = (destination, source)
    legal = {("", "global"), ("shared", "global"), ("shared", "shared"), ("global", "shared")}
    if pair not in legal or barrier != (destination == "shared") or (reduce and pair == ("shared", "global")):
        instr.unknown("direction and completion do not go together")
    operands = list(instr.operands)
    count = (1 if prefetch else 2) + 1 + barrier + multicast + hint + masked
    if len(operands) != count or (multicast and pair != ("shared", "global")) or (masked and destination != "global"):
        instr.unknown("operands not understood")
    to = None if prefetch else _address(instr, 0)
    at = 0 if prefetch else 1
    if reduce:
        combine(reduction, kind, instr)
    after = at + 2
    return BulkCopy(
        destination, source, operands[at + 1], to, _address(instr, at),
        _address(instr, after) if barrier else None,
        operands[after + barrier] if multicast else None,
        operands[-1] if masked else None, reduction, kind,
    )  # fmt: skip


def _tensor(instr: Instr, mods: Modifiers, reduce: bool, prefetch: bool) -> TensorCopy:
    rank = int(mods.expect("1d", "2d", "3d", "4d", "5d")[0])
    if prefetch:
        mods.expect("L2")
        mods.expect("global")
        direction = "prefetch"
    else:
        direction = "store" if mods.expect("shared::cta", "shared::cluster", "global") == "global" else "load"
        mods.expect("shared::cta" if direction == "store" else "global")
    reduction = mods.expect(*REDUCTIONS) if reduce else ""
    if reduce and direction != "store":
        instr.unknown("reductions go to global memory")
    other = "tile::scatter4" if direction == "store" else "tile::gather4"
    mode = mods.choose("tile", other, default="tile").removeprefix("tile::")
    if not prefetch:
        mods.expect("bulk_group" if direction == "store" else "mbarrier::complete_tx::bytes")
    multicast = direction == "load" and mods.take("multicast::cluster")
    group = int((mods.choose("cta_group::1", "cta_group::2") or "cta_group::0")[-1]) if direction == "load" else 0
    hint = mods.take("L2::cache_hint")
    mods.done()
    operands = instr.operands
    place = 1 if direction == "load" else 0
    tensor = _address(instr, place)
    expected = {"load": 3 + multicast, "store": 2, "prefetch": 1}[direction] + hint
    wanted = 5 if mode != "tile" else rank
    if len(operands) != expected or tensor.coords is None or len(tensor.coords) != wanted or tensor.offsets:
        instr.unknown(f"expected a tensor map with {wanted} coordinates")
    if (mode != "tile" and rank != 2) or (reduce and mode != "tile"):
        instr.unknown("mode and rank do not go together")
    shared = {"load": 0, "store": 1}.get(direction)
    return TensorCopy(
        direction, rank, mode, tensor, None if shared is None else _address(instr, shared),
        _address(instr, 2) if direction == "load" else None, operands[3] if multicast else None, group, reduction,
    )  # fmt: skip
