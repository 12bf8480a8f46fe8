"""Physical layouts reduce to logical views; packing is token-major and free for one token (case 12)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode.layouts import (
    LAYOUTS,
    Layout,
    kv_views,
    pack_q,
    storage_shapes,
    unpack_lse,
    unpack_o,
)

SIZES = {"num_pages": 5, "page_size": 16, "num_kv_heads": 3, "row": 32}


def make(module: Any, shape: tuple[int, ...]) -> Any:
    return module.arange(int(np.prod(shape))).reshape(shape)


@pytest.mark.parametrize("module", [np, torch], ids=["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_cover_the_buffers_without_copies(layout: Layout, module: Any) -> None:
    buffers = [make(module, shape) + 10**6 * i for i, shape in enumerate(storage_shapes(layout, **SIZES))]
    k, v = kv_views(layout, *buffers)
    assert tuple(k.shape) == tuple(v.shape) == (5, 16, 3, 32)
    seen = np.concatenate([np.asarray(k).ravel(), np.asarray(v).ravel()])
    assert np.array_equal(np.sort(seen), np.sort(np.concatenate([np.asarray(b).ravel() for b in buffers])))
    k[...] = -1
    v[...] = -2
    written = np.concatenate([np.asarray(b).ravel() for b in buffers])
    assert sorted(written) == [-2] * (5 * 16 * 3 * 32) + [-1] * (5 * 16 * 3 * 32)


@pytest.mark.parametrize(
    ("layout", "strides", "v_offset"),
    [
        ("nhd", (16 * 3 * 32, 3 * 32, 32, 1), None),
        ("hnd", (2 * 3 * 16 * 32, 32, 16 * 32, 1), 3 * 16 * 32),
        ("interleaved", (3 * 16 * 64, 64, 16 * 64, 1), 32),
        ("flashinfer", (2 * 16 * 3 * 32, 3 * 32, 32, 1), 16 * 3 * 32),
    ],
)
def test_strides(layout: Layout, strides: tuple[int, ...], v_offset: int | None) -> None:
    k, v = kv_views(layout, *[torch.zeros(shape) for shape in storage_shapes(layout, **SIZES)])
    assert k.stride() == v.stride() == strides
    if v_offset is not None:
        assert v.storage_offset() - k.storage_offset() == v_offset


def test_case_12_packing() -> None:
    q = torch.arange(2 * 2 * 24 * 8).reshape(4, 24, 8)
    packed = pack_q(q, q_len=2, num_kv_heads=4)
    assert packed.shape == (2, 4, 12, 8)
    for b in range(2):
        for token in range(2):
            for head in range(24):
                assert torch.equal(packed[b, head // 6, token * 6 + head % 6], q[b * 2 + token, head])
    assert torch.equal(unpack_o(packed, q_len=2), q)
    assert torch.equal(unpack_lse(packed[..., 0], q_len=2), q[..., 0])


@pytest.mark.parametrize("module", [np, torch], ids=["numpy", "torch"])
def test_case_12_one_token_shares_storage(module: Any) -> None:
    q = make(module, (3, 24, 8))
    packed = pack_q(q, q_len=1, num_kv_heads=4)
    packed[1, 2, 3, 4] = -7
    assert q[1, 15, 4] == -7
    unpacked = unpack_o(packed, q_len=1)
    unpacked[2, 0, 0] = -9
    assert q[2, 0, 0] == -9


def test_rejections() -> None:
    with pytest.raises(ArgumentError, match="layout = 'hdn': expected one of nhd, hnd, interleaved, flashinfer"):
        storage_shapes("hdn", **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="layout 'nhd': 1 buffers given, expected 2"):
        kv_views("nhd", np.zeros((1, 16, 1, 8)))
    with pytest.raises(ArgumentError, match="layout 'hnd': a buffer has shape"):
        kv_views("hnd", np.zeros((1, 16, 1, 8)))
    with pytest.raises(ArgumentError, match="is 3, expected 2"):
        kv_views("hnd", np.zeros((1, 3, 16, 1, 8)))
    with pytest.raises(ArgumentError, match="rows of 7 elements"):
        kv_views("interleaved", np.zeros((1, 3, 16, 7)))
    with pytest.raises(ArgumentError, match="multiple of q_len 2"):
        pack_q(np.zeros((3, 4, 8)), q_len=2, num_kv_heads=4)
    with pytest.raises(ArgumentError, match="12 packed rows: expected a multiple of q_len 5"):
        unpack_o(np.zeros((1, 1, 12, 8)), q_len=5)
