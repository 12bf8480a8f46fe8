"""`python -m benchmarks.clusters`: clusters of every size beside plans without them, over batches of every size.

What the selector's rules (runtime/ops/paged_decode/clusters.py) are made from, and held against by the tests. Clusters
that the GPU cannot hold at once are left out, as the selector leaves them out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import grid
from benchmarks.batches import SHORT, WIDE, K
from benchmarks.paged_decode import measure_ours
from benchmarks.shapes import Shape
from benchmarks.timing import Timer
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

FORMS = (
    (SHORT, "fp8"), (SHORT, "bf16"), (WIDE, "fp8"), (WIDE, "bf16"), (replace(SHORT, d=64), "fp8"),
    (replace(SHORT, d=64), "bf16"), (replace(SHORT, h_q=16), "fp8"), (replace(SHORT, q_len=4), "fp8"),
)  # fmt: skip
"""(one sequence's shape, KV format)."""

BATCHES = {
    16: (1, 2, 3, 7),
    8: (8, 14, 16),
    4: (13, 16, 24, 32),
    2: (33, 36, 40, 44, 48, 51, 56, 61, 64, 66),
}
"""Sequences of one KV head, by the CTAs of a cluster."""

LENGTHS = (2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
MOST_BYTES = 1 << 30
"""Of K and V, which a batch may have: more would take minutes to fill."""


@dataclass(frozen=True, slots=True)
class Row:
    """One batch with clusters of one size and without; a row of the file, whose columns are named so."""

    query_heads: int
    head_dim: int
    kv_format: str
    q_len: int
    sequences: int
    cluster: int
    keys: int
    us: float
    without_us: float

    @property
    def ratio(self) -> float:
        """Time over that without clusters."""
        return self.us / self.without_us

    @property
    def line(self) -> str:
        """The row for people."""
        return (
            f"{self.query_heads:>2} {self.head_dim:>3} {self.kv_format:<4} {self.q_len}: {self.sequences:>2} x "
            f"{self.keys:>5} in {self.cluster:>2}: {self.us:>7.2f} {self.without_us:>7.2f} {self.ratio:.3f}"
        )


def batches() -> Iterator[tuple[Shape, str, int]]:
    """Every (shape, KV format, CTAs of a cluster)."""
    for one, kv_format in FORMS:
        for cluster, counts in BATCHES.items():
            for count in counts:
                for keys in LENGTHS:
                    shape = replace(one, lens=(keys,) * count)
                    if shape.kv_bytes(kv_format) <= MOST_BYTES:
                        yield shape, kv_format, cluster


def measure(library: Library, timer: Timer, device: torch.device) -> Iterator[Row | str]:
    """Prove and time each batch both ways; yields rows, and what is wrong with those that have none."""
    for shape, kv_format, cluster in batches():
        if not _fits(library, shape, kv_format, cluster, device):
            continue
        found = [measure_ours(library, shape, kv_format, timer, device, cluster=size) for size in (cluster, 1)]
        torch.cuda.empty_cache()
        times = [result.time.us for result in found if result.time is not None]
        if len(times) < 2:
            yield f"{shape.title}, {kv_format}, clusters of {cluster}: " + "; ".join(r.error for r in found if r.error)
        else:
            yield Row(
                shape.h_q, shape.d, kv_format, shape.q_len, len(shape.lens), cluster, shape.lens[0],
                *(round(us, 2) for us in times),
            )  # fmt: skip


def _fits(library: Library, shape: Shape, kv_format: str, cluster: int, device: torch.device) -> bool:
    """Whether the device holds all clusters of the batch at once; True also where that cannot be asked."""
    try:
        decode = PagedDecode(
            library, head_dim=shape.d, page_size=shape.page_size, kv_format=kv_format, q_len=shape.q_len,
            device=device.index, cluster=cluster,
        )  # fmt: skip
        kernel = decode.kernel(decode.config(shape.h_q // shape.h_k), cluster=cluster, stream=0)
        return kernel.max_clusters >= len(shape.lens) * shape.h_k
    except CubineryError:
        return True  # the measurement says what is wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code."""
    header = "query heads, head_dim, KV, q_len: sequences x keys in clusters of: us, without, ratio"
    return grid.main("clusters", __doc__ or "", Row, header, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
