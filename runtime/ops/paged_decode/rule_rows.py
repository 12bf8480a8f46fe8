"""The selector's rules written as a table: what a chip has before anybody measured on it, and what tuning completes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from cubinery.runtime.arch import Arch
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import HEAD_DIMS, KV_BITS, DecodeConfig
from cubinery.runtime.ops.paged_decode.select import Problem, candidates, split_policy
from cubinery.runtime.ops.paged_decode.table import Option, Row

ROW_CLASSES: tuple[tuple[int, int | None], ...] = ((1, 8), (9, 16), (17, 32), (33, 64), (65, None))
"""Packed query rows, least and most, among which the rules make no difference."""

Q_DTYPES = ("bf16", "e4m3")
PAGE_SIZES = (16, 128)
"""The rules know none; a configuration is listed where it fits with one of these."""

Kind = tuple[int, str, str]
"""head_dim, kv_format and q_dtype of a problem."""
Said = tuple[dict[str, Any], tuple[Option, ...]]
"""Conditions and options of a row, but for its packed rows."""


def rows_of_rules(arch: Arch) -> tuple[Row, ...]:
    """Rows that choose on `arch` what the rules choose there, for every problem."""
    merged: list[tuple[int, int | None, list[Said]]] = []
    for least, most in ROW_CLASSES:
        said = _said(least, arch)
        if merged and merged[-1][2] == said:
            merged[-1] = (merged[-1][0], most, said)
        else:
            merged.append((least, most, said))
    return tuple(
        Row(when | {"n_q": (least, most)}, options, "estimate")
        for least, most, said in merged
        for when, options in said
    )


def option(config: DecodeConfig, policy: str) -> Option:
    """A configuration as a row lists it: what neither problem nor plan gives, and how the planner takes it."""
    given = {f.name for f in fields(Problem)} | {"pdl", "cluster"}
    axes = {name: value for name, value in config.axes().items() if name not in given}
    return Option(config.impl, axes, policy, config.lone_tile_cost)


def _said(n_q: int, arch: Arch) -> list[Said]:
    """What the rules say for a number of packed rows: options, and the kinds of problems that have them."""
    groups: list[tuple[tuple[Option, ...], list[Kind]]] = []
    for kind in itertools.product(HEAD_DIMS, KV_BITS, Q_DTYPES):
        options = _options(kind, n_q, arch)
        known = next((kinds for other, kinds in groups if other == options), None)
        if known is None:
            groups.append((options, [kind]))
        else:
            known.append(kind)
    return [(when, options) for options, kinds in groups if options for when in conditions(kinds)]


def _options(kind: Kind, n_q: int, arch: Arch) -> tuple[Option, ...]:
    head_dim, kv_format, q_dtype = kind
    found: list[Option] = []
    for page_size in PAGE_SIZES:
        problem = Problem(head_dim=head_dim, page_size=page_size, kv_format=kv_format, q_dtype=q_dtype, group_size=n_q)
        with contextlib.suppress(ConfigError):  # no implementation has such a kernel
            for config in candidates(problem, arch):
                entry = option(config, split_policy(arch))
                if entry not in found and _fits(config, arch):
                    found.append(entry)
    return tuple(found)


def _fits(config: DecodeConfig, arch: Arch) -> bool:
    try:
        config.check_arch(arch)
    except ConfigError:
        return False
    return True


def conditions(kinds: Iterable[Kind]) -> Iterator[dict[str, Any]]:
    """Conditions that hold for exactly these kinds, as few as listing head_dims together gives."""
    formats: dict[int, dict[str, list[str]]] = {}
    for head_dim, kv_format, q_dtype in kinds:
        formats.setdefault(head_dim, {}).setdefault(kv_format, []).append(q_dtype)
    while formats:
        _, alike = next(iter(formats.items()))
        dims = [d for d, other in formats.items() if other == alike]
        for dim in dims:
            del formats[dim]
        for q_dtypes in dict.fromkeys(map(tuple, alike.values())):
            kv_formats = [name for name, found in alike.items() if tuple(found) == q_dtypes]
            when = {"head_dim": tuple(dims), "kv_format": tuple(kv_formats), "q_dtype": q_dtypes}
            every = {"head_dim": HEAD_DIMS, "kv_format": tuple(KV_BITS), "q_dtype": Q_DTYPES}
            yield {name: values for name, values in when.items() if values != every[name]}
