"""Numbers as registers keep them: integer types, packed pairs, and the canonical bits of float results.

Sections that the files of this folder cite are those of PTX ISA 9.0.

Everything here works on arrays of raw bits (see base.py). Functions of this package never write into their
arguments. They run under `np.errstate(all="ignore")`, which whoever calls compiled instructions enters once:
lanes that do not execute hold garbage, and arithmetic on garbage overflows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import DTYPES, Instr

Array = Any
"""A NumPy array or scalar of raw bits; its type is the register's (see base.DTYPES)."""


@dataclass(frozen=True, slots=True)
class IntType:
    """A fundamental integer or bits type (PTX ISA 5.2.1)."""

    name: str
    width: int
    signed: bool

    @property
    def register(self) -> str:
        """The register type that holds it: 8-bit values sit in 16 bits."""
        return f"b{max(self.width, 16)}"

    @property
    def dtype(self) -> Any:
        """The NumPy type of its value."""
        return np.dtype(f"{'i' if self.signed else 'u'}{self.width // 8}").type

    @property
    def bits(self) -> Any:
        """The NumPy type of its register's bits."""
        return DTYPES[self.register]

    @property
    def view(self) -> str:
        """The name under which an expression looks at its register: s32, u64."""
        return f"{'s' if self.signed else 'u'}{max(self.width, 16)}"

    @property
    def low(self) -> int:
        """The least value."""
        return -(1 << (self.width - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """The greatest value."""
        return (1 << (self.width - self.signed)) - 1


INTEGERS: dict[str, IntType] = {
    f"{letter}{width}": IntType(f"{letter}{width}", width, letter == "s")
    for letter in "sub"
    for width in (8, 16, 32, 64)
}

ARITHMETIC = ("u16", "u32", "u64", "s16", "s32", "s64")
"""The integer types of arithmetic instructions."""

FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64")


def first_type(instr: Instr) -> str:
    """The first fundamental or packed type among the modifiers; empty where there is none."""
    known = (*INTEGERS, *FLOATS, "u16x2", "s16x2", "pred", "tf32")
    return next((word for word in instr.modifiers if word in known), "")


# -- packed pairs ----------------------------------------------------------------------------------


def split16(bits: Array) -> tuple[Array, Array]:
    """The low and the high 16 bits of 32-bit registers."""
    return bits.astype(np.uint16), (bits >> 16).astype(np.uint16)


def _as_halves(fn: Callable[..., Array], half: Any, whole: Any) -> Callable[..., Array]:
    def both(*sources: Array) -> Array:
        shape = sources[0].shape
        if any(source.shape != shape for source in sources):
            sources = np.broadcast_arrays(*sources)
        # Little-endian words seen as twice as many halves: both go through `fn` at once.
        return fn(*(np.ascontiguousarray(source).view(half) for source in sources)).view(whole)

    return both


def packed16(fn: Callable[..., Array]) -> Callable[..., Array]:
    """An elementwise function of 16-bit values, done to both halves of 32-bit registers (types x2 of 16 bits)."""
    return _as_halves(fn, np.uint16, np.uint32)


def packed32(fn: Callable[..., Array]) -> Callable[..., Array]:
    """An elementwise function of 32-bit values, done to both halves of 64-bit registers (.f32x2)."""
    return _as_halves(fn, np.uint32, np.uint64)


# -- canonical float results -----------------------------------------------------------------------

NAN32 = np.uint32(0x7FFFFFFF)
"""The NaN that f32 arithmetic returns, as measured on Hopper; x86 would return 0xffc00000."""
NAN16 = np.uint16(0x7FFF)
"""The NaN of f16 and bf16 arithmetic (PTX ISA 9.7.4: canonical NaN)."""
NAN64 = np.uint64(0xFFF8000000000000)
"""The NaN that f64 arithmetic returns."""
MIN_NORMAL32 = np.float32(2.0**-126)


def canonical32(value: Array) -> Array:
    """Bits of f32 results, every NaN the canonical one. The test costs two NumPy calls."""
    nan = value != value
    bits = value.view(np.uint32)
    return np.where(nan, NAN32, bits) if np.count_nonzero(nan) else bits


def canonical64(value: Array) -> Array:
    """Bits of f64 results, every NaN the canonical one."""
    nan = value != value
    bits = value.view(np.uint64)
    return np.where(nan, NAN64, bits) if np.count_nonzero(nan) else bits


_QUIET64 = np.uint64(0x0008000000000000)


def propagate64(value: Array, *sources: Array) -> Array:
    """Bits of f64 results: a NaN is that of the last source that is one, made quiet: PTX keeps payloads."""
    bits = canonical64(value)
    nan = value != value
    if np.count_nonzero(nan):
        for source in sources:
            bits = np.where(nan & (source != source), source.view(np.uint64) | _QUIET64, bits)
    return bits


def flush32(value: Array) -> Array:
    """f32 values with subnormals replaced by zeros of the same sign (.ftz); NaN and infinity stay."""
    return np.multiply(value, np.abs(value) >= MIN_NORMAL32)


def saturate(value: Array) -> Array:
    """Float values clamped to [0, 1] (.sat): NaN and -0 become +0."""
    return np.where(value > 0, np.minimum(value, value.dtype.type(1)), value.dtype.type(0))
