"""Registers that tcgen05.ld is still filling: used before tcgen05.wait::ld (PTX ISA 9.7.16.8).

The simulator loads at once, so this mistake changes no value. It is found in the text, on any way to an instruction.
Generated code leaves the wait out on purpose where the use of a register waits by itself, so only kernels that keep to
the letter are held to it: those with a tcgen05.fence (`strict`). A register that is only moved may be moved early.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cubinery.aot.ptxsim.isa.base import Instr, Register
from cubinery.aot.ptxsim.program import Segment, defined, used

EARLY = "it uses a register that tcgen05.ld fills, before tcgen05.wait::ld"


def strict(instrs: Iterable[Instr]) -> bool:
    """Does a kernel order its accesses to tensor memory by tcgen05.fence?"""
    return any(i.opcode == "tcgen05" and i.modifiers[0].startswith("fence::") for i in instrs)


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
    """Instructions (by id) of a strict kernel that use what is not there yet, and how."""
    if not strict(i for s in cut for i in s.all):
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
