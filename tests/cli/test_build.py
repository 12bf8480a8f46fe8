"""`build` and what follows it, with the real compiler and its cheapest kernel: nothing, to a wheel."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cubinery.aot.commands import cli

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="the compiler is not installed: pip install 'cubinery[build]'"
)

KEY = "paged_decode-sm_110a-append-d128-kvbf16"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a spec of one cache writer, built once through the command line."""
    folder = tmp_path_factory.mktemp("build")
    (folder / "append.yaml").write_text(
        "family: paged_decode\nimpl: append\nmatrix: {arch: [sm_90a, sm_110a], head_dim: 128, kv_format: bf16}\n"
        "emit: [ptx]\n"
    )
    result = _build(folder)
    assert result.exit_code == 0, result.output
    assert f"[1/1] built {KEY}: " in result.stderr
    assert KEY in result.stdout
    assert "1 built, 0 cached, 0 failed in" in result.stdout
    return folder


def _build(folder: Path, *more: str) -> Result:
    args = ["build", "--arch", "thor", "--spec", folder / "append.yaml", "--out", folder / "out"]
    return CliRunner().invoke(cli, [*map(str, args), "--cache", str(folder / "cache"), *more])


def _run(*args: object) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


def test_the_bundle_and_its_report(work: Path) -> None:
    assert sorted(path.name for path in (work / "out").iterdir() if not path.name.startswith(".")) == [
        "report.json",
        "sm_110a",
    ]
    report = json.loads((work / "out/report.json").read_text())
    (row,) = report["rows"]
    assert (report["ok"], row["key"], row["status"]) == (True, KEY, "built")
    for figure in ("seconds", "peak_memory", "cubin_size", "registers", "ctas_per_sm"):
        assert row[figure] > 0, figure
    assert row["stack"] == 0


def test_a_second_build_compiles_nothing_and_never_imports_the_compiler(work: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (work / "out/sm_110a").rglob("*")}
    arguments = ["build", "--arch", "thor", "--spec", str(work / "append.yaml"), "--out", str(work / "out")]
    script = (
        "import sys; sys.modules['cutlass'] = None; from cubinery.aot.commands import cli;"
        f"cli.main({[*arguments, '--cache', str(work / 'cache'), '--json']!r}, standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["counts"] == {"built": 0, "cached": 1, "failed": 0}
    assert report["workers"] == 0
    assert before == {path: path.stat().st_mtime_ns for path in (work / "out/sm_110a").rglob("*")}


def test_what_was_built_verifies_shows_and_packs(work: Path) -> None:
    assert _run("verify", work / "out").exit_code == 0
    sass = _run("show", KEY, "--bundle", work / "out", "--sass")
    assert sass.exit_code == 0
    assert "EXIT" in sass.stdout
    ptx = _run("show", KEY, "--bundle", work / "out", "--ptx")
    assert ".target sm_110a" in ptx.stdout
    packed = _run("wheel", "--bundle", work / "out", "--out", work / "dist")
    assert packed.exit_code == 0, packed.output


def test_the_bundle_has_the_selectors_table(work: Path) -> None:
    """That of the arch; another may be given instead, for the archs that are built."""
    (own,) = (work / "out/sm_110a/tables").iterdir()
    table = json.loads(own.read_text())
    assert (table["family"], table["arch"]) == ("paged_decode", "sm_110a")
    file = work / "own.json"
    file.write_text(json.dumps(table | {"source": "another"}))
    again = _build(work, "--selector", str(file))
    assert again.exit_code == 0, again.output
    assert [path.read_bytes() for path in (work / "out/sm_110a/tables").iterdir()] == [file.read_bytes()]
    assert _build(work).exit_code == 0
    assert list((work / "out/sm_110a/tables").iterdir()) == [own]
    file.write_text(json.dumps(table | {"arch": "sm_90a"}))
    refused = _build(work, "--selector", str(file))
    assert refused.exit_code == 2
    assert f"{file}: a table for paged_decode on sm_90a, and this build is of paged_decode on sm_110a" in refused.stderr


def test_it_is_reproducible_and_a_difference_is_found(work: Path) -> None:
    spec = work / "append.yaml"
    same = _run("check-reproducible", "--arch", "thor", "--spec", spec, "--bundle", work / "out")
    assert same.exit_code == 0, same.output
    assert "reproducible: 1 key, every byte the same" in same.stdout
    manifest = work / "out/sm_110a/manifest.json"
    text = manifest.read_text()
    recorded = json.loads(text)["artifacts"][0]["source_digest"]
    try:
        manifest.write_text(text.replace(recorded, "f" * 64))
        other = _run("check-reproducible", "--arch", "thor", "--spec", spec, "--bundle", work / "out")
    finally:
        manifest.write_text(text)
    assert other.exit_code == 1
    assert "source digest" in other.stdout
    assert "NOT reproducible: 1 key of 1 differ" in other.stderr


def test_recorded_misses_are_added_to_the_bundle(work: Path) -> None:
    misses = work / "misses.json"
    misses.write_text(json.dumps([{"key": KEY.replace("d128", "d256")}]))
    out = work / "more"
    first = CliRunner().invoke(
        cli,
        [
            *map(
                str,
                ["build", "--arch", "thor", "--spec", work / "append.yaml", "--out", out, "--cache", work / "cache"],
            )
        ],
    )
    assert first.exit_code == 0, first.output
    added = _run("build", "--from-misses", misses, "--out", out, "--cache", work / "cache", "--json")
    assert added.exit_code == 0, added.output
    assert [row["key"] for row in json.loads(added.stdout)["rows"]] == [KEY.replace("d128", "d256")]
    keys = [row["key"] for row in json.loads(_run("list", "--bundle", out, "--json").stdout)["keys"]]
    assert keys == [KEY, KEY.replace("d128", "d256")]
    none = _run("build", "--from-misses", misses, "--arch", "h200", "--out", out)
    assert none.exit_code == 2
    assert "holds no miss for sm_90a, only for sm_110a" in none.stderr


def test_a_failing_key_is_exit_code_1_and_named_once(work: Path) -> None:
    """A limit that no kernel keeps: gates come after the cache, so nothing compiles."""
    spec = work / "strict.yaml"
    spec.write_text((work / "append.yaml").read_text() + "gates: {max_registers: 8}\n")
    args = ["build", "--arch", "thor", "--spec", spec, "--out", work / "strict", "--cache", work / "cache"]
    result = _run(*args)
    assert result.exit_code == 1
    assert "0 built, 0 cached, 1 failed" in result.stdout
    lines = [line for line in result.stderr.splitlines() if line.startswith("cubinery: failed: ")]
    assert len(lines) == 1
    assert KEY in lines[0]
    assert "RegisterGateError" in lines[0]
    assert "at most 8" in lines[0]
    assert not (work / "strict/sm_110a").exists()
    report = json.loads((work / "strict/report.json").read_text())
    assert report["ok"] is False
