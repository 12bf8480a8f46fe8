"""What a kernel can do wrong, each with its name and the place where it happened."""

from __future__ import annotations

from dataclasses import dataclass, field

from cubinery.aot.ptxsim.errors import SimError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a fault happened, as far as it is known."""

    kernel: str = ""
    line: int = 0
    """Line of the PTX text."""
    text: str = ""
    source: tuple[str, int] | None = None
    block: tuple[int, int, int] | None = None
    warp: int = -1
    """Warp in its CTA."""
    lane: int = -1

    def __str__(self) -> str:
        parts = [self.kernel]
        if self.line:
            parts.append(f"PTX line {self.line}")
        if self.source is not None:
            parts.append(f"{self.source[0]}:{self.source[1]}")
        if self.block is not None:
            parts.append("block ({}, {}, {})".format(*self.block))
        if self.warp >= 0:
            parts.append(f"warp {self.warp}")
        if self.lane >= 0:
            parts.append(f"lane {self.lane}")
        where = ", ".join(part for part in parts if part)
        return f"{where}: {self.text}" if self.text else where


class Fault(SimError):  # noqa: N818
    """Base of all faults. `place` says where, `detail` what."""

    def __init__(self, detail: str, place: Place = Place()) -> None:
        super().__init__(f"{type(self).__name__}: {detail} [{place}]")
        self.detail, self.place = detail, place

    def __reduce__(self) -> tuple[type[Fault], tuple[str, Place]]:
        return type(self), (self.detail, self.place)


class OutOfBoundsFault(Fault):
    """An access outside every allocation of its state space."""


class MisalignedFault(Fault):
    """An address that is no multiple of the access's size."""


class UninitialisedFault(Fault):
    """A read of memory that nothing has written."""


class RaceFault(Fault):
    """Two accesses to shared memory, one of them a write, that nothing orders."""


class ProxyFault(Fault):
    """Data written by ordinary stores and read by the async proxy without the proxy fence between."""


class DeadlockFault(Fault):
    """No warp can go on; the detail lists who waits for what."""


class DivergedFault(Fault):
    """An instruction that all lanes must execute together, executed by some."""


class BarrierFault(Fault):
    """A barrier used against its rules: not initialised, overflowing, wrong thread count, wrong participants."""


class TransactionFault(Fault):
    """A barrier's transaction count that does not balance at the kernel's end, or overflows."""


class LaunchFault(Fault):
    """A launch that the chip could not carry out."""


class TrapFault(Fault):
    """The kernel executed trap."""


class DescriptorFault(Fault):
    """A malformed descriptor or tensor map, or one that points outside."""


class TensorMemoryFault(Fault):
    """Tensor memory over-allocated, leaked, or touched outside an allocation or out of order."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """One line of a deadlock's report."""

    what: str
    line: int
    warps: tuple[str, ...] = field(default=())
