"""Stand-ins for the decode and reduce kernels that run on host memory, given nothing but a recorded launch.

They read parameters, tensor maps, work items and strides as the real kernels do, so a test that runs the
public call against the reference proves planning, packing and addressing without a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from fake_driver import FakeTensorMap, Launch

from cubinery.runtime.ops.paged_decode.formats import E4M3
from cubinery.runtime.ops.paged_decode.quantize import decode as decode_codes

TILE = 128


def memory(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> np.ndarray:
    """A view of host memory; strides in elements."""
    size = np.dtype(dtype).itemsize
    extent = (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * size
    buffer = (ctypes.c_char * extent).from_address(address)
    return np.ndarray(shape, dtype, buffer, strides=[s * size for s in strides])


def packed(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    return memory(address, shape, strides, dtype)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def cache(tensor_map: FakeTensorMap) -> np.ndarray:
    """The stored elements (pages, page_size, heads, d) behind a K or V tensor map."""
    d, rows, heads, pages = tensor_map.extents
    row, head, page = tensor_map.strides
    wide = tensor_map.spec.dtype == "bfloat16"
    size = 2 if wide else 1
    return memory(
        tensor_map.address, (pages, rows, heads, d), (page // size, row // size, head // size, 1),
        np.uint16 if wide else np.uint8,
    )  # fmt: skip


def numbers(stored: np.ndarray) -> np.ndarray:
    """float64 values of stored elements."""
    return from_bf16(stored) if stored.dtype == np.uint16 else decode_codes(stored, E4M3).astype(np.float64)


def o_view(v: dict[str, Any], num_seqs: int, d: int) -> np.ndarray:
    tokens = v["n_q"] // v["group_size"]
    heads = v["num_kv_heads"] * v["group_size"]
    return memory(v["o"], (num_seqs, tokens, heads, d), (v["o_seq"], v["o_token"], v["o_head"], 1), np.uint16)


class HostKernels:
    """`FakeDriver(on_launch=HostKernels(num_seqs, row_tile, causal))`."""

    def __init__(self, num_seqs: int, row_tile: int, q_len: int, causal: bool) -> None:
        self.num_seqs, self.row_tile, self.q_len, self.causal = num_seqs, row_tile, q_len, causal

    def __call__(self, launch: Launch) -> None:
        (self.reduce if "reduce" in launch.symbol else self.decode)(launch)

    def decode(self, launch: Launch) -> None:
        v, (q_tiles, heads, num_work) = launch.values, launch.grid
        k, value = cache(v["k_map"]), cache(v["v_map"])
        d, page_size = k.shape[3], k.shape[1]
        n_q, group = v["n_q"], v["group_size"]
        assert heads == v["num_kv_heads"] == k.shape[2]
        assert q_tiles == -(-n_q // self.row_tile)
        assert v["num_pages"] == k.shape[0]
        work = packed(v["work"], (num_work, 4), np.int32)
        lengths = packed(v["seq_lens"], (self.num_seqs,), np.int32)
        lse = packed(v["lse"], (self.num_seqs, heads, n_q), np.float32)
        q = memory(
            v["q"], (self.num_seqs, n_q // group, heads * group, d), (v["q_seq"], v["q_token"], v["q_head"], 1),
            np.uint16,
        )  # fmt: skip
        o = o_view(v, self.num_seqs, d)
        for seq, begin, end, slot in work.tolist():
            if seq < 0:
                continue
            length = int(lengths[seq])
            assert begin % TILE == 0
            assert end <= length
            keys = np.arange(begin, end)
            # Only pages below the length are looked up.
            table = packed(v["block_table"] + 4 * seq * v["block_table_stride"], (v["block_table_stride"],), np.int32)
            pages, rows = table[keys // page_size], keys % page_size
            for head in range(heads):

                def scale(name: str, seq: int = seq, head: int = head) -> float:
                    at = seq * v[f"{name}_seq"] + head * v[f"{name}_head"]
                    return float(packed(v[name] + 4 * at, (1,), np.float32)[0])

                head_k, head_v = numbers(k[pages, rows, head]), numbers(value[pages, rows, head])
                sigma = v["scale_qs"] * scale("q_descale") * scale("k_descale")
                for n in range(n_q):
                    token, query = n // group, head * group + n % group
                    last = length - self.q_len + token if self.causal else length - 1
                    seen = keys <= last
                    scores = sigma * (head_k[seen] @ from_bf16(q[seq, token, query]))
                    top = scores.max(initial=-np.inf)
                    weights = np.exp(scores - top)
                    total = weights.sum()
                    sums = scale("v_descale") * (weights @ head_v[seen])
                    if slot >= 0:
                        at = (slot * heads + head) * n_q + n
                        packed(v["o_partial"] + at * d * 4, (d,), np.float32)[:] = sums
                        packed(v["m_partial"] + at * 4, (1,), np.float32)[:] = top
                        packed(v["l_partial"] + at * 4, (1,), np.float32)[:] = total
                    else:
                        o[seq, token, query] = to_bf16(v["scale_o"] * sums / total if total else sums * 0)
                        lse[seq, head, n] = top + np.log(total) if total else -np.inf

    def reduce(self, launch: Launch) -> None:
        v, (row_blocks, num_seqs, one) = launch.values, launch.grid
        heads, n_q, group = v["num_kv_heads"], v["n_q"], v["group_size"]
        assert (row_blocks, num_seqs, one) == (-(-heads * n_q // v["rows_per_cta"]), self.num_seqs, 1)
        d = launch.config.dynamic_smem * 8 // launch.config.block[0]  # one fp32 row a warp
        splits = packed(v["splits"], (self.num_seqs, 2), np.int32)
        lse = packed(v["lse"], (self.num_seqs, heads, n_q), np.float32)
        o = o_view(v, self.num_seqs, d)
        for seq, (count, first) in enumerate(splits.tolist()):
            if count <= 1:
                continue
            shape = (count, heads, n_q)
            start = first * heads * n_q
            m, total = (packed(v[name] + start * 4, shape, np.float32) for name in ("m_partial", "l_partial"))
            sums = packed(v["o_partial"] + start * d * 4, (*shape, d), np.float32)
            top = m.max(axis=0)
            weights = np.exp(m - np.where(np.isinf(top), 0, top))
            full = (weights * total).sum(axis=0)
            merged = (weights[..., None] * sums).sum(axis=0) / np.where(full == 0, 1, full)[..., None]
            lse[seq] = np.where(full > 0, top + np.log(np.where(full > 0, full, 1)), -np.inf)
            for head in range(heads):
                for n in range(n_q):
                    o[seq, n // group, head * group + n % group] = to_bf16(v["scale_o"] * merged[head, n])
