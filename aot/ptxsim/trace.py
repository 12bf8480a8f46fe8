"""A Chrome trace of simulated launches: one row a warp, for chrome://tracing or ui.perfetto.dev.

Time is counted in instructions, one a microsecond of the viewer: each warp runs its own clock, and a warp that
waited goes on at the time of whoever released it. The picture shows what overlaps with what, not how long it takes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.machine import Machine
from cubinery.aot.ptxsim.state import Gang
from cubinery.aot.ptxsim.translate import Compiled

MAX_EVENTS = 1_000_000


class ChromeTrace:
    """A machine's Tracer that collects events; `write` puts them into a file. Launches follow each other in time."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.dropped = 0
        self._machine: Machine | None = None
        self._clock: Any = None
        self._since: dict[int, tuple[int, str]] = {}
        self._now = self._start = 0
        self._launch = 0
        self._before = (0, 0)
        """Events, and those dropped, when the last launch began."""

    def _of(self, machine: Machine) -> None:
        """Begin anew for another launch, after everything so far; shares of one launch begin together."""
        if machine is not self._machine:
            self._machine = machine
            if machine.share == 0:
                self._start, self._launch = self._now, self._launch + 1
                self._before = len(self.events), self.dropped
            self._clock = np.full(len(machine.live), self._start, np.int64)
            self._since.clear()

    def ran(self, machine: Machine, gang: Gang, compiled: Compiled) -> None:
        """A gang has begun a segment."""
        self._of(machine)
        begin = self._clock[gang.warps]
        self._clock[gang.warps] = begin + compiled.count
        self._now = max(self._now, int(begin.max()) + compiled.count)
        line = f"line {compiled.segment.line}"
        lanes = None if gang.mask is None else gang.mask.sum(axis=1).tolist()
        for row, (warp, at) in enumerate(zip(gang.warps.tolist(), begin.tolist(), strict=True)):
            text = {
                "first": compiled.segment.all[0].text if compiled.count else "",
                "lanes": lanes[row] if lanes else 32,
            }
            self._add(machine, warp, line, at, compiled.count, "run", text)

    def waits(self, machine: Machine, gang: Gang, why: str) -> None:
        """Warps have begun to wait."""
        self._of(machine)
        for warp in gang.warps.tolist():
            self._since[warp] = (int(self._clock[warp]), why)

    def woke(self, machine: Machine, gang: Gang, by: Any) -> None:
        """Warps go on, released by the warps `by` (None: by a copy that landed)."""
        self._of(machine)
        at = int(self._clock[by].max()) if by is not None and len(by) else 0
        for warp in gang.warps.tolist():
            since, why = self._since.pop(warp, (at, ""))
            self._clock[warp] = max(int(self._clock[warp]), at)
            if self._clock[warp] > since:
                self._add(machine, warp, f"waits for {why}", since, int(self._clock[warp]) - since, "wait", {})

    def again(self) -> None:
        """The last launch begins anew."""
        kept, self.dropped = self._before
        del self.events[kept:]
        self._now, self._launch, self._machine = self._start, self._launch - 1, None

    def _add(
        self, machine: Machine, warp: int, name: str, at: int, duration: int, category: str, arguments: dict[str, Any]
    ) -> None:
        if len(self.events) >= MAX_EVENTS:
            self.dropped += 1
            return
        block = tuple(machine.block_index[warp // machine.wpc].tolist())
        self.events.append({
            "name": name, "cat": category, "ph": "X", "ts": at, "dur": duration,
            "pid": f"{self._launch} {machine.kernel.entry.name} block {block}", "tid": f"warp {warp % machine.wpc}",
            "args": arguments,
        })  # fmt: skip

    def write(self, path: Path) -> None:
        """Write all events as one JSON document."""
        processes = {name: i for i, name in enumerate(dict.fromkeys(e["pid"] for e in self.events), 1)}
        names = [{"name": "process_name", "ph": "M", "pid": i, "args": {"name": name}} for name, i in processes.items()]
        events = [e | {"pid": processes[e["pid"]], "tid": int(e["tid"].split()[1])} for e in self.events]
        document = {"traceEvents": names + events, "otherData": {"events left out": self.dropped}}
        path.write_text(json.dumps(document), encoding="utf-8")
