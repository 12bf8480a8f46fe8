"""When a cluster of CTAs for each sequence and KV head is the fastest, and how large it is. Imports no numpy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cubinery.runtime.errors import ConfigError

CLUSTER_SIZES = (2, 4, 8, 16)
"""CTAs that a cluster may have: a kernel of clusters serves them all."""


@dataclass(frozen=True, slots=True)
class ClusterRule:
    """Grids of clusters that are faster than anything else: measured on an H200 (docs/notes/paged_decode_mma.md)."""

    size: int
    """CTAs of a cluster."""
    fewest: int
    most: int
    """Clusters of the grid: one for each sequence, KV head and row tile."""
    max_tiles: int
    """Tiles of the longest sequence, at most, where all are about as long (EVEN)."""
    max_row_tile: int = 32
    """At most."""
    max_row_bytes: int = 512
    """Bytes of a key's K, at most."""


ANY_LENGTH = 1 << 30

CLUSTER_RULES = (
    ClusterRule(16, 1, 2, 64),  # alone, long sequences lack SMs
    ClusterRule(16, 1, 2, 128, max_row_bytes=128),
    ClusterRule(16, 3, 7, 128),  # seven find a GPC each; from eight on, some SMs would have two CTAs and others one
    ClusterRule(16, 3, 7, 256, max_row_bytes=128),
    ClusterRule(8, 8, 16, 128),
    ClusterRule(8, 14, 16, 256, max_row_tile=8, max_row_bytes=128),
    ClusterRule(4, 13, 32, 16, max_row_tile=8),
    ClusterRule(4, 13, 32, 32, max_row_tile=8, max_row_bytes=256),
    ClusterRule(4, 13, 24, 32, max_row_bytes=128),
    ClusterRule(4, 13, 24, 64, max_row_tile=16, max_row_bytes=128),
    # The fewer sequences are halved, the more SMs have nothing to do, which long ones make up for by splits.
    ClusterRule(2, 33, 40, 16),
    ClusterRule(2, 33, 40, 32, max_row_tile=16, max_row_bytes=128),
    ClusterRule(2, 41, 47, 16, max_row_bytes=256),
    ClusterRule(2, 36, 40, 32, max_row_tile=16),
    ClusterRule(2, 40, 47, 64, max_row_tile=16, max_row_bytes=256),
    ClusterRule(2, 48, 60, 64, max_row_bytes=256),
    ClusterRule(2, 48, 51, ANY_LENGTH, max_row_tile=16, max_row_bytes=256),
    ClusterRule(2, 61, 63, 32, max_row_bytes=256),
    ClusterRule(2, 64, 66, ANY_LENGTH),
)

MOST_CLUSTERS = max(rule.most for rule in CLUSTER_RULES)
"""Clusters of a grid beyond which none is formed."""

EVEN = 1.25
"""Sequences are about as long if the longest has at most this times their mean."""

UNEVEN_TILES = 8
"""Tiles that a CTA may have of the longest sequence where they are not: all wait for it."""


def cluster_rules(clusters: int, *, row_tile: int, row_bytes: int, longest: int, mean: float) -> Iterator[ClusterRule]:
    """The rules whose clusters suit a grid of so many, best first: take the first that fits the device.

    `longest`, `mean`: tiles of a sequence; `row_bytes`: of a key's K.
    """
    for rule in CLUSTER_RULES:
        most = rule.max_tiles if longest <= EVEN * mean else min(rule.max_tiles, UNEVEN_TILES * rule.size)
        if (
            rule.fewest <= clusters <= rule.most and longest <= most
            and row_tile <= rule.max_row_tile and row_bytes <= rule.max_row_bytes
        ):  # fmt: skip
            yield rule


def cluster_axis(size: int) -> int:
    """The axis `cluster` of kernels that can be launched in clusters of `size` CTAs. Raises ConfigError."""
    if type(size) is not int or size not in (1, *CLUSTER_SIZES):
        raise ConfigError(f"paged_decode: cluster = {size!r}: expected 1, 2, 4, 8 or 16")
    return 1 if size == 1 else CLUSTER_SIZES[-1]
