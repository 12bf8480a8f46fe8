"""Tuning: what is compared, what a table says of it, and what it leaves to the rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, write_bundle
from fake_peers import CountingTimer
from host_kernels import HostKernels

from benchmarks import tune
from benchmarks.paged_decode import Result
from benchmarks.shapes import Shape
from benchmarks.timing import Time
from benchmarks.tune import Class
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.rule_rows import ROW_CLASSES, rows_of_rules
from cubinery.runtime.ops.paged_decode.select import Problem, choose
from cubinery.runtime.ops.paged_decode.table import SelectorTable, loads

H200 = resolve("sm_90a")
FEW = Class(128, "fp8", (1, 8))
PLAIN = {"head_dim": 128, "page_size": 64, "kv_format": "fp8"}


class Script:
    """Stands in for `measure_ours`: times of a list, in order, and what was asked for."""

    def __init__(self, us: list[float]) -> None:
        self.us, self.asked = us, []  # type: ignore[var-annotated]

    def __call__(self, library: Library, shape: Shape, kv_format: str, *rest: Any, table: SelectorTable) -> Result:
        self.asked.append((shape.lens, table.rows[0].options[0]))
        return Result(Time(self.us[len(self.asked) - 1], 1, 2, 3))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Two configurations of head_dim 128, one of which the rules would pick, and others that are not compared."""
    monkeypatch.setattr(tune, "BATCHES", ((140, 17), (60, 3)))
    monkeypatch.setattr(tune, "HEAD_ELEMENTS", 128)
    configs = [MmaConfig(**PLAIN, ctas_per_sm=c) for c in (1, 2)]
    others = [MmaConfig(**PLAIN, window=True, ctas_per_sm=1), MmaConfig(**PLAIN | {"page_size": 16}, ctas_per_sm=1)]
    write_bundle(tmp_path, "sm_90a", [*configs, *others, *configs[0].requires()])
    driver = FakeDriver(("sm_90a",))
    driver.on_launch = HostKernels(2, 16, 1, causal=True)
    return Library.open(tmp_path, driver=driver)


def run(library: Library, us: list[float], *kinds: Class) -> tuple[list[Any], list[str], Script]:
    """Rows, what was said and what was asked, where measurements take these times."""
    said: list[str] = []
    script = Script(us)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tune, "measure_ours", script)
        rows = tune.tune(library, H200, list(kinds), CountingTimer(), torch.device("cpu"), said.append)
    return rows, said, script


def test_plain_configurations_are_compared(library: Library) -> None:
    options = tune.options_of(library, "sm_90a", FEW)
    assert sorted(option.axes["ctas_per_sm"] for option in options) == [1, 2]
    assert tune.options_of(library, "sm_110a", FEW) == []


def test_the_fastest_goes_first_and_the_problem_gets_it(library: Library) -> None:
    """Two options by two shapes, then thor and two other costs for the faster one, of which none is faster."""
    options = tune.options_of(library, "sm_90a", FEW)
    (row,), said, script = run(library, [20.0, 40.0, 10.0, 30.0, *[50.0] * 6], FEW)
    assert [lens for lens, _ in script.asked] == [(140, 17), (60, 3)] * 5
    assert [asked for _, asked in script.asked[:4:2]] == options
    assert row.options == (options[1], options[0])
    assert row.when == {"head_dim": (128,), "kv_format": ("fp8",), "q_dtype": ("bf16",), "n_q": (1, 8)}
    assert row.basis == "measured"
    assert row.note.startswith("us for 1 x 140 + 1 x 17, 1 x 60 + 1 x 3: 10.0, 30.0 with mma, row_tile 16, ")
    assert said[-1].startswith("head_dim 128, fp8, 1 to 8 rows: mma, row_tile 16, ctas_per_sm ")
    text = SelectorTable("sm_90a", "measured", (row, *rows_of_rules(H200))).dumps()
    problem = Problem(**PLAIN, group_size=8)
    assert choose(problem, H200, table=loads(text, "x")).config.ctas_per_sm == options[1].axes["ctas_per_sm"]


def test_a_split_policy_must_be_faster_by_a_percent(library: Library) -> None:
    first = [10.0, 10.0, 20.0, 20.0]
    (row,), _, _ = run(library, [*first, 9.8, 9.8, *[50.0] * 4], FEW)
    assert row.options[0].policy == "thor"
    (row,), _, _ = run(library, [*first, 9.95, 9.95, *[50.0] * 4], FEW)
    assert row.options[0].policy == "balanced"
    (row,), _, _ = run(library, [*first, 50.0, 50.0, 9.0, 9.0, 50.0, 50.0], FEW)
    own = MmaConfig(**PLAIN, ctas_per_sm=1).lone_tile_cost
    assert row.options[0].lone_tile_cost == round(0.75 * own)


def test_what_the_bundle_lacks_keeps_its_rules(library: Library) -> None:
    rows, said, script = run(library, [], Class(64, "bf16", (1, 8)))
    assert (rows, script.asked) == ([], [])
    assert said == ["head_dim 64, bf16, 1 to 8 rows: nothing in the bundle serves it; the rules' rows stay"]


@pytest.mark.parametrize("right", [True, False])
def test_what_is_timed_was_proved(library: Library, right: bool) -> None:
    """Kernels on the host; without them outputs stay as they were poisoned, and no row comes of it."""
    driver: Any = library.driver
    if not right:
        driver.on_launch = None
    said: list[str] = []
    timer = CountingTimer()
    rows = tune.tune(library, H200, [FEW], timer, torch.device("cpu"), said.append)
    assert (len(rows), timer.timed) == ((1, 10) if right else (0, 0)), said
    if right:
        assert rows[0].note.count("10.0, 10.0 with") == 2, "of equal times none is better by a percent"
    else:
        assert "wrong result, sequence 0" in said[0]


def test_classes_and_their_shapes() -> None:
    found = list(tune.classes([64, 512], ["fp8"]))
    assert [kind.rows for kind in found[::2]] == list(ROW_CLASSES)
    for kind in found:
        for shape in kind.shapes():
            assert shape.h_k * shape.d == tune.HEAD_ELEMENTS
            assert kind.rows[0] <= shape.h_q // shape.h_k <= (kind.rows[1] or tune.WIDEST_GROUP)
            assert shape.kv_bytes("fp8") == sum(shape.lens) * 2 * tune.HEAD_ELEMENTS


def test_what_was_measured_before_stays(root: Path, tmp_path: Path, library: Library) -> None:
    """The shipped table of the H200, after its rules were written again; then with a class measured anew."""
    shipped = root / "kernel_specs/selectors/paged_decode.sm_90a.json"
    file = tmp_path / "t.json"
    file.write_bytes(shipped.read_bytes())
    assert tune.main(["--rules", "sm_90a", "--out", str(file)]) == 0
    assert file.read_bytes() == shipped.read_bytes()
    before = loads(file.read_bytes(), "x").rows
    rows, _, _ = run(library, [20.0, 40.0, 10.0, 30.0, *[50.0] * 6], FEW)
    for _ in range(2):  # the second time its own row is replaced
        tune._write(H200, rows, "another", file)
        after = loads(file.read_bytes(), "x")
        assert after.rows == (*rows, *before)
        assert after.source == "another"
    with pytest.raises(CubineryError, match=r"t.json: holds a table for sm_90a: expected one for sm_110a, or no file"):
        tune._write(resolve("thor"), rows, "x", file)


def test_rules_are_written_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new/t.json"
    assert tune.main(["--rules", "thor", "--out", str(file)]) == 0
    assert loads(file.read_bytes(), "x").rows == rows_of_rules(resolve("sm_110a"))
    assert "0 measured rows and" in capsys.readouterr().out
    assert tune.main(["--rules", "sm_75"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.tune: error: ")
    assert tune.main(["--rules", "thor", "--out", str(file / "below.json")]) == 2
    assert "cannot be written: " in capsys.readouterr().err
    assert tune.main(["--formats", "fp9"]) == 2
    assert "--formats 'fp9': expected one or more of" in capsys.readouterr().err
