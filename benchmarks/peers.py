"""Other libraries' paged decode, where they are installed: called as their users call them, on the same cache.

A peer that is absent is reported as absent; one that does not serve a problem, or computes something else, is
reported with what it said. No figure of a peer that was measured elsewhere is ever shown.
"""

from __future__ import annotations

import importlib
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
            wrapper = self.module.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "HND")
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
        self.workspace.zero_()  # its semaphores start at zero, and fa2 used the same kind of workspace

        def call() -> torch.Tensor:
            out: torch.Tensor = run(
                problem.q, problem.kv, self.workspace, problem.table, lens, max(s.lens), s.d**-0.5, 1.0,
                kv_layout="HND", backend="xqa", q_len_per_req=s.q_len,
            )  # fmt: skip
            return out

        return call


class Fa3:
    """FlashAttention 3 as vLLM builds it: the library whose path is in the environment variable FA3_SO.

    It takes NHD pages; with an fp8 cache it takes an fp8 Q too, so it does less work and rounds more.
    """

    name = "fa3_vllm"

    def __init__(self, device: torch.device) -> None:
        self.version, self.absent = "", ""
        path = os.environ.get("FA3_SO", "")
        if not path:
            self.absent = "FA3_SO is not set"
            return
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


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100]
