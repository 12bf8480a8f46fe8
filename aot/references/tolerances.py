"""How close a kernel must come to its reference: the one table that all tests read.

An absolute tolerance on O would hide dropped keys at long contexts, where rows are small; so O is held
to a relative L2 distance per output row, and LSE to an absolute one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Bounds on one kernel's outputs."""

    o_relative_l2: float
    """Largest ||o - reference|| / ||reference|| over the head_dim elements of any output row."""
    lse_absolute: float
    """Largest |lse - reference| of any row, natural log units."""


PAGED_DECODE: dict[str, Tolerance] = {
    # P is rounded to bf16 before P.V, O is rounded to bf16.
    "mma": Tolerance(o_relative_l2=5e-3, lse_absolute=1e-3),
    "wgmma": Tolerance(o_relative_l2=5e-3, lse_absolute=1e-3),
    # Held to an emulation that rounds P as the kernel does. With e4m3 queries P is e4m3(448 p), and an fp32 exponential
    # that lies beside the exact one may round to the neighbour, 1/16 away: one key's share of a row that has few.
    "tcgen05-bf16": Tolerance(o_relative_l2=5e-3, lse_absolute=1e-3),
    "tcgen05-e4m3": Tolerance(o_relative_l2=3e-2, lse_absolute=1e-3),
}
"""By implementation, and element of Q where that decides."""


def paged_decode(impl: str, q_dtype: str) -> Tolerance:
    """The bounds of a decode implementation with queries of `q_dtype`."""
    return PAGED_DECODE[impl] if impl in PAGED_DECODE else PAGED_DECODE[f"{impl}-{q_dtype}"]


@dataclass(frozen=True, slots=True)
class Deviation:
    """Largest distances of an output from its reference, and where."""

    o_relative_l2: float
    o_row: tuple[int, ...]
    lse_absolute: float
    lse_row: tuple[int, ...]

    def within(self, tolerance: Tolerance) -> bool:
        """Both distances are in bounds (a NaN is not)."""
        return self.o_relative_l2 <= tolerance.o_relative_l2 and self.lse_absolute <= tolerance.lse_absolute

    def __str__(self) -> str:
        return (
            f"O relative L2 {self.o_relative_l2:.3e} at row {self.o_row}, "
            f"LSE off by {self.lse_absolute:.3e} at row {self.lse_row}"
        )


def deviation(o: Any, lse: Any, o_reference: Any, lse_reference: Any) -> Deviation:
    """Compare outputs with the reference: arrays of equal shapes, O with head_dim last.

    A row whose reference is zero (an empty one) counts its own norm; an LSE of -inf must be matched
    exactly, else its distance is infinite. A NaN anywhere gives an infinite distance.
    """
    o, o_reference = np.asarray(o, np.float64), np.asarray(o_reference, np.float64)
    lse, lse_reference = np.asarray(lse, np.float64), np.asarray(lse_reference, np.float64)
    if o.shape != o_reference.shape or lse.shape != lse_reference.shape:
        raise ValueError(f"shapes {o.shape}, {lse.shape} do not match {o_reference.shape}, {lse_reference.shape}")
    norm = np.linalg.norm(o_reference, axis=-1)
    rows = np.linalg.norm(o - o_reference, axis=-1) / np.where(norm == 0, 1.0, norm)
    with np.errstate(invalid="ignore"):
        off = np.where(lse == lse_reference, 0.0, np.abs(lse - lse_reference))
    rows, off = (np.where(np.isnan(x), np.inf, x) for x in (rows, off))
    o_row = tuple(int(i) for i in np.unravel_index(rows.argmax(), rows.shape))
    lse_row = tuple(int(i) for i in np.unravel_index(off.argmax(), off.shape))
    return Deviation(float(rows[o_row]), o_row, float(off[lse_row]), lse_row)
