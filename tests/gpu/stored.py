"""What a cache of each format holds: rows of floats to stored rows, and back; works on any device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cubinery.runtime.ops.paged_decode.config import KV_BITS
from cubinery.runtime.ops.paged_decode.formats import E4M3, NVFP4_BLOCK, element, pack, unpack
from cubinery.runtime.ops.paged_decode.quantize import decode, quantize_kv

E4M3_NAN = 0x7F
LARGEST_SCALE_CODE = 0x7F
"""Of a block scale: NaN."""


class Rows(NamedTuple):
    """Stored rows, in a dtype that torch can index, and the scales of their blocks (nvfp4, else None)."""

    data: torch.Tensor
    scales: torch.Tensor | None


def is_packed(kv_format: str) -> bool:
    """Several codes share bytes, so a row has fewer elements than head_dim."""
    return KV_BITS[kv_format] < 8


def row_dtype(kv_format: str) -> torch.dtype:
    """bfloat16, or codes and packed bytes."""
    return torch.bfloat16 if kv_format == "bf16" else torch.uint8


def row_length(kv_format: str, d: int) -> int:
    """Elements of `row_dtype` in a row of d values."""
    return d * KV_BITS[kv_format] // 8 if is_packed(kv_format) else d


def store(values: torch.Tensor, kv_format: str) -> Rows:
    """Rows (..., d) of floats, rounded to the format as they are (nvfp4: to blocks with a scale each)."""
    if kv_format == "bf16":
        return Rows(values.to(torch.bfloat16), None)
    if kv_format == "fp8":
        return Rows(values.to(torch.float8_e4m3fn).view(torch.uint8), None)
    flat = values.reshape(1, 1, -1, values.shape[-1])
    ones = torch.ones(1 if kv_format == "nvfp4" else flat.shape[2], device=values.device)
    found = quantize_kv(flat, kv_format, ones)
    scales = found.block_scales
    lead = values.shape[:-1]
    return Rows(found.data.reshape(*lead, -1), None if scales is None else scales.reshape(*lead, -1))


def load(rows: Rows, kv_format: str) -> torch.Tensor:
    """fp32 (..., d) of stored rows."""
    if kv_format == "bf16":
        return rows.data.float()
    if not is_packed(kv_format):
        return rows.data.view(torch.float8_e4m3fn).float()
    fmt = element(kv_format)
    values = decode(unpack(rows.data, fmt.bits), fmt)
    if rows.scales is None:
        return values
    return values * decode(rows.scales, E4M3).repeat_interleave(NVFP4_BLOCK, dim=-1)


def poison(kv_format: str, d: int, device: torch.device) -> Rows:
    """A row of NaN, or of the largest value where codes have none; block scales are NaN."""
    if kv_format == "bf16":
        return Rows(torch.full((d,), float("nan"), dtype=torch.bfloat16, device=device), None)
    if kv_format == "fp8":
        return Rows(torch.full((d,), E4M3_NAN, dtype=torch.uint8, device=device), None)
    bits = KV_BITS[kv_format]
    codes = torch.full((d,), (1 << bits - 1) - 1, dtype=torch.uint8, device=device)
    scales = torch.full((d // NVFP4_BLOCK,), LARGEST_SCALE_CODE, dtype=torch.uint8, device=device)
    return Rows(pack(codes, bits), scales if kv_format == "nvfp4" else None)
