"""Formats and quantisers: the specification's tables, rounding properties, numpy against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode import formats, quantize
from cubinery.runtime.ops.paged_decode.formats import E2M1, E2M3, E3M2, E4M3, FloatFormat

SMALL = (E3M2, E2M3, E2M1)
CODED = ("fp8", "e3m2", "e2m3", "e2m1", "nvfp4")
quick = settings(max_examples=200, deadline=None, derandomize=True)


def cache(seed: int = 0, d: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, 16, 2, d)).astype(np.float32) * 3


# -- tables (case 27) -----------------------------------------------------------------------------------


def test_tables() -> None:
    assert formats.values(E3M2)[0x1F] == 28
    assert formats.values(E2M3)[0x1F] == 7.5
    assert formats.values(E2M1)[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for fmt, smallest in ((E4M3, 2.0**-9), (E3M2, 0.0625), (E2M3, 0.125), (E2M1, 0.5)):
        table = formats.values(fmt)
        assert len(table) == 2**fmt.bits
        half = len(table) // 2
        assert np.nanmax(table) == fmt.max
        assert table[1] == smallest
        assert np.array_equal(table[half:], -table[:half], equal_nan=True)
        assert int(np.isnan(table).sum()) == (2 if fmt.has_nan else 0)


def test_e4m3_table_is_the_hardware_type() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(formats.values(E4M3), expected, equal_nan=True)


@pytest.mark.parametrize("fmt", [*SMALL, E4M3], ids=lambda f: f.name)
def test_encode_inverts_decode(fmt: FloatFormat) -> None:
    codes = np.arange(1 << fmt.bits).astype(np.uint8)
    table = formats.values(fmt)
    keep = ~np.isnan(table)
    if fmt is not E4M3:
        keep[1 << (fmt.bits - 1)] = False  # negative zero is never produced
    assert np.array_equal(quantize.encode(table[keep], fmt), codes[keep])


# -- rounding (case 28) -----------------------------------------------------------------------------------


def test_case_28() -> None:
    x = np.array([0.25, 2.5, 5, 5.01, 7, -0.1, -6], np.float32)
    assert quantize.decode(quantize.encode(x, E2M1), E2M1).tolist() == [0, 2, 4, 6, 6, 0, -6]
    assert quantize.encode(x[-2:], E2M1).tolist() == [0, 15]


@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_midpoints_go_to_the_smaller_magnitude(fmt: FloatFormat) -> None:
    magnitudes = formats.values(fmt)[: 1 << (fmt.bits - 1)]
    middle = (magnitudes[1:] + magnitudes[:-1]) / 2
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(99))
    for sign in (1, -1):
        for x, expected in ((middle, magnitudes[:-1]), (below, magnitudes[:-1]), (above, magnitudes[1:])):
            assert np.array_equal(quantize.decode(quantize.encode(sign * x, fmt), fmt), sign * expected)


@quick
@given(st.floats(-600, 600, width=32), st.sampled_from((*SMALL, E4M3)))
def test_the_nearest_value_is_chosen(x: float, fmt: FloatFormat) -> None:
    table = formats.values(fmt).astype(np.float64)
    got = float(quantize.decode(quantize.encode(np.array([x], np.float32), fmt), fmt)[0])
    clamped = max(-fmt.max, min(fmt.max, x))
    assert abs(got - clamped) == np.nanmin(np.abs(table - clamped))


def test_e4m3_rounds_ties_to_even_as_torch_does() -> None:
    table = formats.values(E4M3)[:127]
    middle = (table[1:] + table[:-1]) / 2
    x = np.concatenate([middle, -middle, np.linspace(-500, 500, 9973), [0.0, -0.0, np.nan, 1e-9, -1e-9, 1e9]])
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(quantize.encode(x, E4M3), expected)


@pytest.mark.parametrize("fmt", [*SMALL, E4M3], ids=lambda f: f.name)
def test_what_is_not_finite_has_a_code(fmt: FloatFormat) -> None:
    x = np.array([np.inf, -np.inf, np.nan, -np.nan], np.float32)
    top, sign = 0x7E if fmt is E4M3 else (1 << (fmt.bits - 1)) - 1, 1 << (fmt.bits - 1)
    nan = 0x7F if fmt is E4M3 else top
    expected = [top, top | sign, nan, nan]
    assert quantize.encode(x, fmt).tolist() == expected
    assert quantize.encode(torch.from_numpy(x), fmt).tolist() == expected


# -- packing (case 29) ------------------------------------------------------------------------------------


def test_case_29() -> None:
    assert bytes(formats.pack(np.array([1, 2, 3, 4], np.uint8), 6)).hex() == "813010"
    assert bytes(formats.pack(np.array([1, 2], np.uint8), 4)).hex() == "21"


@quick
@given(st.sampled_from((4, 6, 8)), st.integers(1, 5), st.integers(1, 6), st.randoms(use_true_random=False))
def test_packing_is_little_endian_bit_order(bits: int, rows: int, groups: int, random: object) -> None:
    d = 4 * groups
    draw = random.randrange  # type: ignore[attr-defined]
    codes = np.array([[draw(1 << bits) for _ in range(d)] for _ in range(rows)], np.uint8)
    packed = formats.pack(codes, bits)
    assert packed.shape == (rows, formats.row_bytes(d, bits))
    for row, line in zip(codes, packed, strict=True):
        number = int.from_bytes(bytes(line), "little")
        assert [(number >> bits * i) & ((1 << bits) - 1) for i in range(d)] == row.tolist()
    assert np.array_equal(formats.unpack(packed, bits), codes)
    assert np.array_equal(formats.pack(torch.from_numpy(codes), bits).numpy(), packed)
    assert np.array_equal(formats.unpack(torch.from_numpy(packed), bits).numpy(), codes)


def test_packing_rejects_partial_bytes() -> None:
    with pytest.raises(ArgumentError, match="6 codes of 6 bits: expected a multiple of 4"):
        formats.pack(np.zeros(6, np.uint8), 6)
    with pytest.raises(ArgumentError, match="4 bytes of 6-bit codes: expected a multiple of 3"):
        formats.unpack(np.zeros(4, np.uint8), 6)
    with pytest.raises(ArgumentError, match="bits = 5: expected 4, 6 or 8"):
        formats.pack(np.zeros(8, np.uint8), 5)
    with pytest.raises(ArgumentError, match="head_dim = 3: a row of 4-bit codes is not a whole number of bytes"):
        formats.row_bytes(3, 4)


# -- caches -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_format", CODED)
def test_caches_come_back_within_half_a_step(kv_format: str) -> None:
    x = cache()
    q = quantize.quantize_kv(x, kv_format)
    fmt = formats.element(kv_format)
    assert q.data.shape == (3, 16, 2, 64 * fmt.bits // 8)
    assert q.data.dtype == np.uint8
    back = quantize.dequantize_kv(q)
    assert back.shape == x.shape
    # Relative half step of M mantissa bits, or half a step of the subnormals; the block scales of nvfp4
    # are themselves rounded to 3 mantissa bits, and may clip.
    relative = 2.0 ** -(fmt.mantissa_bits + 1) + (0.07 if kv_format == "nvfp4" else 0)
    scale = np.abs(x).max((0, 1, 3), keepdims=True) / fmt.max
    smallest = float(formats.values(fmt)[1]) * scale
    assert (np.abs(back - x) <= relative * np.abs(x) + 0.51 * smallest).all()


@pytest.mark.parametrize("kv_format", ["fp8", "e3m2", "e2m3", "e2m1"])
def test_caller_scale_is_amax_over_max_per_head(kv_format: str) -> None:
    x = cache()
    x[:, :, 1] = 0
    scale = quantize.quantize_kv(x, kv_format).scale
    top = np.float32(formats.element(kv_format).max)
    assert scale.tolist() == [np.abs(x[:, :, 0]).max() / top, np.float32(1e-6) / top]


@pytest.mark.parametrize("kv_format", ["bf16", *CODED])
def test_torch_and_numpy_agree_to_the_bit(kv_format: str) -> None:
    x = cache(1)
    x[1] *= 1e-4
    x[2, 3] = 0
    ours, theirs = quantize.quantize_kv(x, kv_format), quantize.quantize_kv(torch.from_numpy(x), kv_format)
    data = theirs.data
    if kv_format == "bf16":
        assert data.dtype == torch.bfloat16
        data = data.view(torch.int16)
    elif kv_format == "fp8":
        assert data.dtype == torch.float8_e4m3fn
        data = data.view(torch.uint8)
    assert np.array_equal(ours.data, data.numpy().view(ours.data.dtype))
    assert np.array_equal(ours.scale, theirs.scale.numpy())
    assert ours.scale.dtype == np.float32
    assert np.array_equal(quantize.dequantize_kv(ours), quantize.dequantize_kv(theirs).numpy())
    if kv_format == "nvfp4":
        assert ours.block_scales is not None
        assert theirs.block_scales is not None
        assert np.array_equal(ours.block_scales, theirs.block_scales.numpy())
        converted = zip(quantize.nvfp4_converted(ours), quantize.nvfp4_converted(theirs), strict=True)
        assert all(np.array_equal(a, b.numpy()) for a, b in converted)


def test_a_given_scale_is_used() -> None:
    x = cache()
    first = quantize.quantize_kv(x, "fp8")
    again = quantize.quantize_kv(x[1:2], "fp8", first.scale)
    assert np.array_equal(again.data, first.data[1:2])
    blocks = quantize.quantize_kv(x, "nvfp4")
    again = quantize.quantize_kv(x[1:2], "nvfp4", blocks.scale)
    assert np.array_equal(again.data, blocks.data[1:2])


def test_case_30_nvfp4_of_ones() -> None:
    q = quantize.quantize_kv(np.ones((1, 16, 1, 256), np.float32), "nvfp4")
    assert q.block_scales is not None
    assert set(quantize.decode(q.block_scales, E4M3).ravel().tolist()) == {448}
    assert set(formats.unpack(q.data, 4).ravel().tolist()) == {7}
    converted, descale = quantize.nvfp4_converted(q)
    assert set(converted.ravel().tolist()) == {320}
    assert descale.tolist() == [np.float32(8) / np.float32(2688)]
    assert float(320 * descale[0]) == pytest.approx(0.952381, abs=1e-6)
    assert quantize.dequantize_kv(q).ravel() == pytest.approx(1.0)


def test_case_30_nvfp4_of_zeros_and_of_vanishing_blocks() -> None:
    x = np.zeros((1, 16, 1, 32), np.float32)
    q = quantize.quantize_kv(x, "nvfp4")
    assert not q.data.any()
    assert np.isfinite(q.scale).all()
    x[..., 0], x[..., 16:] = 1.0, 1e-8  # the second block's scale rounds to zero
    q = quantize.quantize_kv(x, "nvfp4")
    assert not quantize.dequantize_kv(q)[..., 16:].any()
    assert quantize.dequantize_kv(q)[0, 0, 0, 0] == pytest.approx(1.0)


def test_nvfp4_conversion_cannot_saturate() -> None:
    converted, _ = quantize.nvfp4_converted(quantize.quantize_kv(cache(2) * 100, "nvfp4"))
    assert np.abs(converted).max() <= 336


def test_quantize_q() -> None:
    q = np.random.default_rng(3).standard_normal((2, 3, 8, 16)).astype(np.float32)
    codes, scale = quantize.quantize_q(q, 2)
    grouped = q.reshape(2, 3, 2, 4, 16)
    assert np.array_equal(scale, np.abs(grouped).max((1, 3, 4)) / np.float32(448))
    back = quantize.decode(codes, E4M3).reshape(grouped.shape) * scale[:, None, :, None, None]
    assert (np.abs(back - grouped) <= np.abs(grouped) / 16 + 2.0**-10 * scale.max()).all()
    theirs, their_scale = quantize.quantize_q(torch.from_numpy(q), 2)
    assert theirs.dtype == torch.float8_e4m3fn
    assert np.array_equal(theirs.view(torch.uint8).numpy(), codes)
    assert np.array_equal(their_scale.numpy(), scale)


def test_bf16_keeps_nan_and_rounds_to_even() -> None:
    x = np.array([1.0, 1.00390625, 1.01171875, np.nan, np.inf, -np.inf, 3.4e38], np.float32).reshape(1, 1, 1, 7)
    got = quantize.dequantize_kv(quantize.quantize_kv(x, "bf16"))
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    assert np.array_equal(got, expected, equal_nan=True)


def test_rejections() -> None:
    x = cache()
    with pytest.raises(ArgumentError, match="kv_format = 'int8': expected one of bf16, fp8"):
        quantize.quantize_kv(x, "int8")
    with pytest.raises(ArgumentError, match=r"scale has shape \(3,\): expected \(2,\), one per KV head"):
        quantize.quantize_kv(x, "fp8", np.ones(3, np.float32))
    with pytest.raises(ArgumentError, match=r"scale has shape \(2,\): expected \(1,\)"):
        quantize.quantize_kv(x, "nvfp4", np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match="scale is given: expected None"):
        quantize.quantize_kv(x, "bf16", np.ones(2, np.float32))
    with pytest.raises(ArgumentError, match=r"the cache has shape \(2, 64\)"):
        quantize.quantize_kv(x[0, 0], "fp8")
    with pytest.raises(ArgumentError, match="head_dim = 40: expected a multiple of 16"):
        quantize.quantize_kv(cache(d=40), "nvfp4")
    with pytest.raises(ArgumentError, match="a multiple of 3 heads"):
        quantize.quantize_q(np.zeros((2, 1, 8, 16), np.float32), 3)
