"""bar, barrier, mbarrier, fences, setmaxnreg, griddepcontrol (PTX ISA 9.7.13, 9.7.12)."""

# ruff: noqa: E501 - lines of PTX
from __future__ import annotations

import numpy as np
from ptxsim.silicon.entries import Entry, Writer, single, wait


def _mbarrier() -> Entry:
    """One thread drives a barrier and looks at it after each step."""
    w = Writer(32)
    w("mov.u32 %r100, smem; add.u32 %r101, %r100, 8; setp.ne.u32 %p1, %thread, 0; @%p1 bra OUT;")
    steps = 0

    def look(name: str) -> None:
        nonlocal steps
        for parity in (0, 1):
            w(f"mbarrier.test_wait.parity.shared::cta.b64 %p2, [%r100], {parity};")
            w.flag(f"{steps} {name}: parity {parity}", "%p2")
        steps += 1

    def arrive(name: str, text: str) -> None:
        w(f"{text.replace('%s', '%x1')} mbarrier.pending_count.b64 %r1, %x1;")
        w.out(f"{name}: pending", "%r1")
        w("mbarrier.test_wait.shared::cta.b64 %p2, [%r100], %x1;")
        w.flag(f"{name}: this phase over", "%p2")
        look(name)

    w("mbarrier.init.shared::cta.b64 [%r100], 3;")
    look("init 3")
    for i in range(4):
        arrive(f"arrive {i}", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    arrive("arrive 2", "mbarrier.arrive.release.cta.shared::cta.b64 %s, [%r100], 2;")
    w("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r100], 64;")
    for i in range(3):
        arrive(f"arrive with tx {i}", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    w("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100], 48;")
    look("complete 48")
    w("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100], 16;")
    look("complete 16")
    arrive("arrive.expect_tx", "mbarrier.arrive.expect_tx.shared::cta.b64 %s, [%r100], 32;")
    w(
        "mbarrier.complete_tx.shared::cta.relaxed.cta.b64 [%r100], 32;".replace(
            ".shared::cta.relaxed.cta", ".relaxed.cta.shared::cta"
        )
    )
    look("completed before the arrivals")
    arrive("arrive_drop", "mbarrier.arrive_drop.shared::cta.b64 %s, [%r100];")
    arrive("after the drop 1", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    for i in range(4):
        arrive(f"two a phase {i}", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    arrive("noComplete", "mbarrier.arrive.noComplete.shared::cta.b64 %s, [%r100], 1;")
    arrive("then one", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    arrive("drop with tx", "mbarrier.arrive_drop.expect_tx.shared::cta.b64 %s, [%r100], 8;")
    w("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100], 8;")
    look("drop with tx done")
    arrive("one a phase", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    w("mbarrier.inval.shared::cta.b64 [%r100]; mbarrier.init.shared::cta.b64 [%r100], 1048575;")
    arrive("largest count", "mbarrier.arrive.shared::cta.b64 %s, [%r100], 1048574;")
    arrive("largest count, last", "mbarrier.arrive.shared::cta.b64 %s, [%r100];")
    w("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r100], 0, 100;")
    w.flag("try_wait with a time limit", "%p2")
    w("OUT:")
    return w.entry("mbarrier_states", shared=64)


_RING = f"""
mov.u32 %r100, smem; add.u32 %r101, %r100, 8; setp.eq.u32 %p1, %thread, 0;
@%p1 mbarrier.init.shared::cta.b64 [%r100], 1; @%p1 mbarrier.init.shared::cta.b64 [%r101], 64; bar.sync 0;
mov.u32 %r5, 0; mov.u32 %r6, 0; setp.ge.u32 %p2, %thread, 32;
LOOP: and.b32 %r4, %r5, 1; xor.b32 %r3, %r4, 1;
@%p2 bra READER;
{wait("%r3", "%r101")}
@%p1 st.shared.b32 [%r100+16], %r5;
@%p1 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r100];
bra NEXT;
READER: {wait("%r4", "%r100")}
ld.shared.b32 %r10, [%r100+16]; mad.lo.s32 %r6, %r6, 10, %r10; mbarrier.arrive.release.cta.shared::cta.b64 _, [%r101];
NEXT: add.s32 %r5, %r5, 1; setp.lt.u32 %p3, %r5, 9; @%p3 bra LOOP;
st.global.b32 [%mine], %r6;
"""

_NAMED = """
mov.u32 %r1, smem; setp.ge.u32 %p1, %thread, 32; mov.b32 %r5, 0; mov.b32 %r6, 0;
LOOP: @%p1 bra CONSUMER;
bar.sync 2, 64; st.shared.b32 [%r1], %r5; bar.arrive 1, 64; bra NEXT;
CONSUMER: bar.arrive 2, 64; bar.sync 1, 64; ld.shared.b32 %r3, [%r1]; mad.lo.s32 %r6, %r6, 3, %r3;
NEXT: add.s32 %r5, %r5, 1; setp.lt.u32 %p2, %r5, 7; @%p2 bra LOOP;
bar.sync 0; st.global.b32 [%mine], %r6;
"""


def _reductions() -> Entry:
    w = Writer(96)
    w(
        "mad.wide.u32 %x1, %thread, 4, %in; ld.global.b32 %r1, [%x1]; and.b32 %r2, %r1, 1; setp.ne.u32 %p1, %r2, 0; setp.lt.u32 %p2, %thread, 200; mov.u32 %r9, 5;"
    )
    for p in ("%p1", "!%p1", "%p2", "!%p2"):
        w(f"barrier.cta.red.popc.aligned.u32 %r3, 0, {p};")
        w.out(f"popc {p}", "%r3")
        for mode in ("and", "or"):
            w(f"bar.red.{mode}.pred %p3, %r9, {p};")
            w.flag(f"{mode} {p}", "%p3")
    w(
        "setp.lt.u32 %p4, %thread, 64; mov.u32 %r4, 0; @!%p4 bra SKIP; bar.red.popc.u32 %r4, 3, 64, %p1; SKIP: bar.sync 0;"
    )
    w.out("popc of 64", "%r4")
    return w.entry("barrier_reductions", np.random.default_rng(3).integers(0, 2**32, 96, dtype=np.uint32))


_NOTHING = """
griddepcontrol.launch_dependents; griddepcontrol.wait; setmaxnreg.dec.sync.aligned.u32 40; nanosleep.u32 20;
membar.cta; membar.gl; membar.sys; fence.acq_rel.gpu; fence.sc.cluster; fence.proxy.alias; fence.proxy.async; fence.proxy.async.global;
fence.proxy.async.shared::cta; fence.acquire.sync_restrict::shared::cluster.cluster; fence.proxy.tensormap::generic.release.gpu;
setmaxnreg.inc.sync.aligned.u32 80; mad.lo.u32 %r1, %thread, 7, 3;
setp.gt.u32 %p1, %thread, 100; @%p1 exit; setp.lt.u32 %p2, %thread, 3; @%p2 ret; st.global.b32 [%mine], %r1;
"""


def entries() -> list[Entry]:
    """The kernels of barriers."""
    nothing = _NOTHING.replace("fence.acquire.sync_restrict::shared::cluster.cluster;", "")
    return [
        _mbarrier(),
        single("mbarrier_ring", _RING, b"", 96, block=96, shared=64),
        single("barrier_named", _NAMED, b"", 64, block=64, shared=64),
        _reductions(),
        single("fences_and_hints", nothing, b"", 128, block=128, tuning=".maxnreg 96\n"),
    ]
