"""Split-KV planning on the device: the host planner's schedule, integer for integer, by one CTA.

Steps, each over the whole batch
    read     lengths, their tiles, the sum and the longest
    cut      one chunk length. `balanced`: a warp a candidate counts items; every warp then picks the same one.
             `thor`: 32 warps narrow the smallest chunk length that keeps to one wave, 32 candidates at a time
    place    partial slots, by a prefix sum over sequences
    order    the items of a sequence have two sizes at most, so two runs of equal items a sequence are sorted by
             falling size, in sequence order where equal; a prefix sum gives each run its place in the list
    write    a thread an entry finds its run by binary search, and its item by arithmetic

See planner.py for what the numbers mean.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Int32, Int64, Uint32, cute
from cutlass.cute.runtime import make_ptr

from cubinery.aot.kernels.common import collective, ptx
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.paged_decode.config import MAX_SPLITS, TILE_KEYS
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.planner import (
    CHUNK_FACTORS,
    LEAST_SHARE,
    MAX_LENGTH,
    NEVER,
    SPLIT_COST,
    START_COST,
)

TILE_SHIFT = TILE_KEYS.bit_length() - 1
WARPS = PlanConfig.THREADS // 32
CANDIDATES = len(CHUNK_FACTORS) + 1
COUNT_BITS = MAX_SPLITS.bit_length()
RUN_BITS = (2 * PlanConfig.MAX_SEQS - 1).bit_length()
MOST_TILES = MAX_LENGTH // TILE_KEYS + 1
"""A key is, from the top: how much shorter a run's items are than this, the run, how many items it has."""
NO_RUN = 1 << 62
assert CANDIDATES <= min(WARPS, 32), "a warp counts the items of each, and a lane estimates it"


class SplitPlanner:
    """Traces the planning kernel."""

    def __init__(self, config: PlanConfig) -> None:
        self.config = config
        self.threads = config.THREADS

    @cute.jit
    def __call__(
        self,
        seq_lens: cute.Pointer,
        work: cute.Pointer,
        lengths: cute.Pointer,
        seq_len_bytes: Int32,
        num_seqs: Int32,
        num_work: Int32,
        max_length: Int32,
        is_thor: Int32,
        ctas: Int32,
        sm_count: Int32,
        ctas_per_sm: Int32,
        lone_tile_cost: Int32,
        item_cost: Int32,
        max_splits: Int32,
        force_splits: Int32,
        min_chunk_tiles: Int32,
        window_span: Int32,
        stream: cuda.CUstream,
    ) -> None:
        """Fix the order and types of the kernel's parameters, and the attributes of its launch."""
        self.kernel.set_name_prefix("cubinery_paged_decode_plan", remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            seq_lens, work, lengths, seq_len_bytes, num_seqs, num_work, max_length, is_thor, ctas, sm_count,
            ctas_per_sm, lone_tile_cost, item_cost, max_splits, force_splits, min_chunk_tiles,
            window_span,
        ).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), smem=self.config.smem_bytes, stream=stream,
            preferred_smem_carveout=100,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        seq_lens: cute.Pointer,
        work: cute.Pointer,
        lengths: cute.Pointer,
        seq_len_bytes: Int32,
        num_seqs: Int32,
        num_work: Int32,
        max_length: Int32,
        is_thor: Int32,
        ctas: Int32,
        sm_count: Int32,
        ctas_per_sm: Int32,
        lone_tile_cost: Int32,
        item_cost: Int32,
        max_splits: Int32,
        force_splits: Int32,
        min_chunk_tiles: Int32,
        window_span: Int32,
    ) -> None:
        tidx, _, _ = cute.arch.thread_idx()
        s_keys, s_starts, s_lengths, s_tiles, s_counts, s_slots, scratch = self.shared()

        total, longest = self.read(
            seq_lens, lengths, s_lengths, s_tiles, scratch, tidx, seq_len_bytes, num_seqs, max_length, window_span
        )
        # `thor` bounds chunks from below, and so the pieces of a sequence, by what it chooses a chunk from.
        least = cutlass.select_(is_thor != 0, Int32(1), min_chunk_tiles)
        limits = (least, max_splits)
        chunk = longest
        if is_thor != 0:
            low = cutlass.max(min_chunk_tiles, self.ceil_div(longest, max_splits))
            slots = cutlass.max(sm_count * ctas_per_sm // ctas, Int32(1))
            if force_splits > 0:
                chunk = cutlass.max(low, self.ceil_div(longest, force_splits))
            elif (num_seqs < slots) & (max_splits > 1):
                chunk = self.thor_chunk(s_tiles, scratch, tidx, num_seqs, low, longest, slots)
        elif force_splits > 0:
            chunk = self.ceil_div(longest, force_splits)
        else:
            machine = (ctas, sm_count, ctas_per_sm, lone_tile_cost, item_cost)
            chunk = self.balanced_chunk(s_tiles, scratch, tidx, num_seqs, num_work, total, longest, machine, limits)
        if (is_thor != 0) | (force_splits > 0):
            # The host refuses a plan that is longer than the work list; here nothing is split then.
            mine = Int32(0)
            for seq in cutlass.range(tidx, num_seqs, self.threads, unroll=1):
                mine = mine + self.count(s_tiles[seq], chunk, limits)
            items, _ = collective.cta_sum_and_max(mine, Int32(0), scratch, tidx, WARPS)
            if items > num_work:
                chunk = longest

        partials = self.place_slots(s_tiles, s_counts, s_slots, scratch, tidx, num_seqs, chunk, limits)
        runs = num_seqs
        if partials > 0:
            runs = 2 * num_seqs
        size = self.sort_runs(s_tiles, s_counts, s_keys, tidx, num_seqs, runs, is_thor, chunk)
        items = self.place_runs(s_keys, s_starts, scratch, tidx, runs)
        for entry in cutlass.range(tidx, num_work, self.threads, unroll=1):
            head, tail = self.nothing(), self.nothing()
            if entry < items:
                place = self.find_run(s_starts, entry, runs, size)
                run = (Int32(s_keys[place]) >> COUNT_BITS) & ((1 << RUN_BITS) - 1)
                within = entry - s_starts[place]
                seq = run // 2
                length, tiles, count = s_lengths[seq], s_tiles[seq], s_counts[seq]
                (ahead, first), (_, second) = self.runs_of(tiles, count, is_thor, chunk)
                index = within + cutlass.select_(run % 2 == 0, Int32(0), ahead)
                begin = index * second + cutlass.min(index, ahead) * (first - second)
                end = begin + cutlass.select_(index < ahead, first, second)
                start = self.first_tile(length, window_span)
                # The end of the last tile may exceed an int32.
                end_key = cutlass.select_(end == tiles, length, (start + end) * TILE_KEYS)
                slot = cutlass.select_(count > 1, s_slots[seq] + index, Int32(0))
                head = (seq, (start + begin) * TILE_KEYS, end_key, length)
                tail = (slot, count, s_slots[seq], Int32(0))
            address = work.toint() + Int64(entry) * 32  # SplitPlan.device_work
            ptx.store_global_v4(address, head)
            ptx.store_global_v4(address + 16, tail)

    def shared(self):
        """Tensors in shared memory: keys and first entries of runs; length, tiles, items and slot of sequences."""
        most = self.config.MAX_SEQS
        words = cute.arch.get_dyn_smem(Int32, 16)
        found = [cute.make_tensor(cute.arch.get_dyn_smem(Int64, 16), cute.make_layout(2 * most))]
        offset = 4 * most
        for size in (2 * most, most, most, most, most, self.config.SCRATCH):
            found.append(cute.make_tensor(words + offset, cute.make_layout(size)))
            offset += size
        return found

    def nothing(self):
        """Half of an entry without work."""
        return (Int32(-1),) * 4

    # -- arithmetic ----------------------------------------------------------------------------

    def ceil_div(self, a, b):
        """ceil(a / b) of numbers from 0 and 1 to 2^24."""
        return Int32(Uint32(a + b - 1) // Uint32(b))

    def first_tile(self, length, span):
        """The first tile of a sequence that any token sees."""
        return cutlass.max(length - span, Int32(0)) >> TILE_SHIFT

    def tiles(self, length, span):
        """Tiles of a sequence that any token sees, one at least."""
        end = (length + (TILE_KEYS - 1)) >> TILE_SHIFT
        return cutlass.max(end - self.first_tile(length, span), Int32(1))

    def count(self, tiles, chunk, limits):
        """Items of a sequence: so many that none exceeds the chunk, unless limits forbid."""
        least, max_splits = limits
        most = Int32(Uint32(tiles) // Uint32(least))
        most = cutlass.min(cutlass.max(most, Int32(1)), max_splits)
        return cutlass.min(self.ceil_div(tiles, chunk), most)

    def runs_of(self, tiles, count, is_thor, chunk):
        """((items, tiles of each) of the first run, of the second): `thor` cuts evenly but for the last item."""
        base = Int32(Uint32(tiles) // Uint32(count))
        extra = tiles - base * count
        even = is_thor == 0
        ahead = cutlass.select_(even, extra, count - 1)
        first = cutlass.select_(even, base + 1, chunk)
        second = cutlass.select_(even, base, tiles - ahead * chunk)
        return (ahead, first), (count - ahead, second)

    # -- steps ---------------------------------------------------------------------------------

    @cute.jit
    def read(self, seq_lens, lengths, s_lengths, s_tiles, scratch, tidx, seq_len_bytes, num_seqs, max_length, span):
        """Lengths to shared memory, and (clamped) to where the decode wants them; (sum, maximum) of tiles."""
        total = Int32(0)
        longest = Int32(0)
        for seq in cutlass.range(tidx, num_seqs, self.threads, unroll=1):
            address = seq_lens.toint() + Int64(seq) * seq_len_bytes
            low, high = ptx.load_global_i32(address), ptx.load_global_i32(address + (seq_len_bytes - 4))
            length = cutlass.min(cutlass.max(low, Int32(0)), max_length)
            if seq_len_bytes == 8:
                if high < 0:
                    length = Int32(0)
                elif (high > 0) | (low < 0):  # 2^31 at least
                    length = max_length
            s_lengths[seq] = length
            cute.make_tensor(lengths + seq, cute.make_layout(1))[0] = length
            tiles = self.tiles(length, span)
            s_tiles[seq] = tiles
            total = total + tiles
            longest = cutlass.max(longest, tiles)
        return collective.cta_sum_and_max(total, longest, scratch, tidx, WARPS)

    @cute.jit
    def balanced_chunk(self, s_tiles, scratch, tidx, num_seqs, num_work, total, longest, machine, limits):
        """`planner._balanced_counts`: the longest chunk whose estimate is within 4 % of the least."""
        ctas, sm_count, ctas_per_sm, lone_tile_cost, item_cost = machine
        lane, warp = tidx % 32, tidx // 32
        if warp < CANDIDATES:
            share = cutlass.max((16 * total * ctas + (sm_count - 1)) // sm_count, Int64(LEAST_SHARE))
            factor = Int64(CHUNK_FACTORS[0])
            for i in cutlass.range_constexpr(1, len(CHUNK_FACTORS)):
                factor = cutlass.select_(warp == i, Int64(CHUNK_FACTORS[i]), factor)
            wanted = cutlass.max((factor * share + 255) >> 8, Int64(1))
            chunk = longest
            if (warp < len(CHUNK_FACTORS)) & (wanted < Int64(longest)):
                chunk = Int32(wanted)
            items = Int32(0)
            peak = Int32(0)
            pieces = Int32(0)
            for seq in cutlass.range(lane, num_seqs, 32, unroll=1):
                tiles = s_tiles[seq]
                count = self.count(tiles, chunk, limits)
                items = items + count
                peak = cutlass.max(peak, self.ceil_div(tiles, count))
                pieces = cutlass.max(pieces, count)
            items, peak = collective.warp_sum(items), collective.warp_max(peak)
            pieces = collective.warp_max(pieces)
            quarter = Int32(0)
            if Int64(items) * ctas > Int64(sm_count) * ctas_per_sm:
                place = self.place_of_last_wave(items, ctas, sm_count * ctas_per_sm)
                quarter = self.quarters_at(s_tiles, lane, num_seqs, chunk, limits, peak, place)
            if lane == 0:
                scratch[warp] = chunk
                scratch[32 + warp] = items
                scratch[64 + warp] = peak
                scratch[96 + warp] = 4 * pieces + quarter
        cute.arch.sync_threads()
        candidate = cutlass.min(lane, Int32(CANDIDATES - 1))
        items, peak, pieces = scratch[32 + candidate], scratch[64 + candidate], scratch[96 + candidate] // 4
        grid = Int64(items) * ctas
        shared = (16 * total + START_COST * Int64(items)) * ctas // sm_count
        twice = Int64(lone_tile_cost) * (cutlass.min((grid + (sm_count - 1)) // sm_count, Int64(ctas_per_sm)) + 1)
        estimate = cutlass.max(shared, (twice * peak) >> 1)
        resident = Int64(sm_count) * ctas_per_sm
        if grid > resident:
            ahead = (grid - 1) // resident
            place = Int64(self.place_of_last_wave(items, ctas, sm_count * ctas_per_sm))
            full = 16 * Int64(peak)
            last = full - (((full - 16 * total // items) * (256 * place // items)) >> 7)
            least = (scratch[96 + candidate] % 4) * (4 * Int64(peak))
            last = cutlass.min(cutlass.max(last, least), least + 4 * Int64(peak))
            gaps = Int64(item_cost) * items
            waves = (16 * total + (gaps >> 1)) * ctas // sm_count
            waves = cutlass.max(waves, (((twice * total) >> 1) + gaps) * ctas // resident - item_cost)
            waves = cutlass.max(waves, ((twice * last * (ahead + 1)) >> 5) + item_cost * ahead)
            estimate = cutlass.max(estimate, waves)
        estimate = estimate + SPLIT_COST * Int64(pieces)
        if items > num_work:
            estimate = Int64(NEVER)
        good = 25 * estimate <= 26 * collective.warp_min_wide(estimate)
        # Lanes past the last candidate hold a copy of it.
        highest = cutlass.select_(good, candidate, Int32(0))
        chunk = scratch[collective.warp_max(highest)]
        cute.arch.sync_threads()
        return chunk

    def place_of_last_wave(self, items, ctas, resident):
        """How many items begin before the last wave."""
        return Int32((Int64(items) * ctas - 1) // resident * resident // ctas)

    @cute.jit
    def quarters_at(self, s_tiles, lane, num_seqs, chunk, limits, peak, place):
        """Full quarters of the peak, up to three, that the item at `place` has, of all in falling order."""
        larger = [Int32(0), Int32(0), Int32(0)]  # items of a quarter at least, of a half, of three
        for seq in cutlass.range(lane, num_seqs, 32, unroll=1):
            tiles = s_tiles[seq]
            count = self.count(tiles, chunk, limits)
            size = self.ceil_div(tiles, count)
            for q in cutlass.range_constexpr(3):
                larger[q] = larger[q] + cutlass.select_(4 * size >= (q + 1) * peak, count, Int32(0))
        quarter = Int32(0)
        for q in cutlass.range_constexpr(3):
            quarter = quarter + cutlass.select_(collective.warp_sum(larger[q]) > place, Int32(1), Int32(0))
        return quarter

    @cute.jit
    def thor_chunk(self, s_tiles, scratch, tidx, num_seqs, low, longest, slots):
        """`planner._thor_chunk`: the smallest chunk from `low` on whose items are resident at once."""
        lane, warp = tidx % 32, tidx // 32
        high = cutlass.max(low, longest)  # fits: fewer sequences than slots
        while low < high:
            # Warp i tries low + i / 32 of the way; each round leaves a stretch between neighbours.
            chunk = low + Int32((Int64(high - low) * warp) >> 5)
            items = Int32(0)
            for seq in cutlass.range(lane, num_seqs, 32, unroll=1):
                items = items + self.ceil_div(s_tiles[seq], chunk)
            items = collective.warp_sum(items)
            if lane == 0:
                scratch[warp] = cutlass.select_(items <= slots, Int32(1), Int32(0))
            cute.arch.sync_threads()
            fits = scratch[lane]
            cute.arch.sync_threads()
            # How many of the tries, from the first on, are too fine.
            fine = collective.warp_sum(1 - fits)
            width = Int64(high - low)
            if fine < 32:
                high = low + Int32((width * fine) >> 5)
            if fine > 0:
                low = low + Int32((width * (fine - 1)) >> 5) + 1
        return low

    @cute.jit
    def place_slots(self, s_tiles, s_counts, s_slots, scratch, tidx, num_seqs, chunk, limits):
        """Items and first partial slots of all sequences; returns how many slots there are."""
        share = (num_seqs + (self.threads - 1)) // self.threads
        owned = Int32(0)
        for seq in cutlass.range(tidx * share, cutlass.min((tidx + 1) * share, num_seqs), unroll=1):
            count = self.count(s_tiles[seq], chunk, limits)
            s_counts[seq] = count
            owned = owned + cutlass.select_(count > 1, count, Int32(0))
        slot, partials = collective.cta_prefix(owned, scratch, tidx, WARPS)
        for seq in cutlass.range(tidx * share, cutlass.min((tidx + 1) * share, num_seqs), unroll=1):
            owned = cutlass.select_(s_counts[seq] > 1, s_counts[seq], Int32(0))
            s_slots[seq] = cutlass.select_(owned > 0, slot, Int32(0))
            slot = slot + owned
        return partials

    @cute.jit
    def sort_runs(self, s_tiles, s_counts, s_keys, tidx, num_seqs, runs, is_thor, chunk):
        """Keys of all runs, in the order of the work list; returns their number with what fills a power of two."""
        size = Int32(2)
        while size < runs:
            size = size * 2
        for seq in cutlass.range(tidx, num_seqs, self.threads, unroll=1):
            first, second = self.runs_of(s_tiles[seq], s_counts[seq], is_thor, chunk)
            s_keys[seq] = self.key(2 * seq + 1, second)
            if runs > num_seqs:
                s_keys[num_seqs + seq] = self.key(2 * seq, first)
        for place in cutlass.range(runs + tidx, size, self.threads, unroll=1):
            s_keys[place] = Int64(NO_RUN)
        collective.cta_sort(s_keys, size, tidx, self.threads)
        return size

    def key(self, run, items):
        """What a run is sorted by."""
        count, tiles = items
        key = (Int64(MOST_TILES - tiles) << (RUN_BITS + COUNT_BITS)) | Int64((run << COUNT_BITS) | count)
        return cutlass.select_(count > 0, key, Int64(NO_RUN))

    @cute.jit
    def place_runs(self, s_keys, s_starts, scratch, tidx, runs):
        """Each run's first entry of the work list; returns how many entries have work."""
        share = (runs + (self.threads - 1)) // self.threads
        mine = Int32(0)
        for place in cutlass.range(tidx * share, cutlass.min((tidx + 1) * share, runs), unroll=1):
            mine = mine + (Int32(s_keys[place]) & ((1 << COUNT_BITS) - 1))
        start, items = collective.cta_prefix(mine, scratch, tidx, WARPS)
        for place in cutlass.range(tidx * share, cutlass.min((tidx + 1) * share, runs), unroll=1):
            s_starts[place] = start
            start = start + (Int32(s_keys[place]) & ((1 << COUNT_BITS) - 1))
        cute.arch.sync_threads()
        return items

    @cute.jit
    def find_run(self, s_starts, entry, runs, size):
        """The last run that starts at an entry or before; those without items start behind all entries with work."""
        place = Int32(0)
        step = size // 2
        while step > 0:
            ahead = cutlass.min(place + step, runs - 1)
            if s_starts[ahead] <= entry:
                place = ahead
            step = step // 2
        return place


def entry(config: PlanConfig, arch: Arch) -> tuple[Any, tuple[Any, ...]]:
    """The host function to compile for `config` and example arguments that fix its parameter types."""
    pointers = [make_ptr(Int32, 4096, cute.AddressSpace.gmem, assumed_align=align) for align in (4, 16, 4)]
    return SplitPlanner(config), (*pointers, *[Int32(1)] * 14, cuda.CUstream(0))
