"""Gangs: converged warps that run together, and how they part and join.

A value of a gang of W warps is an array of shape (W or 1, 32 or 1); where a dimension is 1, the value is the
same along it. Values are never written in place, so gangs may share them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LANES = 32
Frame = list[Any]
"""A gang's registers by slot: arrays, or None where the register is dead."""


class Gang:
    """Warps (of any resident CTA) that stand at the same segment with some of their lanes."""

    __slots__ = ("cta", "frame", "mask", "segment", "warps")

    def __init__(self, segment: int, warps: Any, cta: Any, mask: Any, frame: Frame) -> None:
        self.segment = segment
        self.warps = warps
        """Warp numbers among the resident ones, ascending: (W,)."""
        self.cta = cta
        """Slot of each warp's CTA, (W, 1)."""
        self.mask = mask
        """Lanes that execute, bool (W, 32); None for all."""
        self.frame = frame

    def __len__(self) -> int:
        return len(self.warps)

    def lanes(self) -> Any:
        """The executing lanes, always as an array (W, 32)."""
        return np.ones((len(self.warps), LANES), bool) if self.mask is None else self.mask

    def rows(self, rows: Any) -> Gang:
        """The gang of some of the warps (indices or a bool array); the registers as they are."""
        count = len(self.warps)
        frame = [v if v is None or v.shape[0] != count else v[rows] for v in self.frame]
        mask = None if self.mask is None else packed(self.mask[rows])
        return Gang(self.segment, self.warps[rows], self.cta[rows], mask, frame)

    def part(self, lanes: Any) -> Gang:
        """The gang of some lanes (W, 32) of those that execute; warps without any are left out."""
        rows = lanes.any(axis=1)
        if rows.all():
            return Gang(self.segment, self.warps, self.cta, packed(lanes), list(self.frame))
        part = self.rows(rows)
        part.mask = packed(lanes[rows])
        return part


def spread(value: Any, rows: int) -> Any:
    """A value for every lane of `rows` warps (what np.broadcast_to gives, in a fifth of its time)."""
    if value.shape == (rows, LANES):
        return value
    result = np.empty((rows, LANES), value.dtype)
    result[...] = value
    return result


def packed(mask: Any) -> Any:
    """None where a mask holds every lane."""
    return None if mask.all() else mask


def join(gangs: list[Gang], live: list[int], slots: int) -> Gang:
    """One gang of several at the same segment; only `live` slots survive. A warp's lanes may come from several."""
    if len(gangs) == 1:
        return gangs[0]
    warps = np.concatenate([g.warps for g in gangs])
    unique, inverse = np.unique(warps, return_inverse=True)
    if len(unique) == len(warps):
        return _concatenate(gangs, warps, live, slots)
    return _overlay(gangs, unique, inverse, live, slots)


def _concatenate(gangs: list[Gang], warps: Any, live: list[int], slots: int) -> Gang:
    """Gangs of different warps, in the order of the warps."""
    order: Any = np.argsort(warps, kind="stable")
    if (order[1:] > order[:-1]).all():
        order = slice(None)
    frame: Frame = [None] * slots
    for slot in live:
        values = [g.frame[slot] for g in gangs]
        first = values[0]
        if first.shape[0] == 1 and all(v is first for v in values):
            frame[slot] = first  # a launch parameter, say
            continue
        width = max(v.shape[1] for v in values)
        frame[slot] = np.concatenate([np.broadcast_to(v, (len(g), width)) for v, g in zip(values, gangs, strict=True)])[
            order
        ]
    mask = None
    if any(g.mask is not None for g in gangs):
        mask = np.concatenate([g.lanes() for g in gangs])[order]
    cta = np.concatenate([g.cta for g in gangs])[order]
    return Gang(gangs[0].segment, warps[order], cta, mask, frame)


def _overlay(gangs: list[Gang], unique: Any, inverse: Any, live: list[int], slots: int) -> Gang:
    """Gangs that hold different lanes of the same warps."""
    count = len(unique)
    lanes = [g.lanes() for g in gangs]
    frame: Frame = [None] * slots
    if all(len(g) == count for g in gangs):  # every warp in every gang: their rows match, as warps ascend
        for slot in live:
            merged = gangs[0].frame[slot]
            for g, own in zip(gangs[1:], lanes[1:], strict=True):
                value = g.frame[slot]
                if value is not merged:
                    merged = np.where(own, value, merged)
            frame[slot] = merged
        mask = lanes[0]
        for own in lanes[1:]:
            mask = mask | own
        return Gang(gangs[0].segment, unique, gangs[0].cta, packed(mask), frame)
    places, at = [], 0
    for g in gangs:
        places.append(inverse[at : at + len(g)])
        at += len(g)
    for slot in live:
        values = [g.frame[slot] for g in gangs]
        first = values[0]
        if first.shape == (1, 1) and all(v is first for v in values):
            frame[slot] = first
            continue
        merged = np.zeros((count, LANES), first.dtype)
        for rows, own, value in zip(places, lanes, values, strict=True):
            merged[rows] = np.where(own, value, merged[rows])
        frame[slot] = merged
    mask = np.zeros((count, LANES), bool)
    cta = np.zeros((count, 1), np.int64)
    for g, rows, own in zip(gangs, places, lanes, strict=True):
        mask[rows] |= own
        cta[rows] = g.cta
    return Gang(gangs[0].segment, unique, cta, packed(mask), frame)
