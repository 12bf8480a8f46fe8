"""The compile worker: a clean process that serves one arch, one job after the other.

Started by `cubinery.aot.pool` with two pipes. Jobs come in as JSON lines, results go out the same
way; compiled files are left in the job's own folder. Standard output and error go to a log that the
builder reads when the process dies. Nothing here imports the compiler: the compile entry does.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cubinery.aot.cache import Compiled

_PR_SET_PDEATHSIG = 1
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
DETAIL_LIMIT = 20_000
"""Most characters of a compiler's message that travel back."""


@dataclass(frozen=True, slots=True)
class Job:
    """One configuration to compile, as plain data."""

    key: str
    family: str
    impl: str
    axes: dict[str, Any]
    arch: str
    hosts: tuple[str, ...]
    """Host objects to make beside the cubin: `object`, `object-linux-aarch64`."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for a pipe."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """The inverse of `to_json`."""
        return cls(**{**data, "hosts": tuple(data["hosts"])})


CompileEntry = Callable[[Job, Path], Compiled]
"""Compiles a job; the folder is private, empty, and removed afterwards."""


def main(argv: list[str]) -> None:
    """Serve jobs until the pipe closes: `jobs_fd results_fd parent_pid arch module:function`."""
    jobs_fd, results_fd, parent, arch, entry = int(argv[0]), int(argv[1]), int(argv[2]), argv[3], argv[4]
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the builder decides what an interrupt means
    with os.fdopen(jobs_fd, encoding="utf-8") as jobs, os.fdopen(results_fd, "w", encoding="utf-8") as results:

        def reply(message: dict[str, Any]) -> None:
            results.write(json.dumps(message) + "\n")
            results.flush()

        began = time.perf_counter()
        try:
            compile_job = _load(entry, arch)
        except Exception as error:  # noqa: BLE001 - whatever stops the compiler from loading is reported
            reply({"failed": _first_line(error), "detail": _detail()})
            return
        reply({"ready": True, "seconds": time.perf_counter() - began})
        for line in jobs:
            message = json.loads(line)
            reply(_serve(compile_job, Job.from_json(message["job"]), Path(message["folder"])))


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when the builder dies, however it dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        sys.exit(0)


def _load(entry: str, arch: str) -> CompileEntry:
    module_name, _, function = entry.partition(":")
    module = importlib.import_module(module_name)
    prepare = getattr(module, "prepare", None)
    if prepare is not None:
        prepare(arch)
    loaded: CompileEntry = getattr(module, function)
    return loaded


def _serve(compile_job: CompileEntry, job: Job, folder: Path) -> dict[str, Any]:
    _reset_peak()
    began = time.perf_counter()
    scratch = folder / "scratch"
    scratch.mkdir()
    try:
        compiled = compile_job(job, scratch)
        names = {"cubin": compiled.cubin, "ptx": compiled.ptx.encode(), **compiled.objects}
        for name, data in names.items():
            (folder / name).write_bytes(data)
    except Exception as error:  # noqa: BLE001 - one configuration fails, the worker lives on
        return {"error": _first_line(error), "detail": _detail(), **_cost(began)}
    return {"files": list(names), **_cost(began)}


def _cost(began: float) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - began,
        "peak_memory": _peak(),
        "resident": _kib("VmRSS"),
        "threads": _status("Threads"),
    }


def _first_line(error: BaseException) -> str:
    """An exception in one line: its heading, what a heading that ends in a colon announces, and the place.

    The compiler's messages are pages in colour, with the place in the user's code behind an arrow.
    """
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = lines[0]
    if said.endswith(":") and len(lines) > 1:
        said = f"{said} {lines[1]}"
    places = [line.removeprefix("-->").strip() for line in lines if line.startswith("-->")]
    return f"{type(error).__name__}: {said}" + (f" (at {places[0]})" if places else "")


def _detail() -> str:
    return _ANSI.sub("", traceback.format_exc())[-DETAIL_LIMIT:]


def _reset_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Most bytes held since the last reset; since the start where the kernel offers no reset."""
    return _kib("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _kib(name: str) -> int:
    """Bytes, of a line that counts KiB."""
    return _status(name) * 1024


def _status(name: str) -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return 0
