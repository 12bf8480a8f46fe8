"""The fast reference means what the plain one means: on the CPU here, and once more on the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import Case
from gpu.reference import attention
from gpu.running import Gpu

from cubinery.aot.references.paged_decode import paged_attention

PROBLEMS: list[dict[str, Any]] = [
    {"lengths": [1, 0, 17, 300]},
    {"lengths": [2, 0, 129, 64], "q_len": 4, "kv_format": "bf16", "layout": "interleaved", "page_size": 64},
    {"lengths": [2, 0, 129, 64], "q_len": 4, "causal": False, "h_q": 6, "h_k": 2, "layout": "nhd"},
    {"lengths": [5, 200], "d": 256, "page_size": 128, "h_q": 12, "h_k": 1, "layout": "flashinfer"},
    {"lengths": [5, 200, 0], "kv_format": "e3m2", "q_dtype": "e4m3", "d": 64},
    {"lengths": [5, 200, 0], "kv_format": "e2m3", "layout": "nhd"},
    {"lengths": [5, 200, 0], "kv_format": "e2m1", "layout": "interleaved", "page_size": 32},
    {"lengths": [5, 200, 0], "kv_format": "nvfp4", "q_dtype": "e4m3", "q_len": 2, "d": 256},
    {"lengths": [5, 200, 0, 77], "q_len": 3, "window": 40, "softcap": 1.5},
    {"lengths": [5, 200, 0, 77], "d": 64, "window": 1, "with_sinks": True, "kv_format": "bf16"},
    {
        "lengths": [5, 200, 0, 77, 3, 9],
        "q_len": 4,
        "with_sinks": True,
        "with_q_lens": True,
        "window": 30,
        "softcap": 3.0,
    },
    {"lengths": [5, 200, 0, 77, 3, 9], "q_len": 4, "causal": False, "with_q_lens": True},
]


def compare(problem: dict[str, Any], device: torch.device) -> None:
    case = Case(**problem, device=device, seed=3)
    b, h_k = len(case.lengths), case.h_k
    generator = torch.Generator().manual_seed(1)
    scales: dict[str, Any] = {
        "q_descale": torch.rand(b, h_k, generator=generator).to(device) + 0.5,
        "k_descale": torch.rand(h_k, generator=generator).to(device) + 0.5,
        "v_descale": torch.full((1,), 0.7, device=device),
    }
    for options in ({}, scales | {"softmax_scale": 0.11, "out_scale": -2.0}, {"v_descale": 0.5}):
        arguments = (case.q, case.k, case.v, case.table, case.lengths)
        axes: dict[str, Any] = {
            "q_len": case.q_len, "causal": case.causal, "kv_format": case.kv_format, "window": case.window,
            "softcap": case.softcap, **case.extras,
        }  # fmt: skip
        found = attention(*arguments, **axes, **options)
        expected = paged_attention(
            *(x.cpu() if isinstance(x, torch.Tensor) else x for x in arguments), **axes, **options
        )
        for a, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(a.cpu().numpy(), e, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("problem", PROBLEMS)
def test_fast_reference_equals_the_plain_one(problem: dict[str, Any]) -> None:
    compare(problem, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS)
def test_fast_reference_equals_the_plain_one_on_the_gpu(gpu: Gpu, problem: dict[str, Any]) -> None:
    compare(problem, gpu.device)
