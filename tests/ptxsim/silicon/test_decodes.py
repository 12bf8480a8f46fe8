"""Every sm_90a decode of the smoke spec on the simulator, against an H200 on the same inputs and the reference.

The bundle is CUBINERY_SMOKE (a folder above sm_90a), or compiled here from kernel_specs/smoke.yaml, which the compile
cache makes quick. The chip sums products in its own order, so both comparisons are with the operator's tolerance.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from ptxsim.silicon.decodes import LENGTHS, decode, decode_keys, load, problem

from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.references import tolerances
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.runtime.library import Library

ARCH = "sm_90a"
RECORDS = load()


@pytest.fixture(scope="module")
def smoke(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke bundle for sm_90a."""
    if "CUBINERY_SMOKE" in os.environ:
        return Path(os.environ["CUBINERY_SMOKE"]) / ARCH
    out = tmp_path_factory.mktemp("smoke")
    report = build(expand(load_specs([root / "kernel_specs" / "smoke.yaml"]), [ARCH]), BuildOptions(out=out))
    assert report.ok
    return out / ARCH


@pytest.mark.slow
def test_simulator_chip_and_reference_agree(smoke: Path) -> None:
    driver = SimDriver(ARCH, [smoke])
    library = Library.open(smoke, driver)
    keys = decode_keys(library)
    assert len(keys) >= 6
    tolerance = tolerances.PAGED_DECODE["mma"]
    if not RECORDS:
        pytest.skip("no H200 has been recorded: run record.py --smoke on a GPU")
    for key in keys:
        mine, silicon = decode(library, key, driver), RECORDS[key]
        config, _, tensors, _ = problem(key)
        assert silicon.inputs == mine.inputs, f"{key}: its problem has changed: run record.py on a GPU"
        q, k, v, table = tensors.values()
        reference = paged_attention(q, k, v, table, LENGTHS, q_len=config.q_len, causal=config.causal)
        expected = [np.asarray(x) for x in reference]
        for what, pair, other in (
            ("simulator and chip", mine, (silicon.o, silicon.lse)),
            ("simulator and reference", mine, expected),
            ("chip and reference", silicon, expected),
        ):
            found = tolerances.deviation(pair.o.reshape(other[0].shape), pair.lse.reshape(other[1].shape), *other)
            assert found.within(tolerance), f"{key}: {what}: {found}"
