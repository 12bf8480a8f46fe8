"""Budgets, rejections and the launch record of the tensor-memory decode's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from cubinery.aot.kernels.paged_decode.abi import declare
from cubinery.runtime.arch import ARCHS, Arch
from cubinery.runtime.arguments import TensorMapCache
from cubinery.runtime.driver import Driver
from cubinery.runtime.errors import ArgumentError, ConfigError
from cubinery.runtime.families import parse_key
from cubinery.runtime.ops.paged_decode.config import Tcgen05Config

THOR, H200 = ARCHS["sm_110a"], ARCHS["sm_90a"]
ARCHES = [arch for arch in ARCHS.values() if arch.tmem_columns]


def config(**axes: Any) -> Tcgen05Config:
    """An e4m3 Q of head_dim 256 unless told otherwise."""
    return Tcgen05Config(**({"head_dim": 256, "page_size": 128, "kv_format": "fp8", "q_dtype": "e4m3"} | axes))


def bf16(**axes: Any) -> Tcgen05Config:
    return config(**({"q_dtype": "bf16"} | axes))


def legal(cfg: Tcgen05Config, arch: Arch) -> bool:
    try:
        cfg.check_arch(arch)
    except ConfigError:
        return False
    return True


# -- roles and registers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "converters", "threads"),
    [
        (config(), 0, 256),
        (config(kv_format="e2m3"), 0, 256),
        (config(kv_format="nvfp4"), 1, 384),
        (bf16(), 1, 384),
        (bf16(ctas_per_sm=1), 2, 512),
        (bf16(ctas_per_sm=1, head_dim=128), 1, 384),
        (bf16(ctas_per_sm=1, convert_warpgroups=1), 1, 384),
    ],
)
def test_warpgroups(cfg: Tcgen05Config, converters: int, threads: int) -> None:
    assert (cfg.converters, cfg.threads) == (converters, threads)
    assert cfg.warpgroups * 128 == threads


@pytest.mark.parametrize(
    ("cfg", "launch", "moved"),
    [
        (config(row_tile=32), 128, (72, 128, 184)),
        (config(row_tile=32, ctas_per_sm=1), 248, (72, 112, 256)),
        (bf16(row_tile=32), 80, (40, 64, 136)),
        (bf16(row_tile=32, head_dim=128), 80, (48, 64, 128)),
        (bf16(row_tile=8), 80, (48, 64, 128)),
        (config(row_tile=16, kv_format="nvfp4"), 80, (48, 64, 128)),
        (bf16(row_tile=32, ctas_per_sm=1, convert_warpgroups=1), 168, (72, 112, 256)),
        (bf16(row_tile=32, ctas_per_sm=1, convert_warpgroups=2), 128, (72, 112, 216)),
    ],
)
def test_registers_move_to_a_softmax_that_is_short_of_them(
    cfg: Tcgen05Config, launch: int, moved: tuple[int, ...]
) -> None:
    assert cfg.launch_registers(THOR) == launch
    found = cfg.registers(THOR)
    assert found is not None
    issuing, converting, softmax = found
    assert (issuing, softmax) == (moved[0], moved[2])
    if cfg.converters:
        assert converting == moved[1]
    assert issuing + converting * cfg.converters + softmax <= launch * cfg.warpgroups


def test_narrow_tiles_keep_their_registers() -> None:
    for narrow in (config(row_tile=16), bf16(row_tile=8, ctas_per_sm=1), config(row_tile=16, ctas_per_sm=1)):
        assert narrow.launch_registers(THOR) >= 112
        assert narrow.registers(THOR) is None


def test_two_converters_leave_two_ctas_of_wide_tiles_too_few_registers() -> None:
    with pytest.raises(ConfigError, match=r"leaves 88 registers a thread to the softmax at ctas_per_sm 2.*at least 96"):
        bf16(row_tile=32, convert_warpgroups=2).check_arch(THOR)


# -- tensor memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "stages", "columns"),
    [
        (config(row_tile=16), 0, 64),
        (config(row_tile=32), 0, 128),
        (config(row_tile=16, head_dim=128), 0, 64),
        (config(row_tile=32, head_dim=512), 0, 256),
        (config(row_tile=16, kv_format="nvfp4"), 0, 64),
        (bf16(row_tile=8), 3, 256),
        (bf16(row_tile=16), 3, 256),
        (bf16(row_tile=32), 2, 256),
        (bf16(row_tile=8, ctas_per_sm=1), 7, 512),
        (bf16(row_tile=32, ctas_per_sm=1), 4, 512),
        (bf16(row_tile=32, head_dim=512), 1, 256),
    ],
)
@pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: arch.name)
def test_tensor_memory(cfg: Tcgen05Config, stages: int, columns: int, arch: Arch) -> None:
    assert (cfg.convert_stages(arch), cfg.tmem_columns(arch)) == (stages, columns)
    assert cfg.accumulator_columns + 64 * stages <= columns <= arch.tmem_columns // cfg.ctas_per_sm


# -- shared memory and the ring --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "stages"),
    [
        (config(), 4),
        (config(ctas_per_sm=1), 8),
        (config(row_tile=32), 4),
        (config(kv_format="e2m1"), 4),
        (config(kv_format="e3m2"), 2),
        (config(kv_format="e2m3"), 2),
        (config(kv_format="e2m3", ctas_per_sm=1), 8),
        (config(kv_format="nvfp4"), 4),
        (config(kv_format="nvfp4", row_tile=32), 3),
        (config(kv_format="nvfp4", head_dim=512), 3),
        (config(kv_format="nvfp4", head_dim=512, ctas_per_sm=1), 8),
        (config(head_dim=128), 2),
        (config(head_dim=128, ctas_per_sm=1), 4),
        (config(head_dim=512), 6),
        (config(head_dim=512, ctas_per_sm=1), 8),
        (bf16(), 4),
        (bf16(ctas_per_sm=1, max_kv_stages=3), 2),  # two converters take stages by turns
        (bf16(ctas_per_sm=1, max_kv_stages=3, convert_warpgroups=1), 3),
        (config(max_kv_stages=5), 5),
        (config(max_kv_stages=6), 6),
        (config(max_kv_stages=7), 6),
        (config(max_kv_stages=16, ctas_per_sm=1), 13),
        (config(max_kv_stages=3, kv_format="e2m3"), 3),
    ],
)
def test_ring_depth(cfg: Tcgen05Config, stages: int) -> None:
    assert cfg.kv_stages(THOR) == stages
    assert cfg.ring_depth(THOR, 1) == cfg.ring_depth(THOR, 10_000) == stages
    assert cfg.smem_bytes(THOR) <= THOR.smem_budget(cfg.ctas_per_sm)


@pytest.mark.parametrize(
    ("cfg", "stages"),
    [
        (config(), 4),
        (config(head_dim=128), 4),
        (config(head_dim=128, kv_format="e2m1"), 6),
        (config(kv_format="e3m2"), 4),
        (config(head_dim=128, ctas_per_sm=1), 8),
        (config(head_dim=512), 6),
        (config(max_kv_stages=3), 3),
    ],
)
def test_a_chip_with_more_bandwidth_has_deeper_rings(cfg: Tcgen05Config, stages: int) -> None:
    """108 KB an SM of B200: twice its share of 8 TB/s in a microsecond, as far as shared memory goes."""
    for arch in ARCHES:
        if arch.bandwidth_gbps == 8000:
            assert cfg.kv_stages(arch) == stages
            assert cfg.smem_bytes(arch) <= arch.smem_budget(cfg.ctas_per_sm)


def test_shared_memory_is_the_sum_of_its_parts() -> None:
    assert THOR.smem_budget(1) == 232448
    assert THOR.smem_budget(2) == 115712
    assert config().smem_bytes(THOR) == 2048 + 16 * 256 + 2 * 16 * 128 + 4 * 16384
    assert bf16(row_tile=8).smem_bytes(THOR) == 2048 + 8 * 256 * 2 + 2 * 8 * 128 * 2 + 4 * 16384
    assert config(kv_format="nvfp4").smem_bytes(THOR) == config().smem_bytes(THOR) + 2 * 128 * (128 + 16)
    for cfg in (config(), bf16(row_tile=8), config(head_dim=128), config(kv_format="nvfp4", head_dim=512)):
        assert cfg.q_bytes % 1024 == cfg.p_bytes % 1024 == cfg.packed_stage_bytes % 1024 == 0, "swizzled bases"


@pytest.mark.parametrize(
    ("kv_format", "expected"), [("fp8", 16384), ("e3m2", 12288), ("e2m3", 12288), ("e2m1", 8192), ("nvfp4", 16384)]
)
def test_barriers_expect_packed_bytes(kv_format: str, expected: int) -> None:
    cfg = config(kv_format=kv_format)
    assert cfg.stage_tx_bytes == expected
    assert cfg.packed_stages == (2 if kv_format == "nvfp4" else 0)
    assert cfg.packed_tx_bytes == 128 * 256 // 2
    assert cfg.packed_stage_bytes == cfg.packed_tx_bytes + 128 * 16, "with scales"
    assert cfg.kv_align == (32 if kv_format in ("e3m2", "e2m3", "e2m1") else 16)


# -- rejections ------------------------------------------------------------------------------------

REJECTED: list[tuple[dict[str, Any], str]] = [
    ({"q_dtype": "bf16", "kv_format": "e2m3"}, "kv_format e2m3 with q_dtype bf16: expected fp8"),
    ({"q_dtype": "bf16", "kv_format": "nvfp4"}, "kv_format nvfp4 with q_dtype bf16: expected fp8"),
    ({"q_dtype": "bf16", "convert_warpgroups": 0}, "convert_warpgroups = 0 with q_dtype bf16: expected at least 1"),
    ({"q_dtype": "bf16", "convert_warpgroups": 2, "head_dim": 128}, "expected a divisor of head_dim / 128"),
    ({"kv_format": "bf16"}, "kv_format = 'bf16' is not supported"),
    ({"row_tile": 8}, "row_tile = 8 with q_dtype e4m3: expected a multiple of 16"),
    ({"row_tile": 64}, "row_tile = 64 is not supported: expected one of 8, 16, 32"),
    ({"convert_warpgroups": 1}, "convert_warpgroups = 1 with q_dtype e4m3 and fp8: expected 0"),
    ({"kv_format": "nvfp4", "convert_warpgroups": 0}, "with q_dtype e4m3 and nvfp4: expected 1"),
    ({"kv_format": "nvfp4", "convert_warpgroups": 2}, "with q_dtype e4m3 and nvfp4: expected 1"),
    ({"kv_format": "nvfp4", "l2_prefetch": 1}, "l2_prefetch = 1 with nvfp4: expected 0"),
    ({"page_size": 48}, "page_size = 48 is not supported: expected one of 16, 32, 64, 128"),
    ({"head_dim": 192}, "head_dim = 192 is not supported: expected one of 128, 256, 512"),
    ({"head_dim": 64}, "head_dim = 64 is not supported"),
    ({"l2_prefetch": 9}, "l2_prefetch = 9 is not supported"),
    ({"max_kv_stages": 1}, "max_kv_stages = 1 is not supported"),
    ({"q_len": 0}, "q_len = 0 is not supported"),
    ({"ctas_per_sm": 3}, "ctas_per_sm = 3 is not supported"),
    ({"window": True}, "window = True is not supported: expected one of False"),
    ({"sinks": True}, "sinks = True is not supported"),
    ({"softcap": True}, "softcap = True is not supported"),
    ({"q_lens": True}, "q_lens = True is not supported"),
]


@pytest.mark.parametrize(("axes", "message"), REJECTED, ids=lambda value: value if isinstance(value, str) else "")
def test_rejections_name_their_rule(axes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**axes)
    assert message in str(caught.value)
    assert str(caught.value).startswith("paged_decode.tcgen05: ")


def test_a_chip_without_tensor_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sm_90a \(H200\) has no tensor memory.*mma serves it"):
        config().check_arch(H200)


def test_budgets_of_every_default_fit_every_chip() -> None:
    """Of all heads, formats and tiles, those that do not fit two CTAs an SM fit one."""
    for arch in ARCHES:
        for head_dim in (128, 256, 512):
            for cfg in (
                *(config(head_dim=head_dim, kv_format=f, row_tile=t)
                  for f in ("fp8", "e3m2", "e2m3", "e2m1", "nvfp4") for t in (16, 32)),
                *(bf16(head_dim=head_dim, row_tile=t) for t in (8, 16, 32)),
            ):  # fmt: skip
                axes = cfg.axes() | {"ctas_per_sm": 1}
                assert legal(cfg, arch) or legal(Tcgen05Config(**axes), arch), cfg.key(arch.name)


def test_a_ring_of_one_stage_is_refused() -> None:
    small = Arch(**{name: getattr(THOR, name) for name in THOR.__slots__} | {"smem_per_sm": 160 * 1024})  # no chip's
    with pytest.raises(ConfigError, match="leaves 1 ring stages at ctas_per_sm 2 on sm_110a: expected at least 2"):
        config(kv_format="nvfp4", head_dim=512).check_arch(small)


def test_accumulators_that_leave_no_room_to_convert_are_refused() -> None:
    small = Arch(**{name: getattr(THOR, name) for name in THOR.__slots__} | {"tmem_columns": 256})  # no chip's yet
    with pytest.raises(ConfigError, match="takes 256 columns of tensor memory: 128 are a CTA's at ctas_per_sm 2"):
        bf16(row_tile=32, head_dim=512).check_arch(small)


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "tail"),
    [
        (config(), "d256-p128-kvfp8-qte4m3"),
        (config(convert_warpgroups=0), "d256-p128-kvfp8-qte4m3"),
        (config(kv_format="nvfp4", convert_warpgroups=1, row_tile=32), "d256-p128-kvnvfp4-qte4m3-t32"),
        (bf16(convert_warpgroups=1), "d256-p128-kvfp8"),
        (bf16(convert_warpgroups=2, row_tile=8), "d256-p128-kvfp8-t8-cw2"),
        (bf16(ctas_per_sm=1, convert_warpgroups=1), "d256-p128-kvfp8-cps1-cw1"),
        (config(q_len=4, causal=False), "d256-p128-kvfp8-qte4m3"),
        (config(max_kv_stages=6, l2_prefetch=2, kv_evict_first=True, pdl=True),
         "d256-p128-kvfp8-qte4m3-pdlon-st6-pf2-efon"),
    ],
)  # fmt: skip
def test_keys_spell_the_canonical_configuration(cfg: Tcgen05Config, tail: str) -> None:
    key = cfg.key("sm_110a")
    assert key == f"paged_decode-sm_110a-tcgen05-{tail}"
    assert parse_key(key) == (cfg.canonical(), "sm_110a")


# -- the launch ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cfg", "dtype", "box", "swizzle"),
    [
        (config(), "uint8", (128, 128, 1, 1), "128B"),
        (config(page_size=16), "uint8", (128, 16, 1, 1), "128B"),
        (bf16(page_size=64, head_dim=512), "uint8", (128, 64, 1, 1), "128B"),
        (config(kv_format="e3m2", page_size=32), "16u6_align16b", (128, 32, 1, 1), "128B"),
        (config(kv_format="e2m3"), "16u6_align16b", (128, 128, 1, 1), "128B"),
        (config(kv_format="e2m1", head_dim=128), "16u4_align16b", (128, 128, 1, 1), "128B"),
        (config(kv_format="nvfp4", page_size=64), "uint8", (128, 64, 1, 1), "none"),
        (config(kv_format="nvfp4", head_dim=512), "uint8", (128, 128, 1, 1), "none"),
    ],
)
def test_tensor_maps(cfg: Tcgen05Config, dtype: str, box: tuple[int, ...], swizzle: str) -> None:
    record = declare(cfg, THOR)
    for name, found in zip("kv", record.tensor_maps, strict=True):
        assert (found.name, found.dtype, found.box, found.swizzle) == (f"{name}_map", dtype, box, swizzle)
        row = cfg.head_dim // 2 if cfg.kv_format == "nvfp4" else cfg.head_dim
        assert found.extents == (row, cfg.page_size, "num_kv_heads", "num_pages")
        assert found.strides == (f"{name}_row_bytes", f"{name}_head_bytes", f"{name}_page_bytes")


def test_launch_record() -> None:
    record = declare(config(pdl=True), THOR)
    assert record.symbol == "cubinery_paged_decode_tcgen05_0"
    assert (record.block, record.tmem_columns, record.min_ctas_per_sm, record.pdl) == ((256, 1, 1), 64, 2, True)
    assert record.grid == ("q_tiles", "num_kv_heads", "num_work")
    names = [p.name for p in record.params]
    assert "k_scales" not in names
    scaled = [p.name for p in declare(config(kv_format="nvfp4"), THOR).params]
    assert scaled[: len(names)] == names
    assert "k_scales" in scaled


class NoDriver(Driver):  # type: ignore[misc]
    """Encodes nothing: the checks before it are what is tested."""

    def encode_tensor_map(self, *_: object) -> bytes:
        return bytes(128)


@pytest.mark.parametrize(("kv_format", "align"), [("fp8", 16), ("e2m3", 32), ("nvfp4", 16)])
def test_padded_maps_want_32_bytes(kv_format: str, align: int) -> None:
    spec = declare(config(kv_format=kv_format), THOR).tensor_maps[0]
    cache = TensorMapCache(NoDriver())
    extents = (spec.extents[0], 128, 4, 10)
    good = (align * 3, *extents, align * 7, align * 9, align * 33)
    cache.encode("good", spec, good)  # type: ignore[arg-type]
    for place, name in ((0, "k"), (5, "k_row_bytes"), (6, "k_head_bytes"), (7, "k_page_bytes")):
        bad = [*good]
        bad[place] += align // 2  # type: ignore[operator]
        with pytest.raises(ArgumentError, match=f"^{name} = .*{align}"):
            cache.encode("bad", spec, bad)  # type: ignore[arg-type]
