"""Small problems by which kernels are verified: how to make one, run it through the public call, and judge the result.

The registry is this folder: `cubinery.aot.problems.<family>.<implementation>` holds the function
`check(subject) -> Finding` of one implementation, so a new kernel adds a file and edits no list. An implementation
without one is a part that others require: some check must launch it all the same, or verification fails.

A check knows no device: it takes its tensors through `subject.place`, which puts them where the library's kernels
find them, and it may import torch, which is imported when it runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from cubinery.runtime.config import KernelConfig
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library

SEED = 7
"""Of a problem's values, unless somebody asks for others."""


class Place(Protocol):
    """Puts CPU tensors where kernels can reach them; gives them back by the same names."""

    def __call__(self, **tensors: Any) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """The kernel that is verified, and all that its check needs."""

    library: Library
    """Serves `key` and what it requires, on a driver of `arch`."""
    key: str
    config: KernelConfig
    arch: str
    place: Place
    seed: int = SEED
    """Makes the problem's values."""

    @classmethod
    def of(cls, library: Library, key: str, place: Place, seed: int = SEED) -> Subject:
        """The artifact `key`, with configuration and arch as the key says. Raises KeyFormatError."""
        config, arch = parse_key(key)
        return cls(library, key, config, arch, place, seed)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found."""

    ok: bool
    text: str
    """How far the result is from the reference, in one line."""


Check = Callable[[Subject], Finding]
"""Runs a kernel on a problem of its configuration and compares. Raises CubineryError, a simulator's Fault included."""


@cache
def check_of(family: str, impl: str) -> Check | None:
    """The check of an implementation; None where it has none of its own."""
    package = f"{__name__}.{family}"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(f"{package}.{impl}") is None:
        return None
    found: Check = importlib.import_module(f"{package}.{impl}").check
    return found


def where(family: str, impl: str) -> str:
    """The file that would hold the check of an implementation, as messages call it."""
    return f"aot/problems/{family}/{impl}.py"
