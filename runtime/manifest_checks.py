"""Checks of JSON values that the manifest reader is made of; each failure names the place in the document."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, NoReturn

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class InvalidError(Exception):
    """Place in the document and what is wrong there."""


def fail(where: str, message: str) -> NoReturn:
    """Raise InvalidError about a place in the document, `artifacts[3].config`."""
    raise InvalidError(f"{where}: {message}")


# -- reading -----------------------------------------------------------------------------------


@cache
def _members(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """(all, required) member names of a record."""
    named = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}
    return frozenset(named), frozenset(name for name, required in named.items() if required)


def record_of(value: Any, cls: type, where: str) -> dict[str, Any]:
    """The members of an object, which are those of the record `cls`: none unknown, none required missing."""
    if type(value) is not dict:
        fail(where, f"{value!r:.60}: expected an object")
    known, required = _members(cls)
    unknown = [name for name in value if name not in known]
    if unknown:
        fail(f"{where}.{unknown[0]}", f"unknown member: expected one of {', '.join(f.name for f in fields(cls))}")
    missing = [name for name in required if name not in value]
    if missing:
        fail(where, f"no {', '.join(sorted(missing))}")
    return dict(value)


def list_of(value: Any, where: str, length: int | None = None) -> list[Any]:
    """A list, of `length` members where that is given."""
    if type(value) is not list or (length is not None and len(value) != length):
        fail(where, f"{value!r:.60}: expected a list" + (f" of {length}" if length is not None else ""))
    return list(value)


def integer(value: Any, where: str, low: int, high: int | None = None) -> int:
    """An integer in a range; no bool, no float."""
    if type(value) is not int or value < low or (high is not None and value > high):
        bound = f"of at least {low}" if high is None else f"from {low} to {high}"
        fail(where, f"{value!r:.60}: expected an integer {bound}")
    return value


def boolean(value: Any, where: str) -> bool:
    """True or false, and no number."""
    if type(value) is not bool:
        fail(where, f"{value!r:.60}: expected true or false")
    return value


def text(value: Any, where: str, pattern: re.Pattern[str] | None = None, what: str = "a string") -> str:
    """A string that is not empty and matches; `what` says in a message what was expected."""
    if type(value) is not str or not value or (pattern is not None and not pattern.match(value)):
        fail(where, f"{value!r:.80}: expected {what}")
    return value


def choice(value: Any, choices: Any, where: str) -> Any:
    """One of several strings."""
    if type(value) is not str or value not in choices:
        fail(where, f"{value!r:.60}: expected one of {', '.join(choices)}")
    return value


def dims(value: Any, where: str, most: int, low: int = 1) -> tuple[int, int, int]:
    """Three integers of at least `low` whose product is at most `most`."""
    x, y, z = (integer(v, f"{where}[{i}]", low) for i, v in enumerate(list_of(value, where, 3)))
    if x * y * z > most:
        fail(where, f"{value!r}: expected a product of at most {most}")
    return (x, y, z)


def names_of(value: Any, where: str, length: int) -> tuple[str | int, ...]:
    """Launch-value names, or positive literals."""
    return tuple(
        integer(v, f"{where}[{i}]", 1) if type(v) is int else text(v, f"{where}[{i}]", NAME, "a name or an integer")
        for i, v in enumerate(list_of(value, where, length))
    )


def unique(values: list[str], where: str, what: str) -> None:
    """No value twice."""
    if len(set(values)) != len(values):
        twice = sorted({v for v in values if values.count(v) > 1})
        fail(where, f"{what} {', '.join(map(repr, twice))} more than once: each may appear once")
