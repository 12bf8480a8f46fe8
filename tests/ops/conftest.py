"""A decode operator on a fake driver, over a bundle that holds what its selector picks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver, write_outcomes

from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan
from cubinery.runtime.ops.paged_decode.select import DOMAIN_AXES

Make = Callable[..., tuple[PagedDecode, FakeDriver]]


@pytest.fixture
def make_decode(tmp_path: Path) -> Callable[..., tuple[PagedDecode, FakeDriver]]:
    """make_decode(group_sizes=(4,), archs=("sm_90a",), **PagedDecode options) -> (decode, driver)."""

    def make(
        group_sizes: tuple[int, ...] = (4,), archs: tuple[str, ...] = ("sm_90a",), **options: Any
    ) -> tuple[PagedDecode, FakeDriver]:
        driver = FakeDriver(archs)
        # Most tests are about splits; those of clusters say cluster=None.
        problem = {"head_dim": 128, "page_size": 16, "kv_format": "fp8", "cluster": 1} | options
        domain = {name: [value] for name, value in problem.items() if name in DOMAIN_AXES}
        # A kernel has a window or a cap, a launch says which.
        domain |= {name: [problem[name] is not None] for name in ("window", "softcap") if name in problem}
        for arch in dict.fromkeys(archs):
            write_outcomes(tmp_path, arch, domain | {"group_size": list(group_sizes)})
        return PagedDecode(Library.open(tmp_path, driver=driver), **problem), driver

    return make


@pytest.fixture
def p() -> Problem:
    """Three sequences: of some tiles, of less than one, and of a dozen."""
    return Problem(lengths=[300, 17, 1500], rng=np.random.default_rng(2), torch=torch)


@pytest.fixture
def made(make_decode: Make, p: Problem) -> tuple[Plan, FakeDriver]:
    """A plan of `p`, and what its launches go to."""
    decode, driver = make_decode()
    return decode.plan(p.lengths, **p.heads), driver
