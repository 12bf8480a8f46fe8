"""Physical layouts of a paged KV cache, and the packed row order of Q, O and LSE.

Kernels see every layout through strides, so each reduces to a pair of logical views of shape
(num_pages, page_size, num_kv_heads, row). `row` is head_dim, or its packed bytes for formats below
8 bits. Works on numpy arrays and torch tensors alike, and imports neither.
"""

from __future__ import annotations

from typing import Any, Literal

from cubinery.runtime.errors import ArgumentError

Array = Any
"""A numpy array or a torch tensor."""

Layout = Literal["nhd", "hnd", "interleaved", "flashinfer"]
LAYOUTS: tuple[Layout, ...] = ("nhd", "hnd", "interleaved", "flashinfer")


def storage_shapes(
    layout: Layout, *, num_pages: int, page_size: int, num_kv_heads: int, row: int
) -> tuple[tuple[int, ...], ...]:
    """Shapes of the buffers that hold a cache: two for `nhd` (K, then V), one for the other layouts.

    - `nhd`: (num_pages, page_size, num_kv_heads, row), twice
    - `hnd`: (num_pages, 2, num_kv_heads, page_size, row)
    - `interleaved`: (num_pages, num_kv_heads, page_size, 2 * row), K first
    - `flashinfer`: (num_pages, 2, page_size, num_kv_heads, row)
    """
    _check(layout)
    if layout == "nhd":
        shape = (num_pages, page_size, num_kv_heads, row)
        return shape, shape
    if layout == "hnd":
        return ((num_pages, 2, num_kv_heads, page_size, row),)
    if layout == "interleaved":
        return ((num_pages, num_kv_heads, page_size, 2 * row),)
    return ((num_pages, 2, page_size, num_kv_heads, row),)


def kv_views(layout: Layout, *storage: Array) -> tuple[Array, Array]:
    """The logical K and V views (num_pages, page_size, num_kv_heads, row) of a cache's buffers; no copy.

    `storage` are contiguous buffers of `storage_shapes`. Raises ArgumentError if their number or rank is
    not the layout's.
    """
    _check(layout)
    count, rank = (2 if layout == "nhd" else 1), (4 if layout in ("nhd", "interleaved") else 5)
    if len(storage) != count:
        raise ArgumentError(f"layout {layout!r}: {len(storage)} buffers given, expected {count}")
    for buffer in storage:
        if buffer.ndim != rank:
            raise ArgumentError(f"layout {layout!r}: a buffer has shape {tuple(buffer.shape)}, expected {rank} axes")
    if layout == "nhd":
        return storage[0], storage[1]
    buffer = storage[0]
    if layout == "interleaved":
        if buffer.shape[3] % 2:
            raise ArgumentError(f"layout {layout!r}: rows of {buffer.shape[3]} elements cannot hold K and V")
        row = buffer.shape[3] // 2
        rows = buffer.swapaxes(1, 2)
        return rows[..., :row], rows[..., row:]
    if buffer.shape[1] != 2:
        raise ArgumentError(f"layout {layout!r}: axis 1 of {tuple(buffer.shape)} is {buffer.shape[1]}, expected 2")
    k, v = buffer[:, 0], buffer[:, 1]
    return (k.swapaxes(1, 2), v.swapaxes(1, 2)) if layout == "hnd" else (k, v)


def pack_q(q: Array, *, q_len: int, num_kv_heads: int) -> Array:
    """(num_seqs * q_len, num_q_heads, head_dim) to packed rows (num_seqs, num_kv_heads, n_q, head_dim).

    Row qi * group_size + r of KV head h is token qi of query head h * group_size + r. Free for q_len 1,
    a copy otherwise. The kernels of `mma` need no packing: they read Q in the caller's layout.
    """
    tokens, heads, d = q.shape
    if tokens % q_len or heads % num_kv_heads:
        raise ArgumentError(
            f"q has shape {tuple(q.shape)}: expected (a multiple of q_len {q_len}, a multiple of "
            f"{num_kv_heads} KV heads, head_dim)"
        )
    b, group = tokens // q_len, heads // num_kv_heads
    return q.reshape(b, q_len, num_kv_heads, group, d).swapaxes(1, 2).reshape(b, num_kv_heads, q_len * group, d)


def unpack_o(o: Array, *, q_len: int) -> Array:
    """Packed rows (num_seqs, num_kv_heads, n_q, head_dim) to (num_seqs * q_len, num_q_heads, head_dim)."""
    b, heads, n_q, d = o.shape
    if n_q % q_len:
        raise ArgumentError(f"o has {n_q} packed rows: expected a multiple of q_len {q_len}")
    group = n_q // q_len
    return o.reshape(b, heads, q_len, group, d).swapaxes(1, 2).reshape(b * q_len, heads * group, d)


def unpack_lse(lse: Array, *, q_len: int) -> Array:
    """Packed rows (num_seqs, num_kv_heads, n_q) to (num_seqs * q_len, num_q_heads)."""
    return unpack_o(lse[..., None], q_len=q_len)[..., 0]


def _check(layout: str) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout = {layout!r}: expected one of {', '.join(LAYOUTS)}")
