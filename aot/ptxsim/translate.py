"""A parsed kernel made ready to run: registers in slots, variables at addresses, segments compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cubinery.aot.ptxsim.accumulators import misuses
from cubinery.aot.ptxsim.codegen import Scope, build, segment_source
from cubinery.aot.ptxsim.emit import emit, wait
from cubinery.aot.ptxsim.isa.base import Instr, Register, Symbol
from cubinery.aot.ptxsim.memory import GENERIC, SHARED_BASE
from cubinery.aot.ptxsim.parser import parse
from cubinery.aot.ptxsim.program import Segment, defined, segments, used
from cubinery.aot.ptxsim.syntax import Entry, Module, Variable
from cubinery.aot.ptxsim.tensor_registers import early_uses


@dataclass(slots=True)
class Compiled:
    """A segment with its function and what the machine asks of it."""

    segment: Segment
    run: Callable[..., Any]
    live: list[int]
    """Slots of the registers that are live at its start."""
    count: int
    """Instructions in it."""
    converge: int | None
    """Member mask where it is a constant; None where there is none, or a register (then `converge_slot`)."""
    converge_slot: int
    index: int
    """Index of its first instruction."""
    source: str


class Translation:
    """One kernel of one module. Immutable once made; serves every launch."""

    def __init__(self, module: Module, entry: Entry, name: str = "PTX") -> None:
        self.module, self.entry, self.name = module, entry, name
        self.instrs = list(entry.instructions)
        self._index = {id(instr): i for i, instr in enumerate(self.instrs)}
        self._params = {p.name: p for p in entry.params}
        self._place_variables((*module.variables, *entry.variables))
        cut = segments(entry)
        every = {r: None for s in cut for i in s.all for r in (*used(i), *defined(i))}
        self.slots: dict[Register, int] = {register: i for i, register in enumerate(every)}
        self._used = frozenset(r for s in cut for i in s.all for r in used(i))
        self.unit = min((_unit(instr) for instr in self.instrs), default=4)
        """Bytes of shared memory that the race check tells apart."""
        self.lets_go = any(i.opcode == "griddepcontrol" and "launch_dependents" in i.modifiers for i in self.instrs)
        """A dependent launch may start before this one has ended."""
        self.warps_wait = any(i.opcode in ("bar", "barrier", "mbarrier") for i in self.instrs)
        """A warp may wait for others, so that one that never gets its registers holds them up too."""
        self._misuses = misuses(cut)
        self._early = early_uses(cut)
        self.uses_tensor_memory = any(i.opcode == "tcgen05" for i in self.instrs)
        self.segments = [self._compile(segment) for segment in cut]

    # -- addresses -----------------------------------------------------------------------------

    def _place_variables(self, variables: tuple[Variable, ...]) -> None:
        """Static shared variables from SHARED_BASE on, then the dynamic ones, all at one address."""
        self._addresses: dict[str, int] = {}
        self._shared: set[str] = set()
        at, dynamic_align = SHARED_BASE, 16
        self.static_globals: list[Variable] = []
        """Variables in global or constant memory; `GlobalMemory.variable` places them."""
        local = 0
        for v in variables:
            if v.space == "shared" and not v.extern:
                at = -(-at // v.align) * v.align
                self._addresses[v.name], at = at, at + v.size
                self._shared.add(v.name)
            elif v.space == "shared":
                dynamic_align = max(dynamic_align, v.align)
            elif v.space == "local":
                local = -(-local // v.align) * v.align
                self._addresses[v.name], local = local, local + v.size
            else:
                self.static_globals.append(v)
        self.static_shared = at - SHARED_BASE
        self.dynamic_start = -(-at // dynamic_align) * dynamic_align
        self.local_size = -(-local // 16) * 16
        for v in variables:
            if v.space == "shared" and v.extern:
                self._addresses[v.name] = self.dynamic_start
                self._shared.add(v.name)

    def symbol(self, symbol: Symbol) -> int | str:
        """The address of a variable or parameter in its own window: a number, or an expression where it depends."""
        if symbol.name in self._params:
            return GENERIC["param"] + self._params[symbol.name].offset + symbol.offset
        if any(v.name == symbol.name for v in self.static_globals):
            return f"rt.variable({symbol.name!r}, {symbol.offset})"
        if symbol.name not in self._addresses:
            raise ValueError(f"unknown symbol {symbol.name}")
        address = self._addresses[symbol.name] + symbol.offset
        return f"rt.own_shared(g, {address})" if symbol.name in self._shared else address

    def window(self, space: str) -> int:
        return GENERIC[space]

    # -- instructions --------------------------------------------------------------------------

    def index(self, instr: Instr) -> int:
        """The number of an instruction, by which faults find it."""
        return self._index[id(instr)]

    def wanted(self, _instr: Instr) -> frozenset[Register]:
        """Registers that anything reads: a load into any other need not find it written."""
        return self._used

    def _emit(self, scope: Scope, instr: Instr) -> None:
        if id(instr) in self._misuses:
            scope.emit(f"rt.wgmma_misuse(g, {self.index(instr)}, {self._misuses[id(instr)]!r})")
        if id(instr) in self._early:
            mask = scope.mask(scope.guard(instr.guard))
            scope.emit(f"rt.tensor_misuse(g, {mask}, {self.index(instr)}, {self._early[id(instr)]!r})")
        emit(scope, instr)

    def _compile(self, segment: Segment) -> Compiled:
        scope = Scope(self)
        source = segment_source(scope, segment, self._emit, wait)
        mask, slot = None, -1
        if segment.converge is not None:
            if isinstance(segment.converge, Register):
                slot = self.slots[segment.converge]
            else:
                mask = segment.converge.value & 0xFFFFFFFF  # type: ignore[union-attr]
        every = segment.all
        return Compiled(
            segment=segment,
            run=build(source, f"<{self.name} segment {segment.number}, line {segment.line}>", scope.constants),
            live=sorted(self.slots[r] for r in segment.live_in),
            count=len(every),
            converge=mask,
            converge_slot=slot,
            index=self._index[id(every[0])] if every else 0,
            source=source,
        )


class Code:
    """A module's text, parsed; its kernels are translated when they are first asked for."""

    def __init__(self, text: str, name: str) -> None:
        self.module, self.name = parse(text, name), name
        self._kernels: dict[str, Translation] = {}

    def kernel(self, symbol: str) -> Translation | None:
        """A kernel by its symbol; None where there is none."""
        entry = self.module.entries.get(symbol)
        if entry is not None and symbol not in self._kernels:
            self._kernels[symbol] = Translation(self.module, entry, self.name)
        return self._kernels.get(symbol)


@lru_cache(maxsize=8)
def code(text: str, name: str) -> Code:
    """The code of a module's text; kept, as the same kernels run under one schedule after the other."""
    return Code(text, name)


def _unit(instr: Instr) -> int:
    """Bytes of the narrowest access to memory that an instruction makes, at most 4."""
    if instr.opcode not in ("ld", "st", "atom", "red"):
        return 4
    widths = [
        1 if w[1:] == "8" else 2 for w in instr.modifiers if w in ("b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16")
    ]
    return min(widths, default=4) if not {"global", "param", "const", "local"} & set(instr.modifiers) else 4
