"""Which keys a query row sees, and what its scores become before the softmax.

Token i of a sequence of L keys and t new tokens sees keys below L - t + 1 + i; with a window of W, the last W of
these. `t` is the configuration's q_len, or less where each sequence says so; rows of tokens beyond it are computed
like padding and cleared at the end. Ring stages that every row sees in full take a loop without masks.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, cute

from cubinery.aot.kernels.common import ptx
from cubinery.aot.kernels.common.memory import load_f32, load_i32
from cubinery.aot.kernels.paged_decode.mma_tile import LOG2E, NEG_INF, ROW_RESULT, MmaTile
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS


class Mask(MmaTile):
    """Bounds of visible keys, and the axes that change scores: window, soft-cap, sinks, tokens per sequence.

    `span` is (keys of the sequence, its new tokens, the window's size, the end of the work item); what an axis that is
    off would need is never looked at.
    """

    @property
    def may_end_inside(self) -> bool:
        """Whether an item that is not its sequence's last may end inside a ring stage, which is then masked there."""
        return self.config.stage_keys > TILE_KEYS

    @cute.jit
    def tokens(self, q_lens, seq, n_q):
        """New tokens of a sequence, at most as many as there are rows."""
        found = Int32(self.config.q_len)
        if cutlass.const_expr(self.config.q_lens):
            found = cutlass.min(cutlass.max(load_i32(q_lens, Int64(seq)), 0), n_q)
            if cutlass.const_expr(self.config.q_len > 1 or self.config.window):
                found = cutlass.min(found, self.config.q_len)
        return found

    def live_rows(self, tokens, n_q, group_size):
        """Packed rows that hold queries; q_len 1 also serves several tokens that all see everything."""
        return cutlass.min(tokens * group_size, n_q) if self.config.q_lens else n_q

    def first_key(self, span):
        """The first key that any token sees, where there is a window; may be negative."""
        length, tokens, window = span
        return length - tokens + 1 - window

    def first_item(self, length, window, key_begin):
        """Whether a work item is the first of its sequence: the planner starts at the tile of this very key."""
        first = length - self.config.q_len + 1 - window if self.config.window else 0
        return key_begin <= cutlass.max(first, 0)

    @cute.jit
    def limits(self, span, rows, group_size):
        """[end of visible keys of this lane's two rows, then, with a window, their first ones]."""
        c = self.config
        length, tokens, window, key_end = span
        if cutlass.const_expr(c.q_len > 1):
            ends = [length - tokens + 1 + row // group_size for row in rows]
        else:
            ends = [length] * 2
        firsts = [end - window for end in ends] if cutlass.const_expr(c.window) else []
        last = key_end if self.may_end_inside else length
        return [cutlass.min(end, last) for end in ends] + firsts

    @cute.jit
    def full_stages(self, span, key_begin, num_stages):
        """(first, number) of the stages of an item of which every row sees every key."""
        c = self.config
        length, tokens, window, key_end = span
        # No new token at all would make one key too many visible.
        all_visible = cutlass.min(length - tokens + 1, length) if cutlass.const_expr(c.q_len > 1) else length
        if cutlass.const_expr(self.may_end_inside):
            all_visible = cutlass.min(all_visible, key_end)
        end = cutlass.min(cutlass.max(all_visible - key_begin, 0) // c.stage_keys, num_stages)
        begin = Int32(0)
        if cutlass.const_expr(c.window):  # the last token's window is the last to begin
            begin = (length - window - key_begin + (c.stage_keys - 1)) // c.stage_keys
            begin = cutlass.min(cutlass.max(begin, 0), num_stages)
        return begin, cutlass.max(end - begin, 0)

    @property
    def may_be_early(self) -> bool:
        """Whether a masked stage may have another behind it, which needs the ring's slots again.

        Otherwise a mask reaches over the last stage of an item alone: that slot is never refilled, nor released.
        """
        return self.config.q_len > 1 or self.config.window

    def mask_scores(self, tiles, key, limits):
        """-inf where this lane's keys, from `key` on, are not visible to its rows."""
        masked = []
        for t, tile in enumerate(tiles):
            found = []
            for e, score in enumerate(tile):
                own, row = key + self.operands.score_key(t, e), self.operands.row(e)
                visible = own < limits[row]
                if self.config.window:
                    visible = visible & (own >= limits[2 + row])
                found.append(cutlass.select_(visible, score, Float32(NEG_INF)))
            masked.append(found)
        return masked

    # -- scores --------------------------------------------------------------------------------

    def cap_scales(self, scales, softcap):
        """Factors from raw scores to the exponent of 2 in `cap`, per row, from those to the exponent in a softmax."""
        return [2.0 * scale / softcap for scale in scales]

    def cap(self, tiles, cap_scales):
        """tanh(score / cap), to some 2^-22 of 1: the softmax scale is then the cap itself."""
        scales = [cap_scales[self.operands.row(e)] for e in range(4)]
        return [
            [1.0 - 2.0 * ptx.reciprocal(1.0 + ptx.exp2(x * scale)) for x, scale in zip(tile, scales, strict=True)]
            for tile in tiles
        ]

    # -- sinks ---------------------------------------------------------------------------------

    @cute.jit
    def stage_sinks(self, smem, tidx, sinks, head, group_size, row0, live_rows, is_first):
        """Each row's sink into shared memory, where the thread that finishes the row finds it.

        A sink counts once, in the first chunk of its sequence, and only in rows that hold a query.
        """
        if tidx < self.config.row_tile:
            n = row0 + tidx
            sink = Float32(NEG_INF)
            if (n < live_rows) & is_first:
                sink = load_f32(sinks, Int64(head * group_size + n % group_size))
            ptx.store_shared_f32(smem + ROW_RESULT + tidx * 8, sink)

    def add_sink(self, smem, tidx, peak, total):
        """(maximum, sum, factor for O) of a row in units of the LSE once its sink has joined the sum."""
        sink = ptx.load_shared_f32(smem + ROW_RESULT + tidx * 8)
        new = cute.arch.fmax(peak, sink)
        base = self.base(new)
        shrink = ptx.exp2((peak - base) * LOG2E)
        return new, total * shrink + ptx.exp2((sink - base) * LOG2E), shrink
