"""The keys that a benchmark needs, for a bundle that holds exactly those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import append, batches, splits, sweep
from benchmarks.shapes import NARROW, Shape
from cubinery.aot import tables
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.formats import KV_FORMATS
from cubinery.runtime.ops.paged_decode.select import Problem, choose

Wanted = tuple[Shape, str, int | None]
"""A shape, a KV format, and a forced number of CTAs an SM."""


def wanted(shapes: Sequence[Shape], formats: Sequence[str], *, swept: bool) -> list[Wanted]:
    """Every problem of a run, in its order."""
    found: list[Wanted] = [(shape, kv_format, None) for shape in shapes for kv_format in formats]
    if swept:
        found += [(point.shape, point.kv_format, point.ctas_per_sm) for point in sweep.points()]
        found += [(shape, kv_format, None) for shape in sweep.FORMAT_SHAPES for kv_format in ("fp8", *NARROW)]
        found += [(shape, kv_format, None) for shape, kv_format in batches.shapes()]
        found += [(shape, kv_format, None) for shape, kv_format in splits.FORMS]
    return found


def keys(arch_name: str, problems: Sequence[Wanted]) -> tuple[list[dict[str, Any]], list[str]]:
    """(entries, why): what `cubinery build --from-misses` builds, each key once, and problems that no kernel serves.

    What a key requires is built with it. Raises ConfigError for an unknown arch.
    """
    arch = resolve(arch_name)
    name = (MmaConfig.family, arch.name)
    table = tables.rows(tables.load([name]), *name)  # a bundle of these keys has the table that ships
    entries: dict[str, dict[str, Any]] = {}
    unserved = []
    for shape, kv_format, ctas_per_sm in problems:
        try:
            found = choose(
                Problem(
                    head_dim=shape.d, page_size=shape.page_size, kv_format=kv_format,
                    group_size=shape.h_q // shape.h_k, q_len=shape.q_len,
                ),
                arch, ctas_per_sm=ctas_per_sm, table=table,
            )  # fmt: skip
        except ConfigError as error:
            unserved.append(f"{shape.title}, {kv_format}: {error}")
            continue
        for config in found.kernels:
            key = config.key(arch.name)
            entries[key] = {"key": key}
    return list(entries.values()), unserved


def append_keys(arch_name: str) -> list[dict[str, Any]]:
    """The entries of the cache writers that the sweep measures. Raises ConfigError for an unknown arch."""
    arch = resolve(arch_name).name
    head_dims = dict.fromkeys(shape.head_dim for shape in append.SHAPES)
    return [
        {"key": AppendConfig(head_dim=d, kv_format=kv_format).key(arch)} for d in head_dims for kv_format in KV_FORMATS
    ]
