"""Paged decode in a dozen lines: open a bundle, plan a step, run it.

    python examples/decode.py [BUNDLE]        # default: build/kernels; needs a GPU that the bundle is for

Nothing compiles. From a checkout that is not installed, set PYTHONPATH=src.
"""

from __future__ import annotations

import sys

import torch

from cubinery.runtime import CubineryError, Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.quantize import QuantizedKv, quantize_kv

SEQ_LENS = [1000, 37, 4096]  # keys of each sequence, the new token included
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


def main(bundle: str) -> None:
    library = Library.open(bundle)  # or Library.installed()
    decode = PagedDecode(library, head_dim=HEAD_DIM, page_size=PAGE, kv_format="fp8")

    # What a serving engine has already: a query a sequence, a paged cache, and a table of whose pages are where.
    blocks = [-(-keys // PAGE) for keys in SEQ_LENS]
    shape = (sum(blocks), PAGE, KV_HEADS, HEAD_DIM)
    k, v = (quantize_kv(torch.randn(shape, device="cuda"), "fp8") for _ in range(2))
    q = torch.randn(len(SEQ_LENS), HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(len(SEQ_LENS), max(blocks), dtype=torch.int32)
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(count) + sum(blocks[:row])
    block_table = table.cuda()

    plan = decode.plan(SEQ_LENS, num_q_heads=HEADS, num_kv_heads=KV_HEADS)  # once a step, on the host
    out, lse = plan.run(q, k.data, v.data, block_table, k_descale=k.scale, v_descale=v.scale)  # once a layer

    print(f"{plan}\nout {tuple(out.shape)} {out.dtype}, lse {tuple(lse.shape)} {lse.dtype}")
    print(f"distance from torch: {_distance(q, k, v, block_table, out):.1e} (relative L2 of the worst row)")


def _distance(q: torch.Tensor, k: QuantizedKv, v: QuantizedKv, block_table: torch.Tensor, out: torch.Tensor) -> float:
    """The same step in plain torch, one sequence after another."""
    worst = 0.0
    for seq, keys in enumerate(SEQ_LENS):
        pages = block_table[seq, : -(-keys // PAGE)].long()
        dense = [
            (cache.data.float() * cache.scale[:, None])[pages].flatten(0, 1)[:keys].transpose(0, 1) for cache in (k, v)
        ]
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[seq].float()[:, None], *(x.repeat_interleave(HEADS // KV_HEADS, 0) for x in dense)
        )[:, 0]
        rows = (out[seq].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        worst = max(worst, float(rows.max()))
    return worst


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "build/kernels")
    except CubineryError as error:
        sys.exit(f"decode.py: error: {error}")
