"""What a run amounts to: how much faster than the best peer of each shape, how close to the read floor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.paged_decode import Row

FLOOR_LIMITS = {
    "llama70b_b128_2k": 1.08,
    "llama8b_b32_4k": 1.08,
    "llama70b_tp8_b64_8k": 1.15,
    "qwen3_30b_b16_16k_q4": 1.15,
    "llama8b_b1_128k": 1.15,
    "d256_b1_128k": 1.15,
    "qwen3_30b_b1_64k": 1.3,
    "uneven_64k_31x4k": 1.3,
    "llama8b_b1_4k": 1.3,
    "d256_b1_8k": 1.3,
}
"""Largest time over the read floor with an fp8 cache, by shape."""

MEAN_TARGETS = {"fp8": 1.25, "bf16": 1.08}
"""Least geometric mean of (best peer's time / ours), by kv_format."""

WORST_TARGETS = {"fp8": 1.0, "bf16": 1 / 1.02}
"""Least (best peer's time / ours) of any shape."""


@dataclass(frozen=True, slots=True)
class Versus:
    """One KV format against the best peer of each shape."""

    kv_format: str
    shapes: int
    """Shapes that both we and a peer have a time for."""
    of: int
    """Shapes that were measured."""
    mean: float
    """Geometric mean of (best peer's time / ours): above 1, we are faster."""
    worst: float
    worst_title: str

    @property
    def ok(self) -> bool:
        """Whether every shape was compared, and both targets hold."""
        return (
            self.shapes == self.of
            and self.mean >= MEAN_TARGETS[self.kv_format]
            and self.worst >= WORST_TARGETS[self.kv_format]
        )


def floor_limit(row: Row) -> float | None:
    """The largest time over the read floor that a row may have; None where none is set."""
    return FLOOR_LIMITS.get(row.shape.name) if row.kv_format == "fp8" else None


def over_floor(row: Row) -> float | None:
    """Our time over the read floor's; None where one of them is not known."""
    if row.floor is None or row.ours.time is None:
        return None
    return row.ours.time.us / row.floor.us


def versus(rows: Sequence[Row]) -> list[Versus]:
    """Each KV format against the best peers; formats for which no peer ran are left out."""
    found = []
    for kv_format in dict.fromkeys(row.kv_format for row in rows):
        of = [row for row in rows if row.kv_format == kv_format]
        faster: list[tuple[float, str]] = []
        for row in of:
            best = row.best_peer
            if best is not None and row.ours.time is not None:
                faster.append((best[1] / row.ours.time.us, row.shape.title))
        if faster:
            mean = math.exp(sum(math.log(ratio) for ratio, _ in faster) / len(faster))
            worst, title = min(faster)
            found.append(Versus(kv_format, len(faster), len(of), mean, worst, title))
    return found


def lines(rows: Sequence[Row]) -> list[str]:
    """The last lines of a run."""
    text = []
    limited = [(row, floor_limit(row), over_floor(row)) for row in rows if floor_limit(row) is not None]
    if limited:
        over = [(row, limit, ratio) for row, limit, ratio in limited if ratio is None or ratio > (limit or 0)]
        text.append(f"fp8, time over floor: {len(limited) - len(over)} of {len(limited)} shapes within their limits")
        text += [
            f"  over: {row.shape.title}: {'not measured' if ratio is None else f'{ratio:.2f}'} (limit {limit})"
            for row, limit, ratio in over
        ]
    found = versus(rows)
    for kv_format in dict.fromkeys(row.kv_format for row in rows):
        if kv_format not in {v.kv_format for v in found}:
            text.append(f"{kv_format} against peers: no peer ran, so there is no mean")
    for v in found:
        text += [
            f"{v.kv_format}, best peer's time over ours, {v.shapes} of {v.of} shapes: {'ok' if v.ok else 'NO'}",
            f"  geometric mean {v.mean:.3f} (target {MEAN_TARGETS[v.kv_format]:.2f})",
            f"  least {v.worst:.3f} (target {WORST_TARGETS[v.kv_format]:.2f}): {v.worst_title}",
        ]
    return text


def to_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """`versus` as plain data."""
    return [asdict(v) | {"ok": v.ok} for v in versus(rows)]
