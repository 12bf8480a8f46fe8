"""Stand-ins for the decode and planning kernels that run on host memory, given nothing but a recorded launch.

They read parameters, tensor maps, work items and strides as the real kernels do, so a test that runs the
public call against the reference proves planning, packing, addressing and counting without a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from fake_driver import FakeTensorMap, Launch

from cubinery.runtime.ops.paged_decode.formats import E4M3
from cubinery.runtime.ops.paged_decode.quantize import decode as decode_codes
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window, plan_visible

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


def is_plan(launch: Launch) -> bool:
    """The planning kernel's launch."""
    return "_plan_" in launch.symbol


def plan(launch: Launch) -> None:
    """Stand-in for the planning kernel: the host planner, from nothing but the launch."""
    v = launch.values
    given = packed(v["seq_lens"], (v["num_seqs"],), np.int64 if v["seq_len_bytes"] == 8 else np.int32)
    lengths = given.clip(0, v["max_length"]).astype(np.int64)
    span = v["window_span"]
    found = plan_visible(
        lengths, EVERYTHING if span == 2**31 - 1 else Window(span, 1), policy="thor" if v["is_thor"] else "balanced",
        num_kv_heads=v["ctas"], q_tiles=1, pad_to=v["num_work"],
        **{name: v[name] for name in ("sm_count", "ctas_per_sm", "lone_tile_cost", "item_cost", "max_splits",
                                      "force_splits", "min_chunk_tiles")},
    )  # fmt: skip
    narrow = lengths.astype(np.int32)
    packed(v["work"], (v["num_work"], 8), np.int32)[:] = found.device_work(narrow)
    packed(v["lengths"], (v["num_seqs"],), np.int32)[:] = narrow


class HostKernels:
    """`FakeDriver(on_launch=HostKernels(num_seqs, row_tile, q_len, causal))`."""

    def __init__(self, num_seqs: int, row_tile: int, q_len: int, causal: bool) -> None:
        self.num_seqs, self.row_tile, self.q_len, self.causal = num_seqs, row_tile, q_len, causal
        self.backwards = False
        """Work items end in reverse order, so that another chunk of a sequence is the last."""
        self.expected_keys: list[int] = []
        """What each launch of a kernel of clusters said of its sequences."""

    def __call__(self, launch: Launch) -> None:
        (plan if is_plan(launch) else self.decode)(launch)

    def decode(self, launch: Launch) -> None:
        """Every work item of every KV head; who completes a count merges."""
        v, (row_ctas, heads, depth) = launch.values, launch.grid
        q_tiles = row_ctas // launch.config.cluster[0]
        d = v["k_map"].extents[0]
        assert heads == v["num_kv_heads"] == v["k_map"].extents[2]
        assert q_tiles == -(-v["n_q"] // self.row_tile)
        assert v["num_pages"] == v["k_map"].extents[3]
        if "lengths" in v:  # a cluster shares the sequence that has its number
            assert depth == self.num_seqs
            lengths = packed(v["lengths"], (depth,), np.int32).tolist()
            items = [[seq, 0, length, length, 0, 1, 0, 0] for seq, length in enumerate(lengths)]
            self.expected_keys.append(v.get("expected_keys", 0))
            # The kernel looks pages up as far as this says, before it knows better.
            room = v["block_table_stride"] * v["k_map"].extents[1]
            assert self.expected_keys[-1] <= room, "the block table has no room for what the launch expects"
        else:
            items = packed(v["work"], (depth, 8), np.int32).tolist()
        for item in reversed(items) if self.backwards else items:
            if item[0] < 0:
                assert item == [-1] * 8
                continue
            n_splits, first_slot = item[5:7]
            for head in range(heads):
                self.chunk(v, item, head, d)
                first_counter = v["counters"] + 4 * (first_slot * heads + head) * q_tiles
                for q_tile in range(q_tiles if n_splits > 1 else 0):
                    counter = packed(first_counter + 4 * q_tile, (1,), np.uint32)
                    assert counter[0] < n_splits, "a counter was not zero when its launch began"
                    counter[0] = (counter[0] + 1) % n_splits
                    if counter[0] == 0:
                        rows = range(q_tile * self.row_tile, min((q_tile + 1) * self.row_tile, v["n_q"]))
                        self.merge(v, item, head, d, rows)

    def chunk(self, v: dict[str, Any], item: list[int], head: int, d: int) -> None:
        """One work item of one KV head: its rows of O and LSE, or its partial results."""
        seq, begin, end, length, slot, n_splits, _, _ = item
        heads, n_q, group = v["num_kv_heads"], v["n_q"], v["group_size"]
        k, value = cache(v["k_map"]), cache(v["v_map"])
        page_size = k.shape[1]
        assert begin % TILE == 0
        assert end <= length
        q = memory(
            v["q"], (self.num_seqs, n_q // group, heads * group, d), (v["q_seq"], v["q_token"], v["q_head"], 1),
            np.uint16,
        )  # fmt: skip
        o, lse = o_view(v, self.num_seqs, d), packed(v["lse"], (self.num_seqs, heads, n_q), np.float32)
        keys = np.arange(begin, end)
        # Only pages below the length are looked up.
        table = packed(v["block_table"] + 4 * seq * v["block_table_stride"], (v["block_table_stride"],), np.int32)
        pages, rows = table[keys // page_size], keys % page_size
        head_k, head_v = numbers(k[pages, rows, head]), numbers(value[pages, rows, head])

        def scale(name: str) -> float:
            at = seq * v[f"{name}_seq"] + head * v[f"{name}_head"]
            return float(packed(v[name] + 4 * at, (1,), np.float32)[0])

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
            if n_splits > 1:
                at = (slot * heads + head) * n_q + n
                packed(v["o_partial"] + at * d * 4, (d,), np.float32)[:] = sums
                packed(v["m_partial"] + at * 4, (1,), np.float32)[:] = top
                packed(v["l_partial"] + at * 4, (1,), np.float32)[:] = total
            else:
                o[seq, token, query] = to_bf16(v["scale_o"] * sums / total if total else sums * 0)
                lse[seq, head, n] = top + np.log(total) if total else -np.inf

    def merge(self, v: dict[str, Any], item: list[int], head: int, d: int, rows: range) -> None:
        """O and LSE of a row tile from the partial results of all chunks of its sequence."""
        seq, n_splits, first_slot = item[0], item[5], item[6]
        heads, n_q, group = v["num_kv_heads"], v["n_q"], v["group_size"]
        o, lse = o_view(v, self.num_seqs, d), packed(v["lse"], (self.num_seqs, heads, n_q), np.float32)
        for n in rows:
            start = (first_slot * heads + head) * n_q + n
            m, total = (
                memory(v[name] + start * 4, (n_splits,), (heads * n_q,), np.float32).astype(np.float64)
                for name in ("m_partial", "l_partial")
            )
            sums = memory(v["o_partial"] + start * d * 4, (n_splits, d), (heads * n_q * d, 1), np.float32)
            top = m.max()
            weights = np.exp(m - (0 if np.isinf(top) else top))
            full = (weights * total).sum()
            merged = weights @ sums / (full if full else 1)
            lse[seq, head, n] = top + np.log(full) if full else -np.inf
            o[seq, n // group, head * group + n % group] = to_bf16(v["scale_o"] * merged)
