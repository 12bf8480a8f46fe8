"""The command line: outcomes, exit codes, one-line errors, and output for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from fake_driver import FakeDriver
from tiny_bundle import artifact_of, configs, make_bundle, write_manifest

from cubinery.aot import machine
from cubinery.aot.commands import cli
from cubinery.runtime.driver import DeviceInfo
from cubinery.runtime.errors import DriverError
from cubinery.runtime.manifest import Manifest

COMMANDS = ["build", "list", "show", "verify", "diff", "check-reproducible", "wheel", "doctor"]

SPEC = """\
family: paged_decode
impl: mma
matrix:
  arch: [sm_90a, sm_110a]
  head_dim: 128
  page_size: [16, 32]
  kv_format: fp8
emit: [ptx]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in an empty folder; a traceback in its output fails the test."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("CUBINERY_CACHE", str(tmp_path / "cache"))

    def invoke(*args: object) -> Result:
        result = CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="cubinery")
        assert "Traceback" not in result.output, result.output
        return result

    return invoke


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec of two decode kernels, which require a third, for two archs."""
    path = tmp_path / "small.yaml"
    path.write_text(SPEC)
    return path


def _one_line(result: Result, code: int) -> str:
    """The single error line of a failed command, which left stdout alone."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("cubinery: error: ")
    return line


# -- help and start-up -------------------------------------------------------------------------------


def test_help_lists_every_command_and_the_exit_codes(run: Callable[..., Result]) -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert sorted(cli.commands) == sorted(COMMANDS)
    for name in COMMANDS:
        assert f"\n  {name}" in result.stdout
    assert "Exit codes: 0 done and good" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_its_options(run: Callable[..., Result], command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert (cli.commands[command].help or "").split()[0] in result.stdout
    assert "--json" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from cubinery.aot.commands import cli; cli.main(['--help'], standalone_mode=False);"
        "print([m for m in ('torch', 'numpy', 'cutlass', 'cuda', 'yaml', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_arguments_show_the_help(run: Callable[..., Result]) -> None:
    result = run()
    assert "Commands:" in result.output
    assert result.exit_code == 2


def test_version(run: Callable[..., Result]) -> None:
    import cubinery

    assert cubinery.__version__ in run("--version").stdout


def test_without_click_one_line_says_what_to_install() -> None:
    script = "import sys; sys.modules['click'] = None; from cubinery.aot.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("cubinery: the command line needs click")
    assert done.stderr.count("\n") == 1


def test_build_kernels_is_the_same_command_without_installation(root: Path, tmp_path: Path) -> None:
    """From another folder, and with no other way for Python to find cubinery."""
    command = [sys.executable, "-S", str(root / "build_kernels.py"), "--version"]
    site = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": site}
    )
    assert done.stdout.startswith("cubinery, version ")


# -- wrong usage -------------------------------------------------------------------------------------


def test_no_arch_is_an_error_that_lists_them(run: Callable[..., Result], spec: Path) -> None:
    line = _one_line(run("build", "--spec", spec), 2)
    assert "no arch given" in line
    for arch in ("sm_90a", "sm_100a", "sm_103a", "sm_110a"):
        assert arch in line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["build", "--arch", "sm_99"], "unknown arch 'sm_99': expected one of sm_90a"),
        (["build", "--arch", ","], "empty: name an arch"),
        (["build", "--arch", "thor", "--jobs", "0"], "'--jobs': 0 is not in the range"),
        (["build", "--arch", "thor", "--timeout", "0"], "'--timeout': 0"),
        (["build", "--arch", "thor", "--spec", "absent.yaml"], "absent.yaml: no such spec"),
        (["build", "--arch", "thor", "--spec", "."], "a folder without any .yaml file"),
        (["build", "--from-misses", "absent.json"], "absent.json: cannot read the list of misses"),
        (["build", "--from-misses", "a", "--spec", "b"], "--from-misses and --spec exclude each other"),
        (["list", "--bundle", "absent", "--installed"], "exclude each other"),
        (["list", "--bundle", "absent"], "absent: no such folder"),
        (["show"], "Missing argument 'KEY'"),
        (["show", "x-y-z", "--bundle", "absent"], "absent: no such folder"),
        (["verify", "absent"], "absent: no such folder"),
        (["diff", "absent"], "Missing argument 'NEW'"),
        (["wheel", "--bundle", "absent"], "absent: no such folder"),
        (["wheel", "--max-size", "-1"], "'--max-size'"),
        (["check-reproducible", "--arch", "thor", "--bundle", "absent"], "absent: no such folder"),
        (["doctor", "--for", "lunch"], "'lunch' is not one of"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["--frobnicate"], "No such option"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    run: Callable[..., Result], tmp_path: Path, args: list[str], expected: str
) -> None:
    assert expected in _one_line(run(*args), 2)
    assert list((tmp_path / "work").iterdir()) == []


def test_spec_errors_carry_file_and_line(run: Callable[..., Result], tmp_path: Path) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(SPEC.replace("head_dim: 128", "head_dim: 100"))
    for command in ("build", "list", "check-reproducible"):
        line = _one_line(run(command, "--arch", "thor", "--spec", path), 2)
        assert f"{path}:5: " in line
    assert not (tmp_path / "work/build").exists()


def test_an_arch_that_no_spec_asks_for(run: Callable[..., Result], spec: Path) -> None:
    assert "no spec asks for sm_100a" in _one_line(run("build", "--arch", "b200", "--spec", spec), 2)


def test_a_folder_that_cannot_be_written_is_exit_code_3(run: Callable[..., Result], spec: Path) -> None:
    line = _one_line(run("build", "--arch", "thor", "--spec", spec, "--out", "/proc/cubinery"), 3)
    assert "/proc/cubinery" in line


def test_an_unexpected_error_is_a_bug_with_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(paths: object) -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(machine, "diagnose", broken)
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 70
    assert "ZeroDivisionError: planted" in result.stderr
    assert "this is a bug in cubinery" in result.stderr


def test_interruption_is_one_line_and_exit_code_130(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(paths: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "diagnose", interrupted)
    result = run("doctor")
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_a_reader_that_leaves_early_sees_no_traceback(tmp_path: Path) -> None:
    make_bundle(tmp_path)
    listing = f"'{sys.executable}' -c 'from cubinery.aot.cli import main; main()' list --json --bundle '{tmp_path}'"
    done = subprocess.run(["bash", "-c", f"{listing} | true"], capture_output=True, text=True, check=True)
    assert done.stderr == ""


# -- list and show -----------------------------------------------------------------------------------


def test_list_of_specs(run: Callable[..., Result], spec: Path) -> None:
    result = run("list", "--spec", spec, "--json")
    keys = {row["key"]: row for row in json.loads(result.stdout)["keys"]}
    assert len(keys) == 6
    row = keys["paged_decode-sm_110a-mma-d128-p16-kvfp8"]
    assert row["emit"] == ["ptx"]
    assert row["origin"].startswith(str(spec))
    only = json.loads(run("list", "--spec", spec, "--arch", "h200", "--json").stdout)["keys"]
    assert {row["key"].split("-")[1] for row in only} == {"sm_90a"}
    both = json.loads(run("list", "--spec", spec, "--arch", "thor, h200", "--json").stdout)["keys"]
    assert len(both) == 6
    assert run("list", "--spec", spec).stdout.splitlines()[-1] == "6 keys"


def test_list_of_a_bundle(run: Callable[..., Result], tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", "sm_90a")
    make_bundle(tmp_path / "b", "sm_110a")
    keys = [row["key"] for row in json.loads(run("list", "--bundle", tmp_path / "b", "--json").stdout)["keys"]]
    assert len(keys) == 4
    only = json.loads(run("list", "--bundle", tmp_path / "b", "--arch", "thor", "--json").stdout)["keys"]
    assert [row["key"].split("-")[1] for row in only] == ["sm_110a", "sm_110a"]
    line = _one_line(run("list", "--bundle", tmp_path / "b", "--arch", "b200"), 2)
    assert "no bundle here is for sm_100a: found sm_110a, sm_90a" in line


def test_show_prints_the_whole_launch(run: Callable[..., Result], tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b", ptx=True)
    artifact = next(a for a in Manifest.read(folder).artifacts if a.requires)
    text = run("show", artifact.key, "--bundle", tmp_path / "b").stdout
    record = artifact.kernels[0]
    for word in (artifact.key, record.symbol, artifact.cubin.sha256, *(p.name for p in record.params)):
        assert word in text
    for tensor_map in record.tensor_maps:
        assert tensor_map.swizzle in text
    document = json.loads(run("show", artifact.key, "--bundle", tmp_path / "b", "--json").stdout)
    assert document == json.loads(json.dumps(dataclasses.asdict(artifact)))
    ptx = run("show", artifact.key, "--bundle", tmp_path / "b", "--ptx").stdout
    assert ptx == (folder / artifact.emitted["ptx"].path).read_text()


def test_show_estimates_a_key_s_cost(
    run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "/*0000*/ NOP ;\n.L:\n/*0010*/ HMMA.16816.F32 R4 ;\n/*0020*/ MUFU.EX2 R5, R5 ;\n/*0030*/ @P0 BRA `(.L) ;"
    monkeypatch.setattr("cubinery.aot.inspect.sass", lambda _: code)
    folder = make_bundle(tmp_path / "b")
    decode = next(a.key for a in Manifest.read(folder).artifacts if a.impl == "mma")
    text = run("show", decode, "--bundle", tmp_path / "b", "--estimate").stdout
    assert "a tile of 128 keys of one KV head, Jetson AGX Thor" in text
    document = json.loads(run("show", decode, "--bundle", tmp_path / "b", "--estimate", "--json").stdout)
    assert (document["key"], document["chip"]) == (decode, "Jetson AGX Thor")
    figures = {figure["name"]: figure["value"] for figure in document["figures"]}
    assert figures["kv_bytes"] == 2 * 128 * 128
    assert all(name in text for name in figures)
    plan = next(a.key for a in Manifest.read(folder).artifacts if a.impl == "plan")
    assert "expected a decode; nothing else" in _one_line(
        run("show", plan, "--bundle", tmp_path / "b", "--estimate"), 2
    )


def test_show_of_what_is_not_there(run: Callable[..., Result], tmp_path: Path) -> None:
    make_bundle(tmp_path / "b")
    key = "paged_decode-sm_110a-mma-d128-p16-kvfp8"
    near = _one_line(run("show", key.replace("p16", "p32"), "--bundle", tmp_path / "b"), 2)
    assert f"the nearest: {key}" in near
    assert "malformed" in _one_line(run("show", "nonsense", "--bundle", tmp_path / "b"), 2)
    assert "add `emit: [ptx]`" in _one_line(run("show", key, "--bundle", tmp_path / "b", "--ptx"), 2)
    both = _one_line(run("show", key, "--bundle", tmp_path / "b", "--ptx", "--sass"), 2)
    assert "--sass and --ptx exclude each other" in both
    assert "exclude" in _one_line(run("show", key, "--bundle", tmp_path / "b", "--ptx", "--estimate"), 2)


# -- verify, diff, wheel -----------------------------------------------------------------------------


def test_verify(run: Callable[..., Result], tmp_path: Path) -> None:
    folder = make_bundle(tmp_path / "b")
    result = run("verify", tmp_path / "b")
    assert result.exit_code == 0
    assert "2 artifacts" in result.stdout
    assert result.stdout.rstrip().endswith("ok")
    cubin = next((folder / "cubins").iterdir())
    cubin.write_bytes(cubin.read_bytes()[:-4] + b"oops")
    failed = run("verify", tmp_path / "b")
    assert failed.exit_code == 1
    assert "FAILED" in failed.stdout
    assert "sha256" in failed.stdout
    document = json.loads(run("verify", tmp_path / "b", "--json").stdout)
    assert document["ok"] is False
    ((finding,),) = [bundle["findings"] for bundle in document["bundles"]]
    assert finding["check"] == "sha256"


def test_verify_of_a_truncated_manifest_fails(run: Callable[..., Result], tmp_path: Path) -> None:
    path = make_bundle(tmp_path / "b") / "manifest.json"
    path.write_text(path.read_text()[:-20])
    assert str(path) in _one_line(run("verify", tmp_path / "b"), 1)
    result = run("verify", tmp_path / "b", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


def test_diff(run: Callable[..., Result], tmp_path: Path) -> None:
    make_bundle(tmp_path / "a", page_size=16)
    make_bundle(tmp_path / "b", page_size=32)
    same = run("diff", tmp_path / "a", tmp_path / "a")
    assert same.exit_code == 0
    assert "no difference: 2 artifacts" in same.stdout
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert result.exit_code == 1
    assert "1 added, 1 removed, 0 changed, 1 the same" in result.stdout
    document = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)
    assert document["added"] == ["paged_decode-sm_110a-mma-d128-p32-kvfp8"]
    assert document["removed"] == ["paged_decode-sm_110a-mma-d128-p16-kvfp8"]
    assert document["same"] is False


def test_wheel(run: Callable[..., Result], tmp_path: Path) -> None:
    make_bundle(tmp_path / "b", "sm_90a")
    make_bundle(tmp_path / "b", "sm_110a")
    only = run("wheel", "--bundle", tmp_path / "b", "--arch", "thor", "--out", tmp_path / "one")
    assert only.exit_code == 0
    assert "KB" in only.stdout
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["cubinery_kernels_sm110a-0.1.0-py3-none-any.whl"]
    document = json.loads(run("wheel", "--bundle", tmp_path / "b", "--out", tmp_path / "all", "--json").stdout)
    assert [Path(wheel["path"]).stat().st_size for wheel in document["wheels"]] == [
        wheel["size"] for wheel in document["wheels"]
    ]
    assert len(list((tmp_path / "all").iterdir())) == 2


def test_report_2_a_wheel_for_an_arch_that_was_not_built_is_refused(run: Callable[..., Result], tmp_path: Path) -> None:
    """An image was shipped without the kernels of one of its chips."""
    make_bundle(tmp_path / "b", "sm_90a")
    line = _one_line(run("wheel", "--bundle", tmp_path / "b", "--arch", "thor,h200", "--out", tmp_path / "none"), 2)
    assert "no bundle for sm_110a: it holds sm_90a; build it with: make kernels ARCH=sm_110a" in line
    assert not (tmp_path / "none").exists()


def test_a_bad_bundle_is_not_packed(run: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    folder.mkdir()
    write_manifest(folder, "sm_90a", [artifact_of(configs()[0], "sm_90a", folder)])  # without what it requires
    assert "refused to pack" in _one_line(run("wheel", "--bundle", folder, "--out", tmp_path / "dist"), 1)
    assert not (tmp_path / "dist").exists()


# -- doctor ------------------------------------------------------------------------------------------


class _Hopper(FakeDriver):
    """A machine with one H200."""

    def device_count(self) -> int:
        return 1

    def device_info(self, device: int) -> DeviceInfo:
        return DeviceInfo(device, "NVIDIA H200", (9, 0), 132, 13000)


def test_doctor_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    make_bundle(tmp_path, "sm_90a")
    make_bundle(tmp_path, "sm_110a")
    found = machine.diagnose([tmp_path, tmp_path / "absent"], _Hopper())
    assert found.can_run == {"0: NVIDIA H200": ("sm_90a",)}
    assert found.bundles == {str(tmp_path / "sm_90a"): ("0: NVIDIA H200",), str(tmp_path / "sm_110a"): ()}
    (fact,) = [fact for fact in found.facts if fact.name == "CUDA driver"]
    assert "supports CUDA 13.0; NVIDIA H200 (SM 9.0)" in fact.detail


def test_doctor_without_a_driver_says_how_to_mend_it(tmp_path: Path) -> None:
    class Broken(_Hopper):
        def device_count(self) -> int:
            raise DriverError("no driver")

    found = machine.diagnose([tmp_path / "absent"], Broken())
    assert found.devices == ()
    (fact,) = found.lacks("run")
    assert (fact.status, fact.detail) == ("missing", "no driver")
    assert fact.fix.startswith("install the NVIDIA driver")


@pytest.mark.parametrize(
    ("versions", "lacks", "detail"),
    [
        ({}, ["CuTe DSL"], "nvidia-cutlass-dsl is not installed"),
        ({"nvidia-cutlass-dsl": "4.8.1"}, ["CUDA 13 code generator"], "sm_110a would come out as sm_101a"),
        (
            {"nvidia-cutlass-dsl": "4.7.0", "nvidia-cutlass-dsl-libs-cu13": "4.7.0"},
            ["CuTe DSL"],
            "written against 4.8.1",
        ),
        (
            {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.7.0"},
            ["CUDA 13 code generator"],
            "libs-cu13 4.7.0 beside nvidia-cutlass-dsl 4.8.1",
        ),
    ],
)
def test_doctor_knows_the_traps_of_the_compiler(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], lacks: list[str], detail: str
) -> None:
    monkeypatch.setattr(machine, "_version", versions.get)
    found = machine.diagnose([], _Hopper())
    missing = [fact for fact in found.lacks("build") if fact.name in ("CuTe DSL", "CUDA 13 code generator")]
    assert [fact.name for fact in missing] == lacks
    assert detail in missing[0].detail
    assert missing[0].fix == "pip install 'nvidia-cutlass-dsl[cu13]==4.8.1'"
    assert found.can_build == ()


def test_doctor_output_and_exit_codes(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine.diagnose
    monkeypatch.setattr(machine, "diagnose", lambda paths: real(paths, _Hopper()))
    result = run("doctor")
    assert result.exit_code == 0
    assert "runs on 0: NVIDIA H200:  sm_90a" in result.stdout
    document = json.loads(run("doctor", "--json").stdout)
    assert {"facts", "can", "can_build", "can_run", "devices", "bundles"} <= set(document)
    monkeypatch.setattr(machine, "_version", lambda distribution: None)
    assert run("doctor", "--for", "build").exit_code == 3


def test_the_pinned_compiler_is_the_one_of_pyproject(root: Path) -> None:
    import tomllib

    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"nvidia-cutlass-dsl[cu13]=={machine.DSL_VERSION}" in extras["build"]


def test_doctor_without_cuda_python() -> None:
    script = (
        "import sys; sys.modules['cuda'] = None; from cubinery.aot import machine;"
        "(fact,) = machine.diagnose([]).lacks('run'); print(fact.fix)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "pip install 'cuda-python>=13,<14'", done.stderr


# -- tables ------------------------------------------------------------------------------------------


def test_tables_are_drawn_on_a_terminal_and_plain_in_a_pipe(tmp_path: Path) -> None:
    make_bundle(tmp_path)
    command = [sys.executable, "-c", "from cubinery.aot.cli import main; main()", "list", "--bundle", str(tmp_path)]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert piped.isascii()
    assert max(len(line) for line in piped.splitlines()) > 80  # never folded: programs read lines
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, env={**os.environ, "COLUMNS": "200", "TERM": "xterm"}) as process:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                chunk = os.read(ours, 65536)
            except OSError:
                break
            if not chunk:
                break
            drawn += chunk
    os.close(ours)
    assert process.returncode == 0
    assert "─" in drawn.decode()
    assert "paged_decode-sm_110a-mma-d128-p16-kvfp8" in drawn.decode()


def test_errors_keep_clicks_protocol() -> None:
    """So that other groups may embed these commands."""
    from cubinery.aot.commands.common import FailedError, MachineError, UserError

    assert [issubclass(kind, click.ClickException) for kind in (UserError, FailedError, MachineError)] == [True] * 3
    assert [kind("x").exit_code for kind in (UserError, FailedError, MachineError)] == [2, 1, 3]
