"""The build cache: one file per artifact digest, verified at every read, never needed for a build to work."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from cubinery.aot.errors import StoreError
from cubinery.aot.store import atomic_write, sha256

_MAGIC = b"cubinery-cache-1\n"
_HEADER = 8


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a worker made of one configuration."""

    cubin: bytes
    ptx: str
    objects: dict[str, bytes] = field(default_factory=dict)
    """Emit name (`object`, `header`, `object-linux-aarch64`, ...) to contents."""
    seconds: float = 0.0
    """Time the compile took when it ran."""
    peak_memory: int = 0
    """Most bytes that the worker held while it compiled."""


def default_folder() -> Path:
    """`$CUBINERY_CACHE`, else `cubinery` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`)."""
    if given := os.environ.get("CUBINERY_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(os.path.expanduser("~")) / ".cache") / "cubinery"


class Cache:
    """Entries under `folder`. Trouble with the folder never fails a build: it becomes a warning."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.warnings: list[str] = []
        self._writable = True

    def path(self, digest: str) -> Path:
        """The file of an entry."""
        return self.folder / "v1" / digest[:2] / f"{digest}.entry"

    def get(self, digest: str) -> Compiled | None:
        """A stored result, or None. A damaged entry is removed and reported as a warning."""
        path = self.path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"cache {self.folder}: cannot read: {error.strerror}: compiling instead")
            return None
        try:
            return decode(data)
        except (ValueError, KeyError, TypeError) as error:
            self._warn(f"cache entry {path} is damaged ({error}): discarded and rebuilt")
            try:
                path.unlink()
            except OSError as failure:
                self._warn(f"cache entry {path} cannot be removed: {failure.strerror}")
            return None

    def put(self, digest: str, compiled: Compiled) -> None:
        """Store a result. After the first refusal by the disk nothing more is tried."""
        if not self._writable:
            return
        try:
            atomic_write(self.path(digest), encode(compiled), durable=False)  # its hash is checked at every read
        except StoreError as error:
            self._writable = False
            self._warn(f"cache not written: {error}")

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)


def encode(compiled: Compiled) -> bytes:
    """An entry's bytes: magic, sha256 of the rest, length of the header, JSON header, contents."""
    parts = {"cubin": compiled.cubin, "ptx": compiled.ptx.encode(), **compiled.objects}
    header = json.dumps(
        {
            "sizes": {name: len(data) for name, data in parts.items()},
            "seconds": compiled.seconds,
            "peak_memory": compiled.peak_memory,
        }
    ).encode()
    body = len(header).to_bytes(_HEADER, "little") + header + b"".join(parts.values())
    return _MAGIC + sha256(body).encode() + body


def decode(data: bytes) -> Compiled:
    """The inverse of `encode`. Raises ValueError unless every byte is as it was written."""
    start = len(_MAGIC) + 64
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or sha256(body).encode() != data[len(_MAGIC) : start]:
        raise ValueError("its bytes are not those that were written")
    at = _HEADER + int.from_bytes(body[:_HEADER], "little")
    header = json.loads(body[_HEADER:at])
    parts: dict[str, bytes] = {}
    for name, size in header["sizes"].items():
        parts[name] = body[at : at + size]
        at += size
    return Compiled(
        cubin=parts.pop("cubin"),
        ptx=parts.pop("ptx").decode(),
        objects=parts,
        seconds=float(header["seconds"]),
        peak_memory=int(header["peak_memory"]),
    )
