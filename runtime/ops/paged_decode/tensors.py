"""Checks of a launch's tensors, and the strides that they contribute to its values.

Each function looks at one argument of `Plan.run`, raises ArgumentError naming the argument, what was
expected and what was found, and returns launch values by the names of the kernel's record. Tensors are
used by their attributes alone, so torch is not imported here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode.config import KV_BITS, NVFP4_BLOCK
from cubinery.runtime.ops.paged_decode.windows import MAX_WINDOW

Tensor = Any
Values = dict[str, int | float]

STRIDE_LIMIT = 2**31
ALIGNMENT = 16
"""Bytes: of base addresses, and of the strides of Q, K, V and O (TMA and vector accesses)."""

SMALLEST_SCALE = 2.0**-126
"""Smallest normal fp32: a scale that vanished would turn masked scores, minus infinity times it, into NaN."""

SMALLEST_SOFTCAP = 1e-3
"""Scores are divided by it before tanh; no model comes near."""

E4M3_DTYPES = ("torch.float8_e4m3fn", "torch.uint8")
"""uint8 holds e4m3 codes, as serving engines allocate them."""
KV_DTYPES = {"bf16": ("torch.bfloat16",), "fp8": E4M3_DTYPES} | {
    name: ("torch.uint8",) for name, bits in KV_BITS.items() if bits < 8
}
"""Accepted dtypes by kv_format; formats below 8 bits come as their packed bytes."""
Q_DTYPES = {"bf16": ("torch.bfloat16",), "e4m3": E4M3_DTYPES}


@dataclass(frozen=True, slots=True)
class Shape:
    """What the tensors of one plan have in common."""

    num_seqs: int
    q_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    kv_format: str
    q_dtype: str
    device: Any
    """torch.device of all tensors."""
    kv_align: int = ALIGNMENT
    """Bytes on which K and V, and their page, row and head strides, must lie."""

    @property
    def group_size(self) -> int:
        """Query heads of one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def n_q(self) -> int:
        """Packed query rows of one KV head."""
        return self.q_len * self.group_size

    @property
    def lse(self) -> tuple[int, int, int]:
        """Shape of LSE."""
        return self.num_seqs, self.num_kv_heads, self.n_q


def common(name: str, tensor: Tensor, device: Any, *dtypes: str) -> None:
    """Tensor, device and dtype."""
    if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "stride"):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}: expected a torch tensor")
    if tensor.device != device:
        raise ArgumentError(f"{name} is on {tensor.device}: expected {device}")
    if str(tensor.layout) != "torch.strided":
        raise ArgumentError(f"{name} has layout {tensor.layout}: expected torch.strided")
    if str(tensor.dtype) not in dtypes:
        raise ArgumentError(f"{name} has dtype {tensor.dtype}: expected {' or '.join(dtypes)}")


def strides(name: str, tensor: Tensor, axes: tuple[str, ...], *, align: int = ALIGNMENT, why: str = "") -> list[int]:
    """Element strides of all axes but the last, which must be contiguous; checks alignment and range.

    `why` ends the message where the alignment is not met.

    An axis of one element has whatever stride its producer left there (DLPack gives 1); it is never
    stepped along, so it gets the length of a row instead, which satisfies every rule.
    """
    shape, found, size = tensor.shape, tensor.stride(), tensor.element_size()
    if shape[-1] > 1 and found[-1] != 1:
        raise ArgumentError(f"{name} has stride {found[-1]} along {axes[-1]}: expected 1 (strides {tuple(found)})")
    result = []
    for axis, count, stride in zip(axes[:-1], shape, found, strict=False):
        if count == 1:
            stride = shape[-1]
        if not 0 <= stride < STRIDE_LIMIT:
            raise ArgumentError(f"{name} has stride {stride} along {axis}: expected 0 to {STRIDE_LIMIT - 1} elements")
        if stride * size % align:
            raise ArgumentError(
                f"{name} has a stride of {stride * size} bytes along {axis}: expected a multiple of {align}{why}"
            )
        result.append(stride)
    address(name, tensor.data_ptr(), align, why)
    return result


def distinct(name: str, tensor: Tensor) -> None:
    """Elements of an output must not share memory, as those of an expanded tensor do."""
    room = 1
    for stride, count in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < room:
            raise ArgumentError(
                f"{name} has strides {tuple(tensor.stride())}: expected elements that do not share memory (shape "
                f"{tuple(tensor.shape)})"
            )
        room = stride * count


def address(name: str, pointer: int, align: int = ALIGNMENT, why: str = "") -> None:
    """A base address, which is not null and aligned."""
    if pointer == 0 or pointer % align:
        raise ArgumentError(f"{name} lies at address {pointer:#x}: expected a multiple of {align}{why}")


def queries(name: str, tensor: Tensor, shape: Shape, prefix: str) -> Values:
    """Q or O: (num_seqs * q_len, num_q_heads, head_dim) or (num_seqs, q_len, num_q_heads, head_dim)."""
    common(name, tensor, shape.device, *Q_DTYPES[shape.q_dtype if prefix == "q" else "bf16"])
    found = tuple(tensor.shape)
    tail = (shape.num_q_heads, shape.head_dim)
    flat, full = (shape.num_seqs * shape.q_len, *tail), (shape.num_seqs, shape.q_len, *tail)
    if found == full:
        seq, token, head = strides(name, tensor, ("seq", "token", "head", "head_dim"))
    elif found == flat:
        token, head = strides(name, tensor, ("token", "head", "head_dim"))
        seq = token * shape.q_len
        if seq >= STRIDE_LIMIT:
            raise ArgumentError(
                f"{name} has stride {seq} from sequence to sequence: expected at most {STRIDE_LIMIT - 1} elements"
            )
    else:
        raise ArgumentError(
            f"{name} has shape {found}: expected {flat} or {full}, "
            "(num_seqs * q_len, num_q_heads, head_dim) or with num_seqs and q_len apart"
        )
    if prefix == "o":
        distinct(name, tensor)
    return {prefix: tensor.data_ptr(), f"{prefix}_seq": seq, f"{prefix}_token": token, f"{prefix}_head": head}


def caches(k: Tensor, v: Tensor, shape: Shape) -> Values:
    """K and V: logical views (num_pages, page_size, num_kv_heads, row) of one dtype.

    A row is head_dim elements, or head_dim * bits / 8 bytes of a format below 8 bits.
    """
    values: Values = {}
    bits = KV_BITS[shape.kv_format]
    size = max(1, bits // 8)
    packed = bits < 8
    why = f" for padded tensor maps (impl='mma' takes {ALIGNMENT})" if shape.kv_align > ALIGNMENT else ""
    row = "head_dim" + (f" * {bits} / 8" if packed else "")
    expected = (shape.page_size, shape.num_kv_heads, shape.head_dim * bits // 8 if packed else shape.head_dim)
    for name, prefix, tensor in (("k_cache", "k", k), ("v_cache", "v", v)):
        common(name, tensor, shape.device, *KV_DTYPES[shape.kv_format])
        found = tuple(tensor.shape)
        if len(found) != 4 or found[1:] != expected or found[0] < 1:
            raise ArgumentError(
                f"{name} has shape {found}: expected (num_pages, {', '.join(map(str, expected))}), "
                f"(num_pages, page_size, num_kv_heads, {row})"
            )
        found_strides = strides(name, tensor, ("page", "row", "head", "head_dim"), align=shape.kv_align, why=why)
        page, key, head = (step * size for step in found_strides)
        for axis, step in (("page", page), ("row", key), ("head", head)):
            if step * 8 % bits:
                raise ArgumentError(
                    f"{name} has a stride of {step} bytes along {axis}: expected a multiple of 48, for whole codes"
                )
        values |= {
            prefix: tensor.data_ptr(),
            f"{prefix}_page_bytes": page,
            f"{prefix}_row_bytes": key,
            f"{prefix}_head_bytes": head,
        }
    if v.dtype != k.dtype:
        raise ArgumentError(f"v_cache has dtype {v.dtype}: expected {k.dtype}, the dtype of k_cache")
    if v.shape[0] != k.shape[0]:
        raise ArgumentError(f"v_cache has {v.shape[0]} pages: expected {k.shape[0]}, as k_cache has")
    values["num_pages"] = k.shape[0]
    return values


def block_scales(k_scales: Tensor | None, v_scales: Tensor | None, num_pages: int, shape: Shape) -> Values:
    """e4m3 (num_pages, page_size, num_kv_heads, head_dim / 16) of K and of V for nvfp4, None for other formats."""
    values: Values = {}
    row = shape.head_dim // NVFP4_BLOCK
    for name, tensor in (("k_scales", k_scales), ("v_scales", v_scales)):
        if shape.kv_format != "nvfp4":
            if tensor is not None:
                raise ArgumentError(f"{name} is given: expected None for kv_format {shape.kv_format!r}")
            continue
        if tensor is None:
            raise ArgumentError(f"{name} = None: expected a tensor, as nvfp4 keeps a scale for every 16 elements")
        common(name, tensor, shape.device, *E4M3_DTYPES)
        expected = (num_pages, shape.page_size, shape.num_kv_heads, row)
        if tuple(tensor.shape) != expected:
            raise ArgumentError(
                f"{name} has shape {tuple(tensor.shape)}: expected {expected}, "
                "(num_pages, page_size, num_kv_heads, head_dim / 16)"
            )
        page, key, head = strides(name, tensor, ("page", "row", "head", "block"), align=min(16, row))
        values |= {
            name: tensor.data_ptr(),
            f"{name}_page_bytes": page,
            f"{name}_row_bytes": key,
            f"{name}_head_bytes": head,
        }
    return values


def block_table(table: Tensor, shape: Shape, longest: int) -> Values:
    """int32 (num_seqs, max_blocks), wide enough for the longest sequence."""
    common("block_table", table, shape.device, "torch.int32")
    found = tuple(table.shape)
    if len(found) != 2 or found[0] != shape.num_seqs or found[1] < 1:
        raise ArgumentError(f"block_table has shape {found}: expected ({shape.num_seqs}, max_blocks)")
    (stride,) = strides("block_table", table, ("seq", "block"), align=4)
    if found[1] * shape.page_size < longest:
        raise ArgumentError(
            f"block_table has {found[1]} columns of {shape.page_size} keys: expected at least "
            f"{-(-longest // shape.page_size)}, as the longest sequence has {longest} keys"
        )
    return {"block_table": table.data_ptr(), "block_table_stride": stride}


def descale(name: str, tensor: Tensor, shape: Shape) -> Values:
    """fp32 of one element, (num_kv_heads,) or (num_seqs, num_kv_heads)."""
    if not hasattr(tensor, "data_ptr"):
        raise ArgumentError(f"{name} is a {type(tensor).__name__}: expected None, a number or a torch tensor")
    common(name, tensor, shape.device, "torch.float32")
    found, by_head = tuple(tensor.shape), (shape.num_kv_heads,)
    if math.prod(found) == 1:
        seq = head = 0
    elif found == by_head:
        seq, head = 0, tensor.stride(0)
    elif found == (shape.num_seqs, *by_head):
        seq, head = tensor.stride()
    else:
        raise ArgumentError(f"{name} has shape {found}: expected 1 element, {by_head} or {(shape.num_seqs, *by_head)}")
    for stride in (seq, head):
        if not 0 <= stride < STRIDE_LIMIT:
            raise ArgumentError(f"{name} has stride {stride}: expected 0 to {STRIDE_LIMIT - 1} elements")
    address(name, tensor.data_ptr(), 4)
    return {name: tensor.data_ptr(), f"{name}_seq": seq, f"{name}_head": head}


def lse(tensor: Tensor, shape: Shape) -> Values:
    """fp32 (num_seqs, num_kv_heads, n_q), contiguous."""
    common("lse", tensor, shape.device, "torch.float32")
    if tuple(tensor.shape) != shape.lse:
        raise ArgumentError(f"lse has shape {tuple(tensor.shape)}: expected {shape.lse}, (num_seqs, num_kv_heads, n_q)")
    if not tensor.is_contiguous():
        raise ArgumentError(f"lse has strides {tuple(tensor.stride())}: expected a contiguous tensor")
    address("lse", tensor.data_ptr(), 4)
    return {"lse": tensor.data_ptr()}


def sinks(tensor: Tensor | None, shape: Shape, *, wanted: bool) -> Values:
    """fp32 (num_q_heads,), contiguous: natural logits; given where the decode was made for them, and only there."""
    _wanted("sinks", tensor, wanted)
    if tensor is None:
        return {}
    common("sinks", tensor, shape.device, "torch.float32")
    if tuple(tensor.shape) != (shape.num_q_heads,) or not tensor.is_contiguous():
        raise ArgumentError(
            f"sinks has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}: expected a contiguous "
            f"({shape.num_q_heads},), one logit for each query head"
        )
    address("sinks", tensor.data_ptr(), 4)
    return {"sinks": tensor.data_ptr()}


def q_lens(tensor: Tensor | None, shape: Shape, *, wanted: bool) -> Values:
    """int32 (num_seqs,), contiguous; the kernel cuts values to 0 to q_len."""
    _wanted("q_lens", tensor, wanted)
    if tensor is None:
        return {}
    common("q_lens", tensor, shape.device, "torch.int32")
    if tuple(tensor.shape) != (shape.num_seqs,) or not tensor.is_contiguous():
        raise ArgumentError(
            f"q_lens has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}: expected a contiguous "
            f"({shape.num_seqs},), the new tokens of each sequence"
        )
    address("q_lens", tensor.data_ptr(), 4)
    return {"q_lens": tensor.data_ptr()}


def _wanted(name: str, tensor: Tensor | None, wanted: bool) -> None:
    if wanted and tensor is None:
        raise ArgumentError(f"{name} = None: expected a tensor, as PagedDecode was made with {name}=True")
    if tensor is not None and not wanted:
        raise ArgumentError(f"{name} is given: expected None, as PagedDecode was made without {name}=True")


def window(keys: Any) -> int | None:
    """A window's size: None, or an integer that the kernel can subtract from lengths."""
    if keys is not None and (type(keys) is not int or not 1 <= keys <= MAX_WINDOW):
        raise ArgumentError(f"window = {keys!r}: expected None or an integer of 1 to {MAX_WINDOW} keys")
    return None if keys is None else int(keys)


def softcap(cap: Any) -> float | None:
    """Where scores are capped: None, or a number large enough for the kernel's fp32 to divide by."""
    if cap is None:
        return None
    found = number("softcap", cap, positive=True)
    if found < SMALLEST_SOFTCAP:
        raise ArgumentError(f"softcap = {found:g}: expected at least {SMALLEST_SOFTCAP:g}")
    return found


def workspace(tensor: Tensor, device: Any, needed: int) -> int:
    """Any contiguous tensor of at least `needed` bytes on 16; returns its address."""
    if not hasattr(tensor, "data_ptr") or not hasattr(tensor, "stride"):
        raise ArgumentError(f"workspace is a {type(tensor).__name__}: expected a torch tensor")
    if tensor.device != device:
        raise ArgumentError(f"workspace is on {tensor.device}: expected {device}")
    size = tensor.numel() * tensor.element_size()
    if size < needed:
        raise ArgumentError(f"workspace has {size} bytes: expected at least {needed}, see workspace_bytes()")
    if not tensor.is_contiguous():
        raise ArgumentError(f"workspace has strides {tuple(tensor.stride())}: expected a contiguous tensor")
    pointer: int = tensor.data_ptr()
    if needed:
        address("workspace", pointer)
    return pointer


def number(name: str, value: Any, *, positive: bool) -> float:
    """A finite Python number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ArgumentError(f"{name} = {value!r}: expected a finite number")
    if positive and value <= 0:
        raise ArgumentError(f"{name} = {value!r}: expected a number above 0")
    return float(value)
