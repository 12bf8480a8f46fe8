"""Host functions that launch CuTe DSL example kernels on small problems whose shapes are known at compile time.

Runs in a process of its own: `python hosts.py CASE EXAMPLES OUT`, which compiles one case and writes its PTX and
launches as JSON. EXAMPLES is a local copy of examples/python/CuTeDSL of https://github.com/NVIDIA/cutlass.
"""

from __future__ import annotations

import glob
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ARCH = "sm_100a"

Built = tuple[Callable[..., None], list[Any]]
"""Host function of (pointers, stream), and the element type of each pointer."""


def load(path: Path, examples: Path) -> Any:
    """Import one example file."""
    sys.path[:0] = [str(path.parent), str(examples)]
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["example"] = module
    spec.loader.exec_module(module)
    return module


def dense(
    example: Any, *, dtype: str, mnk: tuple[int, int, int], tile: tuple[int, int], pair: bool, store: bool
) -> Built:
    """DenseGemmKernel: C[m, n] = A[m, k] B[n, k]."""
    import cutlass
    from cutlass import cute

    kind, out = getattr(cutlass, dtype), cutlass.Float32
    m, n, k = mnk
    gemm = example.DenseGemmKernel(cutlass.Float32, pair, tile, (2, 1) if pair else (1, 1), store)

    @cute.jit
    def host(p, stream):  # type: ignore[no-untyped-def]
        a = cute.make_tensor(p[0], cute.make_layout((m, k, 1), stride=(k, 1, m * k)))
        b = cute.make_tensor(p[1], cute.make_layout((n, k, 1), stride=(k, 1, n * k)))
        c = cute.make_tensor(p[2], cute.make_layout((m, n, 1), stride=(n, 1, m * n)))
        gemm(a, b, c, stream)

    return host, [kind, kind, out]


def scaled(
    example: Any, *, dtype: str, scale: str, group: int, mnk: tuple[int, int, int], tile: tuple[int, int],
    cluster: tuple[int, int] = (1, 1),
) -> Built:  # fmt: skip
    """Sm100BlockScaledPersistentDenseGemmKernel: C[m, n] = (A scale_A)[m, k] (B scale_B)[n, k]."""
    import cutlass
    from cutlass import cute, utils
    from cutlass.cute.nvgpu import OperandMajorMode

    kind, factor = getattr(cutlass, dtype), getattr(cutlass, scale)
    gemm = example.Sm100BlockScaledPersistentDenseGemmKernel(group, tile, cluster)
    layouts = (OperandMajorMode.K, OperandMajorMode.K, utils.LayoutEnum.ROW_MAJOR)

    @cute.jit
    def host(p, stream):  # type: ignore[no-untyped-def]
        gemm(p[0], p[1], p[2], p[3], p[4], layouts, (*mnk, 1), 1, stream)

    return host, [kind, kind, factor, factor, cutlass.Float32]


def attention(
    example: Any, *, dtype: str, keys: int, queries: int, dim: int, heads: tuple[int, int], causal: bool
) -> Built:
    """BlackwellFusedMultiHeadAttentionForward, batch 1."""
    import cutlass
    from cutlass import cute

    kind = getattr(cutlass, dtype)
    fmha_utils = example.fmha_utils
    mask = fmha_utils.MaskEnum.WINDOW_MASK if causal else fmha_utils.MaskEnum.RESIDUAL_MASK
    fmha = example.BlackwellFusedMultiHeadAttentionForward(
        cutlass.Float32, cutlass.Float32, (128, 128), dim, False, mask, False, False, True
    )
    hq, hk = heads
    hr = hq // hk
    scale = dim**-0.5

    @cute.jit
    def host(p, stream):  # type: ignore[no-untyped-def]
        q = cute.make_tensor(p[0], cute.make_ordered_layout((1, queries, hk, hr, dim), order=(4, 3, 2, 1, 0)))
        k = cute.make_tensor(p[1], cute.make_ordered_layout((1, keys, hk, 1, dim), order=(4, 3, 2, 1, 0)))
        v = cute.make_tensor(p[2], cute.make_ordered_layout((1, keys, hk, 1, dim), order=(4, 3, 2, 1, 0)))
        o = cute.make_tensor(p[3], cute.make_ordered_layout((1, queries, hk, hr, dim), order=(4, 3, 2, 1, 0)))
        fmha(
            q, k, v, o, (1, queries, queries, keys, hq, hk, dim, dim), None, None, None, None,
            scale * 1.4426950408889634, scale, 1.0, None, None,
            cutlass.Int32(0) if cutlass.const_expr(causal) else None, None, None, stream, False,
        )  # fmt: skip

    return host, [kind] * 4


def decode(example: Any, *, keys: int, dim: int, heads: int, splits: int) -> Built:
    """MixedInputFusedMultiHeadAttentionDecode: int8 keys and values, bf16 queries, one KV head."""
    import cutlass
    from cutlass import cute

    fmha = example.MixedInputFusedMultiHeadAttentionDecode(
        headdim=dim, block_scaledim=dim, grouped_head_tile=8, convert_warpgroups=1
    )
    bf16, f32 = cutlass.BFloat16, cutlass.Float32

    @cute.jit
    def host(p, stream):  # type: ignore[no-untyped-def]
        fmha(
            (1, heads, 1, keys, dim), splits, p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9], p[10],
            dim**-0.5, 1.0, stream,
        )  # fmt: skip

    return host, [bf16, cutlass.Int8, cutlass.Int8, bf16, bf16, bf16, f32, f32, f32, f32, f32]


def latent(example: Any, *, keys: int, heads: int, page: int) -> Built:
    """BlackwellMultiHeadLatentAttentionForwardFP8, one sequence, one query token, one split."""
    import cutlass
    from cutlass import cute

    fp8, f32, i32 = cutlass.Float8E4M3FN, cutlass.Float32, cutlass.Int32
    mla = example.BlackwellMultiHeadLatentAttentionForwardFP8(
        f32, f32, (128, 128), (128, 256), 1, page, 0.0, False, False, False
    )
    pages = -(-keys // page)

    @cute.jit
    def host(p, stream):  # type: ignore[no-untyped-def]
        one = cutlass.Int32(1)  # its scheduler takes batch and query length at run time only
        shape = (heads, 512, one, one)
        ql = cute.make_tensor(p[0], cute.make_layout(shape, stride=(512, 1, heads * 512, heads * 512)))
        qr = cute.make_tensor(p[1], cute.make_layout((heads, 64, one, one), stride=(64, 1, heads * 64, heads * 64)))
        cl = cute.make_tensor(p[2], cute.make_layout((page, 512, pages), stride=(512, 1, page * 512)))
        cr = cute.make_tensor(p[3], cute.make_layout((page, 64, pages), stride=(64, 1, page * 64)))
        table = cute.make_tensor(p[4], cute.make_layout((pages, 1), stride=(1, pages)))
        o = cute.make_tensor(p[5], cute.make_layout(shape, stride=(512, 1, heads * 512, heads * 512)))
        lse = cute.make_tensor(p[6], cute.make_layout((heads, 1, 1), stride=(1, heads, heads)))
        lengths = cute.make_tensor(p[7], cute.make_layout((1,), stride=(1,)))
        mla(ql, qr, cl, cr, table, o, lse, None, one, lengths, None, 576**-0.5, 1.0, stream)

    return host, [fp8, fp8, fp8, fp8, i32, cutlass.BFloat16, f32, i32]


KINDS: dict[str, tuple[str, Callable[..., Built]]] = {
    "dense": ("cute/blackwell/kernel/dense_gemm/dense_gemm.py", dense),
    "scaled": ("cute/blackwell/kernel/blockscaled_gemm/dense_blockscaled_gemm_persistent.py", scaled),
    "attention": ("cute/blackwell/kernel/attention/fmha/fmha.py", attention),
    "decode": ("cute/blackwell/kernel/attention/mixed_input_fmha/mixed_input_fmha_decode.py", decode),
    "latent": ("cute/blackwell/kernel/attention/mla/mla_decode_fp8.py", latent),
}
"""Example file and host function of each kind of case."""


def trace(kind: str, settings: dict[str, Any], examples: Path, arch: str = ARCH) -> dict[str, Any]:
    """Compile one case: its PTX, its launches, seconds."""
    folder = tempfile.mkdtemp()
    os.environ.update({"CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP": "ir", "CUTE_DSL_DUMP_DIR": folder})
    import capture
    import cuda.bindings.driver as cuda
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    path, build = KINDS[kind]
    start = time.perf_counter()
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    host, kinds = build(load(examples / path, examples), **settings)
    pointers = [make_ptr(element, 0x10000, cute.AddressSpace.gmem, assumed_align=128) for element in kinds]
    options = f"--gpu-arch {arch} --keep-cubin --keep-ptx --dump-dir {folder}"
    compiled = cute.compile(host, pointers, cuda.CUstream(0), options=options)
    (text,) = glob.glob(f"{folder}/*_clean.mlir")
    found = capture.Host(Path(text).read_text())
    return {
        "ptx": compiled.artifacts.PTX, "launches": found.launches(), "seconds": time.perf_counter() - start, "ir": text
    }  # fmt: skip


if __name__ == "__main__":
    kind, settings, examples, out = sys.argv[1:5]
    Path(out).write_text(json.dumps(trace(kind, json.loads(settings), Path(examples))))
