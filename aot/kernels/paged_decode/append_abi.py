"""What a launch of the cache writer looks like; see `abi`."""

from __future__ import annotations

from cubinery.runtime.manifest import KernelRecord, pack_params
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig


def append_record(config: AppendConfig) -> KernelRecord:
    """The launch record of the cache writer. All formats share it; what a format does not use is ignored."""
    params = pack_params(
        ("k", "pointer"),  # bf16 (num_tokens, num_kv_heads, head_dim), the new rows
        ("v", "pointer"),
        ("slot_mapping", "pointer"),  # int32 or int64 (num_tokens,)
        ("k_cache", "pointer"),
        ("v_cache", "pointer"),
        ("k_scales", "pointer"),  # nvfp4: e4m3 (num_pages, page_size, num_kv_heads, head_dim / 16)
        ("v_scales", "pointer"),
        ("k_descale", "pointer"),  # fp32, addressed by (token, head) strides; null: k_descale_value holds for all
        ("v_descale", "pointer"),
        ("k_page_bytes", "i64"),
        ("v_page_bytes", "i64"),
        ("k_scales_page_bytes", "i64"),
        ("v_scales_page_bytes", "i64"),
        ("num_tokens", "i32"),
        ("num_kv_heads", "i32"),
        ("page_size", "i32"),
        ("num_slots", "i32"),  # num_pages * page_size
        ("slot_bytes", "i32"),  # 4 or 8
        ("k_token", "i32"),  # element strides of the new rows
        ("k_head", "i32"),
        ("v_token", "i32"),
        ("v_head", "i32"),
        ("k_row_bytes", "i32"),
        ("k_head_bytes", "i32"),
        ("v_row_bytes", "i32"),
        ("v_head_bytes", "i32"),
        ("k_scales_row_bytes", "i32"),
        ("k_scales_head_bytes", "i32"),
        ("v_scales_row_bytes", "i32"),
        ("v_scales_head_bytes", "i32"),
        ("k_descale_token", "i32"),
        ("k_descale_head", "i32"),
        ("v_descale_token", "i32"),
        ("v_descale_head", "i32"),
        ("k_descale_value", "f32"),
        ("v_descale_value", "f32"),
    )
    return KernelRecord(
        role="append",
        symbol="cubinery_paged_decode_append_0",
        block=(AppendConfig.THREADS, 1, 1),
        grid=("num_ctas", 1, 1),
        params=params,
        pdl=config.pdl,
    )
