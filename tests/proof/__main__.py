"""The written edge cases on the simulator, over every decode kernel of a bundle, resumable.

    PYTHONPATH=src:tests python -m proof --bundle build/proof --results build/proof.jsonl
    PYTHONPATH=src:tests python -m proof --bundle build/proof --results build/proof.jsonl --summary - --budget 0

The bundle keeps its PTX (`emit: [ptx]`). Ends with status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bundle", type=Path, required=True, help="a folder of bundles, or one")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines: read, skipped and appended to")
    parser.add_argument("--key", action="append", default=[], help="only keys that contain this (repeatable)")
    parser.add_argument("--trial", action="append", default=[], help="only trials whose name contains this")
    parser.add_argument("--schedule", action="append", default=[], help="instead of all four (repeatable)")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which no trial begins")
    parser.add_argument("--jobs", type=int, default=1, help="processes that run trials")
    parser.add_argument("--summary", help="write Markdown of all results to this file; - for standard output")
    options = parser.parse_args()
    from proof.campaign import SCHEDULES, campaign, read, tasks
    from proof.summary import disagreements, summary

    found = tasks(options.bundle, keys=options.key, trials=options.trial, schedules=options.schedule or SCHEDULES)
    for left, row in campaign(found, options.results, budget=options.budget, jobs=options.jobs):
        verdict = row.error or f"O {row.o:.1e}, rms {row.rms:.1e}, LSE {row.lse:.1e}"
        print(f"[{left} left] {row.key} {row.trial}, {row.schedule}: {row.seconds:.1f} s: {verdict}", flush=True)
    ids = {task.id for task in found}
    results = [row for row in read(options.results) if row.id in ids]
    if options.summary:
        text = summary(found, results)
        sys.stdout.write(text) if options.summary == "-" else Path(options.summary).write_text(text)
    wrong = [f"{row.key} {row.trial}, {row.schedule}: {row.error}" for row in results if row.error]
    wrong += disagreements(results)
    for text in wrong:
        print(text, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    # Threads of a small matrix product wait for each other longer than one takes.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    raise SystemExit(main())
