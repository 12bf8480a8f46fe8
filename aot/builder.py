"""Build items into bundles: look in the cache, compile what is missing, gate everything, store it.

The compiler is never imported here: workers do, and only where something has to be compiled.

A bundle's manifest is exactly the set that was asked for: keys of an earlier build that this one does
not ask for are dropped, unless `BuildOptions.merge` adds to the bundle (as for recorded misses). A key
that fails is left out and named in the report; so is a key that needs it at launch. All others ship.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cubinery
from cubinery.aot import gates, store
from cubinery.aot.cache import Cache, Compiled, default_folder
from cubinery.aot.errors import BuildError
from cubinery.aot.inspect import ptx_version
from cubinery.aot.key import artifact_digest, codegen_environment, read_sources, source_digest, source_file, toolchain
from cubinery.aot.pool import WorkerPool, available_cores, available_memory
from cubinery.aot.report import REPORT_NAME, BuildReport, BuildRow
from cubinery.aot.variants import BuildItem
from cubinery.aot.worker import Job
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.manifest import Artifact, FileRecord, KernelRecord, Manifest

COMPILE_ENTRY = "cubinery.aot.compiler:compile_item"

_SUFFIXES = {
    "ptx": ".ptx",
    "object": ".o",
    "header": ".h",
    "object-linux-aarch64": ".linux-aarch64.o",
    "header-linux-aarch64": ".linux-aarch64.h",
}


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


@dataclass(slots=True)
class _Build:
    """State of one build: what is finished and what went into each bundle."""

    items: dict[str, BuildItem]
    records: dict[str, KernelRecord]
    sources: dict[tuple[str, str], dict[str, bytes]]
    """(family, implementation) to what `read_sources` found when the build began."""
    progress: ProgressCallback
    rows: dict[str, BuildRow] = field(default_factory=dict)
    artifacts: dict[str, Artifact] = field(default_factory=dict)
    files: dict[str, dict[FileRecord, bytes]] = field(default_factory=dict)
    toolkits: set[tuple[int, int]] = field(default_factory=set)
    ptx_versions: set[str] = field(default_factory=set)

    def finish(self, item: BuildItem, compiled: Compiled, *, cached: bool) -> None:
        """Gate a compiled item and prepare its artifact, or its failure."""
        record = self.records[item.key]
        row = BuildRow(
            key=item.key,
            arch=item.arch.name,
            status="cached" if cached else "built",
            origin=item.origin,
            seconds=0.0 if cached else compiled.seconds,
            peak_memory=compiled.peak_memory,
            cubin_size=len(compiled.cubin),
            dynamic_smem=record.dynamic_smem,
        )
        try:
            found = gates.check(item.key, item.arch, record, item.gates, compiled.cubin, compiled.ptx)
            version = ptx_version(compiled.ptx)
        except CubineryError as error:
            self.fail(row, error, "")
            return
        if found.toolkit is not None:
            self.toolkits.add(found.toolkit)
        self.ptx_versions.add(version)
        resources = found.resources
        self._store(item, dataclasses.replace(record, resources=resources, params=found.params), compiled)
        self.end(
            dataclasses.replace(
                row,
                registers=resources.registers,
                stack=resources.stack,
                static_smem=resources.static_smem,
                ctas_per_sm=resources.ctas_per_sm,
                limited_by=found.limited_by,
            )
        )

    def _store(self, item: BuildItem, record: KernelRecord, compiled: Compiled) -> None:
        cubin = store.cubin_record(compiled.cubin)
        files = {cubin: compiled.cubin}
        emitted = {}
        for name in item.emit:
            wanted = ("ptx",) if name == "ptx" else (name, name.replace("object", "header", 1))
            for part in wanted:
                data = compiled.ptx.encode() if part == "ptx" else compiled.objects[part]
                emitted[part] = store.emitted_record(item.key, _SUFFIXES[part], data)
                files[emitted[part]] = data
        self.files[item.key] = files
        self.artifacts[item.key] = Artifact(
            key=item.key,
            family=item.config.family,
            impl=item.config.impl,
            arch=item.arch.name,
            config=item.config.axes(),
            source_digest=source_digest(self.sources[item.config.family, item.config.impl]),
            cubin=cubin,
            kernels=(record,),
            requires=item.requires,
            emitted=emitted,
        )

    def fail(self, row: BuildRow, error: CubineryError, detail: str) -> None:
        """Record a failure."""
        failed = dataclasses.replace(
            row, status="failed", error_type=type(error).__name__, error=str(error), detail=detail
        )
        self.artifacts.pop(row.key, None)
        self.end(failed)

    def end(self, row: BuildRow) -> None:
        """Record a row and tell the caller."""
        self.rows[row.key] = row
        self.progress(Progress(len(self.rows), len(self.items), row=row))

    def drop_incomplete(self) -> None:
        """Fail every key whose launch needs one that failed: half a kernel serves nobody."""
        changed = True
        while changed:
            changed = False
            for key, artifact in list(self.artifacts.items()):
                lost = [name for name in artifact.requires if name not in self.artifacts]
                if lost:
                    error = BuildError(f"{key}: needs {', '.join(lost)}, which failed")
                    self.fail(self.rows[key], error, "")
                    changed = True


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
    state = _Build(
        items=by_key,
        records={item.key: _declare(item) for item in items},
        sources={(family, impl): read_sources(family, impl) for family, impl in families},
        progress=progress or (lambda _: None),
    )
    cache = Cache(default_folder() if options.cache_dir is None else options.cache_dir)
    digests = _digests(state, tools, options)
    state.progress(Progress(0, len(items)))
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
                _compile(missing, digests, pool, cache, state)
                workers, start_seconds = pool.starts, pool.start_seconds
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    state.drop_incomplete()
    bundles = tuple(_write_bundles(state, options, tools))
    report = BuildReport(
        rows=tuple(state.rows[key] for key in sorted(state.rows)),
        warnings=tuple(cache.warnings),
        seconds=time.perf_counter() - began,
        jobs=jobs,
        workers=workers,
        start_seconds=start_seconds,
        bundles=bundles,
    )
    store.atomic_write(options.out / REPORT_NAME, report.dumps())
    return report


def _declare(item: BuildItem) -> KernelRecord:
    module = importlib.import_module(f"cubinery.aot.kernels.{item.config.family}.abi")
    record: KernelRecord = module.declare(item.config, item.arch)
    return record


def _digests(state: _Build, tools: dict[str, str], options: BuildOptions) -> dict[str, str]:
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
    missing: Sequence[BuildItem], digests: dict[str, str], pool: WorkerPool, cache: Cache, state: _Build
) -> None:
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
        state.progress(Progress(len(state.rows), len(state.items), running=pool.running))


def _stale(item: BuildItem, state: _Build) -> BuildError | None:
    """An error where the kernel's sources are no longer those that the digest was taken of."""
    before = state.sources[item.config.family, item.config.impl]
    files = {name: source_file(name) for name in before}
    changed = [name for name, file in files.items() if file is None or file.read_bytes() != before[name]]
    if not changed:
        return None
    return BuildError(f"{item.key}: {', '.join(changed)} changed while it was compiled: run the build again")


def _write_bundles(state: _Build, options: BuildOptions, tools: dict[str, str]) -> Iterator[str]:
    for arch in sorted({item.arch.name for item in state.items.values()}):
        artifacts = [a for key, a in sorted(state.artifacts.items()) if a.arch == arch]
        if not artifacts:
            continue  # every key failed: what was there before is better than nothing
        folder = options.out / arch
        with store.lock(folder):
            manifest = Manifest(
                arch=arch,
                package_version=cubinery.__version__,
                toolchain=tools,
                # A cubin runs on every driver of its toolkit's major release.
                min_driver=1000 * max((major for major, _ in state.toolkits), default=0),
                ptx_version=max(state.ptx_versions, key=_version),
                artifacts=tuple(artifacts),
            )
            if options.merge:
                manifest = _merged(folder, manifest)
            files = {record: data for a in artifacts for record, data in state.files[a.key].items()}
            store.write_bundle(folder, manifest, files)
        yield os.fspath(folder)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _merged(folder: Path, manifest: Manifest) -> Manifest:
    """The new manifest with what the bundle already holds. Raises BuildError where they do not fit."""
    before = store.existing_artifacts(folder)
    if before is None:
        return manifest
    for name in ("toolchain", "package_version"):
        if getattr(before, name) != getattr(manifest, name):
            raise BuildError(
                f"{folder}: cannot add to this bundle: its {name} is {getattr(before, name)}, now it would be "
                f"{getattr(manifest, name)}: rebuild the bundle from its specs"
            )
    new = {artifact.key for artifact in manifest.artifacts}
    kept = [artifact for artifact in before.artifacts if artifact.key not in new]
    return dataclasses.replace(
        manifest,
        min_driver=max(before.min_driver, manifest.min_driver),
        ptx_version=max(before.ptx_version, manifest.ptx_version, key=_version),
        artifacts=tuple(sorted((*kept, *manifest.artifacts), key=lambda artifact: artifact.key)),
    )
