"""The public call of the cache writer: quantise new K and V and append them to a paged cache.

    writer = CacheWriter(library, head_dim=128, kv_format="fp8")
    writer.append(k, v, k_cache, v_cache, slot_mapping, k_descale=k_descale, v_descale=v_descale)

One launch for K and V, capturable; it allocates, copies and waits for nothing. RoPE is the caller's.
"""

from __future__ import annotations

import math
import threading
from functools import reduce
from operator import or_
from typing import Any

import torch

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.kernel import BoundLaunch
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode import tensors
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.formats import ELEMENTS, NVFP4_BLOCK, row_bytes
from cubinery.runtime.ops.paged_decode.streams import device_index, raw_stream

__all__ = ["CacheWriter"]

Descale = torch.Tensor | float | None

_LIMIT = 2**31
LARGEST_SCALE = 3.4028234e38
"""The largest fp32 number, rounded down."""
_CACHE_DTYPES = {"bf16": ("torch.bfloat16",), "fp8": ("torch.float8_e4m3fn", "torch.uint8")}
"""By kv_format; packed formats are uint8."""
_SCALE_DTYPES = ("torch.uint8", "torch.float8_e4m3fn")
_POINTERS = (
    "k", "v", "k_cache", "v_cache", "slot_mapping", "k_descale", "v_descale", "k_scales", "v_scales",
)  # fmt: skip

MAX_KNOWN = 256
"""Kinds of calls (numbers of tokens, mostly) whose launches a thread keeps."""

Likeness = tuple[Any, ...]


def _likeness(x: Any) -> Any:
    """What two arguments must have in common for the same checks to hold, but for the address."""
    if isinstance(x, torch.Tensor) and x.layout == torch.strided:
        return x.shape, x.stride(), x.dtype, x.device
    return type(x), x


class CacheWriter:
    """Appends to paged KV caches of one format and head_dim, on one device.

    One object serves any number of tokens and KV heads, page size, physical layout and descale granularity. Making
    one loads nothing. Safe for many threads.
    """

    def __init__(
        self,
        library: Library,
        *,
        head_dim: int,
        kv_format: str,
        pdl: bool = False,
        device: int | str | torch.device | None = None,
    ) -> None:
        """`kv_format` is bf16, fp8, e3m2, e2m3, e2m1 or nvfp4; `device` is the current one by default.

        Raises ConfigError for a combination that no kernel has, ArchError where the library holds nothing for the
        device.
        """
        self.library = library
        self.device = device_index(library, device)
        self.torch_device = torch.device(library.driver.torch_device(self.device))
        self.config = AppendConfig(head_dim=head_dim, kv_format=kv_format, pdl=pdl)
        self.key = library.key_for(self.config, self.device)
        """Of the kernel that `append` launches, for `Library.preload`."""
        self._own = threading.local()
        element = ELEMENTS.get(kv_format)
        self._element_bytes = 2 if element is None else 1
        self._row = head_dim if element is None else row_bytes(head_dim, element.bits)

    def preload(self) -> None:
        """Load the kernel now, which a graph capture needs. Raises KernelNotFoundError where the library lacks it."""
        self.library.preload([self.key], [self.device])

    def append(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        k_descale: Descale = None,
        v_descale: Descale = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
        stream: Any = None,
    ) -> None:
        """Write row i of K and V to slot `slot_mapping[i]` of the caches, quantised.

        - `k`, `v`: bf16 (num_tokens or more, num_kv_heads, head_dim), any strides in multiples of 16 bytes, head_dim
          contiguous.
        - `k_cache`, `v_cache`: logical views (num_pages, page_size, num_kv_heads, row) of any physical layout (see
          `layouts.kv_views`), strides in multiples of 16 bytes. A row is head_dim elements: bfloat16, or for fp8
          float8_e4m3fn or uint8; packed formats are uint8 with head_dim * bits / 8 bytes a row.
        - `slot_mapping`: int32 or int64 (num_tokens,), contiguous; slot s is row s % page_size of page
          s // page_size. A token whose slot is negative, or past the cache, is skipped; others differ.
        - descales: a row is divided by its descale before it is rounded: None (1), a number, or fp32 tensors of 1
          element, (num_kv_heads,) or (num_tokens, num_kv_heads); positive. For nvfp4 this is the global scale, of
          which there is one. bf16 takes none.
        - `k_scales`, `v_scales`: nvfp4's block scales, e4m3 (uint8 or float8_e4m3fn) (num_pages, page_size,
          num_kv_heads, head_dim / 16), last dimension contiguous; None for the other formats.
        - `stream`: a torch stream or a raw handle, the current stream by default.

        The stored bits are those of `quantize.quantize_kv`. Infinities become the largest magnitude; so does NaN,
        without a sign, except that fp8 stores 0x7F; one in a block of nvfp4 makes its scale NaN. bf16 is copied.
        Raises ArgumentError before anything is launched.
        """
        raw = raw_stream(self.torch_device, stream)
        given = (k, v, k_cache, v_cache, slot_mapping, k_descale, v_descale, k_scales, v_scales)
        # Tensors like those of an earlier call differ from them in their addresses alone.
        known: dict[Likeness, BoundLaunch] | None = getattr(self._own, "known", None)
        if known is None:
            known = self._own.known = {}
        likeness = tuple(map(_likeness, given))
        try:
            bound = known.get(likeness)
        except TypeError:  # an argument that is no tensor and has no hash; the checks will say so
            bound = None
        if bound is not None:
            pointers = [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in given]
            rows, slots, factors = (reduce(or_, pointers[part]) for part in (slice(4), slice(4, 5), slice(5, 7)))
            if not (rows % tensors.ALIGNMENT or slots % slot_mapping.element_size() or factors % 4):
                bound.update(**dict(zip(_POINTERS, pointers, strict=True)))
                bound.launch(raw)
                return
        values = self._checked(*given)
        if values["num_tokens"]:
            kernel = self.library.kernel(self.key, self.device, role="append", stream=raw)
            bound = kernel.bind(values)
            if len(known) >= MAX_KNOWN:
                known.clear()
            known[likeness] = bound
            bound.launch(raw)

    def _checked(
        self, k: Any, v: Any, k_cache: Any, v_cache: Any, slot_mapping: Any, k_descale: Any, v_descale: Any,
        k_scales: Any, v_scales: Any,
    ) -> tensors.Values:  # fmt: skip
        """All launch values. Raises ArgumentError."""
        values: tensors.Values = {}
        count = self._slots(slot_mapping, values)
        heads = self._rows(k, v, count, values)
        pages, page_size = self._caches(k_cache, v_cache, heads, values)
        self._scales(k_scales, v_scales, (pages, page_size, heads), values)
        self._descale("k_descale", k_descale, count, heads, values)
        self._descale("v_descale", v_descale, count, heads, values)
        return values

    # -- one argument each ---------------------------------------------------------------------

    def _slots(self, slot_mapping: Any, values: tensors.Values) -> int:
        tensors.common("slot_mapping", slot_mapping, self.torch_device, "torch.int32", "torch.int64")
        shape = tuple(slot_mapping.shape)
        if len(shape) != 1 or not slot_mapping.is_contiguous():
            raise ArgumentError(
                f"slot_mapping has shape {shape} and strides {tuple(slot_mapping.stride())}: expected a contiguous "
                "tensor (num_tokens,)"
            )
        size = slot_mapping.element_size()
        if shape[0]:
            tensors.address("slot_mapping", slot_mapping.data_ptr(), size)
        values |= {"slot_mapping": slot_mapping.data_ptr(), "slot_bytes": size, "num_tokens": shape[0]}
        return int(shape[0])

    def _rows(self, k: Any, v: Any, count: int, values: tensors.Values) -> int:
        """The new rows; returns the number of KV heads."""
        heads = 0
        for name, tensor in (("k", k), ("v", v)):
            tensors.common(name, tensor, self.torch_device, "torch.bfloat16")
            shape = tuple(tensor.shape)
            if len(shape) != 3 or shape[0] < count or shape[1] < 1 or shape[2] != self.config.head_dim:
                raise ArgumentError(
                    f"{name} has shape {shape}: expected (at least {count}, num_kv_heads, {self.config.head_dim}), a "
                    "row for each slot"
                )
            if heads and shape[1] != heads:
                raise ArgumentError(f"v has {shape[1]} KV heads: expected {heads}, as k has")
            heads = shape[1]
            token, head = tensors.strides(name, tensor, ("token", "head", "head_dim")) if count else (0, 0)
            values |= {name: tensor.data_ptr(), f"{name}_token": token, f"{name}_head": head}
        rows = count * heads
        if rows * self.config.row_threads >= _LIMIT:
            raise ArgumentError(
                f"slot_mapping has {count} tokens of {heads} KV heads: expected at most "
                f"{(_LIMIT - 1) // self.config.row_threads} rows a call"
            )
        values |= {"num_kv_heads": heads, "num_ctas": self.config.ctas(rows)}
        return heads

    def _caches(self, k: Any, v: Any, heads: int, values: tensors.Values) -> tuple[int, int]:
        """The caches; returns (num_pages, page_size)."""
        dtypes = _CACHE_DTYPES.get(self.config.kv_format, ("torch.uint8",))
        place = (0, 0)
        for name, tensor in (("k", k), ("v", v)):
            what = f"{name}_cache"
            tensors.common(what, tensor, self.torch_device, *dtypes)
            shape = tuple(tensor.shape)
            if len(shape) != 4 or shape[0] < 1 or shape[1] < 1 or shape[2:] != (heads, self._row):
                raise ArgumentError(
                    f"{what} has shape {shape}: expected (num_pages, page_size, {heads}, {self._row}), a row of "
                    f"{self.config.kv_format} for each KV head of k"
                )
            if name == "v" and shape[:2] != place:
                raise ArgumentError(
                    f"v_cache has {shape[0]} pages of {shape[1]} rows: expected {place}, as k_cache has"
                )
            place = shape[:2]
            page, row, head = tensors.strides(what, tensor, ("page", "row", "head", "head_dim"))
            tensors.distinct(what, tensor)
            self._strides(what, name, (page, row, head), self._element_bytes, values)
            values[what] = tensor.data_ptr()
        if place[0] * place[1] >= _LIMIT:
            raise ArgumentError(f"k_cache has {place[0]} pages of {place[1]} rows: expected fewer than {_LIMIT} rows")
        values |= {"page_size": place[1], "num_slots": place[0] * place[1]}
        return place

    def _scales(self, k: Any, v: Any, place: tuple[int, int, int], values: tensors.Values) -> None:
        """Block scales of nvfp4, which the other formats do not have."""
        for name, tensor in (("k_scales", k), ("v_scales", v)):
            if self.config.kv_format != "nvfp4":
                if tensor is not None:
                    raise ArgumentError(f"{name} is given: expected None for {self.config.kv_format}")
                values[name] = 0
                self._strides(name, name, (0, 0, 0), 1, values)
                continue
            if tensor is None:
                raise ArgumentError(f"{name} is None: expected a tensor, in which nvfp4 keeps its block scales")
            tensors.common(name, tensor, self.torch_device, *_SCALE_DTYPES)
            expected = (*place, self.config.head_dim // NVFP4_BLOCK)
            if tuple(tensor.shape) != expected:
                raise ArgumentError(f"{name} has shape {tuple(tensor.shape)}: expected {expected}")
            strides = tensors.strides(name, tensor, ("page", "row", "head", "block"), align=1)
            tensors.distinct(name, tensor)
            self._strides(name, name, (strides[0], strides[1], strides[2]), 1, values)
            values[name] = tensor.data_ptr()

    def _strides(
        self, what: str, prefix: str, strides: tuple[int, int, int], size: int, values: tensors.Values
    ) -> None:
        """Byte strides of a cache or of its scales, of elements of `size` bytes."""
        page, row, head = (stride * size for stride in strides)
        for axis, stride in (("row", row), ("head", head)):
            if stride >= _LIMIT:
                raise ArgumentError(
                    f"{what} has a stride of {stride} bytes along {axis}: expected at most {_LIMIT - 1}"
                )
        values |= {f"{prefix}_page_bytes": page, f"{prefix}_row_bytes": row, f"{prefix}_head_bytes": head}

    def _descale(self, name: str, descale: Descale, count: int, heads: int, values: tensors.Values) -> None:
        """What divides the rows of K or V: a number, or a tensor addressed by (token, head) strides."""
        number, pointer, token, head = 1.0, 0, 0, 0
        if descale is not None and self.config.kv_format == "bf16":
            raise ArgumentError(f"{name} is given: expected None for bf16, which is copied")
        if isinstance(descale, int | float):
            number = tensors.number(name, descale, positive=True)
            if not tensors.SMALLEST_SCALE <= number <= LARGEST_SCALE:
                raise ArgumentError(
                    f"{name} = {number:g}: expected {tensors.SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, as fp32"
                )
        elif descale is not None:
            if not hasattr(descale, "data_ptr"):
                raise ArgumentError(f"{name} is a {type(descale).__name__}: expected None, a number or a torch tensor")
            tensors.common(name, descale, self.torch_device, "torch.float32")
            token, head = self._descale_strides(name, descale, count, heads)
            pointer = descale.data_ptr()
            tensors.address(name, pointer, 4)
        values |= {
            name: pointer, f"{name}_token": token, f"{name}_head": head, f"{name}_value": number,
        }  # fmt: skip

    def _descale_strides(self, name: str, descale: torch.Tensor, count: int, heads: int) -> tuple[int, int]:
        shape = tuple(descale.shape)
        if math.prod(shape) == 1:
            return 0, 0
        if self.config.kv_format == "nvfp4":
            raise ArgumentError(f"{name} has shape {shape}: expected 1 element, as nvfp4 has one global scale")
        if shape == (heads,):
            token, head = 0, descale.stride(0)
        elif shape == (count, heads):
            token, head = descale.stride()
        else:
            raise ArgumentError(f"{name} has shape {shape}: expected 1 element, ({heads},) or ({count}, {heads})")
        for stride in (token, head):
            if not 0 <= stride < tensors.STRIDE_LIMIT:
                raise ArgumentError(f"{name} has stride {stride}: expected 0 to {tensors.STRIDE_LIMIT - 1} elements")
        return token, head
