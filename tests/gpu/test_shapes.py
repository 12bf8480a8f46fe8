"""The axes that users bring: formats, page sizes, head dims, GQA ratios, tokens, layouts, lengths, every kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpu.problems import Case, same_bits
from gpu.running import Gpu, check, expect, run

from cubinery.runtime.families import parse_key
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS

pytestmark = pytest.mark.gpu
FORMATS = pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
BORDERS = [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 383, 384, 385, 1023, 1024, 1025]


def config_of(gpu: Gpu, key: str) -> MmaConfig:
    config, arch = parse_key(key)
    if arch not in gpu.library.archs_for(gpu.device.index or 0):
        pytest.skip(f"{key} is for another device")
    assert isinstance(config, MmaConfig)
    return config


def problem_of(config: MmaConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """(Case fields, choices) that lead to a configuration."""
    fields = {
        "d": config.head_dim, "page_size": config.page_size, "kv_format": config.kv_format, "q_len": config.q_len,
        "causal": config.causal, "q_dtype": config.q_dtype, "window": 130 if config.window else None,
        "softcap": 3.0 if config.softcap else None, "with_sinks": config.sinks, "with_q_lens": config.q_lens,
    }  # fmt: skip
    chosen = {"row_tile": config.row_tile, "ctas_per_sm": config.ctas_per_sm, "cluster": config.cluster}
    return fields, {"impl": config.impl, "pdl": config.pdl, **chosen}


SPLITS: tuple[dict[str, Any], ...] = ({"force_splits": 1}, {"force_splits": 5}, {})


def test_every_kernel_of_the_bundle(gpu: Gpu, decode_key: str) -> None:
    """Ratios that fill a part of a row tile, all of it, several; lengths on borders; split or not, or in clusters."""
    config = config_of(gpu, decode_key)
    fields, choices = problem_of(config)
    for index, group in enumerate((1, 3, 8, 16)):
        lengths = [*np.random.default_rng(index).permutation(BORDERS)[:10], 2500 if index else 0]
        case = gpu.case(lengths, h_q=2 * group, h_k=2, seed=index, layout=LAYOUTS[index], **fields)
        expected = None
        sizes = [{"cluster": size} for size in (16, (4, 2, 8, 2)[index])]
        for chosen, options in [({}, o) for o in SPLITS] if config.cluster == 1 else [(size, {}) for size in sizes]:
            plan = gpu.plan(case, choices | chosen, **options)
            assert plan.keys[0] == decode_key
            out, lse = run(plan, case)
            expected = check_once(plan, case, out, lse, expected)
            again, lse_again = run(plan, case)
            assert same_bits(out, again), "two runs differ"
            assert same_bits(lse, lse_again), "two runs differ"


def check_once(plan: Any, case: Case, out: Any, lse: Any, expected: Any) -> Any:
    """Check, computing the reference only once."""
    expected = expected or expect(case)
    check(plan, case, out, lse, expected)
    return expected


@FORMATS
@pytest.mark.parametrize("d", [64, 128, 256, 512])
@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formats_pages_head_dims_and_layouts(gpu: Gpu, kv_format: str, d: int, page_size: int, layout: Any) -> None:
    case = gpu.case(BORDERS, kv_format=kv_format, d=d, page_size=page_size, layout=layout)
    gpu.solve(case)
    gpu.solve(case, force_splits=3)


@pytest.mark.parametrize("group", [*range(1, 17), 24, 33])
@pytest.mark.parametrize(("kv_format", "d"), [("fp8", 128), ("bf16", 256)])
def test_gqa_ratios(gpu: Gpu, group: int, kv_format: str, d: int) -> None:
    case = gpu.case([300, 0, 129, 1, 2000], h_q=3 * group, h_k=3, kv_format=kv_format, d=d)
    for row_tile in (8, 16):
        gpu.solve(case, {"row_tile": row_tile})
        gpu.solve(case, {"row_tile": row_tile}, force_splits=4)


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kv_format", "d", "page_size"), [("fp8", 128, 16), ("bf16", 256, 64)])
def test_several_tokens(gpu: Gpu, q_len: int, causal: bool, kv_format: str, d: int, page_size: int) -> None:
    """Every q_len with the selector's own choice (4 heads a KV head), and all ratios on the tile that is there."""
    fields: dict[str, Any] = {"q_len": q_len, "causal": causal, "kv_format": kv_format, "d": d, "page_size": page_size}
    lengths = [0, 1, q_len - 1, q_len, q_len + 1, 127, 128, 129, 130 + q_len, 900]
    case = gpu.case(lengths, h_q=8, h_k=2, **fields)
    tile = gpu.decode(case).config(4).row_tile
    expected = None
    for force_splits in (0, 1, 3, 8):
        plan = gpu.plan(case, force_splits=force_splits)
        expected = check_once(plan, case, *run(plan, case), expected)
    for group in (1, 2, 3, 5, 7, 10, 16):
        choices = {"row_tile": tile} if causal else None
        gpu.solve(gpu.case(lengths, h_q=2 * group, h_k=2, **fields), choices, force_splits=3)


@FORMATS
@pytest.mark.parametrize("h_k", [1, 2, 5, 8])
def test_kv_heads(gpu: Gpu, kv_format: str, h_k: int) -> None:
    gpu.solve(gpu.case([1025, 3, 64], h_q=4 * h_k, h_k=h_k, kv_format=kv_format))


@FORMATS
def test_large_and_uneven_batches(gpu: Gpu, kv_format: str) -> None:
    rng = np.random.default_rng(5)
    gpu.solve(gpu.case(rng.integers(0, 900, 300).tolist(), kv_format=kv_format))
    gpu.solve(gpu.case([40000, *rng.integers(1, 500, 31).tolist()], kv_format=kv_format))
    gpu.solve(gpu.case([1] * 1000, kv_format=kv_format, h_q=4, h_k=1))


@FORMATS
def test_k_and_v_of_different_strides_and_offsets(gpu: Gpu, kv_format: str) -> None:
    """Rows, heads and pages further apart than needed, differently in K and in V; codes as uint8 too."""
    case = gpu.case([300, 77], kv_format=kv_format)
    plan = gpu.plan(case, force_splits=2)
    expected = run(plan, case)
    pages, ps, heads, d = case.k.shape
    wide_k = case.raw["k"].new_full((pages + 1, ps, heads + 1, d + 32), 0)[1:, :, 1:, 16 : 16 + d]
    wide_v = case.raw["v"].new_full((pages, heads + 2, ps, d + 16), 0)[:, :heads, :, :d].transpose(1, 2)
    wide_k.copy_(case.raw["k"])
    wide_v.copy_(case.raw["v"])
    out, lse = plan.run(case.q, case.kernel_view(wide_k), case.kernel_view(wide_v), case.table)
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@FORMATS
def test_a_block_table_with_a_stride(gpu: Gpu, kv_format: str) -> None:
    """Rows of a wider table, as engines keep them."""
    case = gpu.case([300, 77, 16], kv_format=kv_format)
    plan = gpu.plan(case)
    expected = run(plan, case)
    wide = case.table.new_full((3, 64), -1)
    columns = case.table.shape[1]
    wide[:, :columns] = case.table
    out, lse = plan.run(case.q, case.k, case.v, wide[:, :columns])
    assert same_bits(out, expected[0])
    assert same_bits(lse, expected[1])


@pytest.mark.parametrize("seed", range(60))
def test_random_problems(gpu: Gpu, seed: int) -> None:
    """A kernel of the bundle, and everything else of the problem, drawn from a seed."""
    rng = np.random.default_rng(1000 + seed)
    archs = gpu.library.archs_for(gpu.device.index or 0)
    configs = [parse_key(key) for key in gpu.library]
    decodes = [config for config, arch in configs if isinstance(config, MmaConfig) and arch in archs]
    config = decodes[int(rng.integers(len(decodes)))]
    fields, choices = problem_of(config)
    h_k, group = int(rng.integers(1, 7)), int(rng.integers(1, 17))
    kind = rng.integers(3)
    lengths = {
        0: rng.integers(0, 700, int(rng.integers(1, 40))),
        1: (2 ** rng.uniform(0, 13, int(rng.integers(1, 12)))).astype(int),
        2: rng.choice(BORDERS, int(rng.integers(1, 20))),
    }[int(kind)]
    case = gpu.case(
        lengths.tolist(), h_q=h_k * group, h_k=h_k, seed=seed, layout=str(rng.choice(LAYOUTS)),
        k_std=float(rng.uniform(0.2, 3)), **fields,
    )  # fmt: skip
    plan_options: dict[str, Any] = {
        "policy": str(rng.choice(["balanced", "thor"])),
        "force_splits": int(rng.choice([0, 0, 1, 2, 9])),
        "min_chunk_tiles": int(rng.choice([1, 1, 3])),
    }
    if rng.random() < 0.3:
        plan_options["max_splits"] = int(rng.choice([1, 2, 5]))
    if config.cluster > 1:
        plan_options |= {"force_splits": 0, "max_splits": None}
        choices["cluster"] = int(rng.choice(CLUSTER_SIZES))
    run_options: dict[str, Any] = {}
    for name in ("q_descale", "k_descale", "v_descale"):
        shape = [None, (1,), (h_k,), (len(case.lengths), h_k)][int(rng.integers(4))]
        if shape is not None:
            values = np.asarray(rng.uniform(0.5, 1.5, shape), np.float32)
            run_options[name] = torch.from_numpy(values).to(gpu.device)
    if rng.random() < 0.5:
        run_options["out_scale"] = float(rng.uniform(-2, 2))
    gpu.solve(case, choices, run_options, **plan_options)
