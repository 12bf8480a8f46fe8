"""GPU time of a call as a serving engine makes it: replayed as a CUDA graph, with nothing of it in L2.

What a replay costs beside its kernels, some 5 us between the two events, is not the same for every graph. The first two
or three that a process captures take 0.3 us less than all of them do from then on, and later ones differ by 0.2 us for
as long as they live. A step of 10 us would show that as a difference between kernels; so every timer begins with graphs
that nobody times, and what is timed was captured several times.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_cuda: Any = torch.cuda  # partly untyped

FLUSH_BYTES = 256 << 20
LEAST_REPEATS, MOST_REPEATS = 10, 1000
GRAPHS = 3
"""Graphs that a captured call has."""

SETTLING_GRAPHS = 8
"""Graphs that a process captures before it times any."""


def wait(device: torch.device) -> None:
    """Wait for all work of a device; tensors on the CPU have none."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Time:
    """Microseconds over many calls."""

    us: float
    """The median."""
    p20: float
    p80: float
    repeats: int


class Timer(Protocol):
    """How calls are timed."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """What repeats `call`, as it last was, without the host's share of it."""

    def time(self, call: Callable[[], object]) -> Time: ...


class GpuTimer:
    """Times with events around each call; before each call a write as large as several L2 caches evicts its data.

    That write also keeps the GPU busy while the host enqueues, so that launch gaps do not count.
    """

    def __init__(self, device: torch.device, *, warmup_ms: float = 30.0, rep_ms: float = 150.0) -> None:
        self.device, self.warmup_ms, self.rep_ms = device, warmup_ms, rep_ms
        l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._flush = torch.empty(max(FLUSH_BYTES, 4 * l2), dtype=torch.uint8, device=device)
        small = self._flush[:4096]
        settling = [self._graph(small.zero_) for _ in range(SETTLING_GRAPHS)]
        for replay in settling:
            replay()

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        """Capture `call` as several graphs; returns what replays them in turn, the one captured last first."""
        return in_turn([self._graph(call) for _ in range(GRAPHS)][::-1])

    def _graph(self, call: Callable[[], object]) -> Callable[[], object]:
        """Run `call` once on a side stream, as CUDA graphs want it, and capture it; returns the replay."""
        side = _cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        graph = _cuda.CUDAGraph()
        with _cuda.graph(graph):
            call()
        replay: Callable[[], object] = graph.replay
        return replay

    def time(self, call: Callable[[], object]) -> Time:
        """The median of as many calls as fit `rep_ms`."""
        call()
        torch.cuda.synchronize(self.device)
        whole_ms = self._span(5, call)
        for _ in range(max(1, int(self.warmup_ms / whole_ms))):
            call()
        repeats = min(MOST_REPEATS, max(LEAST_REPEATS, int(self.rep_ms / whole_ms)))
        starts = [_cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [_cuda.Event(enable_timing=True) for _ in range(repeats)]
        for start, end in zip(starts, ends, strict=True):
            self._flush.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        times = [start.elapsed_time(end) * 1e3 for start, end in zip(starts, ends, strict=True)]
        cuts = statistics.quantiles(times, n=5)
        return Time(statistics.median(times), cuts[0], cuts[-1], repeats)

    def _span(self, repeats: int, call: Callable[[], object]) -> float:
        """Milliseconds of one flush and call, roughly."""
        start, end = _cuda.Event(enable_timing=True), _cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            self._flush.zero_()
            call()
        end.record()
        torch.cuda.synchronize(self.device)
        return max(1e-3, float(start.elapsed_time(end)) / repeats)


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """A call that makes the next of `calls` each time, and begins anew after the last."""
    following = itertools.cycle(calls)

    def call() -> object:
        return next(following)()

    return call
