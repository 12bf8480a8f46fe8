"""Matrix operands that the tensor core reads from shared memory, and wgmma in the machine (PTX ISA 9.7.15)."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubinery.aot.ptxsim.copies import Copies
from cubinery.aot.ptxsim.faults import DescriptorFault, Fault, RaceFault, UninitialisedFault
from cubinery.aot.ptxsim.isa import wgmma
from cubinery.aot.ptxsim.memory import SHARED_BASE
from cubinery.aot.ptxsim.state import Gang, spread

WGMMA = "wgmma"
"""Kind of the groups (groups.py) that wgmma.commit_group closes."""


class Warpgroup(Copies):
    """wgmma as generated code sees it. Machine derives from this.

    A product is computed as it is issued, from what shared memory holds then. That its operands stay in use until
    wgmma.wait_group is known to the race checks: who overwrites them earlier is reported. Each warp's rows depend on no
    other warp, so warps of a warpgroup may come here together or one by one.
    """

    def matrix_read(self, g: Gang, row: int, k: int, slot: int, agent: int, chunks: Any) -> tuple[int, int] | None:
        """The tensor core reads 16-byte chunks of a CTA's shared memory by the async proxy, from now on.

        Bounds, contents, races and proxy fences are checked at issue. Returns what its completion publishes, an agent
        with its clock. `agent` tells apart the readers of a CTA.
        """
        at = np.unique(chunks)
        if int(at[0]) < SHARED_BASE or int(at[-1]) + 16 > self.shared.size:
            found = f"a matrix from {int(at[0]):#x} to {int(at[-1]) + 16:#x}"
            detail = f"{found}: expected {SHARED_BASE:#x} to {self.shared.size:#x}"
            self.fail(DescriptorFault, detail, g, k)
        start = slot * self.shared.stride
        written = self.shared.block.written
        if self.uninitialised and written is not None:
            marks = written.reshape(-1, 16)[(start + at) >> 4].all(axis=1)
            if not marks.all():
                first = int(at[int(np.argmin(marks))])
                self.fail(UninitialisedFault, f"a matrix reads shared memory at {first:#x}, never all written", g, k)
        if self.races is None:
            return None
        unit = self.races.unit
        units = np.unique((start + at[:, None] + np.arange(0, 16, min(unit, 16))) // unit)
        local = self.races.async_agent(slot, agent)
        value = self.races.async_read(self, g, row, k, slot, local, units)
        return self.races.agent(slot, local), value

    def warpgroup_mma(
        self, g: Gang, mask: Any, k: int, form: wgmma.WgmmaForm, accumulators: tuple[Any, ...], a: Any, b: Any,
        scale_d: Any,
    ) -> list[Any]:  # fmt: skip
        """wgmma.mma_async: the new accumulator registers. `a` holds descriptors, or four registers."""
        self._whole_warps(g, mask, k)
        count = len(g)
        old = np.stack([spread(v, count) for v in accumulators], axis=1)
        descriptors = spread(b, count)[:, 0]
        keep = spread(scale_d, count)[:, 0]
        registers = np.stack([spread(v, count) for v in a], axis=1) if form.a_in_registers else None
        first = np.zeros(count, np.uint64) if registers is not None else spread(a, count)[:, 0]
        result = old.copy()
        place = g.warps % self.wpc % wgmma.WARPS
        work: dict[tuple[int, int, int, int, bool], list[int]] = {}
        for row in range(count):
            if mask is None or mask[row].any():
                slot, group = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc // wgmma.WARPS
                key = (slot, group, int(first[row]), int(descriptors[row]), bool(keep[row]))
                work.setdefault(key, []).append(row)
        for (slot, _, a_at, b_at, adds), rows in work.items():
            try:
                chunks = wgmma.operands(form, None if registers is not None else a_at, b_at)
                self._warpgroup_reads(g, rows, k, slot, chunks)
                held = np.zeros((wgmma.WARPS, *old.shape[1:]), np.uint32)
                held[place[rows]] = old[rows]
                source: Any = a_at
                if registers is not None:
                    source = np.zeros((wgmma.WARPS, 4, 32), np.uint32)
                    source[place[rows]] = registers[rows]
                new = wgmma.multiply(form, self.shared.of(slot), source, b_at, held, adds, SHARED_BASE)
            except Fault as error:
                if error.place.kernel:
                    raise
                self.fail(type(error), error.detail, g, k)
            result[rows] = new[place[rows]]
        return list(result.transpose(1, 0, 2))

    def wgmma_misuse(self, g: Gang, k: int, detail: str) -> None:
        """An instruction that accumulators.py found to be wrong is executed."""
        if self.races is not None:
            self.fail(RaceFault, detail, g, k)

    def _warpgroup_reads(self, g: Gang, rows: list[int], k: int, slot: int, chunks: tuple[Any, Any]) -> None:
        for row in rows:
            warp = int(g.warps[row])
            for part in chunks:
                if part is not None:
                    clock = self.matrix_read(g, row, k, slot, -2 - warp % self.wpc // wgmma.WARPS - (1 << 21), part)
                    self.groups.add((WGMMA, warp), clock)()
