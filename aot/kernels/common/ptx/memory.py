"""Loads and stores of global and shared memory, and an atomic."""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint32

from cubinery.aot.kernels.common.ptx.base import Fragment, inline
from cubinery.aot.kernels.common.ptx.conversions import pack_f32x2


def load_global_v2(address: Int64) -> tuple[Int32, Int32]:
    """Two consecutive int32 from global memory."""
    return inline("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address])


def load_global_b64(address: Int64) -> tuple[Uint32, ...]:
    """8 bytes from global memory, as two registers."""
    return inline("ld.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address])


def load_global_i32(address: Int64) -> Int32:
    """One int32 from global memory, requested in program order (see `load_global_f32x4`)."""
    return inline("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_global_i32x4(address: Int64) -> tuple[Int32, ...]:
    """Four consecutive int32 from global memory, requested in program order."""
    return inline(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def load_global_v4(address: Int64) -> tuple[Uint32, ...]:
    """16 bytes from global memory."""
    return inline(
        "ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def load_global_f32(address: Int64) -> Float32:
    """One fp32 value from global memory, requested in program order (see `load_global_f32x4`)."""
    return inline("ld.relaxed.gpu.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_global_f32x4(address: Int64) -> list[Float32]:
    """Four consecutive fp32 values from global memory, requested in program order.

    A plain load may be moved down to its first use, behind loads that others wait for; a relaxed one is not.
    """
    return list(
        inline(
            "ld.relaxed.gpu.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )


def store_global_bf16(address: Int64, value: Float32) -> None:
    """One fp32 value rounded to bf16, to global memory."""
    inline(
        "{ .reg .b16 half; cvt.rn.bf16.f32 half, {$r1}; st.global.b16 [{$r0}], half; }", read_only_args=[address, value]
    )


def store_global_f32(address: Int64, value: Float32) -> None:
    """One fp32 value to global memory."""
    inline("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_global_v2(address: Int64, values: Fragment) -> None:
    """8 bytes to global memory."""
    inline("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *values])


def store_global_v4(address: Int64, values: Fragment) -> None:
    """16 bytes to global memory."""
    inline("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def store_global_u8(address: Int64, value: Uint32) -> None:
    """The low byte of a word to global memory."""
    inline("st.global.b8 [{$r0}], {$r1};", read_only_args=[address, value])


def store_global_f32x4(address: Int64, values: Fragment) -> None:
    """Four consecutive fp32 values to global memory."""
    inline("st.global.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def load_shared_f32(address: Int32) -> Float32:
    """One fp32 value from shared memory."""
    return inline("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


def load_shared_f32x2(address: Int32) -> list[Float32]:
    """Two consecutive fp32 values from shared memory."""
    return list(
        inline("ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address])
    )


def load_shared_f32x4(address: Int32) -> list[Float32]:
    """Four consecutive fp32 values from shared memory."""
    return list(
        inline(
            "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Float32] * 4,
            read_only_args=[address],
        )
    )


def load_shared_i32(address: Int32) -> Int32:
    """One int32 from shared memory."""
    return inline("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address])


def load_shared_i32x2(address: Int32) -> tuple[Int32, ...]:
    """Two consecutive int32 from shared memory."""
    return inline("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Int32] * 2, read_only_args=[address])


def load_shared_i64(address: Int32) -> Int64:
    """One int64 from shared memory."""
    return inline("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address])


def load_shared_i32x4(address: Int32) -> tuple[Int32, ...]:
    """Four consecutive int32 from shared memory."""
    return inline(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def store_shared_i32(address: Int32, value: Int32) -> None:
    """One int32 to shared memory."""
    inline("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_i64(address: Int32, value: Int64) -> None:
    """One int64 to shared memory."""
    inline("st.shared.b64 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_e4m3x2(address: Int32, low: Float32, high: Float32) -> None:
    """Two fp32 values as e4m3 (nearest even, saturating) to shared memory."""
    inline(
        "{ .reg .b16 pair; cvt.rn.satfinite.e4m3x2.f32 pair, {$r2}, {$r1}; st.shared.b16 [{$r0}], pair; }",
        read_only_args=[address, low, high],
    )


def store_shared_f16x2(address: Int32, low: Float32, high: Float32) -> None:
    """Two fp32 values rounded to nearest even as f16, to shared memory."""
    store_shared_b32(address, pack_f32x2("f16", low, high))


def store_shared_f32(address: Int32, value: Float32) -> None:
    """One fp32 value to shared memory."""
    inline("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_f32x2(address: Int32, values: Fragment) -> None:
    """Two consecutive fp32 values to shared memory."""
    inline("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *values])


def store_shared_f32x4(address: Int32, values: Fragment) -> None:
    """Four consecutive fp32 values to shared memory."""
    inline("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def store_shared_f32s(address: Int32, values: Fragment) -> None:
    """One, two or four consecutive fp32 values to shared memory."""
    if len(values) == 1:
        store_shared_f32(address, values[0])
    else:
        (store_shared_f32x4 if len(values) == 4 else store_shared_f32x2)(address, values)


def load_shared_b32(address: Int32) -> Uint32:
    """4 bytes from shared memory."""
    return inline("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address])


def load_shared_b64(address: Int32) -> tuple[Uint32, ...]:
    """8 bytes from shared memory, as two registers."""
    return inline("ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[address])


def load_shared_u16(address: Int32) -> Uint32:
    """2 bytes from shared memory."""
    return inline(
        "{ .reg .b16 half; ld.shared.b16 half, [{$r0}]; cvt.u32.u16 {$w0}, half; }",
        write_only_types=[Uint32],
        read_only_args=[address],
    )


def store_shared_b32(address: Int32, value: Uint32) -> None:
    """4 bytes to shared memory."""
    inline("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_v2(address: Int32, values: Fragment) -> None:
    """8 bytes to shared memory."""
    inline("st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *values])


def store_shared_v4(address: Int32, values: Fragment) -> None:
    """16 bytes to shared memory."""
    inline("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *values])


def atomic_wrapping_increment(address: Int64, limit: Int32) -> Int32:
    """Add one to a uint32 in global memory, or make it 0 where it has reached `limit`; returns what it was.

    Releases what this thread wrote or knows of to the whole GPU, and acquires what earlier increments released.
    """
    return inline(
        "atom.acq_rel.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, limit],
    )
