"""Tensor maps: loads, stores and reductions of boxes in one to five dimensions (PTX ISA 9.7.9.27)."""

# ruff: noqa: E501 - lines of PTX
from __future__ import annotations

from typing import Any

import numpy as np
from ptxsim.silicon.entries import Entry, Map, Writer, wait

_INIT = "mov.u32 %r100, smem; setp.eq.u32 %p1, %thread, 0; @%p1 mbarrier.init.shared::cta.b64 [%r100], 1; fence.mbarrier_init.release.cluster; mov.b64 %x1, map0; cvta.param.u64 %x1, %x1; bar.sync 0;"
_SIZE = {"uint8": 1, "uint16": 2, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "float32": 4, "float32_ftz": 4,
         "tfloat32": 4, "tfloat32_ftz": 4, "uint64": 8, "int64": 8, "float64": 8}  # fmt: skip
_POISON = "0xa5a5a5a5"


def _packed(extents: tuple[int, ...], size: int, pad: int = 0) -> tuple[int, ...]:
    """Strides of a dense array, rows rounded up to 16 bytes and then `pad` bytes apart."""
    strides, at = [], -(-extents[0] * size // 16) * 16 + pad
    for extent in extents[1:]:
        strides.append(at)
        at = at * extent
    return tuple(strides)


def _box_bytes(m: Map) -> int:
    """Bytes of a box in shared memory."""
    steps = m.steps or (1,) * len(m.box)
    counts = [m.box[0]] + [-(-b // s) for b, s in zip(m.box[1:], steps[1:], strict=True)]
    return int(np.prod(counts)) * _SIZE[m.dtype]


def load(name: str, m: Map, places: list[tuple[int, ...]], data: bytes, **options: Any) -> Entry:
    """Load the box at each place, and show all of shared memory that it could have touched."""
    w, size, rank = Writer(128), _box_bytes(m), len(m.box)
    words = -(-size // 512)  # 32-bit words a thread
    w(_INIT, "add.u32 %r101, %r100, 1024; mad.lo.u32 %r102, %thread, 4, %r101;")
    hint = "createpolicy.fractional.L2::evict_first.b64 %x3, 1.0;"
    w(
        hint,
        f"@%p1 cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile [%x1, {{{', '.join(map(str, places[0]))}}}]; @%p1 prefetch.tensormap [%x1];",
    )
    for i, place in enumerate(places):
        w(*(f"st.shared.b32 [%r102+{512 * j}], {_POISON};" for j in range(words)))
        w(
            f"fence.proxy.async.shared::cta; bar.sync 0; @!%p1 bra WAIT{i}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], {size};"
        )
        coords = f"{{{', '.join(map(str, place))}}}"
        if i % 2:
            w(
                f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r101], [%x1, {coords}], [%r100];"
            )
        else:
            w(
                f"cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r101], [%x1, {coords}], [%r100], %x3;"
            )
        w(f"WAIT{i}: {wait(str(i % 2))}")
        at = w.reserve(f"box at {place}", 4, 128 * words)
        w("mad.wide.u32 %x49, %thread, 4, %out;")
        for j in range(words):
            w(f"ld.shared.b32 %r1, [%r102+{512 * j}]; st.global.b32 [%x49+{at + 512 * j}], %r1;")
        w("bar.sync 0;")
    return w.entry(name, data, maps=(m,), shared=1024 + max(512 * words, 1024), **options)


def store(
    name: str, m: Map, places: list[tuple[int, ...]], operation: str, data: bytes, out: int, seed: bytes = b""
) -> Entry:
    """Store (or reduce) the same box of shared memory at each place of `out`."""
    w, size, rank = Writer(128), _box_bytes(m), len(m.box)
    words = -(-size // 512)
    w(
        "mov.u32 %r100, smem; mov.b64 %x1, map0; cvta.param.u64 %x1, %x1; mad.lo.u32 %r102, %thread, 4, %r100; mad.wide.u32 %x2, %thread, 4, %in;"
    )
    for j in range(words):
        w(f"ld.global.b32 %r1, [%x2+{512 * j}]; st.shared.b32 [%r102+{512 * j}], %r1;")
    w("fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %p1, %thread, 0; @%p1 bra DONE;")
    for place in places:
        coords = f"{{{', '.join(map(str, place))}}}"
        start = "cp.reduce.async.bulk.tensor" if operation else "cp.async.bulk.tensor"
        end = f".{operation}" if operation else ""
        w(
            f"{start}.{rank}d.global.shared::cta{end}.tile.bulk_group [%x1, {coords}], [%r100]; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        )
    w("DONE:")
    w.reserve("out", 1, out)
    return w.entry(name, data, maps=(m,), shared=max(512 * words, 512), seed_out=seed)


def _bytes(n: int, seed: int = 9) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8).tobytes()


def _loads() -> list[Entry]:
    found = []
    found.append(
        load(
            "tensor_load_1d",
            Map("in", "float32", (100,), (), (32,)),
            [(0,), (-8,), (84,), (96,), (200,), (-64,), (4,)],
            _bytes(400),
        )
    )
    for swizzle, span in (("none", 64), ("32B", 32), ("64B", 64), ("128B", 128)):
        m = Map("in", "float16", (72, 20), _packed((72, 20), 2), (span // 2, 8), swizzle=swizzle)
        found.append(
            load(
                f"tensor_load_2d_{swizzle.lower()}",
                m,
                [(0, 0), (8, 3), (-16, -2), (64, 15), (40, 19), (0, 40), (72, 0)],
                _bytes(72 * 2 * 20),
            )
        )
    for dtype, size in _SIZE.items():
        box = (max(16 // size, 8), 4, 3)
        extents = (24, 7, 5)
        strides = _packed(extents, size, 16)
        m = Map("in", dtype, extents, strides, box)
        step = 16 // size
        total = strides[-1] * 5
        data = _bytes(total)
        if dtype.startswith(("float32", "tfloat32")):
            words = np.frombuffer(data, np.uint32).copy()
            words[::5] &= 0x807FFFFF  # denormals
            words[1::11] = 0x7F800001  # signalling NaN
            words[2::13] = 0x7FFFFFFF
            words[3::17] = 0xFF800000
            data = words.tobytes()
        places = [(0, 0, 0), (step, 5, 3), (-step, -1, -2), (24 - step if step < 16 else 0, 6, 4)]
        found.append(load(f"tensor_load_3d_{dtype}", m, places, data))
        if "float" in dtype:
            nan = Map("in", dtype, extents, strides, box, fill="nan")
            found.append(load(f"tensor_load_3d_{dtype}_nan", nan, places[1:], data))
    m = Map("in", "float32", (40, 20), _packed((40, 20), 4), (16, 8))
    found.append(load("tensor_load_odd_start", m, [(1, 0)], _bytes(160 * 20)))
    m = Map("in", "bfloat16", (32, 5, 4, 3), _packed((32, 5, 4, 3), 2), (16, 3, 2, 2), swizzle="32B")
    found.append(
        load("tensor_load_4d", m, [(0, 0, 0, 0), (8, -1, 3, 1), (24, 3, -1, 2), (0, 0, 0, -1)], _bytes(32 * 2 * 60))
    )
    m = Map("in", "uint8", (64, 4, 3, 3, 2), _packed((64, 4, 3, 3, 2), 1), (32, 2, 2, 2, 2), swizzle="32B")
    found.append(
        load(
            "tensor_load_5d",
            m,
            [(0, 0, 0, 0, 0), (16, 3, 2, 1, 1), (-16, -1, -1, -1, -1), (48, 2, 1, 2, 0)],
            _bytes(64 * 4 * 18),
        )
    )
    for steps in ((1, 2), (1, 3), (2, 1), (3, 2)):
        m = Map("in", "uint32", (40, 20), _packed((40, 20), 4), (16, 8), steps)
        found.append(
            load(f"tensor_load_steps_{steps[0]}_{steps[1]}", m, [(0, 0), (4, 3), (-4, -3), (32, 15)], _bytes(160 * 20))
        )
    m = Map("in", "float16", (64, 9, 8), _packed((64, 9, 8), 2), (32, 4, 8), (1, 2, 3), swizzle="64B")
    found.append(load("tensor_load_steps_3d", m, [(0, 0, 0), (8, 3, 2), (-8, -1, -1)], _bytes(128 * 72)))
    for interleave, swizzles in (("16B", ("none",)), ("32B", ("none", "32B"))):
        for swizzle in swizzles:
            inner = int(interleave[:2]) // 2
            extents = (inner, 6, 5, 4)
            if interleave == "32B" and swizzle == "none":
                continue  # the driver takes 32-byte interleaving with the 32-byte swizzle alone
            m = Map(
                "in", "float16", extents, _packed(extents, 2), (inner, 4, 3, 2), swizzle=swizzle, interleave=interleave
            )
            found.append(
                load(
                    f"tensor_load_interleave_{interleave.lower()}",
                    m,
                    [(0, 0, 0, 0), (0, 4, 3, 1), (0, -1, -2, -1), (0, 2, 1, 3)],
                    _bytes(inner * 2 * 120),
                )
            )
    return found


def _stores() -> list[Entry]:
    found = []
    for swizzle, span in (("none", 64), ("32B", 32), ("64B", 64), ("128B", 128)):
        extents = (72, 20)
        strides = _packed(extents, 2)
        m = Map("out", "float16", extents, strides, (span // 2, 8), swizzle=swizzle)
        found.append(
            store(
                f"tensor_store_2d_{swizzle.lower()}",
                m,
                [(0, 0), (16, 9), (40, 15), (64, 3)],
                "",
                _bytes(4096),
                strides[0] * 20,
            )
        )
    m = Map("out", "float32", (100,), (), (32,))
    found.append(store("tensor_store_1d", m, [(4,), (84,), (200,)], "", _bytes(4096), 400))
    found.append(store("tensor_store_negative", m, [(-24,)], "", _bytes(4096), 400))  # illegal on an H200
    m = Map("out", "uint8", (64, 4, 3, 3, 2), _packed((64, 4, 3, 3, 2), 1), (32, 2, 2, 2, 2))
    found.append(
        store(
            "tensor_store_5d",
            m,
            [(0, 0, 0, 0, 0), (48, 3, 1, 2, 1), (16, 1, 2, 1, 1)],
            "",
            _bytes(4096),
            64 * 4 * 18,
        )
    )
    m = Map("out", "uint32", (40, 20), _packed((40, 20), 4), (16, 8), (1, 2))
    found.append(store("tensor_store_steps", m, [(0, 0), (32, 9), (20, 3)], "", _bytes(4096), 160 * 20))
    for dtype in ("float32_ftz", "tfloat32", "float32"):
        words = np.frombuffer(_bytes(4096, 4), np.uint32).copy()
        words[::5] &= 0x807FFFFF
        words[1::11] = 0x7F800001
        m = Map("out", dtype, (32, 8), (128,), (16, 8))
        found.append(store(f"tensor_store_{dtype}", m, [(0, 0), (16, 0)], "", words.tobytes(), 1024))
    for dtype, operations in {
        "uint32": ("add", "min", "max", "inc", "dec", "and", "or", "xor"), "int32": ("add", "min", "max"),
        "uint64": ("add", "min", "max", "and", "or", "xor"), "int64": ("min", "max"),
        "float16": ("add", "min", "max"), "bfloat16": ("add", "min", "max"), "float32": ("add",),
    }.items():  # fmt: skip
        size = _SIZE[dtype]
        for operation in operations:
            inner = 64 // size
            extents = (inner, 12)
            m = Map("out", dtype, extents, (64,), (inner // 2, 8))
            data, seed = _bytes(4096, 5), _bytes(64 * 12, 6)
            if "float" in dtype:
                from ptxsim.silicon.groups.matrix import codes

                kind = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}[dtype]
                data, seed = codes(kind, 4096 // size, 5, True), codes(kind, 768 // size, 6, True)
            found.append(
                store(
                    f"tensor_reduce_{operation}_{dtype}",
                    m,
                    [(0, 0), (inner // 2, 2), (0, 7), (inner - 16 // size, 3)],
                    operation,
                    data,
                    64 * 12,
                    seed,
                )
            )
    return found


def _multicast() -> Entry:
    """Two CTAs load half a box each, for both."""
    w = Writer(256)
    w(
        _INIT.replace("bar.sync 0;", ""),
        "mov.u32 %r4, %cluster_ctarank; add.u32 %r101, %r100, 1024; mad.lo.u32 %r102, %thread, 4, %r101; st.shared.b32 [%r102], 7; fence.proxy.async; barrier.cluster.arrive.release; barrier.cluster.wait.acquire;",
    )
    w(
        "@!%p1 bra GO; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r100], 512; mov.u16 %h1, 3; shl.b32 %r5, %r4, 8; add.u32 %r6, %r101, %r5; shl.b32 %r7, %r4, 2; cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%r6], [%x1, {4, %r7}], [%r100], %h1;"
    )
    w(f"GO: {wait('0').replace('.acquire.cta', '.acquire.cluster')} ld.shared.b32 %r8, [%r102];")
    w.out("both halves", "%r8")
    w("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;")
    m = Map("in", "uint32", (32, 8), (128,), (16, 4))
    return w.entry("tensor_load_multicast", _bytes(1024), maps=(m,), shared=2048, grid=2, cluster=2)


def entries() -> list[Entry]:
    """The kernels of tensor maps."""
    return [*_loads(), *_stores(), _multicast()]
