"""Warps that wait: what happens at the instruction that ends a segment, and work that lands while others run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from cubinery.aot.ptxsim.barriers import Barriers, Parked
from cubinery.aot.ptxsim.bulk import BulkCopies
from cubinery.aot.ptxsim.isa.base import Register
from cubinery.aot.ptxsim.program import results
from cubinery.aot.ptxsim.schedule import Fair, Pending
from cubinery.aot.ptxsim.state import Gang, spread
from cubinery.aot.ptxsim.tensorcore import TensorCore
from cubinery.aot.ptxsim.translate import Compiled


class Tracer(Protocol):
    """Told of every segment that runs."""

    def ran(self, machine: Any, gang: Gang, compiled: Compiled) -> None: ...

    def waits(self, machine: Any, gang: Gang, why: str) -> None: ...

    def woke(self, machine: Any, gang: Gang, by: Any) -> None: ...

    def again(self) -> None:
        """The launch, which ran in shares, begins anew: what was told of it does not count."""


class Waits(TensorCore, BulkCopies, Barriers):
    """Gangs that wait and asynchronous work that is under way. Machine derives from this."""

    schedule: Fair
    tracer: Tracer | None
    parked: dict[Parked, None]
    released: dict[Parked, None]
    """Parked gangs of which rows may go on."""
    pending: list[Pending]
    _last: Any
    """Warps that ran last, where a tracer wants to know."""
    _wait_handlers: dict[str, Callable[[Gang, int, Compiled, tuple[Any, ...]], None]]

    def pruned(self, gang: Gang, segment: int) -> Gang:
        """Provided by the machine."""
        raise NotImplementedError

    def begin_wait(self, gang: Gang, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        """Let a gang wait at the instruction that ends its segment; lanes outside its guard go on."""
        segment = compiled.segment
        instr = segment.wait
        assert instr is not None
        k = self.kernel.index(instr)
        guard, rest = operands[0], operands[1:]
        if guard is not None and not guard.all():
            through = spread(guard, len(gang))
            lanes = gang.lanes()
            stays, passes = lanes & through, lanes & ~through
            if passes.any():
                self.go_on(gang.part(passes), segment.follow)
                if not stays.any():
                    return
                rows = stays.any(axis=1)
                rest = tuple(_rows(value, rows, len(gang)) for value in rest)
                gang = gang.part(stays)
        self._wait_handlers[instr.opcode](gang, k, compiled, rest)

    def park(self, gang: Gang, then: int, k: int, why: str) -> Parked:
        """Set a gang aside until its rows are released; they go on at segment `then`."""
        parked = Parked(gang, then, k, why)
        self.parked[parked] = None
        if self.tracer is not None:
            self.tracer.waits(self, gang, why)
        return parked

    def release(self, parked: Parked, row: int) -> None:
        """Let a row of a parked gang go on."""
        parked.go[row] = True
        self.released[parked] = None

    def wake(self) -> None:
        """Let released rows go on."""
        released, self.released = self.released, {}
        for parked in released:
            go = parked.go
            parked.go = np.zeros(len(go), bool)
            gang = parked.gang if go.all() else parked.gang.rows(go)
            parked.left &= ~go
            if not parked.left.any():
                del self.parked[parked]
            if self.tracer is not None:
                self.tracer.woke(self, gang, self._last)
            self.go_on(self.pruned(gang, parked.then), parked.then)

    def peek_fails(self) -> bool:
        """Does a lone try_wait of a complete phase fail this time?"""
        return self.schedule.peek_fails()

    def issue(self, queue: int, slot: int, land: Callable[[], None]) -> None:
        """Hand asynchronous work to the schedule."""
        self.pending.append(Pending(queue, slot, land))

    def land(self, indices: list[int]) -> None:
        """Finish pending work."""
        if not indices:
            return
        work = [self.pending[i] for i in indices]
        chosen = set(indices)
        self.pending = [p for i, p in enumerate(self.pending) if i not in chosen]
        for pending in work:
            pending.land()


def _rows(value: Any, rows: Any, count: int) -> Any:
    return value[rows] if isinstance(value, np.ndarray) and value.shape[0] == count else value


def wait_handlers(m: Waits) -> dict[str, Callable[[Gang, int, Compiled, tuple[Any, ...]], None]]:
    """What happens at the instruction that ends a segment, by opcode."""

    def result_slot(compiled: Compiled) -> int:
        assert compiled.segment.wait is not None
        written = results(compiled.segment.wait)
        target = written[0] if written else None
        return m.kernel.slots[target] if isinstance(target, Register) else -1

    def barrier(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        if not operands:
            m.cluster_wait(g, k, compiled.segment.follow)
            return
        number, count, vote = operands
        m.barrier_sync(g, k, compiled.segment.follow, number, count, vote, result_slot(compiled))

    def mbarrier(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        address, phase = operands
        words = m.kernel.instrs[k].modifiers
        slot, spin = result_slot(compiled), compiled.segment.spin
        m.try_wait(g, k, compiled.segment.follow, address, phase, "parity" in words, slot, spin)

    def groups(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        kind, most = operands
        if "wait_all" in m.kernel.instrs[k].modifiers:  # copies of no group yet count too
            m.commit_group(g, g.mask, kind)
        m.wait_group(g, k, compiled.segment.follow, kind, most)

    def passes(g: Gang, k: int, compiled: Compiled, _operands: tuple[Any, ...]) -> None:
        if m.kernel.instrs[k].opcode == "griddepcontrol":
            m.waited[g.cta] = True
        m.go_on(g, compiled.segment.follow)  # launches follow each other, so there is nothing to wait for

    def tensor(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        if m.kernel.instrs[k].modifiers[0] == "alloc":
            m.tensor_alloc(g, k, compiled.segment.follow, *operands)
        else:
            m.tensor_wait(g, k, compiled.segment.follow, *operands)

    return {
        "bar": barrier,
        "barrier": barrier,
        "mbarrier": mbarrier,
        "cp": groups,
        "griddepcontrol": passes,
        "nanosleep": passes,
        "tcgen05": tensor,
        "wgmma": groups,
    }
