"""Host figures on the fake driver, the C loop, and the accounts of a build."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, write_bundle

from benchmarks import build, host, launch_loop
from benchmarks.report import figure_lines
from benchmarks.shapes import Problem, Shape
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import FileRecord, Manifest
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.table import SelectorTable

CPU = torch.device("cpu")


@pytest.fixture
def library(tmp_path: Path) -> Library:
    config = MmaConfig(head_dim=128, page_size=64, kv_format="fp8", row_tile=8)
    table = SelectorTable("sm_90a", "none", ()).dumps().encode()
    file = FileRecord("tables/t.json", hashlib.sha256(table).hexdigest(), len(table))
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()], tables={"paged_decode": file})
    (tmp_path / "sm_90a/tables").mkdir()
    (tmp_path / "sm_90a/tables/t.json").write_bytes(table)
    return Library.open(tmp_path, driver=FakeDriver(("sm_90a",)))


def test_plan_is_timed_up_to_its_upload(library: Library) -> None:
    figures = list(host._plans(library, CPU, repeats=3))
    before, whole = figures[0], figures[1]
    assert 0 < before.measured < whole.measured
    assert (before.target, whole.target) == (host.PLAN_TARGET_US, None)


def test_each_step_of_eager_serving_has_a_new_q(library: Library) -> None:
    driver: Any = library.driver
    decode, page_size = host._decode(library, CPU)
    problem = Problem(Shape("host", 8, 1, 128, page_size, (256,)), decode.kv_format, CPU)
    step = host._with_new_q(decode.plan([256], num_q_heads=8, num_kv_heads=1, force_splits=2), problem)
    for _ in range(4):
        step()
    first, second, *others = [launch.values for launch in driver.launches]
    assert first["q"] != second["q"]
    assert second == first | {"q": second["q"]}
    assert others == [first, second]


def test_a_hundred_keys_are_opened(library: Library) -> None:
    manifest = host.hundred_keys(library.bundles[0].manifest)
    assert len(manifest.artifacts) == 100
    assert {a.key for a in library.bundles[0].manifest.artifacts} < {a.key for a in manifest.artifacts}
    assert Manifest.loads(manifest.dumps()) == manifest
    assert host._open(library, repeats=1).target == 30.0


def test_first_launches_start_from_nothing(library: Library) -> None:
    driver: Any = library.driver
    median, slowest = host._first_launches(library, CPU, most=4)
    assert len(driver.launches) == 2  # and once more from a library that had loaded nothing
    assert 0 < median.measured <= slowest.measured
    assert slowest.target == 5.0


def test_import_is_timed_without_torch() -> None:
    figure = host._import(repeats=1)
    assert figure.measured > 0
    assert figure.unit == "ms"


def test_figures_are_a_table_of_verdicts() -> None:
    lines = figure_lines(
        [host.Figure("a" * 70, 12.345, "us", 100.0), host.Figure("b", 101.0, "us", 100.0), host.Figure("c", 1, "ms")]
    )
    assert max(map(len, lines)) <= 120
    assert lines[1].endswith("100.00 us  yes")
    assert lines[2].endswith("100.00 us  NO")
    assert lines[3].split() == ["c", "1.00", "ms"]


@pytest.mark.skipif(not launch_loop.compilers(), reason="no C compiler")
def test_c_loop_launches_in_order_and_stops_at_an_error() -> None:
    loop, why = launch_loop.build()
    assert loop is not None, why
    seen: list[tuple[int, int, int]] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)

    @kind
    def launch(config: int, function: int, params: int, extra: int | None) -> int:
        assert extra is None
        seen.append((config, function, params))
        return 700 if len(seen) == 7 else 0

    address = ctypes.cast(launch, ctypes.c_void_p).value
    assert address is not None
    assert loop(address, [(1, 2, 3), (4, 5, 6)], 3) > 0
    assert seen == [(1, 2, 3), (4, 5, 6)] * 3
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx returned 700"):
        loop(address, [(1, 2, 3)], 1)


def test_no_c_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_loop, "compilers", list)
    assert launch_loop.build() == (None, "no C compiler (cc, gcc, clang or nvcc)")
    monkeypatch.setattr(launch_loop, "compilers", lambda: [["false"]])
    assert launch_loop.build() == (None, "false: failed")


def build_of(built: int = 24, wall_s: float = 33.0, compile_s: float = 60.0) -> build.Build:
    counts = {"built": built, "cached": 0, "failed": 0}
    report = {"counts": counts, "compile_seconds": compile_s, "start_seconds": 4.0, "workers": 2, "peak_memory": 4e8}
    return build.Build(wall_s, report)


def test_build_efficiency() -> None:
    found = build.efficiency(build_of(), build_of(0, 0.5), None)
    assert (found.ideal_s, found.ratio) == (32.0, 33 / 32)
    assert [line.split()[-1] for line in build.lines(found) if line.startswith(("wall", "second"))] == ["yes"] * 3
    slow = build.efficiency(build_of(), build_of(0, 1.5), build_of(compile_s=40.0))
    assert slow.ideal_s == 22.0
    assert [line.split()[-1] for line in build.lines(slow) if line.startswith(("wall", "second"))] == ["NO"] * 3


def test_builds_that_measure_nothing_are_refused() -> None:
    with pytest.raises(build.BuildFailed, match="23 keys were built: expected at least 24"):
        build.efficiency(build_of(23), build_of(0), None)
    with pytest.raises(build.BuildFailed, match="the second build compiled 1 keys again"):
        build.efficiency(build_of(), build_of(1), None)


def test_bad_arch_is_one_line(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.build", "--arch", "sm_42"], cwd=root, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "unknown arch 'sm_42'" in done.stderr
