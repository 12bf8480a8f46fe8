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

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common import tcgen05 as tc
from cubinery.aot.kernels.paged_decode.constants import LOG2E, NEG_INF
from cubinery.aot.kernels.paged_decode.tcgen05_tile import (
    LIMITS,
    MAXIMA,
    O_DONE,
    P_FULL,
    Q_FULL,
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
        """Q tile to shared memory, in blocks of 128 bytes of a row, swizzled; rows past n_q become zeros."""
        c = self.config
        chunks = c.head_dim * c.q_element_bytes // 16  # of one row, 16 bytes each
        for i in cutlass.range_constexpr(self.rows * chunks // THREADS):
            index = tidx + i * THREADS
            row, chunk = index // chunks, index % chunks
            n = row0 + row
            words = [Uint32(0)] * 4
            if n < n_q:
                token = n // group_size
                element = Int64(token) * q_token + Int64(n - token * group_size) * q_head
                words = list(ptx.load_global_v4(q_base + element * c.q_element_bytes + chunk * 16))
            place = chunk // 8 * (self.rows * 128) + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            ptx.store_shared_v4(smem + self.q_smem + place, words)
        self.publish(smem + Q_FULL, tidx)

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

    @cute.jit
    def publish(self, barrier, tidx):
        """This warp has written what products will read: one arrival a warp."""
        tc.fence_async_shared()
        tc.fence_before()
        cute.arch.sync_warp()
        if tidx % 32 == 0:
            ptx.mbarrier_arrive(barrier)

    # -- tiles -----------------------------------------------------------------------------------

    @cute.jit
    def attend(self, smem, tidx, tmem, key_begin, full, tiles, exp_scale):
        """All tiles of a chunk; leaves each warp's part of l in shared memory."""
        lane, warp = tidx % 32, tidx // 32
        lanes = tmem + (warp << 21)  # this warp's lanes of tensor memory
        owned, owner = self.ownership(lane)
        m = [Float32(NEG_INF)] * self.columns
        l = [Float32(0.0)] * self.columns
        bias = [Float32(0.0)] * self.columns
        # What this lane knows of the row that it raises; infinity where another lane does.
        own = cutlass.select_(owner, Float32(NEG_INF), -Float32(NEG_INF))
        key = key_begin + warp * 32 + lane // 4
        fixed = (smem, lane, warp, lanes, owned, exp_scale)
        for i in cutlass.range(full, unroll=1):
            m, l, bias, own = self.tile(fixed, i, None, m, l, bias, own)
        for i in cutlass.range(full, tiles, unroll=1):
            m, l, bias, own = self.tile(fixed, i, key + i * TILE_KEYS, m, l, bias, own)
        self.sum_up(smem, lane, warp, l)

    def ownership(self, lane):
        """(the row whose maximum ends up in a lane, whether this lane raises it)."""
        shift = 6 - self.columns.bit_length()  # `reduce` halves columns by the upper bits of the lane
        column = lane >> shift
        row = column // 2 * 8 + lane % 4 * 2 + column % 2
        return row, (lane & ((1 << shift) - 1)) < 4

    @cute.jit
    def tile(self, fixed, i, key, m, l, bias, own):
        """One tile. `key` is this thread's first, None where all keys are visible to all rows."""
        smem, lane, warp, lanes, owned, exp_scale = fixed
        slot, phase = i & 1, (i >> 1) & 1
        ptx.mbarrier_wait(smem + S_FULL + slot * 8, phase)
        tc.fence_after()
        scores = tc.load_quads(lanes + self.s_column(slot), self.rows)
        if cutlass.const_expr(key is not None):
            scores = self.mask(smem, lane, key, scores)
        peak = self.reduce(lane, [self.largest(column) for column in zip(*scores, strict=True)])
        maxima = smem + MAXIMA + slot * (4 * self.rows)
        if self.raise_maximum(maxima + owned * 4, peak, own) != 0:
            base, alpha, m = self.raised(maxima, lane, m, exp_scale)
            own = cute.arch.fmax(own, ptx.load_shared_f32(maxima + owned * 4))
            bias = [self.p_log2_scale - x * exp_scale for x in base]
            l = [x * factor for x, factor in zip(l, alpha, strict=True)]
            if i > 0:
                self.rescale(smem, lanes, i - 1, alpha)
        # The product two tiles back has read this buffer of P.
        ptx.mbarrier_wait(smem + O_DONE + slot * 8, phase ^ 1)
        p = [[ptx.exp2(s * exp_scale + b) for s, b in zip(row, bias, strict=True)] for row in scores]
        for row in p:
            l = [total + x for total, x in zip(l, row, strict=True)]
        self.store_p(smem + self.p_smem + slot * self.config.p_bytes, lane, warp, p)
        self.publish(smem + P_FULL + slot * 8, lane)
        return m, l, bias, own

    def mask(self, smem, lane, key, scores):
        """-inf where a row does not see a key."""
        limits: list[Any] = []
        for group in range(self.columns // 2):
            limits += ptx.load_shared_i32x2(smem + LIMITS + (8 * group + lane % 4 * 2) * 4)
        return [
            [cutlass.select_(key + 8 * n < limit, s, Float32(NEG_INF)) for s, limit in zip(row, limits, strict=True)]
            for n, row in enumerate(scores)
        ]

    def largest(self, values):
        found = values[0]
        for x in values[1:]:
            found = cute.arch.fmax(found, x)
        return found

    @cute.jit
    def reduce(self, lane, values):
        """Maxima of all columns over the lanes that differ in lane // 4; each lane ends up with one of them.

        Lanes exchange halves of their columns while they have several, so that no maximum is taken twice.
        """
        for distance in (16, 8, 4):
            if cutlass.const_expr(len(values) > 1):
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

    @cute.jit
    def raised(self, maxima, lane, m, exp_scale):
        """(what scores are compared with, factors of what was accumulated, new maxima) of this thread's rows."""
        new = []
        for group in cutlass.range_constexpr(self.columns // 2):
            new += ptx.load_shared_f32x2(maxima + (8 * group + lane % 4 * 2) * 4)
        new = [cute.arch.fmax(x, old) for x, old in zip(new, m, strict=True)]
        # A row that has seen nothing keeps -inf; comparing with 0 instead avoids inf - inf.
        base = [cutlass.select_(x == NEG_INF, Float32(0.0), x) for x in new]
        alpha = [ptx.exp2((old - x) * exp_scale) for x, old in zip(base, m, strict=True)]
        return base, alpha, new

    @cute.jit
    def rescale(self, smem, lanes, last, alpha):
        """O *= alpha, once the product of tile `last` is done; the next one waits for this warp's P."""
        ptx.mbarrier_wait(smem + O_DONE + (last & 1) * 8, (last >> 1) & 1)
        tc.fence_after()
        for block in cutlass.range(self.blocks, unroll=1):
            address = lanes + self.o_column(block)
            rows = tc.load_quads(address, self.rows)
            rows = [[x * factor for x, factor in zip(row, alpha, strict=True)] for row in rows]
            tc.store_quads(address, rows)
        tc.wait_store()

    def store_p(self, buffer, lane, warp, p):
        """This thread's P, keys as rows: planes of 16 bytes a key."""
        width = self.config.q_element_bytes
        store = ptx.store_shared_bf16x2 if self.widens else ptx.store_shared_e4m3x2
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

    def exp_scale(self, score_scale):
        """Factor from raw scores to exponents of 2."""
        return self.at_least_tiny(score_scale * LOG2E)
