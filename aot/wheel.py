"""A bundle as a wheel: cubins and their manifest as data, with nothing in it that Python executes.

One wheel per arch, `cubinery-kernels-sm110a`, tagged `py3-none-any`: what an x86-64 machine packs is what a
Jetson installs. The entry point in the group `cubinery.kernels` names a folder and is never imported. The
archive is written here, not by a build back end, so that equal bundles give equal bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import zipfile
from dataclasses import dataclass
from pathlib import Path

from cubinery.aot.audit import CheckFailedError, verify
from cubinery.aot.store import atomic_write
from cubinery.runtime.bundle import ENTRY_POINTS, Bundle
from cubinery.runtime.manifest import MANIFEST_NAME, Manifest

MAX_SIZE = 100 * 1000 * 1000
"""PyPI's default limit of one file, in bytes."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The oldest time a zip can hold: an archive's bytes must not depend on when it was made."""


class WheelError(CheckFailedError):
    """A bundle cannot be packed: it fails verification or is too large."""


@dataclass(frozen=True, slots=True)
class WheelReport:
    """What was written."""

    path: Path
    arch: str
    version: str
    kernels: int
    """Artifacts in the wheel."""
    size: int
    """Bytes of the wheel file."""
    unpacked: int
    """Bytes it takes once installed."""
    sha256: str


def distribution_name(arch: str) -> str:
    """`cubinery-kernels-sm110a` for `sm_110a`."""
    return f"cubinery-kernels-{arch.replace('_', '')}"


def package_name(arch: str) -> str:
    """The folder in site-packages: `cubinery_kernels_sm110a` for `sm_110a`."""
    return distribution_name(arch).replace("-", "_")


def compatible_release(version: str) -> str:
    """The requirement on cubinery itself, `~=X.Y`: the manifest's schema is checked when it is opened."""
    return "~=" + ".".join(version.split(".")[:2])


def pack(bundle: Bundle, out: Path, *, max_size: int = MAX_SIZE) -> WheelReport:
    """Verify one arch's bundle and write its wheel into `out`, whole or not at all.

    Files kept by `emit` (PTX, host objects) stay out, and so do their manifest entries. Raises WheelError
    when the bundle fails verification or the wheel would exceed `max_size` bytes; nothing is written then.
    """
    audit = verify(bundle)
    if not audit.ok:
        first = audit.findings[0]
        raise WheelError(
            f"{bundle.root}: refused to pack a bundle that fails verification (findings: {len(audit.findings)}; "
            f"the first: {first}); run `cubinery verify {bundle.root}`, then rebuild"
        )
    manifest = _without_emitted(bundle.manifest)
    members = _members(manifest, bundle.root)
    data = _archive(members, f"{package_name(manifest.arch)}-{manifest.package_version}.dist-info/RECORD")
    if len(data) > max_size:
        raise WheelError(
            f"{bundle.root}: the wheel would be {len(data) / 1e6:.1f} MB for {len(manifest.artifacts)} kernels, over "
            f"the limit of {max_size / 1e6:.1f} MB: build fewer configurations, or raise --max-size if your index "
            f"takes larger files"
        )
    path = out / f"{package_name(manifest.arch)}-{manifest.package_version}-py3-none-any.whl"
    atomic_write(path, data)
    return WheelReport(
        path=path,
        arch=manifest.arch,
        version=manifest.package_version,
        kernels=len(manifest.artifacts),
        size=len(data),
        unpacked=sum(len(content) for content in members.values()),
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _without_emitted(manifest: Manifest) -> Manifest:
    """The manifest as it ships: no reference to a file that stays behind."""
    return dataclasses.replace(
        manifest, artifacts=tuple(dataclasses.replace(artifact, emitted={}) for artifact in manifest.artifacts)
    )


def _members(manifest: Manifest, root: Path) -> dict[str, bytes]:
    """Archive name to content, of everything but RECORD."""
    package = package_name(manifest.arch)
    info = f"{package}-{manifest.package_version}.dist-info"
    members = {f"{package}/{MANIFEST_NAME}": manifest.dumps().encode()}
    for artifact in manifest.artifacts:
        members[f"{package}/{artifact.cubin.path}"] = artifact.cubin.locate(root).read_bytes()
    for table in manifest.tables.values():
        members[f"{package}/{table.path}"] = table.locate(root).read_bytes()
    members[f"{info}/METADATA"] = _metadata(manifest).encode()
    members[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: cubinery\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )  # fmt: skip
    members[f"{info}/entry_points.txt"] = f"[{ENTRY_POINTS}]\n{manifest.arch} = {package}\n".encode()
    return members


def _metadata(manifest: Manifest) -> str:
    families = sorted({artifact.family for artifact in manifest.artifacts})
    toolchain = "\n".join(f"- {name} {version}" for name, version in sorted(manifest.toolchain.items()))
    keys = "\n".join(f"- `{artifact.key}`" for artifact in manifest.artifacts)
    return f"""\
Metadata-Version: 2.4
Name: {distribution_name(manifest.arch)}
Version: {manifest.package_version}
Summary: Compiled GPU kernels for {manifest.arch}, opened by cubinery: {", ".join(families)}
License-Expression: Apache-2.0
Requires-Python: >=3.11
Requires-Dist: cubinery{compatible_release(manifest.package_version)}
Description-Content-Type: text/markdown

# {distribution_name(manifest.arch)}

{len(manifest.artifacts)} kernels for {manifest.arch}, found by `cubinery.runtime.Library.installed()`.
Data only: cubins and a manifest. Needs a CUDA driver that supports API version {manifest.min_driver}.

Built with:

{toolchain}

Keys:

{keys}
"""


def _archive(members: dict[str, bytes], record_name: str) -> bytes:
    """A zip of the members, `.dist-info` and RECORD last; the same bytes for the same members."""
    ordered = sorted(members.items(), key=lambda member: (".dist-info/" in member[0], member[0]))
    record = "".join(f"{name},sha256={_b64(hashlib.sha256(data).digest())},{len(data)}\n" for name, data in ordered)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in [*ordered, (record_name, f"{record}{record_name},,\n".encode())]:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            entry.create_system = 3  # Unix, wherever this runs
            archive.writestr(entry, content)
    return buffer.getvalue()


def _b64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
