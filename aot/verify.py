"""Kernels executed on the simulator and compared with their reference: what `cubinery verify --sim` does.

Each artifact of a bundle runs on a small problem of its own configuration (`aot/problems`), through the same library,
planner and argument packing as on a GPU, once under every schedule; parts of others run within those. An artifact
that nothing ran is a failure.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cubinery.aot.problems import SEED, Subject, check_of, where
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.ptxsim.machine import Checks
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.ptxsim.trace import ChromeTrace
from cubinery.runtime.bundle import Bundle
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import Artifact


@dataclass(frozen=True, slots=True)
class Task:
    """One artifact under one schedule."""

    bundle: Path
    arch: str
    key: str
    schedule: str
    checks: bool = True
    parts: tuple[str, ...] = ()
    """Keys that the artifact requires, which its check may run as well."""

    def concerns(self, texts: Sequence[str]) -> bool:
        """Does the artifact or a part of it hold any of the texts in its key? Every task does where there are none."""
        return not texts or any(text in key for text in texts for key in (self.key, *self.parts))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one task found."""

    key: str
    schedule: str
    error: str
    """A fault, or a distance from the reference beyond its tolerance; empty where all is well."""
    deviation: str
    instructions: int
    """Warp instructions executed."""
    seconds: float
    """Spent executing them."""
    ctas: int
    executed: tuple[str, ...] = ()
    """Keys of the artifacts that were launched."""

    @property
    def ok(self) -> bool:
        return not self.error


def tasks(bundle: Bundle, schedules: Sequence[str], *, checks: bool = True) -> list[Task]:
    """What to run for a bundle. Raises SimError where an artifact has no PTX, or nothing can be run."""
    silent = [a.key for a in bundle.manifest.artifacts if "ptx" not in a.emitted]
    if silent:
        raise SimError(
            f"{bundle.root}: {silent[0]}{f' and {len(silent) - 1} more keep' if len(silent) > 1 else ' keeps'} no PTX, "
            "which is what the simulator executes: build from a spec that says `emit: [ptx]`"
        )
    found = [
        Task(bundle.root, bundle.manifest.arch, artifact.key, name, checks, tuple(artifact.requires))
        for artifact in bundle.manifest.artifacts
        if check_of(artifact.family, artifact.impl) is not None
        for name in schedules
    ]
    if not found:
        raise SimError(f"{bundle.root}: no artifact that aot/problems has a check for, so there is nothing to run")
    return found


def not_run(artifacts: Sequence[Artifact], work: Sequence[Task], outcomes: Sequence[Outcome]) -> list[Outcome]:
    """A failed outcome for each artifact that no task launched, unless a task that might have launched it failed."""
    run = {key for outcome in outcomes for key in outcome.executed}
    failed = {outcome.key for outcome in outcomes if not outcome.ok}
    excused = {key for task in work if task.key in failed for key in (task.key, *task.parts)}
    return [
        Outcome(
            a.key, "every schedule",
            f"nothing ran it: {where(a.family, a.impl)} has no check, and no check of another kernel launches it",
            "", 0, 0.0, 0,
        )
        for a in artifacts
        if a.key not in run | excused
    ]  # fmt: skip


def run_all(work: Sequence[Task], *, jobs: int = 1, trace: Path | None = None) -> Iterator[Outcome]:
    """Run tasks and yield their outcomes as they come: in `jobs` processes, or here where a trace is wanted.

    Where there are fewer tasks than that, what is left over simulates CTAs of one launch side by side.
    """
    if jobs <= 1 or trace is not None or len(work) == 1:
        tracer = None if trace is None else ChromeTrace()
        with contextlib.ExitStack() as stack:
            if tracer is not None and trace is not None:
                stack.callback(tracer.write, trace)
            for task in work:
                yield run(task, tracer, processes=jobs)
        return
    workers = min(jobs, len(work))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, task, processes=jobs // workers) for task in work]):
            yield future.result()


def run(
    task: Task,
    tracer: ChromeTrace | None = None,
    progress: Callable[[int, int], None] | None = None,
    processes: int = 1,
) -> Outcome:
    """Run one task; a fault becomes the outcome's error, as does a kernel without a check."""
    driver = SimDriver(
        task.arch,
        [task.bundle],
        schedule=lambda: named_schedule(task.schedule),
        checks=Checks() if task.checks else Checks.off(),
        processes=processes,
        tracer=tracer,
        progress=progress,
    )
    error = deviation = ""
    try:
        with subject(driver, task) as found:
            check = check_of(found.config.family, found.config.impl)
            if check is None:
                raise SimError(f"{task.key}: {where(found.config.family, found.config.impl)} has no check of it")
            finding = check(found)
        deviation = finding.text
        if not finding.ok:
            error = f"far from the reference: {finding.text}"
    except CubineryError as fault:
        error = str(fault)
    done = driver.counters
    executed = tuple(sorted(driver.executed))
    return Outcome(task.key, task.schedule, error, deviation, done.instructions, done.seconds, driver.ctas, executed)


@contextlib.contextmanager
def subject(driver: SimDriver, task: Task, seed: int = SEED) -> Iterator[Subject]:
    """A task's kernel on a simulator: inside, tensors that torch makes are memory of the simulated device."""

    def place(**tensors: Any) -> dict[str, Any]:
        driver.register_tensors(**tensors)
        return tensors

    with watching(driver):
        yield Subject.of(Library.open(task.bundle, driver=driver), task.key, place, seed)
