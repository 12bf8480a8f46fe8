"""The simulator against what an H200 answered to the corpus, and the corpus on a GPU that is here now."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ptxsim.silicon import bundle
from ptxsim.silicon.corpus import corpus, digest
from ptxsim.silicon.running import Recorded, differences, load_records, run

from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.faults import Fault
from cubinery.aot.ptxsim.schedule import schedule
from cubinery.runtime.library import Library

RECORDS = load_records()
ENTRIES = pytest.mark.parametrize("name", list(corpus()))
_ADD2 = (
    "ptxas expands it to a loop of compare and swap whose upper half is no sum; a chip's own add in global memory is"
)
DISPUTED = {
    "integer_packed_and_bits": {
        "bfe.s32 d a 40 30": "ptxas folds a constant field beyond the top to all ones, also for a positive number"
    },
    "atomics_shared": {
        name: _ADD2
        for kind in ("f16x2", "bf16x2")
        for name in (f"atom.add.noftz.{kind} left shared", f"red.add.noftz.{kind} shared")
    },
}
"""Columns in which the compiled code contradicts the PTX ISA, and the simulator does not follow it."""
MOST_UNRECORDED = 5
SCHEDULED = (
    "mbarrier_ring", "barrier_named", "async_thread_copies", "bulk_load", "bulk_store", "bulk_reduce_u32",
    "cluster_shared", "cluster_store_async", "cluster_bulk", "cluster_bulk_multicast", "tensor_load_2d_64b",
    "tensor_load_multicast", "wgmma_bf16",
)  # fmt: skip


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Runs an entry on the simulator, through manifest, library and launch."""
    root = bundle.write(tmp_path_factory.mktemp("corpus"), corpus().values())
    driver = SimDriver("sm_90a", [root])
    library = Library.open(root, driver)
    return lambda name: run(corpus()[name], library, driver)


def recorded(name: str) -> Recorded | None:
    """What the H200 answered. A record of other PTX or inputs is no record."""
    found = RECORDS.get(name)
    return found if found is not None and found.digest == digest(corpus()[name]) else None


def test_the_corpus_is_recorded() -> None:
    """Few entries may wait for a GPU; those are skipped below."""
    missing = [name for name in corpus() if recorded(name) is None]
    assert len(missing) <= MOST_UNRECORDED, f"run record.py on a GPU: {missing}"


@ENTRIES
def test_the_simulator_agrees_with_the_chip(name: str, simulate: Callable[[str], bytes]) -> None:
    silicon = recorded(name)
    if silicon is None:
        with contextlib.suppress(Fault):
            assert len(simulate(name)) == corpus()[name].out_bytes
        pytest.skip(f"{name}: no record of this version, run record.py on a GPU")
    if silicon.fault:
        with pytest.raises(Fault):
            simulate(name)
        return
    found = differences(corpus()[name], simulate(name), silicon.output)
    disputed = DISPUTED.get(name, {})
    assert [line for line in found if line.partition(":")[0] not in disputed] == []
    assert len(found) == len(disputed), "a disputed column agrees"


@pytest.mark.parametrize("hostile", ["delays:0", "priorities:0"])
def test_no_schedule_changes_the_answer(tmp_path: Path, hostile: str) -> None:
    """Entries of several warps or CTAs with asynchronous copies, under hostile schedules.

    Not `late`: waits of the corpus give up after 4096 tries, so that a GPU never hangs, and `late` outlasts them.
    """
    some = {name: corpus()[name] for name in SCHEDULED}
    driver = SimDriver("sm_90a", [root := bundle.write(tmp_path, some.values())], lambda: schedule(hostile))
    library = Library.open(root, driver)
    for name, entry in some.items():
        silicon = recorded(name)
        assert silicon is not None, f"{name}: run record.py on a GPU"
        assert differences(entry, run(entry, library, driver), silicon.output) == [], name


@pytest.mark.gpu
def test_the_chip_here_agrees_with_the_records(tmp_path: Path) -> None:
    """The records still hold: every entry that the H200 ran, run again."""
    from cubinery.runtime.cuda import CudaDriver

    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas to assemble the corpus with")
    driver = CudaDriver()
    if driver.device_info(0).compute_capability != (9, 0):
        pytest.skip("the corpus is code for sm_90a")
    known = {name: found for name in corpus() if (found := recorded(name)) is not None and not found.fault}
    fine = {name: corpus()[name] for name in known}
    library = Library.open(bundle.write(tmp_path, fine.values(), ptxas="ptxas"), driver)
    found = {
        name: lines
        for name, entry in fine.items()
        if (lines := differences(entry, run(entry, library, driver), known[name].output))
    }
    assert found == {}
