"""Tables of the sweep, within 120 columns, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks import append
from benchmarks.paged_decode import Row
from benchmarks.report import TITLE, cut, row_json
from benchmarks.summary import over_floor
from benchmarks.sweep import BASE, LEAST_OF_NEIGHBOUR, MOST_OVER_FLOOR, Measured

NEIGHBOUR_HEADER = (
    f"{'axis':<18} {'kv':<4} {'value':>5} {'us':>8} {'GB/s':>5} {'/copy':>5} {'/floor':>6} {'/neighbour':>10}  ok"
)
FORMAT_HEADER = (
    f"{'shape':<{TITLE}} {'kv':<5} {'us':>8} {'GB/s':>5} {'/copy':>5} {'floor us':>8} {'/floor':>6} {'/fp8':>5}  ok"
)


def neighbour_lines(found: Sequence[Measured], copy_gbps: float) -> list[str]:
    """The table of configurations beside their neighbours, and what is missing."""
    lines = [f"neighbours: {BASE.title}, one axis varied at a time", NEIGHBOUR_HEADER]
    for m in found:
        text = f"{m.point.axis:<18} {m.point.kv_format:<4} {m.point.value:>5} "
        ours = m.row.ours
        if ours.time is None:
            lines.append(cut(text + _why(ours.missing, ours.error)))
            continue
        rate = m.row.gbps(ours.time.us)
        ratio = over_floor(m.row)
        text += f"{ours.time.us:>8.1f} {rate:>5.0f} {rate / copy_gbps:>5.2f} {_number(ratio):>6} "
        verdict = {None: "", True: "yes", False: "NO"}[m.ok]
        lines.append(text + f"{_number(m.of_neighbour):>10}  {verdict}")
    compared = [m for m in found if m.ok is not None]
    slow = [m for m in compared if not m.ok]
    missing = sum(m.row.ours.missing for m in found)
    failed = sum(m.row.ours.time is None for m in found) - missing
    lines.append(
        f"{len(compared) - len(slow)} of {len(compared)} reach {LEAST_OF_NEIGHBOUR} of their faster neighbour's "
        f"bandwidth; {missing} of {len(found)} missing from the bundle, {failed} failed"
    )
    return lines


def format_lines(found: Sequence[tuple[Row, Row]], copy_gbps: float) -> list[str]:
    """The table of KV formats: bytes are packed bytes with block scales; `/fp8` is the time over fp8's."""
    lines = ["KV formats: bytes of packed K and V and of block scales", FORMAT_HEADER]
    for row, fp8 in found:
        text = f"{row.shape.title:<{TITLE}} {row.kv_format:<5} "
        if row.ours.time is None:
            lines.append(cut(text + _why(row.ours.missing, row.ours.error)))
            continue
        us = row.ours.time.us
        floor = f"{row.floor.us:.1f}" if row.floor else "-"
        text += f"{us:>8.1f} {row.gbps(us):>5.0f} {row.gbps(us) / copy_gbps:>5.2f} {floor:>8} "
        verdict = {None: "", True: "yes", False: "NO"}[format_ok(row, fp8)]
        lines.append(text + f"{_number(over_floor(row)):>6} {_number(of_fp8(row, fp8)):>5}  {verdict}")
    lines.append(f"limits of a narrow format: {MOST_OVER_FLOOR} of the floor, 1.00 of fp8")
    return lines


def of_fp8(row: Row, fp8: Row) -> float | None:
    """Our time over that of fp8 at the same shape."""
    if row is fp8 or row.ours.time is None or fp8.ours.time is None:
        return None
    return row.ours.time.us / fp8.ours.time.us


def format_ok(row: Row, fp8: Row) -> bool | None:
    """Whether a narrow format meets both limits; None for fp8 itself, and where one of them has no figure."""
    floor, of = over_floor(row), of_fp8(row, fp8)
    return None if floor is None or of is None else floor <= MOST_OVER_FLOOR and of <= 1.0


def to_json(neighbours: Sequence[Measured], formats: Sequence[tuple[Row, Row]], copy_gbps: float) -> dict[str, Any]:
    """Both tables as plain data."""
    return {
        "neighbours": [
            {
                "axis": m.point.axis,
                "value": m.point.value,
                "of_neighbour": m.of_neighbour,
                "ok": m.ok,
                **_state(m.row),
                "ctas_per_sm": m.point.ctas_per_sm,
            }
            | row_json(m.row, copy_gbps)
            for m in neighbours
        ],
        "formats": [
            {"of_fp8": of_fp8(row, fp8), "ok": format_ok(row, fp8), **_state(row)} | row_json(row, copy_gbps)
            for row, fp8 in formats
        ],
    }


def appends_json(rows: Sequence[append.Row], copy_gbps: float) -> list[dict[str, Any]]:
    """The cache writer's rows as plain data."""
    return [asdict(row) | {"ok": row.ok(copy_gbps), "failed": row.us is None and not row.missing} for row in rows]


def _state(row: Row) -> dict[str, bool]:
    """Whether a row has no time because the bundle has no kernel for it, or because it went wrong."""
    return {"missing": row.ours.missing, "failed": row.ours.time is None and not row.ours.missing}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _why(missing: bool, error: str) -> str:
    return f"missing: {error}" if missing else error
