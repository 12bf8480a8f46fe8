"""What compute-sanitizer is given also runs without it, so that a bundle that lacks a kernel shows early."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.running import Gpu
from gpu.sanitize import LAUNCHES, sanitize

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("fields", "choices", "force_splits"), LAUNCHES)
def test_problems_for_the_sanitizer(
    gpu: Gpu, fields: dict[str, Any], choices: dict[str, Any], force_splits: int
) -> None:
    assert "splits" in sanitize(gpu, fields, choices, force_splits)
