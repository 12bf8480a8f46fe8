"""The append benchmark on the host: it times only what it has proved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_driver import FakeDriver, Launch, write_bundle
from fake_peers import CountingTimer
from host_kernels import memory, packed

from benchmarks import append
from benchmarks.append import Row, Shape, measure
from cubinery.aot.references.paged_append import append_rows
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig

SMALL = Shape(70, 2, 64)


def write_e2m1(launch: Launch) -> None:
    """The writer of 4-bit rows, from nothing but the launch."""
    v = launch.values
    tokens, heads, d = v["num_tokens"], v["num_kv_heads"], SMALL.head_dim
    slots = packed(v["slot_mapping"], (tokens,), np.int64 if v["slot_bytes"] == 8 else np.int32)
    for name in "kv":
        bits = memory(v[name], (tokens, heads, d), (v[f"{name}_token"], v[f"{name}_head"], 1), np.uint16)
        strides = (v[f"{name}_page_bytes"], v[f"{name}_row_bytes"], v[f"{name}_head_bytes"], 1)
        shape = (v["num_slots"] // v["page_size"], v["page_size"], heads, d // 2)
        cache = memory(v[f"{name}_cache"], shape, strides, np.uint8)
        rows = (bits.astype(np.uint32) << 16).view(np.float32)
        append_rows(cache, rows, slots, "e2m1", packed(v[f"{name}_descale"], (1,), np.float32))


def rows_of(tmp_path: Path, on_launch: Callable[[Launch], None] | None, formats: list[str]) -> tuple[list[Row], int]:
    write_bundle(tmp_path, "sm_90a", [AppendConfig(head_dim=64, kv_format="e2m1")])
    driver = FakeDriver(("sm_90a",))
    driver.on_launch = on_launch
    timer = CountingTimer()
    library = Library.open(tmp_path, driver=driver)
    return list(measure(library, [SMALL], formats, timer, torch.device("cpu"))), timer.timed


def test_a_right_writer_is_timed(tmp_path: Path) -> None:
    (row,), timed = rows_of(tmp_path, write_e2m1, ["e2m1"])
    assert row.error == ""
    assert timed == 2  # the append, and the copy beside it
    assert row.bytes == 2 * 70 * 2 * (128 + 32) + 8 * 70
    assert append.line(row, 10.0).split() == ["70", "2", "64", "e2m1", "10.0", "5", "0.45", "10.0", "1.00"]


@pytest.mark.parametrize("which", ["nothing", "wrong", "missing"])
def test_what_is_not_right_has_no_time(tmp_path: Path, which: str) -> None:
    def half(launch: Launch) -> None:
        launch.values["num_tokens"] -= 1
        write_e2m1(launch)

    ways: dict[str, Any] = {"nothing": None, "wrong": half, "missing": write_e2m1}
    (row,), timed = rows_of(tmp_path, ways[which], ["e2m3" if which == "missing" else "e2m1"])
    assert timed == 0
    assert row.us is None
    assert row.missing == (which == "missing")
    assert row.ok(1000.0) is None
    said = append.line(row, 1000.0)
    assert ("missing: no kernel" if which == "missing" else "wrong bytes of k_cache") in said


@pytest.mark.parametrize(("tokens", "us", "ok"), [(32768, 100.0, True), (32768, 101.0, False), (32767, 101.0, None)])
def test_large_appends_have_a_goal(tokens: int, us: float, ok: bool | None) -> None:
    row = Row(Shape(tokens, 8, 128), "fp8", 280_000_000, us, 70.0)
    assert row.ok(4000.0) is ok
    said = append.line(row, 4000.0)
    assert [word for word in said.split() if word in ("yes", "NO")] == {True: ["yes"], False: ["NO"], None: []}[ok]
