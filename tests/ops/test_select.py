"""The selector: which kernel serves a problem, and the closure of a domain."""

from __future__ import annotations

import pytest

from cubinery.runtime.arch import ARCHS, resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.select import Problem, outcomes, row_tile_for, select

H200 = resolve("sm_90a")


def problem(**changes: object) -> Problem:
    axes = {"head_dim": 128, "page_size": 16, "kv_format": "fp8", "group_size": 4} | changes
    return Problem(**axes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("n_q", "tile"), [(1, 16), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128), (1000, 128)]
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
        (256, "fp8", 1, 16, 1), (256, "bf16", 128, 128, 1),
        (512, "fp8", 16, 16, 1), (512, "fp8", 17, 32, 1), (512, "fp8", 128, 64, 1), (512, "bf16", 1, 16, 1),
    ],
)  # fmt: skip
def test_the_largest_tile_that_fits(head_dim: int, kv_format: str, n_q: int, tile: int, ctas: int) -> None:
    for arch in ARCHS.values():
        config = select(problem(head_dim=head_dim, kv_format=kv_format, group_size=n_q), arch)
        assert (config.row_tile, config.ctas_per_sm) == (tile, ctas)


def test_a_forced_number_of_ctas_shrinks_the_tile() -> None:
    assert select(problem(group_size=128), H200, ctas_per_sm=2).row_tile == 64
    with pytest.raises(ConfigError, match="row_tile 128 of head_dim 128 takes at least 8 computing warps a CTA"):
        select(problem(), H200, ctas_per_sm=2, row_tile=128)
    with pytest.raises(ConfigError, match="row_tile 128 of head_dim 512 takes at least 16 computing warps"):
        select(problem(head_dim=512), H200, row_tile=128)


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
        expected = {
            select(problem(head_dim=d, page_size=p, kv_format=f, q_len=q, causal=c, group_size=g), arch)
            for d in (128, 256) for p in (16, 64) for f in ("bf16", "fp8")
            for q in (1, 4) for c in (True, False) for g in (1, 4, 8, 16)
        }  # fmt: skip
        assert set(found) == expected


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
