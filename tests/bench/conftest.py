"""What tests of grids of plans share: a bundle whose launches compute on the CPU, and a command without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_driver import FakeDriver, write_outcomes
from fake_peers import CountingTimer
from host_kernels import HostKernels

from benchmarks import grid
from cubinery.runtime.library import Library


@pytest.fixture
def fp8_library(tmp_path: Path) -> Callable[[int], Library]:
    """For a number of sequences: what 8/1/128 over fp8 needs on Hopper."""

    def make(num_seqs: int) -> Library:
        driver = FakeDriver(("sm_90a",))
        driver.on_launch = HostKernels(num_seqs, 8, 1, True)
        domain = {"head_dim": [128], "page_size": [64], "kv_format": ["fp8"], "group_size": [8]}
        write_outcomes(tmp_path, "sm_90a", domain)
        return Library.open(tmp_path, driver=driver)

    return make


@pytest.fixture
def command_on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], None]:
    """Let the command of a grid run on a library, with the CPU as its device and a timer that counts."""

    def patch(library: Library) -> None:
        monkeypatch.setattr(grid.Library, "open", lambda path: library)
        monkeypatch.setattr(grid, "select_device", lambda number: torch.device("cpu"))
        monkeypatch.setattr(grid, "GpuTimer", lambda *_, **__: CountingTimer())

    return patch
