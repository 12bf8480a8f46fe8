"""`python -m benchmarks.splits`: the planner's plan beside plans whose sequences are cut into 1, 2, 3 ... chunks.

What the planner's estimate (runtime/ops/paged_decode/planner.py) is made from, and held against by the tests. No plan
has clusters here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks import grid
from benchmarks.batches import SHORT, WIDE, K
from benchmarks.paged_decode import Result, measure_plan
from benchmarks.peers import first_line
from benchmarks.shapes import Problem, Shape
from benchmarks.timing import Timer
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

EIGHT = replace(SHORT, h_q=32, h_k=8)
FORMS = (
    (replace(SHORT, q_len=4), "fp8"), (replace(SHORT, q_len=4), "bf16"), (WIDE, "fp8"), (WIDE, "bf16"),
    (replace(WIDE, q_len=4), "fp8"), (SHORT, "fp8"), (SHORT, "bf16"), (replace(SHORT, q_len=8), "fp8"),
    (replace(SHORT, q_len=8), "bf16"), (replace(SHORT, q_len=16), "fp8"), (replace(WIDE, q_len=8), "fp8"),
    (SHORT, "nvfp4"), (replace(SHORT, q_len=4), "nvfp4"), (replace(EIGHT, q_len=8), "fp8"),
)  # fmt: skip
"""(one sequence's shape, KV format): two CTAs an SM and one, few query rows and many, eight KV heads."""

BATCHES = (20, 34, 48, 67, 80, 100, 133, 170, 260)
"""Sequences, times KV heads."""

LENGTHS = ((4 * K, True), (16 * K, True), (16 * K, False))
"""(keys of the longest sequence, whether all are as long; if not, the i-th of n has i/n of them)."""

SPLITS = (1, 2, 3, 4, 5, 6, 8, 11)
"""Chunks that the longest sequence is cut into; others are cut into chunks as long."""

MOST_BYTES = 5 << 28
"""Of K and V, which a batch may have: more would take minutes to fill."""

MOST_WAVES = 6
"""CTAs that a plan may have, in those that the GPU holds at once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one batch; a row of the file, whose columns are named so."""

    query_heads: int
    kv_heads: int
    head_dim: int
    kv_format: str
    q_len: int
    sequences: int
    keys: int
    even: int
    """1: all sequences have so many keys. 0: see LENGTHS."""
    splits: int
    """See SPLITS; 0: what the planner chose."""
    items: int
    """Work items of the plan."""
    us: float

    @property
    def lens(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return lengths(self.sequences, self.keys, bool(self.even))

    @property
    def line(self) -> str:
        """The row for people."""
        return (
            f"{self.query_heads:>2}/{self.kv_heads}/{self.head_dim} {self.kv_format:<5} {self.q_len}: "
            f"{self.sequences:>3} x {self.keys:>5} {'all' if self.even else 'up to'}, {self.splits or 'planned':>7}: "
            f"{self.items:>4} items {self.us:>7.2f}"
        )


def lengths(sequences: int, keys: int, even: bool) -> tuple[int, ...]:
    """Keys of each sequence of a batch."""
    return (keys,) * sequences if even else tuple(-(-keys * (i + 1) // sequences) for i in range(sequences))


def batches() -> Iterator[tuple[Shape, str, int, bool]]:
    """Every (shape, KV format, keys of the longest sequence, whether all are as long)."""
    for one, kv_format in FORMS:
        for count in dict.fromkeys(-(-count // one.h_k) for count in BATCHES):
            for keys, even in LENGTHS:
                shape = replace(one, lens=lengths(count, keys, even))
                if shape.kv_bytes(kv_format) <= MOST_BYTES:
                    yield shape, kv_format, keys, even


def measure(library: Library, timer: Timer, device: torch.device) -> Iterator[Row | str]:
    """Prove and time each batch with every plan; yields rows, and what is wrong with those that have none."""
    for shape, kv_format, keys, even in batches():
        title = f"{replace(shape, lens=(keys,)).title}, {kv_format}, {len(shape.lens)} {'alike' if even else 'rising'}"
        try:
            for splits, result in _plans(library, shape, kv_format, timer, device):
                if result.time is None:
                    yield f"{title}, {splits} splits: {result.error}"
                else:
                    yield Row(
                        shape.h_q, shape.h_k, shape.d, kv_format, shape.q_len, len(shape.lens), keys, int(even), splits,
                        result.items, round(result.time.us, 2),
                    )  # fmt: skip
        except CubineryError as error:
            yield f"{title}: {first_line(error)}"
        gc.collect()  # a plan and its graph hold each other, and with them the cache
        torch.cuda.empty_cache()


def _plans(
    library: Library, shape: Shape, kv_format: str, timer: Timer, device: torch.device
) -> Iterator[tuple[int, Result]]:
    """(splits, what was measured) of one batch."""
    decode = PagedDecode(
        library, head_dim=shape.d, page_size=shape.page_size, kv_format=kv_format, q_len=shape.q_len,
        device=device.index, cluster=1,
    )  # fmt: skip
    decode.preload(shape.h_q // shape.h_k)  # before gigabytes are filled for nothing
    problem = Problem(shape, kv_format, device)
    for splits in _different(decode, shape):
        yield splits, measure_plan(decode, problem, timer, force_splits=splits)


def _different(decode: PagedDecode, shape: Shape) -> Iterator[int]:
    """The planner's own plan, and of SPLITS those that make different plans of no more than MOST_WAVES."""
    seen = set()
    for splits in (0, *SPLITS):
        plan = decode.plan(
            np.array(shape.lens), num_q_heads=shape.h_q, num_kv_heads=shape.h_k, force_splits=splits
        ).splits
        if splits == 0 or (plan.num_items not in seen and plan.num_items <= MOST_WAVES * plan.slots):
            yield splits
        seen.add(plan.num_items)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    header = "query heads/KV heads/head_dim, KV, q_len: sequences x keys, chunks: work items, us"
    return grid.main("splits", __doc__ or "", Row, header, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
