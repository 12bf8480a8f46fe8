"""Public CuTe DSL example kernels for Blackwell on the simulator: right products, and their known defects.

Nothing of the examples is kept here. Point CUBINERY_CUTEDSL_EXAMPLES at a local copy of the folder
examples/python/CuTeDSL of https://github.com/NVIDIA/cutlass; without it these tests are skipped. docs/results/ptxsim.md
tells what they found in which commit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ptxsim.examples import repairs, simulate
from ptxsim.examples.problems import DECODE, LATENT, PRODUCTS, Case, Problem

from cubinery.aot.ptxsim.faults import BarrierFault, Fault, ProxyFault, RaceFault, TensorMemoryFault, TransactionFault

EXAMPLES = os.environ.get("CUBINERY_CUTEDSL_EXAMPLES", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not EXAMPLES, reason="CUBINERY_CUTEDSL_EXAMPLES names no local copy of the CuTe DSL examples"),
]
Traces = Callable[[Case], dict[str, Any]]
HOSTILE = ("late:0", "delays:0", "priorities:0")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """Compiles a case once, in a process of its own: the DSL reads its settings when it is imported."""
    folder, known = tmp_path_factory.mktemp("traces"), {}

    def trace(case: Case) -> dict[str, Any]:
        key = json.dumps([case.kind, case.settings])
        if key not in known:
            out = folder / f"{len(known)}.json"
            script = Path(__file__).with_name("hosts.py")
            command = [sys.executable, str(script), case.kind, json.dumps(case.settings), EXAMPLES, str(out)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-4000:]
            known[key] = json.loads(out.read_text())
        found: dict[str, Any] = known[key]
        return found

    return trace


def problem(case: Case) -> Problem:
    torch.manual_seed(0)
    return case.make(case.settings)


def fault(trace: dict[str, Any], case: Case, ptx: str, schedule: str = "fair") -> Fault:
    """What the simulator reports."""
    with pytest.raises(Fault) as caught:
        simulate.run(trace, ptx, problem(case).tensors, schedule)
    return caught.value


@pytest.mark.parametrize("name", PRODUCTS)
def test_product(name: str, traces: Traces) -> None:
    """As published, in fair and hostile schedules, with every check on."""
    case = PRODUCTS[name]
    trace = traces(case)
    for schedule in case.schedules:
        made = problem(case)
        simulate.run(trace, trace["ptx"], made.tensors, schedule)
        made.check()


# -- the mixed-input decode: each defect, once those before it are cured ------------------------------

DECODE_DEFECTS: list[tuple[Callable[[str], str], type[Fault], str]] = [
    (repairs.initialisation_fence, ProxyFault, "was initialised and not made visible to the async proxy"),
    (repairs.answered_arrivals, BarrierFault, r"arrives twice at barrier \d in one phase"),
    (repairs.zero_fill_wait, TensorMemoryFault, r"tcgen05\.wait::st"),
    (repairs.maximum_barrier, RaceFault, r"updates shared address 0x\w+, read by (lane \d+ of )?warp \d"),
    (repairs.balanced_bytes, TransactionFault, "ends with a transaction count of 2048 bytes"),
]
"""Repair, and the fault that is reported where it alone is missing."""


def cured(ptx: str, *, but: int = -1) -> str:
    ptx = repairs.store_wait(ptx)  # the last copies end with the kernel, so nothing can be seen to go wrong
    for i, (repair, _, _) in enumerate(DECODE_DEFECTS):
        ptx = ptx if i == but else repair(ptx)
    return ptx


@pytest.mark.parametrize("defect", range(len(DECODE_DEFECTS)), ids=[d[0].__name__ for d in DECODE_DEFECTS])
def test_each_defect_of_the_decode_alone(defect: int, traces: Traces) -> None:
    """Found in all schedules but the lapped barrier, which needs one in which a warp is slow at the right moment."""
    trace = traces(DECODE)
    repair, kind, message = DECODE_DEFECTS[defect]
    ptx = cured(trace["ptx"], but=defect)
    found: dict[str, Fault] = {}
    for schedule in ("fair", "late:0", "delays:0", "priorities:0"):
        try:
            simulate.run(trace, ptx, problem(DECODE).tensors, schedule)
        except Fault as error:
            found[schedule] = error
    assert found
    for schedule, report in found.items():
        assert isinstance(report, kind), f"{schedule}: {report}"
        assert re.search(message, report.detail), f"{schedule}: {report}"
    if repair is not repairs.answered_arrivals:
        assert len(found) == 4


@pytest.mark.parametrize("schedule", ["fair", *HOSTILE])
def test_the_cured_decode_is_right(schedule: str, traces: Traces) -> None:
    trace, made = traces(DECODE), problem(DECODE)
    simulate.run(trace, cured(trace["ptx"]), made.tensors, schedule)
    made.check()


def test_the_race_of_the_decode_changes_o_and_not_the_lse(traces: Traces) -> None:
    """The same defect without the race check: a schedule of changing priorities makes O wrong, the LSE stays right."""
    trace, worst = traces(DECODE), 0.0
    ptx = cured(trace["ptx"], but=[d[0] for d in DECODE_DEFECTS].index(repairs.maximum_barrier))
    for seed in range(6):
        made = problem(DECODE)
        simulate.run(trace, ptx, made.tensors, f"priorities:{seed}", races=False)
        errors = made.errors()
        worst = max(worst, errors[5])
        assert errors[7] <= made.expected[7][1]
    assert worst > 2 * problem(DECODE).expected[5][1]


# -- the MLA decode -----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["fair", "late:0", "priorities:0"])
def test_the_exchange_buffer_of_the_mla_decode_is_overwritten(schedule: str, traces: Traces) -> None:
    trace = traces(LATENT)
    found = fault(trace, LATENT, trace["ptx"], schedule)
    assert isinstance(found, RaceFault)
    assert "writes shared address" in found.detail
    assert "read by warp" in found.detail


@pytest.mark.parametrize("schedule", ["fair", *HOSTILE])
def test_the_cured_mla_decode_is_right(schedule: str, traces: Traces) -> None:
    trace, made = traces(LATENT), problem(LATENT)
    simulate.run(trace, repairs.exchange_barrier(trace["ptx"]), made.tensors, schedule)
    made.check()


def test_the_race_of_the_mla_decode_changes_o(traces: Traces) -> None:
    trace, made = traces(LATENT), problem(LATENT)
    simulate.run(trace, trace["ptx"], made.tensors, "priorities:0", races=False)
    errors = made.errors()
    assert errors[5] > 2 * made.expected[5][1]
    assert errors[6] <= made.expected[6][1]
