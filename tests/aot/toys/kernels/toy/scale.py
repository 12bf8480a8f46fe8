"""`dst = src * factor` in the CuTe DSL, small enough to compile in a blink."""

from __future__ import annotations

import cuda.bindings.driver as cuda
import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_ptr

from cubinery.aot.kernels.toy.abi import THREADS
from cubinery.runtime.arch import Arch
from cubinery.runtime.ops.toy.config import ScaleConfig


class Scale:
    def __init__(self, config: ScaleConfig) -> None:
        self.width = config.width
        self.body = config.body

    @cute.kernel
    def scale(self, src: cute.Pointer, dst: cute.Pointer, n: cutlass.Int32, factor: cutlass.Float32):
        tidx, _, _ = cute.arch.thread_idx()
        bidx, _, _ = cute.arch.block_idx()
        mX = cute.make_tensor(src, cute.make_layout(1 << 20))
        mY = cute.make_tensor(dst, cute.make_layout(1 << 20))
        weight = factor
        if cutlass.const_expr(self.body == "static_smem"):
            sX = cute.make_tensor(cute.arch.alloc_smem(cutlass.Float32, THREADS), cute.make_layout(THREADS))
            sX[tidx] = factor
            cute.arch.sync_threads()
            weight = sX[THREADS - 1 - tidx]
        if cutlass.const_expr(self.body == "dynamic_smem"):
            sX = cutlass.memory.SmemAllocator().allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), 16)
            sX[tidx] = factor
            cute.arch.sync_threads()
            weight = sX[THREADS - 1 - tidx]
        if cutlass.const_expr(self.body == "stack"):
            rX = cute.make_rmem_tensor(cute.make_layout(64), cutlass.Float32)
            for i in cutlass.range_constexpr(64):
                rX[i * n % 64] = mX[tidx + i]
            weight = rX[tidx % 64]
        for i in cutlass.range_constexpr(self.width):
            index = (bidx * THREADS + tidx) * self.width + i
            if index < n:
                mY[index] = mX[index] * weight

    @cute.jit
    def __call__(
        self, src: cute.Pointer, dst: cute.Pointer, n: cutlass.Int32, factor: cutlass.Float32, stream: cuda.CUstream
    ):
        kernel = self.scale
        kernel.set_name_prefix("cubinery_toy_scale", remove_cutlass_symbol=True, keep_mangled_name=False)
        smem = 4096 if cutlass.const_expr(self.body == "dynamic_smem") else 0
        kernel(src, dst, n, factor).launch(
            grid=(n // (THREADS * self.width), 1, 1), block=(THREADS, 1, 1), smem=smem, stream=stream
        )


def entry(config: ScaleConfig, arch: Arch):
    pointer = make_ptr(cutlass.Float32, 16, cute.AddressSpace.gmem, assumed_align=16)
    return Scale(config), (pointer, pointer, cutlass.Int32(5), cutlass.Float32(1.0), cuda.CUstream(0))
