"""Registers that tcgen05.ld is still filling: used before tcgen05.wait::ld (PTX ISA 9.7.16.8).

The simulator loads at once, so this mistake changes no value. It is found in the text, on any way to an instruction.
Some generated code leaves the wait out on purpose where the use of a register waits by itself: a machine reports
nothing of it where its `Checks.tensor_fences` is off. A register that is only moved may be moved early.
"""

from __future__ import annotations

from collections.abc import Sequence

from cubinery.aot.ptxsim.isa.base import Instr, Register
from cubinery.aot.ptxsim.program import Segment, defined, used

EARLY = "it uses a register that tcgen05.ld fills, before tcgen05.wait::ld"


def _step(instr: Instr, filling: set[Register]) -> str:
    """Pass one instruction; what is wrong with it, or nothing."""
    if instr.opcode == "tcgen05" and instr.modifiers[0] == "wait::ld":
        filling.clear()
        return ""
    reads = filling.intersection(used(instr))
    writes = defined(instr)
    filling.difference_update(writes)
    if (instr.opcode == "tcgen05" and instr.modifiers[0] == "ld") or (instr.opcode == "mov" and reads):
        filling.update(writes)
        return ""
    return EARLY if reads else ""


def early_uses(cut: Sequence[Segment]) -> dict[int, str]:
    """Instructions (by id) that use what is not there yet, and how."""
    if not any(i.opcode == "tcgen05" and i.modifiers[0] == "ld" for s in cut for i in s.all):
        return {}
    at: dict[int, set[Register]] = {0: set()}
    found: dict[int, str] = {}
    work = [0]
    while work:
        number = work.pop()
        filling, segment = set(at[number]), cut[number]
        for instr in segment.all:
            if wrong := _step(instr, filling):
                found[id(instr)] = wrong
        for following in (segment.target, segment.follow):
            if following >= 0 and (following not in at or not filling <= at[following]):
                at[following] = at.get(following, set()) | filling
                work.append(following)
    return found
