"""Which kernel meets which trial under which schedule, and the file of JSON lines that makes a campaign resumable."""

from __future__ import annotations

import functools
import itertools
import json
import math
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from proof.bench import Bench
from proof.trials import LONGEST, TRIALS, Trial

from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.runtime.bundle import Bundle, open_all
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import DecodeConfig

SCHEDULES = ("fair:0", "late:0", "delays:0", "priorities:0")
FULL_LENGTH_KEYS = 2
"""Kernels of an implementation that meet case 14 at its full length."""


@dataclass(frozen=True, slots=True)
class Task:
    """One trial of one kernel under one schedule."""

    bundle: Bundle
    key: str
    ptx: str
    """Digest of the kernel's PTX: a kernel that was built anew is run anew."""
    trial: Trial
    schedule: str

    @property
    def id(self) -> tuple[str, str, str, str]:
        return self.key, self.ptx, self.trial.name, self.schedule


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a task; a line of the results file."""

    key: str
    ptx: str
    trial: str
    schedule: str
    error: str
    """A fault, or the statement that did not hold; empty where all is well."""
    o: float
    """Largest relative L2 distance of a row of O from the implementation's reference, of all launches."""
    rms: float
    """Largest root mean square of it over the rows of a launch."""
    lse: float
    exact: float
    """Largest distance of a row of O from attention with exact P."""
    digest: str
    launches: int
    instructions: int
    """Warp instructions."""
    seconds: float
    """All of the task, not only what the simulator took."""

    @property
    def id(self) -> tuple[str, str, str, str]:
        return self.key, self.ptx, self.trial, self.schedule


def tasks(root: Path, *, keys: Sequence[str] = (), trials: Sequence[str] = (),
          schedules: Sequence[str] = SCHEDULES) -> list[Task]:  # fmt: skip
    """The campaign over the bundles at `root`, broad before deep.

    Every round gives each kernel and trial one schedule, another one each round, so that the first already has all
    kernels, all trials and all schedules, if not together. It begins with the first trial of all kernels, and goes on
    with another one of each by turns: wherever it is cut off, every trial has met some of them. `keys` and `trials`
    are texts of which a name must have one.
    """
    kernels = [
        (bundle, artifact.key, artifact.emitted["ptx"].sha256[:16])
        for bundle in open_all(root)
        for artifact in bundle.manifest.artifacts
        if isinstance(parse_key(artifact.key)[0], DecodeConfig)
        and (not keys or any(text in artifact.key for text in keys))
    ]
    chosen = [trial for trial in TRIALS if not trials or any(text in trial.name for text in trials)]
    found = [
        Task(bundle, key, ptx, trial, schedules[(k + t + turn) % len(schedules)])
        for turn in range(len(schedules))
        for step in range(len(chosen))
        for k, (bundle, key, ptx) in enumerate(kernels)
        for t, trial in [_nth(chosen, step, k)]
        if serves(trial, key)
    ]
    if not trials or any(text in LONGEST.name for text in trials):
        long = [kernel for kernel in kernels if _full_length(kernel[1])]
        by_impl = {parse_key(key)[0].impl for _, key, _ in long}
        for impl in sorted(by_impl):
            few = [kernel for kernel in long if parse_key(kernel[1])[0].impl == impl][:FULL_LENGTH_KEYS]
            found += [Task(*kernel, LONGEST, name) for name in schedules[:2] for kernel in few]
    return found


def _nth(chosen: Sequence[Trial], step: int, kernel: int) -> tuple[int, Trial]:
    """(index, trial) of a kernel's turn in a round: the first one, then the others, each kernel at another one."""
    index = 1 + (kernel + step) % (len(chosen) - 1) if step else 0
    return index, chosen[index]


def serves(trial: Trial, key: str) -> bool:
    """Whether a trial means anything for a kernel."""
    return trial.serves(Bench(None, None, key, parse_key(key)[0]))  # type: ignore[arg-type]


def _full_length(key: str) -> bool:
    """Small kernels without optional axes, of one token."""
    config: Any = parse_key(key)[0]
    return Bench(None, None, key, config).plain and config.head_dim == 128 and config.q_len == 1  # type: ignore[arg-type]


def run(task: Task, processes: int = 1) -> Result:
    """Run one task here; faults and broken statements become its error."""
    config, arch = parse_key(task.key)
    schedule = functools.partial(named_schedule, task.schedule)
    driver = SimDriver(arch, [task.bundle], schedule=schedule, processes=processes)
    bench = Bench(driver, Library.open(task.bundle.root, driver=driver), task.key, config)
    error, start = "", time.perf_counter()
    try:
        with watching(driver):
            task.trial.run(bench)
    except Exception as fault:  # noqa: BLE001 - a campaign of hours goes on, whatever one trial raises
        place = traceback.extract_tb(fault.__traceback__)
        line = next((f for f in reversed(place) if "/proof/" in f.filename), place[-1])
        text = str(fault).strip() or (line.line or "")
        error = f"{type(fault).__name__} at {Path(line.filename).name}:{line.lineno}: {text}"
    worst, done = bench.worst, driver.counters
    return Result(
        task.key, task.ptx, task.trial.name, task.schedule, error, worst.o, worst.rms, worst.lse, worst.exact,
        bench.digest, done.launches, done.instructions, round(time.perf_counter() - start, 2),
    )  # fmt: skip


def read(file: Path) -> list[Result]:
    """The results of a file, the last one of each task; none where there is no file."""
    if not file.exists():
        return []
    rows = [Result(**json.loads(line)) for line in file.read_text().splitlines() if line.endswith("}")]
    return list({row.id: row for row in rows}.values())


def campaign(
    found: Sequence[Task], file: Path, *, budget: float = math.inf, jobs: int = 1
) -> Iterator[tuple[int, Result]]:
    """Run what the file does not hold yet and append it, until `budget` seconds are over; yields (tasks left, result).

    What failed before is run again. With several `jobs`, processes take tasks in order, and results come as they end.
    """
    done = {row.id for row in read(file) if not row.error}
    left = [task for task in found if task.id not in done]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.read_bytes().endswith(b"\n"):
        with file.open("a") as stream:  # a line that was cut off
            stream.write("\n")
    end = time.perf_counter() + budget
    for n, result in enumerate(_in_processes(left, end, jobs) if jobs > 1 else _in_turn(left, end)):
        with file.open("a") as stream:
            stream.write(json.dumps(asdict(result)) + "\n")
        yield len(left) - n - 1, result


def _in_turn(left: Sequence[Task], end: float) -> Iterator[Result]:
    for task in left:
        if time.perf_counter() > end:
            return
        yield run(task)


def _in_processes(left: Sequence[Task], end: float, jobs: int) -> Iterator[Result]:
    """No task waits in a queue: the budget decides when it could begin."""
    waiting = iter(left)
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _end_with_parent) as pool:
        running: set[Future[Result]] = set()
        while True:
            for task in itertools.islice(waiting, jobs - len(running) if time.perf_counter() <= end else 0):
                named = task.bundle.root, task.key, task.ptx, task.trial.name, task.schedule
                running.add(pool.submit(_run_named, *named))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                yield future.result()


def _end_with_parent() -> None:
    """A worker whose campaign was killed would wait for its next task for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _run_named(root: Path, key: str, ptx: str, trial: str, schedule: str) -> Result:
    """`run` of a task that another process names: its functions do not travel."""
    (found,) = (candidate for candidate in (*TRIALS, LONGEST) if candidate.name == trial)
    return run(Task(_opened(root), key, ptx, found, schedule))


_opened = functools.lru_cache(maxsize=8)(Bundle.open)
