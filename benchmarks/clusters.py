"""`python -m benchmarks.clusters`: clusters of every size beside plans without them, over batches of every size.

What the selector's rules (runtime/ops/paged_decode/clusters.py) are made from, and held against by the tests. Clusters
that the GPU cannot hold at once are left out, as the selector leaves them out.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch

from benchmarks.batches import SHORT
from benchmarks.cli import select_device
from benchmarks.paged_decode import measure_ours
from benchmarks.shapes import Shape
from benchmarks.timing import GpuTimer, Timer
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

K = 1024
WIDE = replace(SHORT, d=256, h_q=6, page_size=16)
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


def write(path: Path, rows: Iterable[Row]) -> None:
    """The rows as CSV."""
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(field.name for field in fields(Row))
        out.writerows([getattr(row, field.name) for field in fields(Row)] for row in rows)


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    kinds = {"kv_format": str, "us": float, "without_us": float}
    with path.open(newline="") as file:
        return [Row(**{k: kinds.get(k, int)(v) for k, v in entry.items()}) for entry in csv.DictReader(file)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 all was measured, 1 something is wrong, 2 the run could not start."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.clusters", description=__doc__)
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR")
    p.add_argument("--out", type=Path, default=Path("build/clusters.csv"), metavar="FILE", help="the rows, as CSV")
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    options = p.parse_args(argv)
    rows: list[Row] = []
    wrong = 0
    try:
        library = Library.open(options.bundle)
        device = select_device(options.device)
        options.out.parent.mkdir(parents=True, exist_ok=True)  # said before minutes were spent, if it cannot be
        print("query heads, head_dim, KV, q_len: sequences x keys in clusters of: us, without, ratio")
        for found in measure(library, GpuTimer(device, warmup_ms=5, rep_ms=50), device):
            if isinstance(found, str):
                wrong += 1
                print(found, flush=True)
            else:
                rows.append(found)
                print(found.line, flush=True)
            torch.cuda.empty_cache()
        write(options.out, rows)
    except (CubineryError, OSError) as error:
        print(f"benchmarks.clusters: error: {error}", file=sys.stderr)
        return 2
    print(f"written: {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
