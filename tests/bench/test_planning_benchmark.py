"""The planning benchmark on the host: a plan that is not the host's has no time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import host_kernels
import pytest
import torch
from fake_driver import FakeDriver, Launch, write_bundle

from benchmarks.planning import measure
from benchmarks.timing import Time
from cubinery.runtime.arch import resolve
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.select import Problem, select


class CallingTimer:
    """Calls once, and says 10 us."""

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        return call

    def time(self, call: Callable[[], object]) -> Time:
        call()
        return Time(10.0, 9.0, 11.0, 1)


@pytest.mark.parametrize("right", [True, False])
def test_only_equal_plans_are_timed(tmp_path: Path, right: bool) -> None:
    def off_by_a_tile(launch: Launch) -> None:
        launch.values["max_length"] -= 8000
        host_kernels.plan(launch)

    problem = Problem(head_dim=128, page_size=16, kv_format="fp8", group_size=4)
    config = select(problem, resolve("sm_90a"))
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    driver: Any = FakeDriver(("sm_90a",))
    driver.on_launch = host_kernels.plan if right else off_by_a_tile
    library = Library.open(tmp_path, driver=driver)
    rows = list(measure(library, CallingTimer(), torch.device("cpu"), batches=(3, 40), repeats=1))
    assert [(row.num_seqs, row.policy) for row in rows] == [
        (3, "balanced"), (3, "thor"), (40, "balanced"), (40, "thor"),
    ]  # fmt: skip
    assert {row.device_us for row in rows} == {10.0 if right else None}
    assert all(row.host_us > 0 for row in rows)
