"""A kernel as the machine runs it: straight-line segments with their live registers.

A segment is a piece of a basic block: besides labels and branches, an instruction at which a warp may have to
wait ends one, so that a segment, once begun, runs through. Segments are numbered in the order of the text;
structured code then reconverges if the smallest number runs first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cubinery.aot.ptxsim.isa.base import (
    FULL_MASK,
    Address,
    Immediate,
    Instr,
    Not,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)
from cubinery.aot.ptxsim.syntax import Entry, Label

NO_RESULT = {
    "st", "red", "bar", "barrier", "membar", "fence", "cp", "bra", "ret", "exit", "setmaxnreg", "griddepcontrol",
    "prefetch", "prefetchu", "discard", "applypriority", "nanosleep", "stmatrix", "trap", "brkpt", "pmevent",
}  # fmt: skip
"""Opcodes whose first operand is no result (those of mbarrier, tcgen05 and wgmma depend on their second word)."""


@dataclass(slots=True)
class Segment:
    """Instructions that run without waiting in between, and what happens after them."""

    number: int
    instrs: list[Instr] = field(default_factory=list)
    wait: Instr | None = None
    """The last instruction, executed by the machine because a warp may have to wait at it."""
    branch: Instr | None = None
    target: int = -1
    """Segment that `branch` goes to."""
    follow: int = -1
    """Segment after this one in the text; -1 where control cannot get there."""
    converge: Operand | None = None
    """Lanes that must be together when it starts: a member mask, as a constant or register."""
    converge_line: int = 0
    spin: bool = False
    """`wait` is a try_wait whose failure leads back to it: it may block until it succeeds."""
    live_in: frozenset[Register] = frozenset()
    live_out: frozenset[Register] = frozenset()

    @property
    def all(self) -> list[Instr]:
        """Every instruction in order."""
        return [*self.instrs, *(i for i in (self.wait, self.branch) if i is not None)]

    @property
    def line(self) -> int:
        every = self.all
        return every[0].line if every else 0


def segments(entry: Entry) -> list[Segment]:
    """Cut a kernel into segments, connect them, and find the registers that live between them."""
    result, labels = _cut(entry)
    for segment in result:
        if segment.branch is not None and segment.branch.opcode == "bra":
            target = segment.branch.operands[0]
            assert isinstance(target, Symbol)
            segment.target = labels[target.name]
    _liveness(result)
    for segment in result:
        if segment.wait is not None and segment.wait.opcode == "mbarrier":
            segment.spin = _spins(segment, result)
    return result


def _cut(entry: Entry) -> tuple[list[Segment], dict[str, int]]:
    result = [Segment(0)]
    labels: dict[str, int] = {}

    def fresh(reachable: bool) -> Segment:
        last = result[-1]
        if not last.all and not last.converge:  # nothing in it yet
            return last
        result.append(Segment(len(result)))
        last.follow = len(result) - 1 if reachable else -1
        return result[-1]

    current = result[0]
    for item in entry.body:
        if isinstance(item, Label):
            current = fresh(reachable=True)
            labels[item.name] = current.number
            continue
        mask = member_mask(item)
        if mask is not None:
            if not _is_full(mask) or (current.converge is not None and not _is_full(current.converge)):
                current = fresh(reachable=True)
            if current.converge is None:
                current.converge, current.converge_line = mask, item.line
        if item.opcode in ("bra", "ret", "exit"):
            current.branch = item
            current = fresh(reachable=item.guard is not None)
        elif waits(item):
            current.wait = item
            current = fresh(reachable=True)
        else:
            current.instrs.append(item)
    return result, labels


def _is_full(mask: Operand) -> bool:
    return isinstance(mask, Immediate) and mask.value & FULL_MASK == FULL_MASK


def member_mask(instr: Instr) -> Operand | None:
    """The lanes that must execute an instruction together, or None where each lane stands for itself."""
    full = Immediate(-1)
    words = instr.modifiers
    if instr.opcode in ("shfl", "vote", "match", "redux", "elect") and "sync" in words:
        return instr.operands[-1]
    if instr.opcode == "bar" and words[:1] == ("warp",):
        return instr.operands[0]
    if instr.opcode in ("bar", "mma", "ldmatrix", "stmatrix", "wgmma", "setmaxnreg", "movmatrix"):
        return full
    if instr.opcode == "barrier" and "cluster" not in words:
        return full
    if "aligned" in words:
        return full
    return None


def waits(instr: Instr) -> bool:
    """May a warp have to wait at this instruction?"""
    words = instr.modifiers
    match instr.opcode:
        case "bar":
            return words[:1] != ("warp",) and "arrive" not in words
        case "barrier":
            return "arrive" not in words
        case "mbarrier":
            return words[0] in ("try_wait", "test_wait")
        case "cp":
            return "wait_group" in words or "wait_all" in words
        case "wgmma":
            return "wait_group" in words
        case "tcgen05":
            return words[0].startswith("wait") or words[0] == "alloc"
        case "griddepcontrol":
            return words[0] == "wait"
        case "nanosleep":
            return True
        case _:
            return False


# -- uses and definitions --------------------------------------------------------------------------


def results(instr: Instr) -> tuple[Operand, ...]:
    """The operands that an instruction writes."""
    words, operands = instr.modifiers, instr.operands
    match instr.opcode:
        case opcode if opcode in NO_RESULT:
            if opcode in ("bar", "barrier") and "red" in words:
                return operands[:1]
            return ()
        case "mbarrier":
            if words[0] in ("init", "inval", "expect_tx", "complete_tx"):
                return ()
            # arrive writes a state only where its first operand is no address
            return () if operands and isinstance(operands[0], Address) else operands[:1]
        case "tcgen05":
            return operands[: 1 + ("red" in words)] if words[0] == "ld" else ()
        case "wgmma":
            return operands[:1] if words[0] == "mma_async" else ()
        case "setp":
            return operands[:1]
        case _:
            return operands[:1]


def registers(operands: Iterable[Operand]) -> Iterable[Register]:
    """Every register in operands, addresses included."""
    for operand in operands:
        match operand:
            case Register():
                yield operand
            case Not(register):
                yield register
            case Vector(elements):
                yield from registers(elements)
            case Pair(first, second):
                yield from registers((first, second))
            case Address(base, _, coords, offsets):
                yield from registers((base, *(coords or ()), *(offsets or ())))


CONDITION = Register("%cc", "pred")
"""The condition code of extended-precision arithmetic (PTX ISA 9.7.2), kept as a register."""


def defined(instr: Instr) -> list[Register]:
    """Registers that an instruction writes."""
    written = list(registers(results(instr)))
    if "cc" in instr.modifiers:
        written.append(CONDITION)
    return written


def used(instr: Instr) -> list[Register]:
    """Registers that an instruction reads; those that it writes under a guard count too, as old values stay."""
    written = results(instr)
    reads = [*registers(instr.operands[len(written) :])]
    if instr.guard is not None:
        reads += [instr.guard.register, *registers(written)]
    if instr.opcode in ("addc", "subc", "madc"):
        reads.append(CONDITION)
    if instr.opcode == "wgmma" and written:
        reads += registers(written)  # the accumulator is read as well
    return reads


def _liveness(result: list[Segment]) -> None:
    """live_in and live_out of every segment, by iteration to a fixed point from the end."""
    reads: list[frozenset[Register]] = []
    writes: list[frozenset[Register]] = []
    for segment in result:
        seen: set[Register] = set()
        need: set[Register] = set(registers((segment.converge,))) if segment.converge is not None else set()
        for instr in segment.all:
            need.update(r for r in used(instr) if r not in seen)
            if instr.guard is None:
                seen.update(defined(instr))
        reads.append(frozenset(need))
        writes.append(frozenset(seen))
    changed = True
    while changed:
        changed = False
        for segment in reversed(result):
            out = frozenset[Register]()
            for n in (segment.target, segment.follow):
                if n >= 0:
                    out |= result[n].live_in
            live = reads[segment.number] | (out - writes[segment.number])
            if live != segment.live_in or out != segment.live_out:
                segment.live_in, segment.live_out = live, out
                changed = True


# -- spin loops ------------------------------------------------------------------------------------

_PURE_LIMIT = 8
"""Segments that a failed try_wait may pass on its way back."""


def _spins(segment: Segment, result: list[Segment]) -> bool:
    """Does failing the try_wait at the end of `segment` lead back to it with nothing else done?"""
    wait = segment.wait
    assert wait is not None
    (done,) = list(registers(results(wait)))[:1] or (None,)
    if done is None or any(i.opcode not in _QUIET for i in segment.instrs):
        return False
    at, hops = segment.follow, 0
    known: dict[Register, bool] = {done: False}
    while at >= 0 and hops < _PURE_LIMIT:
        if at == segment.number:
            return True
        here = result[at]
        for instr in here.instrs:
            if instr.opcode not in _QUIET:
                return False
            for register in defined(instr):
                known.pop(register, None)
            if instr.opcode == "selp" and len(instr.operands) == 4:
                choice = instr.operands[3]
                if isinstance(choice, Register) and choice in known and isinstance(instr.operands[0], Register):
                    value = instr.operands[1 if known[choice] else 2]
                    if isinstance(value, Immediate):
                        known[instr.operands[0]] = bool(value.value)
            if instr.opcode == "setp" and instr.modifiers[:1] in (("ne",), ("eq",)):
                left, right = instr.operands[1:3]
                if isinstance(left, Register) and left in known and right == Immediate(0):
                    result_register = instr.operands[0]
                    assert isinstance(result_register, Register)
                    known[result_register] = known[left] == (instr.modifiers[0] == "ne")
        if here.wait is not None:
            return False
        branch = here.branch
        if branch is None:
            at = here.follow
        elif branch.opcode != "bra":
            return False
        elif branch.guard is None:
            at = here.target
        elif branch.guard.register in known:
            taken = known[branch.guard.register] != branch.guard.negated
            at = here.target if taken else here.follow
        else:
            return False
        hops += 1
    return False


_QUIET = {"mov", "selp", "setp", "and", "or", "not", "add", "cvt", "xor"}
