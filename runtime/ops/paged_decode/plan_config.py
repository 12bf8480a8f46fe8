"""The planning kernel's configuration; imports neither numpy, torch nor the compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cubinery.runtime.config import KernelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(KernelConfig):
    """The kernel that plans a decode step from lengths on the device. One serves every decode: it has no axes."""

    family: ClassVar[str] = "paged_decode"
    impl: ClassVar[str] = "plan"

    # -- derived, never enumerated -------------------------------------------------------------

    THREADS: ClassVar[int] = 1024
    """Threads of the one CTA."""

    MAX_SEQS: ClassVar[int] = 4096
    """Most sequences of a plan: what shared memory holds of each."""

    SCRATCH: ClassVar[int] = 128
    """int32 that warps hand results to each other in."""

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory: four int32 a sequence, and a key and a place for each of its two runs of items."""
        return 4 * self.SCRATCH + self.MAX_SEQS * 4 * 4 + 2 * self.MAX_SEQS * (8 + 4)
