"""The CI share of the campaign: a few kernels of each implementation, every trial, schedules by turns.

`make proof` runs the rest: every kernel of a bundle under every schedule (see docs/results/blackwell.md).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")

from proof.build import build_keys
from proof.campaign import SCHEDULES, Task, campaign, run, tasks
from proof.trials import TRIALS

KEYS = (
    "paged_decode-sm_90a-mma-d128-p16-kvfp8",
    "paged_decode-sm_110a-mma-d64-p32-kvnvfp4-qte4m3-q3-t32",
    "paged_decode-sm_110a-tcgen05-d128-p16-kvfp8-qte4m3",
    "paged_decode-sm_110a-tcgen05-d128-p16-kvfp8-q3-t8-pf3-efon",
    "paged_decode-sm_110a-tcgen05-d128-p16-kvnvfp4-qte4m3",
    "paged_decode-sm_110a-tcgen05-d128-p32-kve2m1-qte4m3-q2-t32-st3-efon",
)
TWO_TILES = (
    "paged_decode-sm_90a-mma-d128-p16-kvfp8-q4-cps1",
    "paged_decode-sm_90a-mma-d128-p16-kvfp8-q3-cps1-winon",
    "paged_decode-sm_90a-mma-d64-p64-kvnvfp4-q2-cps1-winon-sinkon-qlon",
)
"""Ring stages of two tiles: a chunk that is not its sequence's last may end inside one."""
CLUSTERS = "paged_decode-sm_90a-mma-d64-p16-kvfp8-t8-cl16"
"""A kernel whose plans get clusters of another size each, unless they must agree."""
EVERY = 3
"""Each kernel meets one trial in so many; kernels take turns."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, with their PTX."""
    out = tmp_path_factory.mktemp("proof")
    build_keys((*KEYS, *TWO_TILES, CLUSTERS), out)
    return out


@pytest.fixture(scope="module")
def by_key(bundles: Path) -> dict[str, list[Task]]:
    """What each kernel meets, under schedules by turns."""
    found: dict[str, list[Task]] = defaultdict(list)
    for task in tasks(bundles):
        if task.trial in TRIALS and task.key in KEYS:
            t, k = TRIALS.index(task.trial), KEYS.index(task.key)
            if (t + k) % EVERY == 0 and task.schedule == SCHEDULES[(t // EVERY + k) % len(SCHEDULES)]:
                found[task.key].append(task)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_the_written_cases(by_key: dict[str, list[Task]], key: str) -> None:
    results = [run(task) for task in by_key[key]]
    assert [f"{row.trial}, {row.schedule}: {row.error}" for row in results if row.error] == []
    assert results
    assert all(row.launches for row in results)


@pytest.mark.slow
@pytest.mark.parametrize("trial", ["padding and updates", "layouts"])
def test_plans_that_must_agree_have_clusters_of_one_size(bundles: Path, trial: str) -> None:
    (task,) = tasks(bundles, keys=[CLUSTERS], trials=[trial], schedules=SCHEDULES[:1])
    assert run(task).error == ""


def test_the_share_has_every_trial_and_every_schedule(by_key: dict[str, list[Task]]) -> None:
    share = [task for found in by_key.values() for task in found]
    assert {task.trial.name for task in share} == {trial.name for trial in TRIALS}
    assert {task.schedule for task in share} == set(SCHEDULES)


def test_several_processes_find_what_one_does(bundles: Path, tmp_path: Path) -> None:
    found = tasks(bundles, keys=["tcgen05-d128-p16-kvfp8-qte4m3"], trials=["all see all"], schedules=SCHEDULES[:3])
    assert len(found) == 3
    alone, together = (
        {row.schedule: dataclasses.replace(row, seconds=0.0) for _, row in campaign(found, tmp_path / name, jobs=jobs)}
        for name, jobs in (("alone", 1), ("together", 2))
    )
    assert alone == together
    assert not any(row.error for row in alone.values())
    assert list(campaign(found, tmp_path / "together", jobs=2)) == []


@pytest.mark.slow
@pytest.mark.parametrize("key", TWO_TILES)
def test_chunks_end_inside_a_stage(bundles: Path, key: str) -> None:
    """Keys of the next chunk are no part of this one, though a mask of several tokens or a window would let them in."""
    (task,) = tasks(bundles, keys=[key], trials=["lengths"], schedules=["fair:0"])
    assert run(task).error == ""
