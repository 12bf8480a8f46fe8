"""The sdist and the wheel of cubinery itself: real files behind the links, complete, and nothing of NVIDIA's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from tiny_bundle import make_bundle

BUILD = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
BUILD_WHEEL = "import sys, setuptools.build_meta as b; print(b.build_wheel(sys.argv[1]))"
LINKS = ("aot", "runtime", "specs")


def _copy_checkout(root: Path, target: Path) -> None:
    """The files that a clone would hold, links as links."""
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", ".carry"
    )
    shutil.copytree(root, target, symlinks=True, ignore=ignore)


@pytest.fixture(scope="module")
def sdist(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, built by the back end that pyproject.toml names, without network or isolation."""
    if not (root / "src/cubinery/aot").is_symlink():
        pytest.skip("not a checkout: an sdist was unpacked here, and has files where a checkout has links")
    base = tmp_path_factory.mktemp("sdist")
    _copy_checkout(root, base / "checkout")
    done = _python(["-c", BUILD, str(base / "dist")], base / "checkout")
    return base / "dist" / done.splitlines()[-1]


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist's content, as someone without git gets it."""
    base = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(base, filter="data")
    (folder,) = base.iterdir()
    return folder


@pytest.fixture(scope="module")
def wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist, as pip and build do it."""
    target = tmp_path_factory.mktemp("wheel")
    done = _python(["-c", BUILD_WHEEL, str(target)], unpacked)
    return target / done.splitlines()[-1]


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pip has installed that wheel, alone."""
    target = tmp_path_factory.mktemp("site")
    _python(["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target), str(wheel)], target)
    return target


def _python(args: list[str], cwd: Path, path: str = "") -> str:
    """Run Python with only `path` added to its own packages; returns its stdout."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "SETUPTOOLS"))}
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _sources(root: Path) -> set[str]:
    """Every Python file and spec of the package, relative to it."""
    found = {"__init__.py", "py.typed"}
    for folder, name in (("aot", "aot"), ("runtime", "runtime"), ("kernel_specs", "specs")):
        for suffix in ("*.yaml", "*.json") if name == "specs" else ("*.py",):
            found |= {f"{name}/{file.relative_to(root / folder).as_posix()}" for file in (root / folder).rglob(suffix)}
    return found


def test_links_are_links_to_the_top_level_folders(root: Path) -> None:
    targets = {"aot": "../../aot", "runtime": "../../runtime", "specs": "../../kernel_specs"}
    if not (root / "src/cubinery/aot").is_symlink():
        pytest.skip("not a checkout")
    assert {name: os.readlink(root / "src/cubinery" / name) for name in LINKS} == targets


def test_sdist_holds_real_files(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isfile() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert {f"src/cubinery/{name}" for name in _sources(root)} <= names
    for name in ("Makefile", "build_kernels.py", "constraints.txt", "LICENSE", "README.md", "CHANGELOG.md"):
        assert name in names
    for folder, pattern in (("tests", "*.py"), ("kernel_specs", "*.yaml"), ("docs", "*.md")):
        expected = {file.relative_to(root).as_posix() for file in (root / folder).rglob(pattern)}
        assert expected <= names
    assert not [name for name in names if name.endswith((".pyc", ".cubin", ".so"))]


def test_an_unpacked_sdist_lists_its_kernels_and_explains_itself(unpacked: Path) -> None:
    """What `make kernels` runs, from files alone."""
    text = _python(["build_kernels.py", "list", "--arch", "sm_110a"], unpacked)
    assert "paged_decode-sm_110a-" in text
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    help_text = subprocess.run(
        ["make", "help"], cwd=unpacked, capture_output=True, text=True, check=True, env=env
    ).stdout
    assert "kernels" in help_text


def test_wheel_holds_the_package_and_no_more(wheel: Path, root: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        contents = {name: archive.read(name) for name in archive.namelist()}
    assert set(names) == {f"cubinery/{name}" for name in _sources(root)}
    # Pure Python and text: no binary of NVIDIA's or of anyone's.
    for data in contents.values():
        data.decode()


def test_wheel_metadata(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        info = next(name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(info).decode())
        points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
        licences = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(required) == ["cuda-python<14,>=13", "numpy", "torch"]
    assert {"build", "dev", "bench"} <= set(metadata.get_all("Provides-Extra", []))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "cubinery = cubinery.aot.cli:main" in points
    assert len(licences) == 1


def test_the_installed_wheel_runs_without_the_checkout(site: Path, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path / "bundle")
    script = (
        "import cubinery, sys; from cubinery.runtime import Library;"
        "lib = Library.open(sys.argv[1]); print(cubinery.__file__); print(*lib.keys())"
    )
    file, keys = _python(["-c", script, str(bundle)], tmp_path, str(site)).splitlines()
    assert Path(file).is_relative_to(site)
    assert keys.split() == ["paged_decode-sm_110a-mma-d128-p16-kvfp8", "paged_decode-sm_110a-plan"]


def test_the_installed_wheel_can_build_from_its_own_specs(site: Path, tmp_path: Path) -> None:
    text = _python([str(site / "bin/cubinery"), "list", "--arch", "sm_90a"], tmp_path, str(site))
    assert "paged_decode-sm_90a-" in text
    assert str(site) in text  # the specs that it names are those of the wheel


def test_version_is_the_same_everywhere(sdist: Path, wheel: Path, root: Path) -> None:
    import cubinery

    assert f"-{cubinery.__version__}." in sdist.name.replace(".tar", ".")
    assert f"-{cubinery.__version__}-" in wheel.name
    assert f"## {cubinery.__version__}" in (root / "CHANGELOG.md").read_text()


def test_constraints_pin_all_that_extras_name(root: Path) -> None:
    """Every distribution that the Makefile asks pip for by name has one exact version."""
    import re

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = (root / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pinned = {name.lower().replace("_", "-") for name in pins}
    for requirement in wanted:
        name = re.split(r"[\[<>=!~ ;]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        assert name in pinned, requirement
    assert not [version for version in pins.values() if "+" in version]
    assert pins["torch"] == "2.13.0"
    assert pins["nvidia-cutlass-dsl"] == "4.8.1"
