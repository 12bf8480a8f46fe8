"""YAML with places: every value of a document knows its line and its path, and nothing is executed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from cubinery.aot.errors import SpecError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = ("tag:yaml.org,2002:seq", "tag:yaml.org,2002:map")
MAX_DEPTH = 16


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands: file, line from 1, and its path in the document."""

    file: str
    line: int
    path: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def fail(self, message: str) -> NoReturn:
        """Raise SpecError for this place."""
        raise SpecError(message, file=self.file, line=self.line, where=self.path)


@dataclass(frozen=True, slots=True)
class Value:
    """A YAML value with its place: a scalar, a tuple of values, or a mapping from text to values."""

    data: Any
    place: Place
    key_place: Place | None = None
    """Where the key of a mapping entry stands."""

    @property
    def kind(self) -> str:
        """The value's type in the words of YAML."""
        if isinstance(self.data, dict):
            return "a mapping"
        return "a list" if isinstance(self.data, tuple) else f"{self.data!r}"

    def mapping(self, what: str) -> dict[str, Value]:
        """The entries of a mapping. Raises SpecError when it is something else."""
        if not isinstance(self.data, dict):
            self.place.fail(f"expected {what}, found {self.kind}")
        return self.data

    def sequence(self, what: str) -> tuple[Value, ...]:
        """The items of a list. Raises SpecError when it is something else or empty."""
        if not isinstance(self.data, tuple):
            self.place.fail(f"expected {what}, found {self.kind}")
        if not self.data:
            self.place.fail(f"expected {what}, found an empty list")
        return self.data

    def listed(self, what: str) -> tuple[Value, ...]:
        """The items of a list, or a scalar as a list of one."""
        return self.sequence(what) if isinstance(self.data, tuple) else (self.scalar(what),)

    def scalar(self, what: str) -> Value:
        """Itself. Raises SpecError when it is a list, a mapping or empty."""
        if isinstance(self.data, dict | tuple) or self.data is None:
            self.place.fail(f"expected {what}, found {'nothing' if self.data is None else self.kind}")
        return self

    def plain(self) -> Any:
        """The value without places: dicts, lists and scalars."""
        if isinstance(self.data, dict):
            return {name: value.plain() for name, value in self.data.items()}
        return [value.plain() for value in self.data] if isinstance(self.data, tuple) else self.data


def load_documents(text: str, file: str) -> Iterator[Value]:
    """The documents of a YAML text. Raises SpecError on bad syntax, duplicate keys and unsafe tags."""
    loader = _LOADER(text)
    try:
        while loader.check_node():
            node: Any = loader.get_node()
            yield _convert(loader, node, file, "", 0)
    except SpecError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = None if mark is None else mark.line + 1
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise SpecError(f"not valid YAML: {problem}", file=file, line=line) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"not valid YAML: {' '.join(str(error).split())}", file=file) from None
    finally:
        loader.dispose()


def _convert(loader: Any, node: yaml.Node, file: str, path: str, depth: int) -> Value:
    place = Place(file, node.start_mark.line + 1, path)
    if depth > MAX_DEPTH:
        place.fail(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, yaml.ScalarNode):
        return Value(loader.construct_object(node), place)
    if node.tag not in _PLAIN_TAGS:
        place.fail(f"unknown tag {node.tag!r}: a spec holds plain mappings, lists, numbers and text")
    if isinstance(node, yaml.SequenceNode):
        items = (_convert(loader, n, file, f"{path}[{i}]", depth + 1) for i, n in enumerate(node.value))
        return Value(tuple(items), place)
    entries: dict[str, Value] = {}
    for key_node, value_node in node.value:
        key_place = Place(file, key_node.start_mark.line + 1, path)
        if key_node.tag == "tag:yaml.org,2002:merge":
            key_place.fail("merge keys (<<) are not supported: repeat the entries, or use `defaults`")
        name = loader.construct_object(key_node) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(name, str):
            spelled = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a collection"
            key_place.fail(f"expected text as the name of an entry, found {spelled}")
        if name in entries:
            first = entries[name].key_place
            assert first is not None
            key_place.fail(f"{name!r} is given twice: first on line {first.line}")
        child = f"{path}.{name}" if path else name
        value = _convert(loader, value_node, file, child, depth + 1)
        entries[name] = Value(value.data, value.place, Place(file, key_place.line, child))
    return Value(entries, place)


def nearest(value: object, known: Iterable[object]) -> str:
    """` (did you mean 'x'?)` for the known name closest to `value`, or nothing."""
    spelled = {str(k): k for k in known}
    found = difflib.get_close_matches(str(value), spelled, 1, 0.6)
    return f" (did you mean {spelled[found[0]]!r}?)" if found else ""
