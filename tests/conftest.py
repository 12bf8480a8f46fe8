"""Settings of every test: GPU tests skip themselves, with a reason, where no GPU answers."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import pytest

# Read when numpy is first imported, which no module above does: on a shared machine, threads of small matrix
# products wait for each other far longer than one takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent
"""The checkout that is being tested."""

try:
    from hypothesis import settings
except ModuleNotFoundError:
    pass  # a GPU machine that only runs tests/gpu needs no more than pytest
else:
    # The same examples on every machine and in every run: a failure that CI sees, anyone can repeat.
    settings.register_profile("cubinery", derandomize=True, deadline=None, max_examples=60, database=None)
    settings.load_profile("cubinery")


@cache
def missing_gpu() -> str:
    """Why GPU tests cannot run here; empty when they can. Asks the driver alone: no torch, no context."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver on this machine"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "no CUDA device on this machine"
    return ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and (reason := missing_gpu()):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout that is being tested."""
    return ROOT
