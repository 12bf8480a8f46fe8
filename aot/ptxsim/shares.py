"""How a launch is cut into shares that run on their own, perhaps in processes of their own.

The cut is a function of the kernel and its grid alone, never of the machine that simulates, so results and faults are
the same on any number of cores. Clusters stay whole. CTAs that cannot speak with each other are cut by their numbers.

CTAs that can, through global memory, do so in groups, and an axis of the grid mostly separates these: the splits of a
sequence that a decode merges are of one KV head, which is the block's y. Such a kernel is cut along y; that its shares
had nothing to do with each other is proved once they have run (independence.py), and else it is run again, whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cubinery.aot.ptxsim.isa.base import Instr
from cubinery.aot.ptxsim.translate import Translation

PAIR = 128
"""CTAs for which there are two shares more. Each takes time for its shadows of memory, and hostile schedules take as
long for half a share as for a whole one."""
LEAST, MOST = 24, 16
"""CTAs of the smallest launch that is cut, and shares of the largest."""
LEAST_SUPPOSED = 256
"""CTAs of the smallest launch that is cut where its shares must prove to be some. With fewer, segments run for too few
CTAs at a time: that costs more than a second process gains (measured: docs/results/ptxsim.md)."""
_ELSEWHERE = frozenset({"shared", "shared::cta", "shared::cluster", "local", "param", "const"})
_ORDERED = frozenset({"relaxed", "release", "volatile", "mmio"})
_WIDE = frozenset({"gpu", "sys", "gl"})

Dim3 = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The shares of a launch."""

    shares: Sequence[Sequence[int]]
    """Clusters of each, by their numbers in the grid."""
    supposed: bool = False
    """Whether it is only supposed that the shares have nothing to do with each other."""


def communication(kernel: Translation) -> Instr | None:
    """The first instruction by which a CTA may tell another of the grid something; None where there is none.

    That takes an atomic or an ordered store to global memory, or a fence wider than a cluster (PTX ISA, chapter 8:
    without them a write is not ordered before anybody's read). Loads alone tell nobody anything.
    """
    return next((instr for instr in kernel.instrs if _speaks(instr)), None)


def _speaks(instr: Instr) -> bool:
    words = frozenset(instr.modifiers)
    match instr.opcode:
        case "atom" | "red":
            return "async" not in words and not words & _ELSEWHERE
        case "st":
            return "async" not in words and not words & _ELSEWHERE and bool(words & _ORDERED)
        case "fence" | "membar":
            return bool(words & _WIDE)
        case "cp":
            spaces = [w for w in instr.modifiers if w == "global" or w in _ELSEWHERE]
            return instr.modifiers[:1] == ("reduce",) and spaces[:1] == ["global"]
        case _:
            return False


def cut(kernel: Translation, grid: Dim3, cluster: Dim3) -> Cut:
    """Shares of about equal size, in the order of their first clusters: an even count where there are as many parts."""
    x, y, z = (n // c for n, c in zip(grid, cluster, strict=True))
    clusters, ctas = x * y * z, grid[0] * grid[1] * grid[2]
    supposed = communication(kernel) is not None
    parts = y if supposed else clusters
    if ctas < (LEAST_SUPPOSED if supposed else LEAST) or parts < 2:
        return Cut([range(clusters)])
    count = min(2 * max(ctas // PAIR, 1), MOST, parts)
    bounds = [(parts * i // count, parts * (i + 1) // count) for i in range(count)]
    if not supposed:
        return Cut([range(*ends) for ends in bounds])
    return Cut([[n for n in range(clusters) if start <= n // x % y < stop] for start, stop in bounds], supposed=True)
