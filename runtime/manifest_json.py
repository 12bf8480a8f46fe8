"""JSON to manifest records and back, with strict structural validation and no third-party package.

Only `Manifest` uses this module. Every error names the file, the place in it (`$.artifacts[2].cubin.path`),
the value and what was expected. Nothing read here is ever executed.
"""

from __future__ import annotations

import json
import marshal
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NoReturn, TypeVar, get_args

from cubinery.runtime.config import split_key
from cubinery.runtime.errors import BundleError, KeyFormatError, ManifestVersionError
from cubinery.runtime.manifest import (
    FORMAT,
    MAX_PARAM_BYTES,
    PARAM_ALIGN,
    PARAM_SIZE,
    SCHEMA_VERSION,
    Artifact,
    FileRecord,
    Interleave,
    KernelRecord,
    L2Promotion,
    Manifest,
    OobFill,
    ParamSpec,
    Resources,
    Swizzle,
    TensorMapSpec,
)

M = TypeVar("M", bound=Manifest)
T = TypeVar("T")

TENSOR_MAP_BITS = {
    "uint8": 8, "uint16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64, "float16": 16, "float32": 32,
    "float64": 64, "bfloat16": 16, "float32_ftz": 32, "tfloat32": 32, "tfloat32_ftz": 32,
    "16u4_align8b": 4, "16u4_align16b": 4, "16u6_align16b": 6,
}  # fmt: skip
"""Bits of one element of each tensor map data type, spelt as CUtensorMapDataType in lower case."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SYMBOL = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.]*\Z")
_ARCH = re.compile(r"sm_[0-9]{2,3}[af]?\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_PATH_PART = re.compile(r"[A-Za-z0-9_+=,@-][A-Za-z0-9._+=,@-]*\Z")

Memo = dict[bytes, Any]
"""Parts of this document that were already found to be valid, by their exact value."""


class _InvalidError(Exception):
    """Place in the document and what is wrong there."""


def _fail(where: str, message: str) -> NoReturn:
    raise _InvalidError(f"{where}: {message}")


# -- reading -----------------------------------------------------------------------------------


def decode(cls: type[M], data: bytes | str, source: str) -> M:
    """Validate a document and build the manifest. Raises BundleError, ManifestVersionError."""
    try:
        document = json.loads(data, object_pairs_hook=_object, parse_constant=_constant)
    except _InvalidError as error:
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
    except _InvalidError as error:
        raise BundleError(f"{source}: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise _InvalidError(f"an object holds {', '.join(twice)} more than once: each name may appear once")
    return result


def _constant(text: str) -> NoReturn:
    raise _InvalidError(f"{text} is not a JSON number")


@cache
def _members(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """(all, required) member names of a record."""
    named = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    return frozenset(named), frozenset(name for name, required in named.items() if required)


def _record(value: Any, cls: type, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        _fail(where, f"{value!r:.60}: expected an object")
    known, required = _members(cls)
    unknown = [name for name in value if name not in known]
    if unknown:
        _fail(f"{where}.{unknown[0]}", f"unknown member: expected one of {', '.join(f.name for f in fields(cls))}")
    missing = [name for name in required if name not in value]
    if missing:
        _fail(where, f"no {', '.join(sorted(missing))}")
    return dict(value)


def _list(value: Any, where: str, length: int | None = None) -> list[Any]:
    if type(value) is not list or (length is not None and len(value) != length):
        _fail(where, f"{value!r:.60}: expected a list" + (f" of {length}" if length is not None else ""))
    return list(value)


def _int(value: Any, where: str, low: int, high: int | None = None) -> int:
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        _fail(where, f"{value!r:.60}: expected an integer {bound}")
    return value


def _bool(value: Any, where: str) -> bool:
    if type(value) is not bool:
        _fail(where, f"{value!r:.60}: expected true or false")
    return value


def _text(value: Any, where: str, pattern: re.Pattern[str] | None = None, what: str = "a string") -> str:
    if type(value) is not str or not value or (pattern is not None and not pattern.match(value)):
        _fail(where, f"{value!r:.80}: expected {what}")
    return value


def _choice(value: Any, choices: Any, where: str) -> Any:
    if type(value) is not str or value not in choices:
        _fail(where, f"{value!r:.60}: expected one of {', '.join(choices)}")
    return value


def _dims(value: Any, where: str, most: int, low: int = 1) -> tuple[int, int, int]:
    x, y, z = (_int(v, f"{where}[{i}]", low) for i, v in enumerate(_list(value, where, 3)))
    if x * y * z > most:
        _fail(where, f"{value!r}: expected a product of at most {most}")
    return (x, y, z)


def _names(value: Any, where: str, length: int) -> tuple[str | int, ...]:
    """Launch-value names, or positive literals."""
    return tuple(
        _int(v, f"{where}[{i}]", 1) if type(v) is int else _text(v, f"{where}[{i}]", _NAME, "a name or an integer")
        for i, v in enumerate(_list(value, where, length))
    )


def _unique(values: list[str], where: str, what: str) -> None:
    if len(set(values)) != len(values):
        twice = sorted({v for v in values if values.count(v) > 1})
        _fail(where, f"{what} {', '.join(map(repr, twice))} more than once: each may appear once")


def _manifest(cls: type[M], document: dict[str, Any]) -> M:
    m = _record(document, cls, "$")
    m["arch"] = _text(m["arch"], "$.arch", _ARCH, "an arch name such as sm_110a")
    _text(m["package_version"], "$.package_version")
    _text(m["ptx_version"], "$.ptx_version")
    _int(m["min_driver"], "$.min_driver", 0)
    m["toolchain"] = _strings(m["toolchain"], "$.toolchain")
    raw = _list(m["artifacts"], "$.artifacts")
    memo: Memo = {}
    artifacts = tuple(_artifact(a, f"$.artifacts[{i}]", m["arch"], memo) for i, a in enumerate(raw))
    _unique([a.key for a in artifacts], "$.artifacts", "key")
    digests: dict[str, FileRecord] = {}
    for i, artifact in enumerate(artifacts):
        for file in (artifact.cubin, *artifact.emitted.values()):
            if digests.setdefault(file.path, file) != file:
                _fail(f"$.artifacts[{i}]", f"{file.path} is recorded with two different hashes or sizes")
    return cls(**(m | {"artifacts": artifacts}))


def _strings(value: Any, where: str) -> dict[str, str]:
    if type(value) is not dict:
        _fail(where, f"{value!r:.60}: expected an object of strings")
    return {_text(k, where): _text(v, f"{where}.{k}") for k, v in value.items()}


def _artifact(value: Any, where: str, arch: str, memo: Memo) -> Artifact:
    a = _record(value, Artifact, where)
    try:
        parts = split_key(_text(a["key"], f"{where}.key"))
    except KeyFormatError as error:
        _fail(f"{where}.key", str(error))
    for name, expected in (("family", parts.family), ("impl", parts.impl), ("arch", parts.arch)):
        if a[name] != expected:
            _fail(f"{where}.{name}", f"{a[name]!r:.60}: expected {expected!r}, as the key {a['key']!r} says")
    if parts.arch != arch:
        _fail(f"{where}.arch", f"{parts.arch!r}: expected {arch!r}, the arch of this manifest")
    if type(a["config"]) is not dict:
        _fail(f"{where}.config", f"{a['config']!r:.60}: expected an object of axis values")
    for name, axis in a["config"].items():
        _text(name, f"{where}.config", _NAME, "an axis name")
        if type(axis) not in (str, int, bool, float) or (type(axis) is float and not math.isfinite(axis)):
            _fail(f"{where}.config.{name}", f"{axis!r:.60}: expected a string, a number or a boolean")
    _text(a["source_digest"], f"{where}.source_digest")
    a["cubin"] = _file(a["cubin"], f"{where}.cubin")
    kernels = _list(a["kernels"], f"{where}.kernels")
    if not kernels:
        _fail(f"{where}.kernels", "empty: expected at least one kernel")
    a["kernels"] = tuple(_kernel(k, f"{where}.kernels[{i}]", memo) for i, k in enumerate(kernels))
    _unique([k.role for k in a["kernels"]], f"{where}.kernels", "role")
    requires = _list(a.get("requires", []), f"{where}.requires")
    a["requires"] = tuple(_text(r, f"{where}.requires[{i}]") for i, r in enumerate(requires))
    _unique(list(a["requires"]), f"{where}.requires", "key")
    emitted = a.get("emitted", {})
    if type(emitted) is not dict:
        _fail(f"{where}.emitted", f"{emitted!r:.60}: expected an object of files")
    a["emitted"] = {_text(k, f"{where}.emitted"): _file(v, f"{where}.emitted.{k}") for k, v in emitted.items()}
    return Artifact(**a)


def _file(value: Any, where: str) -> FileRecord:
    f = _record(value, FileRecord, where)
    path = _text(f["path"], f"{where}.path")
    # A plain relative path inside the bundle: no root, drive, '..', hidden or empty component.
    if len(path) > 400 or not all(_PATH_PART.match(part) for part in path.split("/")):
        _fail(f"{where}.path", f"{path!r:.80}: expected a relative path inside the bundle, with plain names and '/'")
    _text(f["sha256"], f"{where}.sha256", _SHA256, "64 lower-case hexadecimal digits")
    _int(f["size"], f"{where}.size", 1)
    return FileRecord(**f)


def _kernel(value: Any, where: str, memo: Memo) -> KernelRecord:
    k = _record(value, KernelRecord, where)
    _text(k["role"], f"{where}.role", _NAME, "a name")
    _text(k["symbol"], f"{where}.symbol", _SYMBOL, "a symbol")
    k["block"] = _dims(k["block"], f"{where}.block", 1024)
    k["grid"] = _names(k["grid"], f"{where}.grid", 3)
    k["params"] = _once(k["params"], f"{where}.params", memo, _params)
    maps = _list(k.get("tensor_maps", []), f"{where}.tensor_maps")
    k["tensor_maps"] = tuple(_once(t, f"{where}.tensor_maps[{i}]", memo, _tensor_map) for i, t in enumerate(maps))
    if "cluster" in k:
        k["cluster"] = _dims(k["cluster"], f"{where}.cluster", 16)
    _int(k.get("dynamic_smem", 0), f"{where}.dynamic_smem", 0, 256 * 1024)
    _int(k.get("carveout", -1), f"{where}.carveout", -1, 100)
    _int(k.get("min_ctas_per_sm", 1), f"{where}.min_ctas_per_sm", 1, 32)
    _bool(k.get("pdl", False), f"{where}.pdl")
    if k.get("resources") is not None:
        k["resources"] = _resources(k["resources"], f"{where}.resources")
    record = KernelRecord(**k)
    _check_names(record, where)
    return record


def _resources(value: Any, where: str) -> Resources:
    r = _record(value, Resources, where)
    return Resources(**{name: _int(number, f"{where}.{name}", 0) for name, number in r.items()})


def _once(value: Any, where: str, memo: Memo, parse: Callable[[Any, str], T]) -> T:
    """`parse(value, where)`, once for equal values: the keys of a family repeat the same parameter
    lists and tensor maps, and opening a bundle of a hundred keys must stay quick.

    marshal tells 1, 1.0 and true apart; what it wrote is only compared, never loaded.
    """
    try:
        exact = marshal.dumps(value, 2)
    except ValueError:
        _fail(where, "nested too deeply")
    if exact not in memo:
        memo[exact] = parse(value, where)
    found: T = memo[exact]
    return found


def _params(value: Any, where: str) -> tuple[ParamSpec, ...]:
    specs: list[ParamSpec] = []
    end = 0
    for i, raw in enumerate(_list(value, where)):
        at = f"{where}[{i}]"
        p = _record(raw, ParamSpec, at)
        _text(p["name"], f"{at}.name", _NAME, "a name")
        kind, offset, size, align = _choice(p["kind"], PARAM_SIZE, f"{at}.kind"), p["offset"], p["size"], p["align"]
        if type(size) is not int or size != PARAM_SIZE[kind]:
            _fail(f"{at}.size", f"{size!r:.60}: expected {PARAM_SIZE[kind]}, the size of {kind}")
        if type(align) is not int or align != PARAM_ALIGN[kind]:
            _fail(f"{at}.align", f"{align!r:.60}: expected {PARAM_ALIGN[kind]}, the alignment of {kind}")
        if type(offset) is not int or offset < end or offset % align or offset + size > MAX_PARAM_BYTES:
            expected = f"a multiple of {align} from {end} to {MAX_PARAM_BYTES - size}"
            _fail(f"{at}.offset", f"{offset!r:.60}: expected {expected}")
        end = offset + size
        specs.append(ParamSpec(**p))
    _unique([s.name for s in specs], where, "parameter")
    return tuple(specs)


_SWIZZLE_BYTES = {"none": 1 << 32, "32B": 32, "64B": 64, "128B": 128}


def _tensor_map(value: Any, where: str) -> TensorMapSpec:
    t = _record(value, TensorMapSpec, where)
    _text(t["name"], f"{where}.name", _NAME, "a name")
    _text(t["pointer"], f"{where}.pointer", _NAME, "a name")
    bits = TENSOR_MAP_BITS[_choice(t["dtype"], TENSOR_MAP_BITS, f"{where}.dtype")]
    box = _list(t["box"], f"{where}.box")
    rank = len(box)
    if not 1 <= rank <= 5:
        _fail(f"{where}.box", f"rank {rank}: expected 1 to 5 dimensions")
    t["box"] = tuple(_int(v, f"{where}.box[{i}]", 1, 256) for i, v in enumerate(box))
    steps = _list(t["element_strides"], f"{where}.element_strides", rank)
    t["element_strides"] = tuple(_int(v, f"{where}.element_strides[{i}]", 1, 8) for i, v in enumerate(steps))
    t["extents"] = _names(t["extents"], f"{where}.extents", rank)
    t["strides"] = _names(t["strides"], f"{where}.strides", rank - 1)
    _choice(t.get("swizzle", "none"), get_args(Swizzle), f"{where}.swizzle")
    interleave = _choice(t.get("interleave", "none"), get_args(Interleave), f"{where}.interleave")
    _choice(t.get("l2_promotion", "none"), get_args(L2Promotion), f"{where}.l2_promotion")
    _choice(t.get("oob_fill", "zero"), get_args(OobFill), f"{where}.oob_fill")
    spec = TensorMapSpec(**t)
    limit = _SWIZZLE_BYTES[spec.swizzle]
    if interleave == "none" and bits >= 8 and spec.box[0] * bits // 8 > limit:
        _fail(f"{where}.box[0]", f"{spec.box[0]} of {spec.dtype}: expected at most {limit} bytes, the swizzle's span")
    if interleave != "none" and rank < 3:
        _fail(f"{where}.interleave", f"{interleave!r} with rank {rank}: expected rank 3 or more")
    return spec


def _check_names(record: KernelRecord, where: str) -> None:
    """Parameters and maps must fit each other, and a launch value must mean one thing everywhere."""
    kinds = {p.name: p.kind for p in record.params}
    maps = [t.name for t in record.tensor_maps]
    _unique(maps, f"{where}.tensor_maps", "map")
    for i, param in enumerate(record.params):
        if param.kind == "tensor_map" and param.name not in maps:
            _fail(f"{where}.params[{i}].name", f"{param.name!r}: no tensor map has this name")
    for i, spec in enumerate(record.tensor_maps):
        at = f"{where}.tensor_maps[{i}]"
        if kinds.get(spec.name) != "tensor_map":
            _fail(f"{at}.name", f"{spec.name!r}: no parameter of kind tensor_map has this name")
        if kinds.get(spec.pointer, "pointer") != "pointer":
            _fail(f"{at}.pointer", f"{spec.pointer!r} is a parameter of kind {kinds[spec.pointer]}: expected a pointer")
        _integers(spec.extents, kinds, f"{at}.extents", spec.pointer)
        _integers(spec.strides, kinds, f"{at}.strides", spec.pointer)
    pointers = {t.pointer for t in record.tensor_maps}
    _integers(record.grid, kinds, f"{where}.grid", *pointers)


def _integers(names: tuple[str | int, ...], kinds: dict[str, Any], where: str, *pointers: str) -> None:
    for i, name in enumerate(names):
        if isinstance(name, int):
            continue
        kind = "pointer" if name in pointers else kinds.get(name, "i32")
        if kind not in ("i32", "i64"):
            _fail(f"{where}[{i}]", f"{name!r} is of kind {kind}: expected an integer")


# -- writing -----------------------------------------------------------------------------------

_LINE = 110


def encode(manifest: Manifest) -> str:
    """The canonical text: members in field order, artifacts in key order, short containers on one line."""
    plain = _plain(manifest)
    plain["artifacts"].sort(key=lambda a: a["key"])
    plain["toolchain"] = dict(sorted(plain["toolchain"].items()))
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
