"""ld, st, atom, red, cvta, isspacep in every state space (PTX ISA 9.7.9, 9.7.13.5, 9.7.13.6)."""

# ruff: noqa: E501, PERF401 - lines of PTX; tables grow one row at a time
from __future__ import annotations

import numpy as np
from ptxsim.silicon.entries import Entry, Op, raw, single, table
from ptxsim.silicon.patterns import triples

_LOAD_HINTS = (".ca", ".cg", ".cs", ".lu", ".cv", ".nc", ".nc.L1::no_allocate", ".L1::evict_first", ".L1::evict_last", ".L1::evict_unchanged",
               ".L1::no_allocate", ".L2::64B", ".L2::128B", ".L2::256B", ".nc.L2::256B", ".L1::evict_last.L2::128B")  # fmt: skip


def _loads() -> list[Op]:
    here = "mad.wide.u32 %lt0, %i, 8, %in;"
    ops = []
    for space in ("global", "generic"):
        name = ".global" if space == "global" else ""
        for kind in ("u8", "s8", "b8"):
            ops += [
                raw(f"ld{name}.{kind} b{r}", f"{here} ld{name}.{kind} %d, [%lt0+3];", f"b{r}") for r in (16, 32, 64)
            ]
        for kind in ("u16", "s16", "b16"):
            ops += [
                raw(f"ld{name}.{kind} b{r}", f"{here} ld{name}.{kind} %d, [%lt0+6];", f"b{r}") for r in (16, 32, 64)
            ]
        for kind in ("u32", "s32", "f32", "b32"):
            ops += [raw(f"ld{name}.{kind}", f"{here} ld{name}.{kind} %d, [%lt0+4];", "b32")]
        ops += [raw(f"ld{name}.{kind} b64", f"{here} ld{name}.{kind} %d, [%lt0+4];", "b64") for kind in ("u32", "s32")]
        ops += [
            raw(f"ld{name}.{kind}", f"{here} ld{name}.{kind} %d, [%lt0];", "b64")
            for kind in ("u64", "s64", "f64", "b64")
        ]
    for hint in _LOAD_HINTS:
        ops.append(raw(f"ld.global{hint}", f"{here} ld.global{hint}.b32 %d, [%lt0];"))
    for order in (
        "weak",
        "volatile",
        "relaxed.cta",
        "relaxed.cluster",
        "relaxed.gpu",
        "relaxed.sys",
        "acquire.gpu",
        "acquire.cta",
    ):
        text = f"ld.{order}.global.b32" if order != "volatile" else "ld.volatile.global.b32"
        ops.append(raw(text, f"{here} {text} %d, [%lt0];"))
    pair = "mad.wide.u32 %lt0, %i, 8, %in; "
    quad = "and.b32 %t8, %i, 0xfffffffe; mad.wide.u32 %lt0, %t8, 8, %in; "
    ops.append(
        raw("ld.v2.b32", pair + "ld.global.v2.b32 {%t0, %t1}, [%lt0]; shl.b32 %t1, %t1, 1; xor.b32 %d, %t0, %t1;")
    )
    ops.append(
        raw(
            "ld.v4.b32",
            quad
            + "ld.global.v4.b32 {%t0, %t1, %t2, %t3}, [%lt0]; shl.b32 %t1, %t1, 1; shl.b32 %t2, %t2, 2; shl.b32 %t3, %t3, 3; xor.b32 %d, %t0, %t1; xor.b32 %d, %d, %t2; xor.b32 %d, %d, %t3;",
        )
    )
    ops.append(
        raw(
            "ld.v2.b64",
            quad + "ld.global.v2.b64 {%lt1, %lt2}, [%lt0]; shl.b64 %lt2, %lt2, 1; xor.b64 %d, %lt1, %lt2;",
            "b64",
        )
    )
    ops.append(
        raw(
            "ld.v2.u16",
            pair + "ld.global.v2.u16 {%ht0, %ht1}, [%lt0]; shl.b16 %ht1, %ht1, 1; xor.b16 %d, %ht0, %ht1;",
            "b16",
        )
    )
    ops.append(
        raw(
            "ld.v4.u16",
            pair
            + "ld.global.v4.u16 {%ht0, %ht1, %ht2, %ht3}, [%lt0]; mov.b64 %lt1, {%ht3, %ht2, %ht1, %ht0}; mov.b64 %d, %lt1;",
            "b64",
        )
    )
    ops.append(
        raw(
            "ld.v4.u8",
            pair + "ld.global.v4.u8 {%ht0, %ht1, %ht2, %ht3}, [%lt0]; mov.b64 %d, {%ht3, %ht2, %ht1, %ht0};",
            "b64",
        )
    )
    ops.append(raw("ld.v2.s8", pair + "ld.global.v2.s8 {%t0, %t1}, [%lt0+2]; sub.s32 %d, %t0, %t1;"))
    for text in (
        "fractional.L2::evict_last.b64 %lt1, 1.0",
        "fractional.L2::evict_first.L2::evict_unchanged.b64 %lt1, 0.5",
    ):
        ops.append(
            raw(
                f"cache hint {text.split()[0]}",
                f"{here} createpolicy.{text}; ld.global.L2::cache_hint.b32 %d, [%lt0], %lt1;",
            )
        )
    for text in (
        "prefetch.global.L1 [%lt0];",
        "prefetch.global.L2 [%lt0];",
        "prefetch.global.L2::evict_last [%lt0];",
        "prefetchu.L1 [%lt0];",
    ):
        ops.append(raw(text, f"{here} {text} ld.global.b32 %d, [%lt0];"))
    ops.append(raw("ldu", "ldu.global.b32 %d, [%in+16];"))
    return ops


def _spaces() -> list[Op]:
    ops = [
        raw("mov.b64 pack", "mov.b64 %d, {%b, %a};", "b64"), raw("mov.b64 unpack", "mov.b64 {%t0, %t1}, %la; sub.u32 %d, %t0, %t1;"),
        raw("mov.b32 pack", "mov.b32 %d, {%hb, %ha};"), raw("mov.b32 unpack", "mov.b32 {%ht0, %ht1}, %a; sub.u16 %d, %ht0, %ht1;", "b16"),
        raw("mov.b64 of four", "mov.b64 {%ht0, %ht1, %ht2, %ht3}, %la; mov.b64 %d, {%ht1, %ht0, %ht3, %ht2};", "b64"),
        raw("mov.b64 discard", "mov.b64 {_, %t1}, %la; mov.b32 %d, %t1;"),
        raw("mov.pred", "mov.pred %d, %pa;", "pred"),
        raw("param u8", "ld.param.u8 %d, [n_+1];"), raw("param s8", "ld.param.s8 %d, [n_];"), raw("param u16", "ld.param.u16 %d, [n_];", "b16"),
        raw("const", "and.b32 %t0, %a, 15; cvt.u64.u32 %lt0, %t0; mov.u64 %lt1, words; mad.lo.s64 %lt0, %lt0, 4, %lt1; ld.const.u32 %d, [%lt0];"),
        raw("const offset", "ld.const.s16 %d, [words+6];"), raw("const v4", "ld.const.v4.u32 {%t0, %t1, %t2, %t3}, [words+16]; add.u32 %d, %t0, %t2; sub.u32 %d, %d, %t1; add.u32 %d, %d, %t3;"),
        raw("const generic", "mov.u64 %lt1, words; cvta.const.u64 %lt1, %lt1; ld.u32 %d, [%lt1+8];"),
        raw("global table", "and.b32 %t0, %b, 7; mul.wide.u32 %lt0, %t0, 8; mov.u64 %lt1, table; add.u64 %lt0, %lt0, %lt1; ld.global.u64 %d, [%lt0];", "b64"),
        raw("global generic", "mov.u64 %lt1, table; cvta.global.u64 %lt1, %lt1; ld.u64 %d, [%lt1+16];", "b64"),
    ]  # fmt: skip
    ops.append(
        raw(
            "local words",
            """{ .local .align 16 .b8 stack[64]; .reg .b64 %q; .reg .b32 %s0, %s1;
st.local.u32 [stack], %a; st.local.u32 [stack+4], %b; st.local.v2.u32 [stack+8], {%c, %a}; and.b32 %s0, %c, 3; shl.b32 %s0, %s0, 2;
mov.u32 %s1, stack; add.u32 %s0, %s0, %s1; ld.local.u32 %d, [%s0]; }""",
        )
    )
    ops.append(
        raw(
            "local bytes",
            """{ .local .align 16 .b8 frame[32]; .reg .b64 %q; .reg .b32 %s0; .reg .b64 %g0;
st.local.b64 [frame+8], %la; st.local.u8 [frame+9], %b; st.local.u16 [frame+12], %hc; mov.u64 %q, frame; cvta.local.u64 %g0, %q;
ld.b64 %d, [%g0+8]; }""",
            "b64",
        )
    )
    shared = "mov.u64 %lt1, smem; cvta.shared.u64 %lt1, %lt1;"
    for space, where in (("shared", shared), ("global", "mov.u64 %lt1, %in;"), ("local", "{ .local .b32 word; mov.u64 %lt1, word; cvta.local.u64 %lt1, %lt1; }"),
                         ("const", "mov.u64 %lt1, words; cvta.const.u64 %lt1, %lt1;")):  # fmt: skip
        for asked in ("shared", "shared::cta", "shared::cluster", "global", "local", "const"):
            ops.append(raw(f"isspacep.{asked} of {space}", f"{where} isspacep.{asked} %d, %lt1;", "pred"))
    return ops


_VARIABLES = """.const .align 16 .b32 words[16] = {1, 0x80000000, 3, 0xfffefffd, 5, 60, 700, 8000, 9, 10, 11, 12, 13, 14, 0xffffffff, 16};
.global .align 16 .b64 table[8] = {0x0123456789abcdef, 2, 3, 0xfedcba9876543210, 5, 6, 7, 8};
"""

_INTEGER_OPS = ("add", "min", "max", "exch", "and", "or", "xor", "inc", "dec", "cas")


def _atomics() -> list[tuple[str, str, str]]:
    """(operation, type, register type) of every scalar atomic."""
    found = [("add", k, "b32") for k in ("u32", "s32")] + [("add", "u64", "b64")]
    found += [(o, k, f"b{k[1:]}") for o in ("min", "max") for k in ("u32", "s32", "u64", "s64")]
    found += [(o, k, k) for o in ("and", "or", "xor", "exch", "cas") for k in ("b32", "b64")]
    found += [(o, "u32", "b32") for o in ("inc", "dec")] + [("cas", "b16", "b16")]
    return found


def _atomic_kernel(space: str) -> Entry:
    """Each thread's own word, twice: the old value and what is left; then words that all threads share."""
    n, lines, columns = 64, [], []
    at = 0
    address = "%x9" if space == "global" else "%r190"
    names: list[tuple[str, int]] = []

    def out(name: str, register: str, size: int) -> None:
        nonlocal at
        lines.append(f"mad.wide.u32 %x8, %thread, {size}, %out; st.global.b{8 * size} [%x8+{at}], {register};")
        names.append((name, size))
        at += size * n

    forms = [(o, k, r, False) for o, k, r in _atomics()]
    floats = [("add", "f32", "b32"), ("add", "f64", "b64"), ("add.noftz", "f16", "b16"), ("add.noftz", "f16x2", "b32"),
              ("add.noftz", "bf16", "b16"), ("add.noftz", "bf16x2", "b32")]  # fmt: skip
    forms += [(o, k, r, False) for o, k, r in floats]
    lines.append(
        "mad.wide.u32 %x1, %thread, 24, %in; ld.global.b64 %x2, [%x1]; ld.global.b64 %x3, [%x1+8]; ld.global.b64 %x4, [%x1+16];"
    )
    for i, r in enumerate(("%x2", "%x3", "%x4")):
        lines.append(f"cvt.u32.u64 %r{10 + i}, {r}; cvt.u16.u64 %h{10 + i}, {r};")
    lines.append("mov.u32 %r189, smem; mad.lo.u32 %r190, %thread, 8, %r189; mad.wide.u32 %x9, %thread, 8, %x10;")
    file = {
        "b16": ("%h10", "%h11", "%h12", "%h20"),
        "b32": ("%r10", "%r11", "%r12", "%r20"),
        "b64": ("%x2", "%x3", "%x4", "%x20"),
    }
    for operation, kind, register, _ in forms:
        a, b, c, d = file[register]
        size = int(register[1:]) // 8
        lines.append(f"st.{space}.{register} [{address}], {a};")
        extra = f", {c}" if operation == "cas" else ""
        lines.append(f"atom.{space}.{operation}.{kind} {d}, [{address}], {b}{extra};")
        out(f"atom.{operation}.{kind}", d, size)
        lines.append(f"ld.{space}.{register} {d}, [{address}];")
        out(f"atom.{operation}.{kind} left", d, size)
        if operation not in ("exch", "cas") and kind not in ("f16", "bf16"):
            lines.append(
                f"st.{space}.{register} [{address}], {a}; red.relaxed.gpu.{space}.{operation}.{kind} [{address}], {b}; ld.{space}.{register} {d}, [{address}];"
            )
            out(f"red.{operation}.{kind}", d, size)
        if operation == "cas":
            lines.append(
                f"st.{space}.{register} [{address}], {b}; atom.acq_rel.cta.{space}.cas.{kind} {d}, [{address}], {b}, {c}; ld.{space}.{register} {d}, [{address}];"
            )
            out(f"atom.cas.{kind} equal", d, size)
    for operation, kind in [
        ("add", "u32"),
        ("min", "s32"),
        ("max", "u32"),
        ("and", "b32"),
        ("or", "b32"),
        ("xor", "b32"),
        ("inc", "u32"),
        ("dec", "u32"),
    ]:
        word = f"[{'%x10' if space == 'global' else '%r189'}]"
        operand = {"inc": "20", "dec": "20"}.get(operation, "%r10")
        lines.append(
            f"bar.sync 0; setp.eq.u32 %p1, %thread, 0; @%p1 st.{space}.b32 {word}, 17; bar.sync 0; atom.{space}.{operation}.{kind} %r30, {word}, {operand}; bar.sync 0; ld.{space}.b32 %r31, {word};"
        )
        out(f"contended {operation}.{kind}", "%r31", 4)
    from ptxsim.silicon.entries import Column

    scratch = at
    if space == "global":
        lines.insert(0, f"add.u64 %x10, %out, {scratch};")
        at += 8 * n
    else:
        lines.insert(0, "mov.u64 %x10, %out;")
    columns = tuple(Column(f"{name} {space}", size, n) for name, size in names)
    if space == "global":
        columns = (*columns, Column("scratch", 8, n))
    a, b, c = triples("i", n, seed=53)
    data = np.stack([a, b, c], axis=1).tobytes()
    base = single(f"atomics_{space}", "\n".join(lines), data, 1, block=n, shared=1024)
    import dataclasses

    return dataclasses.replace(base, columns=columns)


def entries() -> list[Entry]:
    """The kernels of memory."""
    import dataclasses

    spaces = table("memory_spaces", _spaces(), triples("i", 128, seed=52))
    spaces = dataclasses.replace(spaces, directives=_VARIABLES, shared=64, count=128)
    stores = """
mad.wide.u32 %x1, %thread, 64, %out; mad.wide.u32 %x2, %thread, 16, %in; ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%x2];
mov.b64 %x3, {%r1, %r2}; mov.b64 %x4, {%r3, %r4}; cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2;
st.global.u8 [%x1], %r1; st.global.u8 [%x1+2], %h2; st.global.v2.u8 [%x1+4], {%h1, %h2}; st.global.b16 [%x1+6], %h1;
st.global.v4.u8 [%x1+8], {%r1, %r2, %r3, %r4}; st.global.v2.b16 [%x1+12], {%h2, %h1};
st.global.wt.b32 [%x1+16], %r3; st.global.cs.b32 [%x1+20], %r4; st.global.L1::no_allocate.v2.b32 [%x1+24], {%r2, %r1};
st.global.v4.b32 [%x1+32], {%r4, %r3, %r2, %r1}; st.release.gpu.global.b64 [%x1+48], %x3; st.volatile.global.b64 [%x1+56], %x4;
setp.lt.u32 %p1, %thread, 10; @%p1 st.global.u8 [%x1+15], 0x77;
"""
    shared = """
mov.u32 %r1, smem; mad.lo.u32 %r2, %thread, 16, %r1; mad.wide.u32 %x2, %thread, 16, %in; ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%x2];
st.shared.v4.b32 [%r2], {%r3, %r4, %r5, %r6}; cvt.u64.u32 %x3, %r2; cvta.shared.u64 %x3, %x3; st.u8 [%x3+3], %thread; bar.sync 0;
xor.b32 %r7, %thread, 5; mad.lo.u32 %r8, %r7, 16, %r1; ld.shared.v2.b32 {%r9, %r10}, [%r8]; ld.shared.s8 %r11, [%r8+9]; ld.shared.u16 %r12, [%r8+10];
cvt.u64.u32 %x4, %r8; cvta.shared.u64 %x4, %x4; ld.b32 %r13, [%x4+12];
mad.wide.u32 %x5, %thread, 20, %out; st.global.b32 [%x5], %r9; st.global.b32 [%x5+4], %r10; st.global.b32 [%x5+8], %r11; st.global.b32 [%x5+12], %r12; st.global.b32 [%x5+16], %r13;
"""
    vector = """
mad.wide.u32 %x1, %thread, 16, %out; ld.global.v2.f32 {%f1, %f2}, [%in]; red.global.add.v2.f32 [%x1], {%f1, %f2};
mov.f32 %f3, 0f3F800000; atom.global.v2.f32.add {%f4, %f5}, [%x1+8], {%f1, %f3}; add.f32 %f6, %f4, %f5; red.global.add.f32 [%x1], %f6;
"""
    wide = """
.reg .b128 %q<6>; mad.wide.u32 %x1, %thread, 48, %out; mad.wide.u32 %x2, %thread, 16, %in; ld.global.v2.b64 {%x3, %x4}, [%x2];
mov.b128 %q1, {%x3, %x4}; mov.b128 %q2, {%x4, %x3}; st.global.v2.b64 [%x1], {%x3, %x4}; atom.global.exch.b128 %q3, [%x1], %q2;
atom.global.cas.b128 %q4, [%x1], %q2, %q3; mov.b128 {%x5, %x6}, %q3; mov.b128 {%x7, %x8}, %q4;
st.global.v2.b64 [%x1+16], {%x5, %x6}; st.global.v2.b64 [%x1+32], {%x7, %x8};
"""
    words = np.arange(1, 513, dtype=np.uint32) * np.uint32(2654435761)
    ones = np.array([1.5, -2.25, 0, 0], np.float32)
    zeros = bytes(64 * 16)
    return [
        table("memory_loads", _loads(), triples("i", 128, seed=51)),
        spaces,
        single("memory_stores", stores, words, 64 * 16, block=64),
        single("memory_shared", shared, words, 64 * 5, block=64, shared=1024),
        _atomic_kernel("global"),
        _atomic_kernel("shared"),
        single("memory_vector_atomics", vector, ones, 64 * 4, block=64, seed_out=zeros),
        single("memory_b128_atomics", wide, words, 64 * 12, block=64),
    ]
