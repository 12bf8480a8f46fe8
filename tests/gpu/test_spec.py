"""The proof spec holds every pair of axis values, and what the GPU tests ask for; needs no GPU."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="specs are read where kernels are built")

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import BuildItem, check_closure, expand
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import DecodeConfig

ARCH = "sm_90a"
MOST_KEYS = 90
"""A machine of two cores builds these in a few minutes."""


@pytest.fixture(scope="module")
def items(root: Path) -> list[BuildItem]:
    specs = load_specs([root / "kernel_specs/proof/paged_decode.yaml"])
    found = expand(specs, [ARCH])
    check_closure(specs, found)
    return found


def pairs(config: DecodeConfig) -> set[tuple[tuple[str, object], ...]]:
    """Pairs of (axis, value), of the axes that the mma kernel distinguishes."""
    axes = [(name, value) for name, value in config.axes().items() if name not in ("causal", "q_dtype")]
    return set(itertools.combinations(axes, 2))


def test_it_is_small_enough_to_build_often(items: list[BuildItem]) -> None:
    assert len(items) <= MOST_KEYS


def test_every_pair_of_axis_values_that_a_kernel_can_have_is_built(items: list[BuildItem]) -> None:
    possible: set[tuple[tuple[str, object], ...]] = set()
    names = [f.name for f in fields(DecodeConfig) if f.name != "causal"]
    choices = [f.metadata["choices"] for f in fields(DecodeConfig) if f.name != "causal"]
    for values in itertools.product(*choices):
        config = DecodeConfig(**dict(zip(names, values, strict=True)))
        try:
            config.check_arch(resolve(ARCH))
        except ConfigError:
            continue
        possible |= pairs(config)
    built = set().union(*(pairs(item.config) for item in items if isinstance(item.config, DecodeConfig)))
    missing = sorted(possible - built, key=str)
    assert not missing, f"{len(missing)} pairs are not built, among them {missing[:5]}"
