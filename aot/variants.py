"""From specs to the list of artifacts to build: expand, merge, add what is required, prove closure."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cubinery.aot.errors import ClosureError, SpecError
from cubinery.aot.spec import Gates, KernelSpec
from cubinery.aot.tables import Table, TableName
from cubinery.aot.tables import rows as table_rows
from cubinery.runtime.arch import Arch, resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ArchError, ConfigError, CubineryError
from cubinery.runtime.families import config_class, parse_key


@dataclass(frozen=True, slots=True)
class BuildItem:
    """One artifact to build. `config` is canonical; `origin` is the `file:line` that asked for it."""

    key: str
    config: KernelConfig
    arch: Arch
    gates: Gates
    emit: tuple[str, ...]
    origin: str
    explicit: bool = True
    """False where only another artifact's `requires` asks for it."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Keys of the artifacts that a launch of this one may need."""
        return tuple(other.key(self.arch.name) for other in self.config.requires())


def expand(specs: Sequence[KernelSpec], archs: Iterable[str] | None = None) -> list[BuildItem]:
    """Every artifact of the specs, once, sorted by key; `archs` (names or aliases) restricts them.

    The same key from two places must have the same gates and outputs. An artifact that is only
    required by others has the default gates and everything that those others emit.
    Raises SpecError, and ArchError for an unknown arch or one that no spec asks for.
    """
    wanted = _restrict(specs, archs)
    items: dict[str, BuildItem] = {}
    for spec in specs:
        for point in spec.points:
            if point.arch.name not in wanted:
                continue
            key = point.config.key(point.arch.name)
            item = BuildItem(key, point.config, point.arch, spec.gates, spec.emit, str(point.place))
            known = items.setdefault(key, item)
            for name in ("gates", "emit"):
                if getattr(known, name) != getattr(item, name):
                    raise SpecError(
                        f"{key}: {name} differ: {_spell(getattr(item, name))} here, "
                        f"{_spell(getattr(known, name))} at {known.origin}: make them agree",
                        file=point.place.file,
                        line=point.place.line,
                        where=point.place.path,
                    )
    return _with_required(items)


def _spell(value: object) -> str:
    if isinstance(value, Gates):
        return "{" + ", ".join(f"{k}: {v}" for k, v in dataclasses.asdict(value).items() if v is not None) + "}"
    return "[" + ", ".join(value) + "]" if isinstance(value, tuple) else str(value)


def _restrict(specs: Sequence[KernelSpec], archs: Iterable[str] | None) -> set[str]:
    offered = {name for spec in specs for name in spec.archs}
    if archs is None:
        return offered
    wanted = [resolve(name).name for name in archs]
    if not wanted:
        raise ArchError(f"no arch given: expected one or more of {', '.join(sorted(offered))}")
    for name in wanted:
        if name not in offered:
            files = ", ".join(sorted({spec.file for spec in specs}))
            raise ArchError(f"no spec asks for {name}: {files} build {', '.join(sorted(offered))}")
    return set(wanted)


def _with_required(items: dict[str, BuildItem]) -> list[BuildItem]:
    """Add required artifacts, transitively, and let them emit what those that need them emit."""
    found = dict(items)
    queue = list(items.values())
    while queue:
        item = queue.pop()
        for other in item.config.requires():
            config = other.canonical()
            key = config.key(item.arch.name)
            known = found.get(key)
            if known is None:
                config.check_arch(item.arch)
                found[key] = BuildItem(key, config, item.arch, Gates(), item.emit, item.origin, explicit=False)
                queue.append(found[key])
            elif not set(item.emit) <= set(known.emit):
                found[key] = dataclasses.replace(known, emit=tuple(sorted({*known.emit, *item.emit})))
                queue.append(found[key])
    return sorted(found.values(), key=lambda item: item.key)


def check_closure(
    specs: Sequence[KernelSpec], items: Sequence[BuildItem], tables: Mapping[TableName, Table] | None = None
) -> None:
    """Prove that every kernel the selectors can pick for the specs' domains is among `items`.

    Checked for each arch that both the spec and `items` have, with the tables that the bundles will hold. Raises
    ClosureError naming the keys that are missing, or SpecError where the domain itself is wrong.
    """
    keys = {item.key for item in items}
    archs = {item.arch.name for item in items}
    for spec in specs:
        for domain, place in spec.domain:
            missing: dict[str, KernelConfig] = {}
            for arch in spec.archs:
                if arch in archs:
                    rows = table_rows(tables or {}, spec.family, arch)
                    for config in _outcomes(spec, domain, arch, rows, place.fail):
                        for needed in (config, *config.requires()):
                            key = needed.key(arch)
                            if key not in keys:
                                missing[key] = needed.canonical()
            if missing:
                shown = "; ".join(f"{key} {flow(config)}" for key, config in list(missing.items())[:5])
                more = f"; and {len(missing) - 5} more" if len(missing) > 5 else ""
                error = ClosureError(
                    f"the selector can pick {len(missing)} kernel{'s' * (len(missing) > 1)} that no spec here builds: "
                    f"{shown}{more}: add them to the matrix or narrow the domain",
                    file=place.file,
                    line=place.line,
                    where=place.path,
                )
                error.missing = tuple(missing)
                raise error


def _outcomes(
    spec: KernelSpec, domain: dict[str, list[Any]], arch: str, rows: Any, fail: Callable[[str], NoReturn]
) -> Iterator[KernelConfig]:
    name = f"cubinery.runtime.ops.{spec.family}.select"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        fail(f"{spec.family} has no selector ({name}), so no domain can be proved: remove `domain`")
    try:
        yield from module.outcomes(domain, arch) if rows is None else module.outcomes(domain, arch, rows)
    except ConfigError as error:
        fail(f"{error} (on {arch})")


def flow(config: KernelConfig) -> str:
    """The axes of a configuration as one line of YAML: `{head_dim: 128, causal: true}`."""
    spelled = {k: str(v).lower() if isinstance(v, bool) else v for k, v in config.axes().items()}
    return "{" + ", ".join(f"{k}: {v}" for k, v in spelled.items()) + "}"


def from_misses(path: str | os.PathLike[str]) -> list[BuildItem]:
    """The artifacts of a recorded list of misses: a JSON list, or one JSON object a line.

    An entry has `key`, or `family`, `impl`, `arch` and `axes`; where it has both they must agree.
    Raises SpecError with the file and line, or the number of the entry.
    """
    file = os.fspath(path)
    try:
        text = Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SpecError("expected UTF-8 text", file=file) from None
    except OSError as error:
        raise SpecError(f"cannot read the list of misses: {error.strerror}", file=file) from None
    items: dict[str, BuildItem] = {}
    for entry, line, where in _entries(text, file):
        try:
            config, arch = _missed(entry)
        except CubineryError as error:
            raise SpecError(str(error), file=file, line=line, where=where) from None
        key = config.key(arch.name)
        origin = f"{file}:{line}" if line else f"{file} {where}"
        items.setdefault(key, BuildItem(key, config, arch, Gates(), (), origin))
    if not items:
        raise SpecError("the list holds no misses: nothing to build", file=file)
    return _with_required(items)


def _entries(text: str, file: str) -> Iterator[tuple[Any, int | None, str]]:
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise SpecError(f"not valid JSON: {error}", file=file, line=getattr(error, "lineno", None)) from None
        yield from ((entry, None, f"[{i}]") for i, entry in enumerate(entries))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield json.loads(line), number, ""
            except ValueError as error:
                raise SpecError(f"not valid JSON: {error}", file=file, line=number) from None


def _missed(entry: Any) -> tuple[KernelConfig, Arch]:
    if not isinstance(entry, dict):
        raise ConfigError(f"expected an object with `key`, or `family`, `impl`, `arch` and `axes`, found {entry!r}")
    key = entry.get("key")
    described = [name for name in ("family", "impl", "arch", "axes") if name in entry]
    if key is None and len(described) < 4:
        raise ConfigError("expected `key`, or all of `family`, `impl`, `arch` and `axes`")
    config: KernelConfig | None = None
    if key is not None:
        if not isinstance(key, str):
            raise ConfigError(f"key: expected text, found {key!r}")
        config, name = parse_key(key)
    else:
        name = entry["arch"]
    if len(described) == 4:
        for field_name, kind in (("family", str), ("impl", str), ("arch", str), ("axes", dict)):
            if not isinstance(entry[field_name], kind):
                expected = "text" if kind is str else "an object"
                raise ConfigError(f"{field_name}: expected {expected}, found {entry[field_name]!r}")
        told = config_class(entry["family"], entry["impl"]).from_axes(entry["axes"]).canonical()
        name = resolve(entry["arch"]).name
        if key is not None and told.key(name) != key:
            raise ConfigError(f"the axes spell {told.key(name)}, but the key is {key}")
        config = told
    assert config is not None
    arch = resolve(name)
    config.check_arch(arch)
    return config.canonical(), arch
