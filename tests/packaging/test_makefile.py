"""The Makefile: clear errors before minutes of set-up, and no set-up that was done already."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

TARGETS = ["kernels", "wheel", "test", "lint", "type", "contract", "gpu-test", "bench", "clean"]


def _make(root: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # `make test` hands its own flags and variables down through the environment; these tests are about none of them.
    names = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ARCH", "SPEC", "OUT", "BUNDLE", "JOBS", "PYTHON")
    env = {name: value for name, value in os.environ.items() if name not in names}
    command = ["make", "--no-print-directory", *args]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, env=env, timeout=60)


def test_help_lists_every_target(root: Path) -> None:
    done = _make(root, "help")
    assert done.returncode == 0
    assert _make(root).stdout == done.stdout
    for target in TARGETS:
        assert re.search(rf"^  {target} +\S", done.stdout, re.MULTILINE), target


@pytest.mark.parametrize("target", ["kernels", "wheel"])
@pytest.mark.parametrize("arch", ["", " "])
def test_no_arch_is_an_error_that_lists_them_before_any_set_up(
    root: Path, tmp_path: Path, target: str, arch: str
) -> None:
    done = _make(root, target, f"ARCH={arch}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    line = done.stderr.splitlines()[0]
    assert line.startswith("ARCH is not set: name one or more of sm_90a sm_100a sm_103a sm_110a")
    assert f"make {target} ARCH=sm_110a" in line
    assert not (tmp_path / "venv").exists()


def test_several_archs_become_several_options(root: Path) -> None:
    for archs in ("sm_90a,sm_110a", "sm_90a sm_110a"):
        text = _make(root, "-n", "kernels", f"ARCH={archs}", "SPEC=a.yaml b.yaml", "OUT=elsewhere", "JOBS=3").stdout
        command = text.splitlines()[-1]
        assert "build --arch sm_90a --arch sm_110a --spec a.yaml --spec b.yaml --out elsewhere --jobs 3" in command


def test_gpu_targets_need_no_set_up(root: Path, tmp_path: Path) -> None:
    """They run where there is no compiler and no virtual environment of ours."""
    for target in ("gpu-test", "bench"):
        text = _make(root, "-n", target, f"VENV={tmp_path / 'venv'}", "BUNDLE=some/bundle").stdout
        assert "pip" not in text
        assert f"CUBINERY_BUNDLE={root / 'some/bundle'} python3 -m" in text


def test_an_old_python_is_refused_by_name(root: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python3.9"
    fake.write_text('#!/bin/sh\necho "cubinery needs Python 3.11 or newer; this is 3.9" >&2\nexit 1\n')
    fake.chmod(0o755)
    done = _make(root, "install", f"BASE_PYTHON={fake}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "needs Python 3.11" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_ci_runs_everything_and_the_tests_last(root: Path) -> None:
    script = root / ".ci/run"
    if not script.exists():
        pytest.skip("not a checkout: an sdist holds no CI")
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make lint", "make type", "make contract", "make test"]
    assert "set -euo pipefail" in script.read_text()
