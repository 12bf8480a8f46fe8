"""The launch of the warp-level MMA decode; imports no compiler."""

from __future__ import annotations

from cubinery.aot.kernels.paged_decode.decode_abi import cache_map, decode_record
from cubinery.runtime.arch import Arch
from cubinery.runtime.manifest import KernelRecord, Swizzle, TensorMapSpec
from cubinery.runtime.ops.paged_decode.mma_config import MmaConfig

SWIZZLES: dict[int, Swizzle] = {128: "128B", 64: "64B", 32: "32B", 96: "none", 48: "none"}
"""By bytes of a box's rows: 16-byte chunks of eight rows then lie in different banks. Rows of 6-bit codes have no
power of two; they are read in words, which lie in banks of their own, or two to a bank.
"""


def mma_record(config: MmaConfig, arch: Arch) -> KernelRecord:
    """The launch record of a configuration, without resources."""
    return decode_record(config, arch, kv_map(config, "k"), kv_map(config, "v"))


def kv_map(config: MmaConfig, name: str) -> TensorMapSpec:
    """The tensor map of K or V for `mma`: one box is up to 128 bytes of a row by the rows of a page in a stage.

    Packed formats are bytes to the map: padded sub-byte types would spend a byte of shared memory an element, and
    Hopper has none.
    """
    element_bytes = 2 if config.kv_format == "bf16" else 1
    return cache_map(
        config,
        name,
        dtype="bfloat16" if config.kv_format == "bf16" else "uint8",
        box=(config.box_bytes // element_bytes, min(config.page_size, config.stage_keys)),
        row=config.row_bytes // element_bytes,
        swizzle=SWIZZLES[config.box_bytes],
    )
