"""nvfp4's block scales on their way to shared memory, for a warp that loads pages."""

from __future__ import annotations

import cutlass
from cutlass import Int32, Int64, cute

from cubinery.aot.kernels.common import ptx


def head_scales(scales, head):
    """Of K and of V: (address of a head's scales in page 0, bytes from page to page, from row to row); None without.

    `scales` are the launch's parameters, in the order of `decode_abi.scale_params`.
    """
    if scales is None:
        return None
    parts = (scales[0:4], scales[4:8])
    return [(start.toint() + Int64(head) * step, page, row) for start, page, row, step in parts]


def copy_scales(target, lane, source, owner_of, num_pages, first, key_end, *, keys, page_size, scale_bytes):
    """Start to copy the scales of `keys` keys from `first` on, a key a lane; zeros for keys that are not loaded.

    `owner_of(row)` gives every lane the page of its row. TMA cannot copy these: their strides need not be multiples of
    16 bytes.
    """
    base, page_bytes, row_bytes = source
    piece = min(16, scale_bytes)
    for i in range(keys // 32):
        row = i * 32 + lane
        owner = owner_of(row)
        exists = (first + row < key_end) & (owner >= 0) & (owner < num_pages)
        offset = Int64(owner) * page_bytes + Int64((first + row) % page_size) * row_bytes
        address = base + cutlass.select_(exists, offset, Int64(0))
        read = cutlass.select_(exists, Int32(piece), Int32(0))
        for part in range(scale_bytes // piece):
            ptx.copy_to_shared(target + row * scale_bytes + part * piece, address + part * piece, piece, read)


def owner_by_shuffle(page, rows, lanes_per_page=1):
    """`owner_of` where lane i * lanes_per_page knows the page of rows i * `rows` and on."""
    return lambda row: cute.arch.shuffle_sync(page, row // rows * lanes_per_page)
