"""Pairs of axis values that the proof specs must build, and the configurations that add those which are missing.

    python tests/gpu/cover.py mma              (prints lines for the `include` list of kernel_specs/proof/)

Needs no GPU and no compiler.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import DecodeConfig, MmaConfig, Tcgen05Config, WgmmaConfig

Point = tuple[str, object]
Pair = tuple[Point, Point]


def choices(cls: type[DecodeConfig]) -> dict[str, tuple[object, ...]]:
    """Values of every axis but `causal`: without it a kernel is that of q_len 1."""
    return {f.name: f.metadata["choices"] for f in fields(cls) if f.name != "causal"}


@dataclass(frozen=True)
class Space:
    """The configurations of an implementation on an arch, by values of axes of which pairs are counted."""

    spec: str
    """In kernel_specs/proof."""
    cls: type[DecodeConfig]
    arch: str
    choices: Mapping[str, tuple[object, ...]]
    budget: tuple[str, ...]
    """Axes that decide whether a kernel fits; each of the others combines with all."""

    def pairs(self, config: DecodeConfig) -> Iterator[Pair]:
        """Every two axes of a configuration with their values, in the order of the axes."""
        points = ((name, value) for name, value in config.axes().items() if value in self.choices.get(name, ()))
        return itertools.combinations(points, 2)

    def make(self, axes: Mapping[str, object]) -> DecodeConfig | None:
        """The configuration of these axes and defaults, if there is a kernel for it."""
        rest = {name: values[0] for name, values in self.choices.items() if name not in axes}
        try:
            config = self.cls(**(rest | dict(axes))).canonical()  # type: ignore[arg-type]
            config.check_arch(resolve(self.arch))
        except ConfigError:
            return None
        return config

    @cached_property
    def fitting(self) -> tuple[DecodeConfig, ...]:
        """A configuration for each combination of `budget` that fits."""
        products = itertools.product(*(self.choices[name] for name in self.budget))
        configs = (self.make(dict(zip(self.budget, values, strict=True))) for values in products)
        return tuple(dict.fromkeys(config for config in configs if config is not None))

    @cached_property
    def possible(self) -> set[Pair]:
        """Pairs that at least one kernel has."""
        found = {pair for config in self.fitting for pair in self.pairs(config)}
        for (a, a_values), (b, b_values) in itertools.combinations(self.choices.items(), 2):
            for x, y in itertools.product(a_values, b_values):
                budget = {name: value for name, value in ((a, x), (b, y)) if name in self.budget}
                if any(all(getattr(config, name) == v for name, v in budget.items()) for config in self.fitting):
                    found.add(((a, x), (b, y)))
        return found

    def missing(self, built: Iterable[DecodeConfig]) -> set[Pair]:
        """Pairs that a kernel could have and none of `built` has."""
        return self.possible - {pair for config in built for pair in self.pairs(config)}

    def cover(self, built: Iterable[DecodeConfig], seed: int = 1) -> list[DecodeConfig]:
        """Few configurations that have all pairs which `built` lacks, found greedily."""
        missing, rng, chosen = self.missing(built), random.Random(seed), []
        while missing:
            wanted = dict(min(missing, key=str))
            best = max(
                (self._complete(wanted, rng) for _ in range(60)),
                key=lambda config: sum(pair in missing for pair in self.pairs(config)),
            )
            chosen.append(best)
            missing -= set(self.pairs(best))
        return chosen

    def _complete(self, wanted: dict[str, object], rng: random.Random) -> DecodeConfig:
        """A random kernel that has the wanted values."""
        while True:
            config = self.make({name: rng.choice(values) for name, values in self.choices.items()} | wanted)
            if config is not None and all(getattr(config, name) == value for name, value in wanted.items()):
                return config

    def line(self, config: DecodeConfig) -> str:
        """The configuration as an entry of a spec's `include`, defaults left out but for the row tile."""
        keep = {f.name for f in fields(config) if getattr(config, f.name) != f.default} | {"row_tile"}
        axes = {name: value for name, value in config.axes().items() if name in keep}
        spelled = {name: str(v).lower() if isinstance(v, bool) else v for name, v in axes.items()}
        return f"  - {{arch: {self.arch}, " + ", ".join(f"{name}: {value}" for name, value in spelled.items()) + "}"


MMA = Space(
    "paged_decode.yaml", MmaConfig, "sm_90a", choices(MmaConfig),
    ("head_dim", "kv_format", "q_dtype", "row_tile", "ctas_per_sm", "cluster"),
)  # fmt: skip
WGMMA = Space(
    "paged_decode.yaml", WgmmaConfig, "sm_90a",
    choices(WgmmaConfig) | {"q_len": (1, 2, 3, 4, 7, 8, 16)},
    ("row_tile",),
)  # fmt: skip
TCGEN05 = Space(
    "tcgen05.yaml", Tcgen05Config, "sm_110a",
    # Numbers that only count something are represented by a few: each edge, and what lies between.
    choices(Tcgen05Config)
    | {"q_len": (1, 2, 3, 4, 7, 8, 16), "max_kv_stages": (0, 2, 3, 5, 6), "l2_prefetch": (0, 1, 3, 8)},
    (*MMA.budget, "convert_warpgroups", "l2_prefetch", "max_kv_stages"),
)  # fmt: skip
SPACES: dict[str, Space] = {space.cls.impl: space for space in (MMA, WGMMA, TCGEN05)}


def main(impl: str) -> None:
    from pathlib import Path

    from cubinery.aot.spec import load_specs
    from cubinery.aot.variants import expand

    space, held = SPACES[impl], []
    file = Path(__file__).parents[2] / "kernel_specs/proof" / space.spec
    if file.exists():
        configs: list[Any] = [item.config for item in expand(load_specs([file]), [space.arch])]
        held = [config for config in configs if type(config) is space.cls]
    print("\n".join(space.line(config) for config in space.cover(held)))


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
