"""The cache writers of the bundle on a GPU: the host quantisers' bits, capture, and what a decode then reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import GUARD, GUARD_BYTES
from gpu.running import Gpu

from cubinery.aot.problems import Subject
from cubinery.aot.problems.paged_decode import append
from cubinery.aot.problems.paged_decode.append import Case
from cubinery.aot.references.paged_append import append_rows
from cubinery.runtime.families import parse_key
from cubinery.runtime.ops.paged_decode.append import CacheWriter
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.formats import ELEMENTS, KV_FORMATS

pytestmark = pytest.mark.gpu


def test_the_bundle_has_every_writer(gpu: Gpu) -> None:
    configs = [config for config in (parse_key(key)[0] for key in gpu.library) if isinstance(config, AppendConfig)]
    assert {(c.kv_format, c.head_dim) for c in configs} == {(f, d) for f in KV_FORMATS for d in (64, 128, 256, 512)}


def on_device(gpu: Gpu, **tensors: Any) -> dict[str, Any]:
    """The same tensors in the device's memory."""
    return {name: tensor.to(gpu.device) for name, tensor in tensors.items()}


def test_every_writer(gpu: Gpu, append_key: str) -> None:
    """Layouts, granularities, slots outside the cache, and values that are no numbers; all bytes of the caches."""
    finding = append.check(Subject.of(gpu.library, append_key, lambda **tensors: on_device(gpu, **tensors)))
    assert finding.ok, finding.text


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved", "flashinfer"])
def test_many_tokens(gpu: Gpu, kv_format: str, layout: Any) -> None:
    """Thousands of CTAs; the cache is nearly full."""
    config = AppendConfig(head_dim=128, kv_format=kv_format)
    case = Case(layout=layout, tokens=4001, heads=8, num_pages=251, special=False, descale="token")
    assert append.run(gpu.library, config, case, lambda **tensors: on_device(gpu, **tensors)) == ""


@pytest.mark.parametrize("kv_format", ["fp8", "e3m2", "e2m3", "e2m1"])
def test_every_bf16_value(gpu: Gpu, kv_format: str) -> None:
    """All 65536 numbers under 256 descales."""
    rng = np.random.default_rng(9)
    bits = torch.from_numpy(np.tile(np.arange(65536, dtype=np.uint16), 256).view(np.int16))
    rows = bits.view(torch.bfloat16).reshape(256 * 8, 128, 64)  # 128 heads, each token one descale a head
    scale = (rng.uniform(1, 2, (2048, 128)) * 2.0 ** rng.integers(-12, 8, (2048, 128))).astype(np.float32)
    scale[:64] = np.float32(2) ** rng.integers(-12, 8, (64, 128)).astype(np.float32)
    scale[64:128] = np.nextafter(scale[:64], np.float32(0))
    scale[128:140] = np.array([1e-30, 1e30, 2.0**-126, 3e38, 1e-42, 2.0**41, 2.0**-41, 1e12, 1e-12, 7, 3, 1])[:, None]
    row = 64 * ELEMENTS[kv_format].bits // 8
    cache = torch.zeros(128, 16, 128, row, dtype=torch.uint8, device=gpu.device)
    slots = torch.arange(2048, device=gpu.device)
    writer = CacheWriter(gpu.library, head_dim=64, kv_format=kv_format, device=gpu.device)
    given = rows.to(gpu.device), torch.from_numpy(scale).to(gpu.device)
    writer.append(given[0], given[0], cache, cache.clone(), slots, given[1], given[1])
    expected = np.zeros(tuple(cache.shape), np.uint8)
    append_rows(expected, rows.float().numpy(), slots.cpu().numpy(), kv_format, scale)
    bad = np.argwhere(cache.cpu().numpy() != expected)
    assert not len(bad), f"{len(bad)} bytes, first {bad[0]}"


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "e2m3", "nvfp4"])
def test_nothing_beside_the_caches_is_written(gpu: Gpu, kv_format: str) -> None:
    """Guard bytes around each buffer, and slots far outside it."""
    config = AppendConfig(head_dim=128, kv_format=kv_format)
    case = Case(tokens=40, wide_slots=True, heads=4)
    memory: dict[str, torch.Tensor] = {}

    def guarded(**tensors: Any) -> dict[str, Any]:
        found = on_device(gpu, **tensors)
        for name in [n for n in found if n.startswith(("cache", "scales"))]:
            size = found[name].numel() * found[name].element_size()
            memory[name] = torch.full((size + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8, device=gpu.device)
            inner = memory[name][GUARD_BYTES : GUARD_BYTES + size].view(found[name].dtype).view(found[name].shape)
            inner.copy_(found[name])
            found[name] = inner
        return found

    assert append.run(gpu.library, config, case, guarded) == ""
    assert memory
    for name, whole in memory.items():
        edges = torch.cat([whole[:GUARD_BYTES], whole[-GUARD_BYTES:]])
        assert bool((edges == GUARD).all()), name


@pytest.mark.parametrize("kv_format", ["bf16", "fp8", "e2m3", "nvfp4"])
@pytest.mark.parametrize("pdl", [False, True])
def test_a_captured_append_follows_slots_and_rows(gpu: Gpu, kv_format: str, pdl: bool) -> None:
    """Between replays rows and slots change in place; padding has slot -1."""
    config = AppendConfig(head_dim=128, kv_format=kv_format, pdl=pdl)
    case = Case(tokens=24, heads=8, num_pages=8)
    steps = [append.problem(config, case, seed) for seed in range(3)]
    given = on_device(gpu, **steps[0])
    expected = {name: tensor.clone() for name, tensor in steps[0].items() if name.startswith(("cache", "scales"))}
    writer = CacheWriter(gpu.library, head_dim=128, kv_format=kv_format, pdl=pdl, device=gpu.device)
    writer.preload()
    values = append.arguments(config, case, given)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        writer.append(**values)
    for step in steps:
        fixed = ("cache", "scales", "k_descale", "v_descale")
        for name in [n for n in step if not n.startswith(fixed)]:
            given[name].copy_(step[name])
        step |= {name: steps[0][name] for name in step if name.endswith("descale")}
        graph.replay()
        append.expect(config, case, step, expected)
        for name, tensor in expected.items():
            assert append.difference(name, given[name], tensor) == ""


def test_append_waits_for_nothing_and_allocates_nothing(gpu: Gpu) -> None:
    config = AppendConfig(head_dim=128, kv_format="fp8")
    case = Case(tokens=64, heads=8, num_pages=8)
    values = append.arguments(config, case, on_device(gpu, **append.problem(config, case)))
    writer = CacheWriter(gpu.library, head_dim=128, kv_format="fp8", device=gpu.device)
    writer.append(**values)
    torch.cuda._sleep(1)  # its code is loaded
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda._sleep(200_000_000)
    writer.append(**values)
    assert not torch.cuda.current_stream().query(), "append waited for the work before it"
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_what_is_appended_is_what_a_decode_reads(gpu: Gpu, kv_format: str) -> None:
    """The cache of a decode problem, written by the writer instead of by torch, gives the same output to the bit."""
    case = gpu.case([700, 1, 129], kv_format=kv_format, h_k=2, d=128)
    expected = gpu.solve(case, force_splits=2)
    page, row = torch.nonzero(case.live, as_tuple=True)
    fresh = {name: torch.zeros_like(case.raw[name]) for name in "kv"}
    rows = [case.kernel_view(case.raw[name])[page, row].bfloat16() for name in "kv"]  # e4m3 values are exact in bf16
    writer = CacheWriter(gpu.library, head_dim=128, kv_format=kv_format, device=gpu.device)
    writer.append(*rows, fresh["k"], fresh["v"], page * case.page_size + row)
    for name in "kv":
        case.raw[name].copy_(fresh[name])
    out, lse = gpu.solve(case, force_splits=2)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
