"""cp.async, cp.async.bulk, cp.reduce.async.bulk, clusters and distributed shared memory (PTX ISA 9.7.9.25, 9.7.13)."""

# ruff: noqa: E501 - lines of PTX
from __future__ import annotations

import numpy as np
from ptxsim.silicon.entries import Entry, Writer, single, wait
from ptxsim.silicon.groups.matrix import codes

_WORDS = (np.arange(1, 4097, dtype=np.uint32) * np.uint32(2654435761)).astype(np.uint32)


def _thread_copies() -> Entry:
    w = Writer(64)
    w(
        "mov.u32 %r1, smem; mad.lo.u32 %r2, %thread, 16, %r1; mad.wide.u32 %x1, %thread, 16, %in; and.b32 %r3, %thread, 3; mul.lo.u32 %r3, %r3, 5; setp.ne.u32 %p1, %r3, 0; min.u32 %r4, %r3, 4; min.u32 %r5, %r3, 8; createpolicy.fractional.L2::evict_first.b64 %x2, 1.0;"
    )
    forms = [
        ("ca 4", "cp.async.ca.shared.global [%r2], [%x1], 4;"), ("ca 8", "cp.async.ca.shared.global [%r2+8], [%x1+8], 8;"),
        ("ca 16", "cp.async.ca.shared::cta.global [%r2], [%x1+1024], 16;"), ("cg 16", "cp.async.cg.shared.global [%r2], [%x1+2048], 16;"),
        ("ca 4 part", "cp.async.ca.shared.global [%r2+4], [%x1+4], 4, %r4;"), ("ca 8 part", "cp.async.ca.shared.global [%r2], [%x1], 8, %r5;"),
        ("cg 16 part", "cp.async.cg.shared.global [%r2], [%x1+16], 16, %r3;"), ("ignored", "cp.async.ca.shared.global [%r2], [%x1], 16, %p1;"),
        ("prefetch", "cp.async.cg.shared.global.L2::128B [%r2], [%x1+64], 16;"), ("cache hint", "cp.async.cg.shared.global.L2::cache_hint [%r2], [%x1+128], 16, %x2;"),
    ]  # fmt: skip
    for name, text in forms:
        w(
            "st.shared.v4.b32 [%r2], {%thread, %thread, %thread, %thread}; bar.sync 0;",
            text,
            "cp.async.wait_all; bar.sync 0; xor.b32 %r6, %thread, 37; mad.lo.u32 %r6, %r6, 16, %r1; ld.shared.v4.b32 {%r10, %r11, %r12, %r13}, [%r6]; bar.sync 0;",
        )
        w.out(name, "%r10", "%r11", "%r12", "%r13")
    for i in range(4):
        w(f"cp.async.ca.shared.global [%r2+{4 * i}], [%x1+{256 * i}], 4; cp.async.commit_group;")
    for i in (3, 2, 0):
        w(f"cp.async.wait_group {i}; ld.shared.b32 %r10, [%r2+{4 * (3 - i)}];")
        w.out(f"wait_group {i}", "%r10")
    w(
        f"bar.sync 0; add.u32 %r100, %r1, 1024; setp.eq.u32 %p2, %thread, 0; @%p2 mbarrier.init.shared::cta.b64 [%r100], 64; bar.sync 0; cp.async.cg.shared.global [%r2], [%x1+512], 16; cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r100]; {wait('0')} xor.b32 %r6, %thread, 37; mad.lo.u32 %r6, %r6, 16, %r1; ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r6];"
    )
    w.out("mbarrier.arrive.noinc", "%r10", "%r11", "%r12", "%r13")
    w(
        f"bar.sync 0; cp.async.cg.shared.global [%r2], [%x1+768], 16; cp.async.mbarrier.arrive.shared::cta.b64 [%r100]; mbarrier.arrive.shared::cta.b64 _, [%r100]; {wait('1')} xor.b32 %r6, %thread, 37; mad.lo.u32 %r6, %r6, 16, %r1; ld.shared.v4.b32 {{%r10, %r11, %r12, %r13}}, [%r6];"
    )
    w.out("mbarrier.arrive", "%r10", "%r11", "%r12", "%r13")
    return w.entry("async_thread_copies", _WORDS, shared=1088)


_INIT = "mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 1; fence.mbarrier_init.release.cluster; bar.sync 0;"
_FILL = "mov.u32 %r110, smem; add.u32 %r110, %r110, 1024; mad.lo.u32 %r110, %thread, 16, %r110; mad.wide.u32 %x30, %thread, 16, %in; ld.global.v4.b32 {%r111, %r112, %r113, %r114}, [%x30]; st.shared.v4.b32 [%r110], {%r111, %r112, %r113, %r114}; fence.proxy.async; bar.sync 0;"


def _bulk() -> list[Entry]:
    load = f"""{_INIT} add.u32 %r1, %r100, 1024; createpolicy.fractional.L2::evict_last.b64 %x2, 1.0; mov.u32 %r2, 496;
@!%p1 bra WAITING; cp.async.bulk.prefetch.L2.global [%in], 1024; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 1024;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%in+16], 512, [%r100];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r1+512], [%in+2048], %r2, [%r100], %x2;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r1+1008], [%in+96], 16, [%r100];
WAITING: {wait("0")} mad.lo.u32 %r3, %thread, 4, %r1; ld.shared.b32 %r4, [%r3]; ld.shared.b32 %r5, [%r3+512];
st.global.b32 [%mine], %r4; st.global.b32 [%mine+512], %r5;"""
    store = f"""{_INIT} {_FILL} @!%p1 bra DONE; add.u32 %r1, %r100, 1024; mov.u32 %r2, 640;
cp.async.bulk.global.shared::cta.bulk_group [%out+32], [%r1], %r2; cp.async.bulk.commit_group;
cp.async.bulk.global.shared::cta.bulk_group [%out+1024], [%r1+1024], 1008; cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1; cp.async.bulk.wait_group 0; DONE: """
    found = [
        single("bulk_load", load, _WORDS, 256, block=128, shared=4096),
        single("bulk_store", store, _WORDS, 512 + 64, block=128, shared=4096),
    ]
    for kind, operations in {
        "u32": ("add", "min", "max", "inc", "dec"), "s32": ("add", "min", "max"), "u64": ("add", "min", "max"),
        "s64": ("min", "max"), "b32": ("and", "or", "xor"), "b64": ("and", "or", "xor"), "f16": ("add", "min", "max"),
        "bf16": ("add", "min", "max"), "f32": ("add",), "f64": ("add",),
    }.items():  # fmt: skip
        size = {"f16": 2, "bf16": 2}.get(kind) or int(kind[1:]) // 8
        if kind[0] in "fb" and kind not in ("b32", "b64"):
            data, seed = codes(kind, 2048 // size, 3, True), codes(kind, 2048 * len(operations) // size, 4, True)
        else:
            data, seed = (
                _WORDS[:512].tobytes(),
                (_WORDS[: 512 * len(operations)] * np.uint32(40503) ^ np.uint32(77)).tobytes(),
            )
        lines = [f"{_INIT} {_FILL} @!%p1 bra DONE; add.u32 %r1, %r100, 1024;"]
        for i, operation in enumerate(operations):
            noftz = ".noftz" if operation == "add" and kind in ("f16", "bf16") else ""
            lines.append(
                f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}{noftz}.{kind} [%out+{2048 * i}], [%r1], 2032;"
            )
        lines.append("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; DONE:")
        found.append(
            single(
                f"bulk_reduce_{kind}",
                "\n".join(lines),
                data,
                512 * len(operations),
                block=128,
                shared=4096,
                seed_out=seed,
            )
        )
    return found


_ALL = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"


def _clusters() -> list[Entry]:
    shared = f"""mov.u32 %r1, smem; mad.lo.u32 %r2, %thread, 4, %r1; mad.lo.u32 %r3, %cta, 1000, %thread; st.shared.b32 [%r2], %r3; st.shared.b32 [%r2+256], %r3; {_ALL}
mov.u32 %r4, %cluster_ctarank; add.u32 %r5, %r4, 1; and.b32 %r5, %r5, 3; mapa.shared::cluster.u32 %r6, %r2, %r5; ld.shared::cluster.b32 %r7, [%r6];
mov.u64 %x1, smem; cvta.shared.u64 %x2, %x1; mapa.u64 %x3, %x2, %r5; mad.wide.u32 %x3, %thread, 4, %x3; ld.b32 %r8, [%x3];
getctarank.shared::cluster.u32 %r9, %r6; getctarank.u64 %r10, %x3; st.shared::cluster.b32 [%r6+512], %r3; atom.shared::cluster.add.u32 %r11, [%r6+256], 5; red.shared::cluster.add.u32 [%r6+256], 11;
{_ALL} ld.shared.b32 %r12, [%r2+512]; ld.shared.b32 %r13, [%r2+256]; mad.wide.u32 %x9, %g, 32, %out; isspacep.shared::cluster %p1, %x3; isspacep.shared::cta %p2, %x3; selp.u32 %r14, 1, 0, %p1; selp.u32 %r15, 2, 0, %p2; or.b32 %r14, %r14, %r15;
st.global.b32 [%x9], %r7; st.global.b32 [%x9+4], %r8; st.global.b32 [%x9+8], %r9; st.global.b32 [%x9+12], %r10; st.global.b32 [%x9+16], %r11; st.global.b32 [%x9+20], %r12; st.global.b32 [%x9+24], %r14; st.global.b32 [%x9+28], %r13; {_ALL}"""
    arrive = f"""mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 2; fence.mbarrier_init.release.cluster; {_ALL}
mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r100, %r5; mad.lo.u32 %r7, %thread, 4, %r6; mad.lo.u32 %r8, %cta, 77, %thread; st.shared::cluster.b32 [%r7+64], %r8; {_ALL}
@%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6]; @%p1 mbarrier.arrive.release.cluster.shared::cta.b64 _, [%r100];
{wait("0").replace(".acquire.cta", ".acquire.cluster")} mad.lo.u32 %r9, %thread, 4, %r100; ld.shared.b32 %r10, [%r9+64]; st.global.b32 [%mine], %r10; {_ALL}"""
    stasync = f"""mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 1; fence.mbarrier_init.release.cluster; mad.lo.u32 %r11, %thread, 16, %r100; st.shared.v4.b32 [%r11+64], {{%thread, 3, 4, 5}}; {_ALL}
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 512; mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r100, %r5; mapa.shared::cluster.u32 %r7, %r11, %r5;
mad.lo.u32 %r8, %cta, 99, %thread; cvt.u64.u32 %x1, %r8; st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r7+64], %r8, [%r6]; st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%r7+72], {{%r8, %thread}}, [%r6];
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r7+68], %r8, [%r6];
{_ALL} {wait("0").replace(".acquire.cta", ".acquire.cluster")} ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r11+64];
mad.wide.u32 %x9, %g, 16, %out; st.global.v4.b32 [%x9], {{%r20, %r21, %r22, %r23}}; {_ALL}"""
    bulk = f"""mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 1; fence.mbarrier_init.release.cluster; mad.lo.u32 %r11, %thread, 4, %r100; mad.lo.u32 %r8, %cta, 99, %thread; st.shared.b32 [%r11+64], %r8; fence.proxy.async; {_ALL}
@!%p1 bra READY2; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 128; mov.u32 %r4, %cluster_ctarank; xor.b32 %r5, %r4, 1; mapa.shared::cluster.u32 %r6, %r100, %r5;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r6+1024], [%r100+64], 128, [%r6];
READY2: {wait("0").replace(".acquire.cta", ".acquire.cluster")} ld.shared.b32 %r10, [%r11+1024]; st.global.b32 [%mine], %r10; {_ALL}"""
    multicast = f"""mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 1; fence.mbarrier_init.release.cluster; mov.u32 %r4, %cluster_ctarank; {_ALL}
@%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 384; {_ALL} @!%p1 bra READY2; setp.eq.u32 %p2, %r4, 0; mov.u16 %h1, 15; mov.u16 %h2, 11; setp.eq.u32 %p3, %r4, 1; setp.eq.u32 %p4, %r4, 2; mov.u16 %h3, 4;
@%p2 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r100+1024], [%in], 256, [%r100], %h1;
@%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r100+1280], [%in+512], 128, [%r100], %h2;
@%p4 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r100+1280], [%in+768], 128, [%r100], %h3;
READY2: {wait("0").replace(".acquire.cta", ".acquire.cluster")} mad.lo.u32 %r11, %thread, 4, %r100; ld.shared.b32 %r10, [%r11+1024]; st.global.b32 [%mine], %r10; {_ALL}"""
    tensors = "mov.u32 %r1, %cluster_ctaid.x; mov.u32 %r2, %clusterid.x; mad.lo.u32 %r3, %r2, 256, %r1; mov.u32 %r4, %cluster_nctaid.x; mad.lo.u32 %r3, %r4, 65536, %r3; mov.u32 %r5, %nclusterid.x; mad.lo.u32 %r3, %r5, 16777216, %r3; mov.pred %p1, %is_explicit_cluster; @%p1 st.global.b32 [%mine], %r3;"
    return [
        single("cluster_shared", shared, b"", 8 * 32 * 8, block=32, grid=8, cluster=4, shared=1024),
        single("cluster_arrive", arrive, b"", 4 * 32, block=32, grid=4, cluster=2, shared=256),
        single("cluster_store_async", stasync, b"", 4 * 32 * 4, block=32, grid=4, cluster=2, shared=1024),
        single("cluster_bulk", bulk, b"", 4 * 32, block=32, grid=4, cluster=2, shared=2048),
        single("cluster_bulk_multicast", multicast, _WORDS, 4 * 96, block=96, grid=4, cluster=4, shared=2048),
        single("cluster_registers", tensors, b"", 8 * 32, block=32, grid=8, cluster=4),
    ]


def entries() -> list[Entry]:
    """The kernels of asynchronous copies and clusters."""
    return [_thread_copies(), *_bulk(), *_clusters()]
