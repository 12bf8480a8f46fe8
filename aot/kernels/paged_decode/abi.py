"""What a launch of each paged-decode kernel looks like: declared here, checked against the PTX at build.

Imports no compiler, so that a plan or a cached build costs nothing.
"""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.append_abi import append_record
from cubinery.aot.kernels.paged_decode.plan_abi import plan_record
from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.manifest import KernelRecord, ParamKind, Swizzle, TensorMapSpec, pack_params
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import KV_BITS, DecodeConfig, MmaConfig, Tcgen05Config
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM

SWIZZLES: dict[int, Swizzle] = {128: "128B", 64: "64B", 32: "32B", 96: "none", 48: "none"}
"""By bytes of a box's rows: 16-byte chunks of eight rows then lie in different banks. Rows of 6-bit codes have no
power of two; they are read in words, which lie in banks of their own, or two to a bank.
"""


def declare(config: KernelConfig, arch: Arch) -> KernelRecord:
    """The launch record of a configuration, without resources (the builder reads those back)."""
    if isinstance(config, AppendConfig):
        return append_record(config)
    if isinstance(config, PlanConfig):
        return plan_record(config)
    if isinstance(config, Tcgen05Config):
        return _decode(config, arch, tcgen05_kv_map(config, "k"), tcgen05_kv_map(config, "v"))
    assert isinstance(config, MmaConfig)
    return _decode(config, arch, kv_map(config, "k"), kv_map(config, "v"))


def kv_map(config: MmaConfig, name: str) -> TensorMapSpec:
    """The tensor map of K or V for `mma`: one box is up to 128 bytes of a row by the rows of a page in a stage.

    Packed formats are bytes to the map: padded sub-byte types would spend a byte of shared memory an element, and
    Hopper has none.
    """
    element_bytes = 2 if config.kv_format == "bf16" else 1
    return _cache_map(
        config,
        name,
        dtype="bfloat16" if config.kv_format == "bf16" else "uint8",
        box=(config.box_bytes // element_bytes, min(config.page_size, config.stage_keys)),
        row=config.row_bytes // element_bytes,
        swizzle=SWIZZLES[config.box_bytes],
    )


PADDED_TYPES = {6: "16u6_align16b", 4: "16u4_align16b"}
"""Tensor map types by bits of a code: 16 codes of memory fill 16 bytes of shared memory, one code a byte."""


def tcgen05_kv_map(config: Tcgen05Config, name: str) -> TensorMapSpec:
    """The tensor map of K or V for `tcgen05`, whose boxes hold all rows of a page.

    One box is the page's share of a ring stage, 128 elements wide, so a stage takes 128 / page_size boxes. nvfp4 goes
    to its converter first, which takes rows of all head_dim / 2 bytes as they are.
    """
    if config.kv_format == "nvfp4":
        row = config.row_bytes
        return _cache_map(config, name, dtype="uint8", box=(row, config.page_size), row=row, swizzle="none")
    return _cache_map(
        config,
        name,
        dtype=PADDED_TYPES[KV_BITS[config.kv_format]] if config.padded else "uint8",
        box=(BLOCK_DIM, config.page_size),
        row=config.head_dim,
        swizzle="128B",
    )


def _cache_map(
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
}
"""Parameters of the axes that are named after them, in order; a kernel takes those that are on."""


def optional_params(config: DecodeConfig) -> list[tuple[str, ParamKind]]:
    """(name, kind) of the parameters that only some configurations have."""
    return [(name, kind) for name, kind in OPTIONAL_PARAMS.items() if getattr(config, name)]


def scale_params(config: DecodeConfig) -> list[tuple[str, ParamKind]]:
    """(name, kind) of the parameters that say where nvfp4's block scales are: of K, then of V."""
    kinds: dict[str, ParamKind] = {"": "pointer", "_page_bytes": "i32", "_row_bytes": "i32", "_head_bytes": "i32"}
    names = ("k_scales", "v_scales") if config.scale_bytes else ()
    return [(name + suffix, kind) for name in names for suffix, kind in kinds.items()]


def _decode(config: DecodeConfig, arch: Arch, k_map: TensorMapSpec, v_map: TensorMapSpec) -> KernelRecord:
    """The record of every implementation: one parameter list, so that one public call serves them all.

    Q has no map: threads load its rows where the caller's strides put them.
    """
    params = pack_params(
        ("k_map", "tensor_map"),
        ("v_map", "tensor_map"),
        ("q", "pointer"),
        ("block_table", "pointer"),  # int32 (num_seqs, block_table_stride)
        ("work", "pointer"),  # int32 (num_work, 8): see SplitPlan.device_work
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
        grid=("q_tiles", "num_kv_heads", "num_work"),  # neighbours share keys in L2 and in DRAM pages
        params=params,
        tensor_maps=(k_map, v_map),
        dynamic_smem=config.smem_bytes(arch),
        carveout=100,
        min_ctas_per_sm=config.ctas_per_sm,
        pdl=config.pdl,
        tmem_columns=config.tmem_columns(arch),
    )
