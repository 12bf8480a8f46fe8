"""The cache writer: quantise new rows of K and V and append them to a paged cache, one launch for both.

A thread owns 16 consecutive elements (8 of bf16) of one token and KV head, in K and in V; neighbours own neighbouring
elements, then heads, then tokens, so that loads and stores coalesce in every layout. It requests its elements before
it knows the token's slot, which only the stores need. Rows of 6-bit codes change hands between four threads, so that
stores are of 16 bytes.

A token whose slot is negative or past the cache is skipped. Rounding is that of the host quantisers, to the bit.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.runtime import make_ptr

from cubinery.aot.kernels.common import narrow, ptx
from cubinery.aot.kernels.common.memory import load_f32
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.formats import E2M1, E4M3, ELEMENTS, row_bytes


class CacheAppend:
    """Traces the cache writer of one configuration."""

    def __init__(self, config: AppendConfig) -> None:
        self.config = config
        self.fmt = ELEMENTS.get(config.kv_format)
        self.bits = 16 if self.fmt is None else self.fmt.bits
        self.thread_bytes = row_bytes(config.thread_elements, self.bits)
        """Bytes of the cache that a thread's elements take, in K and in V."""

    @cute.jit
    def __call__(
        self,
        k: cute.Pointer,
        v: cute.Pointer,
        slot_mapping: cute.Pointer,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        k_scales: cute.Pointer,
        v_scales: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        k_page_bytes: Int64,
        v_page_bytes: Int64,
        k_scales_page_bytes: Int64,
        v_scales_page_bytes: Int64,
        num_tokens: Int32,
        num_kv_heads: Int32,
        page_size: Int32,
        num_slots: Int32,
        slot_bytes: Int32,
        k_token: Int32,
        k_head: Int32,
        v_token: Int32,
        v_head: Int32,
        k_row_bytes: Int32,
        k_head_bytes: Int32,
        v_row_bytes: Int32,
        v_head_bytes: Int32,
        k_scales_row_bytes: Int32,
        k_scales_head_bytes: Int32,
        v_scales_row_bytes: Int32,
        v_scales_head_bytes: Int32,
        k_descale_token: Int32,
        k_descale_head: Int32,
        v_descale_token: Int32,
        v_descale_head: Int32,
        k_descale_value: Float32,
        v_descale_value: Float32,
        stream: cuda.CUstream,
    ) -> None:
        """Fix the order and types of the kernel's parameters, and the attributes of its launch."""
        self.kernel.set_name_prefix("cubinery_paged_decode_append", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            k, v, slot_mapping, k_cache, v_cache, k_scales, v_scales, k_descale, v_descale, k_page_bytes, v_page_bytes,
            k_scales_page_bytes, v_scales_page_bytes, num_tokens, num_kv_heads, page_size, num_slots, slot_bytes,
            k_token, k_head, v_token, v_head, k_row_bytes, k_head_bytes, v_row_bytes, v_head_bytes,
            k_scales_row_bytes, k_scales_head_bytes, v_scales_row_bytes, v_scales_head_bytes, k_descale_token,
            k_descale_head, v_descale_token, v_descale_head, k_descale_value, v_descale_value,
        ).launch(
            grid=(1, 1, 1), block=(self.config.THREADS, 1, 1), stream=stream, use_pdl=self.config.pdl
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        k: cute.Pointer,
        v: cute.Pointer,
        slot_mapping: cute.Pointer,
        k_cache: cute.Pointer,
        v_cache: cute.Pointer,
        k_scales: cute.Pointer,
        v_scales: cute.Pointer,
        k_descale: cute.Pointer,
        v_descale: cute.Pointer,
        k_page_bytes: Int64,
        v_page_bytes: Int64,
        k_scales_page_bytes: Int64,
        v_scales_page_bytes: Int64,
        num_tokens: Int32,
        num_kv_heads: Int32,
        page_size: Int32,
        num_slots: Int32,
        slot_bytes: Int32,
        k_token: Int32,
        k_head: Int32,
        v_token: Int32,
        v_head: Int32,
        k_row_bytes: Int32,
        k_head_bytes: Int32,
        v_row_bytes: Int32,
        v_head_bytes: Int32,
        k_scales_row_bytes: Int32,
        k_scales_head_bytes: Int32,
        v_scales_row_bytes: Int32,
        v_scales_head_bytes: Int32,
        k_descale_token: Int32,
        k_descale_head: Int32,
        v_descale_token: Int32,
        v_descale_head: Int32,
        k_descale_value: Float32,
        v_descale_value: Float32,
    ) -> None:
        c = self.config
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if cutlass.const_expr(c.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # Numbers are below 2^31; unsigned ones divide faster.
        unit = Uint32(block * c.THREADS + tidx)
        row = unit // c.row_threads
        part = Int32(unit % c.row_threads)
        rows = Uint32(num_tokens * num_kv_heads)
        known_row = cutlass.min(row, rows - 1)  # every thread of a warp takes part in shuffles
        token = Int32(known_row // Uint32(num_kv_heads))
        head = Int32(known_row) - token * num_kv_heads

        slot_words = self.load_slot(slot_mapping, token, slot_bytes)
        k_words = self.load_row(k, token, head, part, k_token, k_head)
        v_words = self.load_row(v, token, head, part, v_token, v_head)
        k_factor = self.load_descale(k_descale, token, head, k_descale_token, k_descale_head, k_descale_value)
        v_factor = self.load_descale(v_descale, token, head, v_descale_token, v_descale_head, v_descale_value)

        slot = self.checked_slot(slot_words, slot_bytes, num_slots, row < rows)
        page = Int32(Uint32(slot) // Uint32(page_size))
        place = slot - page * page_size
        k_target = k_cache.toint() + page * k_page_bytes + Int64(place) * k_row_bytes + Int64(head) * k_head_bytes
        v_target = v_cache.toint() + page * v_page_bytes + Int64(place) * v_row_bytes + Int64(head) * v_head_bytes
        k_scale_target = Int64(0)
        v_scale_target = Int64(0)
        if cutlass.const_expr(c.kv_format == "nvfp4"):
            k_scale_target = (
                k_scales.toint() + page * k_scales_page_bytes + Int64(place) * k_scales_row_bytes
                + Int64(head) * k_scales_head_bytes + part
            )  # fmt: skip
            v_scale_target = (
                v_scales.toint() + page * v_scales_page_bytes + Int64(place) * v_scales_row_bytes
                + Int64(head) * v_scales_head_bytes + part
            )  # fmt: skip
        self.store(k_words, k_factor, slot, part, tidx, k_target, k_scale_target)
        self.store(v_words, v_factor, slot, part, tidx, v_target, v_scale_target)

    def load_slot(self, slot_mapping, token, slot_bytes):
        """(low, high) words of a token's slot; where it has one word, that word twice."""
        address = slot_mapping.toint() + Int64(token) * slot_bytes
        return ptx.load_global_i32(address), ptx.load_global_i32(address + (slot_bytes - 4))

    def checked_slot(self, slot_words, slot_bytes, num_slots, is_row):
        """The slot of a row of this launch, -1 where there is none or it lies outside the cache."""
        low, high = slot_words
        inside = is_row & ((slot_bytes == 4) | (high == 0)) & (low >= 0) & (low < num_slots)
        return cutlass.select_(inside, low, Int32(-1))

    def load_row(self, pointer, token, head, part, token_stride, head_stride):
        """This thread's elements of a new row, two in a word."""
        first = Int64(token) * token_stride + Int64(head) * head_stride + part * self.config.thread_elements
        address = pointer.toint() + first * 2
        return [w for i in range(self.config.thread_elements // 8) for w in ptx.load_global_v4(address + 16 * i)]

    @cute.jit
    def load_descale(self, pointer, token, head, token_stride, head_stride, value):
        """What divides this row: `value` where there is no tensor."""
        factor = value
        if cutlass.const_expr(self.fmt is not None):
            if pointer.toint() != 0:
                factor = load_f32(pointer, Int64(token) * token_stride + Int64(head) * head_stride)
        return factor

    @cute.jit
    def store(self, words, factor, slot, part, tidx, target, scale_target):
        """Quantise this thread's elements and store them at its part of the row at `target`, unless slot < 0."""
        scale_code = Uint32(0)
        if cutlass.const_expr(self.fmt is not None):
            words, scale_code = self.quantise(words, factor, self.fmt)
        if cutlass.const_expr(self.bits == 6):
            words = narrow.gather_quad(words, tidx)
            if (slot >= 0) & (part % 4 != 3):
                ptx.store_global_v4(target + (part // 4) * (4 * self.thread_bytes) + (part % 4) * 16, words)
        elif slot >= 0:
            address = target + part * self.thread_bytes
            if cutlass.const_expr(len(words) == 2):
                ptx.store_global_v2(address, words)
            else:
                ptx.store_global_v4(address, words)
            if cutlass.const_expr(self.config.kv_format == "nvfp4"):
                ptx.store_global_u8(scale_target, scale_code)

    def quantise(self, words, factor, fmt):
        """(packed codes of bf16 pairs, code of nvfp4's block scale)."""
        scale_code = Uint32(0)
        if self.config.kv_format == "nvfp4":
            scale_code, factor = self.block_scale(narrow.magnitude_bits_bf16(words), factor)
        if fmt is not E4M3:
            return narrow.pack_small(narrow.divide_for_codes(words, factor, fmt), fmt), scale_code
        values = [x for word in words for x in ptx.unpack_bf16x2(word)]
        quotients = narrow.divide(values, narrow.magnitude_bits_bf16(words), factor)
        packed = [narrow.pack_e4m3x4(quotients[i : i + 4], values[i : i + 4]) for i in range(0, len(values), 4)]
        return packed, scale_code

    def block_scale(self, top_bits, global_scale):
        """(e4m3 code of the block's scale, what its elements are divided by)."""
        top = ptx.bits_to_float(Int32(top_bits << 16))
        code = narrow.encode_e4m3(narrow.divide_slowly(top, narrow.multiply(global_scale, Float32(E2M1.max))))
        step = narrow.multiply(narrow.decode_e4m3(code), global_scale)
        # A block that is too small for its scale has code 0 everywhere.
        return code, cutlass.select_(step == 0.0, Float32(float("inf")), step)


def entry(config: AppendConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""
    pointers = [
        make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=align)
        for dtype, align in (
            (BFloat16, 16), (BFloat16, 16), (Int32, 4), (Uint8, 16), (Uint8, 16), (Uint8, 1), (Uint8, 1), (Float32, 4),
            (Float32, 4),
        )
    ]  # fmt: skip
    scalars = [Int64(1)] * 4 + [Int32(1)] * 21 + [Float32(1.0)] * 2
    return CacheAppend(config), (*pointers, *scalars, cuda.CUstream(0))
