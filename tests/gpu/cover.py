"""Pairs of axis values that the proof spec must build, and the configurations that add those which are missing.

    python tests/gpu/cover.py                  (prints lines for the `include` list of kernel_specs/proof/)

Needs no GPU and no compiler.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache

from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import MmaConfig

ARCH = "sm_90a"
Point = tuple[str, object]
Pair = tuple[Point, Point]

CHOICES: dict[str, tuple[object, ...]] = {
    f.name: f.metadata["choices"] for f in fields(MmaConfig) if f.name != "causal"
}
"""Values of every axis but `causal`: without it a kernel is that of q_len 1."""
BUDGET = ("head_dim", "kv_format", "q_dtype", "row_tile", "ctas_per_sm")
"""Axes that decide whether a kernel fits; each of the others combines with all."""


def pairs(config: MmaConfig) -> Iterator[Pair]:
    """Every two axes of a configuration with their values, in the order of the axes."""
    return itertools.combinations(((name, value) for name, value in config.axes().items() if name in CHOICES), 2)


def make(axes: dict[str, object]) -> MmaConfig | None:
    """The configuration of these axes and defaults, if there is a kernel for it."""
    rest = {name: values[0] for name, values in CHOICES.items() if name not in axes}
    try:
        config = MmaConfig(**(rest | axes))  # type: ignore[arg-type]
        config.check_arch(resolve(ARCH))
    except ConfigError:
        return None
    return config


@cache
def fitting() -> tuple[MmaConfig, ...]:
    """A configuration for each combination of BUDGET that fits."""
    products = itertools.product(*(CHOICES[name] for name in BUDGET))
    configs = (make(dict(zip(BUDGET, values, strict=True))) for values in products)
    return tuple(config for config in configs if config is not None)


def possible() -> set[Pair]:
    """Pairs that at least one kernel has."""
    found = {pair for config in fitting() for pair in pairs(config)}
    for (a, a_values), (b, b_values) in itertools.combinations(CHOICES.items(), 2):
        for x, y in itertools.product(a_values, b_values):
            budget = {name: value for name, value in ((a, x), (b, y)) if name in BUDGET}
            if any(all(getattr(config, name) == value for name, value in budget.items()) for config in fitting()):
                found.add(((a, x), (b, y)))
    return found


def cover(built: Iterable[MmaConfig], seed: int = 1) -> list[MmaConfig]:
    """Few configurations that have all pairs which `built` lacks, found greedily."""
    missing = possible() - {pair for config in built for pair in pairs(config)}
    rng = random.Random(seed)
    chosen = []
    while missing:
        wanted = dict(min(missing, key=str))
        best = max((_complete(wanted, rng) for _ in range(60)), key=lambda config: _gain(config, missing))
        chosen.append(best)
        missing -= set(pairs(best))
    return chosen


def _gain(config: MmaConfig, missing: set[Pair]) -> int:
    return sum(pair in missing for pair in pairs(config))


def _complete(wanted: dict[str, object], rng: random.Random) -> MmaConfig:
    """A random kernel that has the wanted values."""
    while True:
        config = make({name: rng.choice(values) for name, values in CHOICES.items()} | wanted)
        if config is not None:
            return config


def line(config: MmaConfig) -> str:
    """The configuration as an entry of a spec's `include`, defaults left out but for the row tile."""
    keep = {f.name for f in fields(config) if getattr(config, f.name) != f.default} | {"row_tile"}
    spelled = {name: str(v).lower() if isinstance(v, bool) else v for name, v in config.axes().items() if name in keep}
    return f"  - {{arch: {ARCH}, " + ", ".join(f"{name}: {value}" for name, value in spelled.items()) + "}"


if __name__ == "__main__":
    from pathlib import Path

    from cubinery.aot.spec import load_specs
    from cubinery.aot.variants import expand

    specs = load_specs([Path(__file__).parents[2] / "kernel_specs/proof/paged_decode.yaml"])
    held = [item.config for item in expand(specs, [ARCH]) if isinstance(item.config, MmaConfig)]
    print("\n".join(line(config) for config in cover(held)))
