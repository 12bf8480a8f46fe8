"""What lies past a sequence's end, in the page of its last key, reaches no result of a decode on tensor memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")

from gpu.problems import same_bits
from proof.bench import Bench
from proof.build import build_keys
from proof.campaign import Task, run, tasks
from proof.trials import Trial

from cubinery.runtime.families import parse_key

KEYS = {
    "paged_decode-sm_110a-tcgen05-d128-p16-kvfp8-qte4m3": "late:0",
    "paged_decode-sm_110a-tcgen05-d256-p64-kvfp8-qte4m3-q4-t32-pdlon-pf1-efon": "fair:0",
    "paged_decode-sm_110a-tcgen05-d128-p128-kvfp8": "delays:0",
    "paged_decode-sm_110a-tcgen05-d128-p16-kvfp8-q3-t8-pf3-efon": "priorities:0",
    "paged_decode-sm_110a-tcgen05-d128-p16-kve2m3-qte4m3": "late:0",
    "paged_decode-sm_110a-tcgen05-d128-p32-kvnvfp4-qte4m3-cps1": "delays:0",
}
"""A kernel of each way in which K and V reach the tensor core, small and large pages, one token and several; and the
schedule that it meets."""


def tails(bench: Bench) -> None:
    """Lengths around a page and a tile, whole and in chunks: with NaN in the tails of K and V, then zeros."""
    page = bench.config.page_size
    case = bench.case([1, page - 1, page, page + 1, 127, 128, 129, 300])
    behind = ~case.live & case.live.any(1, keepdim=True)
    assert behind.any(), "no page has a tail"
    if bench.config.kv_format == "fp8":
        assert all(cache[behind].float().isnan().all() for cache in (case.k, case.v))
    plans = [bench.plan(case, force_splits=force_splits) for force_splits in (1, 3)]
    assert [int(plan.splits.max_splits) for plan in plans] == [1, 3]
    found = []
    for plan in plans:
        found.append(bench.run(plan, case))
        bench.check(plan, case, *found[-1])
    bench.clear_tails(case)
    for plan, (out, lse) in zip(plans, found, strict=True):
        clean, clean_lse = bench.run(plan, case)
        assert same_bits(clean, out)
        assert same_bits(clean_lse, lse)


@pytest.fixture(scope="module")
def by_key(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Task]:
    """The kernels' tasks."""
    out: Path = tmp_path_factory.mktemp("tails")
    build_keys(list(KEYS), out)
    any_trial = tasks(out, trials=["lengths"], schedules=["fair:0"])
    return {t.key: Task(t.bundle, t.key, t.ptx, Trial("tails", (1, 4, 7), tails), KEYS[t.key]) for t in any_trial}


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
def test_nothing_behind_a_sequence_counts(by_key: dict[str, Task], key: str) -> None:
    result = run(by_key[key])
    assert not result.error
    assert result.launches == 4


def test_every_way_into_the_tensor_core_is_there() -> None:
    configs = [parse_key(key)[0] for key in KEYS]
    assert {(c.q_dtype, c.kv_format == "fp8", c.kv_format == "nvfp4") for c in configs} == {
        ("e4m3", True, False), ("bf16", True, False), ("e4m3", False, False), ("e4m3", False, True),
    }  # fmt: skip
