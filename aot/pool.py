"""A pool of compile workers, one thread watching them all.

Each worker is a clean process that serves one arch. Cores and memory bound how many live at once; a
crash, a time-out or a refusal costs the one job that met it, and a fresh worker takes over.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cubinery.aot.cache import Compiled
from cubinery.aot.errors import CompileCrashError, CompileError, CompileTimeoutError
from cubinery.aot.worker import DETAIL_LIMIT, Job

START_TIMEOUT_S = 300.0
"""Longest that a worker may take to import the compiler."""

WORKER_MEMORY = 640 << 20
"""Bytes that a worker is assumed to need until one has been seen to need more."""

WORKER_THREADS = 64 + 4 * (os.cpu_count() or 1)
"""Threads beyond which a worker is replaced. The compiler's own pools have one or two a core; more are leaks."""

_BOOT = "import sys; sys.path[:] = {path!r}; from cubinery.aot.worker import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended: `compiled`, or `error` with the compiler's words in `detail`."""

    job: Job
    seconds: float
    peak_memory: int
    compiled: Compiled | None = None
    error: CompileError | None = None
    detail: str = ""


@dataclass(eq=False, slots=True)
class _Worker:
    arch: str
    process: subprocess.Popen[bytes]
    jobs_fd: int
    results_fd: int
    log: Path
    began: float
    deadline: float
    ready: bool = False
    job: Job | None = None
    folder: Path | None = None
    log_start: int = 0
    buffer: bytes = b""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_memory() -> int:
    """Bytes of memory that are free now, or that the control group still grants, whichever is less."""
    found = [1 << 62]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
        found.append(int(text.split()[0]) * 1024)
    for folder, limit, used, cached in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no such control group, or no limit in it
            most, now = (int(Path(folder, name).read_text()) for name in (limit, used))
            stat = dict(line.split() for line in Path(folder, "memory.stat").read_text().splitlines())
            # Pages of files that were read count as used, but go as soon as memory is wanted.
            found.append(max(0, most - now + int(stat[cached])))
    return min(found)


@dataclass(eq=False, slots=True)
class WorkerPool:
    """Runs jobs; use as a context manager, so that no worker outlives the build."""

    slots: int
    timeout_s: float
    memory_bytes: int
    compile_entry: str
    scratch: Path
    """An existing folder for logs and jobs; the caller removes it."""

    worker_memory: int = WORKER_MEMORY
    starts: int = 0
    """Workers started so far."""
    start_seconds: float = 0.0
    """Time that workers spent importing the compiler, summed."""
    _workers: list[_Worker] = field(default_factory=list)
    _pending: dict[str, deque[Job]] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _count: int = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in list(self._workers):
            self._end(worker)
        self._selector.close()

    @property
    def running(self) -> tuple[str, ...]:
        """Keys that are being compiled now."""
        return tuple(worker.job.key for worker in self._workers if worker.job is not None)

    def run(self, jobs: Sequence[Job]) -> Iterator[JobResult]:
        """Yield each job's result as it ends, in any order."""
        for job in jobs:
            self._pending.setdefault(job.arch, deque()).append(job)
        while True:
            yield from self._dispatch()
            if not self._workers:
                return
            wait = max(0.0, min(worker.deadline for worker in self._workers) - time.monotonic())
            for selected, _ in self._selector.select(wait):
                yield from self._receive(selected.data)
            for worker in [w for w in self._workers if w.deadline <= time.monotonic()]:
                yield from self._expired(worker)

    # -- scheduling ------------------------------------------------------------------------------

    def _allowed(self) -> int:
        """Workers that cores and memory permit; one always runs."""
        return max(1, min(self.slots, self.memory_bytes // self.worker_memory))

    def _dispatch(self) -> Iterator[JobResult]:
        for worker in [w for w in self._workers if w.ready and w.job is None]:
            pending = self._pending.get(worker.arch)
            if not pending or len(self._workers) > self._allowed():
                self._end(worker)
            else:
                yield from self._assign(worker, pending.popleft())
        while len(self._workers) < self._allowed():
            arch = self._neediest()
            if arch is None:
                return
            self._start(arch)

    def _neediest(self) -> str | None:
        """The arch whose pending jobs have the fewest workers, if one more would find work.

        Starting a worker takes about as long as a compile: each one that lives is left a job first.
        """
        best, share = None, 0.0
        for arch, pending in self._pending.items():
            workers = sum(worker.arch == arch for worker in self._workers)
            if len(pending) > workers and len(pending) / (workers + 1) > share:
                best, share = arch, len(pending) / (workers + 1)
        return best

    def _start(self, arch: str) -> None:
        jobs_read, jobs_write = os.pipe()
        results_read, results_write = os.pipe()
        self._count += 1
        self.starts += 1
        log = self.scratch / f"worker-{self._count}.log"
        # No device is visible, so that a machine with a GPU builds the same bytes as one without.
        environment = {**os.environ, "CUTE_DSL_ARCH": arch, "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
        boot = _BOOT.format(path=[entry or os.getcwd() for entry in sys.path])
        arguments = [str(jobs_read), str(results_write), str(os.getpid()), arch, self.compile_entry]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", boot, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(jobs_read, results_write),
                start_new_session=True,
            )
        os.close(jobs_read)
        os.close(results_write)
        now = time.monotonic()
        worker = _Worker(arch, process, jobs_write, results_read, log, now, now + START_TIMEOUT_S)
        self._workers.append(worker)
        self._selector.register(results_read, selectors.EVENT_READ, worker)

    def _assign(self, worker: _Worker, job: Job) -> Iterator[JobResult]:
        self._count += 1
        worker.folder = self.scratch / f"job-{self._count}"
        worker.folder.mkdir()
        worker.job = job
        worker.began = time.monotonic()
        worker.deadline = worker.began + self.timeout_s
        worker.log_start = worker.log.stat().st_size
        message = json.dumps({"job": job.to_json(), "folder": str(worker.folder)}) + "\n"
        try:
            os.write(worker.jobs_fd, message.encode())
        except BrokenPipeError:
            yield from self._died(worker)

    # -- what workers say ------------------------------------------------------------------------

    def _receive(self, worker: _Worker) -> Iterator[JobResult]:
        data = os.read(worker.results_fd, 1 << 16)
        if not data:
            yield from self._died(worker)
            return
        worker.buffer += data
        while b"\n" in worker.buffer:
            line, _, worker.buffer = worker.buffer.partition(b"\n")
            message = json.loads(line)
            if "ready" in message:
                worker.ready, worker.deadline = True, float("inf")
                self.start_seconds += time.monotonic() - worker.began
            elif "failed" in message:
                yield from self._unstartable(worker, message["failed"], message["detail"])
                return
            else:
                yield self._finished(worker, message)

    def _finished(self, worker: _Worker, message: dict[str, Any]) -> JobResult:
        job, folder = worker.job, worker.folder
        assert job is not None
        assert folder is not None
        cost = (float(message["seconds"]), int(message["peak_memory"]))
        self.worker_memory = max(self.worker_memory, cost[1])
        if "error" in message:
            error = CompileError(f"{job.key}: {message['error']}")
            result = JobResult(job, *cost, error=error, detail=message["detail"])
        else:
            parts = {name: (folder / name).read_bytes() for name in message["files"]}
            cubin, ptx = parts.pop("cubin"), parts.pop("ptx").decode()
            result = JobResult(job, *cost, compiled=Compiled(cubin, ptx, parts, *cost))
        self._release(worker)
        if int(message["resident"]) > self.memory_bytes // self._allowed() or int(message["threads"]) > WORKER_THREADS:
            self._end(worker)  # it has grown over its share or leaks threads: a fresh one takes the next job
        return result

    def _unstartable(self, worker: _Worker, reason: str, detail: str) -> Iterator[JobResult]:
        """Go on with the workers that did start; where none serves this arch, fail what waits for one."""
        self._end(worker)
        if any(other.arch == worker.arch for other in self._workers):
            self.slots = len(self._workers)  # most likely there is no memory for one more
            return
        for job in self._pending.pop(worker.arch, ()):
            error = CompileError(f"{job.key}: the compile worker cannot start: {reason}")
            yield JobResult(job, 0.0, 0, error=error, detail=detail)

    def _died(self, worker: _Worker) -> Iterator[JobResult]:
        code = worker.process.wait()
        how = _how_it_ended(code)
        detail, job = self._log_tail(worker), worker.job
        if not worker.ready:
            yield from self._unstartable(worker, how, detail)
            return
        seconds = time.monotonic() - worker.began
        self._end(worker)
        if job is not None:
            yield JobResult(job, seconds, 0, error=CompileCrashError(f"{job.key}: the compiler {how}"), detail=detail)

    def _expired(self, worker: _Worker) -> Iterator[JobResult]:
        detail, job = self._log_tail(worker), worker.job
        if not worker.ready:
            yield from self._unstartable(worker, f"not ready after {START_TIMEOUT_S:.0f} s", detail)
            return
        self._end(worker)
        if job is not None:
            error = CompileTimeoutError(f"{job.key}: not compiled after {self.timeout_s:g} s: killed")
            yield JobResult(job, self.timeout_s, 0, error=error, detail=detail)

    def _log_tail(self, worker: _Worker) -> str:
        with contextlib.suppress(OSError), worker.log.open("rb") as log:
            log.seek(worker.log_start)
            return log.read().decode(errors="replace")[-DETAIL_LIMIT:]
        return ""

    def _release(self, worker: _Worker) -> None:
        if worker.folder is not None:
            shutil.rmtree(worker.folder, ignore_errors=True)
        worker.job, worker.folder, worker.deadline = None, None, float("inf")

    def _end(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        self._workers.remove(worker)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        self._selector.unregister(worker.results_fd)
        os.close(worker.jobs_fd)
        os.close(worker.results_fd)
        self._release(worker)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    cause = " (out of memory?)" if name == "SIGKILL" else ""
    return f"crashed with {name}{cause}"
