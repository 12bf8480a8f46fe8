"""What appending to a paged cache means: the host quantisers' bytes of each row, at the slot that it is given."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cubinery.runtime.ops.paged_decode.quantize import quantize_kv

Array = NDArray[Any]


def append_rows(
    cache: Array, rows: Array, slots: Array, kv_format: str, descale: Array | None = None, scales: Array | None = None
) -> None:
    """Write `rows`, bf16 as fp32 (num_tokens, num_kv_heads, head_dim), into `cache`, in place.

    `cache` is a logical view (num_pages, page_size, num_kv_heads, row) of bytes, or of uint16 for bf16. `slots` are
    integers (num_tokens,); those outside the cache are skipped. `descale` is fp32 of 1 element, (num_kv_heads,) or
    (num_tokens, num_kv_heads). nvfp4 writes its block scales into `scales`, uint8 (num_pages, page_size,
    num_kv_heads, head_dim / 16).
    """
    pages, page_size, heads = cache.shape[:3]
    for token, slot in enumerate(int(s) for s in slots):
        if not 0 <= slot < pages * page_size:
            continue
        page, row = divmod(slot, page_size)
        if kv_format == "bf16":  # a copy: the payload of a NaN stays
            cache[page, row] = rows[token].view(np.uint32) >> 16
            continue
        with np.errstate(all="ignore"):
            found = quantize_kv(
                rows[token][None, None], kv_format, _scale(kv_format, descale, token, len(slots), heads)
            )
        cache[page, row] = found.data[0, 0]
        if scales is not None:
            assert found.block_scales is not None, kv_format
            scales[page, row] = found.block_scales[0, 0]


def _scale(kv_format: str, descale: Array | None, token: int, tokens: int, heads: int) -> Array:
    """One token's descale as the quantisers take it."""
    given = np.ones(1, np.float32) if descale is None else np.asarray(descale, np.float32)
    if kv_format == "nvfp4":
        return given.reshape(1)
    if given.size == 1:
        given = given.reshape(1, 1)
    return np.asarray(np.broadcast_to(given, (tokens, heads))[token])
