"""Proof that the same inputs give the same bytes: build again, from nothing, and compare."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cubinery.aot.audit import BundleDiff, CheckFailedError, diff_bundles
from cubinery.aot.builder import BuildOptions, ProgressCallback, build
from cubinery.aot.report import BuildReport
from cubinery.aot.variants import BuildItem
from cubinery.runtime.bundle import Bundle, open_all
from cubinery.runtime.manifest import MANIFEST_NAME


class ReproduceError(CheckFailedError):
    """A rebuild failed, so that there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """The outcome of building again."""

    keys: int
    diff: BundleDiff
    manifests: tuple[str, ...]
    """Archs whose manifests differ in any byte."""
    seconds: float

    @property
    def same(self) -> bool:
        """True where every byte of cubins, emitted files and manifests is the same."""
        return self.diff.same and not self.manifests


def reproduce(
    items: Sequence[BuildItem],
    options: BuildOptions,
    against: Path | None = None,
    progress: ProgressCallback | None = None,
) -> Reproduction:
    """Build `items` without any cache and compare with the bundles at `against`, or with a second such build.

    `options` gives jobs, time and memory limits; its folders are not used, and nothing outside a temporary
    folder is written. Only keys in `items` are compared. Raises ReproduceError when a key does not build.
    """
    keys = {item.key for item in items}
    with tempfile.TemporaryDirectory(prefix="cubinery-reproduce-") as scratch:
        first, seconds = _build(items, options, Path(scratch) / "first", progress)
        if against is None:
            second, more = _build(items, options, Path(scratch) / "second", progress)
            seconds += more
        else:
            archs = {item.arch.name for item in items}
            second = tuple(_only(b, keys) for b in open_all(against) if b.manifest.arch in archs)
        old, new = (first, second) if against is None else (second, first)
        manifests = () if against is not None else tuple(_unequal_manifests(old, new))
        return Reproduction(len(keys), diff_bundles(old, new), manifests, seconds)


def _build(
    items: Sequence[BuildItem], options: BuildOptions, folder: Path, progress: Callable[..., None] | None
) -> tuple[tuple[Bundle, ...], float]:
    fresh = dataclasses.replace(options, out=folder / "out", cache_dir=folder / "cache", force=True, merge=False)
    report: BuildReport = build(items, fresh, progress)
    for row in report.rows:
        if row.status == "failed":
            raise ReproduceError(f"{row.key} does not build, so nothing can be compared: {row.error}")
    return open_all(folder / "out"), report.seconds


def _only(bundle: Bundle, keys: set[str]) -> Bundle:
    """A bundle with nothing but these keys."""
    artifacts = tuple(artifact for artifact in bundle.manifest.artifacts if artifact.key in keys)
    return Bundle(bundle.root, dataclasses.replace(bundle.manifest, artifacts=artifacts))


def _unequal_manifests(old: Sequence[Bundle], new: Sequence[Bundle]) -> list[str]:
    """Archs whose manifest files differ in any byte, or that only one side has."""
    before = {b.manifest.arch: (b.root / MANIFEST_NAME).read_bytes() for b in old}
    after = {b.manifest.arch: (b.root / MANIFEST_NAME).read_bytes() for b in new}
    return sorted(arch for arch in before | after if before.get(arch) != after.get(arch))
