"""Files on disk: atomic writes, locks, the build cache's entries and the assembly of a bundle.

A bundle is valid at every moment, whatever dies: new cubins are written under the name of their
hash, then the manifest replaces the old one in a single rename, and only then are files that no
manifest names removed. Builders of one folder take turns on a lock beside it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from cubinery.aot.errors import StoreError
from cubinery.runtime.errors import BundleError
from cubinery.runtime.manifest import MANIFEST_NAME, FileRecord, Manifest

CUBINS, EMITTED, TABLES = "cubins", "emitted", "tables"
_TEMPORARY = ".tmp-"


def sha256(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write a whole file or nothing. Raises StoreError.

    A durable file is on the disk before it gets its name, and the name before this returns; without,
    a loss of power may damage it (a killed process never does).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
    except OSError as error:
        raise _refused(path, error) from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp made it private; a bundle is for others to read
        os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        _discard(temporary)
        raise _refused(path, error) from None
    except BaseException:
        _discard(temporary)
        raise


def check_writable(folder: Path) -> None:
    """Make `folder` and prove that files can be written there, before any time is spent. Raises StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _refused(folder, error) from None


def _discard(temporary: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _refused(path: Path, error: OSError) -> StoreError:
    cure = {
        errno.ENOSPC: ": free some space and run again; nothing half-written is left",
        errno.EDQUOT: ": free some space and run again; nothing half-written is left",
        errno.EACCES: ": choose a folder you may write to",
        errno.EROFS: ": choose a folder you may write to",
    }.get(error.errno or 0, "")
    return StoreError(f"{path}: cannot write: {error.strerror or error}{cure}")


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the writers' lock of a bundle folder: `.<name>.lock` beside it. Waits for its turn.

    The lock goes with the process, so a killed builder leaves none behind. Raises StoreError.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder.parent / f".{folder.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _refused(folder, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


# -- bundles -------------------------------------------------------------------------------------


def cubin_record(data: bytes) -> FileRecord:
    """Where a cubin lives in a bundle: under the name of its hash."""
    name = sha256(data)
    return FileRecord(f"{CUBINS}/{name}.cubin", name, len(data))


def emitted_record(key: str, suffix: str, data: bytes) -> FileRecord:
    """Where an emitted file lives: readable by its key, and never rewritten thanks to its hash."""
    name = sha256(data)
    return FileRecord(f"{EMITTED}/{key}.{name[:16]}{suffix}", name, len(data))


def table_record(family: str, data: bytes) -> FileRecord:
    """Where a family's selector table lives: readable by its name, and never rewritten thanks to its hash."""
    name = sha256(data)
    return FileRecord(f"{TABLES}/{family}.{name[:16]}.json", name, len(data))


def files_of(manifest: Manifest) -> Iterator[tuple[str, FileRecord]]:
    """(whose, file) of every file that a manifest names: of a key, or of a family's table."""
    for artifact in manifest.artifacts:
        for record in (artifact.cubin, *artifact.emitted.values()):
            yield artifact.key, record
    for family, record in manifest.tables.items():
        yield f"{family}'s selector", record


def write_bundle(folder: Path, manifest: Manifest, files: Mapping[FileRecord, bytes]) -> None:
    """Make `folder` the bundle of `manifest`. The caller holds the folder's lock.

    `files` holds the contents of the manifest's files; those already there with the right bytes are
    left alone. Files that the manifest does not name are removed at the end. Raises StoreError.
    """
    for record, data in sorted(files.items(), key=lambda entry: entry[0].path):
        if not holds(folder, record):
            atomic_write(folder / record.path, data)
    if not _says(folder, manifest):
        atomic_write(folder / MANIFEST_NAME, manifest.dumps().encode())
    _remove_unnamed(folder, {record.path for _, record in files_of(manifest)})


def holds(folder: Path, record: FileRecord) -> bool:
    """True where the bundle has the file with exactly the recorded bytes."""
    path = folder / record.path
    try:
        return path.stat().st_size == record.size and sha256(path.read_bytes()) == record.sha256
    except OSError:
        return False


def read_bundle(folder: Path) -> Manifest | None:
    """The manifest of a bundle folder, or None where there is none. Raises BundleError on a bad one."""
    if not (folder / MANIFEST_NAME).exists():
        return None
    return Manifest.read(folder)


def existing_artifacts(folder: Path) -> Manifest | None:
    """Like `read_bundle`, but each file is checked too. Raises BundleError naming the first bad one."""
    manifest = read_bundle(folder)
    for owner, record in () if manifest is None else files_of(manifest):
        if not holds(folder, record):
            raise BundleError(
                f"{folder}: {record.path} of {owner} is missing or damaged: rebuild the bundle from its specs"
            )
    return manifest


def _says(folder: Path, manifest: Manifest) -> bool:
    """True where the folder's manifest says the same; reading one is ten times cheaper than writing it."""
    try:
        return read_bundle(folder) == manifest
    except BundleError:
        return False


def _remove_unnamed(folder: Path, named: set[str]) -> None:
    """Remove files of this bundle's own folders that no artifact names, and temporary files of the dead."""
    for part in (CUBINS, EMITTED, TABLES):
        with contextlib.suppress(OSError):
            for path in (folder / part).iterdir():
                if f"{part}/{path.name}" not in named:
                    path.unlink()
            if not any((folder / part).iterdir()):
                (folder / part).rmdir()
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.name.startswith(_TEMPORARY):
                path.unlink()
