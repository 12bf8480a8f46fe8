"""Fixtures of the GPU tests, and their report.

The library under test is CUBINERY_BUNDLE (build/kernels by default), which `make gpu-test BUNDLE=...` sets. Where
CUBINERY_RESULTS names a folder, a summary is written there as gpu-tests.json and gpu-tests.md.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.report import write_report
from gpu.running import MEASURED, Gpu, Recording

from cubinery.runtime.errors import BundleError
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import MmaConfig

ROOT = Path(__file__).resolve().parent.parent.parent


def bundle_path() -> Path:
    return Path(os.environ.get("CUBINERY_BUNDLE") or ROOT / "build" / "kernels")


@cache
def opened() -> Library | str:
    """The library under test, or why there is none; opening it starts no GPU."""
    try:
        return Library.open(bundle_path())
    except BundleError as error:
        return str(error)


@pytest.fixture(scope="session")
def bundle() -> Path:
    """The bundle's folder. A test that needs it is skipped where nobody built one and nobody named one."""
    found = opened()
    if isinstance(found, str):
        if "CUBINERY_BUNDLE" in os.environ:
            pytest.fail(f"CUBINERY_BUNDLE: {found}")
        pytest.skip(f"no bundle to test: {found}")
    return bundle_path()


@pytest.fixture(scope="session")
def gpu(bundle: Path) -> Gpu:
    """The current device and the opened bundle."""
    library = opened()
    assert isinstance(library, Library)
    return Gpu(library, torch.device("cuda", torch.cuda.current_device()))


@pytest.fixture
def launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Symbols of the kernels that plans made in this test enqueue, in order."""
    driver = gpu.library.driver
    found: list[str] = []
    prepare = driver.prepare

    def recording(kernel: Any, *rest: Any) -> Recording:
        return Recording(prepare(kernel, *rest), kernel.symbol, found)

    monkeypatch.setattr(driver, "prepare", recording)
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`decode_key` runs over every decode kernel of the bundle, `append_key` over every cache writer."""
    for name, kind in (("decode_key", MmaConfig), ("append_key", AppendConfig)):
        if name in metafunc.fixturenames:
            library = opened()
            keys = library.keys() if isinstance(library, Library) else ()
            metafunc.parametrize(name, [k for k in keys if isinstance(parse_key(k)[0], kind)])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what this session measured, if it measured anything and was told where to."""
    folder = os.environ.get("CUBINERY_RESULTS")
    if folder and MEASURED:
        outcomes = {
            name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")
        }
        library = opened()
        assert isinstance(library, Library)
        for path in write_report(Path(folder), outcomes, library):
            terminalreporter.write_line(f"wrote {path}")
