"""The proof spec holds every pair of axis values, and what the GPU tests ask for; needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="specs are read where kernels are built")

from gpu.cover import ARCH, pairs, possible

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import BuildItem, check_closure, expand
from cubinery.runtime.ops.paged_decode.config import DecodeConfig

MOST_KEYS = 225
"""A machine of two cores builds these in a quarter of an hour."""


@pytest.fixture(scope="module")
def items(root: Path) -> list[BuildItem]:
    specs = load_specs([root / "kernel_specs/proof/paged_decode.yaml"])
    found = expand(specs, [ARCH])
    check_closure(specs, found)
    return found


def test_it_is_small_enough_to_build_often(items: list[BuildItem]) -> None:
    assert len(items) <= MOST_KEYS


def test_every_pair_of_axis_values_that_a_kernel_can_have_is_built(items: list[BuildItem]) -> None:
    built = {pair for item in items if isinstance(item.config, DecodeConfig) for pair in pairs(item.config)}
    missing = sorted(possible() - built, key=str)
    assert not missing, f"{len(missing)} pairs are not built, among them {missing[:5]}: run tests/gpu/cover.py"
