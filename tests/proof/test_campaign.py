"""The campaign's bookkeeping: what is run, resumed and reported; no simulator."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operator needs torch")

from proof import campaign
from proof.campaign import SCHEDULES, Result, Task, read, tasks
from proof.summary import disagreements, siblings, summary
from proof.trials import LONGEST, TRIALS

KEYS = (
    "paged_decode-sm_110a-mma-d128-p16-kvfp8",
    "paged_decode-sm_110a-mma-d128-p16-kvfp8-pdlon",
    "paged_decode-sm_110a-mma-d64-p16-kvbf16-q3",
    "paged_decode-sm_110a-mma-d64-p16-kvbf16-winon",
)


def bundle(*keys: str) -> Any:
    """What `tasks` reads of a bundle."""
    ptx = {"ptx": SimpleNamespace(sha256="0" * 64)}
    artifacts = [SimpleNamespace(key=key, emitted=ptx) for key in (*keys, "paged_decode-sm_110a-plan")]
    return SimpleNamespace(manifest=SimpleNamespace(artifacts=artifacts))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    monkeypatch.setattr(campaign, "open_all", lambda root: [bundle(*KEYS)])
    return tasks(Path())


def result(task: Task, **changed: Any) -> Result:
    good = Result(*task.id, "", 1e-3, 1e-3, 1e-6, 2e-3, "", 2, 1000, 0.5)
    return dataclasses.replace(good, **changed)


def test_every_kernel_meets_every_trial_that_concerns_it_under_every_schedule(found: list[Task]) -> None:
    met = {(task.key, task.trial.name, task.schedule) for task in found}
    assert len(met) == len(found)
    for key in KEYS:
        trials = {trial.name for trial in TRIALS}
        trials -= {"all see all"} if "-q3" in key or "-win" in key else {"row order"}
        trials -= {"row order"} if "-win" in key else set()
        assert {name for k, name, _ in met if k == key} - {LONGEST.name} == trials
        assert all((key, name, schedule) in met for name in trials for schedule in SCHEDULES)
    assert {key for key, name, _ in met if name == LONGEST.name} == set(KEYS[:2])


def test_the_first_round_has_all_kernels_and_trials_and_mixes_schedules(found: list[Task]) -> None:
    rest = [task for task in found if task.trial is not LONGEST]
    first = rest[: len(rest) // 4]
    assert {(task.key, task.trial.name) for task in first} == {(task.key, task.trial.name) for task in rest}
    assert all({task.schedule for task in first if task.key == key} == set(SCHEDULES) for key in KEYS)


def test_the_written_cases_are_all_somewhere() -> None:
    """Those left out are about the host alone; docs/results/blackwell.md names their tests."""
    host = {15, 16, 17, 25, 26, 27, 28, 29, 33}
    assert {case for trial in TRIALS for case in trial.cases} | host == set(range(1, 39))


def test_what_passed_is_not_run_again_and_what_failed_is(
    found: list[Task], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Task] = []

    def run(task: Task) -> Result:
        ran.append(task)
        return result(task, error="RaceFault: no" if len(ran) == 2 else "")

    monkeypatch.setattr(campaign, "run", run)
    file = tmp_path / "deep" / "results.jsonl"
    assert [left for left, _ in campaign.campaign(found[:4], file)] == [3, 2, 1, 0]
    file.write_text(file.read_text() + '{"key": "cut off by a ki')
    assert [row.error for row in read(file)] == ["", "RaceFault: no", "", ""]
    assert [row.id for _, row in campaign.campaign(found[:5], file)] == [found[1].id, found[4].id]
    assert not any(row.error for row in read(file))
    assert len(ran) == 6
    rebuilt = [dataclasses.replace(task, ptx="1" * 16) for task in found[:2]]
    assert len(list(campaign.campaign(rebuilt, file))) == 2
    assert not list(campaign.campaign(found[5:], file, budget=-1.0))


def test_bits_that_depend_on_a_schedule_or_on_a_speed_axis_are_named(found: list[Task]) -> None:
    first = [task for task in found if task.trial.name == "lengths"]
    by_key = {key: [task for task in first if task.key == key] for key in KEYS}
    same = [result(task, digest="a") for key in KEYS[:2] for task in by_key[key]]
    assert disagreements(same) == []
    assert siblings(same) == 1
    (text,) = disagreements([*same, result(by_key[KEYS[1]][0], digest="b")])
    assert "differs from" in text
    assert disagreements([result(by_key[KEYS[2]][0], digest="a"), result(by_key[KEYS[2]][1], digest="b")])
    assert not disagreements([result(by_key[KEYS[0]][0], digest="a"), result(by_key[KEYS[2]][1], digest="b")])


def test_a_summary_counts_what_ran_and_shows_what_failed(found: list[Task]) -> None:
    rows = [result(found[0], o=2.5e-3), result(found[1], error="DeadlockFault: nobody")]
    text = summary(found, rows)
    assert f"| mma | bf16 | `sm_110a` | 4 | 2 of {len(found)} | 1 | 4 | 2.5e-03 |" in text
    assert "| 1 (fair, late), 1 FAILED |" in text
    stale = [dataclasses.replace(row, ptx="1" * 16) for row in rows]
    assert f"| 4 | 0 of {len(found)} | 0 |" in summary(found, stale)
