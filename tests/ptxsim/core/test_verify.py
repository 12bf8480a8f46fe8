"""`cubinery verify --sim` on a bundle that the real compiler built: what ships is what runs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from cubinery.aot import verify
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.commands import cli
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand
from cubinery.aot.verify import Outcome, Task, not_run, run, tasks
from cubinery.runtime.bundle import Bundle
from cubinery.runtime.driver import LaunchConfig
from cubinery.runtime.errors import DriverError
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import Manifest

pytest.importorskip("cutlass", reason="the compiler is not installed")
pytest.importorskip("torch", reason="the operator needs torch")

ARCH = "sm_110a"
KEY = f"paged_decode-{ARCH}-mma-d128-p16-kvfp8"
PLAN = f"paged_decode-{ARCH}-plan"
PART = f"paged_decode-{ARCH}-part-d128"
"""A kernel that there might be."""
SMOKE = Path(__file__).parents[3] / "kernel_specs" / "smoke.yaml"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One decode for Thor and the planning that it requires, with their PTX."""
    root = tmp_path_factory.mktemp("sim")
    items = [item for item in expand(load_specs([SMOKE]), [ARCH]) if item.key in (KEY, PLAN)]
    report = build(items, BuildOptions(out=root / "out", cache_dir=root / "cache"))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    return root / "out" / ARCH


def mutated(bundle: Path, root: Path, pattern: str, replacement: str, count: int = 1) -> Path:
    """A copy of the bundle with the first `count` matches in its decode's PTX changed, and recorded in its manifest."""
    import hashlib
    import shutil

    shutil.copytree(bundle, root)
    manifest = Manifest.read(root)
    artifacts = []
    for artifact in manifest.artifacts:
        if artifact.key == KEY:
            record = artifact.emitted["ptx"]
            text, changed = re.subn(pattern, replacement, (root / record.path).read_text(), count=count)
            assert changed == count
            (root / record.path).write_text(text)
            digest = hashlib.sha256(text.encode()).hexdigest()
            record = dataclasses.replace(record, sha256=digest, size=len(text.encode()))
            artifact = dataclasses.replace(artifact, emitted={"ptx": record})
        artifacts.append(artifact)
    dataclasses.replace(manifest, artifacts=tuple(artifacts)).write(root)
    return root


@pytest.mark.parametrize("schedule", ["fair:0", "late:0", "delays:0", "priorities:0"])
def test_the_kernel_is_right_under_every_schedule(bundle: Path, schedule: str) -> None:
    outcome = run(Task(bundle, ARCH, KEY, schedule))
    assert outcome.ok, outcome.error
    assert outcome.instructions > 10_000
    assert outcome.executed == (KEY,)


@pytest.mark.parametrize(
    ("pattern", "replacement", "fault"),
    [
        (r"fence\.mbarrier_init\.release\.cluster;", "", "ProxyFault"),
        (r"bar\.sync\s+0;", "", "RaceFault"),
        (r"(expect_tx[^;]*, )16384;", r"\g<1>8192;", "RaceFault|TransactionFault"),
        (r"(expect_tx[^;]*, )16384;", r"\g<1>32768;", "DeadlockFault.*misses 0 of 1 arrivals and 16384 bytes"),
        (r"max\.f32", "min.f32", "far from the reference"),
        (r"ex2\.approx\.ftz\.f32", "lg2.approx.ftz.f32", "far from the reference"),
    ],
)
def test_a_broken_kernel_is_found(bundle: Path, tmp_path: Path, pattern: str, replacement: str, fault: str) -> None:
    count = 1 if "f32" not in pattern else 40
    outcome = run(Task(mutated(bundle, tmp_path / ARCH, pattern, replacement, count), ARCH, KEY, "fair:0"))
    assert re.search(fault, outcome.error), outcome.error


def test_command_line(bundle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ["verify", str(bundle), "--sim", "--schedules", "1", "--jobs", "1", "--trace", str(trace)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    assert re.search(rf"{KEY} +1 schedule +ok", result.stdout)
    assert re.search(r"[\d,]+ warp instructions in [\d.]+ s of simulation: [\d.]+ M/s", result.stdout)
    assert json.loads(trace.read_text())["traceEvents"]


def test_command_line_reports_a_fault(bundle: Path, tmp_path: Path) -> None:
    broken = mutated(bundle, tmp_path / ARCH, r"bar\.sync\s+0;", "")
    result = CliRunner().invoke(cli, ["verify", str(broken), "--sim", "--schedules", "1", "--jobs", "1", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert "RaceFault" in report["simulated"][0]["error"]


def test_a_bundle_without_ptx_is_an_error_that_says_how_to_get_it(bundle: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(bundle)
    bare = dataclasses.replace(
        manifest, artifacts=tuple(dataclasses.replace(a, emitted={}) for a in manifest.artifacts)
    )
    with pytest.raises(SimError, match=r"and 1 more keep no PTX.*emit: \[ptx\]"):
        tasks(Bundle(bundle, bare), ["fair:0"])
    library = Library.open(bundle, driver=SimDriver(ARCH, [Bundle(bundle, bare)]))
    with pytest.raises(SimError, match=rf"{KEY}: its bundle keeps no PTX.*emit: \[ptx\]"):
        library.kernel(KEY, 0)


def test_an_artifact_that_nothing_runs_is_a_failure(bundle: Path) -> None:
    artifact, _ = Manifest.read(bundle).artifacts
    artifacts = [artifact, dataclasses.replace(artifact, key=PART, impl="part")]
    task = Task(bundle, ARCH, KEY, "fair:0", parts=(PART,))
    good = Outcome(KEY, "fair:0", "", "", 1, 1.0, 1, (KEY, PART))
    assert not_run(artifacts, [task], [good]) == []
    (left,) = not_run(artifacts, [task], [dataclasses.replace(good, executed=(KEY,))])
    assert left.key == PART
    assert re.search(r"nothing ran it: aot/problems/paged_decode/part\.py has no check", left.error)
    # Where the kernel that requires it failed, that is what there is to say.
    assert not_run(artifacts, [task], [dataclasses.replace(good, error="RaceFault", executed=(KEY,))]) == []


def test_a_part_is_asked_for_by_its_own_key() -> None:
    task = Task(Path(), ARCH, KEY, "fair:0", parts=(PART,))
    assert task.concerns(())
    assert task.concerns(("nothing", "p16"))
    assert task.concerns(("part-d128",))
    assert not task.concerns(("d256",))


def test_only_what_is_asked_for_must_have_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "run_all", lambda *_, **__: [])
    arguments = ["verify", str(bundle), "--sim", "--schedules", "1", "--jobs", "1", "--key"]
    result = CliRunner().invoke(cli, [*arguments, "d128"])
    assert result.exit_code == 1
    assert f"{KEY} under every schedule: nothing ran it" in result.output
    result = CliRunner().invoke(cli, [*arguments, "d256"])
    assert result.exit_code == 2
    assert re.search(r"--key d256: no key of .* contains it", result.output)


def test_a_kernel_without_a_check_cannot_be_run(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "check_of", lambda *_: None)
    outcome = run(Task(bundle, ARCH, KEY, "fair:0"))
    assert re.search(rf"{KEY}: aot/problems/paged_decode/mma\.py has no check of it", outcome.error)
    with pytest.raises(SimError, match="no artifact that aot/problems has a check for"):
        tasks(Bundle.open(bundle), ["fair:0"])


def test_driver_memory(bundle: Path) -> None:
    driver = SimDriver(ARCH, [bundle])
    pointer = driver.allocate(0, 100)
    driver.copy_to_device(0, pointer, bytes(range(100)))
    assert driver.copy_from_device(0, pointer, 100) == bytes(range(100))
    with pytest.raises(DriverError, match="outside every allocation"):
        driver.copy_from_device(0, pointer, 101)
    driver.free(0, pointer)
    with pytest.raises(DriverError, match="nothing was allocated there"):
        driver.free(0, pointer)
    with pytest.raises(DriverError, match="the simulator has one"):
        driver.device_info(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (64, 1, 1)}, "its code requires"),
        ({"dynamic_smem": 300_000}, "shared memory"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "expected multiples of the cluster"),
        ({"block": (2048, 1, 1)}, "expected 1 to 1024"),
    ],
)
def test_launches_that_the_chip_refuses(bundle: Path, change: dict[str, object], message: str) -> None:
    from cubinery.aot.ptxsim.faults import LaunchFault

    driver = SimDriver(ARCH, [bundle])
    artifact = next(a for a in Manifest.read(bundle).artifacts if a.key == KEY)
    record = artifact.kernels[0]
    kernel = driver.get_kernel(driver.load_module(0, (bundle / artifact.cubin.path).read_bytes()), record.symbol)
    driver.set_dynamic_smem(kernel, record.dynamic_smem)
    config = LaunchConfig(grid=(1, 1, 1), block=record.block, dynamic_smem=record.dynamic_smem)
    prepared = driver.prepare(
        kernel, dataclasses.replace(config, **change), [(p.offset, p.size) for p in record.params]
    )
    with pytest.raises(LaunchFault, match=message):
        prepared.launch(0)
