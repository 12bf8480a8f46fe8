"""Selector of the toy family: the width of a problem, and the helper where it asks for sums."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.toy.config import ScaleConfig


def outcomes(domain: Mapping[str, Sequence[Any]], arch_name: str) -> Iterator[KernelConfig]:
    for name in domain:
        if name not in ("length", "sums"):
            raise ConfigError(f"toy: unknown domain axis {name!r}: expected length, sums")
    for length, sums in itertools.product(domain["length"], domain.get("sums", [False])):
        yield ScaleConfig(width=4 if length % 4 == 0 else 1, helper=sums)
