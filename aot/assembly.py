"""From compiled items to bundles: gates, artifacts, the manifest, and the report's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import cubinery
from cubinery.aot import gates, store
from cubinery.aot.cache import Compiled
from cubinery.aot.errors import BuildError
from cubinery.aot.inspect import ptx_version
from cubinery.aot.key import source_digest
from cubinery.aot.report import BuildRow
from cubinery.aot.variants import BuildItem
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.manifest import Artifact, FileRecord, KernelRecord, Manifest

_SUFFIXES = {
    "ptx": ".ptx",
    "object": ".o",
    "header": ".h",
    "object-linux-aarch64": ".linux-aarch64.o",
    "header-linux-aarch64": ".linux-aarch64.h",
}


@dataclass(slots=True)
class Assembly:
    """What is finished of a build, and what goes into each bundle."""

    items: Mapping[str, BuildItem]
    records: Mapping[str, KernelRecord]
    """The declared launch of every key."""
    sources: Mapping[tuple[str, str], Mapping[str, bytes]]
    """(family, implementation) to what `read_sources` found when the build began."""
    tables: Mapping[tuple[str, str], bytes]
    """(family, arch) to the selector table that its bundle holds."""
    ended: Callable[[BuildRow], None]
    """Told of each row as it comes."""
    rows: dict[str, BuildRow] = field(default_factory=dict)
    _artifacts: dict[str, Artifact] = field(default_factory=dict)
    _files: dict[str, dict[FileRecord, bytes]] = field(default_factory=dict)
    _toolkits: set[int] = field(default_factory=set)
    _ptx_versions: set[str] = field(default_factory=set)

    def finish(self, item: BuildItem, compiled: Compiled, *, cached: bool) -> None:
        """Gate a compiled item and prepare its artifact, or record its failure."""
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
            self.fail(row, error)
            return
        if found.toolkit is not None:
            self._toolkits.add(found.toolkit[0])
        self._ptx_versions.add(version)
        resources = found.resources
        self._keep(item, dataclasses.replace(record, resources=resources, params=found.params), compiled)
        self._end(
            dataclasses.replace(
                row,
                registers=resources.registers,
                stack=resources.stack,
                static_smem=resources.static_smem,
                ctas_per_sm=resources.ctas_per_sm,
                limited_by=found.limited_by,
            )
        )

    def _keep(self, item: BuildItem, record: KernelRecord, compiled: Compiled) -> None:
        cubin = store.cubin_record(compiled.cubin)
        files = {cubin: compiled.cubin}
        emitted = {}
        for name in item.emit:
            wanted = ("ptx",) if name == "ptx" else (name, name.replace("object", "header", 1))
            for part in wanted:
                data = compiled.ptx.encode() if part == "ptx" else compiled.objects[part]
                emitted[part] = store.emitted_record(item.key, _SUFFIXES[part], data)
                files[emitted[part]] = data
        self._files[item.key] = files
        self._artifacts[item.key] = Artifact(
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

    def fail(self, row: BuildRow, error: CubineryError, detail: str = "") -> None:
        """Record a failure; `detail` holds the compiler's own words."""
        self._artifacts.pop(row.key, None)
        self._end(
            dataclasses.replace(row, status="failed", error_type=type(error).__name__, error=str(error), detail=detail)
        )

    def _end(self, row: BuildRow) -> None:
        self.rows[row.key] = row
        self.ended(row)

    def drop_incomplete(self) -> None:
        """Fail every key whose launch needs one that failed: half a kernel serves nobody."""
        changed = True
        while changed:
            changed = False
            for key, artifact in list(self._artifacts.items()):
                lost = [name for name in artifact.requires if name not in self._artifacts]
                if lost:
                    how = "which failed" if all(name in self.items for name in lost) else "which is not asked for"
                    self.fail(self.rows[key], BuildError(f"{key}: needs {', '.join(lost)}, {how}"))
                    changed = True

    def write(self, folder: Path, arch: str, toolchain: dict[str, str], *, merge: bool) -> bool:
        """Make `folder` the bundle of one arch. False, and nothing touched, where every key failed.

        Raises BuildError, BundleError or StoreError; what was there before then stays valid.
        """
        artifacts = [a for _, a in sorted(self._artifacts.items()) if a.arch == arch]
        if not artifacts:
            return False
        data = {family: self.tables[family, own] for family, own in sorted(self.tables) if own == arch}
        tables = {family: store.table_record(family, table) for family, table in data.items()}
        manifest = Manifest(
            arch=arch,
            package_version=cubinery.__version__,
            toolchain=toolchain,
            # A cubin runs on every driver of its toolkit's major release.
            min_driver=1000 * max(self._toolkits, default=0),
            ptx_version=max(self._ptx_versions, key=_version),
            artifacts=tuple(artifacts),
            tables=tables,
        )
        files = {record: content for a in artifacts for record, content in self._files[a.key].items()}
        files |= {tables[family]: table for family, table in data.items()}
        with store.lock(folder):
            store.write_bundle(folder, _merged(folder, manifest) if merge else manifest, files)
        return True


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _merged(folder: Path, manifest: Manifest) -> Manifest:
    """The new manifest with what the bundle already holds. Raises BuildError where they do not fit.

    A key that is in both takes the new artifact; where the cubin is the same, files that were emitted
    beside it stay.
    """
    before = store.existing_artifacts(folder)
    if before is None:
        return manifest
    for name in ("toolchain", "package_version"):
        if getattr(before, name) != getattr(manifest, name):
            raise BuildError(
                f"{folder}: cannot add to this bundle: its {name} is {getattr(before, name)}, now it would be "
                f"{getattr(manifest, name)}: rebuild the bundle from its specs"
            )
    together = {artifact.key: artifact for artifact in before.artifacts}
    for artifact in manifest.artifacts:
        old = together.get(artifact.key)
        if old is not None and old.cubin == artifact.cubin:
            artifact = dataclasses.replace(artifact, emitted={**old.emitted, **artifact.emitted})
        together[artifact.key] = artifact
    return dataclasses.replace(
        manifest,
        min_driver=max(before.min_driver, manifest.min_driver),
        ptx_version=max(before.ptx_version, manifest.ptx_version, key=_version),
        artifacts=tuple(together[key] for key in sorted(together)),
        tables={**before.tables, **manifest.tables},
    )
