"""The decode benchmark on the host: what it proves before it times, and what it prints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, Launch, write_bundle
from fake_peers import CountingTimer, TorchPeer
from host_kernels import HostKernels

from benchmarks import cli, plots, report, sections, summary
from benchmarks.ceilings import ReadFloor
from benchmarks.paged_decode import OURS, Result, Row, measure, measure_peer
from benchmarks.peer_process import FirstCall
from benchmarks.shapes import SHAPES, Problem, Shape
from benchmarks.timing import Time
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.select import Problem as Selected
from cubinery.runtime.ops.paged_decode.select import select

CPU = torch.device("cpu")
SMALL = Shape("small", 8, 2, 128, 16, (300, 17), 2)


class InProcess:
    """A peer of this process, as the benchmark sees one in a process of its own."""

    def __init__(self, peer: TorchPeer, timer: CountingTimer) -> None:
        self.name, self.version, self.absent = peer.name, peer.version, peer.absent
        self.peer, self.timer = peer, timer

    def measure(self, shape: Shape, kv_format: str) -> Result:
        return measure_peer(self.peer, Problem(shape, kv_format, CPU), self.timer)

    def close(self) -> None:
        self.absent = "closed"


@pytest.fixture
def library(tmp_path: Path) -> Library:
    from cubinery.runtime.arch import resolve

    config = select(Selected(head_dim=128, page_size=16, kv_format="fp8", group_size=4, q_len=2), resolve("sm_90a"))
    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    driver = FakeDriver(("sm_90a",))
    driver.on_launch = HostKernels(2, config.row_tile, 2, causal=True)
    return Library.open(tmp_path, driver=driver)


def rows_of(library: Library, peers: list[Any], timer: CountingTimer, shape: Shape = SMALL) -> list[Row]:
    return list(measure([shape], ["fp8"], library, [InProcess(p, timer) for p in peers], timer, None, CPU))


def test_a_right_kernel_and_a_right_peer_are_timed(library: Library) -> None:
    timer = CountingTimer()
    (row,) = rows_of(library, [TorchPeer("right")], timer)
    assert row.ours.time is not None, row.ours.error
    assert "mma" in row.ours.detail
    assert timer.timed == 2
    assert row.best_peer == ("right", 10.0)
    assert row.kv_bytes == 317 * 2 * 128 * 2


@pytest.mark.parametrize("damage", ["scale", "does nothing"])
def test_a_wrong_kernel_is_never_timed(library: Library, damage: str) -> None:
    driver: Any = library.driver
    right = driver.on_launch

    def off_by_a_percent(launch: Launch) -> None:
        launch.values["scale_qs"] *= 1.01
        right(launch)

    driver.on_launch = off_by_a_percent if damage == "scale" else lambda launch: None
    timer = CountingTimer()
    (row,) = rows_of(library, [], timer)
    assert row.ours.time is None
    assert row.ours.error.startswith("wrong result, sequence 0: O relative L2")
    assert timer.timed == 0


def test_wrong_and_failing_peers_have_a_reason_and_no_time(library: Library) -> None:
    timer = CountingTimer()
    (row,) = rows_of(library, [TorchPeer("wrong", 1.2), TorchPeer("failing", 0.0)], timer)
    assert row.results["wrong"].error.startswith("wrong result, sequence 0")
    assert row.results["failing"].error == "RuntimeError: page size 16 is not served"
    assert row.best_peer is None
    assert timer.timed == 1


def test_a_missing_kernel_is_a_row_that_names_it(library: Library) -> None:
    (row,) = rows_of(library, [], CountingTimer(), dataclasses.replace(SMALL, page_size=64))
    assert "KernelNotFoundError: no kernel 'paged_decode-sm_90a-mma-d128-p64-kvfp8-q2-t8'" in row.ours.error
    assert row.ours.missing


def test_reference_against_the_tests_own() -> None:
    from cubinery.aot.references.paged_decode import paged_attention

    problem = Problem(SMALL, "bf16", CPU)
    o, lse = paged_attention(problem.q, problem.k, problem.v, problem.host_table, list(SMALL.lens), q_len=SMALL.q_len)
    for seq in (0, 1):
        found_o, found_lse = problem.reference(seq)
        torch.testing.assert_close(found_o, torch.from_numpy(o[2 * seq : 2 * seq + 2]))
        torch.testing.assert_close(found_lse, torch.from_numpy(lse[seq]))


def results(*, peers: bool, error: str = "") -> list[Row]:
    ours = Result(error=error) if error else Result(Time(123456.7, 1, 2, 3))
    found = {OURS: ours} | ({"flashinfer_fa2": Result(Time(99999.9, 1, 2, 3))} if peers else {})
    return [Row(shape, kv, Time(88888.8, 1, 2, 3), dict(found)) for shape in SHAPES for kv in ("fp8", "bf16")]


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("error", ["", "x" * 300])
def test_tables_fit_a_terminal(peers: bool, error: str) -> None:
    lines = [report.line(row, 4000.0, peers=peers) for row in results(peers=peers, error=error)]
    header = report.HEADER + (report.PEER_HEADER if peers else "")
    assert max(map(len, [header, *lines])) <= 120
    if not error:
        assert {len(text) for text in lines} == {len(header)}


def test_the_plot_is_drawn_or_its_lack_explained(tmp_path: Path) -> None:
    why = plots.roofline(results(peers=True), 4000.0, "a GPU", tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").exists() != bool(why)
    assert not why or "pip install matplotlib" in why


@pytest.mark.parametrize("error", ["", "no such kernel"])
def test_rows_come_back_from_json(library: Library, error: str) -> None:
    rows = results(peers=True, error=error)
    found = report.to_json(report.machine(library, 0), 4000.0, rows, [], [], {})
    assert report.rows_of(json.loads(json.dumps(found))) == rows


def test_a_run_is_drawn_elsewhere(library: Library, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report.to_json(report.machine(library, 0), 4000.0, results(peers=True), [], [], {})
    (tmp_path / "results.json").write_text(json.dumps(found))
    status = plots.main([str(tmp_path / "results.json"), str(tmp_path / "again.png")])
    assert (tmp_path / "again.png").exists() == (status == 0)
    assert ("written: " in capsys.readouterr().out) == (status == 0)


def test_json_holds_every_figure(library: Library) -> None:
    rows = rows_of(library, [TorchPeer("wrong", 1.2)], CountingTimer())
    found = json.loads(json.dumps(report.to_json(report.machine(library, 0), 1000.0, rows, [], [], {})))
    (row,) = found["rows"]
    assert row["results"][OURS]["gbps"] == pytest.approx(row["kv_bytes"] / 10 / 1e3)
    assert row["results"][OURS]["of_copy"] == pytest.approx(row["kv_bytes"] / 10 / 1e6)
    assert "wrong result" in row["results"]["wrong"]["error"]
    assert found["machine"]["bundle"][0].startswith("sm_90a: 2 keys")


def test_no_floor_says_why() -> None:
    floor = ReadFloor(CountingTimer(), CPU)
    if floor.why:
        assert floor.time(1 << 20) is None
        assert "triton" in floor.why


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "nothing"], "--shapes 'nothing' matches none of llama70b_b128_2k"),
        (["--formats", "fp4"], "--formats 'fp4': expected one or more of fp8, bf16"),
        (["--peers", "fa9"], "--peers 'fa9': expected one or more of flashinfer_fa2, flashinfer_xqa, fa3_vllm, none"),
        (["--bundle", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == cli.EXIT_USAGE
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"benchmarks: error: {said}")
    assert captured.err.count("\n") == 1


def test_choices() -> None:
    assert [s.name for s in cli.choose_shapes("b1_4k, d256")] == ["llama8b_b1_4k", "d256_b1_8k", "d256_b1_128k"]
    assert cli.choose("--peers", "none", ["a"], none=True) == []
    with pytest.raises(CubineryError, match="expected one or more of a, none"):
        cli.choose("--peers", "", ["a"], none=True)


def test_a_whole_run_on_the_host(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything but the GPU's own clock: options to tables, JSON and page."""
    monkeypatch.setattr(cli, "SHAPES", (SMALL,))
    peers = [InProcess(TorchPeer("right"), CountingTimer())]
    monkeypatch.setattr(cli, "PEERS", {"right": None})
    monkeypatch.setattr(sections, "start_peers", lambda run, *_: run.peers.extend(peers))
    monkeypatch.setattr(sections, "GpuTimer", lambda *_, **__: CountingTimer())
    monkeypatch.setattr(sections, "copy_rate", lambda *_: 1000.0)
    monkeypatch.setattr(cli, "select_device", lambda _: CPU)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(
        sections, "ReadFloor", lambda *_, **__: type("", (), {"why": "none", "time": lambda *_: None})()
    )
    monkeypatch.setattr(cli.Library, "open", lambda _: library)
    out = tmp_path / "out"
    options = ["--only", "decode", "--peers", "right", "--out", str(out), "--formats"]
    assert cli.main([*options, "fp8"]) == 0
    text = capsys.readouterr().out
    assert "no read floor: none" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("written: ")) <= 120
    assert peers[0].absent == "closed"
    peers[0].absent = ""
    assert text.splitlines()[-4:-1] == [
        "fp8, best peer's time over ours, 1 of 1 shapes: NO",
        "  geometric mean 1.000 (target 1.25)",
        f"  least 1.000 (target 1.00): {SMALL.title}",
    ]
    page = (out / "results.md").read_text()
    assert text.splitlines()[0] in page
    assert json.loads((out / "results.json").read_text())["rows"][0]["results"]["right"]["us"] == 10.0
    # A format that the bundle lacks is reported in its row, and by the exit code.
    assert cli.main([*options, "bf16", "--json"]) == cli.EXIT_FAILED
    captured = capsys.readouterr()
    assert "KernelNotFoundError" in captured.err
    assert "KernelNotFoundError" in json.loads(captured.out)["rows"][0]["results"][OURS]["error"]


def timed(kv_format: str, ours: float | None, *peers: float, floor: float = 10.0, shape: Shape = SHAPES[0]) -> Row:
    """A row whose times, us, are given."""
    row = Row(shape, kv_format, Time(floor, 1, 2, 3))
    row.results[OURS] = Result(error="wrong") if ours is None else Result(Time(ours, 1, 2, 3))
    for at, us in enumerate(peers):
        row.results[f"peer{at}"] = Result(Time(us, 1, 2, 3))
    return row


def test_the_mean_is_over_the_best_peer_of_each_shape() -> None:
    (found,) = summary.versus([timed("fp8", 10.0, 20.0, 40.0), timed("fp8", 10.0, 30.0, 12.5)])
    assert (found.shapes, found.of) == (2, 2)
    assert found.mean == pytest.approx((2.0 * 1.25) ** 0.5)
    assert found.worst == pytest.approx(1.25)
    assert found.ok


def test_a_shape_without_a_time_fails_the_mean() -> None:
    (found,) = summary.versus([timed("fp8", 10.0, 20.0), timed("fp8", None, 20.0)])
    assert (found.shapes, found.of, found.ok) == (1, 2, False)
    lines = summary.lines([timed("fp8", 10.0, 20.0), timed("fp8", None, 20.0)])
    assert lines[-3:-1] == [
        "fp8, best peer's time over ours, 1 of 2 shapes: NO",
        "  geometric mean 2.000 (target 1.25)",
    ]
    assert any("not measured (limit 1.08)" in text for text in lines)


@pytest.mark.parametrize(
    ("kv_format", "ours", "ok"), [("fp8", 20.1, False), ("bf16", 20.3, True), ("bf16", 20.5, False)]
)
def test_a_single_slow_shape_fails_the_format(kv_format: str, ours: float, ok: bool) -> None:
    fast = [timed(kv_format, 10.0, 20.0) for _ in range(4)]
    (found,) = summary.versus([*fast, timed(kv_format, ours, 20.0)])
    assert found.mean > 1.25
    assert found.ok is ok


def test_no_peer_no_mean() -> None:
    rows = [timed("fp8", 10.7), timed("bf16", 10.0)]
    assert summary.versus(rows) == []
    assert summary.lines(rows) == [
        "fp8, time over floor: 1 of 1 shapes within their limits",
        "fp8 against peers: no peer ran, so there is no mean",
        "bf16 against peers: no peer ran, so there is no mean",
    ]


def test_every_shape_has_a_floor_limit_and_over_it_is_marked() -> None:
    assert set(summary.FLOOR_LIMITS) == {shape.name for shape in SHAPES}
    assert "1.07  1.08 " in report.line(timed("fp8", 10.7), 4000.0, peers=False)
    assert "1.09  1.08!" in report.line(timed("fp8", 10.9), 4000.0, peers=False)
    assert "!" not in report.line(timed("bf16", 30.0), 4000.0, peers=False)


def test_the_table_of_peers_fits_and_holds_ratios() -> None:
    row = timed("fp8", 100.0, 80.0, 200.0)
    row.results["peer2"] = Result(error="RuntimeError: page size")
    known = [InProcess(TorchPeer(f"peer{i}"), CountingTimer()) for i in range(3)]
    lines = report.peer_lines([row], known)
    assert max(map(len, lines)) <= 120
    (cells,) = (text for text in lines if text.startswith(row.shape.title))
    assert cells.split()[-7:] == ["100.0", "80.0", "1.25", "200.0", "0.50", "-", "peer0"]
    assert lines[-1] == f"peer2, {row.shape.title}, fp8: RuntimeError: page size"


def test_peers_start_together_and_compile_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Process(InProcess):
        def __init__(self, name: str, make_peer: Any, make_timer: Any, device: Any, *, absent: str) -> None:
            super().__init__(TorchPeer(name), make_timer(device))
            self.absent = absent

        def start(self) -> None:
            done.append(f"start {self.name}")

        def join(self) -> None:
            done.append(f"join {self.name}")

        def request_first_calls(self, problems: list[tuple[Shape, str]]) -> None:
            done.append(f"request {self.name} {len(problems)}")

        def first_calls(self, problems: list[tuple[Shape, str]]) -> list[FirstCall]:
            return [] if self.absent else [FirstCall("one", 8.5), FirstCall("two", 0.5, "RuntimeError: no nvcc")]

    monkeypatch.setattr(sections, "PeerProcess", Process)
    monkeypatch.setattr(sections, "GpuTimer", lambda *_, **__: CountingTimer())
    monkeypatch.setattr(sections.peers, "PEERS", {"a": None, "b": None})
    monkeypatch.setattr(sections.peers, "absent", lambda name: "not installed" if name == "b" else "")
    said: list[str] = []
    run = sections.Run(None, CPU, False, lambda *lines: said.extend(lines))  # type: ignore[arg-type]
    sections.start_peers(run, ["a", "b"], SHAPES[:3], ["fp8"])
    assert done == ["start a", "start b", "join a", "request a 2", "join b", "request b 2"]
    assert said == [
        "a 1: first calls of 2 configurations took 9.0 s, longest 8.5 s (one)",
        "  two: RuntimeError: no nvcc",
    ]
    assert [peer.absent for peer in run.peers] == ["", "not installed"]
