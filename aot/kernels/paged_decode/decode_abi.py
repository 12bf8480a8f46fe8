"""What the launches of all decode kernels have in common: one parameter list, and maps of paged caches.

Imports no compiler.
"""

from __future__ import annotations

from cubinery.runtime.arch import Arch
from cubinery.runtime.manifest import KernelRecord, ParamKind, Swizzle, TensorMapSpec, pack_params
from cubinery.runtime.ops.paged_decode.decode_config import DecodeConfig


def cache_map(
    config: DecodeConfig, name: str, *, dtype: str, box: tuple[int, int], row: int, swizzle: Swizzle
) -> TensorMapSpec:
    """A map of boxes (elements, keys) of one page and head of the cache `name`, whose rows have `row` elements."""
    return TensorMapSpec(
        name=f"{name}_map",
        pointer=name,
        dtype=dtype,
        box=(*box, 1, 1),
        element_strides=(1, 1, 1, 1),
        extents=(row, config.page_size, "num_kv_heads", "num_pages"),
        strides=(f"{name}_row_bytes", f"{name}_head_bytes", f"{name}_page_bytes"),
        swizzle=swizzle,
        l2_promotion="128B",  # 256 bytes cost 2 to 5 % of the bandwidth on an H200
    )


OPTIONAL_PARAMS: dict[str, ParamKind] = {
    "window": "i32",  # keys that a token sees, its own included
    "sinks": "pointer",  # fp32 (num_q_heads,)
    "softcap": "f32",
    "q_lens": "pointer",  # int32 (num_seqs,)
    "expected_keys": "i32",  # keys of each sequence where all have as many, else 0: a guess, which may be wrong
}
"""Parameters that are named after what a configuration says of them, in order; a kernel takes those that are on."""


def optional_params(config: DecodeConfig) -> list[tuple[str, ParamKind]]:
    """(name, kind) of the parameters that only some configurations have."""
    return [(name, kind) for name, kind in OPTIONAL_PARAMS.items() if getattr(config, name)]


def scale_params(config: DecodeConfig) -> list[tuple[str, ParamKind]]:
    """(name, kind) of the parameters that say where nvfp4's block scales are: of K, then of V."""
    kinds: dict[str, ParamKind] = {"": "pointer", "_page_bytes": "i32", "_row_bytes": "i32", "_head_bytes": "i32"}
    names = ("k_scales", "v_scales") if config.scale_bytes else ()
    return [(name + suffix, kind) for name in names for suffix, kind in kinds.items()]


def decode_record(config: DecodeConfig, arch: Arch, k_map: TensorMapSpec, v_map: TensorMapSpec) -> KernelRecord:
    """The record of every implementation: one parameter list, so that one public call serves them all.

    Q has no map: threads load its rows where the caller's strides put them.
    """
    params = pack_params(
        ("k_map", "tensor_map"),
        ("v_map", "tensor_map"),
        ("q", "pointer"),
        ("block_table", "pointer"),  # int32 (num_seqs, block_table_stride)
        # int32 (num_work, 8): see SplitPlan.device_work; clusters share whole sequences and read (num_seqs,) lengths
        ("work" if config.cluster == 1 else "lengths", "pointer"),
        ("q_descale", "pointer"),  # fp32, addressed by (seq, head) strides like the next two
        ("k_descale", "pointer"),
        ("v_descale", "pointer"),
        ("o", "pointer"),
        ("lse", "pointer"),  # fp32 (num_seqs, num_kv_heads, n_q)
        ("o_partial", "pointer"),  # fp32 (slots, num_kv_heads, n_q, head_dim)
        ("m_partial", "pointer"),  # fp32 (slots, num_kv_heads, n_q), in units of the LSE
        ("l_partial", "pointer"),  # fp32 (slots, num_kv_heads, n_q)
        ("counters", "pointer"),  # uint32 (slots, num_kv_heads, q_tiles), zero before and after a launch
        ("num_kv_heads", "i32"),
        ("n_q", "i32"),  # packed query rows of one KV head: q_len * group_size
        ("group_size", "i32"),  # query heads of one KV head
        ("num_pages", "i32"),
        ("ring_depth", "i32"),  # ring stages in use, at most those of the configuration
        ("block_table_stride", "i32"),  # entries of one row of the block table
        ("q_seq", "i32"),  # element strides of Q and O
        ("q_token", "i32"),
        ("q_head", "i32"),
        ("o_seq", "i32"),
        ("o_token", "i32"),
        ("o_head", "i32"),
        ("q_descale_seq", "i32"),
        ("q_descale_head", "i32"),
        ("k_descale_seq", "i32"),
        ("k_descale_head", "i32"),
        ("v_descale_seq", "i32"),
        ("v_descale_head", "i32"),
        ("scale_qs", "f32"),
        ("scale_o", "f32"),
        *optional_params(config),
        *scale_params(config),
    )
    return KernelRecord(
        role="decode",
        symbol=f"cubinery_paged_decode_{config.impl}_0",
        block=(config.threads, 1, 1),
        # Neighbours share keys in L2 and in DRAM pages, or are a cluster: row_ctas is q_tiles times its size.
        grid=("q_tiles", "num_kv_heads", "num_work")
        if config.cluster == 1
        else ("row_ctas", "num_kv_heads", "num_seqs"),
        cluster=(config.cluster, 1, 1),
        smaller_clusters=config.cluster > 1,
        params=params,
        tensor_maps=(k_map, v_map),
        dynamic_smem=config.smem_bytes(arch),
        carveout=100,
        min_ctas_per_sm=config.ctas_per_sm,
        pdl=config.pdl,
        tmem_columns=config.tmem_columns(arch),
    )
