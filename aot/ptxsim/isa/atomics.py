"""What atom and red compute on an element of memory (PTX ISA 9.7.13.5, 9.7.13.6).

Functions take raw bits (old, operand...) and return the new bits. Floats add with one rounding to nearest even; f16,
bf16 and their pairs keep subnormals (.noftz); f32 does in shared memory, while in global memory it flushes them.
A NaN sum is canonical but for f64, which keeps payloads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import WIDE
from cubinery.aot.ptxsim.isa.half import narrow, widen
from cubinery.aot.ptxsim.isa.rounding import to_odd, two_sum
from cubinery.aot.ptxsim.isa.values import Array, canonical32, flush32, packed16, propagate64

Function = Callable[..., Any]

INTEGER: dict[str, Function] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda _old, new: new,
    "cas": lambda old, expected, new: np.where(old == expected, new, old),
    "inc": lambda old, limit: np.where(old >= limit, 0, old + 1),
    "dec": lambda old, limit: np.where((old == 0) | (old > limit), limit, old - 1),
}
"""By operation, on NumPy integers."""


def _add_f32(old: Array, new: Array) -> Array:
    return canonical32(old.view(np.float32) + new.view(np.float32))


def _add_f32_flushed(old: Array, new: Array) -> Array:
    return canonical32(flush32(flush32(old.view(np.float32)) + flush32(new.view(np.float32))))


def _add_f64(old: Array, new: Array) -> Array:
    a, b = old.view(np.float64), new.view(np.float64)
    return propagate64(a + b, a, b)


def _add_half(name: str) -> Function:
    return lambda old, new: narrow(to_odd(*two_sum(widen(old, name), widen(new, name))), name)


_FLOAT_ADD: dict[str, tuple[Function, Any]] = {
    "f32": (_add_f32, np.uint32),
    "f64": (_add_f64, np.uint64),
    "f16": (_add_half("f16"), np.uint16),
    "bf16": (_add_half("bf16"), np.uint16),
    "f16x2": (packed16(_add_half("f16")), np.uint32),
    "bf16x2": (packed16(_add_half("bf16")), np.uint32),
}


def atomic(operation: str, kind: str, flush: bool = False) -> tuple[Function, Any]:
    """(function, NumPy type that it works on) of an operation. Raises ValueError where PTX has none.

    `flush`: as global memory does it.
    """
    if flush and (operation, kind) == ("add", "f32"):
        return _add_f32_flushed, np.uint32
    if kind == "b128" and operation in ("exch", "cas"):
        return INTEGER[operation], WIDE
    if operation == "add" and kind in _FLOAT_ADD:
        return _FLOAT_ADD[kind]
    kinds = {
        "add": ("u32", "s32", "u64", "s64"), "min": ("u32", "s32", "u64", "s64"), "max": ("u32", "s32", "u64", "s64"),
        "inc": ("u32",), "dec": ("u32",), "cas": ("b16", "b32", "b64", "u32", "s32", "u64", "s64"),
    }.get(operation, ("b32", "b64", "u32", "s32", "u64", "s64"))  # fmt: skip
    if operation not in INTEGER or kind not in kinds:
        raise ValueError(f".{operation} of .{kind} does not exist")
    return INTEGER[operation], np.dtype(f"{'' if kind[0] == 's' else 'u'}int{kind[1:]}").type
