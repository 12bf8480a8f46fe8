"""Build on any machine, run on any machine: a paged decode on the GPU if it fits, else on the PTX simulator.

    make demo                                  # builds build/demo/sm_110a and runs this
    python examples/demo.py build/demo [ARCH]  # ARCH: which of the bundle's targets (default: the GPU's, or the first)

Two sequences of 300 keys, two KV heads, fp8 cache; pages that no sequence owns hold NaN. The result is compared with
attention in float64.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from cubinery.aot.problems.paged_decode.mma import decode_problem
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.references import tolerances
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.runtime import CubineryError, Library
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode

KEYS, KV_HEADS, GROUP = (300, 300), 2, 4
CONFIG = MmaConfig(head_dim=128, page_size=16, kv_format="fp8")  # says what the problem is; the selector chooses


def main(folder: str, arch: str | None) -> None:
    library, simulator, where = _open(Path(folder), arch)
    problem = decode_problem(CONFIG, GROUP, KEYS)
    q, k, v, table = problem.values()
    expected = paged_attention(q, k, v, table, KEYS, q_len=1, causal=True)
    began = time.perf_counter()
    if simulator is not None:
        with watching(simulator):
            simulator.register_tensors(**problem)
            plan, out, lse = _decode(library, problem)
    else:
        plan, out, lse = _decode(library, {name: tensor.cuda() for name, tensor in problem.items()})
    seconds = time.perf_counter() - began
    found = tolerances.deviation(out.cpu().double().numpy(), lse.cpu().numpy(), *expected)
    limit = tolerances.PAGED_DECODE["mma"]  # what bf16 queries allow, whichever kernel took them

    print(f"ran on       {where}")
    print(f"kernels      {', '.join(plan.keys)}")
    if simulator is not None:
        done = simulator.counters
        print(f"executed     {done.instructions:,} warp instructions in {done.seconds:.2f} s, every check on")
    print(f"plan and run {seconds:.2f} s, first use included")
    print(f"against float64 attention: {found}")
    if not found.within(limit):
        raise SystemExit(f"too far from the reference: {limit} allowed")
    print("ok")


def _open(folder: Path, arch: str | None) -> tuple[Library, SimDriver | None, str]:
    """The library on a GPU that the bundle is for, or on the simulator."""
    archs = sorted(path.parent.name for path in folder.glob("*/manifest.json"))
    if not archs:
        raise SystemExit(f"{folder}: no bundle in it; make one with `make demo`")
    try:
        library = Library.open(folder)
        served = library.arch_for()
        if arch in (None, served):
            return library, None, f"{library.driver.device_info(library.driver.current_device()).name} ({served})"
    except CubineryError:
        pass  # no driver, no device, or one that the bundle is not for: that is what the simulator is there for
    chosen = arch or archs[0]
    if chosen not in archs:
        raise SystemExit(f"{folder} holds {', '.join(archs)}, not {chosen}")
    simulator = SimDriver(chosen, [folder / chosen])
    return Library.open(folder / chosen, simulator), simulator, f"the PTX simulator, as {chosen} (no GPU needed)"


def _decode(library: Library, tensors: dict[str, torch.Tensor]) -> tuple[object, torch.Tensor, torch.Tensor]:
    """The public call, the same on both."""
    op = PagedDecode(library, head_dim=CONFIG.head_dim, page_size=CONFIG.page_size, kv_format=CONFIG.kv_format)
    plan = op.plan(list(KEYS), num_q_heads=GROUP * KV_HEADS, num_kv_heads=KV_HEADS, force_splits=2)
    out, lse = plan.run(*tensors.values())
    return plan, out, lse


if __name__ == "__main__":
    np.seterr(all="ignore")
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "build/demo", sys.argv[2] if len(sys.argv) > 2 else None)
    except CubineryError as error:
        raise SystemExit(f"demo: {error}") from None
