"""Bundles on disk: found, opened, checked for compatibility, merged. Reads manifests and nothing else."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cubinery import __version__
from cubinery.runtime.errors import BundleConflictError, BundleError, IntegrityError, ManifestVersionError
from cubinery.runtime.manifest import MANIFEST_NAME, Artifact, FileRecord, Manifest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINTS = "cubinery.kernels"
"""Entry-point group of kernel wheels. A value names a folder; nothing in it is imported."""

StrPath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Bundle:
    """One arch's folder, its manifest and its tables."""

    root: Path
    manifest: Manifest
    tables: dict[str, bytes] = field(default_factory=dict)
    """By family, the bytes of the selector's table."""

    @classmethod
    def open(cls, root: Path) -> Bundle:
        """Read a bundle folder's manifest and tables. Raises BundleError, ManifestVersionError, IntegrityError."""
        manifest = Manifest.read(root / MANIFEST_NAME)
        _check_package(manifest.package_version, root / MANIFEST_NAME)
        bundle = cls(root, manifest)
        bundle.tables.update((family, bundle.read(file)) for family, file in manifest.tables.items())
        return bundle

    def read(self, file: FileRecord) -> bytes:
        """A file's bytes, proved to be those that the manifest recorded. Raises IntegrityError."""
        path = file.locate(self.root)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(
                f"{path}: the manifest lists this file and it cannot be read: {error.strerror}; "
                "install or build the bundle again"
            ) from error
        digest = hashlib.sha256(data).hexdigest()
        if digest != file.sha256:
            raise IntegrityError(
                f"{path}: sha256 {digest[:16]}… ({len(data)} bytes), and its manifest recorded "
                f"{file.sha256[:16]}… ({file.size} bytes): corrupted, or from another build; "
                "install or build the bundle again"
            )
        return data


def _check_package(version: str, source: Path) -> None:
    """The rule of a kernel wheel's own requirement, `cubinery~=X.Y`: same major, minor not newer."""
    (major, minor), (own_major, own_minor) = _major_minor(version), _major_minor(__version__)
    if major != own_major or minor > own_minor:
        raise ManifestVersionError(
            f"{source}: built by cubinery {version}, which this cubinery {__version__} cannot open: "
            f"expected {own_major}.0 to {own_major}.{own_minor}; install cubinery~={major}.{minor}, or rebuild"
        )


def _major_minor(version: str) -> tuple[int, int]:
    major, minor = (int(re.match(r"\d+", part)[0]) for part in version.split(".")[:2])  # type: ignore[index]
    return major, minor


def open_all(paths: StrPath | Sequence[StrPath]) -> tuple[Bundle, ...]:
    """The bundles at each path: one arch's folder, or the folder above several. Raises BundleError."""
    given: list[Any] = list(paths) if isinstance(paths, (list, tuple)) else [paths]
    for path in given:
        if not isinstance(path, (str, os.PathLike)):
            raise BundleError(
                f"{path!r} is no path: expected the folder of a bundle, the folder above, or a list of them"
            )
    if not given:
        raise BundleError("no bundle given: expected the folder of one, or the folder above several")
    return tuple(Bundle.open(root) for path in given for root in _folders(Path(path)))


def _folders(path: Path) -> list[Path]:
    if path.name == MANIFEST_NAME and path.is_file():
        path = path.parent
    if not path.is_dir():
        raise BundleError(f"{path}: no such folder: expected a bundle (see `make kernels ARCH=…`)")
    if (path / MANIFEST_NAME).is_file():
        return [path]
    found = sorted(child for child in path.iterdir() if (child / MANIFEST_NAME).is_file())
    if not found:
        raise BundleError(
            f"{path}: no {MANIFEST_NAME} in it or in a folder directly below: expected a bundle "
            "(see `make kernels ARCH=…`)"
        )
    return found


def installed() -> tuple[Bundle, ...]:
    """The bundles of every installed kernel wheel; none is imported. Raises BundleError when there is none."""
    import importlib.metadata  # costs more than all the rest of the runtime, and only this needs it

    points = sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: (p.name, p.value))
    if not points:
        raise BundleError(
            "no kernel wheel is installed: install one (such as cubinery-kernels-sm110a), "
            "or open a folder with Library.open"
        )
    return tuple(Bundle.open(root) for root in dict.fromkeys(_installed_folder(p) for p in points))


def _installed_folder(point: EntryPoint) -> Path:
    """The folder that an entry point names (`package`, `package.sub` or `package:sub`)."""
    import importlib.util

    parts = re.split(r"[.:]", point.value.strip())
    if not all(part.isidentifier() for part in parts):
        raise BundleError(f"entry point {point.name!r} of group {ENTRY_POINTS}: {point.value!r} names no folder")
    tried = []
    if point.dist is not None:
        tried.append(Path(str(point.dist.locate_file("/".join(parts)))))
    if not (tried and (tried[0] / MANIFEST_NAME).is_file()):
        # Editable installs keep the files elsewhere. Finding a top-level package's spec runs none of its code.
        spec = importlib.util.find_spec(parts[0])
        bases = (spec.submodule_search_locations or ()) if spec else ()
        tried += [Path(base, *parts[1:]) for base in bases]
    for folder in tried:
        if (folder / MANIFEST_NAME).is_file():
            return folder
    where = ", ".join(map(str, tried)) or "nowhere"
    raise BundleError(
        f"entry point {point.name!r} of group {ENTRY_POINTS} names {point.value!r}, and there is no "
        f"{MANIFEST_NAME} (looked in {where}): install that kernel wheel again"
    )


def merge(bundles: Iterable[Bundle]) -> dict[str, tuple[Bundle, Artifact]]:
    """Every key with the bundle that serves it. Raises BundleConflictError when two disagree about one."""
    entries: dict[str, tuple[Bundle, Artifact]] = {}
    for bundle in bundles:
        for artifact in bundle.manifest.artifacts:
            other, known = entries.setdefault(artifact.key, (bundle, artifact))
            if known is artifact:
                continue
            if known.cubin.sha256 != artifact.cubin.sha256 or known.kernels != artifact.kernels:
                what = "cubins" if known.cubin.sha256 != artifact.cubin.sha256 else "launch records"
                raise BundleConflictError(
                    f"{artifact.key}: {other.root} and {bundle.root} hold different {what} for it "
                    f"(sha256 {known.cubin.sha256[:16]}… and {artifact.cubin.sha256[:16]}…): open only one of them"
                )
    return entries
