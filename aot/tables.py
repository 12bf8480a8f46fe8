"""Selector tables for bundles: those that cubinery brings, and a user's own measurements in their place.

A table is a JSON file for one family and arch; the family's `ops/<family>/table.py` reads it. The builder copies its
bytes into the bundle of that arch, and the proof of closure asks the selector with the same table.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cubinery
from cubinery.aot.errors import SpecError

TableName = tuple[str, str]
"""(family, arch)."""


@dataclass(frozen=True, slots=True)
class Table:
    """One table: its bytes, which a bundle holds, and what its family makes of them."""

    data: bytes
    rows: Any = field(repr=False)
    """What the family's selector takes as `table`."""
    origin: str


def folder() -> Path:
    """Where the tables that come with cubinery are, as `<family>.<arch>.json`."""
    return Path(cubinery.__file__).resolve().parent / "specs" / "selectors"


def load(names: Iterable[TableName], given: Sequence[Path] = ()) -> dict[TableName, Table]:
    """The tables for families and archs: a given file, else the one that cubinery brings, else none.

    Raises SpecError for a file that cannot be read, of which two speak of one family and arch, or that nothing here
    asks for; BundleError and ManifestVersionError where it is no table that this cubinery reads.
    """
    wanted = set(names)
    found: dict[TableName, Table] = {}
    for path in given:
        data = _bytes(path)
        name = _name(data, path)
        if name in found:
            raise SpecError(
                f"a second table for {' on '.join(name)}, beside {found[name].origin}: give one", file=str(path)
            )
        if name not in wanted:
            asked = ", ".join(" on ".join(one) for one in sorted(wanted)) or "nothing"
            raise SpecError(
                f"a table for {' on '.join(name)}, and this build is of {asked}: leave it out", file=str(path)
            )
        found[name] = _table(name, data, path)
    for name in wanted - set(found):
        path = folder() / f"{name[0]}.{name[1]}.json"
        if path.is_file():
            table = _table(name, path.read_bytes(), path)
            if (told := _name(table.data, path)) != name:
                raise SpecError(
                    f"a table for {' on '.join(told)}: expected {' on '.join(name)}, as its name", file=str(path)
                )
            found[name] = table
    return found


def rows(tables: Mapping[TableName, Table], family: str, arch: str) -> Any:
    """What the selector of a family takes as its `table` on an arch; None where there is none."""
    table = tables.get((family, arch))
    return None if table is None else table.rows


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SpecError(f"cannot read the selector table: {error.strerror}", file=str(path)) from None


def _name(data: bytes, path: Path) -> TableName:
    """The family and arch that a table says it is for."""
    try:
        document = json.loads(data)
        family, arch = document["family"], document["arch"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise SpecError("not a selector table: expected JSON with `family` and `arch`", file=str(path)) from None
    return str(family), str(arch)


def _table(name: TableName, data: bytes, path: Path) -> Table:
    module = f"cubinery.runtime.ops.{name[0]}.table"
    try:
        loads = importlib.import_module(module).loads
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise SpecError(f"{name[0]} has no selector that takes a table ({module})", file=str(path)) from None
    return Table(data, loads(data, str(path)), str(path))
