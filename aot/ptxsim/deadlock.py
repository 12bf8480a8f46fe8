"""The report of a launch in which no warp can go on: who waits for what."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from cubinery.aot.ptxsim.faults import DeadlockFault, DivergedFault
from cubinery.aot.ptxsim.residents import Residents
from cubinery.aot.ptxsim.state import Gang


class Deadlocks(Residents):
    """What is said of a deadlock. Machine derives from this."""

    stuck: dict[int, list[Gang]]
    """Gangs at a segment that must wait for the rest of their warps."""

    def deadlock(self) -> NoReturn:
        """Say who waits for what."""
        lines: list[str] = []
        diverged = False
        waiting = {warp for parked in self.parked for warp in parked.gang.warps[parked.left].tolist()}
        for number, gangs in self.stuck.items():
            compiled = self.kernel.segments[number]
            for gang in gangs:
                # Where the missing lanes wait at a barrier, that barrier is to blame.
                diverged = diverged or not waiting.issuperset(gang.warps.tolist())
                lanes = gang.lanes()[0]
                lines.append(
                    f"{self._who(gang, np.ones(len(gang), bool))}: lanes {_lane_list(lanes)} wait for the rest of "
                    f"their warp at line {compiled.segment.converge_line}"
                )
        for parked in self.parked:
            instr = self.kernel.instrs[parked.k]
            lines.append(f"{self._who(parked.gang, parked.left)} wait for {parked.why} at line {instr.line}")
        lines += self._barrier_states()
        kind = DivergedFault if diverged else DeadlockFault
        k = self.kernel.segments[next(iter(self.stuck))].index if diverged else next(iter(self.parked)).k
        shown = "; ".join(lines[:24]) + (f"; and {len(lines) - 24} more" if len(lines) > 24 else "")
        raise kind(f"no warp can go on: {shown}", self.place(None, k))

    def _barrier_states(self) -> list[str]:
        lines = []
        for (slot, address), barrier in self.mbarriers.items():
            if barrier.waiting:
                missing = f"{barrier.pending} of {barrier.count} arrivals and {barrier.tx} bytes"
                block = tuple(self.block_index[slot].tolist())
                lines.append(f"the mbarrier at {address:#x} of block {block}, phase {barrier.phase}, misses {missing}")
        for (slot, number), named in self.named.items():
            block = tuple(self.block_index[slot].tolist())
            lines.append(f"barrier {number} of block {block} has {named.arrived} of {named.expected} threads")
        return lines

    def _who(self, gang: Gang, rows: Any) -> str:
        names = []
        for slot in np.unique(gang.cta[rows]).tolist()[:4]:
            warps = (gang.warps[rows & (gang.cta[:, 0] == slot)] % self.wpc).tolist()
            block = tuple(self.block_index[slot].tolist())
            names.append(f"block {block} warps {', '.join(map(str, warps))}")
        return " and ".join(names)


def _lane_list(lanes: Any) -> str:
    numbers = np.flatnonzero(lanes).tolist()
    return ", ".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"
