"""Caches below 8 bits, block scales and e4m3 queries at the public call: what is launched, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode.config import KV_BITS, MmaConfig
from cubinery.runtime.ops.paged_decode.formats import KV_FORMATS
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.quantize import quantize_q

Make = Callable[..., tuple[PagedDecode, FakeDriver]]
LENGTHS = [40, 0, 200]
PAGES = 19


def problem(kv_format: str, **fields: Any) -> Problem:
    return Problem(lengths=LENGTHS, rng=np.random.default_rng(4), torch=torch, kv_format=kv_format, **fields)


def test_formats_and_bits_agree() -> None:
    assert set(KV_BITS) == set(KV_FORMATS)
    assert set(MmaConfig.__dataclass_fields__["kv_format"].metadata["choices"]) == set(KV_FORMATS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kv_format", KV_BITS)
def test_strides_are_bytes_of_packed_rows(make_decode: Make, kv_format: str, layout: Any) -> None:
    decode, driver = make_decode(kv_format=kv_format)
    p = problem(kv_format, layout=layout)
    decode.plan(p.lengths, **p.heads, force_splits=1).run(*p.tensors, **p.scales)
    row = 128 * KV_BITS[kv_format] // 8
    head = {"nhd": row, "hnd": 16 * row, "interleaved": 32 * row, "flashinfer": row}[layout]
    key = {"nhd": 2 * row, "hnd": row, "interleaved": 2 * row, "flashinfer": 2 * row}[layout]
    size = p.k.element_size()
    assert [stride * size for stride in p.k.stride()[1:3]] == [key, head]
    (launch,) = driver.launches
    bound = launch.values["k_map"]
    assert bound.strides[:2] == (key, head)
    assert bound.extents[0] * size == row
    assert bound.spec.box[0] * size == min(row, 96 if KV_BITS[kv_format] == 6 else 128)
    if kv_format == "nvfp4":
        names = ("k_scales_page_bytes", "k_scales_row_bytes", "k_scales_head_bytes")
        assert [launch.values[name] for name in names] == [16 * 2 * 8, 2 * 8, 8]
        assert launch.values["v_scales"] == p.scales["v_scales"].data_ptr()
    else:
        assert "k_scales" not in launch.values


@pytest.mark.parametrize("kv_format", KV_BITS)
@pytest.mark.parametrize("as_codes", [False, True])
def test_queries_of_eight_bits(make_decode: Make, kv_format: str, as_codes: bool) -> None:
    """Strides are in elements; O stays bf16."""
    decode, driver = make_decode(kv_format=kv_format, q_dtype="e4m3")
    p = problem(kv_format)
    q, scale = quantize_q(p.q.float().reshape(3, 1, 8, 128), 2)
    q = q.view(torch.uint8) if as_codes else q
    plan = decode.plan(p.lengths, **p.heads)
    out, _ = plan.run(q, p.k, p.v, p.table, q_descale=scale, **p.scales)
    assert out.dtype == torch.bfloat16
    assert out.shape == q.shape
    assert driver.launches[0].values["q_head"] == 128
    with pytest.raises(ArgumentError, match=r"q has dtype torch.bfloat16: expected torch.float8_e4m3fn or"):
        plan.run(p.q, p.k, p.v, p.table, **p.scales)


def packed(row: int, step: int) -> torch.Tensor:
    """A cache whose rows of `row` bytes lie `step` bytes apart."""
    return torch.zeros(PAGES, 16, 2, step, dtype=torch.uint8)[..., :row]


SCALES = torch.zeros(PAGES, 16, 2, 8, dtype=torch.uint8)
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("e2m3", {"k_cache": packed(96, 208)}, "k_cache has a stride of 6656 bytes along page: expected a multiple of 48"),
    ("e3m2", {"v_cache": packed(96, 112)}, "v_cache has a stride of 3584 bytes along page: expected a multiple of 48"),
    ("e3m2", {"k_cache": packed(96, 100)}, "k_cache has a stride of 200 bytes along row: expected a multiple of 16"),
    ("e2m1", {"k_cache": packed(128, 128)},
     "k_cache has shape (19, 16, 2, 128): expected (num_pages, 16, 2, 64), (num_pages, page_size, num_kv_heads, head_"),
    ("e2m1", {"k_cache": packed(64, 64).view(torch.float8_e4m3fn)},
     "k_cache has dtype torch.float8_e4m3fn: expected torch.uint8"),
    ("e2m1", {"k_scales": SCALES}, "k_scales is given: expected None for kv_format 'e2m1'"),
    ("nvfp4", {"v_scales": None}, "v_scales = None: expected a tensor, as nvfp4 keeps a scale for every 16 elements"),
    ("nvfp4", {"k_scales": SCALES.float()},
     "k_scales has dtype torch.float32: expected torch.float8_e4m3fn or torch.uint8"),
    ("nvfp4", {"k_scales": SCALES[:9]}, "k_scales has shape (9, 16, 2, 8): expected (19, 16, 2, 8), (num_pages,"),
    ("nvfp4", {"k_scales": torch.zeros(PAGES, 16, 2, 12, dtype=torch.uint8)[..., :8]},
     "k_scales has a stride of 12 bytes along head: expected a multiple of 8"),
    ("nvfp4", {"v_scales": torch.zeros(PAGES, 16, 2, 16, dtype=torch.uint8)[..., ::2]},
     "v_scales has stride 2 along block: expected 1"),
    ("nvfp4", {"v_scales": torch.zeros(PAGES * 256 + 4, dtype=torch.uint8)[4:].view(PAGES, 16, 2, 8)},
     "v_scales lies at address 0x"),
]  # fmt: skip


@pytest.mark.parametrize(("kv_format", "change", "message"), BAD)
def test_wrong_caches_are_refused(make_decode: Make, kv_format: str, change: dict[str, Any], message: str) -> None:
    """Written edge case 26 among them."""
    decode, driver = make_decode(kv_format=kv_format)
    p = problem(kv_format)
    assert p.k.shape[0] == PAGES
    plan = decode.plan(p.lengths, **p.heads)
    with pytest.raises(ArgumentError) as caught:
        plan.run(**({"q": p.q, "k_cache": p.k, "v_cache": p.v, "block_table": p.table} | p.scales | change))
    assert message in str(caught.value)
    assert not driver.launches


def test_whole_codes_of_six_bits_may_lie_apart(make_decode: Make) -> None:
    """Written edge case 26: 192 bytes are 256 codes."""
    decode, driver = make_decode(kv_format="e2m3")
    p = problem("e2m3")
    decode.plan(p.lengths, **p.heads).run(p.q, packed(96, 192), packed(96, 192), p.table)
    assert driver.launches[0].values["k_map"].strides[1] == 192


def test_padded_caches_lie_on_32_bytes(make_decode: Make) -> None:
    """On tensor memory, where 6-bit rows that mma reads may be refused: the message says so."""
    decode, driver = make_decode(archs=("sm_110a",), kv_format="e2m3", q_dtype="e4m3")
    p = problem("e2m3")
    q = p.q.to(torch.float8_e4m3fn)
    plan = decode.plan(p.lengths, **p.heads)
    assert "tcgen05" in plan.keys[0]
    plan.run(q, packed(96, 192), packed(96, 192), p.table)
    assert driver.launches[0].values["k_map"].strides[1] == 192
    padding = r"expected a multiple of 32 for padded tensor maps \(impl='mma' takes 16\)"
    with pytest.raises(ArgumentError, match=f"v_cache has a stride of 144 bytes along head: {padding}"):
        plan.run(q, packed(96, 192), packed(96, 144), p.table)
    shifted = torch.zeros(PAGES * 16 * 2 * 96 + 32, dtype=torch.uint8)
    at = 16 if shifted.data_ptr() % 32 == 0 else 0
    cache = shifted[at : at + PAGES * 16 * 2 * 96].view(PAGES, 16, 2, 96)
    with pytest.raises(ArgumentError, match=f"k_cache lies at address 0x.*: {padding}"):
        plan.run(q, cache, packed(96, 192), p.table)


def test_block_scales_that_moved_are_packed_again(make_decode: Make) -> None:
    """A repeated call looks at its tensors only; block scales are among them."""
    decode, driver = make_decode(kv_format="nvfp4")
    p = problem("nvfp4")
    plan = decode.plan(p.lengths, **p.heads, force_splits=1)
    out, lse = plan.run(*p.tensors, **p.scales)
    given = {"out": out, "lse": lse}
    plan.run(*p.tensors, **given, **p.scales)
    other = p.scales["k_scales"].clone()
    plan.run(*p.tensors, **given, k_scales=other, v_scales=p.scales["v_scales"])
    plan.run(*p.tensors, **given, k_scales=other, v_scales=p.scales["v_scales"])
    expected = [p.scales["k_scales"].data_ptr()] * 2 + [other.data_ptr()] * 2
    assert [launch.values["k_scales"] for launch in driver.launches] == expected
