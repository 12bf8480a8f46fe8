"""Build items into bundles: look in the cache, compile what is missing, gate everything, store it.

The compiler is never imported here: workers do, and only where something has to be compiled.

A bundle's manifest is exactly the set that was asked for: keys of an earlier build that this one does
not ask for are dropped, unless `BuildOptions.merge` adds to the bundle (as for recorded misses). A key
that fails is left out and named in the report; so is a key that needs it at launch. All others ship.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cubinery.aot import store
from cubinery.aot.assembly import Assembly
from cubinery.aot.cache import Cache, default_folder
from cubinery.aot.errors import BuildError
from cubinery.aot.key import artifact_digest, codegen_environment, read_sources, source_file, toolchain
from cubinery.aot.pool import WorkerPool, available_cores, available_memory
from cubinery.aot.report import REPORT_NAME, BuildReport, BuildRow
from cubinery.aot.tables import Table, TableName
from cubinery.aot.variants import BuildItem
from cubinery.aot.worker import Job
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.manifest import KernelRecord

COMPILE_ENTRY = "cubinery.aot.compiler:compile_item"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. None takes what the machine offers."""

    out: Path
    """The folder of bundles: each arch's goes into `out/<arch>`."""
    jobs: int | None = None
    """Most workers at once; None: one per core."""
    timeout_s: float = 300.0
    """Longest that one configuration may take to compile."""
    memory_bytes: int | None = None
    """Memory that all workers together may take; None: nine tenths of what is free."""
    cache_dir: Path | None = None
    """None: `$CUBINERY_CACHE`, else the user's cache folder."""
    force: bool = False
    """Compile even what the cache has (and refresh it)."""
    merge: bool = False
    """Keep the keys that the bundle already holds and that are not asked for."""
    tables: Mapping[TableName, Table] = field(default_factory=dict)
    """Selector tables that go into the bundles, by family and arch."""
    compile_entry: str = COMPILE_ENTRY
    """`module:function` that workers call; see `cubinery.aot.worker.CompileEntry`."""

    def __post_init__(self) -> None:
        for name, low in (("jobs", 1), ("timeout_s", 0), ("memory_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise BuildError(f"{name} = {value}: expected at least {low}")


@dataclass(frozen=True, slots=True)
class Progress:
    """Passed to the progress callback: at the start, after each key, and when compiling starts."""

    done: int
    total: int
    running: tuple[str, ...] = ()
    """Keys that are being compiled now."""
    row: BuildRow | None = None
    """The key that has just ended."""


ProgressCallback = Callable[[Progress], None]


def build(items: Sequence[BuildItem], options: BuildOptions, progress: ProgressCallback | None = None) -> BuildReport:
    """Build `items` into bundles under `options.out` and write `report.json` there.

    Failures of single keys are rows of the report (`report.ok` is False). Raises BuildError or
    StoreError where nothing can be built or written; a bundle that was there stays valid.
    """
    began = time.perf_counter()
    if not items:
        raise BuildError("nothing to build: the list of artifacts is empty")
    by_key = {item.key: item for item in items}
    if len(by_key) != len(items):
        raise BuildError("two build items have the same key: merge them first")
    tools = toolchain()
    if not tools and options.compile_entry == COMPILE_ENTRY:
        raise BuildError("the compiler is not installed: pip install 'cubinery[build]'")
    store.check_writable(options.out)
    families = {(item.config.family, item.config.impl) for item in items}
    tell = progress or (lambda _: None)
    state = Assembly(
        items=by_key,
        records={item.key: _declare(item) for item in items},
        sources={(family, impl): read_sources(family, impl) for family, impl in families},
        tables={name: table.data for name, table in options.tables.items()},
        ended=lambda row: tell(Progress(len(state.rows), len(items), row=row)),
    )
    cache = Cache(default_folder() if options.cache_dir is None else options.cache_dir)
    digests = _digests(state, tools, options)
    tell(Progress(0, len(items)))
    missing = []
    for item in items:
        compiled = None if options.force else cache.get(digests[item.key])
        if compiled is None:
            missing.append(item)
        else:
            state.finish(item, compiled, cached=True)
    memory = int(available_memory() * 0.9) if options.memory_bytes is None else options.memory_bytes
    jobs = options.jobs or available_cores()
    workers, start_seconds = 0, 0.0
    if missing:
        scratch = Path(tempfile.mkdtemp(prefix="cubinery-build-"))
        try:
            with WorkerPool(jobs, options.timeout_s, memory, options.compile_entry, scratch) as pool:
                for _ in _compile(missing, digests, pool, cache, state):
                    tell(Progress(len(state.rows), len(items), running=pool.running))
                workers, start_seconds = pool.starts, pool.start_seconds
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    state.drop_incomplete()
    bundles = [
        os.fspath(options.out / arch)
        for arch in sorted({item.arch.name for item in items})
        if state.write(options.out / arch, arch, tools, merge=options.merge)
    ]
    report = BuildReport(
        rows=tuple(state.rows[key] for key in sorted(state.rows)),
        warnings=tuple(cache.warnings),
        seconds=time.perf_counter() - began,
        jobs=jobs,
        workers=workers,
        start_seconds=start_seconds,
        bundles=tuple(bundles),
    )
    store.atomic_write(options.out / REPORT_NAME, report.dumps())
    return report


def _declare(item: BuildItem) -> KernelRecord:
    module = importlib.import_module(f"cubinery.aot.kernels.{item.config.family}.abi")
    record: KernelRecord = module.declare(item.config, item.arch)
    return record


def _digests(state: Assembly, tools: dict[str, str], options: BuildOptions) -> dict[str, str]:
    environment = codegen_environment()
    return {
        item.key: artifact_digest(
            item.config,
            item.arch.name,
            _hosts(item),
            sources=state.sources[item.config.family, item.config.impl],
            toolchain=tools,
            environment=environment,
            compile_entry=options.compile_entry,
        )
        for item in state.items.values()
    }


def _hosts(item: BuildItem) -> tuple[str, ...]:
    return tuple(name for name in item.emit if name != "ptx")


def _compile(
    missing: Sequence[BuildItem], digests: dict[str, str], pool: WorkerPool, cache: Cache, state: Assembly
) -> Iterator[None]:
    """Compile what is missing; yields after each key."""
    jobs = [
        Job(item.key, item.config.family, item.config.impl, item.config.axes(), item.arch.name, _hosts(item))
        for item in missing
    ]
    for result in pool.run(jobs):
        item = state.items[result.job.key]
        if result.compiled is not None:
            error: CubineryError | None = _stale(item, state)
            if error is None:
                cache.put(digests[item.key], result.compiled)
                state.finish(item, result.compiled, cached=False)
        else:
            error = result.error
        if error is not None:
            row = BuildRow(item.key, item.arch.name, "failed", item.origin, result.seconds, result.peak_memory or None)
            state.fail(row, error, result.detail)
        yield


def _stale(item: BuildItem, state: Assembly) -> BuildError | None:
    """An error where the kernel's sources are no longer those that the digest was taken of."""
    before = state.sources[item.config.family, item.config.impl]
    files = {name: source_file(name) for name in before}
    changed = [name for name, file in files.items() if file is None or file.read_bytes() != before[name]]
    if not changed:
        return None
    return BuildError(f"{item.key}: {', '.join(changed)} changed while it was compiled: run the build again")
