"""ldmatrix, stmatrix, movmatrix, mma.sync (PTX ISA 9.7.14.5) and wgmma (9.7.15)."""

# ruff: noqa: E501, PERF401 - lines of PTX; tables grow one row at a time
from __future__ import annotations

from typing import Any

import numpy as np
from ptxsim.silicon.entries import Close, Entry, Writer

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "f64": 64}
_FP8 = {"e4m3": (3, 7), "e5m2": (2, 15)}


def _fp8(values: Any, kind: str) -> Any:
    """Codes of values that the format has."""
    bits, bias = _FP8[kind]
    mantissa, exponent = np.frexp(np.abs(values))
    code = ((exponent - 1 + bias) << bits) | ((mantissa * 2 - 1) * (1 << bits)).astype(np.int64)
    code = np.where(values == 0, 0, code)
    return (code | np.where(values < 0, 0x80, 0)).astype(np.uint8)


def codes(kind: str, count: int, seed: int, exact: bool) -> bytes:
    """`count` elements: integers of -4 to 4, or normally distributed numbers."""
    rng = np.random.default_rng([seed, count, exact])
    if kind in ("s8", "u8"):
        return rng.integers(0, 256, count, dtype=np.uint8).tobytes()
    values = rng.integers(-4, 5, count).astype(np.float64) if exact else rng.standard_normal(count)
    match kind:
        case "f16":
            return values.astype(np.float16).tobytes()
        case "bf16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
        case "tf32" | "f32":
            return values.astype(np.float32).tobytes()
        case "f64":
            return values.tobytes()
        case "s32":
            return rng.integers(-(2**20), 2**20, count, dtype=np.int32).tobytes()
        case _:
            if not exact:
                values = rng.choice(np.array([0, 0.5, -0.75, 1, -1.25, 1.5, -1.75, 2.5, -3, 0.25]), count)
            return _fp8(values, kind).tobytes()


def _shared_matrices() -> list[Entry]:
    w = Writer(64)
    w(
        "mov.u32 %r1, smem; mad.lo.u32 %r2, %thread, 16, %r1; mad.wide.u32 %x1, %thread, 16, %in; ld.global.v4.b32 {%r3, %r4, %r5, %r6}, [%x1];"
    )
    w(
        "st.shared.v4.b32 [%r2], {%r3, %r4, %r5, %r6}; mul.lo.u32 %r7, %lane, 5; add.u32 %r7, %r7, 3; and.b32 %r7, %r7, 31;"
    )
    w("mad.lo.u32 %r8, %warp, 32, %r7; mad.lo.u32 %r8, %r8, 16, %r1; bar.sync 0;")
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            registers = [f"%r{20 + i}" for i in range(count)]
            w(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{', '.join(registers)}}}, [%r8];")
            w.out(f"ldmatrix.x{count}{trans}", *registers)
    w("movmatrix.sync.aligned.m8n8.trans.b16 %r30, %r3;")
    w.out("movmatrix", "%r30")
    for count in (1, 2, 4):
        for trans in ("", ".trans"):
            w(
                f"bar.sync 0; st.shared.v4.b32 [%r2], {{%thread, %thread, %thread, %thread}}; bar.sync 0; stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r8], {{{', '.join(('%r3', '%r4', '%r5', '%r6')[:count])}}}; bar.sync 0; ld.shared.v4.b32 {{%r40, %r41, %r42, %r43}}, [%r2];"
            )
            w.out(f"stmatrix.x{count}{trans}", "%r40", "%r41", "%r42", "%r43")
    data = np.arange(512, dtype=np.uint16) * np.uint16(257) + np.uint16(3)
    return [w.entry("matrix_memory", data, shared=2048)]


_MMA = [
    *((k, t, t, acc) for t in ("f16",) for k in (8, 16) for acc in ("f32", "f16")),
    *((k, "bf16", "bf16", "f32") for k in (8, 16)), *((k, "tf32", "tf32", "f32") for k in (4, 8)),
    *((k, a, b, "f32") for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((k, a, b, "f16") for k in (16, 32) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")),
    *((k, a, b, "s32") for k in (16, 32) for a in ("s8", "u8") for b in ("s8", "u8")),
]  # fmt: skip


def mma_tolerance(a: str, acc: str) -> Close:
    """Products of standard normal numbers: the sum's order and the accumulator's width are the chip's own."""
    if acc == "f16":
        return Close("f16", 4e-3, 2e-2)
    return Close("f32", 1e-3, 2e-2 if a in _FP8 else 2e-5)


def _mma(name: str, forms: list[tuple[int, str, str, str]], satfinite: bool = False) -> Entry:
    """Warp 0 gets integers, warp 1 random numbers."""
    w, data, at = Writer(64), b"", 0
    for k, a, b, acc in forms:
        counts = (16 * k * _BITS[a] // 1024, 8 * k * _BITS[b] // 1024, 2 if acc == "f16" else 4)
        names = []
        for which, (kind, count) in enumerate(zip((a, b, acc), counts, strict=True)):
            each = count * 32 // _BITS.get(kind, 32) * 32
            for exact in (True, False):
                block = codes(kind, each, at + which, exact)
                if satfinite and kind == "s32":
                    block = np.where(np.arange(each) % 2, 2**31 - 5, -(2**31) + 5).astype(np.int32).tobytes()
                data += block
            names.append([f"%r{10 + 10 * which + i}" for i in range(count)])
            w(f"mad.wide.u32 %x1, %thread, {4 * count}, %in;")
            w(*(f"ld.global.b32 {r}, [%x1+{at + 4 * i}];" for i, r in enumerate(names[-1])))
            at += 64 * 4 * count
        d = [f"%r{40 + i}" for i in range(counts[2])]
        sat = ".satfinite" if satfinite else ""
        vectors = [f"{{{', '.join(group)}}}" for group in (d, *names)]
        w(f"mma.sync.aligned.m16n8k{k}.row.col{sat}.{acc}.{a}.{b}.{acc} {', '.join(vectors)};")
        size = 2 if acc == "f16" else 4
        per = 32 * counts[2] * 4 // size
        first = w.reserve(f"m16n8k{k} {a} {b} {acc} integers", size, per)
        second = w.reserve(
            f"m16n8k{k} {a} {b} {acc} random", size, per, None if acc == "s32" else mma_tolerance(a, acc)
        )
        assert second - first == per * size
        w(f"mad.wide.u32 %x49, %thread, {4 * counts[2]}, %out;")
        w(*(f"st.global.b32 [%x49+{first + 4 * i}], {r};" for i, r in enumerate(d)))
    return w.entry(name, data)


# -- wgmma -------------------------------------------------------------------------------------------

_LAYOUT = {"none": 0, "128B": 1, "64B": 2, "32B": 3}


def descriptor(offset: int, leading: int, stride: int, swizzle: str) -> str:
    """PTX that adds the constant fields of a shared-memory descriptor to an address in %x40 (>> 4)."""
    fields = ((leading >> 4) << 16) | ((stride >> 4) << 32) | (_LAYOUT[swizzle] << 62)
    return f"add.u64 %x41, %x40, {offset >> 4}; or.b64 %x41, %x41, {fields:#x};"


_SPAN = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
_OPERAND_BYTES = 20480


def _wgmma_entry(name: str, forms: list[dict[str, Any]], kind_a: str, kind_b: str, exact: bool) -> Entry:
    w = Writer(128)
    w(
        "mov.u32 %r100, smem; mov.u32 %r101, %thread; mov.u64 %x1, %in; mad.wide.u32 %x1, %thread, 16, %x1; mad.lo.u32 %r102, %thread, 16, %r100;"
    )
    w(
        f"FILL: ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%x1]; st.shared.v4.b32 [%r102], {{%r1, %r2, %r3, %r4}}; add.u64 %x1, %x1, 2048; add.u32 %r102, %r102, 2048; add.u32 %r101, %r101, 128; setp.lt.u32 %p1, %r101, {2 * _OPERAND_BYTES // 16}; @%p1 bra FILL;"
    )
    w("fence.proxy.async.shared::cta; bar.sync 0; shr.u32 %r103, %r100, 4; cvt.u64.u32 %x40, %r103;")
    w(
        f"mad.wide.u32 %x2, %thread, 16, %in; ld.global.v4.b32 {{%r90, %r91, %r92, %r93}}, [%x2+{2 * _OPERAND_BYTES}]; mov.pred %p3, 1; setp.ne.u32 %p4, %thread, %thread;"
    )
    for f in forms:
        n, k, acc = f["n"], 256 // _BITS[kind_a], f["acc"]
        count = n // 4 if acc == "f16" else n // 2
        d = [f"%w{len(w.columns)}_{i}" for i in range(count)]
        w(f".reg .{'b32' if acc != 'f32' else 'f32'} {', '.join(d)};")
        start = {"f32": "0f40400000", "f16": "0x42004200", "s32": "3"}[acc]
        w(*(f"mov.b32 {r}, {start};" for r in d))
        a = "%x42"
        w(descriptor(0, *f["a"]) + " mov.b64 %x42, %x41;" if f.get("a") else "")
        if not f.get("a"):
            a = "{%r90, %r91, %r92, %r93}"
        w(descriptor(_OPERAND_BYTES, *f["b"]))
        tail = f.get("tail", "")
        accumulate = f.get("accumulate", True)
        w("wgmma.fence.sync.aligned;")
        w(
            f"wgmma.mma_async.sync.aligned.m64n{n}k{k}.{acc}.{kind_a}.{kind_b} {{{', '.join(d)}}}, {a}, %x41, {'%p3' if accumulate else '%p4'}{tail};"
        )
        w("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
        close = None if exact or acc == "s32" else mma_tolerance(kind_a, acc)
        w.out(f"m64n{n}k{k} {acc} {kind_a} {kind_b} {f['name']}", *d, close=close) if acc != "f16" else _out_halves(
            w, f"m64n{n}k{k} f16 {f['name']}", d, close
        )
    data = codes(kind_a, _OPERAND_BYTES * 8 // _BITS[kind_a], 5, exact) + codes(
        kind_b, _OPERAND_BYTES * 8 // _BITS[kind_b], 6, exact
    )
    return w.entry(name, data + codes(kind_a, 2048 * 8 // _BITS[kind_a], 7, exact), shared=2 * _OPERAND_BYTES)


def _out_halves(w: Writer, name: str, d: list[str], close: Close | None) -> None:
    at = w.reserve(name, 2, 128 * 2 * len(d), close)
    w(
        f"mad.wide.u32 %x49, %thread, {4 * len(d)}, %out;",
        *(f"st.global.b32 [%x49+{at + 4 * i}], {r};" for i, r in enumerate(d)),
    )


def _k_major(swizzle: str) -> tuple[int, int, str]:
    """(leading, stride, swizzle): rows of the swizzle's span; without one, core matrices of 128 bytes, K first."""
    return (128, 256, swizzle) if swizzle == "none" else (16, 8 * _SPAN[swizzle], swizzle)


def _wgmma() -> list[Entry]:
    found = []
    for kind in ("f16", "bf16"):
        plain = ", 1, 1, 0, 0"
        forms: list[dict[str, Any]] = []
        for swizzle in _LAYOUT:
            for n in (8, 64):
                forms.append(
                    {
                        "n": n,
                        "acc": "f32",
                        "a": _k_major(swizzle),
                        "b": _k_major(swizzle),
                        "tail": plain,
                        "name": f"K {swizzle}",
                    }
                )
        forms.append(
            {
                "n": 16,
                "acc": "f32",
                "a": _k_major("128B"),
                "b": _k_major("64B"),
                "tail": ", -1, 1, 0, 0",
                "name": "negated A",
            }
        )
        forms.append(
            {
                "n": 24,
                "acc": "f32",
                "a": _k_major("32B"),
                "b": _k_major("none"),
                "tail": ", 1, -1, 0, 0",
                "name": "negated B",
            }
        )
        forms.append(
            {
                "n": 16,
                "acc": "f32",
                "a": _k_major("128B"),
                "b": _k_major("128B"),
                "tail": plain,
                "accumulate": False,
                "name": "scale-d 0",
            }
        )
        forms.append({"n": 32, "acc": "f32", "b": _k_major("128B"), "tail": ", 1, 1, 0", "name": "A in registers"})
        for swizzle in ("32B", "64B", "128B"):
            # MN-major: an atom holds span / 2 elements of M by 8 of K, atoms of K `stride` apart, of M `leading`.
            atom = 8 * _SPAN[swizzle]
            mn = (2 * atom, atom, swizzle)
            forms.append(
                {
                    "n": 64,
                    "acc": "f32",
                    "a": _k_major("128B"),
                    "b": mn,
                    "tail": ", 1, 1, 0, 1",
                    "name": f"B by N {swizzle}",
                }
            )
            forms.append(
                {
                    "n": 16,
                    "acc": "f32",
                    "a": mn,
                    "b": _k_major("128B"),
                    "tail": ", 1, 1, 1, 0",
                    "name": f"A by M {swizzle}",
                }
            )
            forms.append(
                {"n": 128, "acc": "f32", "b": mn, "tail": ", 1, 1, 1", "name": f"B by N {swizzle} A in registers"}
            )
        forms.append(
            {
                "n": 64,
                "acc": "f32",
                "a": _k_major("128B"),
                "b": (128, 1024, "none"),
                "tail": ", 1, 1, 0, 1",
                "name": "B by N none",
            }
        )
        forms.append(
            {
                "n": 16,
                "acc": "f32",
                "a": (1024, 128, "none"),
                "b": _k_major("128B"),
                "tail": ", 1, 1, 1, 0",
                "name": "A by M none",
            }
        )
        found.append(_wgmma_entry(f"wgmma_{kind}", forms, kind, kind, True))
        found.append(_wgmma_entry(f"wgmma_{kind}_random", forms[:2], kind, kind, False))
        if kind == "f16":
            halves = [f | {"acc": "f16"} for f in forms if f["n"] in (8, 16)]
            found.append(_wgmma_entry("wgmma_f16_halves", halves, kind, kind, True))
    for a, b, acc in (
        ("tf32", "tf32", "f32"),
        ("e4m3", "e4m3", "f32"),
        ("e5m2", "e4m3", "f32"),
        ("e4m3", "e5m2", "f16"),
        ("s8", "s8", "s32"),
        ("u8", "s8", "s32"),
        ("s8", "u8", "s32"),
        ("u8", "u8", "s32"),
    ):
        signs = "" if acc == "s32" else ", 1, 1"
        forms = [
            {"n": n, "acc": acc, "a": _k_major(s), "b": _k_major(s), "tail": signs, "name": f"K {s}"}
            for s, n in (("none", 8), ("32B", 16), ("64B", 24), ("128B", 64))
        ]
        forms.append({"n": 16, "acc": acc, "b": _k_major("128B"), "tail": signs, "name": "A in registers"})
        forms.append(
            {
                "n": 8,
                "acc": acc,
                "a": _k_major("128B"),
                "b": _k_major("128B"),
                "tail": signs,
                "accumulate": False,
                "name": "scale-d 0",
            }
        )
        found.append(_wgmma_entry(f"wgmma_{a}_{b}_{acc}", forms, a, b, True))
        if acc != "s32":
            found.append(_wgmma_entry(f"wgmma_{a}_{b}_{acc}_random", forms[:2], a, b, False))
    return found


def entries() -> list[Entry]:
    """The matrix kernels."""
    integers = [f for f in _MMA if f[3] == "s32"]
    return [
        *_shared_matrices(),
        _mma("mma_16_bit", [f for f in _MMA if f[1] in ("f16", "bf16")]),
        _mma("mma_tf32", [f for f in _MMA if f[1] == "tf32"]),
        _mma("mma_fp8", [f for f in _MMA if f[1] in _FP8]),
        _mma("mma_int8", integers),
        _mma("mma_int8_satfinite", integers, satfinite=True),
        *_wgmma(),
    ]
