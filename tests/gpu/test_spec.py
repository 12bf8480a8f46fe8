"""The proof spec holds every pair of axis values, and what the GPU tests ask for; needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="specs are read where kernels are built")

from gpu.cover import MMA, WGMMA, Space
from gpu.sanitize import PROBLEMS

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import BuildItem, check_closure, expand
from cubinery.runtime.arch import resolve
from cubinery.runtime.ops.paged_decode.config import DecodeConfig
from cubinery.runtime.ops.paged_decode.select import Problem, select

MOST_KEYS = 430
"""A machine of two cores builds these in a quarter of an hour."""


@pytest.fixture(scope="module")
def items(root: Path) -> list[BuildItem]:
    specs = load_specs([root / "kernel_specs/proof/paged_decode.yaml"])
    found = expand(specs, [MMA.arch])
    check_closure(specs, found)
    return found


def test_it_is_small_enough_to_build_often(items: list[BuildItem]) -> None:
    assert len(items) <= MOST_KEYS


@pytest.mark.parametrize("space", [MMA, WGMMA], ids=lambda space: space.cls.impl)
def test_every_pair_of_axis_values_that_a_kernel_can_have_is_built(items: list[BuildItem], space: Space) -> None:
    built = [item.config for item in items if type(item.config) is space.cls and isinstance(item.config, DecodeConfig)]
    missing = sorted(space.missing(built), key=str)
    assert not missing, f"{len(missing)} pairs are not built, among them {missing[:5]}: run tests/gpu/cover.py"


def test_what_the_sanitizers_run_is_built(items: list[BuildItem]) -> None:
    keys = {item.key for item in items}
    for fields, choices in PROBLEMS:
        problem = Problem(
            head_dim=fields.get("d", 128), page_size=fields.get("page_size", 16),
            kv_format=fields.get("kv_format", "fp8"), group_size=fields.get("h_q", 4) // fields.get("h_k", 2),
            q_len=fields.get("q_len", 1), causal=fields.get("causal", True), q_dtype=fields.get("q_dtype", "bf16"),
            window=fields.get("window") is not None, softcap=fields.get("softcap") is not None,
            sinks=fields.get("with_sinks", False), q_lens=fields.get("with_q_lens", False),
        )  # fmt: skip
        assert select(problem, resolve(MMA.arch), **choices).key(MMA.arch) in keys, (fields, choices)
