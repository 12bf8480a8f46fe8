"""The CI share of the campaign: a few kernels of each implementation, every trial, schedules by turns.

`make proof` runs the rest: every kernel of a bundle under every schedule (see docs/results/blackwell.md).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")

from proof.campaign import Task, run, tasks

from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.spec import Gates
from cubinery.aot.variants import BuildItem
from cubinery.runtime.arch import resolve
from cubinery.runtime.families import parse_key

KEYS = (
    "paged_decode-sm_90a-mma-d128-p16-kvfp8",
    "paged_decode-sm_110a-mma-d64-p32-kvnvfp4-qte4m3-q3-t32",
)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, with their PTX; the compile cache makes it quick."""
    items: dict[str, BuildItem] = {}
    for key in KEYS:
        config, arch = parse_key(key)
        for needed in (config, *config.requires()):
            items[needed.key(arch)] = BuildItem(needed.key(arch), needed, resolve(arch), Gates(), ("ptx",), "test")
    out = tmp_path_factory.mktemp("proof")
    report = build(list(items.values()), BuildOptions(out=out))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    return out


@pytest.fixture(scope="module")
def by_key(bundles: Path) -> dict[str, list[Task]]:
    """The first round of the campaign: every trial once, each under another schedule."""
    found: dict[str, list[Task]] = defaultdict(list)
    seen = set()
    for task in tasks(bundles):
        if task.trial.name != "longest" and (task.key, task.trial.name) not in seen:
            seen.add((task.key, task.trial.name))
            found[task.key].append(task)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_the_written_cases(by_key: dict[str, list[Task]], key: str) -> None:
    results = [run(task) for task in by_key[key]]
    assert {row.schedule for row in results} == {"fair:0", "late:0", "delays:0", "priorities:0"}
    assert [f"{row.trial}, {row.schedule}: {row.error}" for row in results if row.error] == []
    assert all(row.launches for row in results)
