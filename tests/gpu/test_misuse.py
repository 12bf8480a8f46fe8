"""Wrong arguments on real device memory: named before anything is launched, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu.problems import Case, same_bits
from gpu.running import Gpu, check, run

from cubinery.runtime.errors import ArgumentError, ConfigError, KernelNotFoundError, PlanError
from cubinery.runtime.ops.paged_decode.op import PagedDecode

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])


class Refused:
    """Checks that a run raises ArgumentError, launches nothing and leaves its outputs alone."""

    def __init__(self, gpu: Gpu, case: Case, launches: list[str]) -> None:
        self.case, self.launches = case, launches
        self.plan = gpu.plan(case, force_splits=3)
        self.out = torch.full_like(case.q, 3.0)
        self.lse = torch.full(self.plan.shape.lse, 3.0, device=gpu.device)
        self.workspace = torch.empty(self.plan.workspace_bytes(), dtype=torch.uint8, device=gpu.device)

    def __call__(self, match: str, **changes: Any) -> None:
        c = self.case
        given: dict[str, Any] = {
            "q": c.q, "k_cache": c.k, "v_cache": c.v, "block_table": c.table, "out": self.out, "lse": self.lse,
            "workspace": self.workspace,
        }  # fmt: skip
        with pytest.raises(ArgumentError, match=match):
            self.plan.run(**(given | changes))
        assert not self.launches
        assert bool((self.out == 3).all())
        assert bool((self.lse == 3).all())


@pytest.fixture
def refused(gpu: Gpu, launches: list[str]) -> Callable[..., Refused]:
    def make(**fields: Any) -> Refused:
        return Refused(gpu, gpu.case([300, 77], **fields), launches)

    return make


Make = Callable[..., Refused]


@FORMATS
def test_edge_25_strides_that_tma_cannot_take(refused: Make, gpu: Gpu, kv_format: str) -> None:
    r = refused(kv_format=kv_format, d=256, h_q=24, h_k=4, page_size=128)
    c = r.case
    item = c.k.element_size()
    pages, ps, heads, d = c.k.shape

    def padded(row: int) -> torch.Tensor:
        """K (num_pages, ps, 1.., d) whose rows are `row` elements apart."""
        return c.kernel_view(torch.zeros(pages, heads, ps, row, dtype=c.raw["k"].dtype, device=gpu.device))[
            ..., :d
        ].transpose(1, 2)

    row = 264 if item == 1 else 260
    r(f"k_cache has a stride of {row * item} bytes along row: expected a multiple of 16", k_cache=padded(row))
    r("v_cache has a stride of .* along row: expected a multiple of 16", v_cache=padded(row))
    sparse = c.kernel_view(torch.zeros(pages, ps, heads, 2 * d, dtype=c.raw["k"].dtype, device=gpu.device))[..., ::2]
    r("k_cache has stride 2 along head_dim: expected 1", k_cache=sparse)
    r(
        "q has stride 2 along head_dim: expected 1",
        q=torch.zeros(2, 24, 512, dtype=torch.bfloat16, device=gpu.device)[..., ::2],
    )
    r(
        "q has a stride of .* expected a multiple of 16",
        q=torch.zeros(2, 24, 260, dtype=torch.bfloat16, device=gpu.device)[..., :256],
    )
    r(
        "out has a stride of .* expected a multiple of 16",
        out=torch.zeros(2, 24, 260, dtype=torch.bfloat16, device=gpu.device)[..., :256],
    )
    shifted = torch.zeros(c.k.numel() + 8, dtype=c.raw["k"].dtype, device=gpu.device)[4:-4].view(c.k.shape)
    r("k_cache lies at address .*: expected a multiple of 16", k_cache=c.kernel_view(shifted))


def test_edge_25_a_stride_of_two_to_the_31(refused: Make, gpu: Gpu) -> None:
    r = refused()
    ps, heads, d = r.case.k.shape[1:]
    memory = torch.empty(2**31 + ps * heads * d, dtype=torch.uint8, device=gpu.device)
    far = memory.as_strided((2, ps, heads, d), (2**31, heads * d, d, 1))
    r("k_cache has stride 2147483648 along page: expected 0 to 2147483647", k_cache=far, v_cache=far)
    # The largest stride that is allowed reads the right page.
    case = gpu.case([17], spare_blocks=0, h_q=8, h_k=2)
    near = memory.as_strided((2, ps, heads, d), (2**31 - 16, heads * d, d, 1))
    near.copy_(case.raw["k"][case.table[0].long()])
    plan = gpu.plan(case)
    expected = run(plan, case)
    case.k = case.kernel_view(near)
    case.v = case.kernel_view(case.raw["v"][case.table[0].long()])
    case.table = torch.tensor([[0, 1]], dtype=torch.int32, device=gpu.device)
    out, lse = run(plan, case)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@FORMATS
def test_edge_26_views_of_8_and_16_bit_caches(refused: Make, gpu: Gpu, kv_format: str) -> None:
    """fp8 codes may come as uint8; no other dtype may, and a byte view of a bf16 cache is none."""
    r = refused(kv_format=kv_format)
    c = r.case
    if kv_format == "fp8":
        r("v_cache has dtype torch.uint8: expected torch.float8_e4m3fn, the dtype of k_cache", v_cache=c.raw["v"])
        r(
            "k_cache has dtype torch.int8: expected torch.float8_e4m3fn or torch.uint8",
            k_cache=c.raw["k"].view(torch.int8),
        )
        r("k_cache has dtype torch.float8_e5m2", k_cache=c.raw["k"].view(torch.float8_e5m2))
        r("k_cache has dtype torch.bfloat16", k_cache=torch.zeros(c.k.shape, dtype=torch.bfloat16, device=gpu.device))
    else:
        r("k_cache has dtype torch.uint8: expected torch.bfloat16", k_cache=c.raw["k"].view(torch.uint8))
        r("k_cache has dtype torch.float16: expected torch.bfloat16", k_cache=c.raw["k"].view(torch.float16))
        r(
            "k_cache has dtype torch.float8_e4m3fn",
            k_cache=torch.zeros(c.k.shape, dtype=torch.float8_e4m3fn, device=gpu.device),
        )


def test_edge_26_uint8_codes_give_the_same_bits(gpu: Gpu) -> None:
    case = gpu.case([300, 77])
    plan = gpu.plan(case, force_splits=3)
    expected = run(plan, case)
    out, lse = plan.run(case.q, case.raw["k"], case.raw["v"], case.table)
    check(plan, case, out, lse)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


def test_wrong_tensors(refused: Make, gpu: Gpu) -> None:
    r = refused()
    c, dev = r.case, gpu.device
    r("q is on cpu: expected cuda", q=c.q.cpu())
    r("k_cache is on cpu", k_cache=c.k.cpu())
    r("block_table is on cpu", block_table=c.table.cpu())
    r("out is on cpu", out=r.out.cpu())
    r("q has dtype torch.float16: expected torch.bfloat16", q=c.q.half())
    r("q is a list: expected a torch tensor", q=[1.0])
    r("q has shape", q=c.q[:1])
    r("q has shape", q=c.q[:, :4])
    r("k_cache has shape", k_cache=c.k[:, :8])
    r("v_cache has .* pages: expected", v_cache=c.v[:-1])
    r("block_table has dtype torch.int64: expected torch.int32", block_table=c.table.long())
    r("block_table has shape", block_table=c.table[:1])
    r("block_table has 3 columns of 16 keys: expected at least 19", block_table=c.table[:, :3])
    r("block_table has stride 2 along block", block_table=torch.zeros(2, 80, dtype=torch.int32, device=dev)[:, ::2])
    r("out has dtype torch.float32: expected torch.bfloat16", out=r.out.float())
    r("lse has dtype torch.bfloat16: expected torch.float32", lse=r.lse.bfloat16())
    r("lse has shape", lse=r.lse[:1])
    r("lse has strides", lse=r.lse.transpose(1, 2).contiguous().transpose(1, 2))
    size = r.plan.workspace_bytes()
    r(f"workspace has {size - 1} bytes: expected at least {size}", workspace=r.workspace[:-1])
    r("workspace is on cpu", workspace=r.workspace.cpu())
    r("workspace lies at address", workspace=torch.empty(size + 4, dtype=torch.uint8, device=dev)[4:])
    r("k_descale has shape", k_descale=torch.ones(3, device=dev))
    r("v_descale has dtype", v_descale=torch.ones(1, device=dev, dtype=torch.float64))
    r("q_descale is on cpu", q_descale=torch.ones(1))
    r("k_descale = -1", k_descale=-1.0)
    r("softmax_scale = 0", softmax_scale=0.0)
    r("softmax_scale = nan", softmax_scale=float("nan"))
    r("out_scale = inf", out_scale=float("inf"))
    r("stream = 'x'", stream="x")


@pytest.mark.parametrize("bad", [-1, 10**6])
def test_a_block_table_is_checked_on_request(refused: Make, bad: int) -> None:
    r = refused()
    table = r.case.table.clone()
    table[1, 2] = bad
    r(rf"block_table\[1, 2\] = {bad}: expected a page", block_table=table, check_block_table=True)


def test_lengths_and_heads(gpu: Gpu) -> None:
    case = gpu.case([300, 77])
    decode = gpu.decode(case)
    with pytest.raises(PlanError, match="expected lengths on the host"):
        decode.plan(torch.tensor([300, 77], device=gpu.device), **case.heads)
    with pytest.raises(PlanError, match=r"seq_lens\[1\] = -1"):
        decode.plan([300, -1], **case.heads)
    with pytest.raises(PlanError, match="expected a multiple of num_kv_heads"):
        decode.plan([300], num_q_heads=25, num_kv_heads=4)
    plan = decode.plan(torch.tensor([300, 77]), **case.heads)
    with pytest.raises(PlanError, match="has 3 sequences: expected 2"):
        plan.update([1, 2, 3])
    check(plan, case, *run(plan, case))  # still whole


def test_kernels_that_do_not_exist(gpu: Gpu) -> None:
    """An axis value that no kernel has, and a kernel that this bundle lacks: found out while planning."""
    options: dict[str, Any] = {"head_dim": 128, "page_size": 16, "kv_format": "fp8", "device": gpu.device.index}
    for name, value in (("page_size", 48), ("head_dim", 192), ("kv_format", "e9m9"), ("q_len", 17)):
        with pytest.raises(ConfigError, match=f"{name} = "):
            PagedDecode(gpu.library, **(options | {name: value}))
    lacking = PagedDecode(gpu.library, **(options | {"page_size": 128, "q_len": 7, "pdl": True, "row_tile": 64}))
    key = lacking.keys(1)[0]
    if key in gpu.library:
        pytest.skip(f"this bundle holds even {key}")
    with pytest.raises(KernelNotFoundError, match=key):
        lacking.plan([300], num_q_heads=8, num_kv_heads=8)
    assert key in [miss["key"] for miss in gpu.library.misses]
