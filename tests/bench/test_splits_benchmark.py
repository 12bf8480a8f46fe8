"""The planner's plan beside plans of other splits: what is measured, written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_peers import CountingTimer

from benchmarks import grid, splits
from benchmarks.batches import SHORT
from benchmarks.splits import Row
from cubinery.runtime.library import Library

CPU = torch.device("cpu")


@pytest.fixture
def library(fp8_library: Callable[[int], Library], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of what 8/1/128 over fp8 needs; the grid has two sequences of up to seven tiles."""
    monkeypatch.setattr(splits, "FORMS", ((SHORT, "fp8"),))
    monkeypatch.setattr(splits, "BATCHES", (2,))
    monkeypatch.setattr(splits, "LENGTHS", ((800, True), (800, False)))
    return fp8_library(2)


def test_every_plan_is_proved_and_timed_once(library: Library) -> None:
    rows = list(splits.measure(library, CountingTimer(), CPU))
    assert all(isinstance(row, Row) and row.us == 10.0 for row in rows)
    found = [(row.even, row.splits, row.items) for row in rows if isinstance(row, Row)]
    even = [(1, 0, 14), (1, 1, 2), (1, 2, 4), (1, 3, 6), (1, 4, 8)]  # 5 and 6 cut like 4: chunks of 2 tiles
    assert found[: len(even)] == even
    ramp = [(items, cut) for all_equal, cut, items in found if not all_equal]
    assert ramp[0] == (11, 0)  # four tiles and seven
    assert ramp[1:] == [(2, 1), (3, 2), (5, 3), (6, 4)]


def test_no_plan_has_more_waves_than_a_batch_may_want(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MOST_WAVES", 5 / 264)
    rows = [row for row in splits.measure(library, CountingTimer(), CPU) if isinstance(row, Row) and row.even]
    assert [row.splits for row in rows] == [0, 1, 2], "the planner's own is always measured"


def test_what_has_no_time_is_said(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = library.driver
    driver.on_launch = lambda launch: None
    said = list(splits.measure(library, CountingTimer(), CPU))
    assert said
    assert all("wrong result, sequence 0" in str(line) for line in said)
    monkeypatch.setattr(splits, "FORMS", ((replace(SHORT, d=64), "fp8"),))
    said = list(splits.measure(library, CountingTimer(), CPU))
    assert len(said) == 2
    assert all("no kernel 'paged_decode-sm_90a-mma-d64" in str(line) for line in said)


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    rows = [Row(8, 1, 128, "fp8", 4, 33, 16384, 1, 0, 132, 52.6), Row(32, 8, 128, "nvfp4", 1, 3, 100, 0, 2, 5, 9.06)]
    grid.write(tmp_path / "rows.csv", Row, rows)
    assert grid.read(tmp_path / "rows.csv", Row) == rows
    assert (tmp_path / "rows.csv").read_text().splitlines()[1] == "8,1,128,fp8,4,33,16384,1,0,132,52.6"
    assert rows[0].lens == (16384,) * 33
    assert rows[1].lens == (34, 67, 100)


def test_the_grid_fits_a_gpu_and_has_batches_of_one_wave_and_of_several() -> None:
    found = list(splits.batches())
    assert max(shape.kv_bytes(kv_format) for shape, kv_format, _, _ in found) <= splits.MOST_BYTES
    assert {len(shape.lens) * shape.h_k for shape, _, _, _ in found} >= {34, 67, 133, 260}
    assert {even for _, _, _, even in found} == {True, False}
    assert all(max(shape.lens) == keys for shape, _, keys, _ in found)


def test_main_writes_what_it_measured(
    library: Library, command_on: Callable[[Library], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_on(library)
    out = tmp_path / "new" / "rows.csv"
    assert splits.main(["--out", str(out)]) == 0
    assert len(grid.read(out, Row)) > 8
    assert " 8/1/128 fp8   1:   2 x   800 all, planned:   14 items   10.00" in capsys.readouterr().out
    driver: Any = library.driver
    driver.on_launch = lambda launch: None
    assert splits.main(["--out", str(out)]) == 1
    assert grid.read(out, Row) == []


def test_a_file_that_cannot_be_is_said_before_anything_is_measured(
    library: Library, command_on: Callable[[Library], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    command_on(library)
    monkeypatch.setattr(splits, "batches", lambda: pytest.fail("measured"))
    assert splits.main(["--out", str(tmp_path)]) == 2
    assert "benchmarks.splits: error: " in capsys.readouterr().err


def test_what_was_measured_stays_when_a_run_breaks_off(
    library: Library, command_on: Callable[[Library], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command_on(library)
    plans = splits.measure

    def broken(*given: Any) -> Any:
        for count, row in enumerate(plans(*given)):
            if count == 2:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(splits, "measure", broken)
    with pytest.raises(KeyboardInterrupt):
        splits.main(["--out", str(tmp_path / "rows.csv")])
    assert len(grid.read(tmp_path / "rows.csv", Row)) == 2
