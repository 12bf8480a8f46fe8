"""Clusters of every size beside plans without them: what is measured, left out, written and read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_peers import CountingTimer

from benchmarks import clusters, grid
from benchmarks.batches import SHORT
from benchmarks.clusters import Row
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES

CPU = torch.device("cpu")


@pytest.fixture
def library(fp8_library: Callable[[int], Library], monkeypatch: pytest.MonkeyPatch) -> Library:
    """Of what 8/1/128 over fp8 needs; the grid has one short sequence, and two in clusters of 8."""
    monkeypatch.setattr(clusters, "FORMS", ((SHORT, "fp8"),))
    monkeypatch.setattr(clusters, "BATCHES", {16: (1,), 8: (2,)})
    monkeypatch.setattr(clusters, "LENGTHS", (300,))
    return fp8_library(1)


def test_both_plans_are_proved_and_timed_where_clusters_fit(library: Library) -> None:
    driver: Any = library.driver
    driver.clusters = 1
    (row,) = clusters.measure(library, CountingTimer(), CPU)
    assert row == Row(8, 128, "fp8", 1, 1, 16, 300, 10.0, 10.0)
    assert row.ratio == 1


def test_what_has_no_time_is_said(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    driver: Any = library.driver
    driver.clusters = 66
    driver.on_launch = lambda launch: None
    for said in clusters.measure(library, CountingTimer(), CPU):
        assert isinstance(said, str)
        assert said.count("wrong result, sequence 0") == 2
    monkeypatch.setattr(clusters, "FORMS", ((replace(SHORT, d=64), "fp8"),))
    found = list(clusters.measure(library, CountingTimer(), CPU))
    assert len(found) == 2
    assert all("no kernel 'paged_decode-sm_90a-mma-d64" in str(said) for said in found)


def test_rows_come_back_from_the_file(tmp_path: Path) -> None:
    rows = [Row(8, 128, "fp8", 1, 33, 2, 65536, 156.4, 138.5), Row(6, 256, "bf16", 4, 1, 16, 2048, 9.6, 13.52)]
    grid.write(tmp_path / "rows.csv", Row, rows)
    assert grid.read(tmp_path / "rows.csv", Row) == rows
    assert (tmp_path / "rows.csv").read_text().splitlines()[1] == "8,128,fp8,1,33,2,65536,156.4,138.5"


def test_the_grid_has_every_size_and_fits_a_gpu() -> None:
    found = list(clusters.batches())
    assert {cluster for _, _, cluster in found} == set(CLUSTER_SIZES)
    assert max(shape.kv_bytes(kv_format) for shape, kv_format, _ in found) <= clusters.MOST_BYTES
    assert {len(shape.lens) for shape, _, _ in found} >= {1, 2, 3, 7, 8, 16, 32, 33, 66}


def test_main_writes_what_it_measured(
    library: Library, command_on: Callable[[Library], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command_on(library)
    driver: Any = library.driver
    driver.clusters = 1
    out = tmp_path / "new" / "rows.csv"
    assert clusters.main(["--out", str(out)]) == 0
    assert [row.cluster for row in grid.read(out, Row)] == [16]
    assert " 8 128 fp8  1:  1 x   300 in 16:   10.00   10.00 1.000" in capsys.readouterr().out
    driver.on_launch = lambda launch: None
    assert clusters.main(["--out", str(out)]) == 1
    assert grid.read(out, Row) == []


def test_a_bundle_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clusters.main(["--bundle", str(tmp_path / "none")]) == 2
    assert "benchmarks.clusters: error: " in capsys.readouterr().err
