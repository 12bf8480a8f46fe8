"""`verify --sim`: kernels on the simulator, with progress and speed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cubinery.aot.commands.common import MachineError, UserError, plural, show_table

if TYPE_CHECKING:
    from cubinery.aot.verify import Outcome


def simulate(
    bundle: Path, schedules: int, keys: Sequence[str], trace: Path | None, checks: bool, jobs: int | None
) -> list[Outcome]:
    """Run every artifact of the bundles at `bundle` under that many schedules. Raises SimError, UserError."""
    for module in ("numpy", "torch"):
        if importlib.util.find_spec(module) is None:
            raise MachineError(f"--sim needs {module}, which is not installed: `pip install {module}`")
    # Threads of a small matrix product wait for each other longer than one takes; cores are for runs side by side.
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from cubinery.aot.ptxsim.schedule import series
    from cubinery.aot.verify import not_run, run_all, tasks
    from cubinery.runtime.bundle import open_all

    bundles = open_all(bundle)
    work = [task for found in bundles for task in tasks(found, series(schedules), checks=checks)]
    chosen = [task for task in work if task.concerns(keys)]
    if not chosen:
        raise UserError(f"--key {' '.join(keys)}: no key of {bundle} contains it")
    outcomes = []
    with _progress(len(chosen)) as show:
        for outcome in run_all(chosen, jobs=jobs or os.cpu_count() or 1, trace=trace):
            outcomes.append(outcome)
            show(outcome)
    order = {(task.key, task.schedule): i for i, task in enumerate(chosen)}
    outcomes.sort(key=lambda o: order[o.key, o.schedule])
    artifacts = [a for found in bundles for a in found.manifest.artifacts]
    wanted = [a for a in artifacts if not keys or any(text in a.key for text in keys)]
    return outcomes + not_run(wanted, chosen, outcomes)


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """One line for each key, then every failure in full."""
    rows = []
    for key in dict.fromkeys(o.key for o in outcomes):
        own = [o for o in outcomes if o.key == key]
        status = "ok" if all(o.ok for o in own) else f"{sum(not o.ok for o in own)} FAILED"
        count, seconds = sum(o.instructions for o in own), sum(o.seconds for o in own)
        rows.append((key, plural(len(own), "schedule"), status, str(own[0].ctas), f"{count:,}", speed(count, seconds)))
    show_table(("simulated", "under", "result", "CTAs", "warp instructions", "speed"), rows)
    for outcome in outcomes:
        if not outcome.ok:
            click.echo(f"{outcome.key} under {outcome.schedule}: {outcome.error}")
    count, seconds = sum(o.instructions for o in outcomes), sum(o.seconds for o in outcomes)
    click.echo(f"{count:,} warp instructions in {seconds:.1f} s of simulation: {speed(count, seconds)}")


def speed(instructions: int, seconds: float) -> str:
    return f"{instructions / seconds / 1e6:.2f} M/s" if seconds else "-"


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Outcome], None]]:
    """A bar on a terminal, one line per run elsewhere; on stderr."""
    if not sys.stderr.isatty():
        done = 0

        def line(outcome: Outcome) -> None:
            nonlocal done
            done += 1
            what = outcome.deviation if outcome.ok else outcome.error
            rate = speed(outcome.instructions, outcome.seconds)
            click.echo(f"[{done}/{total}] {outcome.key} under {outcome.schedule}: {rate}: {what}", err=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("simulating", total=total, now="")

        def update(outcome: Outcome) -> None:
            rate = speed(outcome.instructions, outcome.seconds)
            bar.update(task, advance=1, now=f"{rate} {outcome.key} {outcome.schedule}")

        yield update
