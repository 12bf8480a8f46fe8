"""Items of the toy family and the names of its compile entries, for tests and the processes they start."""

from __future__ import annotations

import toy_plugin  # noqa: F401 - installs the family

from cubinery.aot.spec import KernelSpec, parse_specs
from cubinery.aot.variants import BuildItem, expand

FAKE = "toy_plugin:compile_fake"
REAL = "toy_plugin:compile_real"
NOTHING = "toy_plugin:compile_nothing"


def toy_spec(matrix: str, **entries: str) -> KernelSpec:
    """A spec of a one-line matrix such as `{arch: sm_110a, width: [1, 2]}`, with further entries as text."""
    more = "".join(f"{name}: {text}\n" for name, text in entries.items())
    return parse_specs(f"family: toy\nimpl: scale\nmatrix: {matrix}\n{more}", "toy.yaml")[0]


def toy_items(matrix: str, **entries: str) -> list[BuildItem]:
    """The build items of `toy_spec`."""
    return expand([toy_spec(matrix, **entries)])
