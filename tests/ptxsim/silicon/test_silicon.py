"""The simulator against what an H200 answered to the corpus, and the corpus on a GPU that is here now."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ptxsim.silicon import bundle
from ptxsim.silicon.corpus import corpus, digest
from ptxsim.silicon.running import Recorded, differences, load_records, run

from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.faults import Fault
from cubinery.runtime.library import Library

RECORDS = load_records()
ENTRIES = pytest.mark.parametrize("name", list(corpus()))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], bytes]:
    """Runs an entry on the simulator, through manifest, library and launch."""
    root = bundle.write(tmp_path_factory.mktemp("corpus"), corpus().values())
    driver = SimDriver("sm_90a", [root])
    library = Library.open(root, driver)
    return lambda name: run(corpus()[name], library, driver)


def recorded(name: str) -> Recorded:
    """What the H200 answered. A record of other PTX or inputs is no record."""
    found = RECORDS.get(name)
    assert found is not None, f"{name} was never recorded: run record.py on a GPU"
    assert found.digest == digest(corpus()[name]), f"{name} has changed since it was recorded: run record.py on a GPU"
    return found


@ENTRIES
def test_the_simulator_agrees_with_the_chip(name: str, simulate: Callable[[str], bytes]) -> None:
    silicon = recorded(name)
    if silicon.fault:
        with pytest.raises(Fault):
            simulate(name)
        return
    assert differences(corpus()[name], simulate(name), silicon.output) == []


@pytest.mark.gpu
def test_the_chip_here_agrees_with_the_records(tmp_path: Path) -> None:
    """The records still hold: every entry that the H200 ran, run again."""
    from cubinery.runtime.cuda import CudaDriver

    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas to assemble the corpus with")
    driver = CudaDriver()
    if driver.device_info(0).compute_capability != (9, 0):
        pytest.skip("the corpus is code for sm_90a")
    fine = {name: entry for name, entry in corpus().items() if not recorded(name).fault}
    library = Library.open(bundle.write(tmp_path, fine.values(), ptxas="ptxas"), driver)
    found = {
        name: lines
        for name, entry in fine.items()
        if (lines := differences(entry, run(entry, library, driver), recorded(name).output))
    }
    assert found == {}
