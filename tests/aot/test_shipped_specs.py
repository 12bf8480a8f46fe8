"""The specs that ship: the default one holds what its domain needs and no more, the full ones name every axis value."""

from __future__ import annotations

from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
import yaml

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import check_closure, expand
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import DecodeConfig, MmaConfig, Tcgen05Config
from cubinery.runtime.ops.paged_decode.select import outcomes

CHOICES = {f.name: set(f.metadata["choices"]) for f in fields(MmaConfig) if f.name != "causal"}
"""Values by axis; without a causal mask a kernel is that of q_len 1."""
FEATURES = ("window", "sinks", "softcap", "q_lens")


@pytest.mark.parametrize("arch", list(ARCHS))
def test_the_default_spec_is_what_its_domain_needs(root: Path, arch: str) -> None:
    specs = load_specs([root / "kernel_specs/paged_decode.yaml"])
    items = expand(specs, [arch])
    check_closure(specs, items)
    needed = {c.key(arch) for spec in specs for domain, _ in spec.domain for c in outcomes(domain, arch)}
    held = {item.key for item in items if isinstance(item.config, DecodeConfig)}
    assert held == needed
    assert len(held) <= (226 if arch == "sm_90a" else 130)
    problems = {
        (c.head_dim, c.page_size, c.kv_format, c.q_dtype, c.q_len, c.window, c.sinks, c.softcap)
        for item in items
        if isinstance(c := item.config, DecodeConfig)
    }
    assert 80 <= len(problems) <= 120, "about a hundred configurations; several kernels may serve one, by its batch"


@pytest.mark.parametrize("head_dim", sorted(CHOICES["head_dim"]))
@pytest.mark.parametrize("with_features", [False, True])
def test_the_full_specs_are_the_whole_product(root: Path, head_dim: int, with_features: bool) -> None:
    """Every value of every axis (`cluster`, where a block has none, is 1), and exactly what fits is listed and not
    excluded; expanding it all takes minutes.
    """
    spec = yaml.safe_load((root / f"kernel_specs/full/d{head_dim}{'_axes' * with_features}.yaml").read_text())
    blocks = spec["matrix"]
    assert {arch for block in blocks for arch in block["arch"]} == set(ARCHS)
    for name, values in CHOICES.items():
        if name == "head_dim":
            values = {head_dim}
        elif name in FEATURES if not with_features else name == "pdl":
            assert not any(name in block for block in blocks)
            continue
        held = {arch: {v for b in blocks if arch in b["arch"] for v in b.get(name, [1])} for arch in ARCHS}
        assert all(found == values for found in held.values()), name
    exclusions = [e for e in spec["exclude"] if not set(e) & set(FEATURES)]
    decide = ("kv_format", "row_tile", "ctas_per_sm", "cluster")
    for values in product(*(CHOICES[name] for name in decide)):
        point = dict(zip(decide, values, strict=True))
        listed = any(all(v in block.get(name, [1]) for name, v in point.items()) for block in blocks)
        excluded = any(all(point[name] in values for name, values in e.items()) for e in exclusions)
        assert (listed and not excluded) == fits(head_dim, **point), point


def fits(head_dim: int, **axes: object) -> bool:
    """Whether there is a kernel, the same on all archs and for both kinds of queries."""
    found = set()
    for arch in ARCHS.values():
        for q_dtype in CHOICES["q_dtype"]:
            config = MmaConfig(head_dim=head_dim, page_size=16, q_dtype=q_dtype, **axes)  # type: ignore[arg-type]
            try:
                config.check_arch(arch)
                found.add(True)
            except ConfigError:
                found.add(False)
    assert len(found) == 1
    return found.pop()


def test_the_writers_are_all_there(root: Path) -> None:
    axes = {f.name: f.metadata["choices"] for f in fields(AppendConfig)}
    every = {AppendConfig(**dict(zip(axes, values, strict=True))) for values in product(*axes.values())}
    for name, expected in (("full/append", every), ("paged_decode_append", {c for c in every if not c.pdl})):
        items = expand(load_specs([root / f"kernel_specs/{name}.yaml"]))
        assert {(item.arch.name, item.config) for item in items} == {(a, c) for a in ARCHS for c in expected}


TUNED = {"max_kv_stages", "l2_prefetch", "convert_warpgroups"}
"""Axes of `tcgen05` whose defaults follow from the others: no spec that ships builds other values of them all."""


def test_the_full_spec_of_tensor_memory_is_the_whole_product(root: Path) -> None:
    spec = yaml.safe_load((root / "kernel_specs/full/tcgen05.yaml").read_text())
    archs = {name for name, arch in ARCHS.items() if arch.tmem_columns}
    for block in spec["matrix"]:
        assert set(block.pop("arch")) == archs
    chosen = {f.name: f for f in fields(Tcgen05Config) if f.name not in TUNED | {"causal", *FEATURES}}
    for name, f in chosen.items():
        held = {v for block in spec["matrix"] for v in block.get(name, [f.default])}
        assert held == set(f.metadata["choices"]), name
    rest = {"page_size": 16, "q_len": 1, "pdl": False, "kv_evict_first": False}
    decide = ("head_dim", "kv_format", "q_dtype", "row_tile", "ctas_per_sm")
    for values in product(*(chosen[name].metadata["choices"] for name in decide)):
        point = dict(zip(decide, values, strict=True))
        listed = any(all(v in block.get(name, ["bf16"]) for name, v in point.items()) for block in spec["matrix"])
        excluded = any(all(point[name] in values for name, values in e.items()) for e in spec.get("exclude", ()))
        assert (listed and not excluded) == tcgen05_fits(archs, **point, **rest), point


def tcgen05_fits(archs: set[str], **axes: object) -> bool:
    """Whether there is a kernel, the same on all archs."""
    found = set()
    for name in archs:
        try:
            Tcgen05Config(**axes).check_arch(ARCHS[name])  # type: ignore[arg-type]
            found.add(True)
        except ConfigError:
            found.add(False)
    assert len(found) == 1
    return found.pop()
