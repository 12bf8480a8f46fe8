"""`python -m benchmarks.append`: the cache writers of a bundle against the copy rate of this machine's GPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.ceilings import COPY_BYTES, copy_rate
from benchmarks.options import choose, select_device
from benchmarks.timing import GpuTimer, Timer
from cubinery.aot.references.paged_append import append_rows
from cubinery.runtime.errors import ConfigError, CubineryError, KernelNotFoundError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append import CacheWriter
from cubinery.runtime.ops.paged_decode.formats import ELEMENTS, KV_FORMATS, NVFP4_BLOCK, row_bytes

PAGE_SIZE = 16
CHECKED = 64
"""Tokens whose bytes are compared before an append is timed."""
GOAL = 0.7
"""Share of the copy rate that large appends must reach."""
LARGE_TOKENS = 32768
"""Tokens of a large append."""


@dataclass(frozen=True, slots=True)
class Shape:
    """New rows of one append."""

    tokens: int
    heads: int
    head_dim: int


SHAPES = (
    Shape(131072, 8, 128), Shape(16384, 8, 128), Shape(256, 8, 128), Shape(65536, 8, 64), Shape(65536, 4, 256),
    Shape(32768, 4, 512),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """One append; its time, or what kept it from having one."""

    shape: Shape
    kv_format: str
    bytes: int
    """Read and written."""
    us: float | None
    copy_us: float | None
    """A copy that moves as many bytes, in the same harness."""
    error: str = ""
    missing: bool = False
    """The bundle has no kernel for it."""

    def ok(self, copy_gbps: float) -> bool | None:
        """Whether a large append reaches its share of the copy rate; None for others, and without a time."""
        if self.us is None or self.shape.tokens < LARGE_TOKENS:
            return None
        return self.bytes / self.us / 1e3 >= GOAL * copy_gbps


def measure(
    library: Library, shapes: Sequence[Shape], formats: Sequence[str], timer: Timer, device: torch.device
) -> Iterator[Row]:
    """Prove and time every shape in every format."""
    for shape in shapes:
        for kv_format in formats:
            yield _measure(library, shape, kv_format, timer, device)


def _measure(library: Library, shape: Shape, kv_format: str, timer: Timer, device: torch.device) -> Row:
    fmt = ELEMENTS.get(kv_format)
    stored = 2 * shape.head_dim if fmt is None else row_bytes(shape.head_dim, fmt.bits)
    scales = shape.head_dim // NVFP4_BLOCK if kv_format == "nvfp4" else 0
    moved = 2 * shape.tokens * shape.heads * (2 * shape.head_dim + stored + scales) + 8 * shape.tokens
    try:
        writer = CacheWriter(library, head_dim=shape.head_dim, kv_format=kv_format, device=device.index)
        writer.preload()  # before gigabytes are filled for nothing
    except (KernelNotFoundError, ConfigError) as fault:
        return Row(shape, kv_format, moved, None, None, str(fault).splitlines()[0], missing=True)
    generator = torch.Generator(device).manual_seed(1)
    rows = torch.randn((shape.tokens, 2 * shape.heads, shape.head_dim), generator=generator, device=device).bfloat16()
    pages = -(-shape.tokens // PAGE_SIZE)
    dtype, row = (torch.bfloat16, shape.head_dim) if fmt is None else (torch.uint8, stored)
    caches = [torch.zeros((pages, PAGE_SIZE, shape.heads, row), dtype=dtype, device=device) for _ in "kv"]
    # Whole pages in random order, as a server's block tables have them.
    order = torch.randperm(pages, generator=generator, device=device)
    slots = (order[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).reshape(-1)[: shape.tokens]
    values: dict[str, Any] = {
        "k": rows[:, : shape.heads], "v": rows[:, shape.heads :], "k_cache": caches[0], "v_cache": caches[1],
        "slot_mapping": slots,
    }  # fmt: skip
    if fmt is not None:
        scale = 0.002 if kv_format == "nvfp4" else 4 / fmt.max
        values |= {f"{n}_descale": torch.full((1,), scale, device=device) for n in "kv"}
    if scales:
        size = (pages, PAGE_SIZE, shape.heads, scales)
        values |= {f"{n}_scales": torch.zeros(size, dtype=torch.uint8, device=device) for n in "kv"}
    try:
        writer.append(**values)
        error = _wrong(values, kv_format)
        if error:
            return Row(shape, kv_format, moved, None, None, error)
        us = timer.time(timer.capture(lambda: writer.append(**values))).us
    except CubineryError as fault:
        return Row(shape, kv_format, moved, None, None, str(fault).splitlines()[0])
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Row(shape, kv_format, moved, us, timer.time(timer.capture(lambda: target.copy_(source))).us)


def _wrong(values: dict[str, Any], kv_format: str) -> str:
    """Compare the last tokens' bytes with the host quantisers'."""
    last = slice(-min(CHECKED, len(values["slot_mapping"])), None)
    slots = values["slot_mapping"][last]
    for name in "kv":
        cache: torch.Tensor = values[f"{name}_cache"]
        scales: Any = values.get(f"{name}_scales")
        flat = cache.reshape(-1, 1, *cache.shape[2:])[slots].cpu()  # a page a token
        found = flat.view(torch.int16).numpy().view(np.uint16) if kv_format == "bf16" else flat.numpy()
        expected = np.zeros_like(found)
        blocks = None if scales is None else np.zeros((len(slots), 1, *scales.shape[2:]), np.uint8)
        descale = values.get(f"{name}_descale")
        append_rows(
            expected, values[name][last].float().cpu().numpy(), np.arange(len(slots)), kv_format,
            None if descale is None else descale.cpu().numpy(), blocks,
        )  # fmt: skip
        if not np.array_equal(found, expected):
            return f"wrong bytes of {name}_cache"
        if blocks is not None and not np.array_equal(scales.reshape(-1, 1, *scales.shape[2:])[slots].cpu(), blocks):
            return f"wrong bytes of {name}_scales"
    return ""


HEADER = (
    f"{'tokens':>7} {'heads':>5} {'d':>4} {'kv':<6} {'us':>8} {'GB/s':>6} {'/copy':>6} {'copy us':>8} {'copy/us':>7}"
    "  ok"
)


LEGEND = (
    "us: median of CUDA-graph replays, L2 flushed. GB/s: bytes read and written over that.",
    f"copy us: a copy that moves as many bytes. Large appends are to reach {GOAL} of the copy rate.",
)


def line(row: Row, copy_gbps: float) -> str:
    """A row of the table."""
    text = f"{row.shape.tokens:>7} {row.shape.heads:>5} {row.shape.head_dim:>4} {row.kv_format:<6} "
    if row.us is None or row.copy_us is None:
        return text + (f"missing: {row.error}" if row.missing else row.error)
    verdict = {None: "", True: "yes", False: "NO"}[row.ok(copy_gbps)]
    rate = row.bytes / row.us / 1e3
    return text + (
        f"{row.us:>8.1f} {rate:>6.0f} {rate / copy_gbps:>6.2f} {row.copy_us:>8.1f} {row.copy_us / row.us:>7.2f}  "
        f"{verdict}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 all was measured, 1 a writer is wrong or missing, 2 the run could not start."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.append", description=__doc__)
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR")
    p.add_argument("--formats", default=",".join(KV_FORMATS), metavar="KV[,KV]", help="default: all")
    p.add_argument("--quick", action="store_true", help="fewer repeats: for a look, not for a record")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    options = p.parse_args(argv)
    try:
        formats = choose("--formats", options.formats, KV_FORMATS)
        library = Library.open(options.bundle)
        device = select_device(options.device)
    except CubineryError as error:
        print(f"benchmarks.append: error: {error}", file=sys.stderr)
        return 2
    timer = GpuTimer(device, warmup_ms=5, rep_ms=20) if options.quick else GpuTimer(device)
    copy_gbps = copy_rate(timer, device, COPY_BYTES // 4 if options.quick else COPY_BYTES)
    torch.cuda.empty_cache()
    if not options.json:
        print(f"device-to-device copy: {copy_gbps:.0f} GB/s, reads and writes counted", "", HEADER, sep="\n")
    rows = []
    for row in measure(library, SHAPES, formats, timer, device):
        rows.append(row)
        if not options.json:
            print(line(row, copy_gbps), flush=True)
        torch.cuda.empty_cache()
    if options.json:
        print(json.dumps({"copy_gbps": copy_gbps, "rows": [asdict(row) for row in rows]}))
    else:
        print("", *LEGEND, sep="\n")
    return 1 if any(row.us is None for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
