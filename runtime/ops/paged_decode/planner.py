"""Split-KV planning on the host: which CTA reads which tiles of which sequence.

A tile is 128 keys. A work item is a run of tiles of one sequence; `num_kv_heads * q_tiles` CTAs serve
it. Sequences cut into several items leave partial results that the reduction merges.

Two policies. `thor` is the planner that the family's specification defines: one chunk length for the
whole batch, chosen so that all items run in one wave. `balanced` splits by work whatever the batch
size: it minimises an estimate of the grid's makespan and evens out the chunks of each sequence.

Needs numpy; imports no torch. No Python loop runs over sequences or work items.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.config import MAX_SPLITS, TILE_KEYS

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Policy = Literal["thor", "balanced"]

POLICIES: tuple[Policy, ...] = ("thor", "balanced")
DEFAULT_MAX_SPLITS: dict[str, int] = {"thor": 16, "balanced": MAX_SPLITS}

MAX_LENGTH = 2**31 - TILE_KEYS
"""Longest sequence: the end of its last tile must still be an int32."""

MAX_WORK = 65535
"""Most work items of a plan, and most sequences: each is an axis of a grid."""

# Costs of the `balanced` estimate, in the time one CTA takes for one tile.
CTA_TILES = 2.0
"""Start, first loads in flight and epilogue of a CTA."""
PARTIAL_TILES = 1.0
"""Writing a partial result and reading it back."""
REDUCE_TILES = 1.5
"""The reduction's launch, paid once if anything is split."""
FINEST = 3
"""Chunks are not cut below this fraction of the tiles that a resident CTA gets if all work is even."""
NEARLY_LEAST = 1.02
"""An estimate this close to the least is as good, and fewer items cost less traffic and planning."""

_TILE_SHIFT = TILE_KEYS.bit_length() - 1
_DEVICE_UNITS = np.array([1, TILE_KEYS, TILE_KEYS, 1], np.int32)

_ESTIMATE_ELEMENTS = 2048
"""Candidates times groups of sequences that the search evaluates, about."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What the kernels read, and the numbers that size a launch."""

    work: Int32s
    """(num_work, 4): sequence, first tile, end tile, partial slot; padding items are all zero."""
    splits: Int32s
    """(num_seqs, 2): items of the sequence, its first partial slot (0 where it is not split)."""
    num_items: int
    """Work items before padding."""
    num_partials: int
    """Partial slots in use: the items of all sequences with more than one."""
    chunk_tiles: int
    """`thor`: the chunk length. `balanced`: tiles of the longest item."""
    slots: int
    """Work items that are resident at once."""

    @property
    def num_work(self) -> int:
        """Work items, padding included."""
        return len(self.work)

    @property
    def max_splits(self) -> int:
        """Items of the most finely cut sequence."""
        return int(self.splits[:, 0].max())

    def device_work(self, lengths: Int32s) -> Int32s:
        """`work` as the decode kernel reads it, in one load and without a look at `seq_lens`, (num_work, 4):

        sequence (-1 for a padding item), first key, end key (never past the sequence's end), and the partial
        slot, or -1 where the sequence is not split and the result goes straight to O.
        """
        seq = self.work[:, 0]
        device: Int32s = self.work * _DEVICE_UNITS
        ends = device[:, 2]
        np.minimum(ends, lengths.take(seq), out=ends)
        if not self.num_partials:
            device[:, 3] = -1
        elif self.num_partials < self.num_items:
            device[self.splits[:, 0].take(seq) < 2, 3] = -1
        if self.num_items < self.num_work:
            device[self.num_items :] = -1
        return device


def host_lengths(seq_lens: Any) -> Ints:
    """Validate sequence lengths (a list, numpy array or CPU tensor of integers) as a 1-D int64 array.

    Raises PlanError for device tensors, wrong dtypes or ranks, an empty batch, and lengths outside
    [0, MAX_LENGTH].
    """
    device = getattr(seq_lens, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise PlanError(f"seq_lens is on {device}: expected lengths on the host (a list, numpy array or CPU tensor)")
    try:
        lengths = np.asarray(seq_lens)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"seq_lens is not an array of integers: {error}") from error
    if lengths.ndim != 1 or lengths.size == 0:
        raise PlanError(f"seq_lens has shape {lengths.shape}: expected (num_seqs,) with at least one sequence")
    if lengths.dtype.kind not in "iu":
        raise PlanError(f"seq_lens has dtype {lengths.dtype}: expected integers")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > MAX_LENGTH:
        index = int(lengths.argmin() if low < 0 else lengths.argmax())
        raise PlanError(f"seq_lens[{index}] = {low if low < 0 else high}: expected 0 to {MAX_LENGTH}")
    return lengths.astype(np.int64, copy=False)


def plan_splits(
    seq_lens: Any,
    *,
    num_kv_heads: int,
    q_tiles: int,
    sm_count: int,
    ctas_per_sm: int = 1,
    policy: Policy = "balanced",
    max_splits: int | None = None,
    force_splits: int = 0,
    min_chunk_tiles: int = 1,
    pad_to: int = 0,
    checked: bool = False,
) -> SplitPlan:
    """Plan one decode step.

    `seq_lens` are keys per sequence, new tokens included. `q_tiles` is how many CTAs share the
    packed query rows of a KV head. `max_splits` defaults to 16 (`thor`) or 256 (`balanced`).
    `force_splits` (0 is off) cuts the longest sequence into that many chunks. `pad_to` (0 is off) is
    the exact length of the work list; `balanced` splits less to stay within it. `checked` says that
    `seq_lens` comes from `host_lengths`.

    Raises PlanError for lengths or options that no plan can serve.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy = {policy!r}: expected one of {', '.join(POLICIES)}")
    if max_splits is None:
        max_splits = DEFAULT_MAX_SPLITS[policy]
    for name, value, least in (
        ("num_kv_heads", num_kv_heads, 1), ("q_tiles", q_tiles, 1), ("sm_count", sm_count, 1),
        ("ctas_per_sm", ctas_per_sm, 1), ("max_splits", max_splits, 1), ("force_splits", force_splits, 0),
        ("min_chunk_tiles", min_chunk_tiles, 1), ("pad_to", pad_to, 0),
    ):  # fmt: skip
        if (type(value) is not int and not _is_integer(value)) or value < least:
            raise PlanError(f"{name} = {value!r}: expected an integer of at least {least}")
    if max_splits > MAX_SPLITS:
        raise PlanError(f"max_splits = {max_splits}: expected at most {MAX_SPLITS}")
    lengths = seq_lens if checked else host_lengths(seq_lens)
    tiles = np.maximum((lengths + (TILE_KEYS - 1)) >> _TILE_SHIFT, 1)
    if max(pad_to, len(tiles)) > MAX_WORK:
        raise PlanError(f"{len(tiles)} sequences, pad_to = {pad_to}: expected at most {MAX_WORK} work items")
    if 0 < pad_to < len(tiles):
        raise PlanError(f"pad_to = {pad_to}: {len(tiles)} sequences need at least as many work items")
    ctas = num_kv_heads * q_tiles
    resident = sm_count * ctas_per_sm
    slots = max(1, resident // ctas)
    if policy == "thor":
        chunk = _thor_chunk(tiles, slots, max_splits, force_splits, min_chunk_tiles)
        counts = -(-tiles // chunk)
        work, splits, partials, _ = _items(tiles, counts, chunk)
    else:
        counts = _balanced_counts(tiles, ctas, resident, max_splits, force_splits, min_chunk_tiles, pad_to)
        work, splits, partials, chunk = _items(tiles, counts, None)
    items = len(work)
    if items > MAX_WORK:
        raise PlanError(f"the plan has {items} work items: expected at most {MAX_WORK}; split less")
    if pad_to:
        if items > pad_to:
            raise PlanError(f"pad_to = {pad_to}: the plan has {items} work items; pad further or split less")
        padded = np.zeros((pad_to, 4), np.int32)
        padded[:items] = work
        work = padded
    return SplitPlan(work, splits, items, partials, chunk, slots)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _items(tiles: Ints, counts: Ints, chunk: int | None) -> tuple[Int32s, Int32s, int, int]:
    """(work, splits, partial slots, tiles of the longest item), longest items first, ties in sequence order.

    With `chunk`, chunks have that many tiles and the last what is left; without, the chunks of a
    sequence differ by at most one tile, longer ones first.
    """
    num_seqs = len(tiles)
    splits = np.zeros((num_seqs, 2), np.int32)
    splits[:, 0] = counts
    ends = counts.cumsum()
    total = int(ends[-1])
    if total == num_seqs:
        order, longest = _longest_first(tiles)
        # An item of an unsplit sequence has slot 0, which nobody reads.
        whole = np.zeros((total, 4), np.int32)
        whole[:, 0] = order
        whole[:, 2] = tiles.take(order)
        return whole, splits, 0, longest
    seq = np.arange(num_seqs).repeat(counts)
    first = ends - counts
    index = np.arange(total) - first[seq]
    split = counts > 1
    owned = counts * split
    slot_ends = owned.cumsum()
    partials = int(slot_ends[-1])
    first_slot = (slot_ends - owned) * split
    splits[:, 1] = first_slot
    slot = first_slot[seq] + index
    if chunk is None:
        base = tiles // counts
        extra = (tiles - base * counts)[seq]
        base = base[seq]
        begin = index * base + np.minimum(index, extra)
        size = base + (index < extra)
    else:
        begin = index * chunk
        size = np.minimum(tiles[seq] - begin, chunk)
    order, longest = _longest_first(size)
    work = np.empty((total, 4), np.int32)
    work[:, 0] = seq
    work[:, 1] = begin
    work[:, 2] = begin + size
    work[:, 3] = slot
    return work.take(order, axis=0), splits, partials, longest


def _longest_first(size: Ints) -> tuple[Ints, int]:
    """(stable order of falling sizes, the greatest)."""
    longest = int(size.max())
    # numpy sorts 16-bit keys by radix, several times faster than 64-bit ones.
    falling = longest - size
    return (falling.astype(np.uint16) if longest < 65536 else falling).argsort(kind="stable"), longest


def _thor_chunk(tiles: Ints, slots: int, max_splits: int, force_splits: int, min_chunk_tiles: int) -> int:
    """Steps 3 and 4 of the specification: the one chunk length of the batch, in tiles."""
    longest = int(tiles.max())
    low = max(min_chunk_tiles, -(-longest // max_splits))
    if force_splits:
        return max(low, -(-longest // force_splits))
    if len(tiles) >= slots or max_splits == 1:
        return longest
    if low >= longest:
        return low
    high = longest  # unsplit: one item a sequence, fewer than the slots
    while low < high:
        middle = (low + high) // 2
        if int((-(-tiles // middle)).sum()) <= slots:
            high = middle
        else:
            low = middle + 1
    return low


def _counts(tiles: Ints, longest: int, pieces: Any, min_chunk_tiles: int) -> Ints:
    """Items of each sequence when the longest is cut into `pieces` (a number, or a column of them)."""
    counts = (tiles * pieces + (longest - 1)) // longest
    if min_chunk_tiles > 1:
        counts = np.minimum(counts, np.maximum(tiles // min_chunk_tiles, 1))
    result: Ints = counts
    return result


def _balanced_counts(
    tiles: Ints, ctas: int, resident: int, max_splits: int, force_splits: int, min_chunk_tiles: int, pad_to: int
) -> Ints:
    """Items of each sequence under the policy `balanced`."""
    longest = int(tiles.max())
    pieces = min(max_splits, max(1, longest // min_chunk_tiles))
    if force_splits:
        pieces = min(force_splits, pieces)
    else:
        # Chunks far shorter than a resident CTA's fair share of all tiles even out nothing more.
        pieces = min(pieces, -(-longest * FINEST * resident // (int(tiles.sum()) * ctas)))
        if pieces > 1:
            pieces = _search_pieces(tiles, longest, pieces, ctas, resident, min_chunk_tiles, pad_to)
    counts = _counts(tiles, longest, pieces, min_chunk_tiles)
    if pad_to and not force_splits:
        # The search saw long tails of the batch as groups, so its count of items is not exact.
        while int(counts.sum()) > pad_to:
            pieces = max(1, min(pieces - 1, pieces * 7 // 8))
            counts = _counts(tiles, longest, pieces, min_chunk_tiles)
    return counts


@lru_cache(maxsize=1024)
def _ladder(low: int, high: int, steps: int) -> Ints:
    """At most `steps` ascending integers from `low` to `high`, in about equal ratios."""
    if high - low < steps:
        return np.arange(low, high + 1)
    return np.unique(np.rint(np.geomspace(low, high, steps)).astype(np.int64))


@lru_cache(maxsize=1024)
def _groups(num_seqs: int) -> tuple[Ints, Ints]:
    """(first ranks, sizes) of at most 64 groups of the sequences by falling length, the longest alone."""
    first = _ladder(1, num_seqs, 64) - 1
    return first, np.diff(first, append=num_seqs)


def _search_pieces(
    tiles: Ints, longest: int, most: int, ctas: int, resident: int, min_chunk_tiles: int, pad_to: int
) -> int:
    """Into how many pieces, of at most `most`, to cut the longest sequence so that the grid ends soonest.

    The estimate of the makespan, in tiles, is the greater of: all work spread evenly; and, for the C longest
    CTAs, ceil(C / resident) times the shortest of them (wave quantisation). The grid starts long items first,
    all heads of one together, so it comes close. Of candidates with nearly the least estimate, the fewest
    pieces win.
    """
    falling = np.sort(tiles)[::-1]
    first, sizes = _groups(len(tiles))
    if len(first) < len(tiles):
        falling = np.add.reduceat(falling, first) // sizes
    candidates = _ladder(1, most, max(32, _ESTIMATE_ELEMENTS // len(falling)))
    counts = _counts(falling, longest, candidates[:, None], min_chunk_tiles)
    cost = falling / counts
    # Half way to the whole tiles of the longest chunk: all CTAs share one memory, so the mean counts too.
    cost = 0.5 * (cost + np.ceil(cost))
    cost += CTA_TILES
    split = counts > 1
    cost += PARTIAL_TILES * split
    counts *= sizes
    ranks = counts.cumsum(axis=1)
    items = ranks[:, -1]
    spread = np.einsum("ij,ij->i", cost, counts) * (ctas / resident)
    waves = (ranks * ctas + (resident - 1)) // resident
    estimate = np.maximum((waves * cost).max(axis=1), spread)
    estimate += REDUCE_TILES * split[:, 0]
    if pad_to:
        estimate[items > pad_to] = np.inf
    return int(candidates[(estimate <= NEARLY_LEAST * estimate.min()).argmax()])
