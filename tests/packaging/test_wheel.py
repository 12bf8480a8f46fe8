"""Kernel wheels: data only, the same bytes every time, refused when the bundle is not what it says."""

from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
from tiny_bundle import make_bundle

from cubinery.aot.wheel import WheelError, compatible_release, distribution_name, pack, package_name
from cubinery.runtime.bundle import open_all
from cubinery.runtime.manifest import FileRecord, Manifest


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle whose PTX was kept."""
    return make_bundle(tmp_path / "bundle", "sm_110a", ptx=True)


def _pack(bundle: Path, out: Path) -> Path:
    return pack(open_all(bundle)[0], out).path


def test_names() -> None:
    assert distribution_name("sm_110a") == "cubinery-kernels-sm110a"
    assert package_name("sm_90a") == "cubinery_kernels_sm90a"
    assert compatible_release("0.1.0") == "~=0.1"
    assert compatible_release("12.34.5") == "~=12.34"


def test_wheel_holds_the_manifest_and_the_cubins_and_nothing_else(bundle: Path, tmp_path: Path) -> None:
    path = _pack(bundle, tmp_path / "dist")
    assert path.name == "cubinery_kernels_sm110a-0.1.0-py3-none-any.whl"
    manifest = Manifest.read(bundle)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        names = set(archive.namelist())
    info = "cubinery_kernels_sm110a-0.1.0.dist-info"
    expected = {f"cubinery_kernels_sm110a/{a.cubin.path}" for a in manifest.artifacts}
    expected |= {"cubinery_kernels_sm110a/manifest.json"}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")}
    assert names == expected


def test_wheel_holds_the_selectors_table(bundle: Path, tmp_path: Path) -> None:
    data = b'{"family": "paged_decode"}\n'
    (bundle / "tables").mkdir()
    (bundle / "tables/t.json").write_bytes(data)
    file = FileRecord("tables/t.json", hashlib.sha256(data).hexdigest(), len(data))
    dataclasses.replace(Manifest.read(bundle), tables={"paged_decode": file}).write(bundle)
    with zipfile.ZipFile(_pack(bundle, tmp_path / "dist")) as archive:
        assert archive.read("cubinery_kernels_sm110a/tables/t.json") == data
        archive.extractall(tmp_path / "site")
    assert open_all(tmp_path / "site/cubinery_kernels_sm110a")[0].tables == {"paged_decode": data}


def test_nothing_in_a_wheel_can_be_executed(bundle: Path, tmp_path: Path) -> None:
    """No Python, no host object: every binary is an ELF for the CUDA machine (190)."""
    with zipfile.ZipFile(_pack(bundle, tmp_path / "dist")) as archive:
        for name in archive.namelist():
            data = archive.read(name)
            assert not name.endswith((".py", ".so", ".a", ".o", ".pth", ".ptx", ".h"))
            if data[:4] == b"\x7fELF":
                assert int.from_bytes(data[18:20], "little") == 190
            else:
                data.decode()


def test_manifest_in_the_wheel_names_no_emitted_file(bundle: Path, tmp_path: Path) -> None:
    assert any(artifact.emitted for artifact in Manifest.read(bundle).artifacts)
    with zipfile.ZipFile(_pack(bundle, tmp_path / "dist")) as archive:
        archive.extractall(tmp_path / "site")
    shipped = Manifest.read(tmp_path / "site/cubinery_kernels_sm110a")
    assert not any(artifact.emitted for artifact in shipped.artifacts)
    assert [a.key for a in shipped.artifacts] == [a.key for a in Manifest.read(bundle).artifacts]


def test_metadata(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_pack(bundle, tmp_path / "dist")) as archive:
        info = "cubinery_kernels_sm110a-0.1.0.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        tags = Parser().parsestr(archive.read(f"{info}/WHEEL").decode())
        points = archive.read(f"{info}/entry_points.txt").decode()
    assert metadata["Name"] == "cubinery-kernels-sm110a"
    assert metadata["Version"] == "0.1.0"
    assert metadata.get_all("Requires-Dist") == ["cubinery~=0.1"]
    assert tags["Root-Is-Purelib"] == "true"
    assert tags["Tag"] == "py3-none-any"
    assert points == "[cubinery.kernels]\nsm_110a = cubinery_kernels_sm110a\n"


def test_record_lists_every_file_with_its_hash(bundle: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(_pack(bundle, tmp_path / "dist")) as archive:
        name = "cubinery_kernels_sm110a-0.1.0.dist-info/RECORD"
        rows = list(csv.reader(archive.read(name).decode().splitlines()))
        assert {row[0] for row in rows} == set(archive.namelist())
        for path, digest, size in rows:
            if path == name:
                assert (digest, size) == ("", "")
                continue
            data = archive.read(path)
            expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_equal_bundles_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _pack(make_bundle(tmp_path / "one"), tmp_path / "dist1")
    other = make_bundle(tmp_path / "two")
    for file in other.rglob("*"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
        file.chmod(0o700)
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    assert first.read_bytes() == _pack(other, tmp_path / "dist2").read_bytes()


def test_a_damaged_bundle_is_refused_and_nothing_is_written(bundle: Path, tmp_path: Path) -> None:
    cubin = next((bundle / "cubins").iterdir())
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"\xff")
    with pytest.raises(WheelError, match=r"fails verification .*sha256"):
        _pack(bundle, tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


def test_report_20_a_wheel_over_the_limit_is_refused_and_nothing_is_written(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(WheelError, match=r"would be .* MB for 2 kernels, over the limit of 0\.0 MB.*--max-size"):
        pack(open_all(bundle)[0], tmp_path / "dist", max_size=1000)
    assert not (tmp_path / "dist").exists()


def test_pip_installs_it_and_the_runtime_finds_it_without_running_it(bundle: Path, tmp_path: Path, root: Path) -> None:
    """From a site-packages that the reader cannot write to, as another user where this runs as root."""
    wheel, site = _pack(bundle, tmp_path / "dist"), tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    before = sorted(path.relative_to(site) for path in site.rglob("*"))
    _let_others_read(tmp_path)
    for path in [site, *site.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    script = (
        "import sys; from cubinery.runtime import Library; lib = Library.installed();"
        "print(*lib.keys(), sep='\\n');"
        "assert not any(name.startswith('cubinery_kernels') for name in sys.modules), 'a wheel was imported'"
    )
    python, other_user = _unprivileged_python()
    done = subprocess.run(
        [python, "-c", script],
        env={"PYTHONPATH": f"{site}:{root / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        **other_user,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [artifact.key for artifact in Manifest.read(bundle).artifacts]
    assert sorted(path.relative_to(site) for path in site.rglob("*")) == before


def _let_others_read(folder: Path) -> None:
    """pytest makes its folders private; the other user has to get through."""
    for path in (folder, *folder.parents):
        if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)


def _unprivileged_python() -> tuple[str, dict[str, Any]]:
    """A Python that can write to nothing here: this one, or as root one that user `nobody` may run.

    File modes stop nobody who is root, so a read-only folder says nothing there.
    """
    if os.getuid() != 0:
        return sys.executable, {}
    nobody: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []}
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        try:
            done = subprocess.run([python, "-c", check], cwd="/", check=False, **nobody)
        except OSError:
            continue
        if done.returncode == 0:
            return python, nobody
    pytest.skip("runs as root, and user nobody can run no Python 3.11 or newer on this machine")
