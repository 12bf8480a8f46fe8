"""Instructions of a warp: shfl, vote, match, redux, elect, activemask, special registers (PTX ISA 9.7.9, 9.7.13, 10)."""

# ruff: noqa: E501, PERF401 - lines of PTX; tables grow one row at a time
from __future__ import annotations

from ptxsim.silicon.entries import Entry, Op, raw, single, table
from ptxsim.silicon.patterns import triples

_MASKS = ("-1", "0x0000ffff", "0xf00ff00f")


def _shuffles() -> list[Op]:
    ops = []
    for mode in ("up", "down", "bfly", "idx"):
        for c in ("0", "31", "0x1f", "0x181f", "0x1c1f", "0x1000", "0x1807", "0x1e03"):
            for b in ("1", "3", "17", "31"):
                text = f"shfl.sync.{mode}.b32 %t0|%p0, %a, {b}, {c}, -1; selp.u32 %t1, 0x5a5a5a5a, 0, %p0; xor.b32 %d, %t0, %t1;"
                ops.append(raw(f"shfl.{mode} {b} {c}", text))
        ops.append(
            raw(
                f"shfl.{mode} by register",
                f"and.b32 %t2, %b, 31; and.b32 %t3, %c, 0x1f1f; shfl.sync.{mode}.b32 %d, %a, %t2, %t3, -1;",
            )
        )
    return ops


def _members(text: str, mask: str, kind: str = "b32") -> str:
    """The text, executed by the lanes of the mask alone; 0 elsewhere."""
    if mask == "-1":
        return text
    return f"mov.{kind} %d, 0; mov.u32 %t5, %laneid; shr.u32 %t6, {mask}, %t5; and.b32 %t6, %t6, 1; setp.ne.u32 %p5, %t6, 0; @%p5 bra IN; bra OUT; IN: {text} OUT:"


def _votes() -> list[Op]:
    ops = []
    for mask in _MASKS:
        for text in ("%p1", "!%p1", "%pb"):
            # The first warp mixed, the second all true, the third all false.
            some = "setp.lt.u32 %p1, %i, 32; and.pred %p1, %p1, %pa; shr.u32 %t0, %i, 5; setp.eq.u32 %p2, %t0, 1; or.pred %p1, %p1, %p2;"
            ops.append(
                raw(f"vote.ballot {text} {mask}", _members(f"{some} vote.sync.ballot.b32 %d, {text}, {mask};", mask))
            )
            for mode in ("all", "any", "uni"):
                ops.append(
                    raw(
                        f"vote.{mode} {text} {mask}",
                        _members(f"{some} vote.sync.{mode}.pred %p0, {text}, {mask}; selp.u32 %d, 7, 9, %p0;", mask),
                    )
                )
        ops.append(
            raw(f"match.any.b32 {mask}", _members(f"and.b32 %t0, %a, 3; match.any.sync.b32 %d, %t0, {mask};", mask))
        )
        ops.append(
            raw(
                f"match.any.b64 {mask}",
                _members(f"and.b64 %lt0, %la, 0x100000001; match.any.sync.b64 %d, %lt0, {mask};", mask),
            )
        )
        for bits, shift in (("32", "31"), ("64", "63")):
            source = (
                "shr.u32 %t0, %i, 6; mul.lo.u32 %t0, %t0, %b;"
                if bits == "32"
                else "setp.lt.u32 %p1, %i, 64; selp.b64 %lt0, %lb, %in, %p1;"
            )
            register = "%t0" if bits == "32" else "%lt0"
            text = f"{source} match.all.sync.b{bits} %t1|%p0, {register}, {mask}; selp.u32 %t2, 0x80, 0, %p0; xor.b32 %d, %t1, %t2;"
            ops.append(raw(f"match.all.b{bits} {shift} {mask}", _members(text, mask)))
        for name in ("add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"):
            ops.append(
                raw(
                    f"redux.{name} {mask}",
                    _members(
                        f"and.b32 %t0, %a, 0xf7fffff3; or.b32 %t0, %t0, 0x50; redux.sync.{name} %d, %t0, {mask};", mask
                    ),
                )
            )
        ops.append(
            raw(
                f"elect {mask}",
                _members(f"elect.sync %t0|%p0, {mask}; selp.u32 %t1, 0x100, 0, %p0; or.b32 %d, %t0, %t1;", mask),
            )
        )
        ops.append(raw(f"activemask {mask}", _members("activemask.b32 %d;", mask)))
    ops.append(
        raw("vote uniform input", "setp.lt.u32 %p1, %i, 64; vote.sync.uni.pred %p0, %p1, -1; selp.u32 %d, 1, 0, %p0;")
    )
    return ops


def _registers() -> list[Op]:
    names = ("tid.x", "tid.y", "tid.z", "ntid.x", "ntid.y", "ntid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y",
             "nctaid.z", "laneid", "lanemask_eq", "lanemask_le", "lanemask_lt", "lanemask_ge", "lanemask_gt",
             "cluster_ctaid.x", "cluster_nctaid.x", "cluster_ctarank", "cluster_nctarank", "clusterid.x", "nclusterid.x")  # fmt: skip
    return [raw(name, f"mov.u32 %d, %{name};") for name in names] + [
        raw("is_explicit_cluster", "mov.pred %d, %is_explicit_cluster;", "pred")
    ]


def entries() -> list[Entry]:
    """The kernels of warps."""
    diverged = """
mov.u32 %r1, 0; and.b32 %r2, %lane, 3;
LOOP: mov.u32 %r3, %r2; popc.b32 %r4, %r3; add.u32 %r1, %r1, %r4; mul.lo.u32 %r1, %r1, 3;
setp.eq.u32 %p1, %r2, 0; sub.u32 %r2, %r2, 1; @!%p1 bra LOOP;
bar.warp.sync -1; shfl.sync.idx.b32 %r5, %r1, 3, 31, -1; add.u32 %r5, %r5, %lane; st.global.b32 [%mine], %r5;
"""
    shrinking = """
mov.u32 %r1, 0; mov.u32 %r2, %lane;
LOOP: setp.lt.u32 %p1, %r2, 40; vote.sync.ballot.b32 %r3, %p1, -1; popc.b32 %r4, %r3; mad.lo.u32 %r1, %r1, 33, %r4;
add.u32 %r2, %r2, 7; setp.ne.u32 %p2, %r3, 0; @%p2 bra LOOP; st.global.b32 [%mine], %r1;
"""
    data = triples("i", 128, seed=41)
    return [
        table("warp_shuffles", _shuffles(), data),
        table("warp_votes", _votes(), data),
        table("special_registers", _registers(), data, block=64),
        single("warp_divergence", diverged, b"", 64, block=64),
        single("warp_loop", shrinking, b"", 64, block=64),
    ]
