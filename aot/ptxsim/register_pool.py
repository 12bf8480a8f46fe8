"""setmaxnreg: warps that give registers back to their CTA and take them (PTX ISA 9.7.19.5).

A CTA has the registers that it was launched with. An increase waits on the chip until there are enough; here registers
hold no values, so nobody waits, and an increase that no warp ever made room for is reported when the CTA has exited.
Registers of a warp that exits are given back on the chip, as the silicon corpus shows; the check does not count on it,
and leaves out kernels without barriers, whose warps always get to their exit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LOWEST, HIGHEST, STEP = 24, 256, 8
Array = Any


class RegisterPool:
    """Registers a thread of every warp of the resident CTAs."""

    def __init__(self, slots: int, wpc: int, registers: int, warps_wait: bool) -> None:
        """`registers`: those a thread is launched with; 0 where that is not known, and nothing is checked.

        `warps_wait`: a warp may wait for others, so that one that lacks registers can hold them up for ever.
        """
        self.warps_wait = warps_wait
        self.at_launch = -(-registers // STEP) * STEP
        self.pool = self.at_launch * wpc
        self.held = np.full((slots, wpc), self.at_launch, np.int64)
        self.owed: dict[int, list[tuple[int, int]]] = {}
        """By slot: increases (warp, registers) that found too few."""

    def start(self, slot: int) -> None:
        """A new CTA in a slot."""
        self.held[slot] = self.at_launch
        self.owed.pop(slot, None)

    def set(self, slot: int, warp: int, count: int, increase: bool) -> str:
        """A warp executes setmaxnreg; what is wrong with that, or nothing."""
        if count % STEP or not LOWEST <= count <= HIGHEST:
            return f"setmaxnreg to {count}: expected a multiple of {STEP} from {LOWEST} to {HIGHEST}"
        if not self.at_launch:
            return ""
        held = int(self.held[slot, warp])
        if (count < held) if increase else (count > held):
            return f"setmaxnreg.{'inc' if increase else 'dec'} to {count} registers from {held}"
        waiting = self.owed.setdefault(slot, [])
        if increase:
            waiting.append((warp, count))
        else:
            self.held[slot, warp] = count
        while waiting and self.held[slot].sum() - self.held[slot, waiting[0][0]] + waiting[0][1] <= self.pool:
            taker, wanted = waiting.pop(0)
            self.held[slot, taker] = wanted
        return ""

    def lacking(self, slot: int) -> str:
        """Of a CTA that has exited: an increase that could not be; nothing where all could."""
        waiting = self.owed.get(slot)
        if not waiting or not self.warps_wait:
            return ""
        warp, wanted = waiting[0]
        others = int(self.held[slot].sum() - self.held[slot, warp])
        count = self.held.shape[1]
        return (
            f"warp {warp} waits for ever for {wanted} registers a thread: the other {count - 1} warps hold {others} of "
            f"the {self.pool} that {count} warps were launched with"
        )
