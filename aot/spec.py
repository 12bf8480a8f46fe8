"""YAML specs: what to build. Every mistake is a SpecError with file, line, path and the way out.

A spec file holds one YAML document per family implementation, separated by `---`:

    family: paged_decode
    impl: mma
    defaults: {kv_format: fp8}            # axis: value, for every combination
    matrix:                               # one mapping, or a list of them: products of lists
      - arch: [sm_90a, sm_110a]
        head_dim: [128, 256]
        page_size: [16, 32]
    exclude:                              # combinations of the matrix to leave out
      - {head_dim: 256, page_size: [16, 32]}
    include:                              # further products, which no exclude touches
      - {arch: sm_90a, head_dim: 256, page_size: 64}
    gates: {max_registers: 168, max_stack: 0, min_ctas_per_sm: 2}
    emit: [ptx]                           # ptx, object, object-linux-aarch64
    domain:                               # problems whose selected kernels must all be here
      - {head_dim: [128], page_size: [16, 32], kv_format: [fp8], group_size: [1, 4]}

Matching and products see the axes as the family's config class declares them, defaults filled in.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from cubinery.aot.errors import SpecError
from cubinery.aot.yamldoc import Place, Value, load_documents, nearest
from cubinery.runtime.arch import ARCHS, Arch, resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ArchError, ConfigError
from cubinery.runtime.families import config_class, configs, families

EMITS = ("ptx", "object", "object-linux-aarch64")
"""What `emit:` may name beside the cubin."""

MAX_COMBINATIONS = 100_000
"""Most combinations one matrix block may span: a slip of the pen, not a plan, asks for more."""

_ENTRIES = ("family", "impl", "defaults", "matrix", "exclude", "include", "gates", "emit", "domain")
_GATE_RANGES = {"max_registers": (1, 255), "max_stack": (0, 1 << 18), "min_ctas_per_sm": (1, 32)}


@dataclass(frozen=True, slots=True)
class Gates:
    """Limits that a compiled kernel must keep."""

    max_registers: int | None = None
    """Registers per thread; None leaves what the hardware and the occupancy allow."""
    max_stack: int = 0
    """Bytes of stack frame per thread: spills and dynamically indexed arrays."""
    min_ctas_per_sm: int | None = None
    """CTAs that must fit one SM; None takes the kernel's own declaration."""


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of a spec: arch and axes, validated, and the line that asked for it."""

    arch: Arch
    config: KernelConfig
    place: Place


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One document of a spec file. `points` are its combinations on every arch it names."""

    file: str
    place: Place
    family: str
    impl: str
    points: tuple[Point, ...]
    gates: Gates = field(default_factory=Gates)
    emit: tuple[str, ...] = ()
    domain: tuple[tuple[dict[str, list[Any]], Place], ...] = ()

    @property
    def archs(self) -> tuple[str, ...]:
        """Canonical names of the archs this spec asks for, in the order of the arch table."""
        asked = {point.arch.name for point in self.points}
        return tuple(name for name in ARCHS if name in asked)


def load_specs(paths: Iterable[str | os.PathLike[str]]) -> list[KernelSpec]:
    """Read spec files. Raises SpecError for the first mistake found."""
    specs = []
    for path in paths:
        file = os.fspath(path)
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise SpecError(f"expected UTF-8 text: {error.reason} at byte {error.start}", file=file) from None
        except OSError as error:
            raise SpecError(f"cannot read the spec: {error.strerror}", file=file) from None
        specs.extend(parse_specs(text, file))
    return specs


def parse_specs(text: str, file: str = "<spec>") -> list[KernelSpec]:
    """The specs of a YAML text; `file` names it in errors. Raises SpecError."""
    specs = [_parse(document, file) for document in load_documents(text, file)]
    if not specs:
        raise SpecError("the spec is empty: expected at least `family`, `impl` and `matrix`", file=file, line=1)
    return specs


def _parse(document: Value, file: str) -> KernelSpec:
    entries = document.mapping("a mapping with `family`, `impl` and `matrix`")
    _known_names(entries, _ENTRIES, "entry")
    for name in ("family", "impl"):
        if name not in entries:
            document.place.fail(f"no {name!r} given: a spec names the family and implementation it builds")
    family = _choice(entries["family"], families(), "family")
    impl = _choice(entries["impl"], tuple(configs(family)), f"implementation of {family}")
    axes = _Axes(config_class(family, impl))
    return KernelSpec(
        file=file,
        place=document.place,
        family=family,
        impl=impl,
        points=tuple(_points(document, entries, axes)),
        gates=_gates(entries.get("gates")),
        emit=_emit(entries.get("emit")),
        domain=tuple(_domain(entries.get("domain"))),
    )


# -- combinations --------------------------------------------------------------------------------

Combination = dict[str, Any]
Product = dict[str, list[tuple[Any, Place]]]


class _Axes:
    """The axes of a config class as a spec may write them: names, allowed values, defaults."""

    def __init__(self, cls: type[KernelConfig]) -> None:
        self.cls = cls
        self.choices: dict[str, tuple[Any, ...]] = {f.name: f.metadata["choices"] for f in fields(cls)}
        self.defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        self.names = ("arch", *self.choices)

    def value(self, name: str, value: Value) -> Any:
        """The axis value; arch names become canonical. Raises SpecError at the value's own line."""
        data = value.scalar(f"one value of {name}").data
        if name == "arch":
            try:
                return resolve(data).name if isinstance(data, str) else value.place.fail(_bad_arch(data))
            except ArchError:
                value.place.fail(_bad_arch(data))
        choices = self.choices[name]
        if not any(type(data) is type(c) and data == c for c in choices):
            listed = ", ".join(str(c).lower() if isinstance(c, bool) else str(c) for c in choices)
            value.place.fail(f"{data!r} is not a value of {name}: expected one of {listed}{nearest(data, choices)}")
        return data

    def product(self, block: Value) -> Product:
        """Axis to its (value, place) list. Raises SpecError on unknown axes, empty and repeated values."""
        entries = block.mapping("a mapping from axes to values")
        if not entries:
            block.place.fail("expected at least one axis, found an empty mapping")
        _known_names(entries, self.names, "axis")
        found: Product = {}
        for name, value in entries.items():
            values: list[tuple[Any, Place]] = []
            for item in value.listed(f"a list of values of {name}"):
                data = self.value(name, item)
                if any(type(data) is type(v) and data == v for v, _ in values):
                    item.place.fail(f"{item.data!r} is given twice for {name}")
                values.append((data, item.place))
            found[name] = values
        return found


def _bad_arch(data: object) -> str:
    return f"unknown arch {data!r}: expected one of {', '.join(ARCHS)}{nearest(data, ARCHS)}"


def _points(document: Value, entries: Mapping[str, Value], axes: _Axes) -> Iterator[Point]:
    if "matrix" not in entries and "include" not in entries:
        document.place.fail("nothing to build: expected `matrix`, `include` or both")
    defaults: Product = {}
    if "defaults" in entries:
        for name, value in entries["defaults"].mapping("a mapping from axes to single values").items():
            value.scalar(f"one value of {name} (lists go into `matrix`)")
        defaults = axes.product(entries["defaults"])
    excludes = [(axes.product(block), block.place) for block in _blocks(entries, "exclude")]
    hits = [False] * len(excludes)
    count = 0
    for name in ("matrix", "include"):
        for block in _blocks(entries, name):
            for combination, place in _combinations(block, defaults, axes):
                if name == "matrix":
                    matched = [i for i, (product, _) in enumerate(excludes) if _matches(combination, product)]
                    for i in matched:
                        hits[i] = True
                    if matched:
                        continue
                count += 1
                yield _point(combination, place, axes)
    for hit, (_, place) in zip(hits, excludes, strict=True):
        if not hit:
            place.fail("excludes nothing: no combination of the matrix matches; correct or remove it")
    if not count:
        document.place.fail("nothing to build: `exclude` leaves no combination of the matrix")


def _blocks(entries: Mapping[str, Value], name: str) -> tuple[Value, ...]:
    """The blocks of an entry that is one mapping or a list of them."""
    if name not in entries:
        return ()
    value = entries[name]
    return (value,) if isinstance(value.data, dict) else value.sequence("a mapping or a list of mappings")


def _combinations(block: Value, defaults: Product, axes: _Axes) -> Iterator[tuple[Combination, Place]]:
    product = {**defaults, **axes.product(block)}
    if "arch" not in product:
        known = ", ".join(ARCHS)
        block.place.fail(f"no arch given: add `arch: [...]` with one or more of {known}, or a default for it")
    missing = [name for name in axes.choices if name not in product and name not in axes.defaults]
    if missing:
        block.place.fail(f"no value for {', '.join(missing)}: add it here or to `defaults`")
    size = 1
    for values in product.values():
        size *= len(values)
    if size > MAX_COMBINATIONS:
        block.place.fail(f"{size} combinations: expected at most {MAX_COMBINATIONS}; split the matrix")
    for chosen in itertools.product(*product.values()):
        given = {name: data for name, (data, _) in zip(product, chosen, strict=True)}
        complete = {**axes.defaults, **given}
        yield {name: complete[name] for name in axes.names}, block.place


def _matches(combination: Combination, product: Product) -> bool:
    return all(any(combination[name] == value for value, _ in values) for name, values in product.items())


def _point(combination: Combination, place: Place, axes: _Axes) -> Point:
    arch = resolve(combination["arch"])
    chosen = {name: value for name, value in combination.items() if name != "arch"}
    try:
        config = axes.cls.from_axes(chosen).canonical()
        config.check_arch(arch)
    except ConfigError as error:
        spelled = ", ".join(f"{name}: {_yaml(value)}" for name, value in {"arch": arch.name, **chosen}.items())
        place.fail(f"{error}; in the combination {{{spelled}}}: exclude it or change an axis")
    return Point(arch, config, place)


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- the other entries ---------------------------------------------------------------------------


def _known_names(entries: Mapping[str, Value], known: tuple[str, ...], what: str) -> None:
    for name, value in entries.items():
        if name not in known:
            assert value.key_place is not None
            value.key_place.fail(f"unknown {what} {name!r}: expected one of {', '.join(known)}{nearest(name, known)}")


def _choice(value: Value, known: tuple[str, ...], what: str) -> str:
    data = value.scalar(f"the name of a {what}").data
    if data not in known:
        value.place.fail(f"unknown {what} {data!r}: expected one of {', '.join(known)}{nearest(data, known)}")
    return str(data)


def _gates(value: Value | None) -> Gates:
    if value is None:
        return Gates()
    entries = value.mapping("a mapping of gates")
    _known_names(entries, tuple(_GATE_RANGES), "gate")
    limits: dict[str, int] = {}
    for name, (low, high) in _GATE_RANGES.items():
        if name not in entries:
            continue
        data = entries[name].data
        if type(data) is not int or not low <= data <= high:
            entries[name].place.fail(f"expected an integer from {low} to {high}, found {entries[name].kind}")
        limits[name] = data
    return Gates(**limits)


def _emit(value: Value | None) -> tuple[str, ...]:
    if value is None:
        return ()
    chosen: list[str] = []
    for item in value.listed("a list of outputs"):
        name = _choice(item, EMITS, "output")
        if name in chosen:
            item.place.fail(f"{name!r} is given twice")
        chosen.append(name)
    return tuple(name for name in EMITS if name in chosen)


def _domain(value: Value | None) -> Iterator[tuple[dict[str, list[Any]], Place]]:
    if value is None:
        return
    blocks = (value,) if isinstance(value.data, dict) else value.sequence("a mapping or a list of mappings")
    for block in blocks:
        entries = block.mapping("a mapping from problem axes to values")
        if not entries:
            block.place.fail("expected at least one problem axis, found an empty mapping")
        items = {name: v.listed(f"a list of values of {name}") for name, v in entries.items()}
        yield {name: [item.scalar("a value").data for item in v] for name, v in items.items()}, block.place
