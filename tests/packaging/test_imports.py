"""What may import what, where import-linter cannot see it: at run time, and at module level."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"


def _run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_runtime_but_for_public_calls_imports_without_torch_and_without_the_build() -> None:
    """Public calls and what is kept behind them may import torch; a contract of import-linter says who may."""
    script = BLOCK.format(names=("torch", "cutlass", "yaml", "click", "rich", "cubinery.aot")) + (
        "import importlib, pkgutil, cubinery.runtime as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'cubinery.runtime.'):\n"
        "    if module.name.rpartition('.')[2] not in ('op', 'append', 'plan', 'partials', 'streams'):\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
    )
    assert "cubinery.runtime.library" in _run(script).split()


def test_importing_the_runtime_loads_no_third_party_package() -> None:
    script = (
        "import sys, cubinery.runtime; print(*(m for m in ('torch', 'numpy', 'cuda', 'cutlass') if m in sys.modules))"
    )
    assert _run(script).strip() == ""


def test_listing_the_build_side_needs_no_compiler() -> None:
    script = BLOCK.format(names=("cutlass", "torch", "cuda")) + (
        "import cubinery.aot.commands, cubinery.aot.builder, cubinery.aot.audit, cubinery.aot.wheel\n"
        "import cubinery.aot.variants, cubinery.aot.machine, cubinery.aot.reproduce\n"
    )
    _run(script)


@pytest.mark.parametrize("name", ["runtime", "aot"])
def test_bare_imports_are_refused_by_the_linter(name: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "tests/x.py", "--select", "TID251", "-"]
    done = subprocess.run(command, input=f"import {name}\n", capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"spell it cubinery.{name}" in done.stdout
