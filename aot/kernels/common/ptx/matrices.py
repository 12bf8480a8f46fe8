"""Matrix instructions of a warp. `c` is lane % 4 and `g` is lane // 4, as in the PTX ISA."""

from __future__ import annotations

from cutlass import Float32, Int32, Uint32

from cubinery.aot.kernels.common.ptx.base import Fragment, inline


def ldmatrix_x4(address: Int32, *, transpose: bool = False) -> tuple[Uint32, ...]:
    """Four 8x8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i."""
    trans = ".trans" if transpose else ""
    return inline(
        "ldmatrix.sync.aligned.m8n8.x4" + trans + ".shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def ldmatrix_x2(address: Int32) -> tuple[Uint32, ...]:
    """Two 8x8 matrices of 16-bit elements; lane 8i + r, i < 2, gives the address of row r of matrix i."""
    return inline(
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


def ldmatrix_x2_bytes(address: Int32) -> tuple[Uint32, ...]:
    """Two transposed 16x16 matrices of bytes; lane 16i + r gives the address of row r of matrix i.

    Byte b of lane 4g + t in register 2i + h is row 4t + b, column g + 8h of matrix i. From sm_100a on.
    """
    return inline(
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def mma_m16n8k16(dtype: str, a: Fragment, b: Fragment, acc: Fragment) -> list[Float32]:
    """acc + A B for A 16x16 (4 registers) and B 16x8 (2 registers) of `dtype` ("f16" or "bf16"), fp32 acc."""
    return list(
        inline(
            f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
            "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
            "{{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *acc],
        )
    )


def transpose_8x8(pair: Uint32) -> Uint32:
    """An 8x8 matrix of 16-bit elements, transposed: lane 4g + t has row g, columns 2t and 2t + 1, before and after."""
    return inline(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[pair]
    )
