"""Atomic operations on raw bits (PTX ISA 9.7.13.5), against plain integers and exact sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ptx_floats import NAMES, add, decode, encode, flush, payload_kept, specials

from cubinery.aot.ptxsim.isa.atomics import atomic

EDGES = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 77]


def signed(value: int) -> int:
    return value - (value >> 31 << 32)


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [
        ("add", "u32", lambda a, b: (a + b) & 0xFFFFFFFF), ("add", "s32", lambda a, b: (a + b) & 0xFFFFFFFF),
        ("min", "u32", min), ("max", "u32", max),
        ("min", "s32", lambda a, b: min(a, b, key=signed)), ("max", "s32", lambda a, b: max(a, b, key=signed)),
        ("and", "b32", lambda a, b: a & b), ("or", "b32", lambda a, b: a | b), ("xor", "b32", lambda a, b: a ^ b),
        ("exch", "b32", lambda a, b: b), ("inc", "u32", lambda a, b: 0 if a >= b else a + 1),
        ("dec", "u32", lambda a, b: b if a == 0 or a > b else a - 1),
    ],
)  # fmt: skip
def test_integers(operation: str, kind: str, expected: Callable[[int, int], int]) -> None:
    function, dtype = atomic(operation, kind)
    old, new = (np.array(x, np.uint32).ravel() for x in np.meshgrid(EDGES, EDGES))
    with np.errstate(over="ignore"):
        found = np.asarray(function(old.view(dtype), new.view(dtype))).astype(dtype).view(np.uint32)
    assert found.tolist() == [expected(int(a), int(b)) for a, b in zip(old, new, strict=True)]


def test_cas() -> None:
    function, _ = atomic("cas", "b16")
    found = function(*(np.array(x, np.uint16) for x in ([1, 2, 3], [1, 0, 3], [7, 8, 9])))
    assert found.tolist() == [7, 2, 9]


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_sums(kind: str) -> None:
    """One rounding to nearest even, subnormals kept but by f32 in global memory, NaN canonical but of f64."""
    fmt = NAMES[kind]
    edges = specials(fmt)
    a, b = [x for x in edges for _ in edges], [y for _ in edges for y in edges]
    function, dtype = atomic("add", kind)
    with np.errstate(all="ignore"):
        found = [int(v) for v in function(np.array(a, dtype), np.array(b, dtype))]
    expected = [encode(add(decode(x, fmt), decode(y, fmt), "rn"), fmt) for x, y in zip(a, b, strict=True)]
    if kind == "f64":
        expected = [payload_kept(bits, x, y) for bits, x, y in zip(expected, a, b, strict=True)]
    assert found == expected
    if kind == "f32":
        flushing, _ = atomic("add", kind, flush=True)
        with np.errstate(all="ignore"):
            found = [int(v) for v in flushing(np.array(a, dtype), np.array(b, dtype))]
        sources = [(decode(flush(x, fmt), fmt), decode(flush(y, fmt), fmt)) for x, y in zip(a, b, strict=True)]
        assert found == [flush(encode(add(x, y, "rn"), fmt), fmt) for x, y in sources]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_pairs(kind: str) -> None:
    """.f16x2 and .bf16x2: both halves, each alone."""
    single, _ = atomic("add", kind)
    pair, _ = atomic("add", f"{kind}x2")
    a, b = np.array([0x3C00, 1, 0x8000], np.uint16), np.array([0x4001, 0x7C00, 0x8000], np.uint16)
    with np.errstate(all="ignore"):
        low, high = single(a, b), single(b, b)
        wide = pair(a | b.astype(np.uint32) << 16, b | b.astype(np.uint32) << 16)
    assert wide.tolist() == (low | high.astype(np.uint32) << 16).tolist()


def test_what_ptx_has_not() -> None:
    for operation, kind in (("min", "f32"), ("inc", "s32"), ("and", "f16"), ("nand", "b32")):
        with pytest.raises(ValueError, match="does not exist"):
            atomic(operation, kind)
