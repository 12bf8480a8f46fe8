"""Registers that wgmma works on: touched too early, or handed over without wgmma.fence (PTX ISA 9.7.15.7).

The simulator multiplies as a product is issued, so these mistakes change no value. They are found in the text: which
registers are still with the tensor core, and which were touched since the last fence, on any way to an instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cubinery.aot.ptxsim.isa.base import Instr, Register, Vector
from cubinery.aot.ptxsim.program import Segment, defined, registers, used

UNFENCED = "its registers were touched after the last wgmma.fence"
IN_FLIGHT = "it touches a register of a wgmma that no wgmma.wait_group has waited for"
_UNCOMMITTED = -1


@dataclass(slots=True)
class _Flow:
    """What is known at one place of the program."""

    touched: set[Register] = field(default_factory=set)
    """Registers that ordinary instructions touched since the last fence."""
    results: dict[Register, int] = field(default_factory=dict)
    """Accumulators with the tensor core, and how many groups were committed after theirs."""
    inputs: dict[Register, int] = field(default_factory=dict)
    """Registers of A, likewise: they may be read, but not written."""

    def copy(self) -> _Flow:
        return _Flow(set(self.touched), dict(self.results), dict(self.inputs))

    def join(self, other: _Flow) -> bool:
        """Take in what another way leads here with; True if that was news."""
        news = not other.touched <= self.touched
        self.touched |= other.touched
        for mine, theirs in ((self.results, other.results), (self.inputs, other.inputs)):
            for register, age in theirs.items():
                if age < mine.get(register, age + 1):
                    mine[register] = age
                    news = True
        return news

    def step(self, instr: Instr, tracked: frozenset[Register]) -> str:
        """Pass one instruction; what is wrong with it, or nothing."""
        if instr.opcode == "wgmma":
            return self._wgmma(instr)
        writes = tracked.intersection(defined(instr))
        every = writes | tracked.intersection(used(instr))
        self.touched |= every
        return IN_FLIGHT if every & self.results.keys() or writes & self.inputs.keys() else ""

    def _wgmma(self, instr: Instr) -> str:
        match instr.modifiers[0]:
            case "fence":
                self.touched.clear()
            case "commit_group":
                for flight in (self.results, self.inputs):
                    for register in flight:
                        flight[register] += 1
            case "wait_group":
                most = instr.operands[0].value  # type: ignore[union-attr]
                self.results = {r: age for r, age in self.results.items() if age < most}
                self.inputs = {r: age for r, age in self.inputs.items() if age < most}
            case _:
                results, inputs = _operands(instr)
                self.results |= dict.fromkeys(results, _UNCOMMITTED)
                self.inputs |= dict.fromkeys(inputs, _UNCOMMITTED)
                return UNFENCED if self.touched & (results | inputs) else ""
        return ""


def _operands(instr: Instr) -> tuple[set[Register], set[Register]]:
    """Accumulators and registers of A of a wgmma.mma_async."""
    a = instr.operands[1]
    return set(registers(instr.operands[:1])), set(registers((a,))) if isinstance(a, Vector) else set()


def misuses(cut: Sequence[Segment]) -> dict[int, str]:
    """Instructions (by id) of a kernel that break these rules, and how."""
    products = [i for s in cut for i in s.all if i.opcode == "wgmma" and i.modifiers[0] == "mma_async"]
    if not products:
        return {}
    tracked = frozenset(r for i in products for part in _operands(i) for r in part)
    at = {0: _Flow(set(tracked))}
    found: dict[int, str] = {}
    work = [0]
    while work:
        number = work.pop()
        flow, segment = at[number].copy(), cut[number]
        for instr in segment.all:
            wrong = flow.step(instr, tracked)
            if wrong:
                found[id(instr)] = wrong
        for following in (segment.target, segment.follow):
            if following >= 0 and following not in at:
                at[following] = flow.copy()
                work.append(following)
            elif following >= 0 and at[following].join(flow):
                work.append(following)
    return found
