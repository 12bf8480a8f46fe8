"""Host time of the runtime: what a serving loop pays beside the GPU's work.

Every figure is the median of many repeats on this machine. `plan.run` is compared with a C loop over
cuLaunchKernelEx that launches the same kernels with the same parameters in turns with it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import launch_loop
from benchmarks.shapes import Problem, Shape
from benchmarks.timing import wait
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.kernel import BoundLaunch
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import MANIFEST_NAME, Artifact, Manifest
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan
from cubinery.runtime.ops.paged_decode.streams import Upload, raw_stream

_cuda: Any = torch.cuda  # partly untyped

RUN_SLACK_US = 3.0
PLAN_TARGET_US = 100.0
OPEN_TARGET_MS = 30.0
OPEN_KEYS = 100
FIRST_LAUNCH_TARGET_MS = 5.0
IMPORT_TARGET_MS = 100.0

BURST = 100
"""Steps between two synchronisations: few enough that the driver's launch queue never fills and blocks."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure and what it must not exceed (None: for information)."""

    name: str
    measured: float
    unit: str
    target: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether it meets its target; None where it has none."""
        return None if self.target is None else self.measured <= self.target

    @property
    def verdict(self) -> str:
        return {None: "", True: "yes", False: "NO"}[self.ok]


def measure(library: Library, device: torch.device, *, quick: bool = False) -> tuple[list[Figure], list[str]]:
    """(figures, notes). Raises CubineryError where the bundle lacks the kernels: head_dim 128, page 16 or 64."""
    notes: list[str] = []
    with torch.cuda.stream(_cuda.Stream(device)):  # as serving loops do; the default stream has rules of its own
        figures = [
            *_runs(library, device, notes, bursts=20 if quick else 100),
            *_plans(library, device, repeats=50 if quick else 300),
            _open(library, repeats=5 if quick else 20),
            *_first_launches(library, device, most=4 if quick else 16),
            _import(repeats=3 if quick else 7),
        ]
        wait(device)
    return figures, notes


def _decode(library: Library, device: torch.device) -> tuple[PagedDecode, int]:
    """A decode operator that the bundle serves, and its page size."""
    said: CubineryError | None = None
    for kv_format, page_size in itertools.product(("fp8", "bf16"), (64, 16)):
        try:
            decode = PagedDecode(library, head_dim=128, page_size=page_size, kv_format=kv_format, device=device.index)
            decode.preload(8)
        except CubineryError as error:
            said = said or error
            continue
        return decode, page_size
    assert said is not None
    raise said


# -- plan.run ----------------------------------------------------------------------------------


def _runs(library: Library, device: torch.device, notes: list[str], *, bursts: int) -> Iterator[Figure]:
    decode, page_size = _decode(library, device)
    loop, why = launch_loop.build()
    if loop is None:
        notes.append(f"no C loop to compare with ({why}): plan.run is held to a Python loop over cuda-python instead")
    # Short sequences: the GPU must finish a step sooner than the host enqueues it.
    problem = Problem(Shape("host", 8, 1, 128, page_size, (256,)), decode.kv_format, device)
    for splits, title in ((1, "unsplit"), (2, "split")):
        plan_splits = 1 if splits == 1 else None
        plan = decode.plan([256], num_q_heads=8, num_kv_heads=1, force_splits=splits, max_splits=plan_splits)
        again = decode.plan([256], num_q_heads=8, num_kv_heads=1, force_splits=splits, max_splits=plan_splits)
        contestants = _contestants(plan, problem, loop) | {"new Q": partial(_burst_us, _with_new_q(again, problem))}
        times = _in_turns(contestants, device, bursts)
        base = "C" if loop is not None else "Python"
        if loop is not None:
            yield Figure(f"C loop over cuLaunchKernelEx, {title}", times["C"], "us")
        yield Figure(f"Python loop over cuda-python's cuLaunchKernelEx, {title}", times["Python"], "us")
        yield Figure(f"BoundLaunch.launch, {title}", times["BoundLaunch.launch"], "us")
        target = times[base] + RUN_SLACK_US
        yield Figure(f"plan.run, unchanged tensors, {title} ({base} loop + 3 us)", times["plan.run"], "us", target)
        yield Figure(f"plan.run, a new Q, {title}", times["new Q"], "us")


def _contestants(plan: Plan, problem: Problem, loop: launch_loop.Loop | None) -> dict[str, Callable[[], float]]:
    """Ways to launch a plan's kernels; each enqueues a burst and returns microseconds a step."""
    out, lse, workspace = _outputs(plan, problem).values()
    stream = raw_stream(problem.device)

    def run() -> None:
        plan.run(problem.q, problem.k, problem.v, problem.table, out=out, lse=lse, workspace=workspace)

    run()
    bound = _bound(plan)
    # What CudaPreparedLaunch holds, so that every loop launches from the very same structures.
    prepared: list[Any] = [b._prepared for b in bound]
    calls = [(p._launch, (p._config, p._function, p._pointers_address, 0)) for p in prepared]

    def launch() -> None:
        for b in bound:
            b.launch(stream)

    def raw() -> None:
        for function, arguments in calls:
            function(*arguments)

    steps = {"plan.run": run, "BoundLaunch.launch": launch, "Python": raw}
    found: dict[str, Callable[[], float]] = {name: partial(_burst_us, step) for name, step in steps.items()}
    if loop is not None:
        address = launch_loop.launch_address()
        table = [(int(p._config.getPtr()), int(p._function), p._pointers_address) for p in prepared]
        found["C"] = lambda: loop(address, table, BURST) / 1e3
    return found


def _with_new_q(plan: Plan, problem: Problem) -> Callable[[], object]:
    """A step of eager serving: each has a Q that the last one had not, and nothing else is new."""
    arguments = _outputs(plan, problem)
    queries = itertools.cycle((problem.q, problem.q.clone()))
    return lambda: plan.run(next(queries), problem.k, problem.v, problem.table, **arguments)


def _outputs(plan: Plan, problem: Problem) -> dict[str, torch.Tensor]:
    """Arguments of `run` that hold what it writes."""
    return {
        "out": torch.empty_like(problem.q),
        "lse": torch.empty(plan.shape.lse, dtype=torch.float32, device=problem.device),
        "workspace": torch.empty(max(16, plan.workspace_bytes()), dtype=torch.uint8, device=problem.device),
    }


def _in_turns(contestants: dict[str, Callable[[], float]], device: torch.device, bursts: int) -> dict[str, float]:
    """Median of each, bursts taken in turns so that a change of clock or load meets all."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(bursts):
        for name, contestant in contestants.items():
            wait(device)
            found[name].append(contestant())
    wait(device)
    return {name: statistics.median(times) for name, times in found.items()}


def _burst_us(step: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    for _ in range(BURST):
        step()
    return (time.perf_counter_ns() - began) / BURST / 1e3


def _bound(plan: Plan) -> list[BoundLaunch]:
    """The launches that the last run of a plan made."""
    call = list(plan._calls.values())[-1]
    return [call.decode]


# -- plan --------------------------------------------------------------------------------------


def _plans(library: Library, device: torch.device, *, repeats: int) -> Iterator[Figure]:
    decode, _ = _decode(library, device)
    lengths = np.random.default_rng(0).integers(1, 16384, 256)
    for title, given in (("an array", lengths), ("a list", lengths.tolist())):
        before, whole = [], []
        with _upload_starts() as marks:
            for _ in range(repeats):
                began = time.perf_counter_ns()
                decode.plan(given, num_q_heads=64, num_kv_heads=8)
                whole.append((time.perf_counter_ns() - began) / 1e3)
                before.append((marks[-1] - began) / 1e3)
        wait(device)
        yield Figure(
            f"plan of 256 sequences from {title}, before the upload", statistics.median(before), "us", PLAN_TARGET_US
        )
        yield Figure(f"plan of 256 sequences from {title}, upload enqueued", statistics.median(whole), "us")


@contextmanager
def _upload_starts() -> Iterator[list[int]]:
    """Note the time (ns) at which every plan hands its arrays over to be copied."""
    marks: list[int] = []
    original = Upload.write

    def write(self: Any, parts: Any, raw: int) -> None:
        marks.append(time.perf_counter_ns())
        original(self, parts, raw)

    Upload.write = write  # type: ignore[method-assign]
    try:
        yield marks
    finally:
        Upload.write = original  # type: ignore[method-assign]


# -- library -----------------------------------------------------------------------------------


def hundred_keys(manifest: Manifest) -> Manifest:
    """A manifest of exactly OPEN_KEYS artifacts: those of `manifest`, then copies of them under other valid keys."""
    artifacts: dict[str, Artifact] = {a.key: a for a in manifest.artifacts[:OPEN_KEYS]}
    sources = itertools.cycle([a for a in manifest.artifacts if a.impl == MmaConfig.impl])
    axes = itertools.product(
        (128, 256), (16, 32, 64, 128), ("fp8", "bf16"), range(1, 9), (16, 32, 64), (1, 2), (False, True)
    )
    names = ("head_dim", "page_size", "kv_format", "q_len", "row_tile", "ctas_per_sm", "pdl")
    while len(artifacts) < OPEN_KEYS:
        config = MmaConfig.from_axes(dict(zip(names, next(axes), strict=True)))
        source, key = next(sources), config.key(manifest.arch)
        if key not in artifacts:
            artifacts[key] = dataclasses.replace(source, key=key, config=config.axes(), requires=())
    return dataclasses.replace(manifest, artifacts=tuple(artifacts[key] for key in sorted(artifacts)))


def _open(library: Library, *, repeats: int) -> Figure:
    """Opening reads manifests and selector tables alone, so the bundle that is opened here needs no cubins."""
    held = next(b for b in library.bundles if any(a.impl == MmaConfig.impl for a in b.manifest.artifacts))
    with tempfile.TemporaryDirectory(prefix="cubinery-bench-") as folder:
        manifest = hundred_keys(held.manifest)
        for table in manifest.tables.values():
            copy = Path(folder) / table.path
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes((held.root / table.path).read_bytes())
        (Path(folder) / MANIFEST_NAME).write_text(manifest.dumps(), encoding="utf-8")
        times = []
        for _ in range(repeats):
            began = time.perf_counter_ns()
            Library.open(folder)
            times.append((time.perf_counter_ns() - began) / 1e6)
    return Figure(f"Library.open of {OPEN_KEYS} keys", statistics.median(times), "ms", OPEN_TARGET_MS)


def _first_launches(library: Library, device: torch.device, *, most: int) -> Iterator[Figure]:
    """From `Library.kernel` of a key that nothing loaded to its launch: read, hash, load, check, bind, enqueue."""
    roots = [bundle.root for bundle in library.bundles]
    times: dict[str, float] = {}
    for head_dim, kv_format, page_size in itertools.product((128, 256), ("fp8", "bf16"), (16, 64, 32, 128)):
        if len(times) >= most:
            break
        try:
            decode = PagedDecode(
                library, head_dim=head_dim, page_size=page_size, kv_format=kv_format, device=device.index
            )
            decode.preload(8)
        except CubineryError:
            continue  # the bundle need not hold every combination
        problem = Problem(Shape("first", 8, 1, head_dim, page_size, (1024,)), kv_format, device)
        plan = decode.plan([1024], num_q_heads=8, num_kv_heads=1, force_splits=2)
        kept = plan.run(problem.q, problem.k, problem.v, problem.table)
        stream = raw_stream(device)
        fresh = Library.open(roots, driver=library.driver)  # which a process starts once, not at every key
        for bound in _bound(plan):
            wait(device)
            began = time.perf_counter_ns()
            kernel = fresh.kernel(bound.kernel.key, decode.device, stream=stream).in_clusters_of(plan.cluster)
            kernel.launch(bound.values, stream)
            spent = (time.perf_counter_ns() - began) / 1e6
            wait(device)
            times[bound.kernel.key] = max(spent, times.get(bound.kernel.key, 0.0))
        del kept
    if not times:
        raise CubineryError("no key of the bundle serves this device with head_dim 128 or 256")
    slowest = max(times, key=lambda key: times[key])
    short = slowest.split("-", 2)[-1]
    yield Figure(f"first launch of a key, median of {len(times)}", statistics.median(times.values()), "ms")
    yield Figure(f"first launch of a key, slowest ({short})", times[slowest], "ms", FIRST_LAUNCH_TARGET_MS)


# -- import ------------------------------------------------------------------------------------

_IMPORT = """
import sys, time
began = time.perf_counter()
from cubinery.runtime import Library
spent = time.perf_counter() - began
assert "torch" not in sys.modules and "numpy" not in sys.modules, "the runtime imported torch or numpy"
print(spent)
"""


def _import(*, repeats: int) -> Figure:
    """`cubinery.runtime` and its Library in a fresh process, the interpreter's own start not counted."""
    times = []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for _ in range(repeats):
        done = subprocess.run(
            [sys.executable, "-c", _IMPORT], capture_output=True, text=True, check=False, env=environment
        )
        if done.returncode:
            raise CubineryError(f"importing cubinery.runtime failed: {done.stderr.strip().splitlines()[-1]}")
        times.append(float(done.stdout) * 1e3)
    return Figure("import of cubinery.runtime and Library, without torch", statistics.median(times), "ms",
                  IMPORT_TARGET_MS)  # fmt: skip
