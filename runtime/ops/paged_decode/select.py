"""From a decode problem to the kernel configuration that serves it.

The builder walks the same code over a spec's `domain:` to prove that a bundle holds every outcome.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from cubinery.runtime.arch import Arch, resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import CONFIGS, DecodeConfig, MmaConfig

DECODE_IMPLS: dict[str, type[DecodeConfig]] = {
    name: cls for name, cls in CONFIGS.items() if issubclass(cls, DecodeConfig)
}
"""Implementations of the decode kernel itself, by name."""

ROW_TILES = (16, 32, 64, 128)
"""Packed query rows that one CTA can hold, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a caller must say before a kernel can be chosen; everything else is a launch value."""

    head_dim: int
    page_size: int
    kv_format: str
    group_size: int
    """Query heads that share one KV head (the GQA ratio)."""
    q_len: int = 1
    """New tokens of each sequence."""
    causal: bool = True
    q_dtype: str = "bf16"
    window: bool = False
    """Each token sees a number of keys up to its own, which a launch says."""
    sinks: bool = False
    """Each query head has a logit that joins the softmax sum."""
    softcap: bool = False
    """Scores are capped, at a value that a launch says."""
    q_lens: bool = False
    """Sequences may bring fewer new tokens than `q_len`."""

    def __post_init__(self) -> None:
        for name in ("group_size", "q_len"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"paged_decode: {name} = {value!r}: expected an integer of at least 1")

    @property
    def n_q(self) -> int:
        """Packed query rows of one KV head."""
        return self.q_len * self.group_size


def row_tile_for(n_q: int) -> int:
    """The smallest row tile that holds `n_q` rows, or the largest, of which several CTAs then take a share."""
    return next((tile for tile in ROW_TILES if n_q <= tile), ROW_TILES[-1])


def select(
    problem: Problem,
    arch: Arch,
    *,
    impl: str | None = None,
    row_tile: int | None = None,
    ctas_per_sm: int | None = None,
    pdl: bool = False,
) -> DecodeConfig:
    """The configuration that serves `problem` on `arch`; `impl`, `row_tile` and `ctas_per_sm` override a choice.

    The row tile is the smallest that holds all packed rows, so that one CTA streams the keys once for all of them,
    or the largest that fits. Two CTAs share an SM where both fit (they hide each other's latency), but for wide tiles
    and heads longer than 128: their arithmetic wants all warps of an SM for one chunk. Raises ConfigError where no
    kernel serves the problem, naming the axis or the budget.
    """
    if impl is None:
        impl = MmaConfig.impl
    if impl not in DECODE_IMPLS:
        raise ConfigError(f"paged_decode: impl = {impl!r}: expected one of {', '.join(DECODE_IMPLS)}")
    largest = row_tile_for(problem.n_q)
    tiles = [t for t in reversed(ROW_TILES) if t <= largest] if row_tile is None else [row_tile]
    config = DECODE_IMPLS[impl](
        head_dim=problem.head_dim,
        page_size=problem.page_size,
        kv_format=problem.kv_format,
        q_dtype=problem.q_dtype,
        q_len=problem.q_len,
        causal=problem.causal,
        row_tile=tiles[0],
        ctas_per_sm=1 if ctas_per_sm is None else ctas_per_sm,
        pdl=pdl,
        window=problem.window,
        sinks=problem.sinks,
        softcap=problem.softcap,
        q_lens=problem.q_lens,
    ).canonical()
    sharing = (2, 1) if problem.head_dim <= 128 and tiles[0] == ROW_TILES[0] else (1, 2)
    for tile, ctas in itertools.product(tiles, sharing if ctas_per_sm is None else (ctas_per_sm,)):
        config = replace(config, row_tile=tile, ctas_per_sm=ctas)
        with contextlib.suppress(ConfigError):
            config.check_arch(arch)
            return config
    config.check_arch(arch)  # says what the last resort lacks
    return config


_PROBLEM_AXES = tuple(f.name for f in fields(Problem))
_CHOICE_AXES = ("impl", "row_tile", "ctas_per_sm", "pdl")
DOMAIN_AXES = _PROBLEM_AXES + _CHOICE_AXES
"""Axes that a spec's `domain:` may enumerate."""
_REQUIRED_AXES = ("head_dim", "page_size", "kv_format", "group_size")


def check_domain(domain: Mapping[str, Any]) -> None:
    """Raise ConfigError unless `domain` maps known axes, and all required ones, to non-empty lists."""
    for name, values in domain.items():
        if name not in DOMAIN_AXES:
            near = difflib.get_close_matches(str(name), DOMAIN_AXES, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"paged_decode: unknown domain axis {name!r}{hint}: expected one of {', '.join(DOMAIN_AXES)}"
            )
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"paged_decode: domain axis {name} = {values!r}: expected a non-empty list of values")
    missing = [name for name in _REQUIRED_AXES if name not in domain]
    if missing:
        raise ConfigError(f"paged_decode: the domain has no values for {', '.join(missing)}")


def outcomes(domain: Mapping[str, Sequence[Any]], arch_name: str) -> Iterator[KernelConfig]:
    """Every configuration that `select` can return for a problem of `domain` on an arch; each once.

    `domain` maps axes of DOMAIN_AXES to the values that users may bring; axes left out take their
    default. Raises ConfigError on an unknown axis, an empty list, or a problem that no kernel serves.
    """
    check_domain(domain)
    arch = resolve(arch_name)
    seen: set[DecodeConfig] = set()
    for values in itertools.product(*domain.values()):
        point = dict(zip(domain, values, strict=True))
        problem = Problem(**{name: value for name, value in point.items() if name in _PROBLEM_AXES})
        config = select(problem, arch, **{name: value for name, value in point.items() if name in _CHOICE_AXES})
        if config not in seen:
            seen.add(config)
            yield config
