"""`python -m benchmarks.planning`: planning on the device, and what it replaces on the host."""

from __future__ import annotations

import argparse
import os
import sys
import timeit
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.cli import select_device
from benchmarks.timing import GpuTimer, Timer
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.planner import Policy

BATCHES = (1, 32, 256, 1024, 4096)
LONGEST = 16384
HEADS = {"num_q_heads": 32, "num_kv_heads": 8}


@dataclass(frozen=True, slots=True)
class Row:
    """One batch under one policy; microseconds."""

    num_seqs: int
    policy: str
    device_us: float | None
    """The kernel, replayed from a graph; none where its arrays are not the host's."""
    host_us: float
    """`Plan.update`: planning on the host and enqueueing the upload."""


def measure(
    library: Library, timer: Timer, device: torch.device, *, batches: Sequence[int] = BATCHES, repeats: int = 20
) -> Iterator[Row]:
    """Prove and time both ways of replanning."""
    decode = PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8", device=device.index)
    policies: tuple[Policy, ...] = ("balanced", "thor")
    for num_seqs in batches:
        lengths = np.random.default_rng(num_seqs).integers(1, LONGEST + 1, num_seqs)
        for policy in policies:
            by_host, by_device = (
                decode.plan(np.full(num_seqs, LONGEST), **HEADS, policy=policy, capturable=True) for _ in range(2)
            )
            seq_lens = torch.from_numpy(lengths.astype(np.int32)).to(device)
            host_us = min(timeit.repeat(lambda p=by_host, n=lengths: p.update(n), number=1, repeat=repeats)) * 1e6
            replay = timer.capture(lambda p=by_device, n=seq_lens: p.update_on_device(n))
            replay()
            same = torch.equal(by_host.device_arrays, by_device.device_arrays)
            yield Row(num_seqs, policy, timer.time(replay).us if same else None, host_us)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 all was measured, 1 a plan is wrong, 2 the run could not start."""
    p = argparse.ArgumentParser(prog="python -m benchmarks.planning", description=__doc__)
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR")
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    options = p.parse_args(argv)
    wrong = 0
    try:
        library = Library.open(options.bundle)
        device = select_device(options.device)
        print(f"{'sequences':>9} {'policy':<9} {'device us':>9} {'host us':>8}")
        for row in measure(library, GpuTimer(device, warmup_ms=5, rep_ms=50), device):
            wrong += row.device_us is None
            time = "WRONG" if row.device_us is None else f"{row.device_us:.1f}"
            print(f"{row.num_seqs:>9} {row.policy:<9} {time:>9} {row.host_us:>8.1f}", flush=True)
    except CubineryError as error:
        print(f"benchmarks.planning: error: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
