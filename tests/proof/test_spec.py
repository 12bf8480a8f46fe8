"""The proof spec of tcgen05 holds every pair of axis values, and enough kernels; nothing is compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="specs are read where kernels are built")

from gpu.cover import TCGEN05

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.runtime.ops.paged_decode.config import Tcgen05Config


@pytest.fixture(scope="module")
def built(root: Path) -> list[Tcgen05Config]:
    items = expand(load_specs([root / "kernel_specs/proof" / TCGEN05.spec]), [TCGEN05.arch])
    return [item.config for item in items if isinstance(item.config, Tcgen05Config)]


def test_there_are_at_least_sixty_kernels_and_not_many_more(built: list[Tcgen05Config]) -> None:
    assert 60 <= len(built) <= 90


def test_every_pair_of_axis_values_that_a_kernel_can_have_is_built(built: list[Tcgen05Config]) -> None:
    missing = sorted(TCGEN05.missing(built), key=str)
    assert not missing, f"{len(missing)} pairs are not built, among them {missing[:5]}: run tests/gpu/cover.py"


@pytest.mark.parametrize("kv_format", ["fp8", "e3m2", "e2m3", "e2m1", "nvfp4"])
def test_every_format_meets_every_page_size(built: list[Tcgen05Config], kv_format: str) -> None:
    """Case 31: byte counts differ by both."""
    assert {c.page_size for c in built if c.kv_format == kv_format} == {16, 32, 64, 128}
