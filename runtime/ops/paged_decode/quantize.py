"""Quantisers of the KV cache and of Q, for every format of the family.

Each function takes and returns either numpy arrays or torch tensors (on any device, without a
synchronisation); on the host both give the same bits. All arithmetic is fp32. Non-finite input is the
caller's error: it becomes the largest magnitude, NaN without a sign, except that fp8 stores NaN as 0x7F. The cache
writer's kernel stores the same bits, of these inputs too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode.formats import (
    E2M1,
    E4M3,
    KV_FORMATS,
    NVFP4_BLOCK,
    Array,
    FloatFormat,
    element,
    midpoints,
    pack,
    unpack,
    values,
)

SCALE_FLOOR = 1e-6
"""Least amax of a caller's scale, so that an all-zero cache has a usable one."""
NVFP4_FLOOR = 1e-12
"""Least amax of an nvfp4 tensor."""
NVFP4_SHIFT = 0.125
"""The converting kernels multiply e4m3(code * scale * 2^-3), which cannot exceed 336, so cannot saturate."""


@dataclass(frozen=True, slots=True)
class QuantizedKv:
    """A quantised K or V cache of logical shape (num_pages, page_size, num_kv_heads, head_dim)."""

    kv_format: str
    data: Array
    """bf16: bfloat16 (torch) or its bits as uint16 (numpy). fp8: float8_e4m3fn (torch) or codes as uint8
    (numpy). Otherwise packed uint8, last dimension head_dim * bits / 8."""
    scale: Array
    """fp32 factor from decoded values to the original ones: (num_kv_heads,), or (1,) for nvfp4."""
    block_scales: Array | None = None
    """nvfp4: e4m3 codes as uint8, (num_pages, page_size, num_kv_heads, head_dim / 16)."""


def encode(x: Array, fmt: FloatFormat) -> Array:
    """Codes (uint8, shape of `x`) of the nearest values of a format, magnitudes clamped to its maximum.

    e4m3 rounds ties to even and keeps the sign of zero, as the hardware conversion does. The 4- and
    6-bit formats round exact midpoints to the smaller magnitude and have no negative zero.
    """
    if fmt is E4M3:
        return _encode_e4m3(x)
    index: Array
    if isinstance(x, np.ndarray):
        x = x.astype(np.float32, copy=False)
        index = np.searchsorted(midpoints(fmt), np.abs(x), side="left").astype(np.uint8)
        return index | ((x < 0) & (index > 0)).astype(np.uint8) << np.uint8(fmt.bits - 1)
    import torch

    x = x.to(torch.float32)
    middle = torch.tensor(midpoints(fmt), device=x.device)
    index = torch.bucketize(x.abs(), middle, out_int32=True).to(torch.uint8)
    return index | ((x < 0) & (index > 0)).to(torch.uint8) << (fmt.bits - 1)


def decode(codes: Array, fmt: FloatFormat) -> Array:
    """fp32 values of uint8 codes; any shape. Inverse of `encode` on representable values."""
    if isinstance(codes, np.ndarray):
        return values(fmt)[codes]
    import torch

    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    return torch.tensor(values(fmt), device=codes.device)[codes.to(torch.int32)]


def kv_scale(x: Array, kv_format: str) -> Array:
    """The caller's scale per KV head, (num_kv_heads,) fp32: amax over pages, rows and d, over the format's maximum.

    `x` is (num_pages, page_size, num_kv_heads, head_dim). For fp8, e3m2, e2m3 and e2m1; nvfp4 has a
    scale of its own.
    """
    _require_cache(x)
    return _floor(_amax(x, (0, 1, 3)), SCALE_FLOOR) / element(kv_format).max


def quantize_kv(x: Array, kv_format: str, scale: Array | None = None) -> QuantizedKv:
    """Quantise a K or V cache (num_pages, page_size, num_kv_heads, head_dim) of floats.

    `scale` is (num_kv_heads,) fp32, or (1,) for nvfp4; None computes it. Pass the scale of an earlier
    call when pages are filled one after another. bf16 takes none.
    """
    _require_cache(x)
    if kv_format not in KV_FORMATS:
        raise ArgumentError(f"kv_format = {kv_format!r}: expected one of {', '.join(KV_FORMATS)}")
    if kv_format == "bf16":
        if scale is not None:
            raise ArgumentError("scale is given: expected None for kv_format 'bf16', which is not scaled")
        return QuantizedKv(kv_format, _to_bf16(x), _ones(x, x.shape[2]))
    if kv_format == "nvfp4":
        return _quantize_nvfp4(x, scale)
    fmt = element(kv_format)
    if scale is None:
        scale = kv_scale(x, kv_format)
    elif tuple(scale.shape) != (x.shape[2],):
        raise ArgumentError(f"scale has shape {tuple(scale.shape)}: expected ({x.shape[2]},), one per KV head")
    codes = encode(_f32(x) / scale[:, None], fmt)
    return QuantizedKv(kv_format, _as_fp8(codes) if fmt is E4M3 else pack(codes, fmt.bits), scale)


def dequantize_kv(cache: QuantizedKv, *, scaled: bool = True) -> Array:
    """The exact fp32 values that a quantised cache stands for, (num_pages, page_size, num_kv_heads, head_dim).

    With `scaled=False`, the values that the kernel sees before descales: `scale` is left out (the block
    scales of nvfp4 are not).
    """
    if cache.kv_format == "bf16":
        return _from_bf16(cache.data)
    fmt = element(cache.kv_format)
    decoded = decode(cache.data if fmt is E4M3 else unpack(cache.data, fmt.bits), fmt)
    if cache.block_scales is not None:
        blocks = decoded.reshape(*decoded.shape[:-1], -1, NVFP4_BLOCK)
        decoded = (blocks * decode(cache.block_scales, E4M3)[..., None]).reshape(decoded.shape)
        return decoded * cache.scale if scaled else decoded
    return decoded * cache.scale[:, None] if scaled else decoded


def nvfp4_converted(cache: QuantizedKv) -> tuple[Array, Array]:
    """(values, descale) of an nvfp4 cache as kernels see it that convert to e4m3 in shared memory.

    The values are e4m3(code * block scale / 8) as fp32 and the descale, (1,) fp32, is eight times the
    global scale. The rounding is part of those kernels' specified result.
    """
    exact = dequantize_kv(cache, scaled=False)
    return decode(encode(exact * NVFP4_SHIFT, E4M3), E4M3), cache.scale / NVFP4_SHIFT


def quantize_q(q: Array, num_kv_heads: int) -> tuple[Array, Array]:
    """e4m3 Q and its descale from floats (num_seqs, q_len, num_q_heads, head_dim).

    One scale per sequence and KV head, over its tokens and query heads. Returns codes in the shape of
    `q` (float8_e4m3fn for torch, uint8 for numpy) and the scale, (num_seqs, num_kv_heads) fp32.
    """
    if q.ndim != 4 or num_kv_heads < 1 or q.shape[2] % num_kv_heads:
        raise ArgumentError(
            f"q has shape {tuple(q.shape)}: expected (num_seqs, q_len, a multiple of {num_kv_heads} heads, head_dim)"
        )
    grouped = _f32(q).reshape(q.shape[0], q.shape[1], num_kv_heads, -1, q.shape[3])
    scale = _floor(_amax(grouped, (1, 3, 4)), SCALE_FLOOR) / E4M3.max
    codes = encode(grouped / scale[:, None, :, None, None], E4M3)
    return _as_fp8(codes.reshape(q.shape)), scale


def _quantize_nvfp4(x: Array, scale: Array | None) -> QuantizedKv:
    if x.shape[3] % NVFP4_BLOCK:
        raise ArgumentError(f"head_dim = {x.shape[3]}: expected a multiple of {NVFP4_BLOCK} for nvfp4")
    x = _f32(x)
    if scale is None:
        scale = _floor(_amax(x, (0, 1, 2, 3)).reshape(1), NVFP4_FLOOR) / (E2M1.max * E4M3.max)
    elif tuple(scale.shape) != (1,):
        raise ArgumentError(f"scale has shape {tuple(scale.shape)}: expected (1,), one for the tensor")
    blocks = x.reshape(*x.shape[:-1], -1, NVFP4_BLOCK)
    block_codes = encode(_amax(blocks, (4,)) / (scale * E2M1.max), E4M3)
    step = (decode(block_codes, E4M3) * scale)[..., None]
    # A block too small for its scale has step 0 and all codes 0; the added one avoids 0 / 0 there.
    zero = _like(step == 0, x)
    codes = encode(blocks * (1 - zero) / (step + zero), E2M1)
    return QuantizedKv("nvfp4", pack(codes.reshape(x.shape), 4), scale, block_codes)


def _encode_e4m3(x: Array) -> Array:
    if not isinstance(x, np.ndarray):
        import torch

        x = x.to(torch.float32)
        codes = x.clamp(-E4M3.max, E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes.masked_fill(x.isnan(), 0x7F)
    x = x.astype(np.float32, copy=False)
    middle = midpoints(E4M3)
    magnitude = np.abs(x)
    index = np.searchsorted(middle, magnitude, side="left")
    tie = middle[np.minimum(index, len(middle) - 1)] == magnitude
    index += tie & (index & 1 == 1)  # the lower neighbour's mantissa is odd, so the upper one's is even
    codes = (index | np.signbit(x).astype(np.int64) << 7).astype(np.uint8)
    codes[np.isnan(x)] = 0x7F  # its sign depends on the machine that made it
    return codes


def _require_cache(x: Array) -> None:
    if x.ndim != 4:
        raise ArgumentError(
            f"the cache has shape {tuple(x.shape)}: expected (num_pages, page_size, num_kv_heads, head_dim)"
        )


def _f32(x: Array) -> Array:
    if isinstance(x, np.ndarray):
        return x.astype(np.float32, copy=False)
    import torch

    return x.to(torch.float32)


def _like(mask: Array, x: Array) -> Array:
    """A boolean mask as numbers of x's type."""
    return mask.astype(x.dtype) if isinstance(x, np.ndarray) else mask.to(x.dtype)


def _amax(x: Array, dims: tuple[int, ...]) -> Array:
    """Largest magnitude over some dimensions, fp32."""
    magnitude = abs(_f32(x))
    return magnitude.max(axis=dims) if isinstance(x, np.ndarray) else magnitude.amax(dim=dims)


def _floor(x: Array, least: float) -> Array:
    return np.maximum(x, np.float32(least)) if isinstance(x, np.ndarray) else x.clamp(min=least)


def _ones(x: Array, n: int) -> Array:
    if isinstance(x, np.ndarray):
        return np.ones(n, np.float32)
    import torch

    return torch.ones(n, dtype=torch.float32, device=x.device)


def _as_fp8(codes: Array) -> Array:
    if isinstance(codes, np.ndarray):
        return codes
    import torch

    return codes.view(torch.float8_e4m3fn)


def _to_bf16(x: Array) -> Array:
    """bfloat16, or for numpy its bits: round to nearest even by adding half of the last kept bit."""
    if not isinstance(x, np.ndarray):
        import torch

        return x.to(torch.bfloat16)
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _from_bf16(data: Array) -> Array:
    if isinstance(data, np.ndarray):
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _f32(data)
