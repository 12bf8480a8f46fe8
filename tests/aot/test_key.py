"""Keys are injective and parse back; digests change with every input and with nothing else."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_builds import FAKE, toy_items

import cubinery.aot.kernels
import cubinery.runtime.ops
from cubinery.aot.errors import BuildError
from cubinery.aot.key import artifact_digest, codegen_environment, digest, read_sources, source_digest, toolchain
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ConfigError, KeyFormatError
from cubinery.runtime.families import configs, families, parse_key

MOST_CONFIGS = 20_000
"""Of a class with more configurations, so many are tried, picked at random but always the same."""


def every_config(cls: type[KernelConfig]) -> list[KernelConfig]:
    """All legal configurations of a class, canonical or not, or many of them."""
    choices = [f.metadata["choices"] for f in fields(cls)]
    tried: Iterable[tuple[Any, ...]] = itertools.product(*choices)
    if math.prod(map(len, choices)) > MOST_CONFIGS:
        pick = random.Random(0).choice
        tried = [tuple(map(pick, choices)) for _ in range(MOST_CONFIGS)]
    found = []
    for values in tried:
        try:
            found.append(cls(**dict(zip(cls.axis_names(), values, strict=True))))
        except ConfigError:
            continue
    return found


@pytest.mark.parametrize("family", ["toy", "paged_decode"])
def test_keys_are_injective_and_parse_back(family: str) -> None:
    assert family in families()
    meaning: dict[str, KernelConfig] = {}
    for cls in configs(family).values():
        everything = every_config(cls)
        assert everything
        for config in everything:
            key = config.key("sm_90a")
            assert meaning.setdefault(key, config.canonical()) == config.canonical()
    assert len(set(meaning.values())) == len(meaning)
    for key, config in meaning.items():
        assert parse_key(key) == (config, "sm_90a")
        assert set(key) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-")


@given(st.text(alphabet="toysmcale_-w1248bf2kn0", max_size=40).map(lambda tail: f"toy-sm_110a-scale-{tail}"))
def test_only_canonical_keys_parse(key: str) -> None:
    with contextlib.suppress(KeyFormatError):
        config, arch = parse_key(key)
        assert config.key(arch) == key


parts = st.dictionaries(st.text(max_size=6), st.binary(max_size=6), max_size=4)


@given(parts, parts)
def test_digests_of_different_parts_differ(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (digest(one) == digest(other)) == (one == other)


def test_no_shift_of_bytes_between_labels_and_values_collides() -> None:
    pairs = [{"ab": b"c"}, {"a": b"bc"}, {"abc": b""}, {"": b"abc"}, {"a": b"b", "c": b""}, {"a": b"", "b": b"c"}, {}]
    assert len({digest(pair) for pair in pairs}) == len(pairs)


def base() -> dict:
    (item,) = toy_items("{arch: sm_110a, width: 2}")
    return {
        "config": item.config,
        "arch": "sm_110a",
        "hosts": (),
        "sources": {"m": b"one", "n": b"two"},
        "toolchain": {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"},
        "environment": {"CUTE_DSL_X": "1"},
        "compile_entry": FAKE,
    }


def of(inputs: dict) -> str:
    return artifact_digest(**inputs)


def test_every_input_changes_the_digest() -> None:
    changes = [
        {"config": toy_items("{arch: sm_110a, width: 4}")[0].config},
        {"config": toy_items("{arch: sm_110a, width: 2, masked: false}")[0].config},
        {"arch": "sm_103a"},
        {"hosts": ("object",)},
        {"hosts": ("object-linux-aarch64",)},
        {"sources": {"m": b"one", "n": b"twO"}},
        {"sources": {"m": b"one"}},
        {"sources": {"m": b"two", "n": b"one"}},
        {"toolchain": {"nvidia-cutlass-dsl": "4.8.2", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"}},
        {"toolchain": {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu12": "4.8.1"}},
        {"environment": {"CUTE_DSL_X": "2"}},
        {"environment": {}},
        {"compile_entry": "toy_unstartable:compile_fake"},
    ]
    found = [of(base()), *(of({**base(), **change}) for change in changes)]
    assert len(set(found)) == len(found)


def test_equal_inputs_give_equal_digests_whatever_their_order() -> None:
    turned = {name: dict(reversed(v.items())) if isinstance(v, dict) else v for name, v in base().items()}
    assert of(turned) == of(base())


def test_configurations_of_one_kernel_share_a_digest() -> None:
    config = configs("toy")["scale"](width=1, masked=False)
    assert of({**base(), "config": config}) == of({**base(), "config": config.canonical()})


def test_pythons_version_is_no_input(monkeypatch: pytest.MonkeyPatch) -> None:
    before = of(base())
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    monkeypatch.setattr(sys, "version", "3.99")
    assert of(base()) == before


def test_only_variables_that_shape_code_are_taken() -> None:
    environ = {
        "CUTE_DSL_LOG": "1",
        "NVVM_X": "2",
        "CUDA_HOME": "/x",
        "PATH": "/bin",
        "CUTE_DSL_ARCH": "sm_90a",
        "CUDA_V": "1",
    }
    assert codegen_environment(environ) == {"CUDA_HOME": "/x", "CUTE_DSL_LOG": "1", "NVVM_X": "2"}


def test_the_toolchain_is_every_compiler_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia_cutlass_dsl-4.8.1", "nvidia_cutlass_dsl_libs_cu13-4.8.0", "nvidia_cutlassy-1.0", "numpy-2.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    shadowed = tmp_path / "later"
    (shadowed / "nvidia_cutlass_dsl-3.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(shadowed), str(tmp_path / "none")])
    assert toolchain() == {"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.0"}


def test_the_toolchain_agrees_with_the_installed_metadata() -> None:
    from importlib.metadata import version

    found = toolchain()
    assert "nvidia-cutlass-dsl-libs-cu13" in found
    assert all(version(name) == number for name, number in found.items())


# -- source closure ------------------------------------------------------------------------------


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A family `probe` whose files a test may edit."""
    write(
        tmp_path,
        {
            "kernels/probe/__init__.py": "SHARED = 1\n",
            "kernels/probe/mma.py": (
                "import cutlass\nimport os, cubinery.aot.kernels.probe.tiles\nfrom . import layout\n"
                "from cubinery.runtime.arch import Arch\n\ndef entry():\n    from .late import late\n"
            ),
            "kernels/probe/abi.py": (
                "from cubinery.aot.kernels.probe import mma_abi, other_abi, shared_abi\n"
                "from cubinery.runtime.ops.probe.config import Config\n"
            ),
            "kernels/probe/mma_abi.py": "",
            "kernels/probe/other_abi.py": "",
            "kernels/probe/shared_abi.py": "",
            "kernels/probe/tiles.py": "raise RuntimeError('never executed')\n",
            "kernels/probe/layout.py": "from cubinery.aot.kernels.probe import SHARED\n",
            "kernels/probe/late.py": "",
            "kernels/probe/other.py": "",
            "ops/probe/__init__.py": "",
            "ops/probe/config.py": "",
        },
    )
    for package, folder in ((cubinery.aot.kernels, "kernels"), (cubinery.runtime.ops, "ops")):
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / folder)])
    return tmp_path


def test_the_closure_is_what_imports_reach_and_nothing_runs(family: Path) -> None:
    found = read_sources("probe", "mma")
    own = {name.removeprefix("cubinery.aot.kernels.") for name in found if "probe" in name}
    kernels = {"probe", "probe.mma", "probe.abi", "probe.tiles", "probe.layout", "probe.late"}
    kernels |= {"probe.mma_abi", "probe.shared_abi"}
    assert own == kernels | {"cubinery.runtime.ops.probe.config"}
    assert {"cubinery.runtime.arch", "cubinery.runtime.errors"} <= found.keys()
    assert not any(name.startswith("cutlass") for name in found)


def test_report_17_content_decides_and_never_a_time(family: Path) -> None:
    """Files of the same version with older times left stale objects in use."""
    path, before = family / "kernels/probe/tiles.py", source_digest(read_sources("probe", "mma"))
    os.utime(path)
    assert source_digest(read_sources("probe", "mma")) == before
    times = path.stat()
    path.write_text(path.read_text() + "# edited\n")
    os.utime(path, (times.st_atime - 10_000, times.st_mtime - 10_000))
    assert source_digest(read_sources("probe", "mma")) != before


@pytest.mark.parametrize(
    ("file", "matters"),
    [
        ("mma", True),
        ("abi", True),
        ("tiles", True),
        ("layout", True),
        ("late", True),
        ("__init__", True),
        ("other", False),
        ("mma_abi", True),
        ("shared_abi", True),
        ("other_abi", False),
    ],
)
def test_an_edit_changes_the_digest_exactly_where_imports_reach(family: Path, file: str, matters: bool) -> None:
    before = source_digest(read_sources("probe", "mma"))
    path = family / f"kernels/probe/{file}.py"
    path.write_text(path.read_text() + "# edited\n")
    assert (source_digest(read_sources("probe", "mma")) != before) is matters


def test_a_kernel_that_is_not_there_and_one_that_is_no_python(family: Path) -> None:
    with pytest.raises(BuildError, match=r"probe\.tcgen05: there is no module cubinery\.aot\.kernels\.probe\.tcgen05"):
        read_sources("probe", "tcgen05")
    (family / "kernels/probe/late.py").write_text("def f(:\n")
    with pytest.raises(BuildError, match=r"late\.py:1: "):
        read_sources("probe", "mma")


def test_the_real_family_s_closure_holds_its_declared_parts() -> None:
    found = read_sources("paged_decode", "mma")
    assert {
        "cubinery.aot.kernels.paged_decode.mma",
        "cubinery.aot.kernels.paged_decode.abi",
        "cubinery.runtime.ops.paged_decode.config",
        "cubinery.runtime.arch",
    } <= found.keys()
    assert not any(name.startswith("cubinery.aot.builder") for name in found)
    assert not any(name.endswith((".append_abi", ".append_config")) for name in found)
    assert set(ARCHS) == {"sm_90a", "sm_100a", "sm_103a", "sm_110a"}
