"""The parts of a run, each measured and printed as it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks import append, batches, paged_decode, peers, report, summary, sweep, sweep_report
from benchmarks.ceilings import COPY_BYTES, ReadFloor, copy_rate
from benchmarks.peer_process import PeerProcess, configurations
from benchmarks.shapes import Shape
from benchmarks.timing import GpuTimer, Timer
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.formats import KV_FORMATS

Say = Callable[..., None]


@dataclass(slots=True)
class Run:
    """What a run works with, and what it has found so far."""

    library: Library
    device: torch.device
    quick: bool
    say: Say
    rows: list[paged_decode.Row] = field(default_factory=list)
    peers: list[PeerProcess] = field(default_factory=list)
    copy_gbps: float | None = None
    sweep: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """By part."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Take the time of a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def copy(self) -> float:
        """The copy rate, measured once."""
        if self.copy_gbps is None:
            with self.part("copy rate"):
                timer = main_timer(self.quick, self.device)
                self.copy_gbps = copy_rate(timer, self.device, COPY_BYTES // 4 if self.quick else COPY_BYTES)
                torch.cuda.empty_cache()
            self.say(f"device-to-device copy: {self.copy_gbps:.0f} GB/s, reads and writes counted", "")
        return self.copy_gbps


def main_timer(quick: bool, device: torch.device) -> Timer:
    """For rows of the main table, ours and peers'."""
    return GpuTimer(device, warmup_ms=10.0, rep_ms=40.0) if quick else GpuTimer(device)


def short_timer(quick: bool, device: torch.device) -> Timer:
    """For the many rows of the sweep, and for read floors."""
    return GpuTimer(device, warmup_ms=5, rep_ms=20 if quick else 50)


def start_peers(run: Run, names: Sequence[str], shapes: Sequence[Shape], formats: Sequence[str]) -> None:
    """Start the processes of the chosen peers and let each make its first calls, which may compile; print both."""
    problems = configurations([(shape, kv_format) for shape in shapes for kv_format in formats])
    with run.part("peers' imports and first calls"):
        make_timer = partial(main_timer, run.quick)
        run.peers += [
            PeerProcess(name, peers.PEERS[name], make_timer, run.device, absent=peers.absent(name)) for name in names
        ]
        for peer in run.peers:
            peer.start()  # all at once: an import takes seconds
        for peer in run.peers:
            peer.join()
            peer.request_first_calls(problems)
        for peer in run.peers:
            calls = list(peer.first_calls(problems))
            if calls:
                longest = max(calls, key=lambda call: call.seconds)
                run.say(
                    f"{peer.name} {peer.version}: first calls of {len(calls)} configurations took "
                    f"{sum(call.seconds for call in calls):.1f} s, longest {longest.seconds:.1f} s ({longest.title})"
                )
            run.say(*(report.cut(f"  {call.title}: {call.error}") for call in calls if call.error))


def decode(run: Run, shapes: Sequence[Shape], formats: Sequence[str]) -> None:
    """Measure and print the main table, then that of all peers."""
    copy_gbps = run.copy()
    say = run.say
    present = any(not peer.absent for peer in run.peers)
    say(report.HEADER + (report.PEER_HEADER if present else ""))
    floor = ReadFloor(short_timer(run.quick, run.device), run.device, quick=run.quick)
    with run.part("decode"):
        for row in paged_decode.measure(
            shapes, formats, run.library, run.peers, main_timer(run.quick, run.device), floor, run.device
        ):
            run.rows.append(row)
            say(report.line(row, copy_gbps, peers=present))
            torch.cuda.empty_cache()
    say(
        "", "us: median of CUDA-graph replays, L2 flushed. GB/s: bytes of K and V over that. /copy: share of the copy",
        "rate. floor: a plain read of the same bytes, same harness; limit: the most it may be over that, ! where it is",
        "more. ours/it: our time over the best peer's; below 1, we are faster.",
    )  # fmt: skip
    if floor.why:
        say(f"no read floor: {floor.why}")
    say("", *report.peer_lines(run.rows, run.peers))


def sweep_all(run: Run) -> None:
    """Measure and print configurations beside their neighbours, all KV formats, and the cache writer."""
    copy_gbps = run.copy()
    floor = ReadFloor(short_timer(run.quick, run.device), run.device, quick=True)
    timer = short_timer(run.quick, run.device)
    with run.part("neighbours"):
        neighbours = sweep.measure_points(sweep.points(), run.library, timer, floor, run.device)
        torch.cuda.empty_cache()
    run.say("", *sweep_report.neighbour_lines(neighbours, copy_gbps))
    with run.part("KV formats"):
        formats = list(sweep.measure_formats(run.library, timer, floor, run.device))
        torch.cuda.empty_cache()
    run.say("", *sweep_report.format_lines(formats, copy_gbps))
    run.sweep |= sweep_report.to_json(neighbours, formats, copy_gbps)
    run.say("", "batches that do not fill the chip", batches.HEADER)
    with run.part("batches"):
        pairs = []
        for pair in batches.measure(run.library, timer, floor, run.device):
            pairs.append(pair)
            run.say(batches.line(pair))
            torch.cuda.empty_cache()
    run.say(*batches.LEGEND, batches.last_line(pairs))
    run.sweep["batches"] = batches.to_json(pairs, copy_gbps)
    with run.part("cache writer"):
        run.say("", "cache writer", append.HEADER)
        written = []
        for row in append.measure(run.library, append.SHAPES, KV_FORMATS, timer, run.device):
            written.append(row)
            run.say(report.cut(append.line(row, copy_gbps)))
            torch.cuda.empty_cache()
    run.say(*append.LEGEND)
    run.sweep["appends"] = sweep_report.appends_json(written, copy_gbps)


def end(run: Run) -> None:
    """Print where the time went, and last what it amounts to."""
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in run.seconds.items())
    run.say("", f"this run took: {spent}")
    if run.rows:
        run.say("", *summary.lines(run.rows))


def failed(run: Run) -> bool:
    """Whether a row of the main table has no time, or one of the sweep failed for another reason than a missing key."""
    swept = [entry for part in run.sweep.values() for entry in part]
    return any(row.ours.time is None for row in run.rows) or any(entry["failed"] for entry in swept)
