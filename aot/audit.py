"""Bundles examined after the fact: is each file what the manifest says, and what differs between two.

`verify` trusts nothing: it hashes every file again, reads architecture, symbols, parameters and resources
back from the cubins, and compares all of it with the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from cubinery.aot.errors import InspectError
from cubinery.aot.inspect import CubinInfo, KernelInfo, occupancy, ptx_params, read_cubin
from cubinery.aot.store import files_of
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.bundle import Bundle
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.families import parse_key
from cubinery.runtime.manifest import MANIFEST_NAME, Artifact, FileRecord, KernelRecord, Manifest


class CheckFailedError(CubineryError):
    """A check that was asked for found something wrong; base of errors that are an outcome, not a wrong call."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as the manifest says."""

    key: str
    """The artifact's key; empty where the bundle as a whole is meant."""
    check: str
    """`key`, `requires`, `sha256`, `arch`, `symbol`, `abi`, `resources`, `occupancy` or `emitted`."""
    message: str

    def __str__(self) -> str:
        return f"{self.key or 'bundle'}: {self.check}: {self.message}"


@dataclass(frozen=True, slots=True)
class Audit:
    """The outcome of verifying one arch's bundle."""

    path: Path
    arch: str
    artifacts: int
    """How many were examined."""
    bytes_hashed: int
    findings: tuple[Finding, ...]
    strays: tuple[str, ...]
    """Files in the bundle's folder that its manifest does not name; harmless, but never shipped."""

    @property
    def ok(self) -> bool:
        """True where nothing was found."""
        return not self.findings


# -- verify ------------------------------------------------------------------------------------------

Say = Callable[[str, str], None]
"""Takes (check, message) of one finding."""


def verify(bundle: Bundle) -> Audit:
    """Compare every artifact of one arch's bundle with what its files really hold. Changes nothing."""
    findings: list[Finding] = []
    hashed = 0
    known = {artifact.key for artifact in bundle.manifest.artifacts}
    for artifact in bundle.manifest.artifacts:

        def say(check: str, message: str, key: str = artifact.key) -> None:
            findings.append(Finding(key, check, message))

        _check_key(artifact, bundle.manifest, known, say)
        cubin = _read(bundle.root, artifact.cubin, "sha256", say)
        emitted = {kind: _read(bundle.root, record, "emitted", say) for kind, record in artifact.emitted.items()}
        hashed += sum(len(data) for data in (cubin, *emitted.values()) if data is not None)
        if cubin is not None:
            _check_cubin(artifact, cubin, emitted.get("ptx"), say)
    hashed += sum(len(data) for data in bundle.tables.values())  # read and compared when the bundle was opened
    strays = tuple(_strays(bundle))
    return Audit(bundle.root, bundle.manifest.arch, len(bundle.manifest.artifacts), hashed, tuple(findings), strays)


def _check_key(artifact: Artifact, manifest: Manifest, known: set[str], say: Say) -> None:
    """The key parses back to the recorded configuration, and all that it requires is in the bundle."""
    try:
        config, arch = parse_key(artifact.key)
    except CubineryError as error:
        say("key", str(error))
    else:
        recorded = (artifact.family, artifact.impl, artifact.arch, artifact.config)
        spelled = (config.family, config.impl, arch, config.axes())
        if recorded != spelled:
            say("key", f"the manifest records {recorded}, but the key spells {spelled}")
    if artifact.arch != manifest.arch:
        say("key", f"arch {artifact.arch} in a bundle for {manifest.arch}")
    for key in artifact.requires:
        if key not in known:
            say("requires", f"{key} is not in the bundle")


def _read(root: Path, record: FileRecord, check: str, say: Say) -> bytes | None:
    """The bytes of a file, or None (and a finding) where they are not those recorded."""
    try:
        data = record.locate(root).read_bytes()
    except CubineryError as error:
        say(check, str(error))
        return None
    except OSError as error:
        say(check, f"{record.path}: {error.strerror}")
        return None
    digest = hashlib.sha256(data).hexdigest()
    if len(data) != record.size:
        say(check, f"{record.path}: {len(data)} bytes, expected {record.size}")
        return None
    if digest != record.sha256:
        say(check, f"{record.path}: sha256 {digest}, expected {record.sha256}")
        return None
    return data


def _check_cubin(artifact: Artifact, cubin: bytes, ptx: bytes | None, say: Say) -> None:
    """Architecture, symbols, parameters and resources of the code against the manifest."""
    try:
        info = read_cubin(cubin)
    except InspectError as error:
        say("arch", str(error))
        return
    _check_arch(artifact.arch, info, say)
    if missing := sorted({record.symbol for record in artifact.kernels} - set(info.kernels)):
        say("symbol", f"no {', '.join(missing)} in the cubin: it holds {', '.join(info.kernels) or 'no kernel'}")
    for record in artifact.kernels:
        if record.symbol in info.kernels:
            _check_kernel(artifact.arch, record, info.kernels[record.symbol], say)
            if ptx is not None:
                _check_ptx(record, ptx.decode(errors="replace"), say)


def _check_arch(name: str, info: CubinInfo, say: Say) -> None:
    arch = ARCHS.get(name)
    if arch is None:
        say("arch", f"{name} is not in the arch table: expected one of {', '.join(ARCHS)}")
    elif info.sm != arch.sm:
        say("arch", f"the cubin is for SM {info.sm}, expected {arch.sm} ({name})")
    elif info.arch is not None and info.arch != name:
        say("arch", f"the cubin was assembled for {info.arch}, expected {name}")


def _check_kernel(arch_name: str, record: KernelRecord, code: KernelInfo, say: Say) -> None:
    """One kernel's parameters, block, resources and occupancy."""
    expected = [(param.offset, param.size) for param in record.params]
    if list(code.params) != expected:
        say("abi", _abi_difference(record.symbol, list(code.params), expected))
    if code.block is not None and code.block != record.block:
        say("abi", f"{record.symbol}: the code requires a block of {code.block}, the manifest says {record.block}")
    recorded = record.resources
    if recorded is None:
        say("resources", f"{record.symbol}: the manifest records no resources")
        return
    for name in ("registers", "stack", "static_smem"):
        found, told = getattr(code, name), getattr(recorded, name)
        if found != told:
            say("resources", f"{record.symbol}: {name} is {found} in the cubin, {told} in the manifest")
    if (arch := ARCHS.get(arch_name)) is not None:
        threads = record.block[0] * record.block[1] * record.block[2]
        smem = code.static_smem + record.dynamic_smem
        fit, limit = occupancy(
            arch, threads=threads, registers=code.registers, smem=smem, tmem_columns=record.tmem_columns
        )
        if fit < record.min_ctas_per_sm:
            wanted = record.min_ctas_per_sm
            say("occupancy", f"{record.symbol}: {fit} CTAs fit an SM (limit: {limit}), expected {wanted}")
        if fit != recorded.ctas_per_sm:
            say("occupancy", f"{record.symbol}: {fit} CTAs fit an SM, the manifest says {recorded.ctas_per_sm}")


def _abi_difference(symbol: str, found: Sequence[tuple[int, int]], expected: Sequence[tuple[int, int]]) -> str:
    if len(found) != len(expected):
        return f"{symbol}: the code takes {len(found)} parameters, the manifest lists {len(expected)}"
    index = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    return (
        f"{symbol}: parameter {index} is at (offset, size) {found[index]} in the code, "
        f"{expected[index]} in the manifest"
    )


def _check_ptx(record: KernelRecord, ptx: str, say: Say) -> None:
    """Sizes of the parameters that the kept PTX declares; its alignments may be looser than the ABI's."""
    try:
        sizes = [size for size, _ in ptx_params(ptx, record.symbol)]
    except InspectError as error:
        say("abi", f"the kept PTX: {error}")
        return
    expected = [param.size for param in record.params]
    if sizes != expected:
        say("abi", f"{record.symbol}: the kept PTX declares parameters of {sizes} bytes, expected {expected}")


def _strays(bundle: Bundle) -> Iterator[str]:
    """Files below the bundle's folder that its manifest does not name."""
    named = {MANIFEST_NAME, "report.json"} | {record.path for _, record in files_of(bundle.manifest)}
    for file in sorted(bundle.root.rglob("*")):
        relative = file.relative_to(bundle.root).as_posix()
        if file.is_file() and relative not in named and not file.name.startswith("."):
            yield relative


# -- diff --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BundleDiff:
    """What differs between two sets of bundles. Changes map a field to its (old, new) text."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: dict[str, dict[str, tuple[str, str]]]
    bundle: dict[str, tuple[str, str]]
    """Toolchain and package versions, minimum driver, PTX version and tables, as `sm_90a nvidia-cutlass-dsl`."""
    unchanged: int

    @property
    def same(self) -> bool:
        """True where keys, launches, hashes and toolchains all agree."""
        return not (self.added or self.removed or self.changed or self.bundle)


def diff_bundles(old: Sequence[Bundle], new: Sequence[Bundle]) -> BundleDiff:
    """Compare two sets of bundles by key and by manifest; reads no cubin."""
    before = {artifact.key: artifact for bundle in old for artifact in bundle.manifest.artifacts}
    after = {artifact.key: artifact for bundle in new for artifact in bundle.manifest.artifacts}
    changed, unchanged = {}, 0
    for key in sorted(before.keys() & after.keys()):
        if changes := _changes(_facts(before[key]), _facts(after[key])):
            changed[key] = changes
        else:
            unchanged += 1
    return BundleDiff(
        added=tuple(sorted(after.keys() - before.keys())),
        removed=tuple(sorted(before.keys() - after.keys())),
        changed=changed,
        bundle=_bundle_changes(old, new),
        unchanged=unchanged,
    )


def _bundle_changes(old: Sequence[Bundle], new: Sequence[Bundle]) -> dict[str, tuple[str, str]]:
    before = {bundle.manifest.arch: bundle.manifest for bundle in old}
    after = {bundle.manifest.arch: bundle.manifest for bundle in new}
    changes = {}
    for arch in sorted(before.keys() & after.keys()):
        for name, values in _changes(_made_with(before[arch]), _made_with(after[arch])).items():
            changes[f"{arch} {name}"] = values
    return changes


def _made_with(manifest: Manifest) -> dict[str, str]:
    facts = {"package_version": manifest.package_version, "ptx_version": manifest.ptx_version}
    tables = {f"selector table of {family}": file.sha256[:16] for family, file in sorted(manifest.tables.items())}
    return facts | {"min_driver": str(manifest.min_driver)} | manifest.toolchain | tables


def _changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str, str]]:
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n, ""), after.get(n, "")) for n in names if before.get(n) != after.get(n)}


def _facts(artifact: Artifact) -> dict[str, str]:
    """Everything of an artifact that a user may care about, as flat text."""
    facts = {
        "cubin sha256": artifact.cubin.sha256[:16],
        "cubin size": str(artifact.cubin.size),
        "source digest": artifact.source_digest[:16],
        "requires": ", ".join(artifact.requires),
        "emitted": ", ".join(f"{kind} {record.sha256[:16]}" for kind, record in sorted(artifact.emitted.items())),
    }
    for record in artifact.kernels:
        for field in fields(record):
            if field.name != "resources":
                facts[f"{record.role} {field.name}"] = _text(getattr(record, field.name))
        if record.resources is not None:
            for field in fields(record.resources):
                facts[f"{record.role} {field.name}"] = str(getattr(record.resources, field.name))
    return facts


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(getattr(item, "name", item)) for item in value)
    return str(value)
