"""What the memory of this GPU gives: a device-to-device copy, and a kernel that only reads.

The copy rate (bytes read plus bytes written) is the customary yardstick. A decode kernel writes next to nothing, so
its true floor is the time that a plain read of the same bytes takes, at the same size and in the same harness.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.timing import Time, Timer

try:
    from benchmarks.read_kernel import read
except ImportError as error:
    MISSING = f"triton is not installed ({error})"
else:
    MISSING = ""

COPY_BYTES = 4 << 30

# (elements of a load, loads a CTA, warps): which is best depends on the size, so the floor is the best of all.
CANDIDATES = ((1024, 4, 4), (2048, 4, 8), (2048, 16, 8), (4096, 8, 8), (4096, 32, 8), (2048, 64, 8))
QUICK_CANDIDATES = ((2048, 4, 8), (2048, 16, 8))


def copy_rate(timer: Timer, device: torch.device, size: int = COPY_BYTES) -> float:
    """GB/s of a device-to-device copy, reads and writes counted; smaller than `size` bytes where memory is short."""
    free, _ = torch.cuda.mem_get_info(device)
    size = min(size, free // 4)
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found = timer.time(lambda: target.copy_(source))
    return 2 * size / found.us / 1e3


class ReadFloor:
    """Times of plain reads, by size. `why` says why there are none, where there are none."""

    def __init__(self, timer: Timer, device: torch.device, *, quick: bool = False) -> None:
        self.why = MISSING
        self._timer, self._device = timer, device
        self._candidates = QUICK_CANDIDATES if quick else CANDIDATES
        self._known: dict[int, Time] = {}

    def time(self, size: int) -> Time | None:
        """The best time of reading `size` bytes once; None where it cannot be measured."""
        if self.why:
            return None
        if size not in self._known:
            try:
                self._known[size] = self._measure(size)
            except Exception as error:  # noqa: BLE001 - triton raises whatever its C compiler or ptxas made it raise
                self.why = f"triton cannot run here ({type(error).__name__}: {str(error).splitlines()[0]:.80})"
                return None
        return self._known[size]

    def _measure(self, size: int) -> Time:
        count = size // 4
        x = torch.ones(count, dtype=torch.int32, device=self._device)
        never = torch.zeros(1, dtype=torch.int32, device=self._device)
        best: Time | None = None
        for block, loads, warps in self._candidates:
            grid = (-(-count // (block * loads)),)
            call = partial(read[grid], x, never, count, block, loads, num_warps=warps)
            found = self._timer.time(self._timer.capture(call))
            if best is None or found.us < best.us:
                best = found
        assert best is not None
        return best
