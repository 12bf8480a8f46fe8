"""Every decode of the smoke spec on the simulator, for Hopper and for the Blackwell chips that nobody here owns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cubinery.aot import verify
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.runtime import bundle as bundles
from cubinery.runtime.arch import ARCHS

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")


@pytest.fixture(scope="module")
def smoke(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke spec for every arch, compiled here; the compile cache makes it quick."""
    out = tmp_path_factory.mktemp("smoke")
    report = build(expand(load_specs([root / "kernel_specs" / "smoke.yaml"]), list(ARCHS)), BuildOptions(out=out))
    assert report.ok
    return out


@pytest.mark.slow
def test_smoke_kernels_agree_with_the_reference(smoke: Path) -> None:
    """The fair schedule, with every check on; `cubinery verify --sim` adds the hostile ones. Two processes for all."""
    opened = bundles.open_all(smoke)
    assert [bundle.manifest.arch for bundle in opened] == sorted(ARCHS)
    tasks = [task for bundle in opened for task in verify.tasks(bundle, ["fair:0"])]
    assert min(Counter(task.arch for task in tasks).values()) >= 6
    outcomes = list(verify.run_all(tasks, jobs=2))
    assert [(o.key, o.error) for o in outcomes if not o.ok] == []
    assert sorted(o.key for o in outcomes) == sorted(task.key for task in tasks)
    artifacts = [artifact for bundle in opened for artifact in bundle.manifest.artifacts]
    assert verify.not_run(artifacts, tasks, outcomes) == []
