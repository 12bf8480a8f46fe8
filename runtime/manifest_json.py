"""JSON to manifest records and back, with strict structural validation and no third-party package.

Only `Manifest` uses this module. Every error names the file, the place in it (`$.artifacts[2].cubin.path`),
the value and what was expected. Nothing read here is ever executed.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

from cubinery.runtime.config import split_key
from cubinery.runtime.errors import BundleError, KeyFormatError, ManifestVersionError
from cubinery.runtime.manifest import FORMAT, SCHEMA_VERSION, Artifact, FileRecord, Manifest
from cubinery.runtime.manifest_checks import NAME, InvalidError, fail, integer, list_of, record_of, text, unique
from cubinery.runtime.manifest_kernel import Memo, read_kernel

M = TypeVar("M", bound=Manifest)

_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?\Z")
_VERSION = re.compile(r"[0-9]+\.[0-9]+")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_PATH_PART = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9._+=,@-]*\Z")


# -- reading -----------------------------------------------------------------------------------


def decode(cls: type[M], data: bytes | str, source: str) -> M:
    """Validate a document and build the manifest. Raises BundleError, ManifestVersionError."""
    try:
        document = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except InvalidError as error:
        raise BundleError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: not a manifest: malformed or truncated JSON: {error}") from None
    if type(document) is not dict or document.get("format") != FORMAT:
        raise BundleError(f"{source}: $.format: expected {FORMAT!r}: this is not a cubinery manifest")
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ManifestVersionError(
            f"{source}: $.schema_version: {version!r} is unknown: this cubinery reads version {SCHEMA_VERSION}; "
            "install the cubinery that built the bundle, or rebuild it"
        )
    try:
        del document["format"], document["schema_version"]
        return _manifest(cls, document)
    except InvalidError as error:
        raise BundleError(f"{source}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidError(f"an object holds {', '.join(twice)} more than once: each name may appear once")
    return result


def _constant(text: str) -> NoReturn:
    raise InvalidError(f"{text} is not a JSON number")


def _manifest(cls: type[M], document: dict[str, Any]) -> M:
    m = record_of(document, cls, "$")
    m["arch"] = text(m["arch"], "$.arch", _ARCH, "an arch name such as sm_110a")
    text(m["package_version"], "$.package_version", _VERSION, "a version such as 1.2.0")
    text(m["ptx_version"], "$.ptx_version")
    integer(m["min_driver"], "$.min_driver", 0)
    m["toolchain"] = _strings(m["toolchain"], "$.toolchain")
    raw = list_of(m["artifacts"], "$.artifacts")
    memo: Memo = {}
    artifacts = tuple(_artifact(a, f"$.artifacts[{i}]", m["arch"], memo) for i, a in enumerate(raw))
    unique([a.key for a in artifacts], "$.artifacts", "key")
    tables = _files(m.get("tables", {}), "$.tables")
    for name in tables:
        text(name, "$.tables", NAME, "a family")
    digests: dict[str, FileRecord] = {file.path: file for file in tables.values()}
    for i, artifact in enumerate(artifacts):
        for file in (artifact.cubin, *artifact.emitted.values()):
            if digests.setdefault(file.path, file) != file:
                fail(f"$.artifacts[{i}]", f"{file.path} is recorded with two different hashes or sizes")
    return cls(**(m | {"artifacts": artifacts, "tables": tables}))


def _strings(value: Any, where: str) -> dict[str, str]:
    if type(value) is not dict:
        fail(where, f"{value!r:.60}: expected an object of strings")
    return {text(k, where): text(v, f"{where}.{k}") for k, v in value.items()}


def _artifact(value: Any, where: str, arch: str, memo: Memo) -> Artifact:
    a = record_of(value, Artifact, where)
    try:
        parts = split_key(text(a["key"], f"{where}.key"))
    except KeyFormatError as error:
        fail(f"{where}.key", str(error))
    for name, expected in (("family", parts.family), ("impl", parts.impl), ("arch", parts.arch)):
        if a[name] != expected:
            fail(f"{where}.{name}", f"{a[name]!r:.60}: expected {expected!r}, as the key {a['key']!r} says")
    if parts.arch != arch:
        fail(f"{where}.arch", f"{parts.arch!r}: expected {arch!r}, the arch of this manifest")
    if type(a["config"]) is not dict:
        fail(f"{where}.config", f"{a['config']!r:.60}: expected an object of axis values")
    for name, axis in a["config"].items():
        text(name, f"{where}.config", NAME, "an axis name")
        if type(axis) not in (str, int, bool, float) or (type(axis) is float and not math.isfinite(axis)):
            fail(f"{where}.config.{name}", f"{axis!r:.60}: expected a string, a number or a boolean")
    text(a["source_digest"], f"{where}.source_digest")
    a["cubin"] = _file(a["cubin"], f"{where}.cubin")
    kernels = list_of(a["kernels"], f"{where}.kernels")
    if not kernels:
        fail(f"{where}.kernels", "empty: expected at least one kernel")
    a["kernels"] = tuple(read_kernel(k, f"{where}.kernels[{i}]", memo) for i, k in enumerate(kernels))
    unique([k.role for k in a["kernels"]], f"{where}.kernels", "role")
    requires = list_of(a.get("requires", []), f"{where}.requires")
    a["requires"] = tuple(text(r, f"{where}.requires[{i}]") for i, r in enumerate(requires))
    unique(list(a["requires"]), f"{where}.requires", "key")
    a["emitted"] = _files(a.get("emitted", {}), f"{where}.emitted")
    return Artifact(**a)


def _files(value: Any, where: str) -> dict[str, FileRecord]:
    if type(value) is not dict:
        fail(where, f"{value!r:.60}: expected an object of files")
    return {text(k, where): _file(v, f"{where}.{k}") for k, v in value.items()}


def _file(value: Any, where: str) -> FileRecord:
    f = record_of(value, FileRecord, where)
    path = text(f["path"], f"{where}.path")
    # A plain relative path inside the bundle: no root, drive, '..', hidden or empty component.
    if len(path) > 400 or not all(_PATH_PART.match(part) for part in path.split("/")):
        fail(f"{where}.path", f"{path!r:.80}: expected a relative path inside the bundle, with plain names and '/'")
    text(f["sha256"], f"{where}.sha256", _SHA256, "64 lower-case hexadecimal digits")
    integer(f["size"], f"{where}.size", 1)
    return FileRecord(**f)


# -- writing -----------------------------------------------------------------------------------

_LINE = 110
"""Longest line that a container may share with its members."""


def encode(manifest: Manifest) -> str:
    """The canonical text: members in field order, artifacts in key order, short containers on one line."""
    plain = _plain(manifest)
    plain["artifacts"].sort(key=lambda a: a["key"])
    plain["toolchain"] = dict(sorted(plain["toolchain"].items()))
    plain["tables"] = dict(sorted(plain["tables"].items()))
    return _pretty({"format": FORMAT, "schema_version": SCHEMA_VERSION, **plain}, 0) + "\n"


def _plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _pretty(value: Any, depth: int) -> str:
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, (dict, list)) or len(line) + depth <= _LINE:
        return line
    pad = "\n" + " " * (depth + 1)
    if isinstance(value, dict):
        body = [f"{json.dumps(name)}: {_pretty(v, depth + 1)}" for name, v in value.items()]
        return "{" + pad + ("," + pad).join(body) + "\n" + " " * depth + "}"
    return "[" + pad + ("," + pad).join(_pretty(v, depth + 1) for v in value) + "\n" + " " * depth + "]"
