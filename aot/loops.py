"""Loops of compiled code: what a kernel executes again and again, read from its disassembly.

A loop is a natural loop of the control flow graph: blocks that reach a branch back to a block which dominates it. The
assembler moves waits that spin behind the end of a function, so addresses alone would not show what belongs together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cubinery.aot.errors import InspectError

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<op>[A-Z][\w.]*)\s*(?P<rest>[^;]*);")
_LABEL = re.compile(r"^(?P<name>[.\w$]+):\s*$")
_TARGET = re.compile(r"`\((?P<name>[^)]+)\)")

SPIN_LIMIT = 12
"""Instructions of a loop that waits for a barrier and does nothing else, at most."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a disassembly."""

    opcode: str
    """With its modifiers: `MUFU.EX2`."""
    conditional: bool
    """Under a predicate, its own or of a branch's operands."""
    target: str | None
    """Label that a branch goes to."""

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(slots=True)
class Block:
    """Instructions that are executed one after the other."""

    label: str
    instructions: list[Instruction]
    successors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop."""

    header: str
    """Label of the block that it begins with, or the block's number."""
    blocks: frozenset[int]
    own: Counter[str]
    """Instructions by opcode that lie in no loop inside it."""
    inner: tuple[Loop, ...]
    """Loops directly inside it, but for waits that spin: their first try belongs to what is around them."""

    @property
    def counts(self) -> Counter[str]:
        """Instructions of one iteration by opcode, loops inside counted once."""
        return self.executed(lambda _: 1)

    def executed(self, trips: Callable[[Loop], int]) -> Counter[str]:
        """Instructions of one iteration by opcode, in which a loop inside is run as often as `trips` says."""
        total = Counter(self.own)
        for loop in self.inner:
            times = trips(loop)
            for opcode, number in loop.executed(trips).items():
                total[opcode] += number * times
        return total

    @property
    def size(self) -> int:
        """Instructions of one iteration, loops inside counted once."""
        return self.counts.total()

    def count(self, wanted: Callable[[str], bool]) -> int:
        """Instructions of one iteration whose opcode is wanted, loops inside counted once."""
        return sum(number for opcode, number in self.counts.items() if wanted(opcode))


def main_loop(loops: Iterable[Loop], wanted: Callable[[str], bool]) -> Loop | None:
    """The loop with most of the wanted instructions, the innermost of equals; None where no loop has any."""
    having = [loop for loop in loops if loop.count(wanted)]
    return min(having, key=lambda loop: (-loop.count(wanted), loop.size), default=None)


def find_loops(sass: str) -> tuple[Loop, ...]:
    """All natural loops of a disassembly of one function, outer ones first. Raises InspectError."""
    blocks = parse(sass)
    dominators = _dominators(blocks)
    bodies: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for header in block.successors:
            if number in dominators and header in dominators[number]:
                bodies.setdefault(header, {header}).update(_body(blocks, header, number, dominators))
    loops: list[Loop] = []
    inside: dict[int, tuple[set[int], Loop | None]] = {}  # by header, the loops that nobody has claimed yet
    for header, body in sorted(bodies.items(), key=lambda item: len(item[1])):
        nested = [inside.pop(other) for other in list(inside) if other in body and other != header]
        own = body.difference(*(other for other, _ in nested))
        opcodes = Counter(i.opcode for number in own for i in blocks[number].instructions)
        loop = Loop(
            blocks[header].label or str(header), frozenset(body), opcodes, tuple(x for _, x in nested if x is not None)
        )
        loops.append(loop)
        inside[header] = (body, None if _spins(blocks, body) else loop)
    return tuple(sorted(loops, key=lambda loop: -len(loop.blocks)))


def parse(sass: str) -> list[Block]:
    """The blocks of a disassembly, in order. Raises InspectError where it holds none or a branch without a label."""
    blocks = [Block("", [])]
    numbers: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block("", []))
            blocks[-1].label = blocks[-1].label or label["name"]
            numbers[label["name"]] = len(blocks) - 1
        elif found := _INSTRUCTION.search(line):
            if blocks[-1].instructions and _ends(blocks[-1].instructions[-1]):
                blocks.append(Block("", []))
            blocks[-1].instructions.append(_instruction(found))
    if not blocks[-1].instructions:
        blocks.pop()
    if not blocks:
        raise InspectError("the disassembly holds no instruction")
    for number, block in enumerate(blocks):
        block.successors = _successors(blocks, number, numbers)
    return blocks


def _instruction(found: re.Match[str]) -> Instruction:
    name = found["op"].partition(".")[0]
    target = _TARGET.search(found["rest"])
    branches = name == "BRA"
    conditional = found["guard"] is not None or (
        branches and target is not None and found["rest"][: target.start()] != ""
    )
    return Instruction(found["op"], conditional, target["name"] if branches and target is not None else None)


def _ends(instruction: Instruction) -> bool:
    return instruction.name in ("BRA", "EXIT", "RET", "BRX", "JMX", "JMP")


def _successors(blocks: Sequence[Block], number: int, numbers: dict[str, int]) -> tuple[int, ...]:
    last = blocks[number].instructions[-1]
    following = (number + 1,) if number + 1 < len(blocks) else ()
    if not _ends(last):
        return following
    if last.name in ("EXIT", "RET"):
        return following if last.conditional else ()
    if last.target is None or last.target not in numbers:
        raise InspectError(f"a branch of the disassembly leads to no known label: {last.opcode} {last.target or ''}")
    return (numbers[last.target], *(following if last.conditional else ()))


def _dominators(blocks: Sequence[Block]) -> dict[int, set[int]]:
    """Blocks on every path from the entry, by block; those that are never reached are left out."""
    order: list[int] = []
    seen, stack = {0}, [0]
    while stack:
        number = stack.pop()
        order.append(number)
        fresh = [s for s in blocks[number].successors if s not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    before: dict[int, list[int]] = {number: [] for number in order}
    for number in order:
        for successor in blocks[number].successors:
            before[successor].append(number)
    found = {number: set(order) for number in order}
    found[0] = {0}
    changed = True
    while changed:
        changed = False
        for number in order[1:]:
            new = set.intersection(*(found[b] for b in before[number])) | {number}
            changed |= new != found[number]
            found[number] = new
    return found


def _body(blocks: Sequence[Block], header: int, last: int, reached: dict[int, set[int]]) -> set[int]:
    """Blocks that reach `last` without passing `header`."""
    body, stack = {header, last}, [last] if last != header else []
    while stack:
        number = stack.pop()
        for before, block in enumerate(blocks):
            if number in block.successors and before in reached and before not in body:
                body.add(before)
                stack.append(before)
    return body


def _spins(blocks: Sequence[Block], body: set[int]) -> bool:
    """A short loop around a barrier's phase."""
    names = [i for number in body for i in blocks[number].instructions]
    return len(names) <= SPIN_LIMIT and any(i.opcode.startswith("SYNCS.PHASECHK") for i in names)
