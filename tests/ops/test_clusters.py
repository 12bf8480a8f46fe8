"""Plans whose sequences each get a cluster of CTAs for every KV head, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operator needs torch")

import numpy as np
import torch
from decode_problem import Problem
from fake_driver import FakeDriver, write_bundle
from host_kernels import HostKernels

from benchmarks import grid
from benchmarks.clusters import Row
from cubinery.aot.kernels.paged_decode import decode_abi, mma_abi
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.errors import AbiError, CaptureError, ConfigError, PlanError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_RULES, cluster_rules
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS
from cubinery.runtime.ops.paged_decode.decode_config import DecodeConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.select import Problem as Wanted
from cubinery.runtime.ops.paged_decode.select import choose, select

Make = Callable[..., tuple[PagedDecode, FakeDriver]]
HEADS = {"num_q_heads": 16, "num_kv_heads": 4}


def cluster(decode: PagedDecode, lengths: list[int], **options: Any) -> int:
    return decode.plan(lengths, **(HEADS | options)).cluster


def test_batches_that_do_not_fill_the_chip_get_clusters(make_decode: Make) -> None:
    """The larger, the fewer there are; as long as sequences are short enough for them."""
    decode, driver = make_decode(cluster=None)
    driver.clusters = 66
    for batch, size, longest in (
        (1, 16, 32768),
        (2, 8, 16384),
        (4, 8, 32768),
        (5, 4, 8192),
        (8, 4, 4096),
        (9, 2, 4096),
        (10, 2, 8192),
        (11, 2, 8192),
        (12, 2, 10**6),
        (13, 2, 8192),
        (15, 2, 8192),
        (16, 2, 10**6),
    ):
        assert cluster(decode, [1] * batch) == cluster(decode, [longest] * batch) == size
        if longest < 10**6:
            assert cluster(decode, [longest + 1] * batch) == 1
    assert cluster(decode, [1] * 17) == 1
    assert cluster(decode, [0, 0]) == 8
    assert cluster(decode, [8192], num_q_heads=4, num_kv_heads=1) == 16
    assert cluster(decode, [16384], num_q_heads=4, num_kv_heads=1) == 16
    assert cluster(decode, [16385], num_q_heads=4, num_kv_heads=1) == 1


def test_what_was_measured_to_be_slower_is_not_chosen() -> None:
    """And what was measured to be much faster is: each rule has measurements to stand on (`make bench-clusters`)."""
    grounds = set()
    rows = grid.read(Path(__file__).parent / "cluster_times_h200.csv", Row)
    for row in rows:
        problem = Wanted(
            head_dim=row.head_dim, page_size=16, kv_format=row.kv_format, group_size=row.query_heads, q_len=row.q_len
        )
        config = choose(problem, ARCHS["sm_90a"]).clustered
        assert config is not None
        tiles = -(-row.keys // TILE_KEYS)
        rules = cluster_rules(
            row.sequences, row_tile=config.row_tile, row_bytes=config.row_bytes, longest=tiles, mean=tiles
        )
        chosen = next((rule for rule in rules if rule.size == row.cluster), None)
        if chosen is not None:
            grounds.add(chosen)
            assert row.ratio <= 1.015, row
        elif row.q_len == 1 and row.keys <= 4096:
            assert row.ratio > 0.93, row
    assert len(rows) > 500
    assert grounds == set(CLUSTER_RULES)


def test_no_option_says_how_to_split_or_what_comes(make_decode: Make) -> None:
    decode, _ = make_decode(cluster=None)
    assert cluster(decode, [100]) == 16
    for options in (
        {"max_splits": 1}, {"max_splits": 4}, {"force_splits": 1}, {"pad_to": 1}, {"policy": "thor"},
        {"min_chunk_tiles": 2}, {"capturable": True},
    ):  # fmt: skip
        assert cluster(decode, [100], **options) == 1


def test_all_wait_for_the_longest_sequence(make_decode: Make) -> None:
    """One that is much longer than the others keeps its CTAs busy when theirs have gone."""
    decode, driver = make_decode(cluster=None)
    driver.clusters = 66
    even, uneven = [10_000] * 15 + [12_000], [1000] * 15
    assert cluster(decode, even) == 2
    assert cluster(decode, [*uneven, 2048]) == 2
    assert cluster(decode, [*uneven, 2049]) == 1
    assert cluster(decode, [1, 1, 1, 8192]) == 8
    assert cluster(decode, [1, 1, 1, 8193]) == 1


BAD = [
    {"max_splits": "3"}, {"max_splits": 0}, {"max_splits": True}, {"force_splits": -1}, {"force_splits": None},
    {"force_splits": "2"}, {"pad_to": None}, {"pad_to": "x"}, {"min_chunk_tiles": 0}, {"min_chunk_tiles": []},
    {"force_splits": np.array([1, 2])}, {"pad_to": np.array([1, 2])},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD)
@pytest.mark.parametrize("asked", [None, 8])
def test_options_that_cannot_be_are_named(make_decode: Make, asked: int | None, options: dict[str, Any]) -> None:
    """Whether a plan gets clusters by itself, or because they were asked for."""
    decode, _ = make_decode(cluster=asked)
    (name,) = options
    with pytest.raises(PlanError, match=f"{name} = "):
        decode.plan([100], **HEADS, **options)


def test_a_device_that_holds_too_few_clusters_gets_smaller_ones_or_none(
    make_decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, driver = make_decode(cluster=None)
    driver.clusters = 3
    assert cluster(decode, [100]) == 1
    assert cluster(decode, [100], num_q_heads=12, num_kv_heads=3) == 16
    fresh, driver = make_decode(cluster=None)
    monkeypatch.setattr(driver, "max_clusters", lambda kernel, config: 120 // config.cluster[0])
    assert cluster(fresh, [100] * 4) == 4, "16 clusters of 8 do not fit"
    assert cluster(fresh, [100] * 16) == 1, "nor do 64 of 2"


def test_row_tiles_have_clusters_of_their_own(make_decode: Make) -> None:
    """32 heads a KV head, four tokens: four tiles of 32 rows."""
    decode, driver = make_decode(cluster=None, q_len=4, group_sizes=(32,))
    driver.clusters = 66
    heads = {"num_q_heads": 32, "num_kv_heads": 1}
    assert decode.config(32).row_tile > 32
    assert cluster(decode, [100], **heads) == 1, "wgmma serves them"
    decode, driver = make_decode(cluster=None, q_len=4, group_sizes=(8,))
    driver.clusters = 66
    assert decode.config(8).row_tile == 32
    assert [cluster(decode, [100] * n, num_q_heads=8, num_kv_heads=1) for n in (7, 16, 17, 33)] == [16, 8, 4, 2]


def test_a_plan_of_clusters_splits_nothing_and_needs_no_workspace(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode(cluster=None)
    driver.on_launch = HostKernels(3, 8, 1, True)
    plan = decode.plan(p.lengths, **p.heads)
    assert plan.keys[0].endswith("-cl16")
    size = plan.cluster
    assert (plan.workspace_bytes(), plan.splits.max_splits, plan.num_work) == (0, 1, 3)
    o, lse = plan.run(*p.tensors)
    (launch,) = driver.launches
    assert launch.grid == (size, p.h_k, 3)
    assert launch.config.cluster == (size, 1, 1)
    split = decode.plan(p.lengths, **p.heads, force_splits=1)
    assert all(torch.equal(a, b) for a, b in zip((o, lse), split.run(*p.tensors), strict=True))


def test_updates_keep_the_kernel(make_decode: Make) -> None:
    decode, _ = make_decode(cluster=None)
    plan = decode.plan([100, 5], **HEADS)
    plan.update([100_000, 0])
    assert (plan.config.cluster, plan.cluster) == (16, 8)
    assert plan.num_work == 2


def test_a_launch_says_how_many_keys_it_expects(make_decode: Make) -> None:
    """All sequences' length where they have one, after updates too; the block table always has room for it."""
    p = Problem([300, 300, 300], np.random.default_rng(0), torch)
    decode, driver = make_decode(cluster=None)
    driver.on_launch = kernels = HostKernels(3, 8, 1, True)
    plan = decode.plan([300, 300, 300], **p.heads)
    assert plan.config.cluster == 16
    for lengths, expected in (
        (None, 300), ([5, 5, 5], 5), ([5, 6, 5], 0), ([0, 0, 0], 0), ([300, 300, 300], 300), ([299, 300, 300], 0),
    ):  # fmt: skip
        if lengths is not None:
            plan.update(lengths)
        plan.run(*p.tensors)
        assert kernels.expected_keys.pop() == expected


def test_a_kernel_that_is_not_told_what_to_expect_serves_too(
    make_decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of a bundle in which launches do not say so; the plan asks the kernel, not its configuration."""
    p = Problem([300, 300], np.random.default_rng(0), torch)
    with monkeypatch.context() as older:
        older.setattr(DecodeConfig, "expected_keys", False)
        decode, driver = make_decode(cluster=None)
    assert decode.selection(4).clustered.expected_keys
    driver.on_launch = kernels = HostKernels(2, 8, 1, True)
    plan = decode.plan([300, 300], **p.heads)
    plan.run(*p.tensors)
    plan.update([299, 5])
    plan.run(*p.tensors)
    assert kernels.expected_keys == [0, 0]
    assert plan.config.cluster == 16


def test_a_kernel_of_an_older_bundle_has_clusters_of_one_size(
    make_decode: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves what that size suits; other plans take other kernels, and a size that is asked for is refused."""
    record = decode_abi.decode_record
    with monkeypatch.context() as older:
        older.setattr(mma_abi, "decode_record", lambda *args: replace(record(*args), smaller_clusters=False))
        decode, driver = make_decode(cluster=None)
    driver.clusters = 66
    assert [cluster(decode, [100] * batch) for batch in (1, 2, 8, 16)] == [16, 1, 1, 1]
    asked = PagedDecode(decode.library, head_dim=128, page_size=16, kv_format="fp8", cluster=8)
    with pytest.raises(
        PlanError, match=r"cluster = 8: .* one size alone: build it anew .*clusters of 8 CTAs: expected 16"
    ):
        asked.plan([100], **HEADS)


def test_what_prints_says_the_size(make_decode: Make) -> None:
    decode, _ = make_decode(cluster=None)
    assert "cl16 in clusters of 8>" in repr(decode.plan([100, 100], **HEADS))
    assert "in clusters" not in repr(decode.plan([100], **HEADS, force_splits=1))


def test_a_kernel_of_a_newer_version_says_what_it_would_have_to_be_told(
    make_decode: Make, p: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter that this version knows nothing of is an error that says so, for any kernel."""
    with monkeypatch.context() as newer:
        newer.setitem(decode_abi.OPTIONAL_PARAMS, "novelty", "i32")
        newer.setattr(DecodeConfig, "novelty", True, raising=False)
        decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    with pytest.raises(AbiError, match=r"kvfp8-t8: a launch takes 'novelty', which cubinery .* newer version"):
        plan.run(*p.tensors)
    assert not driver.launches


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"pad_to": 5}])
def test_clusters_go_by_sequence_not_by_work_item(make_decode: Make, options: dict[str, Any]) -> None:
    """Plans list the longest first, and may be padded; a cluster has the number of its sequence."""
    p = Problem([5, 300, 40], np.random.default_rng(0), torch)
    decode, driver = make_decode(cluster=16)
    driver.on_launch = HostKernels(3, 8, 1, True)
    plan = decode.plan(p.lengths, **p.heads, **options)
    o, lse = plan.run(*p.tensors)
    assert driver.launches[-1].grid == (16, p.h_k, 3)
    single, other = make_decode(cluster=1)
    other.on_launch = HostKernels(3, 8, 1, True)
    expected = single.plan(p.lengths, **p.heads, force_splits=1).run(*p.tensors)
    assert all(torch.equal(a, b) for a, b in zip((o, lse), expected, strict=True))


def test_a_cluster_that_is_asked_for_serves_every_plan(make_decode: Make) -> None:
    decode, driver = make_decode(cluster=8)
    plans = [
        decode.plan(n, **HEADS, **o) for n, o in (([100_000] * 50, {}), ([5], {"pad_to": 7}), ([5], {"max_splits": 1}))
    ]
    assert [plan.cluster for plan in plans] == [8, 8, 8]
    assert [plan.num_work for plan in plans] == [50, 7, 1]
    for name in ("max_splits", "force_splits"):
        with pytest.raises(PlanError, match=f"{name} = 2 with cluster = 8: expected none.*cluster = 1"):
            decode.plan([5], **HEADS, **{name: 2})
    driver.clusters = 0
    fresh = PagedDecode(Library.open(decode.library.bundles[0].root, driver=driver), head_dim=128, page_size=16,
                        kv_format="fp8", cluster=8)  # fmt: skip
    with pytest.raises(PlanError, match=r"cluster = 8 on .*: no part of it holds so many CTAs at once"):
        fresh.plan([5], **HEADS)


def test_only_mma_has_clusters() -> None:
    """What cannot be had is named, with the implementation that could."""
    wanted = Wanted(head_dim=128, page_size=16, kv_format="fp8", group_size=4)
    for arch in ARCHS.values():
        assert (select(wanted, arch, cluster=8).impl, select(wanted, arch, cluster=8).cluster) == ("mma", 16)
        assert select(wanted, arch, cluster=1) == select(wanted, arch)
    for forced in ({"impl": "wgmma"}, {"impl": "tcgen05"}, {"l2_prefetch": 1}):
        with pytest.raises(ConfigError, match=r"cluster = 8 with .*expected 'mma'"):
            select(wanted, ARCHS["sm_110a"], cluster=8, **forced)
    wrongs: tuple[Any, ...] = (True, 1.0, "8", 0, 32)
    for wrong in wrongs:
        with pytest.raises(ConfigError, match=f"cluster = {wrong!r}"):
            select(wanted, ARCHS["sm_90a"], cluster=wrong)
    with pytest.raises(ConfigError, match="cluster = 3: expected 1, 2, 4, 8 or 16"):
        select(wanted, ARCHS["sm_90a"], cluster=3)
    wide = Wanted(head_dim=128, page_size=16, kv_format="fp8", group_size=64)
    assert select(wide, ARCHS["sm_90a"], cluster=16).row_tile == 32, "several row tiles, as wide as clusters take"


def test_a_bundle_without_that_kernel_serves_all_plans_with_others(make_decode: Make, tmp_path: Path) -> None:
    decode, _ = make_decode(cluster=None)
    config = decode.config(4)
    driver = FakeDriver(["sm_90a"])
    write_bundle(tmp_path / "less", "sm_90a", [config, *config.requires()])
    library = Library.open(tmp_path / "less", driver=driver)
    less = PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8")
    assert cluster(less, [100]) == 1
    assert not library.misses
    assert len(driver.loads) == 1


def test_preload_loads_it_too(make_decode: Make) -> None:
    decode, driver = make_decode(cluster=None)
    assert [key.removeprefix("paged_decode-sm_90a-") for key in decode.keys(4)] == [
        "mma-d128-p16-kvfp8-t8", "mma-d128-p16-kvfp8-t8-cps1", "mma-d128-p16-kvfp8-t8-cl16", "plan",
    ]  # fmt: skip
    decode.preload(4)
    loaded = len(driver.loads)
    assert cluster(decode, [100]) == 16
    assert len(driver.loads) == loaded == 4


def test_lengths_are_numbers_of_any_kind(make_decode: Make) -> None:
    decode, _ = make_decode(cluster=None)
    for lengths in (np.array([16384]), torch.tensor([16384]), np.array([16384], np.uint16)):
        assert decode.plan(lengths, **HEADS).config.cluster == 16


@pytest.mark.parametrize("asked", [None, 8])
def test_planning_during_a_capture_is_named_whatever_is_loaded(make_decode: Make, asked: int | None) -> None:
    decode, driver = make_decode(cluster=asked)
    driver.capturing.add(7)
    with pytest.raises(CaptureError, match="plan copies from the host"):
        decode.plan([100], **HEADS, stream=7)
    assert not driver.loads
