"""One kernel, four physical layouts of the KV cache: the launch takes strides, so none is copied.

python examples/cache_layouts.py [BUNDLE]
"""

from __future__ import annotations

import sys

import torch

from cubinery.runtime import CubineryError, Library
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS, kv_views, storage_shapes
from cubinery.runtime.ops.paged_decode.op import PagedDecode

SEQ_LENS = [300, 2000]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64


def main(bundle: str) -> None:
    decode = PagedDecode(Library.open(bundle), head_dim=HEAD_DIM, page_size=PAGE, kv_format="fp8")
    blocks = [-(-keys // PAGE) for keys in SEQ_LENS]
    pages = sum(blocks)
    # Logical K and V: (num_pages, page_size, num_kv_heads, head_dim).
    k, v = (torch.randn(pages, PAGE, KV_HEADS, HEAD_DIM, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    q = torch.randn(len(SEQ_LENS), HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    block_table = torch.zeros(len(SEQ_LENS), max(blocks), dtype=torch.int32, device="cuda")
    block_table[0, : blocks[0]] = torch.arange(blocks[0])
    block_table[1, : blocks[1]] = torch.arange(blocks[0], pages)

    plan = decode.plan(SEQ_LENS, num_q_heads=HEADS, num_kv_heads=KV_HEADS)
    first = None
    for layout in LAYOUTS:
        shapes = storage_shapes(layout, num_pages=pages, page_size=PAGE, num_kv_heads=KV_HEADS, row=HEAD_DIM)
        storage = [torch.empty(shape, dtype=k.dtype, device="cuda") for shape in shapes]  # as the engine allocates
        k_cache, v_cache = kv_views(layout, *storage)  # no copy: views by strides
        k_cache.copy_(k)
        v_cache.copy_(v)
        out, _ = plan.run(q, k_cache, v_cache, block_table)
        first = out if first is None else first
        same = torch.equal(out, first)
        print(f"{layout:<12} buffers {', '.join(map(str, shapes)):<48} same bits as {LAYOUTS[0]}: {same}")
        if not same:
            sys.exit(f"cache_layouts.py: error: layout {layout} gives another result than {LAYOUTS[0]}")


if __name__ == "__main__":
    try:
        main(sys.argv[1] if len(sys.argv) > 1 else "build/kernels")
    except CubineryError as error:
        sys.exit(f"cache_layouts.py: error: {error}")
