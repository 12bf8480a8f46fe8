"""Batches with clusters beside those without: what is measured, compared and printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_driver import FakeDriver, write_outcomes
from fake_peers import CountingTimer
from host_kernels import HostKernels

from benchmarks import batches
from benchmarks.batches import SHORT, Pair
from benchmarks.paged_decode import OURS, Result, Row
from benchmarks.timing import Time
from cubinery.runtime.arch import resolve
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_RULES, cluster_rules
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.select import Problem, choose


def pair(us: float | None, without: float | None, cluster: int = 8) -> Pair:
    def result(value: float | None) -> Result:
        return Result(error="wrong result") if value is None else Result(Time(value, 1, 2, 3), cluster=cluster)

    row = Row(replace(SHORT, lens=(4096,) * 8), "fp8")
    row.results[OURS] = result(us)
    row.floor = Time(8.0, 7, 9, 10)
    return Pair(row, None if cluster == 1 else result(without))


def test_every_rule_of_the_selector_is_measured() -> None:
    """Each is taken by some batch of these, and some batches take none."""
    taken = set()
    for shape, kv_format in batches.shapes():
        problem = Problem(
            head_dim=shape.d, page_size=shape.page_size, kv_format=kv_format, group_size=shape.h_q, q_len=shape.q_len
        )
        config = choose(problem, resolve("sm_90a")).clustered
        assert config is not None
        tiles = -(-shape.lens[0] // TILE_KEYS)
        rules = cluster_rules(
            len(shape.lens), row_tile=config.row_tile, row_bytes=config.row_bytes, longest=tiles, mean=tiles
        )
        taken.add(next(rules, None))
    assert taken == {None, *CLUSTER_RULES}


def test_a_plan_with_clusters_may_not_be_slower() -> None:
    assert (pair(10.0, 12.5).ratio, pair(10.0, 12.5).ok) == (pytest.approx(0.8), True)
    assert pair(10.1, 10.0).ok
    assert not pair(10.3, 10.0).ok
    for nothing in (pair(10.0, None), pair(None, 10.0), pair(10.0, 10.0, cluster=1)):
        assert nothing.ratio is None
        assert nothing.ok is None


def test_lines_say_which_and_by_how_much() -> None:
    text = batches.line(pair(10.0, 12.5))
    assert text.split() == ["8/1/128,", "p64", "fp8", "8", "4096", "10.0", "1.25", "8", "12.5", "0.80", "yes"]
    assert batches.line(pair(20.0, 12.5)).endswith("NO")
    assert batches.line(pair(10.0, 0, cluster=1)).split()[-1] == "-"
    assert "wrong result" in batches.line(pair(None, 1.0))
    assert "wrong result" in batches.line(pair(1.0, None))
    assert len(batches.HEADER) <= 120
    found = [pair(10.0, 12.5), pair(11.0, 10.0), pair(9.0, 0, cluster=1)]
    assert (
        batches.last_line(found)
        == "1 of 2 plans with clusters are no slower than without, the best at 0.80 of the time"
    )
    assert "0 of 0" in batches.last_line([])


def test_json_tells_a_missing_kernel_from_a_wrong_one() -> None:
    found = batches.to_json([pair(10.0, 12.5), pair(10.0, None), pair(9.0, 0, cluster=1)], 4000.0)
    assert [entry["failed"] for entry in found] == [False, True, False]
    assert [entry["cluster"] for entry in found] == [8, 8, 1]
    json.dumps(found)


def test_both_plans_are_proved_and_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(("sm_90a",))
    driver.on_launch = HostKernels(1, 8, 1, True)
    domain = {"head_dim": [128], "page_size": [64], "kv_format": ["fp8"], "group_size": [8]}
    write_outcomes(tmp_path, "sm_90a", domain)
    monkeypatch.setattr(batches, "POINTS", ((SHORT, "fp8", (1,), (300,)),))
    library = Library.open(tmp_path, driver=driver)
    (found,) = batches.measure(library, CountingTimer(), None, torch.device("cpu"))
    assert not found.row.ours.error
    assert found.row.ours.cluster == 16
    assert found.row.ours.detail.startswith("paged_decode-sm_90a-mma-d128-p64-kvfp8-t8-cl16 in clusters of 16; ")
    assert found.without is not None
    assert "cl16" not in found.without.detail
    assert found.ratio is not None
