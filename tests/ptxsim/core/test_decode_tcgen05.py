"""Decodes on tensor memory on the simulator: axes of the configuration, under the fair and hostile schedules."""

from __future__ import annotations

import pytest

from cubinery.aot import verify
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.spec import Gates
from cubinery.aot.variants import BuildItem
from cubinery.runtime import bundle as bundles
from cubinery.runtime.arch import resolve
from cubinery.runtime.ops.paged_decode.config import Tcgen05Config
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")
pytestmark = pytest.mark.slow

E4M3 = {"q_dtype": "e4m3"}
CASES = {
    Tcgen05Config(head_dim=128, page_size=128, kv_format="fp8", **E4M3): "late:0",
    Tcgen05Config(head_dim=128, page_size=16, kv_format="e2m1", kv_evict_first=True, l2_prefetch=2, **E4M3): "delays:0",
    Tcgen05Config(head_dim=256, page_size=64, kv_format="e2m3", q_len=4, max_kv_stages=3, **E4M3): "priorities:0",
    Tcgen05Config(head_dim=256, page_size=32, kv_format="e3m2", row_tile=32, pdl=True, **E4M3): "late:0",
    Tcgen05Config(head_dim=512, page_size=128, kv_format="fp8", row_tile=32, ctas_per_sm=1, **E4M3): "delays:0",
    Tcgen05Config(head_dim=128, page_size=32, kv_format="fp8", row_tile=8): "late:1",
    # Two converters, and a ring of an odd number of stages if it were not for them.
    Tcgen05Config(head_dim=256, page_size=128, kv_format="fp8", ctas_per_sm=1, q_len=3, max_kv_stages=3): "late:3",
    Tcgen05Config(head_dim=128, page_size=16, kv_format="nvfp4", **E4M3): "delays:0",
    Tcgen05Config(head_dim=256, page_size=64, kv_format="nvfp4", row_tile=32, q_len=4, **E4M3): "late:0",
    Tcgen05Config(head_dim=512, page_size=128, kv_format="nvfp4", ctas_per_sm=1, **E4M3): "priorities:0",
}
"""A hostile schedule for each configuration."""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bundles.Bundle:
    """All cases for Thor; the compile cache makes it quick."""
    out, arch = tmp_path_factory.mktemp("tcgen05"), resolve("sm_110a")
    configs = (*CASES, PlanConfig())
    items = [BuildItem(c.key(arch.name), c, arch, Gates(), ("ptx",), "test") for c in configs]
    report = build(items, BuildOptions(out=out))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    (found,) = bundles.open_all(out)
    return found


@pytest.mark.parametrize("config", CASES, ids=lambda config: config.key("sm_110a"))
def test_decodes_agree_with_the_reference(bundle: bundles.Bundle, config: Tcgen05Config) -> None:
    tasks = [t for t in verify.tasks(bundle, ["fair:0", CASES[config]]) if t.key == config.key("sm_110a")]
    assert len(tasks) == 2
    assert [(o.schedule, o.error) for o in verify.run_all(tasks, jobs=1) if not o.ok] == []
