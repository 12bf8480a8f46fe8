"""Launches for compute-sanitizer: every path of the kernels, on problems small enough for its slowest tool.

    compute-sanitizer --tool racecheck python tests/gpu/sanitize.py build/proof

(`make sanitize BUNDLE=... [TOOLS=racecheck] [SANITIZE_ARGS="--only cluster="]` runs all four tools, or some.) Each
result is also held to the float64 reference, computed on the host so that the tools instrument nothing else. Ends with
exit status 1 if one is off. Kernels that the bundle lacks are errors: the proof spec holds them all.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from gpu.problems import Guarded
from gpu.running import Gpu

from cubinery.aot.problems import Subject, check_of
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.library import Library

LENGTHS = [0, 1, 130, 385]

PROBLEMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    # One tile of 16 rows; both formats and head dims; pages smaller than, equal to and larger than a ring stage.
    ({"kv_format": "fp8", "d": 128, "page_size": 16}, {}),
    ({"kv_format": "bf16", "d": 128, "page_size": 64}, {}),
    ({"kv_format": "fp8", "d": 256, "page_size": 128}, {}),
    ({"kv_format": "bf16", "d": 256, "page_size": 32}, {}),
    # Causal tokens, tiles of 32 and 64 rows, several tiles, one CTA an SM, dependent launches.
    ({"kv_format": "fp8", "d": 128, "page_size": 16, "q_len": 5, "h_q": 10}, {"row_tile": 32}),
    ({"kv_format": "bf16", "d": 256, "page_size": 64, "q_len": 8, "h_q": 10}, {"row_tile": 32}),
    (
        {"kv_format": "fp8", "d": 128, "page_size": 128, "q_len": 3, "h_q": 32},
        {"row_tile": 64, "ctas_per_sm": 1, "pdl": True},
    ),
    (
        {"kv_format": "bf16", "d": 256, "page_size": 32, "q_len": 7, "h_q": 16},
        {"row_tile": 64, "ctas_per_sm": 1, "pdl": True},
    ),
    # Non-causal tokens.
    ({"kv_format": "fp8", "d": 128, "page_size": 16, "q_len": 4, "causal": False, "h_q": 12}, {}),
    # Window, sinks, soft-cap and tokens per sequence at once; a short head with sinks; a long head in column halves.
    ({"q_len": 4, "h_q": 8, "window": 140, "softcap": 3.0, "with_sinks": True, "with_q_lens": True}, {}),
    ({"kv_format": "bf16", "d": 64, "page_size": 64, "h_q": 16, "window": 128, "with_sinks": True}, {}),
    ({"kv_format": "fp8", "d": 512, "page_size": 32}, {}),
    # Packed rows of 64 and of 96 bytes, block scales, queries of 8 bits.
    ({"kv_format": "e2m1", "d": 128, "page_size": 16, "q_dtype": "e4m3", "h_q": 8}, {}),
    ({"kv_format": "e3m2", "d": 128, "page_size": 64}, {}),
    ({"kv_format": "nvfp4", "d": 128, "page_size": 128}, {}),
    # Clusters of all sizes: warps' results beside the ring, in it, and never put anywhere; several shares of a row at
    # once; sinks. Four of 16 CTAs at most: under synccheck, eight end any program that has an mbarrier
    # (docs/notes/synccheck_clusters.md).
    ({"kv_format": "fp8", "d": 128, "page_size": 16, "h_k": 1}, {"cluster": 16}),
    ({"kv_format": "fp8", "d": 128, "page_size": 16, "h_q": 8, "h_k": 1, "q_len": 4}, {"cluster": 2}),
    ({"kv_format": "bf16", "d": 256, "page_size": 16, "h_k": 1}, {"cluster": 16}),
    ({"kv_format": "fp8", "d": 256, "page_size": 16, "h_k": 1}, {"cluster": 4}),
    ({"kv_format": "bf16", "d": 256, "page_size": 16, "h_q": 16, "h_k": 1}, {"cluster": 8}),
    ({"kv_format": "bf16", "d": 64, "page_size": 64, "h_q": 8, "h_k": 1, "with_sinks": True}, {"cluster": 16}),
]

LAUNCHES = [
    (fields, choices, splits) for fields, choices in PROBLEMS for splits in ((0,) if "cluster" in choices else (1, 3))
]
"""Each problem with how its sequences are split; a cluster shares whole ones."""


def sanitize(gpu: Gpu, fields: dict[str, Any], choices: dict[str, Any], force_splits: int) -> str:
    """Run one problem; returns a line about it. Raises AssertionError where the result is off."""
    case = gpu.case(LENGTHS, **({"h_q": 4, "h_k": 2, "layout": "interleaved"} | fields))
    plan = gpu.plan(case, {"cluster": 1} | choices, force_splits=force_splits, pad_to=13 if force_splits > 1 else 0)
    out = Guarded(case.q.shape, torch.bfloat16, case.device)
    lse = Guarded(plan.shape.lse, torch.float32, case.device)
    # Not filled: initcheck then knows which partial results were never written.
    workspace = torch.empty(plan.workspace_bytes(), dtype=torch.uint8, device=case.device)
    plan.run(
        *case.tensors, out=out.tensor, lse=lse.tensor, workspace=workspace if workspace.numel() else None, **case.extras
    )
    expected = paged_attention(
        case.q.cpu(), case.raw["k"].cpu(), case.raw["v"].cpu(), case.table.cpu(), case.lengths, q_len=case.q_len,
        causal=case.causal, window=case.window, softcap=case.softcap, kv_format=case.kv_format,
        **{name: tensor.cpu() for name, tensor in case.extras.items()},
    )  # fmt: skip
    found = deviation(out.tensor.cpu().double().numpy(), lse.tensor.cpu().numpy(), *expected)
    assert found.within(PAGED_DECODE[plan.config.impl]), f"{plan!r}: {found}"
    out.check("out")
    lse.check("lse")
    return f"{plan.keys[0]}, {plan.splits.max_splits} splits: {found}"


def label(fields: dict[str, Any], choices: dict[str, Any], force_splits: int) -> str:
    """`kv_format=fp8 d=128 cluster=16`: what a launch is asked for, as `--only` finds it."""
    splits = {"splits": force_splits} if force_splits else {}
    return " ".join(f"{name}={value}" for name, value in (fields | choices | splits).items())


def others(library: Library) -> list[str]:
    """Keys of the kernels that are no decodes: cache writers and planning. Their checks compare every byte."""
    served = library.archs_for()
    return [key for key in library if "-mma-" not in key and library.artifact(key).arch in served]


def check_other(gpu: Gpu, key: str) -> str:
    """Run the check of such a kernel; returns a line about it. Raises AssertionError where a byte is off."""

    def place(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        found = {name: tensor.to(gpu.device) for name, tensor in tensors.items()}
        gpu.synchronize()  # some launch on the default stream
        return found

    subject = Subject.of(gpu.library, key, place)
    check = check_of(subject.config.family, subject.config.impl)
    assert check is not None, f"{key} has no check"
    finding = check(subject)
    assert finding.ok, f"{key}: {finding.text}"
    return f"{key}: {finding.text}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Launch a representative set of kernels under compute-sanitizer.")
    parser.add_argument("bundle", help="folder of a bundle built from kernel_specs/proof/paged_decode.yaml")
    parser.add_argument("--only", default="", metavar="TEXT",
                        help="only launches that are named so: cluster=, kv_format=fp8, append, ...")  # fmt: skip
    options = parser.parse_args()
    library = Library.open(options.bundle)
    gpu = Gpu(library, torch.device("cuda", torch.cuda.current_device()))
    todo = [(label(*launch), partial(sanitize, gpu, *launch)) for launch in LAUNCHES]
    todo += [(key, partial(check_other, gpu, key)) for key in others(library)]
    todo = [(name, call) for name, call in todo if options.only in name]
    if not todo:
        parser.error(f"--only {options.only!r}: no launch is named so")
    failures = 0
    for name, call in todo:
        # Named before it runs, and timed: a tool may take its time, or stand still.
        print(name, flush=True)
        start = time.monotonic()
        try:
            text = call()
        except AssertionError as error:
            failures += 1
            text = f"WRONG: {error}"
        print(f"  {time.monotonic() - start:.1f} s: {text}", flush=True)
    torch.cuda.synchronize()
    print(f"{len(todo)} launches, {failures} wrong")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
