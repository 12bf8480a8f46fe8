"""What a build did, row by row: for the table at its end and for `report.json`."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

REPORT_NAME = "report.json"
REPORT_VERSION = 1

Status = Literal["built", "cached", "failed"]


@dataclass(frozen=True, slots=True)
class BuildRow:
    """One key's fate. Sizes in bytes; a figure that a failure kept from being known is None."""

    key: str
    arch: str
    status: Status
    origin: str
    """`file:line` of the spec that asked for it."""
    seconds: float = 0.0
    """Time this build spent compiling it: 0 where it was cached."""
    peak_memory: int | None = None
    cubin_size: int | None = None
    registers: int | None = None
    stack: int | None = None
    """Stack frame per thread: spills and indexed arrays."""
    static_smem: int | None = None
    dynamic_smem: int | None = None
    ctas_per_sm: int | None = None
    """CTAs that fit one SM."""
    limited_by: str | None = None
    """What keeps more of them from fitting."""
    error_type: str | None = None
    error: str | None = None
    detail: str = ""
    """The compiler's own words on a failure."""


@dataclass(frozen=True, slots=True)
class BuildReport:
    """A finished build."""

    rows: tuple[BuildRow, ...]
    """Sorted by key."""
    warnings: tuple[str, ...]
    seconds: float
    jobs: int
    """Workers that were allowed to run at once."""
    workers: int
    """Workers that were started."""
    start_seconds: float
    """Time that workers spent importing the compiler, summed."""
    bundles: tuple[str, ...]
    """Folders of the bundles that were written or confirmed."""

    @property
    def ok(self) -> bool:
        """True where every key is in its bundle."""
        return all(row.status != "failed" for row in self.rows)

    def count(self, status: Status) -> int:
        """How many keys ended so."""
        return sum(row.status == status for row in self.rows)

    @property
    def compile_seconds(self) -> float:
        """Sum of the single compile times."""
        return sum(row.seconds for row in self.rows)

    @property
    def peak_memory(self) -> int:
        """Most bytes that any one worker held in this build; 0 where nothing was compiled."""
        return max((row.peak_memory or 0 for row in self.rows if row.seconds), default=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data: what `report.json` holds."""
        return {
            "version": REPORT_VERSION,
            "ok": self.ok,
            "seconds": round(self.seconds, 3),
            "compile_seconds": round(self.compile_seconds, 3),
            "start_seconds": round(self.start_seconds, 3),
            "jobs": self.jobs,
            "workers": self.workers,
            "peak_memory": self.peak_memory,
            "counts": {status: self.count(status) for status in ("built", "cached", "failed")},
            "bundles": list(self.bundles),
            "warnings": list(self.warnings),
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }

    def dumps(self) -> bytes:
        """`report.json` as bytes."""
        return (json.dumps(self.to_json(), indent=2) + "\n").encode()
