"""The launch of the tensor-memory decode; imports no compiler."""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.decode_abi import cache_map, decode_record
from cubinery.runtime.arch import Arch
from cubinery.runtime.manifest import KernelRecord, TensorMapSpec
from cubinery.runtime.ops.paged_decode.decode_config import KV_BITS
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM, Tcgen05Config

PADDED_TYPES = {6: "16u6_align16b", 4: "16u4_align16b"}
"""Tensor map types by bits of a code: 16 codes of memory fill 16 bytes of shared memory, one code a byte."""


def tcgen05_record(config: Tcgen05Config, arch: Arch) -> KernelRecord:
    """The launch record of a configuration, without resources."""
    return decode_record(config, arch, tcgen05_kv_map(config, "k"), tcgen05_kv_map(config, "v"))


def tcgen05_kv_map(config: Tcgen05Config, name: str) -> TensorMapSpec:
    """The tensor map of K or V for `tcgen05`, whose boxes hold all rows of a page.

    One box is the page's share of a ring stage, 128 elements wide, so a stage takes 128 / page_size boxes. nvfp4 goes
    to its converter first, which takes rows of up to 256 elements as they are.
    """
    if config.kv_format == "nvfp4":
        box = (config.packed_row_bytes, config.page_size)
        return cache_map(config, name, dtype="uint8", box=box, row=config.row_bytes, swizzle="none")
    return cache_map(
        config,
        name,
        dtype=PADDED_TYPES[KV_BITS[config.kv_format]] if config.padded else "uint8",
        box=(BLOCK_DIM, config.page_size),
        row=config.head_dim,
        swizzle="128B",
    )
