"""The planning kernel on the simulator: the host planner's arrays, integer for integer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubinery.aot import verify
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.problems.paged_decode import plan as problems
from cubinery.aot.problems.paged_decode.plan import H200, THOR, Case
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.windows import EVERYTHING, Window

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the problem's tensors are torch's")

ARCHS = ("sm_90a", "sm_110a")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The planning kernel for Hopper and for Thor."""
    out = tmp_path_factory.mktemp("plan")
    spec = out / "plan.yaml"
    spec.write_text(f"family: paged_decode\nimpl: plan\nmatrix: {{arch: [{', '.join(ARCHS)}]}}\nemit: [ptx]\n")
    report = build(expand(load_specs([spec]), list(ARCHS)), BuildOptions(out=out / "kernels"))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    return out / "kernels"


def simulator(bundles: Path, arch: str) -> Callable[[Case], str]:
    """Runs a case; returns what is wrong."""
    driver = SimDriver(arch, [bundles / arch])
    library = Library.open(bundles / arch, driver=driver)

    def place(**tensors: Any) -> dict[str, Any]:
        driver.register_tensors(**tensors)
        return tensors

    return lambda case: problems.run(library, case, place)


@pytest.mark.parametrize(("arch", "schedule"), [("sm_90a", "fair:0"), ("sm_110a", "late:0"), ("sm_110a", "delays:0")])
def test_the_cases_of_verification(bundles: Path, arch: str, schedule: str) -> None:
    key = PlanConfig().key(arch)
    outcome = verify.run(verify.Task(bundles / arch, arch, key, schedule))
    assert outcome.ok, outcome.error
    assert outcome.executed == (key,)


length = st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.just(2**31 - 128))
batches = st.one_of(
    st.lists(length, min_size=1, max_size=9),
    st.builds(lambda n, top, seed: np.random.default_rng(seed).integers(0, top, n).tolist(),
              st.sampled_from([31, 32, 33, 64, 65, 257]), st.sampled_from([1, 500, 100_000]), st.integers(0, 99)),
)  # fmt: skip


@settings(max_examples=60)
@given(
    lengths=batches,
    machine=st.sampled_from([H200, THOR]),
    policy=st.sampled_from(["balanced", "thor"]),
    heads=st.sampled_from([1, 3, 8]),
    ctas_per_sm=st.sampled_from([1, 2]),
    costs=st.sampled_from([(13, 80), (16, 176), (44, 313), (1, 1), (1000, 2000)]),
    max_splits=st.sampled_from([None, None, 1, 3]),
    force_splits=st.sampled_from([0, 0, 0, 1, 7]),
    min_chunk_tiles=st.sampled_from([1, 1, 3]),
    window=st.sampled_from([EVERYTHING, EVERYTHING, Window(1, 1), Window(129, 4), Window(2000, 2), Window(2**30, 16)]),
    spare=st.sampled_from([0, 1, 40]),
    wide=st.booleans(),
)
def test_equal_to_the_host_planner(
    bundles: Path, lengths: list[int], machine: dict[str, Any], policy: str, heads: int, ctas_per_sm: int,
    costs: tuple[int, int], max_splits: int | None, force_splits: int, min_chunk_tiles: int, window: Window, spare: int,
    wide: bool,
) -> None:  # fmt: skip
    options = machine | {
        "policy": policy, "num_kv_heads": heads, "ctas_per_sm": ctas_per_sm, "max_splits": max_splits,
        "force_splits": force_splits, "min_chunk_tiles": min_chunk_tiles,
        "lone_tile_cost": costs[0], "item_cost": costs[1],
    }  # fmt: skip
    run = simulator(bundles, "sm_110a" if machine is THOR else "sm_90a")
    assert run(Case(lengths=lengths, spare=spare, window=window, wide=wide, options=options)) == ""


@pytest.mark.parametrize("options", [H200, H200 | {"num_kv_heads": 1}, THOR])
@pytest.mark.parametrize("count", [1024, 1025, 4096])
def test_large_batches(bundles: Path, count: int, options: dict[str, Any]) -> None:
    """More sequences than threads, up to the most; with one KV head on 132 SMs some are split."""
    lengths = np.random.default_rng(count).integers(0, 3000, count)
    lengths[:3] = 400_000
    run = simulator(bundles, "sm_90a")
    assert run(Case(lengths=lengths.tolist(), spare=count % 3, options=options)) == ""


def launch(bundles: Path, lengths: list[int], num_work: int, **changes: Any) -> tuple[list[list[int]], list[int]]:
    """(work, lengths) of a plan for two KV heads, in a list that the host might refuse."""
    import torch

    from cubinery.runtime.ops.paged_decode.device_planner import DevicePlanner

    driver = SimDriver("sm_90a", [bundles / "sm_90a"])
    library = Library.open(bundles / "sm_90a", driver=driver)
    seq_lens = torch.tensor(lengths)
    arrays = torch.full((8 * num_work + len(lengths) + 1,), 77, dtype=torch.int32)
    driver.register_tensors(seq_lens=seq_lens, arrays=arrays)
    planner = DevicePlanner(
        library.kernel(PlanConfig().key("sm_90a")), work=arrays.data_ptr(), num_work=num_work,
        num_seqs=len(lengths), max_length=1000, window=EVERYTHING,
        options=problems.DEFAULTS | THOR | {"num_kv_heads": 2} | changes,
    )  # fmt: skip
    planner.launch(seq_lens.data_ptr(), 8, 0)
    assert arrays[-1] == 77
    return arrays[: 8 * num_work].view(-1, 8).tolist(), arrays[8 * num_work : -1].tolist()


def test_lengths_are_kept_within_the_bound(bundles: Path) -> None:
    work, lengths = launch(bundles, [5000, -3, 2**31, 2**40, -(2**40), 999], 6, max_splits=1)
    assert lengths == [1000, 0, 1000, 1000, 0, 999]
    assert work == [
        [0, 0, 1000, 1000, 0, 1, 0, 0], [2, 0, 1000, 1000, 0, 1, 0, 0], [3, 0, 1000, 1000, 0, 1, 0, 0],
        [5, 0, 999, 999, 0, 1, 0, 0], [1, 0, 0, 0, 0, 1, 0, 0], [4, 0, 0, 0, 0, 1, 0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize("options", [{"policy": "thor"}, {"policy": "balanced", "force_splits": 8}])
def test_what_does_not_fit_the_list_is_not_split(bundles: Path, options: dict[str, Any]) -> None:
    """The host refuses these plans, which take eight items at least; a kernel cannot."""
    work, _ = launch(bundles, [1000, 100], 4, **options)
    assert work == [[0, 0, 1000, 1000, 0, 1, 0, 0], [1, 0, 100, 100, 0, 1, 0, 0], [-1] * 8, [-1] * 8]
    work, _ = launch(bundles, [1000, 100], 9, **options)
    assert [entry[0] for entry in work].count(0) == 8
