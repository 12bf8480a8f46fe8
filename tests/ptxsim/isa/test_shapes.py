"""What base.Compiled promises of every pure instruction: any broadcastable shapes, no writing into sources."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from ptx_ops import evaluate, specialise

from cubinery.aot.ptxsim.isa.base import DTYPES, Immediate, Register

TEXT = """
add.s32 add.sat.s32 add.u16x2 sub.s64 mul.lo.s32 mul.hi.u64 mul.hi.s32 mul.wide.s16 mad.wide.u32 mad.hi.s32 div.s32
rem.s64 min.s32 max.relu.s16x2 sad.u32 dp4a.s32.u32 popc.b64 clz.b32 bfind.s32 brev.b32 fns.b32 bfe.s32 bfi.b64
szext.clamp.s32 bmsk.wrap.b32 add.cc.u32 addc.u32 madc.lo.cc.u32 mul24.hi.s32
and.pred and.b32 not.b16 cnot.b32 shl.b16 shl.b64 shr.s16 shr.u32 shf.l.wrap.b32 prmt.b32 prmt.b32.f4e
setp.lt.s32 setp.ltu.and.f32 setp.gt.bf16 set.eq.f32.s32 selp.b64 slct.f32.f32
add.f32 add.rm.f32 fma.rn.f32 fma.rp.f32 fma.rn.ftz.sat.f32 div.rz.f32 div.approx.f32 min.f32 fma.rn.f32x2 abs.f32
add.f32.f16 fma.rn.f64 add.f64 max.f64 sqrt.rp.f64 testp.normal.f32
add.f16 mul.bf16x2 fma.rn.relu.f16x2 max.NaN.bf16x2 ex2.approx.f16x2 neg.f16x2
cvt.s64.s32 cvt.sat.u8.s32 cvt.rni.s32.f32 cvt.rn.f32.u64 cvt.rn.f16.f32 cvt.rn.f16x2.f32 cvt.rz.bf16x2.f32
cvt.rna.tf32.f32 cvt.rn.satfinite.e4m3x2.f32 cvt.rn.f16x2.e4m3x2 cvt.rz.ue8m0x2.f32 cvt.f64.f16 cvt.pack.sat.s8.s32.b32
ex2.approx.ftz.f32 lg2.approx.f32 rcp.rn.f32 rcp.approx.ftz.f64 tanh.approx.f32
shfl.sync.bfly.b32 shfl.sync.idx.b32
"""
NAMES = TEXT.split()


def source(kind: str, shape: tuple[int, int], seed: int) -> Any:
    """Random bits, half of them small numbers and float patterns that operations treat apart; read-only."""
    rng = np.random.default_rng(seed)
    if kind == "pred":
        bits = rng.random(shape) < 0.5
    else:
        dtype = np.dtype(DTYPES[kind])
        bits = rng.integers(0, 1 << 63, shape, np.uint64).astype(dtype)
        chosen = np.array([0, 1, 5, 31, 0x3F800000, 0x7F800000, 0x7FC00001, 0x80000000, 0x3C00], np.uint64).astype(
            dtype
        )
        bits = np.where(rng.random(shape) < 0.5, chosen[rng.integers(0, len(chosen), shape)], bits)
    bits.setflags(write=False)
    return bits


@pytest.mark.parametrize("name", NAMES)
def test_shapes(name: str) -> None:
    """Sources of one row, one column or one element give what the same values spread over (warps, 32) give."""
    count = 3 if name.startswith(("min", "max")) else 1
    compiled = specialise(name, *[Register("s", "b32")] * (count - 1))
    choices = itertools.islice(itertools.product(((3, 32), (3, 1), (1, 1), (1, 32)), repeat=len(compiled.src)), 64)
    for case, shapes in enumerate(choices):
        narrow = [
            source(kind, shape, 10 * case + i) for i, (kind, shape) in enumerate(zip(compiled.src, shapes, strict=True))
        ]
        spread = [np.ascontiguousarray(np.broadcast_to(array, (3, 32))) for array in narrow]
        for found, expected in zip(evaluate(compiled, narrow), evaluate(compiled, spread), strict=True):
            assert np.array_equal(np.broadcast_to(found, (3, 32)), np.broadcast_to(expected, (3, 32))), shapes


def test_strided_sources() -> None:
    """A register may be a view with gaps, as a slice of a wider array is."""
    whole = source("b32", (3, 64), 1)
    add = specialise("fma.rn.bf16x2", Immediate(0))
    gaps, dense = whole[:, ::2], np.ascontiguousarray(whole[:, ::2])
    assert np.array_equal(evaluate(add, [gaps] * 3)[0], evaluate(add, [dense] * 3)[0])
