"""Scalar accesses to global memory through typed pointers."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute


def load_i32(pointer: cute.Pointer, index: Any) -> Int32:
    """One int32 from global memory."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


def load_f32(pointer: cute.Pointer, index: Any) -> Float32:
    """One fp32 from global memory."""
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


def store_f32(pointer: cute.Pointer, index: Any, value: Float32) -> None:
    """One fp32 to global memory."""
    cute.make_tensor(pointer + index, cute.make_layout(1))[0] = value
