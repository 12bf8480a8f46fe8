"""Configurations beside their neighbours, and the KV formats: what is measured, compared and printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_driver import FakeDriver, write_bundle
from fake_peers import CountingTimer
from host_kernels import HostKernels

from benchmarks import append, batches, cli, keys, sections, sweep, sweep_report
from benchmarks.paged_decode import OURS, Result, Row
from benchmarks.shapes import NARROW, SHAPES, Problem, Shape
from benchmarks.sweep import BASE, Measured, Point
from benchmarks.timing import Time
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.quantize import QuantizedKv, dequantize_kv

CPU = torch.device("cpu")
SMALL = Shape("small", 8, 2, 128, 16, (300, 17))


def measured(
    value: int, us: float | None, *, axis: str = "q_len", kv_format: str = "fp8", missing: bool = False
) -> Measured:
    row = Row(BASE, kv_format)
    row.results[OURS] = (
        Result(error="KernelNotFoundError: no kernel", missing=missing) if us is None else Result(Time(us, 1, 2, 3))
    )
    return Measured(Point(axis, value, BASE, kv_format), row)


def test_points_cover_the_axes_and_read_as_much() -> None:
    points = sweep.points()
    axes = {
        axis: [p.value for p in points if p.axis == axis and p.kv_format == "fp8"] for axis in {p.axis for p in points}
    }
    assert axes == {
        "q_len": list(range(1, 17)),
        "head_dim": [64, 128, 256, 512],
        "page_size": [16, 32, 64, 128],
        "ctas_per_sm, d 128": [1, 2],
        "ctas_per_sm, d 256": [1, 2],
    }
    assert {p.kv_format for p in points} == {"fp8", "bf16"}
    assert {p.shape.kv_bytes("fp8") for p in points} == {BASE.kv_bytes("fp8")}
    assert {p.shape.h_q // p.shape.h_k for p in points} == {4}


def test_a_point_is_held_to_the_faster_neighbour() -> None:
    found = [measured(1, 10.0), measured(2, 20.0), measured(3, 12.0), measured(1, 99.0, kv_format="bf16")]
    sweep.compare(found)
    assert [m.of_neighbour for m in found] == [pytest.approx(2.0), pytest.approx(0.5), pytest.approx(20 / 12), None]
    assert [m.ok for m in found] == [True, False, True, None]


def test_a_missing_point_is_listed_and_its_neighbours_meet() -> None:
    found = [measured(1, 10.0), measured(2, None, missing=True), measured(3, 13.0), measured(4, None)]
    sweep.compare(found)
    assert found[2].of_neighbour == pytest.approx(10 / 13)
    lines = sweep_report.neighbour_lines(found, 4000.0)
    assert max(map(len, lines)) <= 120
    assert "missing: KernelNotFoundError" in lines[3]
    assert lines[4].endswith(" 0.77  NO")
    assert lines[-1].startswith("1 of 2 reach 0.8")
    assert lines[-1].endswith("1 of 4 missing from the bundle, 1 failed")


def test_the_library_is_measured_at_a_point(tmp_path: Path) -> None:
    config = MmaConfig(head_dim=128, page_size=16, kv_format="fp8", row_tile=8, ctas_per_sm=1)
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    driver = FakeDriver(("sm_90a",))
    driver.on_launch = HostKernels(2, config.row_tile, 1, causal=True)
    library = Library.open(tmp_path, driver=driver)
    chosen = [Point("ctas_per_sm", n, SMALL, "fp8", n) for n in (1, 2)]
    one, two = sweep.measure_points(chosen, library, CountingTimer(), None, CPU)
    assert one.row.ours.time is not None, one.row.ours.error
    assert two.row.ours.missing
    assert "KernelNotFoundError: no kernel 'paged_decode-sm_90a-mma-d128-p16-kvfp8-t8'" in two.row.ours.error
    swept = sweep_report.to_json([one, two], [], 4000.0)
    assert [entry["missing"] for entry in json.loads(json.dumps(swept))["neighbours"]] == [False, True]


@pytest.mark.parametrize("kv_format", NARROW)
def test_narrow_problems_and_their_reference(kv_format: str) -> None:
    shape = replace(SMALL, q_len=2)
    problem = Problem(shape, kv_format, CPU)
    bits = {"e3m2": 6, "e2m3": 6, "e2m1": 4, "nvfp4": 4.5}[kv_format]
    assert shape.kv_bytes(kv_format) == 317 * 2 * 2 * 128 * bits / 8
    assert problem.k.shape[-1] == 128 * int(bits) // 8
    exact = [
        dequantize_kv(QuantizedKv(kv_format, data, torch.ones(1), None if s is None else s.view(torch.uint8)))
        for data, s in ((problem.k, problem.k_scales), (problem.v, problem.v_scales))
    ]
    assert 0.9 < float(exact[0].std()) < 1.1, "descales of 1 must suit the tensors"
    o, lse = paged_attention(problem.q, *exact, problem.host_table, list(shape.lens), q_len=2)
    for seq in (0, 1):
        found_o, found_lse = problem.reference(seq)
        torch.testing.assert_close(found_o, torch.from_numpy(o[2 * seq : 2 * seq + 2]))
        torch.testing.assert_close(found_lse, torch.from_numpy(lse[seq]))


def test_a_narrow_format_must_meet_both_limits() -> None:
    def row(kv_format: str, us: float, floor: float) -> Row:
        return Row(BASE, kv_format, Time(floor, 1, 2, 3), {OURS: Result(Time(us, 1, 2, 3))})

    fp8 = row("fp8", 100.0, 90.0)
    found = [
        (fp8, fp8),
        (row("e3m2", 99.0, 70.0), fp8),
        (row("e2m3", 101.0, 70.0), fp8),
        (row("e2m1", 76.0, 50.0), fp8),
    ]
    assert [sweep_report.format_ok(*pair) for pair in found] == [None, True, False, False]
    lines = sweep_report.format_lines(found, 4000.0)
    assert max(map(len, lines)) <= 120
    assert [text.split()[-1] for text in lines[3:6]] == ["yes", "NO", "NO"]


def test_formats_are_measured_where_they_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without kernels nothing is allocated: each row says what is missing."""
    config = MmaConfig(head_dim=256, page_size=16, kv_format="fp8")
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    library = Library.open(tmp_path, driver=FakeDriver(("sm_90a",)))
    found = list(sweep.measure_formats(library, CountingTimer(), None, CPU))
    assert [row.kv_format for row, _ in found] == ["fp8", *NARROW] * 3
    assert {row.shape.title.split(",")[0] for row, _ in found} == {"128 x 2K", "32 x 4K", "1 x 128K"}
    assert all(row.ours.missing for row, _ in found)


def test_keys_of_a_run_can_be_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cubinery.aot.variants import from_misses

    assert cli.main(["--keys", "sm_90a", "--sweep"]) == 0
    captured = capsys.readouterr()
    (tmp_path / "keys.json").write_text(captured.out)
    built = {item.key for item in from_misses(tmp_path / "keys.json")}
    assert {json.loads(text)["key"] for text in captured.out.splitlines()} <= built  # and what they require
    served = [w for w in keys.wanted(SHAPES, ("fp8", "bf16"), swept=True) if w[1] in ("fp8", "bf16")]
    unserved = captured.err.splitlines()
    assert all(text.startswith("benchmarks: no kernel: ") for text in unserved)
    for shape, kv_format, ctas in served:
        if not any(f"{shape.title}, {kv_format}: " in text for text in unserved):
            found, _ = keys.keys("sm_90a", [(shape, kv_format, ctas)])
            assert found[0]["key"] in built
    assert {f"paged_decode-sm_90a-mma-d128-p64-kvfp8-q{n}" for n in ("2-t8", 3, 4)} <= built


def test_keys_of_an_unknown_arch_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--keys", "sm_9"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.startswith("benchmarks: error: ")


def test_a_whole_sweep_without_kernels_lists_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = MmaConfig(head_dim=64, page_size=16, kv_format="fp8")
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    library = Library.open(tmp_path, driver=FakeDriver(("sm_90a",)))
    monkeypatch.setattr(sections, "GpuTimer", lambda *_, **__: CountingTimer())
    monkeypatch.setattr(sections, "copy_rate", lambda *_: 1000.0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    said: list[str] = []
    run = sections.Run(library, CPU, False, lambda *lines: said.extend(lines))
    sections.sweep_all(run)
    assert max(map(len, said)) <= 120
    assert {part: len(entries) for part, entries in run.sweep.items()} == {
        "neighbours": len(sweep.points()),
        "formats": 15,
        "appends": 6 * len(append.SHAPES),
        "batches": len(list(batches.shapes())),
    }
    assert all(entry["missing"] for entries in run.sweep.values() for entry in entries)
    assert sum("missing: " in text for text in said) == sum(map(len, run.sweep.values()))
    assert not sections.failed(run)  # a bundle need not hold all of it
    run.sweep["appends"][0] |= {"missing": False, "failed": True}
    assert sections.failed(run)
    json.dumps(run.sweep)
