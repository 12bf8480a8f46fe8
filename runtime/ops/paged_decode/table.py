"""The selector's table: which configuration was the fastest for which problems on one arch, as data in the bundle.

    {"format": "cubinery.selector", "schema_version": 1, "family": "paged_decode", "arch": "sm_90a",
     "source": "measured on an H200, 2026-03-01",
     "rows": [{"when": {"head_dim": [64, 128], "n_q": [1, 16]},
               "options": [{"impl": "mma", "row_tile": 16, "ctas_per_sm": 2, "policy": "balanced"}, …],
               "basis": "measured"}]}

The first row whose `when` holds for a problem, and of which an option can serve it, decides; `select` asks its
rules where no row does. docs/selector.schema.json is the JSON Schema. Imports neither torch nor numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import BundleError, ManifestVersionError
from cubinery.runtime.manifest_checks import InvalidError, choice, fail, integer, list_of, record_of, text
from cubinery.runtime.ops.paged_decode.config import CONFIGS, LARGEST_COST, DecodeConfig

if TYPE_CHECKING:
    from cubinery.runtime.ops.paged_decode.select import Problem

FORMAT = "cubinery.selector"
SCHEMA_VERSION = 1
"""The only version that this reader accepts."""
FAMILY = "paged_decode"

DECODE_IMPLS = tuple(name for name, cls in CONFIGS.items() if issubclass(cls, DecodeConfig))
"""Names of the implementations of the decode kernel itself."""

Basis = Literal["measured", "estimate"]
BASES = ("measured", "estimate")
SPLIT_POLICIES = ("thor", "balanced")
"""Those of `planner.POLICIES`, which needs numpy."""

RANGE = "n_q"
"""The condition that is a range [least, most], both included; null is no end."""
LISTS = (
    "head_dim", "page_size", "kv_format", "q_dtype", "q_len", "causal", "window", "sinks", "softcap", "q_lens",
)  # fmt: skip
"""Conditions that list values of an axis that the problem gives."""
SPLIT = ("policy", "lone_tile_cost")
"""What an option may say about splitting."""
CHOSEN = ("row_tile", "ctas_per_sm")
"""Axes that every option names; `pdl` is the caller's, and clusters are chosen for a plan."""

Choices = dict[str, tuple[Any, ...]]
"""Axis to the values that it may have."""


def _choices(config: type[KernelConfig]) -> Choices:
    return {f.name: f.metadata["choices"] for f in fields(config)}


_COMMON = _choices(DecodeConfig)
_OF_IMPL: dict[str, Choices] = {
    impl: {n: values for n, values in _choices(CONFIGS[impl]).items() if n in CHOSEN or n not in _COMMON}
    for impl in DECODE_IMPLS
}
"""What an option of an implementation may name."""


@dataclass(frozen=True, slots=True)
class Option:
    """A configuration but for what the problem and the caller give."""

    impl: str
    axes: Mapping[str, Any]
    """`row_tile`, `ctas_per_sm`, and knobs that the implementation alone has."""
    policy: str | None = None
    """The planner's; None leaves it to the rules."""
    lone_tile_cost: int | None = None
    """For the planner (see its LONE_TILE_COST); None takes the configuration's."""


@dataclass(frozen=True, slots=True)
class Row:
    """What serves one kind of problem."""

    when: Mapping[str, Any]
    """Axis of the problem to the values that it may have; `n_q` to a pair (least, most or None). All must hold."""
    options: tuple[Option, ...]
    """Best first."""
    basis: Basis
    note: str = ""
    """For people: what was measured."""

    def holds(self, problem: Problem) -> bool:
        """Whether the row speaks of a problem."""
        for name, allowed in self.when.items():
            value = getattr(problem, name)
            if name == RANGE:
                least, most = allowed
                if value < least or (most is not None and value > most):
                    return False
            elif value not in allowed:
                return False
        return True


@dataclass(frozen=True, slots=True)
class SelectorTable:
    """Rows for one arch, in the order in which they are asked."""

    arch: str
    source: str
    """Where the rows come from, for people."""
    rows: tuple[Row, ...]

    def dumps(self) -> str:
        """The table as JSON text, a line a row."""
        head: dict[str, Any] = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "family": FAMILY}
        head |= {"arch": self.arch, "source": self.source}
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        rows = ",\n".join(f"  {json.dumps(_plain(row))}" for row in self.rows)
        return "{\n" + ",\n".join(lines) + ',\n "rows": [\n' + rows + "\n ]\n}\n"


def _plain(row: Row) -> dict[str, Any]:
    options = []
    for option in row.options:
        split = {"policy": option.policy, "lone_tile_cost": option.lone_tile_cost}
        known = {name: value for name, value in split.items() if value is not None}
        options.append({"impl": option.impl, **option.axes, **known})
    found: dict[str, Any] = {
        "when": {name: list(allowed) for name, allowed in row.when.items()}, "options": options, "basis": row.basis,
    }  # fmt: skip
    return found | ({"note": row.note} if row.note else {})


# -- reading -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Document:
    format: str
    schema_version: int
    family: str
    arch: str
    source: str
    rows: list[Any]


@dataclass(frozen=True, slots=True)
class _Row:
    when: dict[str, Any]
    options: list[Any]
    basis: str
    note: str = ""


def loads(data: bytes | str, source: str) -> SelectorTable:
    """Read and validate a table; `source` names it in errors. Raises BundleError, ManifestVersionError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{source}: not a selector table: malformed or truncated JSON: {error}") from None
    if type(document) is not dict or document.get("format") != FORMAT:
        raise BundleError(f"{source}: $.format: expected {FORMAT!r}: this is not a selector table")
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ManifestVersionError(
            f"{source}: $.schema_version: {version!r} is unknown: this cubinery reads version {SCHEMA_VERSION}; "
            "install the cubinery that wrote the table, or measure it again"
        )
    try:
        table = record_of(document, _Document, "$")
        choice(table["family"], (FAMILY,), "$.family")
        rows = [_row(row, f"$.rows[{i}]") for i, row in enumerate(list_of(table["rows"], "$.rows"))]
        return SelectorTable(text(table["arch"], "$.arch"), text(table["source"], "$.source"), tuple(rows))
    except InvalidError as error:
        raise BundleError(f"{source}: {error}") from None


def _row(value: Any, where: str) -> Row:
    row = record_of(value, _Row, where)
    options = list_of(row["options"], f"{where}.options")
    if not options:
        fail(f"{where}.options", "empty: expected at least one")
    return Row(
        when=_conditions(row["when"], f"{where}.when"),
        options=tuple(_option(option, f"{where}.options[{i}]") for i, option in enumerate(options)),
        basis=choice(row["basis"], BASES, f"{where}.basis"),
        note=text(row["note"], f"{where}.note") if "note" in row else "",
    )


def _conditions(value: Any, where: str) -> dict[str, Any]:
    if type(value) is not dict:
        fail(where, f"{value!r:.60}: expected an object")
    found: dict[str, Any] = {}
    for name, allowed in value.items():
        place = f"{where}.{name}"
        if name == RANGE:
            least, most = list_of(allowed, place, 2)
            integer(least, f"{place}[0]", 1)
            if most is not None:
                integer(most, f"{place}[1]", least)
            found[name] = (least, most)
        elif name in LISTS:
            if not list_of(allowed, place):
                fail(place, "empty: expected at least one value")
            found[name] = tuple(_axis(_COMMON[name], v, f"{place}[{i}]") for i, v in enumerate(allowed))
        else:
            fail(place, f"unknown condition: expected one of {', '.join((*LISTS, RANGE))}")
    return found


def _option(value: Any, where: str) -> Option:
    if type(value) is not dict:
        fail(where, f"{value!r:.60}: expected an object")
    axes = dict(value)
    policy, cost = (axes.pop(name, None) for name in SPLIT)
    if "policy" in value:
        choice(policy, SPLIT_POLICIES, f"{where}.policy")
    if "lone_tile_cost" in value:
        integer(cost, f"{where}.lone_tile_cost", 1, LARGEST_COST)
    impl = choice(axes.pop("impl", None), DECODE_IMPLS, f"{where}.impl")
    known = _OF_IMPL[impl]
    for name in axes:
        if name not in known:
            fail(f"{where}.{name}", f"unknown member: expected one of impl, {', '.join((*known, *SPLIT))}")
    missing = [name for name in CHOSEN if name not in axes]
    if missing:
        fail(where, f"no {', '.join(missing)}")
    values = {name: _axis(known[name], v, f"{where}.{name}") for name, v in axes.items()}
    return Option(impl, values, policy, cost)


def _axis(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    """A value that an axis may have. `True == 1`, so types are compared too."""
    if not any(type(value) is type(c) and value == c for c in choices):
        fail(where, f"{value!r:.60}: expected one of {', '.join(map(str, choices))}")
    return value
