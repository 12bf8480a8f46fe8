"""The selector: which kernel serves a problem, and the closure of a domain."""

from __future__ import annotations

import dataclasses

import pytest

from cubinery.runtime.arch import ARCHS, resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import MmaConfig, Tcgen05Config
from cubinery.runtime.ops.paged_decode.select import Problem, choose, outcomes, row_tile_for, select

H200, THOR = resolve("sm_90a"), resolve("sm_110a")
BLACKWELL = [arch for arch in ARCHS.values() if arch.tmem_columns]


def problem(**changes: object) -> Problem:
    axes = {"head_dim": 128, "page_size": 16, "kv_format": "fp8", "group_size": 4} | changes
    return Problem(**axes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_q", "tile"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1000, 128)]
)
def test_row_tile_is_the_smallest_that_holds_the_rows(n_q: int, tile: int) -> None:
    assert row_tile_for(n_q) == tile


def test_two_ctas_where_they_fit_one_where_they_do_not() -> None:
    assert select(problem(), H200).ctas_per_sm == 2
    wide = problem(head_dim=256, kv_format="bf16", q_len=8, group_size=8)
    assert select(wide, H200).ctas_per_sm == 1
    with pytest.raises(ConfigError, match="ring stages at ctas_per_sm 2 on sm_90a"):
        select(wide, H200, ctas_per_sm=2, row_tile=64)


@pytest.mark.parametrize(
    ("head_dim", "kv_format", "n_q", "tile", "ctas"),
    [
        (128, "fp8", 65, 128, 1), (128, "fp8", 64, 64, 1), (128, "fp8", 16, 16, 2), (64, "bf16", 1000, 128, 1),
        (256, "fp8", 1, 8, 1), (256, "fp8", 9, 16, 1), (256, "bf16", 128, 128, 1), (128, "nvfp4", 8, 8, 2),
        (512, "fp8", 16, 16, 1), (512, "fp8", 17, 32, 1), (512, "fp8", 128, 64, 1), (512, "bf16", 1, 8, 1),
    ],
)  # fmt: skip
def test_the_largest_tile_that_fits(head_dim: int, kv_format: str, n_q: int, tile: int, ctas: int) -> None:
    for arch in ARCHS.values():
        config = select(problem(head_dim=head_dim, kv_format=kv_format, group_size=n_q), arch, impl="mma")
        assert (config.row_tile, config.ctas_per_sm) == (tile, ctas)


def test_a_forced_number_of_ctas_shrinks_the_tile() -> None:
    assert select(problem(group_size=128), H200, ctas_per_sm=2).row_tile == 64
    with pytest.raises(ConfigError, match="row_tile 128 of head_dim 128 takes at least 8 computing warps a CTA"):
        select(problem(), H200, ctas_per_sm=2, row_tile=128)
    with pytest.raises(ConfigError, match="row_tile 128 of head_dim 512 takes at least 16 computing warps"):
        select(problem(head_dim=512), H200, row_tile=128)


def test_tcgen05_can_be_forced_with_its_knobs() -> None:
    config = select(problem(head_dim=256, q_dtype="e4m3"), THOR, impl="tcgen05", max_kv_stages=6, l2_prefetch=2)
    assert config == Tcgen05Config(
        head_dim=256, page_size=16, kv_format="fp8", q_dtype="e4m3", max_kv_stages=6, l2_prefetch=2, kv_evict_first=True
    )
    assert select(problem(), THOR, kv_evict_first=False).impl == "tcgen05", "a knob asks for who has it"
    with pytest.raises(ConfigError, match="l2_prefetch = 2 with impl = 'mma': expected 'tcgen05'"):
        select(problem(), THOR, impl="mma", l2_prefetch=2)
    with pytest.raises(ConfigError, match=r"sm_90a \(H200\) has no tensor memory"):
        select(problem(), H200, impl="tcgen05")
    with pytest.raises(ConfigError, match="tcgen05: softcap = True is not supported"):
        select(problem(softcap=True), THOR, impl="tcgen05")
    with pytest.raises(ConfigError, match="tcgen05: kv_format e2m1 with q_dtype bf16: expected fp8"):
        select(problem(kv_format="e2m1"), THOR, impl="tcgen05")
    with pytest.raises(ConfigError, match="q_dtype = 'fp16' is not supported"):
        select(problem(q_dtype="fp16"), THOR, impl="tcgen05")


@pytest.mark.parametrize(
    ("q_dtype", "n_q", "tile"),
    [("bf16", 1, 16), ("bf16", 16, 16), ("bf16", 17, 32), ("bf16", 40, 32),
     ("e4m3", 1, 16), ("e4m3", 16, 16), ("e4m3", 17, 32), ("e4m3", 40, 32)],
)  # fmt: skip
def test_row_tiles_of_tcgen05(q_dtype: str, n_q: int, tile: int) -> None:
    """The smallest that holds the rows; more rows than the largest holds are several CTAs' where it is forced."""
    for arch in BLACKWELL:
        found = select(problem(q_dtype=q_dtype, group_size=n_q), arch, impl="tcgen05")
        assert (found.impl, found.row_tile, found.ctas_per_sm) == ("tcgen05", tile, 2)
        assert found.axes()["kv_evict_first"] == (q_dtype == "e4m3")


def test_one_cta_where_two_do_not_fit() -> None:
    wide = problem(head_dim=256, kv_format="fp8", group_size=32)
    assert select(wide, THOR, impl="tcgen05", convert_warpgroups=2).ctas_per_sm == 1
    with pytest.raises(ConfigError, match="registers a thread to the softmax at ctas_per_sm 2 on sm_110a"):
        select(wide, THOR, impl="tcgen05", convert_warpgroups=2, ctas_per_sm=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_format": "bf16"}, {"head_dim": 64}, {"group_size": 33}, {"window": True}, {"sinks": True},
        {"softcap": True}, {"q_lens": True}, {"kv_format": "e2m3", "q_dtype": "bf16"},
    ],
)  # fmt: skip
def test_mma_serves_what_tcgen05_does_not(changes: dict[str, object]) -> None:
    for arch in ARCHS.values():
        assert select(problem(q_dtype="e4m3"), arch).impl == ("tcgen05" if arch.tmem_columns else "mma")
        wide = arch.sm == 90 and "group_size" in changes
        assert select(problem(**{"q_dtype": "e4m3"} | changes), arch).impl == ("wgmma" if wide else "mma")
    assert select(problem(), THOR).impl == "tcgen05"
    assert select(problem(), THOR, row_tile=64).impl == "mma", "a tile that only mma has"


def test_choices_can_be_forced() -> None:
    config = select(problem(), H200, impl="mma", row_tile=64, ctas_per_sm=1, pdl=True)
    assert (config.row_tile, config.ctas_per_sm, config.pdl) == (64, 1, True)
    with pytest.raises(ConfigError, match=r"impl = 'append': expected one of mma"):
        select(problem(), H200, impl="append")
    with pytest.raises(ConfigError, match="row_tile = 24"):
        select(problem(), H200, row_tile=24)


def test_non_causal_problems_share_a_kernel_but_keep_their_row_tile() -> None:
    config = select(problem(q_len=8, causal=False), H200)
    assert config == MmaConfig(head_dim=128, page_size=16, kv_format="fp8", row_tile=32, ctas_per_sm=1)


@pytest.mark.parametrize("bad", [{"group_size": 0}, {"q_len": 0}, {"group_size": True}, {"q_len": 1.0}])
def test_problem_rejects(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        problem(**bad)


def test_outcomes_hold_every_selection_once() -> None:
    domain = {
        "head_dim": [128, 256], "page_size": [16, 64], "kv_format": ["bf16", "fp8"],
        "q_len": [1, 4], "causal": [True, False], "group_size": [1, 4, 8, 16],
    }  # fmt: skip
    for arch in ARCHS.values():
        found = list(outcomes(domain, arch.name))
        assert len(found) == len(set(found))
        chosen = [
            choose(problem(head_dim=d, page_size=p, kv_format=f, q_len=q, causal=c, group_size=g), arch)
            for d in (128, 256) for p in (16, 64) for f in ("bf16", "fp8")
            for q in (1, 4) for c in (True, False) for g in (1, 4, 8, 16)
        ]  # fmt: skip
        others = [{s.alone for s in chosen} - {None}, {s.clustered for s in chosen} - {None}]
        assert set(found) == {selection.config for selection in chosen}.union(*others)
        assert [bool(other) for other in others] == [arch.sm == 90] * 2


def test_a_kernel_for_few_ctas_is_the_same_but_for_its_warps() -> None:
    """One CTA an SM with all its warps; where it was measured, and where nobody forces a number of CTAs."""
    found = choose(problem(kv_format="fp8"), H200)
    assert found.alone == dataclasses.replace(found.config, ctas_per_sm=1) != found.config
    assert (found.config.consumer_warps, found.alone.consumer_warps) == (4, 8)
    for other in (
        {"kv_format": "bf16"}, {"head_dim": 64}, {"head_dim": 256}, {"group_size": 17}, {"window": True},
        {"softcap": True}, {"sinks": True}, {"q_lens": True},
    ):  # fmt: skip
        assert choose(problem(**{"kv_format": "fp8"} | other), H200).alone is None
    assert choose(problem(kv_format="fp8"), H200, ctas_per_sm=2).alone is None
    assert choose(problem(kv_format="fp8"), THOR).alone is None


def test_a_kernel_of_clusters_is_the_same_but_for_its_grid() -> None:
    """In a format that was measured, and where nobody says how an SM is shared out."""
    for kv_format in ("bf16", "fp8"):
        for head_dim in (64, 128, 256):
            for group in (1, 8, 16):
                found = choose(problem(kv_format=kv_format, head_dim=head_dim, group_size=group), H200)
                assert found.clustered == dataclasses.replace(found.config, cluster=16) != found.config
                assert found.kernels == tuple(c for c in (found.config, found.alone, found.clustered) if c)
    assert choose(problem(kv_format="fp8", sinks=True), H200).clustered is not None
    assert choose(problem(kv_format="fp8", q_len=4, group_size=8), H200).clustered.row_tile == 32
    for other in (
        {"kv_format": "nvfp4"}, {"head_dim": 512}, {"group_size": 33}, {"window": True},
        {"softcap": True}, {"q_lens": True}, {"q_dtype": "e4m3"},
    ):  # fmt: skip
        assert choose(problem(**{"kv_format": "fp8"} | other), H200).clustered is None
    for forced in ({"ctas_per_sm": 2}, {"cluster": 1}, {"cluster": 16}):
        assert choose(problem(kv_format="fp8"), H200, **forced).clustered is None
    assert choose(problem(kv_format="fp8"), THOR).clustered is None


def test_outcomes_take_forced_choices() -> None:
    domain = {"head_dim": [128], "page_size": [16], "kv_format": ["fp8"], "group_size": [4], "pdl": [True, False]}
    assert [c.axes()["pdl"] for c in outcomes(domain, "thor")] == [True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"headdim": [128]}, "unknown domain axis 'headdim' (did you mean 'head_dim'?)"),
        ({"q_len": []}, "domain axis q_len = []: expected a non-empty list"),
        ({"kv_format": "fp8"}, "domain axis kv_format = 'fp8': expected a non-empty list"),
        ({"page_size": [48]}, "page_size = 48 is not supported"),
        ({"arch": ["sm_90a"]}, "unknown domain axis 'arch'"),
    ],
)
def test_outcomes_reject(change: dict[str, object], message: str) -> None:
    domain = {"head_dim": [128], "page_size": [16], "kv_format": ["fp8"], "group_size": [4]} | change
    with pytest.raises(ConfigError) as error:
        list(outcomes(domain, "sm_90a"))  # type: ignore[arg-type]
    assert message in str(error.value)


def test_outcomes_name_what_is_missing() -> None:
    with pytest.raises(ConfigError, match="no values for page_size, group_size"):
        list(outcomes({"head_dim": [128], "kv_format": ["fp8"]}, "sm_90a"))
