"""From a decode problem to the kernel configuration that serves it.

The builder walks the same code over a spec's `domain:` to prove that a bundle holds every outcome.
Imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from cubinery.runtime.arch import Arch, resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES, cluster_axis
from cubinery.runtime.ops.paged_decode.config import CONFIGS, DecodeConfig, MmaConfig, Tcgen05Config, WgmmaConfig
from cubinery.runtime.ops.paged_decode.table import DECODE_IMPLS, Option, SelectorTable

ROW_TILES = (8, 16, 32, 64, 128)
"""Packed query rows that one CTA of `mma` can hold, ascending."""

TCGEN05_TILES = (16, 32)
"""Packed query rows that one CTA of `tcgen05` can hold, ascending.

With a bf16 Q there are kernels for 8 too, on request: the PTX ISA documents 16 as the fewest columns of a product with
128 rows, though published kernels multiply 8.
"""

TCGEN05_KNOBS = ("convert_warpgroups", "max_kv_stages", "l2_prefetch", "kv_evict_first")
"""Axes that `tcgen05` alone has and a caller may choose."""


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


ALONE_TILES = (8, 48)
"""Tiles of a plan's longest chunk, least and most, between which `Selection.alone` is faster: measured on an H200.

Shorter chunks have too few stages of two tiles for it. In longer ones the eight warps stream 1 % slower than a second
CTA's would.
"""


@dataclass(frozen=True, slots=True)
class Selection:
    """What serves a problem, and how its sequences are split."""

    config: DecodeConfig
    policy: str
    """Of the planner, unless the caller names another."""
    lone_tile_cost: int
    """For the planner (see its LONE_TILE_COST)."""
    row: int | None = None
    """The row of the table that decided; None where the rules did."""
    alone: DecodeConfig | None = None
    """What serves plans better that give an SM one CTA at most, with chunks within ALONE_TILES; None: `config` does."""
    clustered: DecodeConfig | None = None
    """What serves small steps better, by a cluster of CTAs for each sequence and KV head; None: the others do."""

    @property
    def kernels(self) -> tuple[DecodeConfig, ...]:
        """Everything that a plan may launch."""
        return tuple(config for config in (self.config, self.alone, self.clustered) if config is not None)


def choose(problem: Problem, arch: Arch, *, table: SelectorTable | None = None, **forced: Any) -> Selection:
    """What serves `problem` on `arch` by `table`, or by the rules where it has no row for it.

    `forced` are the choices of `select`. An option of a row counts if it has the values that are forced and its
    configuration fits the arch; where none does, the rules decide. Raises ConfigError as `select` does.
    """
    size = forced.get("cluster")
    if size is not None:
        forced["cluster"] = cluster_axis(size)
        _check_clusters(size, forced)
    given = {name: value for name, value in forced.items() if value is not None}
    for index, row in enumerate(() if table is None else table.rows):
        if not row.holds(problem):
            continue
        for option in row.options:
            config = _serving(option, problem, arch, given)
            if config is not None:
                return Selection(
                    config, option.policy or split_policy(arch), option.lone_tile_cost or config.lone_tile_cost, index,
                    *_others(config, arch, given),
                )  # fmt: skip
    config = _by_rules(problem, arch, **forced)
    return Selection(config, split_policy(arch), config.lone_tile_cost, None, *_others(config, arch, given))


def _check_clusters(size: int, forced: Mapping[str, Any]) -> None:
    """Clusters of several CTAs are asked for with nothing of another implementation. Raises ConfigError."""
    knob = next((name for name in TCGEN05_KNOBS if forced.get(name) is not None), None)
    impl = forced.get("impl")
    if size > 1 and (knob or impl not in (None, MmaConfig.impl)):
        other = f"{knob} given" if knob else f"impl = {impl!r}"
        raise ConfigError(f"paged_decode: cluster = {size} with {other}: expected 'mma', whose axis it is")


def _others(
    config: DecodeConfig, arch: Arch, given: Mapping[str, Any]
) -> tuple[DecodeConfig | None, DecodeConfig | None]:
    """`alone` and `clustered` of a selection: what was measured to be faster for some plans, on an H200.

    Alone: eight warps instead of four merge chunks in half the round trips, and two on a scheduler hide each other's
    latency. Clustered: chunks merge without round trips through L2.
    """
    if (
        arch.sm != 90 or config.impl != MmaConfig.impl or config.cluster > 1 or config.row_tile > 32
        or "ctas_per_sm" in given or config.window or config.softcap or config.q_lens
    ):  # fmt: skip
        return None, None
    alone = clustered = None
    short = (config.head_dim, config.kv_format, config.ctas_per_sm, config.sinks) == (128, "fp8", 2, False)
    if short and config.row_tile <= 16:
        alone = replace(config, ctas_per_sm=1)
    common = config.q_dtype == "bf16" and config.kv_format in ("bf16", "fp8")
    if "cluster" not in given and common and config.head_dim <= 256:
        with contextlib.suppress(ConfigError):
            fitting = replace(config, cluster=CLUSTER_SIZES[-1])
            fitting.check_arch(arch)
            clustered = fitting
    return alone, clustered


def _serving(option: Option, problem: Problem, arch: Arch, given: Mapping[str, Any]) -> DecodeConfig | None:
    """The configuration of an option with what is forced; None where they differ or it cannot serve the problem."""
    own = {"impl": option.impl, **option.axes}
    if any(own.get(name, value) != value for name, value in given.items()):
        return None
    axes = {**_axes(problem), **own, **given}
    del axes["impl"]
    typed = tuple((name, type(value), value) for name, value in axes.items())  # 1 is no True
    try:
        hash(typed)
    except TypeError:  # a forced value of a type that no axis has
        return None
    return _fitting(option.impl, typed, arch)


@lru_cache(maxsize=1024)
def _fitting(impl: str, axes: tuple[tuple[str, type, Any], ...], arch: Arch) -> DecodeConfig | None:
    """The configuration of these axes; None where there is none within the budgets of `arch`.

    Kept, since problems that differ in group size alone ask for the same one, and a build's proof asks for all.
    """
    try:
        config = CONFIGS[impl].from_axes({name: value for name, _, value in axes}).canonical()
        config.check_arch(arch)
    except ConfigError:
        return None
    assert isinstance(config, DecodeConfig), "a table's options are decode kernels"
    return config


def split_policy(arch: Arch) -> str:
    """The planner's policy on `arch` by the rules."""
    return "thor" if arch.name == "sm_110a" else "balanced"


def select(
    problem: Problem,
    arch: Arch,
    *,
    impl: str | None = None,
    row_tile: int | None = None,
    ctas_per_sm: int | None = None,
    cluster: int | None = None,
    pdl: bool = False,
    convert_warpgroups: int | str | None = None,
    max_kv_stages: int | None = None,
    l2_prefetch: int | None = None,
    kv_evict_first: bool | None = None,
    table: SelectorTable | None = None,
) -> DecodeConfig:
    """The configuration that serves `problem` on `arch` (see `choose`); what is given overrides a choice.

    A `cluster` of several CTAs asks for `mma`. The last four knobs are those of `tcgen05`, and giving one asks for
    it. Raises ConfigError where no kernel serves the problem, naming the axis or the budget.
    """
    return choose(
        problem, arch, table=table, impl=impl, row_tile=row_tile, ctas_per_sm=ctas_per_sm, cluster=cluster, pdl=pdl,
        convert_warpgroups=convert_warpgroups, max_kv_stages=max_kv_stages, l2_prefetch=l2_prefetch,
        kv_evict_first=kv_evict_first,
    ).config  # fmt: skip


def _by_rules(
    problem: Problem,
    arch: Arch,
    *,
    impl: str | None = None,
    row_tile: int | None = None,
    ctas_per_sm: int | None = None,
    cluster: int | None = None,
    pdl: bool = False,
    convert_warpgroups: int | str | None = None,
    max_kv_stages: int | None = None,
    l2_prefetch: int | None = None,
    kv_evict_first: bool | None = None,
) -> DecodeConfig:
    """The configuration that serves `problem` on `arch`; what is given overrides a choice.

    On chips with tensor memory `tcgen05` serves what it can, up to 32 packed rows: one CTA then streams the keys once
    for all of them. On Hopper `wgmma` serves more than 32 rows, where it can. Everything else takes `mma`, as does a
    `cluster` of several CTAs. The last four are knobs of `tcgen05`, and giving one asks for it. Raises ConfigError
    where no kernel serves the problem, naming the axis or the budget.
    """
    given = dict(zip(TCGEN05_KNOBS, (convert_warpgroups, max_kv_stages, l2_prefetch, kv_evict_first), strict=True))
    knobs = {name: value for name, value in given.items() if value is not None}
    if impl is not None and impl not in DECODE_IMPLS:
        raise ConfigError(f"paged_decode: impl = {impl!r}: expected one of {', '.join(DECODE_IMPLS)}")
    if knobs and impl not in (None, Tcgen05Config.impl):
        name, value = next(iter(knobs.items()))
        raise ConfigError(
            f"paged_decode: {name} = {value!r} with impl = {impl!r}: expected 'tcgen05', whose axis it is"
        )
    if cluster not in (None, 1):
        return _first_that_fits(_mma(problem, row_tile, ctas_per_sm, pdl, cluster), arch)
    if impl == WgmmaConfig.impl:
        return _first_that_fits(_wgmma(problem, row_tile, ctas_per_sm, pdl), arch)
    if impl == Tcgen05Config.impl or knobs:
        return _first_that_fits(_tcgen05(problem, row_tile, ctas_per_sm, pdl, knobs), arch)
    if impl is None and _suits_tcgen05(problem, arch):
        with contextlib.suppress(ConfigError):
            return _first_that_fits(_tcgen05(problem, row_tile, ctas_per_sm, pdl, knobs), arch)
    if impl is None and _suits_wgmma(problem, arch):
        with contextlib.suppress(ConfigError):
            return _first_that_fits(_wgmma(problem, row_tile, ctas_per_sm, pdl), arch)
    return _first_that_fits(_mma(problem, row_tile, ctas_per_sm, pdl), arch)


def candidates(problem: Problem, arch: Arch) -> Iterator[DecodeConfig]:
    """What the rules try for a problem when nothing is forced, in their order; what does not fit the arch included."""
    if _suits_tcgen05(problem, arch):
        with contextlib.suppress(ConfigError):
            yield from _tcgen05(problem, None, None, False, {})
    if _suits_wgmma(problem, arch):
        with contextlib.suppress(ConfigError):
            yield from _wgmma(problem, None, None, False)
    yield from _mma(problem, None, None, False)


def _suits_tcgen05(problem: Problem, arch: Arch) -> bool:
    """Whether `tcgen05` should be asked first; what it cannot serve it then says itself."""
    return arch.tmem_columns > 0 and problem.n_q <= TCGEN05_TILES[-1]


def _suits_wgmma(problem: Problem, arch: Arch) -> bool:
    """Whether `wgmma` should be asked first; what it cannot serve it then says itself. `mma` is faster to 32 rows."""
    return arch.sm == 90 and problem.n_q > 32


def _first_that_fits(configs: Iterable[DecodeConfig], arch: Arch) -> DecodeConfig:
    """The first configuration within the budgets of `arch`. Raises ConfigError: what the last one lacks."""
    lacks: ConfigError | None = None
    for config in configs:
        try:
            config.check_arch(arch)
            return config
        except ConfigError as error:
            lacks = error
    assert lacks is not None, "there is always a last resort"
    raise lacks


def _mma(
    problem: Problem, row_tile: int | None, ctas_per_sm: int | None, pdl: bool, cluster: int = 1
) -> Iterator[MmaConfig]:
    """Configurations of `mma`, best first.

    The row tile is the smallest that holds all packed rows, so that one CTA streams the keys once for all of them,
    or the largest that fits; 8 is only for those whom it suffices. Two CTAs share an SM where both fit (they hide each
    other's latency), but for wide tiles and heads longer than 128: their arithmetic wants all warps of an SM for one
    chunk.
    """
    largest = row_tile_for(problem.n_q)
    tiles = [t for t in reversed(ROW_TILES) if t == largest or 16 <= t < largest] if row_tile is None else [row_tile]
    config = MmaConfig(
        **_axes(problem), pdl=pdl, row_tile=tiles[0], ctas_per_sm=ctas_per_sm or 1, cluster=cluster
    ).canonical()
    for tile in tiles:
        sharing = (2, 1) if problem.head_dim <= 128 and tile <= 16 else (1, 2)
        for ctas in sharing if ctas_per_sm is None else (ctas_per_sm,):
            yield replace(config, row_tile=tile, ctas_per_sm=ctas)


def _wgmma(problem: Problem, row_tile: int | None, ctas_per_sm: int | None, pdl: bool) -> Iterator[WgmmaConfig]:
    """Configurations of `wgmma`: the row tile is the smallest that holds all packed rows, or the largest."""
    tile = (64 if problem.n_q <= 64 else 128) if row_tile is None else row_tile
    yield WgmmaConfig(**_axes(problem), pdl=pdl, row_tile=tile, ctas_per_sm=ctas_per_sm or 1).canonical()


def _tcgen05(
    problem: Problem, row_tile: int | None, ctas_per_sm: int | None, pdl: bool, knobs: Mapping[str, Any]
) -> Iterator[Tcgen05Config]:
    """Configurations of `tcgen05`, best first.

    The row tile is the smallest that holds all packed rows, or the largest, of which several CTAs then take a share.
    Two CTAs share an SM where both fit: each softmax then runs beside the other's MMAs. Keys and values are read once,
    so with an e4m3 Q the L2 is told to drop them first; with a bf16 Q that was measured to cost up to 18 %.
    """
    tile = next((t for t in TCGEN05_TILES if problem.n_q <= t), TCGEN05_TILES[-1]) if row_tile is None else row_tile
    axes = {"kv_evict_first": problem.q_dtype == "e4m3"} | dict(knobs)
    for ctas in (2, 1) if ctas_per_sm is None else (ctas_per_sm,):
        yield Tcgen05Config(**_axes(problem), pdl=pdl, row_tile=tile, ctas_per_sm=ctas, **axes).canonical()


def _axes(problem: Problem) -> dict[str, Any]:
    """Axes of a configuration that the problem gives."""
    return {f.name: getattr(problem, f.name) for f in fields(problem) if f.name != "group_size"}


_PROBLEM_AXES = tuple(f.name for f in fields(Problem))
_CHOICE_AXES = ("impl", "row_tile", "ctas_per_sm", "cluster", "pdl", *TCGEN05_KNOBS)
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


def outcomes(
    domain: Mapping[str, Sequence[Any]], arch_name: str, table: SelectorTable | None = None
) -> Iterator[KernelConfig]:
    """Every configuration that may serve a problem of `domain` on an arch, by a table; each once.

    `domain` maps axes of DOMAIN_AXES to the values that users may bring; axes left out take their
    default. Raises ConfigError on an unknown axis, an empty list, or a problem that no kernel serves.
    """
    check_domain(domain)
    arch = resolve(arch_name)
    seen: set[DecodeConfig] = set()
    for values in itertools.product(*domain.values()):
        point = dict(zip(domain, values, strict=True))
        problem = Problem(**{name: value for name, value in point.items() if name in _PROBLEM_AXES})
        choices = {name: value for name, value in point.items() if name in _CHOICE_AXES}
        found = choose(problem, arch, table=table, **choices)
        for config in found.kernels:
            if config not in seen:
                seen.add(config)
                yield config
