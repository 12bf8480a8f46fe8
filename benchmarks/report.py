"""Results as text that fits 120 columns, as JSON, and as a page for docs/results."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

import cubinery
from benchmarks import summary
from benchmarks.host import Figure
from benchmarks.paged_decode import OURS, Guest, Result, Row
from benchmarks.shapes import Shape
from benchmarks.timing import Time
from cubinery.runtime.library import Library

WIDTH = 120
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a run was made."""

    date: str
    command: str
    gpu: str
    sms: int
    driver: str
    python: str
    versions: dict[str, str]
    bundle: list[str]
    """One line a bundle."""


def machine(library: Library, device: int) -> Machine:
    """Describe this machine, its software and the bundle."""
    info = library.driver.device_info(device)
    versions = {"cubinery": cubinery.__version__, "torch": torch.__version__}
    for name in ("triton", "numpy", "cuda-bindings"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    bundles = []
    for bundle in library.bundles:
        manifest = bundle.manifest
        tools = ", ".join(f"{name} {version}" for name, version in sorted(manifest.toolchain.items()))
        bundles.append(f"{manifest.arch}: {len(manifest.artifacts)} keys, PTX {manifest.ptx_version}, {tools}")
    return Machine(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        command=shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        gpu=info.name,
        sms=info.sm_count,
        driver=_driver_version() or f"CUDA {info.driver_version // 1000}.{info.driver_version % 1000 // 10}",
        python=platform.python_version(),
        versions=versions,
        bundle=bundles,
    )


def _driver_version() -> str:
    """What nvidia-smi calls the driver; empty where there is no nvidia-smi (on a Jetson)."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.splitlines()[0].strip() if done.stdout.strip() else ""


TITLE = 33
"""Columns of a shape's title."""

HEADER = f"{'shape':<{TITLE}} {'kv':<4} {'us':>8} {'GB/s':>5} {'/copy':>5} {'floor us':>8} {'/floor':>6} {'limit':>5} "
PEER_HEADER = f" {'best peer':<14} {'us':>7} {'ours/it':>7}"


def line(row: Row, copy_gbps: float, *, peers: bool) -> str:
    """A row of the table; the reason in place of figures that there are not."""
    text = f"{row.shape.title:<{TITLE}} {row.kv_format:<4} "
    ours = row.ours
    if ours.time is None:
        return cut(text + ours.error)
    us = ours.time.us
    text += f"{us:>8.1f} {row.gbps(us):>5.0f} {row.gbps(us) / copy_gbps:>5.2f} "
    ratio, limit = summary.over_floor(row), summary.floor_limit(row)
    if row.floor is None or ratio is None:
        text += f"{'-':>8} {'-':>6} {'-':>5} "
    else:
        mark = " " if limit is None or ratio <= limit else "!"
        text += f"{row.floor.us:>8.1f} {ratio:>6.2f} {'' if limit is None else f'{limit:.2f}':>5}{mark}"
    if peers:
        best = row.best_peer
        text += (
            f" {'none ran':<14} {'-':>7} {'-':>7}"
            if best is None
            else f" {best[0]:<14} {best[1]:>7.1f} {us / best[1]:>7.2f}"
        )
    return cut(text)


def cut(text: str) -> str:
    """`text`, or as much of it as fits a line."""
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"


def peer_lines(rows: Sequence[Row], peers: Sequence[Guest]) -> list[str]:
    """A table of all peers' microseconds and of ours over theirs, and why some have none."""
    present = [peer.name for peer in peers if not peer.absent]
    lines = [f"peer {p.name}: {'absent: ' + p.absent if p.absent else p.version}" for p in peers]
    if not present:
        return [cut(text) for text in lines]
    head = f"{'shape':<{TITLE}} {'kv':<4} {OURS:>9}"
    lines += [
        "",
        head + "".join(f" {name:>16}" for name in present) + "  best peer",
        f"{'':<{TITLE}} {'':<4} {'us':>9}" + f" {'us':>9} {'ours/':>6}" * len(present),
    ]
    errors = []
    for row in rows:
        ours = row.ours.time
        text = f"{row.shape.title:<{TITLE}} {row.kv_format:<4} " + (f"{'-':>9}" if ours is None else f"{ours.us:>9.1f}")
        for name in present:
            found = row.results[name]
            if found.time is None:
                text += f" {'-':>9} {'':>6}"
                errors.append(f"{name}, {row.shape.title}, {row.kv_format}: {found.error}")
            else:
                ratio = "" if ours is None else f"{ours.us / found.time.us:.2f}"
                text += f" {found.time.us:>9.1f} {ratio:>6}"
        best = row.best_peer
        lines.append(text + "  " + ("-" if best is None else best[0]))
    if any(name.startswith("fa3") for name in present):
        lines.append("fa3 is given an fp8 Q where the cache is fp8, which it demands; all others are given Q in bf16.")
    return [cut(text) for text in (*lines, *errors)]


def figure_lines(figures: Sequence[Figure]) -> list[str]:
    """The table of host figures."""
    lines = [f"{'host figure':<74} {'measured':>12} {'target':>12}  ok"]
    for f in figures:
        target = "" if f.target is None else f"{f.target:.2f} {f.unit}"
        lines.append(cut(f"{f.name:<74} {f'{f.measured:.2f} {f.unit}':>12} {target:>12}  {f.verdict}"))
    return lines


def to_json(
    where: Machine,
    copy_gbps: float | None,
    rows: Sequence[Row],
    peers: Sequence[Guest],
    figures: Sequence[Figure],
    sweep: Mapping[str, Any],
) -> dict[str, Any]:
    """All figures as plain data. Times are microseconds, rates GB/s of K and V bytes; `sweep` goes in as it is."""
    return {
        "version": FORMAT_VERSION,
        "machine": asdict(where),
        "copy_gbps": copy_gbps,
        "peers": {p.name: {"version": p.version, "absent": p.absent} for p in peers},
        "rows": [row_json(row, copy_gbps) for row in rows],
        "versus": summary.to_json(rows),
        "sweep": dict(sweep),
        "host": [asdict(f) | {"ok": f.ok} for f in figures],
    }


def row_json(row: Row, copy_gbps: float | None) -> dict[str, Any]:
    """One row as plain data."""
    results: dict[str, Mapping[str, Any]] = {}
    for name, found in row.results.items():
        if found.time is None:
            results[name] = {"error": found.error, "detail": found.detail}
            continue
        rate = row.gbps(found.time.us)
        results[name] = asdict(found.time) | {
            "gbps": rate,
            "of_copy": rate / copy_gbps if copy_gbps else None,
            "over_floor": found.time.us / row.floor.us if row.floor else None,
            "over_ours": found.time.us / row.ours.time.us if row.ours.time else None,
            "detail": found.detail,
        }
    return {
        "shape": asdict(row.shape) | {"title": row.shape.title},
        "kv_format": row.kv_format,
        "kv_bytes": row.kv_bytes,
        "floor": asdict(row.floor) if row.floor else None,
        "results": results,
    }


def rows_of(found: Mapping[str, Any]) -> list[Row]:
    """The rows that `to_json` made plain data of."""

    def time(data: Mapping[str, Any] | None) -> Time | None:
        return None if data is None or "us" not in data else Time(*(data[f.name] for f in fields(Time)))

    rows = []
    for data in found["rows"]:
        named = {f.name: data["shape"][f.name] for f in fields(Shape)}
        row = Row(Shape(**named | {"lens": tuple(named["lens"])}), data["kv_format"], time(data["floor"]))
        row.results.update(
            (name, Result(time(result), result.get("error", ""), result["detail"]))
            for name, result in data["results"].items()
        )
        rows.append(row)
    return rows


def page(where: Machine, text: Sequence[str], *, plot: str | None) -> str:
    """A page for docs/results: what was run, where, and what it printed."""
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    parts = [
        f"# {where.gpu}",
        "",
        f"- date: {where.date}",
        f"- command: `{where.command}`",
        f"- GPU: {where.gpu}, {where.sms} SMs; driver {where.driver}",
        f"- software: Python {where.python}, {versions}",
        *(f"- bundle {bundle}" for bundle in where.bundle),
        "",
        "How to read and repeat these figures: [README.md](README.md).",
        "",
        "```text",
        *text,
        "```",
    ]
    if plot is not None:
        parts += ["", f"![Achieved bandwidth against copy rate and read floor]({plot})"]
    return "\n".join(parts) + "\n"
