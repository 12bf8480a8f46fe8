"""The arch table: what each supported chip is called and what it holds.

Budgets of kernels, gates of the builder and the planner's defaults read these numbers, so that
nothing queries a device at build time.
"""

from __future__ import annotations

from dataclasses import dataclass

from cubinery.runtime.errors import ArchError

SMEM_RESERVED_PER_CTA = 1024
"""Bytes of shared memory that the hardware keeps for itself in every resident CTA."""


@dataclass(frozen=True, slots=True)
class Arch:
    """One compile target. Sizes are bytes unless a name says otherwise."""

    name: str
    """Canonical name, as ptxas spells it: `sm_90a`."""
    sm: int
    """The SM number that the cubin's ELF flags must hold: 90, 100, 103, 110."""
    compute_capability: tuple[int, int]
    """What the driver reports for the chip that this target is for."""
    chip: str
    sms: int
    """Streaming multiprocessors of that chip; the runtime asks the real device."""
    smem_per_sm: int
    smem_per_cta: int
    """Most shared memory one CTA may opt in to."""
    tmem_columns: int
    """Tensor memory columns an SM holds; 0 where there is none."""
    registers_per_sm: int
    threads_per_sm: int
    ctas_per_sm: int
    l2: int
    bandwidth_gbps: int
    """Datasheet memory bandwidth in GB/s."""
    clock_mhz: int
    """Highest clock of the SMs, about."""
    latency_ns: int
    """From a load to its data where the memory is busy: assumed, and what rings of loads in flight are sized by."""
    aliases: tuple[str, ...] = ()
    family: str | None = None
    """Family target (`sm_100f`) whose cubins this chip runs too, if a bundle declares one."""

    @property
    def bytes_per_ns(self) -> float:
        """One SM's share of the memory bandwidth, bytes a nanosecond."""
        return self.bandwidth_gbps / self.sms

    @property
    def latency_bytes(self) -> int:
        """Bytes that must be on their way to one SM at any time to use its share of the bandwidth."""
        return round(self.bytes_per_ns * self.latency_ns)

    def smem_budget(self, ctas_per_sm: int) -> int:
        """Most dynamic shared memory a CTA may use so that `ctas_per_sm` of them fit one SM."""
        return min(self.smem_per_cta, self.smem_per_sm // ctas_per_sm - SMEM_RESERVED_PER_CTA)


def _arch(
    name: str,
    sm: int,
    cc: tuple[int, int],
    chip: str,
    sms: int,
    tmem: int,
    l2_mib: int,
    bw: int,
    clock: int,
    aliases: tuple[str, ...] = (),
    family: str | None = None,
) -> Arch:
    return Arch(
        name=name,
        sm=sm,
        compute_capability=cc,
        chip=chip,
        sms=sms,
        smem_per_sm=228 * 1024,
        smem_per_cta=227 * 1024,
        tmem_columns=tmem,
        registers_per_sm=65536,
        threads_per_sm=2048 if sm != 110 else 1536,
        ctas_per_sm=32 if sm != 110 else 24,
        l2=l2_mib << 20,
        bandwidth_gbps=bw,
        clock_mhz=clock,
        latency_ns=1000,
        aliases=aliases,
        family=family,
    )


ARCHS: dict[str, Arch] = {
    a.name: a
    for a in (
        _arch("sm_90a", 90, (9, 0), "H200", 132, 0, 60, 4800, 1980, aliases=("sm90a", "hopper", "h100", "h200")),
        _arch("sm_100a", 100, (10, 0), "B200", 148, 512, 126, 8000, 1965, aliases=("sm100a", "b200"),
              family="sm_100f"),
        _arch("sm_103a", 103, (10, 3), "B300", 148, 512, 126, 8000, 1965, aliases=("sm103a", "b300"),
              family="sm_100f"),
        # CUDA 12 called Thor sm_101; CUDA 13 renamed it. The canonical name is the one that loads.
        _arch("sm_110a", 110, (11, 0), "Jetson AGX Thor", 20, 512, 32, 273, 1575,
              aliases=("sm110a", "sm_101a", "sm101a", "thor"), family="sm_110f"),
    )
}  # fmt: skip


def resolve(name: str) -> Arch:
    """The arch of a canonical name or alias (any case). Raises ArchError naming what is known."""
    wanted = name.strip().lower()
    for arch in ARCHS.values():
        if wanted == arch.name or wanted in arch.aliases:
            return arch
    raise ArchError(f"unknown arch {name!r}: expected one of {', '.join(ARCHS)} (or an alias such as 'thor', 'h200')")


def served_by(compute_capability: tuple[int, int]) -> tuple[str, ...]:
    """Targets whose cubins a device of this compute capability runs, best first.

    The exact `a` target, then the family target. Never a numeric comparison: code for one chip of a
    generation can compute garbage on its neighbour.
    """
    for arch in ARCHS.values():
        if arch.compute_capability == compute_capability:
            return (arch.name,) if arch.family is None else (arch.name, arch.family)
    return ()
