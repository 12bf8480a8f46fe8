"""How a launch is cut into shares that run on their own, perhaps in processes of their own.

The cut is a function of the kernel and its grid alone, never of the machine that simulates, so results and faults are
the same on any number of cores. Clusters stay whole. A kernel whose CTAs may speak with each other is one share.
"""

from __future__ import annotations

from cubinery.aot.ptxsim.isa.base import Instr
from cubinery.aot.ptxsim.translate import Translation

PAIR = 128
"""CTAs for which there are two shares more. Each takes time for its shadows of memory, and hostile schedules take as
long for half a share as for a whole one."""
LEAST, MOST = 24, 16
"""CTAs of the smallest launch that is cut, and shares of the largest."""
_ELSEWHERE = frozenset({"shared", "shared::cta", "shared::cluster", "local", "param", "const"})
_ORDERED = frozenset({"relaxed", "release", "volatile", "mmio"})
_WIDE = frozenset({"gpu", "sys", "gl"})


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


def shares(kernel: Translation, clusters: int, cluster_size: int) -> list[range]:
    """Clusters of each share, in the order of their numbers: an even count of shares of about equal size."""
    ctas = clusters * cluster_size
    if ctas < LEAST or clusters < 2 or communication(kernel) is not None:
        return [range(clusters)]
    count = min(2 * max(ctas // PAIR, 1), MOST, clusters)
    return [range(clusters * i // count, clusters * (i + 1) // count) for i in range(count)]
