"""Batches that do not fill the chip: where the selector takes clusters of CTAs, beside the plan without them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.ceilings import ReadFloor
from benchmarks.paged_decode import OURS, Result, Row, measure_ours
from benchmarks.report import cut, row_json
from benchmarks.shapes import Shape
from benchmarks.summary import over_floor
from benchmarks.timing import Timer
from cubinery.runtime.library import Library

MOST_OF_OTHERS = 1.02
"""Largest time of a plan with clusters over that of the plan without: noise, and no more."""

HEADER = (
    f"{'query/KV heads/head_dim':<32} {'kv':<4} {'batch':>5} {'keys':>6} {'us':>7} {'/floor':>6} {'CTAs':>4} "
    f"{'without':>7} {'ratio':>5}  ok"
)
LEGEND = (f"CTAs: of a cluster, - for none. without: us without clusters; a plan may take {MOST_OF_OTHERS} of that",)

K = 1024
SHORT = Shape("batch", 8, 1, 128, 64, (4 * K,))
WIDE = replace(SHORT, d=256, h_q=6, page_size=16)
POINTS: tuple[tuple[Shape, str, Sequence[int], Sequence[int]], ...] = (
    (SHORT, "fp8", (1, 4, 7, 8, 16, 24, 32, 40, 64), (K, 4 * K, 16 * K)),
    (SHORT, "bf16", (1, 4, 7, 8, 16, 24, 32, 40, 64), (4 * K,)),
    (WIDE, "fp8", (1, 4, 7, 8, 16, 40, 64), (4 * K, 16 * K)),
    (replace(SHORT, q_len=4), "fp8", (1, 7, 8, 16, 64), (4 * K, 16 * K)),
    (replace(SHORT, h_q=16), "fp8", (7, 16, 40, 64), (4 * K,)),
    (replace(SHORT, d=64), "fp8", (4, 16, 32, 64), (4 * K,)),
    (WIDE, "bf16", (1, 7, 8, 16), (4 * K, 16 * K)),
    (SHORT, "fp8", (3, 14), (32 * K,)),
    (SHORT, "fp8", (24,), (8 * K,)),
    (replace(SHORT, q_len=4), "fp8", (24, 44), (2 * K,)),
    *(
        (one, kv_format, (batch,), (keys,))
        for one in (SHORT, WIDE)
        for kv_format in ("fp8", "bf16")
        for batch, keys in ((33, 2 * K), (36, 4 * K), (40, 8 * K), (48, 32 * K), (60, 8 * K), (63, 4 * K), (64, 32 * K))
    ),
)
"""(one sequence's shape, KV format, batches, keys of each sequence); the last ones are ends of the selector's rules."""


@dataclass(slots=True)
class Pair:
    """A batch as the selector serves it, and without clusters where it took them."""

    row: Row
    without: Result | None

    @property
    def ratio(self) -> float | None:
        """Time over that without clusters; None where there is nothing to compare."""
        if self.without is None or self.row.ours.time is None or self.without.time is None:
            return None
        return self.row.ours.time.us / self.without.time.us

    @property
    def ok(self) -> bool | None:
        """Whether the selector was right; None where there is nothing to compare."""
        return None if self.ratio is None else self.ratio <= MOST_OF_OTHERS


def shapes() -> Iterator[tuple[Shape, str]]:
    """Every batch with its KV format."""
    for one, kv_format, batches, lengths in POINTS:
        for keys in lengths:
            for batch in batches:
                yield replace(one, lens=(keys,) * batch), kv_format


def measure(library: Library, timer: Timer, floor: ReadFloor | None, device: torch.device) -> Iterator[Pair]:
    """Measure them all; yields each when it is complete."""
    for shape, kv_format in shapes():
        row = Row(shape, kv_format)
        row.results[OURS] = measure_ours(library, shape, kv_format, timer, device)
        without = None
        if row.ours.cluster > 1:
            without = measure_ours(library, shape, kv_format, timer, device, cluster=1)
        if floor is not None and row.ours.time is not None:
            row.floor = floor.time(row.kv_bytes)
        yield Pair(row, without)


def line(pair: Pair) -> str:
    """One row of the table."""
    row, shape = pair.row, pair.row.shape
    heads = f"{shape.h_q}/{shape.h_k}/{shape.d}, p{shape.page_size}" + (f", q {shape.q_len}" if shape.q_len > 1 else "")
    text = f"{heads:<32} {row.kv_format:<4} {len(shape.lens):>5} {shape.lens[0]:>6} "
    if row.ours.time is None:
        return cut(text + ("missing: " if row.ours.missing else "") + row.ours.error)
    floor = over_floor(row)
    text += f"{row.ours.time.us:>7.1f} {'-' if floor is None else f'{floor:.2f}':>6} "
    if pair.without is None:
        return text + "   -"
    if pair.without.time is None:
        return cut(text + f"{row.ours.cluster:>4} {pair.without.error}")
    return text + f"{row.ours.cluster:>4} {pair.without.time.us:>7.1f} {pair.ratio:>5.2f}  {'yes' if pair.ok else 'NO'}"


def last_line(pairs: Sequence[Pair]) -> str:
    """What it amounts to."""
    ratios = [pair.ratio for pair in pairs if pair.ratio is not None]
    right = sum(pair.ok is True for pair in pairs)
    best = f", the best at {min(ratios):.2f} of the time" if ratios else ""
    return f"{right} of {len(ratios)} plans with clusters are no slower than without{best}"


def to_json(pairs: Iterable[Pair], copy_gbps: float) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [
        {
            "cluster": pair.row.ours.cluster,
            "without_us": None if pair.without is None or pair.without.time is None else pair.without.time.us,
            "ratio": pair.ratio,
            "ok": pair.ok,
            "missing": pair.row.ours.missing,
            "failed": any(r is not None and r.time is None and not r.missing for r in (pair.row.ours, pair.without)),
        }
        | row_json(pair.row, copy_gbps)
        for pair in pairs
    ]
