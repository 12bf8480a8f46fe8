"""The real compiler, on a kernel that takes a blink: one build shared by all tests of this file."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from toy_builds import REAL, toy_items

from cubinery.aot import store
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.inspect import elf_sm, find_tool, ptx_block, ptx_params, read_cubin, resources, sass
from cubinery.aot.report import BuildReport
from cubinery.aot.variants import BuildItem
from cubinery.runtime.manifest import Artifact

pytest.importorskip("cutlass", reason="the compiler is not installed")

ARCHS = ("sm_90a", "sm_110a")
OUTPUTS = "[ptx, object, object-linux-aarch64]"
SYMBOL = "cubinery_toy_scale_0"


def wanted() -> list[BuildItem]:
    """Every body on Thor, one with all outputs; the plain one on Hopper."""
    bodies = "{arch: sm_110a, width: 2, body: [stack, static_smem, dynamic_smem]}"
    return [
        *toy_items(bodies, gates="{max_stack: 512}"),
        *toy_items("{arch: sm_110a, width: 2}", emit=OUTPUTS),
        *toy_items("{arch: sm_90a, width: 2}"),
    ]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[BuildReport, Path]:
    root = tmp_path_factory.mktemp("real")
    report = build(wanted(), BuildOptions(out=root / "out", cache_dir=root / "cache", compile_entry=REAL))
    assert [(row.key, row.error, row.detail) for row in report.rows if row.error] == []
    return report, root


def artifact(root: Path, arch: str, body: str) -> Artifact:
    manifest = store.existing_artifacts(root / "out" / arch)
    assert manifest is not None
    return next(a for a in manifest.artifacts if a.config["body"] == body)


def contents(root: Path, made: Artifact, name: str = "cubin") -> bytes:
    record = made.cubin if name == "cubin" else made.emitted[name]
    return (root / "out" / made.arch / record.path).read_bytes()


@pytest.mark.parametrize("arch", ARCHS)
def test_cubins_are_for_the_arch_that_was_asked_for(built: tuple[BuildReport, Path], arch: str) -> None:
    _, root = built
    cubin = contents(root, artifact(root, arch, "plain"))
    info = read_cubin(cubin)
    assert (elf_sm(cubin), info.arch) == (int(arch[3:-1]), arch)
    assert list(info.kernels) == [SYMBOL]
    assert info.kernels[SYMBOL].params == ((0, 8), (8, 8), (16, 4), (20, 4))


def test_report_dumps_variants_of_one_kernel_keep_their_own_bytes(built: tuple[BuildReport, Path]) -> None:
    """Dumped files are named without compile-time constants, so that variants overwrote each other's."""
    _, root = built
    made = [artifact(root, "sm_110a", body) for body in ("plain", "stack", "static_smem", "dynamic_smem")]
    assert len({one.cubin.sha256 for one in made}) == len(made)
    stacks = [resources(contents(root, one), SYMBOL).stack for one in made]
    assert [stack > 0 for stack in stacks] == [False, True, False, False]


def test_resources_agree_with_cuobjdump(built: tuple[BuildReport, Path]) -> None:
    tool = find_tool("cuobjdump")
    assert tool is not None
    _, root = built
    seen = {}
    for body in ("plain", "stack", "static_smem", "dynamic_smem"):
        made = artifact(root, "sm_110a", body)
        path = root / "out/sm_110a" / made.cubin.path
        text = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
        told = dict(part.split(":", 1) for part in text.split(SYMBOL)[1].split() if ":" in part)
        found = resources(path.read_bytes(), SYMBOL)
        assert (found.registers, found.stack) == (int(told["REG"]), int(told["STACK"]))
        # The tool counts the KiB that the hardware reserves where a kernel uses shared memory at all.
        assert found.static_smem == max(0, int(told["SHARED"]) - 1024)
        seen[body] = found
    assert seen["stack"].stack >= 256
    assert seen["plain"].stack == 0
    assert seen["static_smem"].static_smem == 512
    assert seen["dynamic_smem"].static_smem == 0


def test_ptx_is_emitted_as_compiled(built: tuple[BuildReport, Path]) -> None:
    _, root = built
    text = contents(root, artifact(root, "sm_110a", "plain"), "ptx").decode()
    assert ".target sm_110a" in text
    assert ptx_params(text, SYMBOL) == [(8, 8), (8, 8), (4, 4), (4, 4)]
    assert ptx_block(text, SYMBOL) == ("reqntid", (128, 1, 1))


def test_host_objects_are_for_the_host_that_was_asked_for(built: tuple[BuildReport, Path]) -> None:
    _, root = built
    made = artifact(root, "sm_110a", "plain")
    prefix = made.key.replace("-", "_")
    for name, machine in (("object", None), ("object-linux-aarch64", 183)):
        data = contents(root, made, name)
        assert data[:4] == b"\x7fELF"
        if machine is not None:
            assert struct.unpack_from("<H", data, 18)[0] == machine
        assert prefix.encode() in data
        assert f"{prefix}_Kernel_Module_Load" in contents(root, made, name.replace("object", "header", 1)).decode()


def test_sass_is_readable(built: tuple[BuildReport, Path]) -> None:
    _, root = built
    assert "EXIT" in sass(contents(root, artifact(root, "sm_110a", "plain")))


def test_the_spilling_kernel_fails_the_default_gate_without_compiling(
    built: tuple[BuildReport, Path], tmp_path: Path
) -> None:
    _, root = built
    items = toy_items("{arch: sm_110a, width: 2, body: stack}")
    report = build(items, BuildOptions(out=tmp_path / "out", cache_dir=root / "cache", compile_entry=REAL))
    (row,) = report.rows
    assert (report.workers, row.status, row.error_type) == (0, "failed", "StackGateError")


def test_a_dynamic_segment_that_the_kernel_never_declared_is_what_the_record_says(
    built: tuple[BuildReport, Path],
) -> None:
    report, _ = built
    row = next(row for row in report.rows if row.key == "toy-sm_110a-scale-w2-bodydynamic_smem")
    assert (row.dynamic_smem, row.static_smem, row.stack) == (4096, 0, 0)
    assert row.peak_memory is not None
    assert row.peak_memory > 50 << 20


def test_a_wrong_declaration_is_caught(built: tuple[BuildReport, Path], tmp_path: Path) -> None:
    _, root = built
    items = toy_items("{arch: sm_90a, width: 2, body: undeclared}")
    report = build(items, BuildOptions(out=tmp_path / "out", cache_dir=root / "cache", compile_entry=REAL))
    (row,) = report.rows
    assert (row.status, row.error_type) == ("failed", "AbiGateError")
    assert "takes 4 parameters, but 5 are declared" in str(row.error)


def test_the_same_inputs_give_the_same_bytes(built: tuple[BuildReport, Path], tmp_path: Path) -> None:
    _, root = built
    options = BuildOptions(out=tmp_path / "elsewhere" / "out", cache_dir=tmp_path / "cache", compile_entry=REAL, jobs=1)
    items = [*toy_items("{arch: sm_110a, width: 2}", emit=OUTPUTS), *toy_items("{arch: sm_90a, width: 2}")]
    assert build(items, options).ok
    for arch in ARCHS:
        before, after = (artifact(folder, arch, "plain") for folder in (root, options.out.parent))
        assert before == after  # every hash, and with them every file, is the same
    first, second = root / "out/sm_90a", options.out / "sm_90a"
    names = sorted(p.relative_to(first) for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert [name for name in names if (first / name).read_bytes() != (second / name).read_bytes()] == []
