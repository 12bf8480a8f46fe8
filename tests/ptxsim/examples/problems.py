"""Small problems for the CuTe DSL example kernels: inputs, what the kernel must compute (float64), and how near."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cubinery.aot.ptxsim.isa import formats

LN2 = float(np.log(2.0))


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors in the order of the host function's pointers, and the results that must come out."""

    tensors: tuple[torch.Tensor, ...]
    expected: dict[int, tuple[torch.Tensor, float]]
    """Argument -> (float64 reference, largest allowed error)."""

    def errors(self) -> dict[int, float]:
        """Largest error of each result after a run."""
        return {i: float((self.tensors[i].double() - want).abs().max()) for i, (want, _) in self.expected.items()}

    def check(self) -> None:
        for i, error in self.errors().items():
            assert error <= self.expected[i][1], f"argument {i}: error {error}"


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel on one problem: what `hosts.py` compiles, and the data."""

    kind: str
    settings: dict[str, Any]
    make: Callable[[dict[str, Any]], Problem]
    schedules: tuple[str, ...] = field(default=("fair", "late:0", "priorities:0"))


def dense(s: dict[str, Any]) -> Problem:
    """Products of fp16 and fp8 are exact in f32, so only the order of the sum differs."""
    m, n, k = s["mnk"]
    dtype = {"Float16": torch.float16, "Float8E4M3FN": torch.float8_e4m3fn}[s["dtype"]]
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    return Problem((a, b, torch.zeros(m, n)), {2: (a.double() @ b.double().T, 1e-4)})


def scaled(s: dict[str, Any]) -> Problem:
    """Operands of e4m3 or e2m1 with a scale for each group along K, scales in the tensor core's order."""
    m, n, k = s["mnk"]
    a, a_scales, a_values = _scaled_operand(m, k, s)
    b, b_scales, b_values = _scaled_operand(n, k, s)
    want = torch.from_numpy(a_values @ b_values.T)
    return Problem((a, b, a_scales, b_scales, torch.zeros(m, n)), {4: (want, 1e-6 * float(want.abs().max()))})


def _scaled_operand(rows: int, k: int, s: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
    random, group = np.random.default_rng(rows + k), s["group"]
    narrow = s["dtype"] == "Float4E2M1FN"
    codes = random.integers(0, 16 if narrow else 256, (rows, k)).astype(np.uint8)
    codes = codes if narrow else codes & 0xBF  # below 2 and never NaN
    powers = s["scale"] == "Float8E8M0FNU"
    scales = (
        random.integers(124, 131, (rows, k // group)) if powers else random.integers(0x30, 0x48, (rows, k // group))
    )
    scales = scales.astype(np.uint8)
    factors = formats.ue8m0_value(scales) if powers else formats.decode(scales, "e4m3")
    values = formats.decode(codes, "e2m1" if narrow else "e4m3").astype(np.float64)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4 if narrow else codes
    # Blocks of 128 rows and 4 scales: 32 rows of 16 bytes, 4 bytes for each quarter of the rows.
    blocks = scales.reshape(rows // 128, 4, 32, -1, 4).transpose(0, 3, 2, 1, 4)
    values = values * np.repeat(factors.astype(np.float64), group, axis=1)
    return torch.from_numpy(np.ascontiguousarray(packed)), torch.from_numpy(np.ascontiguousarray(blocks)), values


def attention(s: dict[str, Any]) -> Problem:
    """The probabilities are rounded to fp16 before the second product."""
    dim, (hq, hk) = s["dim"], s["heads"]
    q = torch.randn(s["queries"], hq, dim).half()
    k, v = (torch.randn(s["keys"], hk, dim).half() for _ in range(2))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(hq // hk, 1)) * dim**-0.5
    if s["causal"]:
        scores = scores.masked_fill(torch.ones(s["queries"], s["keys"]).triu(1).bool(), -torch.inf)
    want = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v.double().repeat_interleave(hq // hk, 1))
    return Problem((q, k, v, torch.zeros_like(q)), {3: (want, 2e-3)})


def decode(s: dict[str, Any]) -> Problem:
    """int8 keys and values with a bf16 scale a key; probabilities and output are bf16."""
    keys, dim, heads, splits = s["keys"], s["dim"], s["heads"], s["splits"]
    q = torch.randn(heads, dim).bfloat16()
    k, v = (torch.randint(-64, 64, (keys, dim), dtype=torch.int8) for _ in range(2))
    k_scale, v_scale = ((torch.rand(keys) * 0.02 + 0.01).bfloat16() for _ in range(2))
    scores = q.double() @ (k.double() * k_scale.double()[:, None]).T * dim**-0.5
    want = torch.softmax(scores, -1) @ (v.double() * v_scale.double()[:, None])
    low = -torch.inf
    results = (torch.zeros(heads, dim).bfloat16(), torch.full((heads,), low), torch.zeros(heads))
    partial = (torch.zeros(splits, heads, dim), torch.full((splits, heads), low), torch.zeros(splits, heads))
    lse = torch.logsumexp(scores, -1)
    return Problem((q, k, v, k_scale, v_scale, *results, *partial), {5: (want, 2e-3), 7: (lse, 2e-2)})


def latent(s: dict[str, Any]) -> Problem:
    """Paged fp8 cache, the pages in reverse; probabilities are fp8, the LSE counts in powers of two."""
    heads, page, pages = s["heads"], s["page"], s["keys"] // s["page"]

    def fp8(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(torch.float8_e4m3fn)

    q, q_rope, cache, rope = fp8(heads, 512), fp8(heads, 64), fp8(pages, page, 512), fp8(pages, page, 64)
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    kv, k_rope = cache.double().flip(0).flatten(0, 1), rope.double().flip(0).flatten(0, 1)
    scores = (q.double() @ kv.T + q_rope.double() @ k_rope.T) * 576**-0.5
    want = torch.softmax(scores, -1) @ kv
    o, lse = torch.zeros(heads, 512).bfloat16(), torch.zeros(heads)
    tensors = (q, q_rope, cache, rope, table, o, lse, torch.tensor([s["keys"]], dtype=torch.int32))
    return Problem(tensors, {5: (want, 3e-2), 6: (torch.logsumexp(scores, -1) / LN2, 1e-5)})


def _gemm(dtype: str, mnk: tuple[int, int, int], tile: tuple[int, int], pair: bool, store: bool) -> Case:
    return Case("dense", {"dtype": dtype, "mnk": mnk, "tile": tile, "pair": pair, "store": store}, dense)


def _scaled(
    dtype: str, scale: str, group: int, mnk: tuple[int, int, int], tile: tuple[int, int], ctas: tuple[int, int]
) -> Case:
    settings = {"dtype": dtype, "scale": scale, "group": group, "mnk": mnk, "tile": tile, "cluster": ctas}
    return Case("scaled", settings, scaled)


PRODUCTS: dict[str, Case] = {
    "gemm-fp16": _gemm("Float16", (128, 64, 128), (128, 64), False, False),
    "gemm-fp16-pair": _gemm("Float16", (256, 64, 128), (256, 64), True, True),
    "gemm-fp8": _gemm("Float8E4M3FN", (128, 64, 128), (128, 64), False, True),
    "gemm-fp8-pair": _gemm("Float8E4M3FN", (256, 64, 256), (256, 64), True, True),
    "gemm-mxfp8": _scaled("Float8E4M3FN", "Float8E8M0FNU", 32, (128, 128, 256), (128, 128), (1, 1)),
    "gemm-mxfp8-pair": _scaled("Float8E4M3FN", "Float8E8M0FNU", 32, (256, 128, 128), (256, 128), (2, 1)),
    "gemm-nvfp4": _scaled("Float4E2M1FN", "Float8E4M3FN", 16, (128, 128, 256), (128, 128), (1, 1)),
    "fmha": Case(
        "attention",
        {"dtype": "Float16", "keys": 256, "queries": 256, "dim": 64, "heads": (1, 1), "causal": False},
        attention,
    ),
    "fmha-causal-d128": Case(
        "attention",
        {"dtype": "Float16", "keys": 256, "queries": 256, "dim": 128, "heads": (2, 1), "causal": True},
        attention,
        ("fair", "late:0"),
    ),
}
DECODE = Case("decode", {"keys": 512, "dim": 128, "heads": 8, "splits": 1}, decode)
LATENT = Case("latent", {"keys": 256, "heads": 128, "page": 128}, latent)
