"""The command line of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import keys, plots, report, sections
from benchmarks.host import Figure
from benchmarks.host import measure as measure_host
from benchmarks.options import choose, select_device
from benchmarks.peers import PEERS
from benchmarks.shapes import DTYPES, SHAPES, Shape
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library

PROGRAM = "benchmarks"
EXIT_FAILED, EXIT_USAGE = 1, 2


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Measure the kernels of a bundle on this machine's GPU: bandwidth against the copy rate, a plain "
        "read and installed peers, and the host time of the runtime. Nothing of the bundle is compiled here.",
        epilog="Exit codes: 0 all was measured, 1 a kernel is wrong, missing or faulty, 2 the run could not start.",
    )
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR",
                   help="folder of the bundle (default: $CUBINERY_BUNDLE, else build/kernels)")  # fmt: skip
    p.add_argument("--out", type=Path, default=Path("build/bench"), metavar="DIR",
                   help="where results.json, results.md and roofline.png go (default: build/bench)")  # fmt: skip
    p.add_argument("--only", choices=("decode", "sweep", "host"), help="measure one part alone")
    p.add_argument("--sweep", action="store_true",
                   help="also measure every axis beside its neighbours, and all KV formats")  # fmt: skip
    p.add_argument("--shapes", metavar="TEXT[,TEXT]", help="only shapes whose name or title contains one of these")
    p.add_argument("--formats", metavar="KV[,KV]", default=",".join(DTYPES), help="fp8, bf16 (default: both)")
    p.add_argument("--peers", metavar="NAME[,NAME]", default=",".join(PEERS),
                   help=f"peers to measure if installed: {', '.join(PEERS)}, or none (default: all)")  # fmt: skip
    p.add_argument("--quick", action="store_true", help="fewer repeats: for a look, not for a record")
    p.add_argument(
        "--json", action="store_true", help="print JSON to standard output, and the tables to standard error"
    )
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    p.add_argument("--list", action="store_true", help="list the shapes and stop")
    p.add_argument("--keys", metavar="ARCH",
                   help="print the keys that this run needs on ARCH, for `cubinery build --from-misses`, and stop; "
                   "with --sweep, those of the sweep too")  # fmt: skip
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code. Errors of the user's are one line."""
    options = parser().parse_args(argv)
    if options.list:
        for shape in SHAPES:
            print(f"{shape.name:<24} {shape.title}")
        return 0
    try:
        return _print_keys(options) if options.keys else _run(options)
    except CubineryError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except RuntimeError as error:
        if "CUDA" not in str(error):
            raise
        # Out of memory, or a fault that a launch left behind: nothing more runs in this process.
        print(f"{PROGRAM}: error: after what is printed above: {str(error).splitlines()[0]}", file=sys.stderr)
        return EXIT_FAILED


def choose_shapes(text: str | None) -> list[Shape]:
    """Shapes whose name or title holds one of the comma-separated parts. Raises CubineryError where none does."""
    if text is None:
        return list(SHAPES)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    found = [s for s in SHAPES if any(part in s.name or part in s.title for part in parts)]
    if not found:
        raise CubineryError(f"--shapes {text!r} matches none of {', '.join(s.name for s in SHAPES)}")
    return found


def _print_keys(options: argparse.Namespace) -> int:
    problems = keys.wanted(
        choose_shapes(options.shapes), choose("--formats", options.formats, tuple(DTYPES)), swept=options.sweep
    )
    entries, unserved = keys.keys(options.keys, problems)
    for entry in entries + (keys.append_keys(options.keys) if options.sweep else []):
        print(json.dumps(entry))
    for text in unserved:
        print(f"{PROGRAM}: no kernel: {text}", file=sys.stderr)
    return 0


def _run(options: argparse.Namespace) -> int:
    shapes = choose_shapes(options.shapes)
    formats = choose("--formats", options.formats, tuple(DTYPES))
    wanted = choose("--peers", options.peers, tuple(PEERS), none=True)
    parts = {options.only} if options.only else {"decode", "host", *(["sweep"] if options.sweep else [])}
    library = Library.open(options.bundle)
    device = select_device(options.device)
    library.archs_for(options.device)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CubineryError(f"--out {options.out}: cannot be made: {error.strerror}") from error
    stream = sys.stderr if options.json else sys.stdout
    text: list[str] = []

    def say(*lines: str) -> None:
        for line in lines:
            print(line, file=stream, flush=True)
        text.extend(lines)

    where = report.machine(library, options.device)
    say(f"{where.gpu}, driver {where.driver}, torch {where.versions['torch']}", *(f"bundle {b}" for b in where.bundle))
    run = sections.Run(library, device, options.quick, say)
    figures: list[Figure] = []
    plot: str | None = None

    def write() -> dict[str, Any]:
        found = report.to_json(where, run.copy_gbps, run.rows, run.peers, figures, run.sweep)
        (options.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / "results.md").write_text(report.page(where, text, plot=plot), encoding="utf-8")
        return found

    try:
        if "decode" in parts:
            sections.start_peers(run, wanted, shapes, formats)
            sections.decode(run, shapes, formats)
            why = plots.roofline(run.rows, run.copy(), where.gpu, options.out / "roofline.png")
            if why:
                say(f"no plot: {why}")
            else:
                plot = "roofline.png"
            write()  # what was measured is kept, whatever becomes of the rest
    finally:
        for peer in run.peers:
            peer.close()
    if "sweep" in parts:
        sections.sweep_all(run)
        write()
    if "host" in parts:
        with run.part("host"):
            figures, notes = measure_host(library, device, quick=options.quick)
        say("", *report.figure_lines(figures), *notes)
    sections.end(run)
    found = write()
    print(f"written: {options.out}/results.json, results.md" + (f", {plot}" if plot else ""), file=stream)
    if options.json:
        print(json.dumps(found))
    return EXIT_FAILED if sections.failed(run) else 0
