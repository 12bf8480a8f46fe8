"""Other libraries' paged decode, where they are installed: called as their users call them, on the same cache.

docs/results/README.md says how to install them. Each runs in a process of its own (`peer_process`).

A peer that is absent is reported as absent; one that does not serve a problem, or computes something else, is
reported with what it said. No figure of a peer that was measured elsewhere is ever shown.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.shapes import Problem

WORKSPACE_BYTES = 512 << 20

Call = Callable[[], torch.Tensor]


class Peer(Protocol):
    """One library's path. `version` is empty where it is absent, and `absent` then says why."""

    name: str
    version: str
    absent: str

    def prepare(self, problem: Problem) -> Call:
        """What runs one decode step and returns its output, in the shape of `problem.q`."""


class _FlashInfer:
    def __init__(self, device: torch.device) -> None:
        self.version, self.absent = "", ""
        self.module: Any = None
        try:
            self.module = importlib.import_module("flashinfer")
        except Exception as error:  # noqa: BLE001 - a broken installation raises anything
            self.absent = _why(error)
            return
        self.version = str(self.module.__version__)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Fa2(_FlashInfer):
    """FlashInfer's own kernels: the tensor-core decode, and the prefill wrapper for several new tokens."""

    name = "flashinfer_fa2"

    def prepare(self, problem: Problem) -> Call:
        s, device = problem.shape, problem.device
        counts = torch.tensor(problem.blocks, dtype=torch.int32)
        indptr = torch.zeros(len(problem.blocks) + 1, dtype=torch.int32)
        indptr[1:] = counts.cumsum(0)
        pages = torch.cat([problem.host_table[i, :n] for i, n in enumerate(problem.blocks)]).to(device)
        last = torch.tensor(s.lens, dtype=torch.int32) - (counts - 1) * s.page_size
        dtypes = {"q_data_type": torch.bfloat16, "kv_data_type": problem.kv_dtype}
        wrapper: Any
        if s.q_len == 1:
            wrapper = self.module.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
            wrapper.plan(indptr, pages, last, s.h_q, s.h_k, s.d, s.page_size, **dtypes)
        else:
            wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "HND", backend="fa2")
            tokens = torch.arange(0, len(s.lens) + 1, dtype=torch.int32, device=device) * s.q_len
            wrapper.plan(
                tokens, indptr.to(device), pages, last.to(device), s.h_q, s.h_k, s.d, s.page_size, causal=True, **dtypes
            )
        return lambda: wrapper.run(problem.q, problem.kv)


class Xqa(_FlashInfer):
    """FlashInfer's XQA kernels."""

    name = "flashinfer_xqa"

    def prepare(self, problem: Problem) -> Call:
        s = problem.shape
        lens = torch.tensor(s.lens, dtype=torch.int32, device=problem.device)
        run = self.module.decode.trtllm_batch_decode_with_kv_cache
        mask = None if s.q_len == 1 else draft_mask(len(s.lens), s.q_len).to(problem.device)
        self.workspace.zero_()  # its semaphores start at zero, and fa2 used the same kind of workspace

        def call() -> torch.Tensor:
            out: torch.Tensor = run(
                problem.q, problem.kv, self.workspace, problem.table, lens, max(s.lens), s.d**-0.5, 1.0,
                kv_layout="HND", backend="xqa", q_len_per_req=s.q_len, mask=mask,
            )  # fmt: skip
            return out

        return call


def draft_mask(num_seqs: int, q_len: int) -> torch.Tensor:
    """The causal mask of new tokens as XQA takes it: uint16 (num_seqs, q_len, 2 * ceil(q_len / 32)).

    Bit j of row i, counted from the least significant bit of the first word, is set where token i sees token j.
    """
    words = 2 * -(-q_len // 32)
    rows = [[min(max((2 << i) - 1 >> 16 * word, 0), 0xFFFF) & 0xFFFF for word in range(words)] for i in range(q_len)]
    return torch.tensor(rows, dtype=torch.int32).to(torch.uint16).expand(num_seqs, q_len, words).contiguous()


class Fa3:
    """FlashAttention 3 as vLLM builds it: the library whose path is in the environment variable FA3_SO.

    It takes NHD pages; with an fp8 cache it takes an fp8 Q too, so it does less work and rounds more.
    """

    name = "fa3_vllm"

    def __init__(self, device: torch.device) -> None:
        self.version, self.absent = "", ""
        path = os.environ.get("FA3_SO", "")
        try:
            ops: Any = torch.ops
            ops.load_library(path)
            self._forward: Any = ops._vllm_fa3_C.fwd
        except Exception as error:  # noqa: BLE001 - the loader raises anything
            self.absent = _why(error)
            return
        self.version = os.path.basename(path)

    def prepare(self, problem: Problem) -> Call:
        s, device = problem.shape, problem.device
        fp8 = problem.kv_format == "fp8"
        q = problem.q.to(problem.kv_dtype)
        k, v = problem.k.contiguous(), problem.v.contiguous()
        tokens = torch.arange(0, len(s.lens) + 1, dtype=torch.int32, device=device) * s.q_len
        lens = torch.tensor(s.lens, dtype=torch.int32, device=device)
        ones = torch.ones(len(s.lens), s.h_k, device=device) if fp8 else None

        def call() -> torch.Tensor:
            out: torch.Tensor = self._forward(
                q, k, v, None, None, None, None, tokens, None, None, None, lens, s.q_len, max(s.lens), problem.table,
                None, None, None, None, None, ones, ones, ones, 1.0 / math.sqrt(s.d), True, -1, -1, 0.0, True,
                None, 0, None, 0, None, 1, 0, None,
            )[0]  # fmt: skip
            return out

        return call


PEERS: dict[str, Callable[[torch.device], Peer]] = {cls.name: cls for cls in (Fa2, Xqa, Fa3)}


def absent(name: str) -> str:
    """Why a peer of PEERS is certainly not there, found without importing it; empty where it may be."""
    if name == Fa3.name:
        path = os.environ.get("FA3_SO", "")
        if not path:
            return "FA3_SO is not set"
        return "" if os.path.isfile(path) else f"FA3_SO = {path}: no such file"
    return "" if importlib.util.find_spec("flashinfer") else "flashinfer is not installed"


def _why(error: Exception) -> str:
    return first_line(error)[:100]


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
