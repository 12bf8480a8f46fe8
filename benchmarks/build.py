"""How well a build uses its machine: `make bench-build ARCH=sm_110a`. Needs the compiler and no GPU.

Builds a spec with an empty cache in a folder of its own, then once more. The ideal wall time is the sum of single
compile times plus one import of the compiler a worker, spread over the workers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WALL_TARGET = 1.2
AGAIN_TARGET_S = 1.0
LEAST_KEYS = 24


class BuildFailed(Exception):
    """A build that ended badly; the message is what it said."""


@dataclass(frozen=True, slots=True)
class Build:
    """One run of the build command."""

    wall_s: float
    """Seconds from the command's start to its end."""
    report: dict[str, Any]
    """Its report.json."""

    @property
    def built(self) -> int:
        return int(self.report["counts"]["built"])


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a build with an empty cache, and the one after it, cost."""

    keys: int
    workers: int
    compile_s: float
    """Sum of single compile times."""
    compile_source: str
    """Where those come from: the build itself, or one worker that had the machine to itself."""
    import_s: float
    """Imports of the compiler, summed over workers."""
    wall_s: float
    again_s: float
    peak_memory: int
    """Bytes of the largest worker."""

    @property
    def ideal_s(self) -> float:
        return (self.compile_s + self.import_s) / self.workers

    @property
    def ratio(self) -> float:
        """Wall time over the ideal."""
        return self.wall_s / self.ideal_s


def efficiency(first: Build, again: Build, alone: Build | None) -> Efficiency:
    """Combine the runs; `alone` is the same build with one worker. Raises BuildFailed where a run was not clean."""
    if first.built < LEAST_KEYS:
        raise BuildFailed(f"{first.built} keys were built: expected at least {LEAST_KEYS}; choose a larger --spec")
    if again.built:
        raise BuildFailed(f"the second build compiled {again.built} keys again: expected all from the cache")
    source = first if alone is None else alone
    return Efficiency(
        keys=first.built,
        workers=int(first.report["workers"]),
        compile_s=float(source.report["compile_seconds"]),
        compile_source="one worker alone" if alone else "the same build",
        import_s=float(first.report["start_seconds"]),
        wall_s=first.wall_s,
        again_s=again.wall_s,
        peak_memory=int(first.report["peak_memory"]),
    )


def lines(e: Efficiency) -> list[str]:
    """The table."""

    def verdict(good: bool) -> str:
        return "yes" if good else "NO"

    rows = [
        ("figure", "measured", "target", "ok"),
        (f"keys, compiled by {e.workers} workers", str(e.keys), "", ""),
        (f"sum of compile times ({e.compile_source})", f"{e.compile_s:.1f} s", "", ""),
        ("imports of the compiler, summed", f"{e.import_s:.1f} s", "", ""),
        ("ideal: both over the workers", f"{e.ideal_s:.1f} s", "", ""),
        ("wall", f"{e.wall_s:.1f} s", f"{WALL_TARGET * e.ideal_s:.1f} s", verdict(e.ratio <= WALL_TARGET)),
        ("wall over ideal", f"{e.ratio:.2f}", f"{WALL_TARGET:.2f}", verdict(e.ratio <= WALL_TARGET)),
        ("second run", f"{e.again_s:.2f} s", f"{AGAIN_TARGET_S:.2f} s", verdict(e.again_s <= AGAIN_TARGET_S)),
        ("peak memory of a worker", f"{e.peak_memory / 1e6:.0f} MB", "", ""),
    ]
    return [f"{name:<52} {measured:>10} {target:>10}  {ok}".rstrip() for name, measured, target, ok in rows]


def run_build(archs: Sequence[str], specs: Sequence[str], out: Path, cache: Path, jobs: int | None) -> Build:
    """Run the build command as a user does. Raises BuildFailed with its first complaint."""
    command = [sys.executable, str(ROOT / "build_kernels.py"), "build", "--json"]
    command += ["--out", str(out), "--cache", str(cache)]
    command += [part for arch in archs for part in ("--arch", arch)]
    command += [part for spec in specs for part in ("--spec", spec)]
    if jobs is not None:
        command += ["--jobs", str(jobs)]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    wall_s = time.perf_counter() - began
    if done.returncode:
        raise BuildFailed(_complaint(done))
    return Build(wall_s, json.loads((out / "report.json").read_text(encoding="utf-8")))


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    try:
        failed = [row for row in json.loads(done.stdout)["rows"] if row["status"] == "failed"]
        return f"{len(failed)} keys failed, the first with {failed[0]['error_type']}: {failed[0]['error']}"
    except (ValueError, KeyError, IndexError, TypeError):
        said = (done.stderr or done.stdout).strip().splitlines()
        return (
            said[-1].removeprefix("cubinery: error: ") if said else f"the build ended with exit code {done.returncode}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.build", description=__doc__.splitlines()[0])
    p.add_argument("--arch", action="append", required=True, help="such as sm_110a; repeat for several")
    p.add_argument(
        "--spec", action="append", default=[], metavar="FILE", help="default: every top-level spec but smoke"
    )
    p.add_argument("--jobs", type=int, metavar="N", help="workers (default: one a core)")
    p.add_argument("--alone", action="store_true",
                   help="also build with one worker, and take the single compile times from there")  # fmt: skip
    p.add_argument("--json", action="store_true", help="print JSON instead of the table")
    options = p.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="cubinery-bench-build-") as name:
            folder = Path(name)
            specs = [str(Path(spec).resolve()) for spec in options.spec]

            def build(run: str, jobs: int | None, cache: str) -> Build:
                return run_build(options.arch, specs, folder / run, folder / cache, jobs)

            first = build("first", options.jobs, "cache")
            again = build("first", options.jobs, "cache")
            alone = build("alone", 1, "cache-alone") if options.alone else None
            found = efficiency(first, again, alone)
    except BuildFailed as error:
        print(f"benchmarks.build: error: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(asdict(found) | {"ideal_s": found.ideal_s, "ratio": found.ratio}))
    else:
        print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
