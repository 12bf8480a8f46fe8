"""Configurations beside their neighbours, and every KV format beside fp8: no axis may hold a cliff."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.ceilings import ReadFloor
from benchmarks.paged_decode import OURS, Row, measure_ours
from benchmarks.shapes import DTYPES, NARROW, SHAPES, Shape
from benchmarks.timing import Timer
from cubinery.runtime.library import Library

LEAST_OF_NEIGHBOUR = 0.8
"""Least bandwidth of a configuration over that of the faster of its two neighbours on an axis."""

MOST_OVER_FLOOR = 1.5
"""Largest time of a narrow format over the read floor of its packed bytes."""

BASE = Shape("sweep", 32, 8, 128, 64, (4096,) * 32)
"""What every axis is varied from: 32 sequences of 4096 keys, four query heads a KV head."""

FORMAT_SHAPES = tuple(
    shape for shape in SHAPES if shape.name in ("llama70b_b128_2k", "llama8b_b32_4k", "llama8b_b1_128k")
)
"""Where all KV formats are compared."""


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration on one axis."""

    axis: str
    value: int
    shape: Shape
    kv_format: str
    ctas_per_sm: int | None = None
    """None leaves it to the selector."""


@dataclass(slots=True)
class Measured:
    """A point and what came of it."""

    point: Point
    row: Row
    of_neighbour: float | None = None
    """Our bandwidth over that of the faster measured neighbour; None without one."""

    @property
    def ok(self) -> bool | None:
        """Whether it keeps up with its neighbours; None where there is nothing to compare."""
        return None if self.of_neighbour is None else self.of_neighbour >= LEAST_OF_NEIGHBOUR


def points() -> list[Point]:
    """All points, neighbours beside each other. Every one of an axis reads as many elements of K and V."""
    found = []
    for kv_format in DTYPES:
        found += [Point("q_len", n, replace(BASE, q_len=n), kv_format) for n in range(1, 17)]
        for d in (64, 128, 256, 512):
            heads = BASE.h_k * BASE.d // d
            found.append(Point("head_dim", d, replace(BASE, d=d, h_k=heads, h_q=4 * heads), kv_format))
        found += [Point("page_size", n, replace(BASE, page_size=n), kv_format) for n in (16, 32, 64, 128)]
        for d in (128, 256):
            heads = BASE.h_k * BASE.d // d
            shape = replace(BASE, d=d, h_k=heads, h_q=4 * heads)
            found += [Point(f"ctas_per_sm, d {d}", n, shape, kv_format, n) for n in (1, 2)]
    return found


def measure_points(
    chosen: Sequence[Point], library: Library, timer: Timer, floor: ReadFloor | None, device: torch.device
) -> list[Measured]:
    """Measure points, and each against its neighbours: the nearest measured values of its axis and format."""
    found = []
    for point in chosen:
        choices = {} if point.ctas_per_sm is None else {"ctas_per_sm": point.ctas_per_sm}
        row = Row(point.shape, point.kv_format)
        row.results[OURS] = measure_ours(library, point.shape, point.kv_format, timer, device, **choices)
        if floor is not None and row.ours.time is not None:
            row.floor = floor.time(row.kv_bytes)
        found.append(Measured(point, row))
    compare(found)
    return found


def compare(found: Sequence[Measured]) -> None:
    """Set `of_neighbour` of every measured point."""
    series: dict[tuple[str, str], list[tuple[Measured, float]]] = {}
    for m in found:
        if m.row.ours.time is not None:
            rate = m.row.gbps(m.row.ours.time.us)
            series.setdefault((m.point.axis, m.point.kv_format), []).append((m, rate))
    for timed in series.values():
        for at, (m, rate) in enumerate(timed):
            beside = [timed[i][1] for i in (at - 1, at + 1) if 0 <= i < len(timed)]
            m.of_neighbour = rate / max(beside) if beside else None


def measure_formats(
    library: Library, timer: Timer, floor: ReadFloor | None, device: torch.device
) -> Iterator[tuple[Row, Row]]:
    """(row, the same shape's fp8 row) of every narrow format at every shape of FORMAT_SHAPES, fp8 itself first."""
    for shape in FORMAT_SHAPES:
        fp8: Row | None = None
        for kv_format in ("fp8", *NARROW):
            row = Row(shape, kv_format)
            row.results[OURS] = measure_ours(library, shape, kv_format, timer, device)
            if floor is not None and row.ours.time is not None:
                row.floor = floor.time(row.kv_bytes)
            fp8 = fp8 or row
            yield row, fp8
