"""The softmax warps of the tensor-memory kernel: Q staging, online softmax, correction of O.

S lies in tensor memory with a key a lane and a query row a column. A warp takes its 32 keys as fragments: lane 4g + t
has four keys (g, g + 8, g + 16, g + 24) of a quarter of the rows (8i + 2t and 8i + 2t + 1). So a thread keeps few
statistics, most of a maximum over keys is taken in registers, and the same rows of O come to it when O is rescaled.

The running maximum is shared by all warps, since one O accumulates the products of all keys: warps raise it in shared
memory and meet at one barrier a tile, which also tells whether any row has been raised. If none has, nothing is read
back and O stays as it is. Two copies of the maximum, for even and odd tiles, keep a fast warp's next tile from what
a slow one still reads; either may lag behind the other, so readers keep what they know. l is kept a thread.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.paged_decode.constants import NEG_INF
from cubinery.aot.kernels.paged_decode.tcgen05_tile import (
    ITEM,
    LIMITS,
    MAXIMA,
    O_DONE,
    P_FULL,
    Q_FULL,
    ROW_SCALE,
    S_FULL,
    SOFTMAX_BARRIER,
    SOFTMAX_WARPS,
    SUMS,
    Tile,
)
from cubinery.runtime.ops.paged_decode.decode_config import TILE_KEYS

THREADS = 32 * SOFTMAX_WARPS


class Softmax(Tile):
    """What the softmax warps do until every tile is accumulated."""

    # -- before the first tile -------------------------------------------------------------------

    @cute.jit
    def prepare(self, smem, tidx):
        """Maxima of nothing, by threads of any warps: before a barrier of the CTA."""
        if tidx < 2 * self.rows:
            ptx.store_shared_f32(smem + MAXIMA + tidx * 4, Float32(NEG_INF))

    @cute.jit
    def stage_q(self, smem, tidx, q_base, row0, n_q, group_size, q_token, q_head):
        """Q tile to shared memory, in pieces of 128 bytes of a row, swizzled; rows past n_q become zeros."""
        c = self.config
        chunks = c.head_dim * c.q_element_bytes // 16  # of one row, 16 bytes each
        lanes = min(32, chunks)  # that share a row; several chunks each if it is long
        together = THREADS // lanes
        for i in cutlass.range_constexpr(max(1, self.rows // together)):
            row = i * together + tidx // lanes
            n = row0 + row
            words = [Uint32(0)] * (4 * chunks // lanes)
            if (n < n_q) & (row < self.rows):
                token = n // group_size
                element = Int64(token) * q_token + Int64(n - token * group_size) * q_head
                address = q_base + element * c.q_element_bytes + tidx % lanes * 16
                words = [w for part in range(chunks // lanes) for w in ptx.load_global_v4(address + part * 512)]
            scale = Float32(1.0)
            if cutlass.const_expr(self.widens):
                words, scale = self.narrow(words, lanes)
            if row < self.rows:
                for part in cutlass.range_constexpr(chunks // lanes):
                    chunk = part * 32 + tidx % lanes
                    place = chunk // 8 * (self.rows * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
                    ptx.store_shared_v4(smem + self.q_smem + place, words[4 * part : 4 * part + 4])
                if cutlass.const_expr(self.widens):
                    if tidx % lanes == 0:
                        ptx.store_shared_f32(smem + ROW_SCALE + row * 4, scale)
        self.publish(smem + Q_FULL)

    def narrow(self, words, lanes):
        """bf16 pairs of a row that `lanes` lanes hold, as f16 pairs, and what undoes the row's scaling.

        Its largest element comes to lie in [2^14, 2^15), so that every bf16 is exact down to 2^-29 of it. From 2^-63
        down a row counts as zero: its factor must not drive the scale of the scores to zero.
        """
        values = [x for word in words for x in ptx.unpack_bf16x2(word)]
        top = Float32(0.0)
        for x in values:
            top = cute.arch.fmax(top, cute.arch.fmax(x, -x))
        for n in range(lanes.bit_length() - 1):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=1 << n))
        exponent = cutlass.min(cutlass.max(ptx.float_bits(top) >> 23, 64), 254)
        up = ptx.bits_to_float((268 - exponent) << 23)
        pairs = [ptx.pack_f32x2("f16", values[n] * up, values[n + 1] * up) for n in range(0, len(values), 2)]
        return pairs, ptx.bits_to_float((exponent - 14) << 23)

    @cute.jit
    def stage_limits(self, smem, tidx, row0, group_size, length):
        """Each row's end of visible keys."""
        if tidx < self.rows:
            end = length
            if cutlass.const_expr(self.config.q_len > 1):
                end = cutlass.min(length - self.config.q_len + 1 + (row0 + tidx) // group_size, length)
            ptx.store_shared_i32(smem + LIMITS + tidx * 4, end)

    @cute.jit
    def full_tiles(self, length, key_begin, tiles):
        """Tiles of a chunk of which every row sees every key."""
        end = length - (self.config.q_len - 1)
        return cutlass.min(cutlass.max(end - key_begin, 0) // TILE_KEYS, tiles)

    def publish(self, barrier):
        """This warp has written what products will read: one arrival a warp."""
        ptx.fence_async_shared()
        tc.fence_before()
        self.arrive(barrier)

    # -- tiles -----------------------------------------------------------------------------------

    @cute.jit
    def attend(self, smem, tidx, tmem, key_begin, full, tiles, exp_scale):
        """All tiles of a chunk; leaves each warp's part of l in shared memory."""
        lane, warp = tidx % 32, cute.arch.make_warp_uniform(tidx // 32)
        lanes = tmem + (warp << 21)  # this warp's lanes of tensor memory
        owned, owner = self.ownership(lane)
        l = [Float32(0.0)] * self.columns
        bias = [Float32(math.inf)] * self.columns
        # What this lane knows of the row that it raises; infinity where another lane does.
        own = cutlass.select_(owner, Float32(NEG_INF), Float32(math.inf))
        key = key_begin + warp * 32 + lane // 4
        fixed = (smem, lane, warp, lanes, owned, self.exp_scales(smem, lane, exp_scale))
        for i in cutlass.range(full, unroll=1):
            l, bias, own = self.tile(fixed, i, None, l, bias, own)
        for i in cutlass.range(full, tiles, unroll=1):
            l, bias, own = self.tile(fixed, i, key + i * TILE_KEYS, l, bias, own)
        self.sum_up(smem, lane, warp, l)

    def exp_scales(self, smem, lane, exp_scale):
        """Factors from raw scores to exponents of 2, of this thread's rows."""
        if not self.widens:
            return [exp_scale] * self.columns
        scales: list[Any] = []
        for group in range(self.columns // 2):
            scales += ptx.load_shared_f32x2(smem + ROW_SCALE + (8 * group + lane % 4 * 2) * 4)
        return [self.at_least_tiny(exp_scale * x) for x in scales]

    def ownership(self, lane):
        """(the row whose maximum ends up in a lane, whether this lane raises it)."""
        shift = 6 - self.columns.bit_length()  # `reduce` halves columns by the upper bits of the lane
        column = lane >> shift
        row = column // 2 * 8 + lane % 4 * 2 + column % 2
        return row, (lane & ((1 << shift) - 1)) < 4

    @cute.jit
    def tile(self, fixed, i, key, l, bias, own):
        """One tile. `key` is this thread's first, None where all keys are visible to all rows.

        `bias` is what is added to the exponents of a row's scores: that of P's factor less that of the maximum, and
        infinity while the row has seen nothing.
        """
        smem, lane, warp, lanes, owned, exp_scales = fixed
        slot, phase = i & 1, (i >> 1) & 1
        ptx.mbarrier_wait(smem + S_FULL + slot * 8, phase)
        tc.fence_after()
        scores = tc.load_quads(lanes + self.s_column(slot), self.rows)
        if cutlass.const_expr(key is not None):
            scores = self.mask(smem, lane, key, scores)
        peak = self.reduce(lane, [self.largest(column) for column in zip(*scores, strict=True)])
        maxima = smem + MAXIMA + slot * (4 * self.rows)
        if self.raise_maximum(maxima + owned * 4, peak, own) != 0:
            own = cute.arch.fmax(own, ptx.load_shared_f32(maxima + owned * 4))
            bias, alpha = self.raised(maxima, lane, bias, exp_scales)
            l = [x * factor for x, factor in zip(l, alpha, strict=True)]
            if i > 0:
                self.rescale(smem, lanes, i - 1, alpha)
        # The product two tiles back has read this buffer of P.
        ptx.mbarrier_wait(smem + O_DONE + slot * 8, phase ^ 1)
        shift = bias
        if cutlass.const_expr(key is not None):
            # A row that has seen nothing has scores of -inf, which only a finite number may be added to.
            shift = [cutlass.select_(x == math.inf, Float32(0.0), x) for x in bias]
        p = [[ptx.exp2(s * scale + x) for s, scale, x in zip(row, exp_scales, shift, strict=True)] for row in scores]
        for row in p:
            l = [total + x for total, x in zip(l, row, strict=True)]
        self.store_p(smem + self.p_smem + slot * self.config.p_bytes, lane, warp, p)
        self.publish(smem + P_FULL + slot * 8)
        return l, bias, own

    def mask(self, smem, lane, key, scores):
        """-inf where a row does not see a key."""
        rows = [list(row) for row in scores]
        keys = self.keys_at(smem, [key + 8 * n for n in range(len(rows))])
        for group in range(self.columns // 2):
            limits = ptx.load_shared_i32x2(smem + LIMITS + (8 * group + lane % 4 * 2) * 4)
            for n, row in enumerate(rows):
                for e, limit in enumerate(limits):
                    column = 2 * group + e
                    row[column] = cutlass.select_(keys[n] < limit, row[column], Float32(NEG_INF))
        return rows

    def keys_at(self, smem, places):
        """The keys that lie at these places of a chunk, counted as keys are; the chunk's end where there is none.

        They differ in the page of a sequence's end alone: see `Tile.keys_end_page`.
        """
        if not self.keys_end_page:
            return places
        key_end = ptx.load_shared_i32(smem + ITEM + 8)
        first = key_end & -self.config.page_size  # of that page; no place of the chunk where pages are full
        blank = -key_end & (self.config.page_size - 1)  # its rows without a key, which come first
        keys = [cutlass.select_(place - blank < first, key_end, place - blank) for place in places]
        return [cutlass.select_(place < first, place, key) for place, key in zip(places, keys, strict=True)]

    def largest(self, values):
        found = values[0]
        for x in values[1:]:
            found = cute.arch.fmax(found, x)
        return found

    def reduce(self, lane, values):
        """Maxima of all columns over the lanes that differ in lane // 4; each lane ends up with one of them.

        Lanes exchange halves of their columns while they have several, so that no maximum is taken twice.
        """
        for distance in (16, 8, 4):
            if len(values) > 1:
                half = len(values) // 2
                upper = (lane & distance) != 0
                kept = [cutlass.select_(upper, values[half + n], values[n]) for n in range(half)]
                sent = [cutlass.select_(upper, values[n], values[half + n]) for n in range(half)]
                values = [
                    cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(y, offset=distance))
                    for x, y in zip(kept, sent, strict=True)
                ]
            else:
                values = [cute.arch.fmax(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=distance))]
        return values[0]

    def raise_maximum(self, address, peak, own):
        """Raise a maximum in shared memory where `peak` exceeds `own`; meet; 1 if any thread raised any, else 0.

        Floats of one sign order as integers do: those without sign upwards, those with sign downwards as unsigned
        ones, and any without sign exceeds any with one.
        """
        return ptx.inline(
            "{ .reg .pred any, up, down; .reg .b32 bits; setp.gt.f32 any, {$r1}, {$r2}; mov.b32 bits, {$r1}; "
            "setp.ge.and.s32 up, bits, 0, any; setp.lt.and.s32 down, bits, 0, any; "
            "@up red.relaxed.cta.shared::cta.max.s32 [{$r0}], bits; "
            "@down red.relaxed.cta.shared::cta.min.u32 [{$r0}], bits; "
            f"bar.red.or.pred any, {SOFTMAX_BARRIER}, {THREADS}, any; selp.b32 {{$w0}}, 1, 0, any; }}",
            write_only_types=[Int32],
            read_only_args=[address, peak, own],
        )

    def raised(self, maxima, lane, bias, exp_scales):
        """(new biases, factors of what was accumulated) of this thread's rows."""
        peaks: list[Any] = []
        for group in range(self.columns // 2):
            peaks += ptx.load_shared_f32x2(maxima + (8 * group + lane % 4 * 2) * 4)
        new = [
            cute.arch.fmin(old, self.p_log2_scale - peak * scale)
            for old, peak, scale in zip(bias, peaks, exp_scales, strict=True)
        ]
        # A row that had seen nothing has nothing accumulated, and maybe still nothing: inf - inf.
        alpha = [
            cutlass.select_(old == math.inf, Float32(0.0), ptx.exp2(x - old)) for x, old in zip(new, bias, strict=True)
        ]
        return new, alpha

    @cute.jit
    def rescale(self, smem, lanes, last, alpha):
        """O *= alpha, once the product of tile `last` is done; the next one waits for this warp's P."""
        ptx.mbarrier_wait(smem + O_DONE + (last & 1) * 8, (last >> 1) & 1)
        tc.fence_after()
        for block in cutlass.range(self.blocks, unroll=1):
            for parts, first, columns in self.pieces:
                address = lanes + self.o_column(block) + first
                factors = alpha[first // 4 : (first + columns) // 4]
                rows = tc.load_quads(address, columns, parts)
                rows = [[x * factor for x, factor in zip(row, factors, strict=True)] for row in rows]
                tc.store_quads(address, rows, parts)
        tc.wait_store()

    @property
    def pieces(self) -> list[tuple[tuple[int, ...], int, int]]:
        """(parts, first column, columns) of O to rescale at once: scores are in registers too."""
        if self.rows <= 16:
            return [((0, 1), 0, self.rows)]
        columns = self.rows if self.softmax_registers > 112 else self.rows // 2
        return [((part,), first, columns) for part in range(2) for first in range(0, self.rows, columns)]

    def store_p(self, buffer, lane, warp, p):
        """This thread's P, keys as rows: planes of 16 bytes a key."""
        width = self.config.q_element_bytes
        store = ptx.store_shared_f16x2 if self.widens else ptx.store_shared_e4m3x2
        for n, row in enumerate(p):
            key = buffer + (warp * 32 + 8 * n + lane // 4) * 16
            for group in range(self.columns // 2):
                plane, place = divmod(8 * group * width, 16)
                target = key + plane * (16 * TILE_KEYS) + place + lane % 4 * (2 * width)
                store(target, row[2 * group], row[2 * group + 1])

    @cute.jit
    def sum_up(self, smem, lane, warp, l):
        """Each warp's sum of p over its keys, by row, to shared memory."""
        for distance in (4, 8, 16):
            l = [x + cute.arch.shuffle_sync_bfly(x, offset=distance) for x in l]
        if lane < 4:
            for group in cutlass.range_constexpr(self.columns // 2):
                place = smem + SUMS + (warp * self.rows + 8 * group + lane * 2) * 4
                ptx.store_shared_f32x2(place, (l[2 * group], l[2 * group + 1]))
