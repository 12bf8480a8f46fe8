"""Split-KV planning on the host: which CTA reads which tiles of which sequence.

A tile is 128 keys. A work item is a run of tiles of one sequence; `num_kv_heads * q_tiles` CTAs serve it. Sequences
cut into several items leave partial results, which the CTA that finishes the last of them merges.

Two policies. `thor` is the planner that the family's specification defines: one chunk length for the whole batch,
chosen so that all items run in one wave. `balanced` splits by work whatever the batch size: it minimises an estimate
of the grid's makespan and evens out the chunks of each sequence.

Needs numpy; imports no torch. No Python loop runs over sequences or work items. `balanced` computes with integers, or
with floats where these are exact, so that a planner on the device can give the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.config import LARGEST_COST, MAX_SPLITS, TILE_KEYS

Ints = NDArray[np.int64]
Int32s = NDArray[np.int32]
Floats = NDArray[np.float64]
Policy = Literal["thor", "balanced"]

POLICIES: tuple[Policy, ...] = ("thor", "balanced")
DEFAULT_MAX_SPLITS: dict[str, int] = {"thor": 16, "balanced": MAX_SPLITS}

MAX_LENGTH = 2**31 - TILE_KEYS
"""Longest sequence: the end of its last tile must still be an int32."""

MAX_WORK = 65535
"""Most work items of a plan, and most sequences: each is an axis of a grid."""

# The estimate of `balanced`, in sixteenths of the time that an SM of a full machine takes for one tile. By plans of
# many cuts, measured on an H200 (`make bench-splits`).
CHUNK_FACTORS = (4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 28, 32, 40, 48, 64)
"""Chunk lengths that are tried, in sixteenths of an SM's fair share of all tiles; unsplit comes last."""
LEAST_SHARE = 16
"""A share of less than a tile counts as one, in sixteenths: its multiples would all be the same chunk, of one tile."""
START_COST = 8
"""Start, first loads in flight and end of a CTA, where all run at once."""
LONE_TILE_COST = 13
"""What a tile costs a CTA that has an SM to itself: it can get more than its share of the bandwidth while others have
ended. Configurations whose arithmetic takes longer have a cost of their own. Two CTAs beside each other take 3/2 of it
for a tile each."""
ITEM_COST = 80
"""End of a CTA and start of the next one in its place, between which it loads nothing: configurations have their own.
The machine loses half of that, since others go on."""
SPLIT_COST = 2
"""Merging one more chunk of the most finely cut sequence."""
NEVER = 1 << 50
"""The estimate of what does not fit the work list."""

_TILE_SHIFT = TILE_KEYS.bit_length() - 1
_TO_KEYS = np.array([1, TILE_KEYS, TILE_KEYS], np.int32)
"""What sequence, first tile and end tile are multiplied by."""


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What the kernels read, and the numbers that size a launch."""

    work: Int32s
    """(num_work, 4): sequence, first tile, end tile, partial slot; entries without work are all zero."""
    splits: Int32s
    """(num_seqs, 2): items of the sequence, its first partial slot (0 where it is not split)."""
    num_items: int
    """Entries with work."""
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
        """The plan as the decode kernel reads it, without a look at anything else, (num_work, 8):

        sequence (-1 in an entry without work), first key, end key (never past the sequence's end), keys of the
        sequence; partial slot, items of the sequence (the result of a single one goes straight to O), its first
        partial slot, and 0.
        """
        entries = np.zeros((self.num_work, 8), np.int32)
        seq = self.work[:, 0]
        keys = lengths.take(seq)
        np.multiply(self.work[:, :3], _TO_KEYS, out=entries[:, :3])
        np.minimum(entries[:, 2], keys, out=entries[:, 2])
        entries[:, 3] = keys
        if self.num_partials:
            entries[:, 4] = self.work[:, 3]
            entries[:, 5:7] = self.splits.take(seq, axis=0)
        else:
            entries[:, 5] = 1
        if self.num_items < self.num_work:
            entries[self.num_items :] = -1
        return entries


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
    exact: Ints = lengths.astype(np.int64, copy=False)
    # Read as unsigned, negative ones are the largest, so that one pass sees both bounds.
    if np.maximum.reduce(exact.view(np.uint64)) > MAX_LENGTH:
        low, high = int(lengths.min()), int(lengths.max())
        index = int(lengths.argmin() if low < 0 else lengths.argmax())
        raise PlanError(f"seq_lens[{index}] = {low if low < 0 else high}: expected 0 to {MAX_LENGTH}")
    return exact


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
    lone_tile_cost: int = LONE_TILE_COST,
    item_cost: int = ITEM_COST,
    checked: bool = False,
) -> SplitPlan:
    """Plan one decode step.

    `seq_lens` are keys per sequence, new tokens included. `q_tiles` is how many CTAs share the packed query rows of a
    KV head. `max_splits` defaults to 16 (`thor`) or MAX_SPLITS (`balanced`). `force_splits` (0 is off) cuts the longest
    sequence into at most that many chunks, and others into chunks as long. `pad_to` (0 is off) is the exact length of
    the work list; `balanced` splits less to stay within it. `lone_tile_cost` and `item_cost` are the
    configuration's (see LONE_TILE_COST, ITEM_COST). `checked` says that `seq_lens` comes from `host_lengths`.

    Raises PlanError for lengths or options that no plan can serve.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy = {policy!r}: expected one of {', '.join(POLICIES)}")
    if max_splits is None:
        max_splits = DEFAULT_MAX_SPLITS[policy]
    check_options(
        num_kv_heads, q_tiles, sm_count, ctas_per_sm, max_splits, force_splits, min_chunk_tiles, pad_to, lone_tile_cost,
        item_cost,
    )  # fmt: skip
    lengths = seq_lens if checked else host_lengths(seq_lens)
    tiles = np.maximum((lengths + (TILE_KEYS - 1)) >> _TILE_SHIFT, 1)
    if max(pad_to, len(tiles)) > MAX_WORK:
        raise PlanError(f"{len(tiles)} sequences, pad_to = {pad_to}: expected at most {MAX_WORK} work items")
    if 0 < pad_to < len(tiles):
        raise PlanError(f"pad_to = {pad_to}: {len(tiles)} sequences need at least as many work items")
    ctas = num_kv_heads * q_tiles
    slots = max(1, sm_count * ctas_per_sm // ctas)
    longest = int(np.maximum.reduce(tiles))
    if policy == "thor":
        chunk = _thor_chunk(tiles, longest, slots, max_splits, force_splits, min_chunk_tiles)
        counts = -(-tiles // chunk) if chunk < longest else None
        work, splits, partials, _ = _whole(tiles, longest) if counts is None else _items(tiles, counts, chunk)
    else:
        machine = (ctas, sm_count, ctas_per_sm, lone_tile_cost, item_cost)
        counts = _balanced_counts(tiles, longest, *machine, max_splits, force_splits, min_chunk_tiles, pad_to)
        work, splits, partials, chunk = _whole(tiles, longest) if counts is None else _items(tiles, counts, None)
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


PLAN_OPTIONS = (
    "num_kv_heads", "q_tiles", "sm_count", "ctas_per_sm", "max_splits", "force_splits", "min_chunk_tiles", "pad_to",
    "lone_tile_cost", "item_cost",
)  # fmt: skip
"""Options of `plan_splits` that are numbers, in the order of `check_options`."""


def check_options(*options: Any) -> None:
    """Raise PlanError for PLAN_OPTIONS that are no integers, or too small, or too large."""
    try:
        _check_options(*options)
    except TypeError:  # something without a hash, which is no integer either
        _check_options.__wrapped__(*options)


@lru_cache(maxsize=256, typed=True)  # steps of one model differ in their lengths alone; typed, as True equals 1
def _check_options(
    num_kv_heads: int, q_tiles: int, sm_count: int, ctas_per_sm: int, max_splits: int, force_splits: int,
    min_chunk_tiles: int, pad_to: int, lone_tile_cost: int, item_cost: int,
) -> None:  # fmt: skip
    """Raise PlanError for options of `plan_splits` that are no integers, or too small, or too large."""
    for name, value, least, most in (
        ("num_kv_heads", num_kv_heads, 1, None), ("q_tiles", q_tiles, 1, None), ("sm_count", sm_count, 1, None),
        ("ctas_per_sm", ctas_per_sm, 1, None), ("max_splits", max_splits, 1, MAX_SPLITS),
        ("force_splits", force_splits, 0, None), ("min_chunk_tiles", min_chunk_tiles, 1, None),
        ("pad_to", pad_to, 0, None), ("lone_tile_cost", lone_tile_cost, 1, LARGEST_COST),
        ("item_cost", item_cost, 1, LARGEST_COST),
    ):  # fmt: skip
        if not _is_integer(value) or value < least:
            raise PlanError(f"{name} = {value!r}: expected an integer of at least {least}")
        if most is not None and value > most:
            raise PlanError(f"{name} = {value}: expected at most {most}")


def _whole(tiles: Ints, longest: int) -> tuple[Int32s, Int32s, int, int]:
    """(work, splits, partial slots, tiles of the longest item), longest items first, ties in sequence order.

    One item for each sequence. Its slot is 0, which nobody reads.
    """
    num_seqs = len(tiles)
    order = _longest_first(tiles, longest)
    work = np.zeros((num_seqs, 4), np.int32)
    work[:, 0] = order
    work[:, 2] = tiles.take(order)
    splits = np.zeros((num_seqs, 2), np.int32)
    splits[:, 0] = 1
    return work, splits, 0, longest


def _items(tiles: Ints, counts: Ints, chunk: int | None) -> tuple[Int32s, Int32s, int, int]:
    """As `_whole`, where sequences are cut into `counts` items.

    With `chunk`, chunks have that many tiles and the last what is left; without, the chunks of a
    sequence differ by at most one tile, longer ones first.
    """
    num_seqs = len(tiles)
    splits = np.zeros((num_seqs, 2), np.int32)
    splits[:, 0] = counts
    ends = counts.cumsum()
    total = int(ends[-1])
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
    longest = int(np.maximum.reduce(size))
    order = _longest_first(size, longest)
    work = np.empty((total, 4), np.int32)
    work[:, 0] = seq
    work[:, 1] = begin
    work[:, 2] = begin + size
    work[:, 3] = slot
    return work.take(order, axis=0), splits, partials, longest


def _longest_first(size: Ints, longest: int) -> Ints:
    """Stable order of falling sizes, of which `longest` is the greatest."""
    # numpy sorts 16-bit keys by radix, several times faster than 64-bit ones.
    kind = np.uint16 if longest < 65536 else np.int64
    return np.subtract(longest, size, dtype=kind, casting="unsafe").argsort(kind="stable")


def _thor_chunk(tiles: Ints, longest: int, slots: int, max_splits: int, force_splits: int, min_chunk_tiles: int) -> int:
    """Steps 3 and 4 of the specification: the one chunk length of the batch, in tiles."""
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


def _balanced_counts(
    tiles: Ints, longest: int, ctas: int, sm_count: int, ctas_per_sm: int, lone_tile_cost: int, item_cost: int,
    max_splits: int, force_splits: int, min_chunk_tiles: int, pad_to: int,
) -> Ints | None:  # fmt: skip
    """Items of each sequence under the policy `balanced`; None where none is cut."""
    if force_splits:
        chunk = -(-longest // force_splits)
        return np.minimum((tiles + (chunk - 1)) // chunk, _most_items(tiles, min_chunk_tiles, max_splits))
    total = int(np.add.reduce(tiles))
    share = max(-(-16 * total * ctas // sm_count), LEAST_SHARE)
    if (CHUNK_FACTORS[0] * share + 255) >> 8 >= longest:  # no sequence is longer than the shortest chunk
        return None
    tried = [chunk for chunk in ((f * share + 255) >> 8 for f in CHUNK_FACTORS) if chunk < longest]
    # Only sequences longer than the shortest chunk are ever cut.
    cut = tiles > tried[0]
    chunks = np.array([*tried, longest], np.float64)[:, None]
    # Quotients of integers below 2^31 round to the right ones in float64, and numpy divides those several times faster.
    lengths = tiles[cut].astype(np.float64)
    quotients = np.minimum(np.ceil(lengths / chunks), _most_items(tiles[cut], min_chunk_tiles, max_splits))
    sizes, whole = lengths / quotients, tiles[~cut]
    peak = np.ceil(sizes.max(axis=1)).astype(np.int64)
    np.maximum(peak, int(whole.max(initial=1)), out=peak)
    counts = quotients.astype(np.int64)
    items = counts.sum(axis=1) + (len(tiles) - len(lengths))
    # A grid of one wave ends when all SMs, busy until then, have read their share, or with the longest item.
    grid, resident = items * ctas, sm_count * ctas_per_sm
    shared = (16 * total + START_COST * items) * ctas // sm_count
    twice = lone_tile_cost * (np.minimum(-(-grid // sm_count), ctas_per_sm) + 1)  # what two tiles cost a CTA
    estimate = np.maximum(shared, twice * peak >> 1)
    # One of several waves also ends no sooner than all SMs have read their share with half of the gaps beside it, than
    # their CTAs have computed theirs with all of the gaps, or than one has that had an item in every wave: none of its
    # items is shorter than the longest of the last wave.
    several = int(np.count_nonzero(grid > resident))  # the first rows: chunks ascend, so that items only get fewer
    if several:
        gaps = item_cost * items[:several]
        waves = (16 * total + (gaps >> 1)) * ctas // sm_count
        np.maximum(waves, ((twice[:several] * total >> 1) + gaps) * ctas // resident - item_cost, out=waves)
        np.maximum(estimate[:several], waves, out=estimate[:several])
    merging = SPLIT_COST * counts.max(axis=1)
    estimate += merging
    estimate[items > (pad_to or MAX_WORK)] = NEVER
    # The last of these takes longer to find out, and only raises an estimate: rows that are too slow already may do
    # without.
    rows = np.flatnonzero(25 * estimate[:several] <= 26 * estimate[several:].min(initial=NEVER))
    if len(rows):
        ahead = (grid[rows] - 1) // resident
        place = ahead * resident // ctas
        last = _falling(items[rows], peak[rows], total, place, quotients[rows], sizes[rows], whole)
        waves = (twice[rows] * last * (ahead + 1) >> 5) + item_cost * ahead + merging[rows]
        estimate[rows] = np.maximum(estimate[rows], waves)
    # Of estimates within 4 % of the least, the longest chunks: fewer items cost less traffic and planning.
    good = 25 * estimate <= 26 * estimate.min()
    row = len(chunks) - 1 - int(good[::-1].argmax())
    if row == len(tried):  # the longest sequence is one chunk, and so are the others
        return None
    chosen = np.ones_like(tiles)
    chosen[cut] = counts[row]
    return chosen


_FIVES = 5.0 * np.arange(len(CHUNK_FACTORS) + 1)[:, None]
_QUARTERS = np.array([3, 2, 1])


def _falling(items: Ints, peak: Ints, total: int, place: Ints, counts: Floats, sizes: Floats, whole: Ints) -> Ints:
    """Sixteenths of a tile that the item at `place` has, of all in falling order; a number for each row.

    Lengths are taken to fall evenly from the peak, so that their mean is what it is, but for what the number of items
    of a quarter, a half and three quarters of the peak says. `counts` (rows, sequences) items have `sizes`, but for
    rounding up; `whole` sequences are an item each.
    """
    full = 16 * peak
    straight = full - ((full - 16 * total // items) * (256 * place // items) >> 7)
    # Five bins a row: how many full quarters of the peak an item has. Quotients of numbers below 2^25 are too far from
    # an integer, if they are none, to round to it.
    quarters = np.ceil(sizes) / (peak / 4)[:, None] + _FIVES[: len(peak)]
    held = np.bincount(quarters.ravel().astype(np.intp), counts.ravel(), 5 * len(peak)).reshape(-1, 5)
    larger = held[:, :0:-1].cumsum(axis=1)[:, 1:]  # items of three quarters at least, of a half, of one
    if len(whole):
        larger += len(whole) - np.sort(whole).searchsorted((peak[:, None] * _QUARTERS + 3) >> 2)
    least = (full >> 2) * np.count_nonzero(larger > place[:, None], axis=1)
    found: Ints = np.minimum(np.maximum(straight, least), least + (full >> 2))
    return found


def _most_items(tiles: Ints, min_chunk_tiles: int, max_splits: int) -> Ints:
    """Items that sequences may have at most, as a chunk has `min_chunk_tiles` at least."""
    return np.minimum(np.maximum(tiles // min_chunk_tiles, 1), max_splits)
