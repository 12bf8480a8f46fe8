"""The cache writer on the simulator, on Hopper and on Blackwell: the host quantisers' bits, wherever they belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cubinery.aot import verify
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.problems.paged_decode import append, mma
from cubinery.aot.problems.paged_decode.append import Case
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.ptxsim.isa.rounding import fma_nearest, to_f32
from cubinery.aot.references.paged_append import append_rows
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.formats import E2M1, E2M3, E3M2, ELEMENTS, KV_FORMATS, FloatFormat, midpoints

pytest.importorskip("cutlass", reason="the compiler is not installed")
torch: Any = pytest.importorskip("torch", reason="the operator needs torch")

ARCHS = ("sm_90a", "sm_110a")
READABLE = next(f for f in dataclasses.fields(MmaConfig) if f.name == "kv_format").metadata["choices"]
"""Formats that the decode reads."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writers of every format and head_dim, and the decodes that read what they write."""
    out = tmp_path_factory.mktemp("append")
    report = build(expand(load_specs([_spec(out)]), list(ARCHS)), BuildOptions(out=out / "kernels"))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    return out / "kernels"


def _spec(folder: Path) -> Path:
    file = folder / "append.yaml"
    archs = f"arch: [{', '.join(ARCHS)}]"
    file.write_text(
        f"""
family: paged_decode
impl: append
matrix: {{{archs}, head_dim: [64, 128], kv_format: [bf16, fp8, e3m2, e2m3, e2m1, nvfp4]}}
include:
  - {{{archs}, head_dim: 128, kv_format: nvfp4, pdl: true}}
  - {{{archs}, head_dim: 256, kv_format: e3m2}}
  - {{{archs}, head_dim: 512, kv_format: fp8}}
emit: [ptx]
---
family: paged_decode
impl: mma
matrix: {{{archs}, head_dim: [128], page_size: [16], kv_format: [{", ".join(READABLE)}], row_tile: [8]}}
emit: [ptx]
"""
    )
    return file


@pytest.fixture
def simulator(bundles: Path) -> Callable[[str], tuple[SimDriver, Library]]:
    def make(arch: str) -> tuple[SimDriver, Library]:
        driver = SimDriver(arch, [bundles / arch])
        return driver, Library.open(bundles / arch, driver=driver)

    return make


def place(driver: SimDriver) -> Callable[..., dict[str, Any]]:
    def placed(**tensors: Any) -> dict[str, Any]:
        driver.register_tensors(**tensors)
        return tensors

    return placed


@pytest.mark.parametrize(("arch", "schedule"), [("sm_90a", "fair:0"), ("sm_110a", "late:0")])
def test_every_writer_of_the_bundle(bundles: Path, arch: str, schedule: str) -> None:
    """Formats, widths, layouts, granularities, slots outside the cache and values that are no numbers."""
    library = Library.open(bundles / arch)
    keys = [key for key in library if isinstance(parse_key(key)[0], AppendConfig)]
    assert len(keys) >= 9
    for key in keys:
        outcome = verify.run(verify.Task(bundles / arch, arch, key, schedule))
        assert outcome.ok, outcome.error
        assert outcome.executed == (key,)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 31, 33, 100])
def test_any_number_of_tokens(simulator: Callable[..., Any], kv_format: str, tokens: int) -> None:
    """The last CTA is full, almost empty, or half of a warp is."""
    driver, library = simulator("sm_90a")
    case = Case(tokens=tokens, heads=3, num_pages=9, special=False, wide_slots=tokens % 2 == 1)
    with watching(driver):
        assert append.run(library, AppendConfig(head_dim=64, kv_format=kv_format), case, place(driver), tokens) == ""


def descales(fmt: Any, count: int) -> np.ndarray:
    """fp32 divisors (count,): usual ones, powers of two and their neighbours, and some beyond the quick division."""
    rng = np.random.default_rng(3)
    found = (rng.uniform(1, 2, count) * 2.0 ** rng.integers(-8, 5, count)).astype(np.float32)
    ones = np.float32(2) ** np.arange(-40, 41, 8, dtype=np.float32)
    edges = np.concatenate([ones, np.nextafter(ones, np.float32(0)), np.nextafter(ones, np.float32(np.inf))])
    odd = np.array([1e-30, 1e30, 2.0**-126, 3e38, 1e-42, 1 / fmt.max], np.float32)
    found[: len(edges)] = edges
    found[len(edges) : len(edges) + len(odd)] = odd
    return found


@pytest.mark.parametrize("kv_format", ["fp8", "e3m2", "e2m3", "e2m1"])
def test_every_bf16_value(simulator: Callable[..., Any], kv_format: str) -> None:
    """All 65536 bf16 numbers, each token with a descale of its own."""
    driver, library = simulator("sm_90a")
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 64, 4).transpose(0, 2, 1)  # neighbours get other descales
    rows = torch.from_numpy(np.ascontiguousarray(bits.reshape(1024, 1, 64)).view(np.int16)).view(torch.bfloat16)
    compare(driver, library, kv_format, rows, descales(ELEMENTS[kv_format], 1024))


@pytest.mark.parametrize("kv_format", ["fp8", "e3m2", "e2m3", "e2m1"])
def test_quotients_at_the_edges_of_rounding(simulator: Callable[..., Any], kv_format: str) -> None:
    """Rows that are multiples of their descale's bf16 neighbours, so that quotients fall on midpoints and beside."""
    driver, library = simulator("sm_110a")
    fmt = ELEMENTS[kv_format]
    scale = descales(fmt, 256)
    targets = np.resize(np.concatenate([midpoints(fmt), -midpoints(fmt)]), (256, 64))
    exact = torch.from_numpy(targets * np.where(scale < 1e20, scale, 1)[:, None]).bfloat16()
    steps = torch.from_numpy(np.random.default_rng(1).integers(-1, 2, (256, 64)).astype(np.int16))
    rows = (exact.view(torch.int16) + steps).view(torch.bfloat16)[:, None]
    # A descale that divides its row exactly where the multiple is a power of two: midpoints are met.
    scale[128:] = (rows[128:, 0, 5].float().abs() / float(midpoints(fmt)[2])).numpy()
    compare(driver, library, kv_format, rows, scale)


def compare(driver: SimDriver, library: Library, kv_format: str, rows: Any, scale: np.ndarray) -> None:
    """Append rows (n, 1, 64) as K and, reversed, as V, with a descale a token, in order."""
    from cubinery.runtime.ops.paged_decode.append import CacheWriter

    count = len(rows)
    writer = CacheWriter(library, head_dim=64, kv_format=kv_format)
    shape = (count // 32, 32, 1, 64 * ELEMENTS[kv_format].bits // 8)
    caches = [torch.zeros(shape, dtype=torch.uint8) for _ in "kv"]
    given = [rows, rows.flip(0).contiguous()]
    factors = [torch.from_numpy(scale[:, None].copy()) for _ in "kv"]
    slots = torch.arange(count, dtype=torch.int32)
    with watching(driver):
        tensors = {f"t{i}": tensor for i, tensor in enumerate((*given, *caches, *factors, slots))}
        driver.register_tensors(**tensors)
        writer.append(*given, *caches, slots, *factors)
    for new, cache in zip(given, caches, strict=True):
        expected = np.zeros(shape, np.uint8)
        append_rows(expected, new.float().numpy(), slots.numpy(), kv_format, scale[:, None])
        bad = np.argwhere(expected != cache.numpy())
        assert not len(bad), f"{len(bad)} bytes, first {bad[0]}, descale {scale[bad[0][0] * 32 + bad[0][1]]!r}"


def test_nvfp4_blocks_of_every_size(simulator: Callable[..., Any]) -> None:
    """Blocks from those that vanish beside the global scale to those that exceed its range."""
    from cubinery.runtime.ops.paged_decode.append import CacheWriter

    driver, library = simulator("sm_90a")
    rng = np.random.default_rng(5)
    values = rng.standard_normal((512, 1, 4, 16)) * 2.0 ** rng.integers(-40, 30, (512, 1, 4, 1))
    rows = torch.from_numpy(values.reshape(512, 1, 64).astype(np.float32)).bfloat16()
    for scale in (np.float32(1e-3), np.float32(2.0**-20), np.float32(2e-38), np.float32(1e5)):
        writer = CacheWriter(library, head_dim=64, kv_format="nvfp4")
        caches = [torch.zeros((16, 32, 1, 32), dtype=torch.uint8) for _ in "kv"]
        scales = [torch.zeros((16, 32, 1, 4), dtype=torch.uint8) for _ in "kv"]
        slots = torch.arange(512, dtype=torch.int64)
        with watching(driver):
            driver.register_tensors(rows=rows, slots=slots, k=caches[0], v=caches[1], ks=scales[0], vs=scales[1])
            writer.append(rows, rows, *caches, slots, float(scale), float(scale), *scales)
        expected, blocks = np.zeros((16, 32, 1, 32), np.uint8), np.zeros((16, 32, 1, 4), np.uint8)
        append_rows(expected, rows.float().numpy(), slots.numpy(), "nvfp4", scale, blocks)
        for cache, block in zip(caches, scales, strict=True):
            assert np.array_equal(cache.numpy(), expected)
            assert np.array_equal(block.numpy(), blocks)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kv_format", READABLE)
def test_what_is_appended_is_what_a_decode_reads(simulator: Callable[..., Any], arch: str, kv_format: str) -> None:
    """A prompt in two appends, in any order of rows; the decode equals the reference on the cache the host makes."""
    from cubinery.runtime.ops.paged_decode.append import CacheWriter
    from cubinery.runtime.ops.paged_decode.op import PagedDecode

    driver, library = simulator(arch)
    lengths, heads = (150, 1, 77), mma.NUM_KV_HEADS
    given = mma.decode_problem(MmaConfig(head_dim=128, page_size=16, kv_format=kv_format, row_tile=8), 2, lengths)
    caches = [given["k_cache"], given["v_cache"]]
    blocks = {name: given[name] for name in ("k_scales", "v_scales") if name in given}  # nvfp4
    for tensor in (*caches, *blocks.values()):
        tensor.zero_()
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(sum(lengths), heads, 128, generator=generator).bfloat16() for _ in "kv"]
    scales = [None, None] if kv_format == "bf16" else [torch.tensor([0.4, 0.6]), torch.tensor([0.5, 0.3])]
    if blocks:
        scales = [torch.tensor([0.004]), torch.tensor([0.003])]
    table = given["block_table"].numpy()
    slots = np.concatenate([table[i][np.arange(n) // 16] * 16 + np.arange(n) % 16 for i, n in enumerate(lengths)])
    order = torch.randperm(len(slots), generator=generator)
    mapping = torch.from_numpy(slots)[order]
    with watching(driver):
        driver.register_tensors(**given, mapping=mapping)
        driver.register_tensors(**{f"scale{i}": scale for i, scale in enumerate(scales) if scale is not None})
        writer = CacheWriter(library, head_dim=128, kv_format=kv_format)
        for part in (slice(0, 200), slice(200, None)):
            writer.append(*(row[order][part] for row in rows), *caches, mapping[part], *scales, **blocks)
        decode = PagedDecode(library, head_dim=128, page_size=16, kv_format=kv_format, impl="mma")
        plan = decode.plan(lengths, num_q_heads=2 * heads, num_kv_heads=heads)
        o, lse = plan.run(given["q"], *caches, given["block_table"], None, *scales, **blocks)
    expected = [torch.zeros_like(cache) for cache in caches]
    made = {name: torch.zeros_like(tensor) for name, tensor in blocks.items()}
    for name, cache, row, scale in zip("kv", expected, rows, scales, strict=True):
        append_rows(
            append.bits(cache), row.float().numpy(), slots, kv_format, None if scale is None else scale.numpy(),
            append.bits(made[f"{name}_scales"]) if made else None,
        )  # fmt: skip
    found = paged_attention(
        given["q"], *expected, given["block_table"], lengths, k_descale=scales[0], v_descale=scales[1],
        kv_format=kv_format, **made,
    )  # fmt: skip
    assert deviation(o.double().numpy(), lse.numpy(), *found).within(PAGED_DECODE["mma"])


def test_the_quick_division_is_exact_where_it_is_used() -> None:
    """The five operations of `narrow.divide_quickly`, each rounded once, against a correctly rounded quotient."""
    rng = np.random.default_rng(8)
    bits = rng.integers(0, 1 << 16, 200_000).astype(np.uint32) << 16
    x = bits.view(np.float32)
    x = x[(np.abs(x) < 2.0**60) & (np.abs(x) >= 2.0**-100)]
    d = (rng.integers(0, 1 << 23, len(x)).astype(np.uint32) | 0x3F800000).view(np.float32)
    d[: len(d) // 2] = np.resize(
        np.array([1, 2 - 2.0**-23, 1 + 2.0**-23, 2 - 2.0**-22, 1.5, 1 + 2.0**-12, 2 - 2.0**-15], np.float32),
        len(d) // 2,
    )
    d = (d * np.float32(2) ** rng.integers(-39, 40, len(d)).astype(np.float32)).astype(np.float32)
    y = np.float32(1) / d
    q = (x * y).astype(np.float32)
    for _ in range(2):
        q = fma_nearest(fma_nearest(-d, q, x), y, q)
    assert np.array_equal(q, x / d)


@pytest.mark.parametrize("fmt", [E2M1, E3M2, E2M3], ids=lambda fmt: fmt.name)
def test_products_that_replace_quotients_are_on_the_right_side_of_midpoints(fmt: FloatFormat) -> None:
    """Every significand of x and of a midpoint m, with every divisor that brings x / d within 2^-18 of m.

    All others are further off than two roundings move them. The bound that `narrow.divide_for_codes` names is
    m + ulp(m) / 2, counted here in integers; the products are its three operations, and the scaling's.
    """
    from cubinery.aot.kernels.common import narrow

    middles = midpoints(fmt).astype(np.float64)
    ms = np.unique(np.frexp(middles)[0] * 32).astype(np.int64)  # 16 to 31
    xs, exponents = np.arange(128, 256), np.arange(15, 25)
    m, x, k, near = (part.ravel() for part in np.meshgrid(ms, xs, exponents, np.arange(-40, 41), indexing="ij"))
    d = (x << k) // m + near
    inside = (d >= 1 << 23) & (d < 1 << 24)
    m, x, k, d = m[inside], x[inside], k[inside], d[inside]
    # x 2^k / d > m + ulp / 2, where m is 16 to 31 and has an ulp of 2^-19.
    above = (x << k + 20) > d * ((m << 20) + 1)
    closest = ((x << k + 20) - d * ((m << 20) + 1)) / (d * (m << 20))
    assert closest[~above].max() < -(2.0**-32), "a quotient below its bound, but not by enough"
    assert closest[above].min() > 0

    divisor = d.astype(np.float32)
    high = np.float32(1) / divisor
    low = fma_nearest(high, np.float32(narrow.UPWARDS), high * fma_nearest(-divisor, high, np.float32(1)))
    value = np.ldexp(x.astype(np.float32), k).astype(np.float32)
    product = fma_nearest(value, high, value * low)
    assert np.array_equal(product > m, above)
    assert np.array_equal(value / divisor > m, above)
    # Scaled towards zero by a little less than a power of two, a midpoint falls below itself, and nothing else does.
    scaled = to_f32(product.astype(np.float64) * (1 - 2.0**-24), "rz")
    assert np.array_equal(scaled >= m, above)


def test_the_formats_are_those_of_the_quantisers() -> None:
    (axis,) = (f for f in dataclasses.fields(AppendConfig) if f.name == "kv_format")
    assert axis.metadata["choices"] == KV_FORMATS
