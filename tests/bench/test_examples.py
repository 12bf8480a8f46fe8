"""The examples on the host: their own code, with `cuda` read as `cpu` and the kernels run by a fake driver."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, Launch, write_bundle
from host_kernels import HostKernels

from cubinery.runtime.arch import resolve
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.select import Problem, select

Run = Callable[..., list[str]]


@pytest.fixture
def run_example(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """run_example(name, num_seqs, kv_format=, page_size=, **constants) -> the lines that it printed."""

    def run(name: str, num_seqs: int, *, kv_format: str, page_size: int, **constants: Any) -> list[str]:
        config = select(
            Problem(head_dim=128, page_size=page_size, kv_format=kv_format, group_size=4), resolve("sm_90a")
        )
        write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
        driver = FakeDriver(("sm_90a",))
        driver.on_launch = HostKernels(num_seqs, config.row_tile, 1, causal=True)
        real_open = Library.open
        monkeypatch.setattr(Library, "open", lambda path: real_open(path, driver=driver))
        _graphs_of_launches(driver, monkeypatch)
        source = (root / "examples" / name).read_text(encoding="utf-8").replace('"cuda"', '"cpu"')
        space: dict[str, Any] = {"__name__": "example"}
        exec(compile(source.replace(".cuda()", ""), name, "exec"), space)
        assert constants.keys() <= space.keys()
        space.update(constants)
        space["main"](str(tmp_path))
        found: list[str] = capsys.readouterr().out.splitlines()
        return found

    return run


def _graphs_of_launches(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs that hold launches as they were captured, and read memory when they are replayed."""

    class Graph:
        launches: tuple[Launch, ...] = ()

        def replay(self) -> None:
            for launch in self.launches:
                assert driver.on_launch is not None
                driver.on_launch(launch)

    @contextmanager
    def graph(target: Graph) -> Iterator[None]:
        before = len(driver.launches)
        yield
        target.launches = tuple(driver.launches[before:])
        assert target.launches

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def test_decode(run_example: Run) -> None:
    lines = run_example("decode.py", 3, kv_format="fp8", page_size=16, SEQ_LENS=[100, 37, 400])
    assert "out (3, 32, 128) torch.bfloat16, lse (3, 8, 4) torch.float32" in lines
    assert float(lines[-1].split()[3]) < 5e-3


def test_cache_layouts(run_example: Run) -> None:
    lines = run_example("cache_layouts.py", 2, kv_format="fp8", page_size=64, SEQ_LENS=[300, 500])
    assert [line.split()[0] for line in lines] == ["nhd", "hnd", "interleaved", "flashinfer"]
    assert all(line.endswith("True") for line in lines)


def test_graph_replay(run_example: Run) -> None:
    lines = run_example("graph_replay.py", 3, kv_format="bf16", page_size=16, LAYERS=2, STEPS=2)
    assert len(lines) == 2
    assert "[102, 702, 1502]" in lines[1]
    assert all(line.endswith("True") for line in lines)
