"""A serving loop on CUDA graphs: capture a decode step once, then move it from step to step with `Plan.update`.

    python examples/graph_replay.py [BUNDLE]

A graph fixes grids and addresses. A plan that is made with `capturable=True` keeps both for any lengths, and
`update` rewrites the schedule in the device memory that the graph reads; a replay then computes the new step.
"""

from __future__ import annotations

import sys

import torch

from cubinery.runtime import CubineryError, Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

LAYERS, STEPS, MAX_KEYS = 4, 8, 2048
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def main(bundle: str) -> None:
    library = Library.open(bundle)
    decode = PagedDecode(library, head_dim=HEAD_DIM, page_size=PAGE, kv_format="bf16")
    lens = [100, 700, 1500]
    blocks = MAX_KEYS // PAGE  # every row of the table has room for the longest sequence that will come
    shape = (len(lens) * blocks, PAGE, KV_HEADS, HEAD_DIM)
    caches = [[torch.randn(shape, device="cuda").bfloat16() for _ in range(2)] for _ in range(LAYERS)]
    q = torch.randn(len(lens), HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    block_table = torch.arange(len(lens) * blocks, dtype=torch.int32, device="cuda").view(len(lens), blocks)

    decode.preload(HEADS // KV_HEADS)  # loading is forbidden during a capture
    plan = decode.plan(lens, num_q_heads=HEADS, num_kv_heads=KV_HEADS, capturable=True)
    outs = [torch.empty_like(q) for _ in range(LAYERS)]
    lse = torch.empty(plan.shape.lse, dtype=torch.float32, device="cuda")
    workspace = torch.empty(max(16, plan.workspace_bytes()), dtype=torch.uint8, device="cuda")

    def step() -> None:
        for (k, v), out in zip(caches, outs, strict=True):  # one plan serves every layer
            plan.run(q, k, v, block_table, out=out, lse=lse, workspace=workspace)

    step()  # packs every layer's launches
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    for number in range(STEPS):
        lens = [keys + 1 for keys in lens]
        q.normal_()  # the next token's queries, in the memory that the graph reads
        plan.update(lens)  # in stream order before the replay
        graph.replay()
        replayed = [out.clone() for out in outs]
        step()  # the same step without the graph
        same = all(torch.equal(a, b) for a, b in zip(replayed, outs, strict=True))
        print(f"step {number}: lengths {lens}, replay equals a direct run: {same}")
        if not same:
            sys.exit("graph_replay.py: error: the replayed step differs from the direct one")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "build/kernels")
    except CubineryError as error:
        sys.exit(f"graph_replay.py: error: {error}")
