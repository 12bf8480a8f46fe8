"""Appends of the cache writer, against the host quantisers to the bit, in every layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cubinery.aot.problems import SEED, Finding, Place, Subject
from cubinery.aot.references.paged_append import append_rows
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.formats import ELEMENTS, NVFP4_BLOCK, row_bytes
from cubinery.runtime.ops.paged_decode.layouts import Layout, kv_views, storage_shapes

Tensors = dict[str, Any]

SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 3.3e38, -3.3e38, 1e-39, -1e-39, 2.0**-126, 1e19, -1e-20], np.float32
)
"""Elements that no model produces, in the last token of a problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One append."""

    layout: Layout = "nhd"
    tokens: int = 9
    heads: int = 2
    page_size: int = 16
    num_pages: int = 3
    wide_slots: bool = False
    """int64 slots, with some far outside the cache."""
    descale: Literal["none", "number", "one", "head", "token"] = "head"
    """Its granularity; nvfp4 has `one` where others have more, bf16 has none."""
    special: bool = True
    """The last token holds `SPECIAL`."""
    float8: bool = False
    """fp8 caches and nvfp4 scales are float8_e4m3fn instead of uint8."""
    pad_rows: int = 0
    """Rows of K and V past those that have a slot."""


CASES = (
    Case(),
    Case(layout="hnd", heads=3, wide_slots=True, descale="one", float8=True, pad_rows=2),
    Case(layout="interleaved", page_size=32, descale="token", tokens=37),
    Case(layout="flashinfer", page_size=12, descale="number", wide_slots=True, heads=1),
)
"""What `check` runs: every layout, and each other choice at least once."""


def check(subject: Subject) -> Finding:
    """All of `CASES`; the caches must hold the expected bytes, and nothing else may have changed."""
    config = subject.config
    assert isinstance(config, AppendConfig)
    for case in CASES:
        wrong = run(subject.library, config, case, subject.place, subject.seed, key=subject.key)
        if wrong:
            return Finding(False, f"{case}: {wrong}")
    return Finding(True, f"{len(CASES)} appends are equal to the bit")


def run(library: Library, config: AppendConfig, case: Case, place: Place, seed: int = SEED, *, key: str = "") -> str:
    """Append once (twice with PDL, which changes nothing) and compare; what differs, or nothing."""
    from cubinery.runtime.ops.paged_decode.append import CacheWriter

    given = problem(config, case, seed)
    expected = {name: tensor.clone() for name, tensor in given.items() if name.startswith(("cache", "scales"))}
    expect(config, case, given, expected)
    placed = place(**given)
    writer = CacheWriter(library, head_dim=config.head_dim, kv_format=config.kv_format, pdl=config.pdl)
    if key and writer.key != key:
        raise CubineryError(f"{key}: the public call picks {writer.key} for its configuration")
    for _ in range(2 if config.pdl else 1):
        writer.append(**arguments(config, case, placed))
    return "; ".join(filter(None, (difference(name, placed[name], tensor) for name, tensor in expected.items())))


def problem(config: AppendConfig, case: Case, seed: int = SEED) -> Tensors:
    """CPU tensors: rows of Q, K and V together, slots, descales, and the caches' storage, full of random bytes."""
    import torch

    rng = np.random.default_rng(seed)
    shape = (case.tokens + case.pad_rows, 1 + 2 * case.heads, config.head_dim)
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 9, (*shape[:2], 1))
    if case.special:
        values[case.tokens - 1, :, :: NVFP4_BLOCK + 1] = 0
        flat = values[case.tokens - 1].reshape(-1)
        flat[:: flat.size // 40] = np.resize(SPECIAL, len(flat[:: flat.size // 40]))
    num_slots = case.num_pages * case.page_size
    slots = rng.permutation(num_slots)[: case.tokens].astype(np.int64)
    outside = [-1, num_slots, -(2**31), 2**31 - 1]
    if case.wide_slots:
        outside += [2**31, 2**32, 2**32 + int(slots[0]), -(2**32), 2**62, -(2**63)]
    skipped = rng.choice(case.tokens - 1, min(len(outside), (case.tokens - 1) // 2), replace=False)
    slots[skipped] = outside[: len(skipped)]
    found: Tensors = {
        "qkv": torch.from_numpy(values.astype(np.float32)).bfloat16(),
        "slots": torch.from_numpy(slots if case.wide_slots else slots.astype(np.int32)),
    }
    for name, size in (("k", _descale_shape(config, case)), ("v", _descale_shape(config, case))):
        if size is not None:
            found[f"{name}_descale"] = torch.from_numpy(rng.uniform(0.01, 4, size).astype(np.float32))
    for name, row, dtype in _buffers(config, case):
        shapes = storage_shapes(
            case.layout, num_pages=case.num_pages, page_size=case.page_size, num_kv_heads=case.heads, row=row
        )
        for i, size in enumerate(shapes):
            count = int(np.prod(size)) * dtype.itemsize
            found[f"{name}{i}"] = torch.from_numpy(rng.integers(0, 256, count, np.uint8)).view(dtype).view(size)
    return found


def arguments(config: AppendConfig, case: Case, given: Tensors) -> Tensors:
    """What `CacheWriter.append` takes, as views of a problem's tensors."""
    rows = given["qkv"]
    k_cache, v_cache = views("cache", case, given)
    found = {
        "k": rows[:, 1 : 1 + case.heads], "v": rows[:, 1 + case.heads :], "k_cache": k_cache, "v_cache": v_cache,
        "slot_mapping": given["slots"],
    }  # fmt: skip
    for name in ("k_descale", "v_descale"):
        if name in given:
            found[name] = given[name]
        elif case.descale == "number" and config.kv_format != "bf16":
            found[name] = _NUMBERS[name]
    if config.kv_format == "nvfp4":
        found["k_scales"], found["v_scales"] = views("scales", case, given)
    return found


def views(name: str, case: Case, given: Tensors) -> tuple[Any, Any]:
    """Logical views of K's and V's part of the storage called `name`."""
    return kv_views(case.layout, *(given[key] for key in sorted(given) if key.startswith(name)))


def expect(config: AppendConfig, case: Case, given: Tensors, into: Tensors) -> None:
    """Do on the host what the kernel must do, to the storage in `into`."""
    values = arguments(config, case, given)
    caches = views("cache", case, into)
    scales = views("scales", case, into) if config.kv_format == "nvfp4" else (None, None)
    for name, cache, scale in zip("kv", caches, scales, strict=True):
        descale = values.get(f"{name}_descale")
        append_rows(
            bits(cache), values[name].float().numpy(), values["slot_mapping"].numpy(), config.kv_format,
            None if descale is None else np.asarray(descale, np.float32), None if scale is None else bits(scale),
        )  # fmt: skip


def difference(name: str, found: Any, expected: Any) -> str:
    """Which bytes of two tensors differ; nothing where none do."""
    import torch

    a, b = (x.detach().cpu().reshape(-1).view(torch.uint8).numpy() for x in (found, expected))
    bad = np.flatnonzero(a != b)
    if not len(bad):
        return ""
    return f"{len(bad)} of {len(a)} bytes of {name} differ, first {bad[0]}: {a[bad[0]]:#x}, expected {b[bad[0]]:#x}"


_NUMBERS = {"k_descale": 0.37, "v_descale": 3}


def _descale_shape(config: AppendConfig, case: Case) -> tuple[int, ...] | None:
    """Shape of a descale tensor; None where there is none."""
    if config.kv_format == "bf16" or case.descale in ("none", "number"):
        return None
    if config.kv_format == "nvfp4" or case.descale == "one":
        return (1,)
    return (case.heads,) if case.descale == "head" else (case.tokens, case.heads)


def _buffers(config: AppendConfig, case: Case) -> list[tuple[str, int, Any]]:
    """(name, elements of a row, dtype) of the storage of a format."""
    import torch

    code = torch.float8_e4m3fn if case.float8 else torch.uint8
    if config.kv_format == "bf16":
        return [("cache", config.head_dim, torch.bfloat16)]
    if config.kv_format == "fp8":
        return [("cache", config.head_dim, code)]
    packed = ("cache", row_bytes(config.head_dim, ELEMENTS[config.kv_format].bits), torch.uint8)
    return [packed, ("scales", config.head_dim // NVFP4_BLOCK, code)] if config.kv_format == "nvfp4" else [packed]


def bits(tensor: Any) -> NDArray[Any]:
    """A CPU tensor's memory as unsigned integers of its element size."""
    import torch

    if tensor.element_size() == 2:
        return np.asarray(tensor.view(torch.int16).numpy().view(np.uint16))
    return np.asarray(tensor.view(torch.uint8).numpy())
