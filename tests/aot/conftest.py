"""Fixtures of the build tests. The toy family and its helpers live in `toys/`, which workers import too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOYS = Path(__file__).resolve().parent / "toys"
if str(TOYS) not in sys.path:
    sys.path.insert(0, str(TOYS))

import toy_builds  # noqa: E402 - found through the path set above
import toy_plugin  # noqa: E402

from cubinery.aot.builder import BuildOptions, BuildReport, build  # noqa: E402
from cubinery.aot.variants import BuildItem  # noqa: E402


@pytest.fixture(autouse=True)
def toy_family() -> None:
    """The toy family is known in every build test."""
    toy_plugin.install()


@pytest.fixture
def run_build(tmp_path: Path) -> Callable[..., BuildReport]:
    """Build with the fake compiler into `tmp_path/out`, with a cache of its own; options override."""

    def run(wanted: list[BuildItem], progress: Any = None, **options: Any) -> BuildReport:
        settings = {
            "out": tmp_path / "out",
            "cache_dir": tmp_path / "cache",
            "compile_entry": toy_builds.FAKE,
            "jobs": 2,
        }
        return build(wanted, BuildOptions(**{**settings, **options}), progress)

    return run
