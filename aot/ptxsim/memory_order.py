"""How strong an access to global memory is, from the words of its instruction (PTX ISA 8.5 to 8.8)."""

from __future__ import annotations

from dataclasses import dataclass

from cubinery.aot.ptxsim.isa.base import Instr

CTA, CLUSTER, GPU, SYSTEM = range(4)
_LEVELS = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": SYSTEM}


@dataclass(frozen=True, slots=True)
class Order:
    """Strength and scope of an access, or of a fence."""

    strong: bool
    """Not weak: two strong accesses whose scopes include each other's threads do not race."""
    acquires: bool
    releases: bool
    level: int
    """Threads that it is strong for: of the CTA, of the cluster, of the GPU, of the system."""
    constant: bool = False
    """ld.global.nc: memory that nothing may write while the kernel runs."""


def order_of(instr: Instr) -> Order:
    """The order of ld, st, atom, red, fence or membar; anything else is a weak access."""
    words = instr.modifiers
    level = next((_LEVELS[w] for w in words if w in _LEVELS), GPU)
    if instr.opcode in ("fence", "membar"):
        return Order(True, True, True, level)
    atomic = instr.opcode in ("atom", "red")
    if "volatile" in words or "mmio" in words:
        return Order(True, False, False, SYSTEM)
    both = "acq_rel" in words
    acquires, releases = both or "acquire" in words, both or "release" in words
    strong = atomic or acquires or releases or "relaxed" in words
    return Order(strong, acquires, releases, level, "nc" in words)
