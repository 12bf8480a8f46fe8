"""Single PTX instructions as trace-time functions, all common to sm_90a, sm_100a, sm_103a and sm_110a.

Addresses are plain integers: `Int32` in the shared window, `Int64` in global memory. Fragment layouts
are those of the PTX ISA's warp-level matrix instructions; `c` is lane % 4 and `g` is lane // 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32, cute

inline = cute.arch.inline_ptx
Fragment = Sequence[Any]

# -- matrices ------------------------------------------------------------------------------------


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


# -- conversions ---------------------------------------------------------------------------------


def e4m3x4_to_f16x2x2(codes: Uint32) -> tuple[Uint32, Uint32]:
    """Four e4m3 codes to two f16x2 registers (low pair, high pair); exact, NaN stays NaN."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.rn.f16x2.e4m3x2 {$w0}, lo; cvt.rn.f16x2.e4m3x2 {$w1}, hi; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[codes],
    )


def e2m1x8_to_f16x2x4(codes: Uint32) -> tuple[Uint32, ...]:
    """Eight e2m1 codes to four f16x2 registers of 2^-14 times their value, exactly: code i below, code i + 4 above.

    Sign to bit 15, exponent and mantissa to bits 11 to 9. Odd codes, then even ones, are brought together in bytes
    (a select), so that one mask cleans a register of two.
    """
    return inline(
        "{ .reg .b32 s, t, odd, even; "
        "shr.u32 t, {$r0}, 3; lop3.b32 odd, {$r0}, t, 0x80808080, 0xe4; "
        "shl.b32 s, {$r0}, 4; shl.b32 t, {$r0}, 1; lop3.b32 even, s, t, 0x80808080, 0xe4; "
        "and.b32 {$w3}, odd, 0x8e008e00; and.b32 {$w2}, even, 0x8e008e00; "
        "shl.b32 s, odd, 8; shl.b32 t, even, 8; "
        "and.b32 {$w1}, s, 0x8e008e00; and.b32 {$w0}, t, 0x8e008e00; }",
        write_only_types=[Uint32] * 4,
        read_only_args=[codes],
    )


def widen_codes(codes: Uint32, bit: int, *, bits: int, exponent_bits: int) -> Uint32:
    """The codes of `bits` bits that start at `bit` of both halves, as f16x2: 2^(their bias - 15) times their value.

    Sign to bit 15, exponent and mantissa to where f16's exponent ends; exact, subnormals included.
    """

    def shift(name: str, by: int) -> str:
        return f"sh{'l' if by >= 0 else 'r'}.b32 {name}, {{$r0}}, {abs(by)}; ".replace("shr.b32", "shr.u32")

    magnitude = (1 << (9 + exponent_bits + 1)) - (1 << (9 + exponent_bits - bits + 2))
    return inline(
        "{ .reg .b32 s, t; "
        + shift("s", 16 - bit - bits)
        + shift("t", 11 + exponent_bits - bit - bits)
        + f"and.b32 t, t, {magnitude * 0x10001:#x}; "
        + "lop3.b32 {$w0}, s, 0x80008000, t, 0xea; }",
        write_only_types=[Uint32],
        read_only_args=[codes],
    )


def nvfp4_scales(pair: Uint32) -> tuple[Uint32, ...]:
    """Two e4m3 block scales in the low half: an eighth of each, twice in an f16x2 register; exact."""
    return inline(
        "{ .reg .b16 codes, lo, hi; .reg .b32 both, eighth; cvt.u16.u32 codes, {$r0}; cvt.rn.f16x2.e4m3x2 both, codes; "
        "mov.b32 eighth, 0x30003000; mul.rn.f16x2 both, both, eighth; mov.b32 {lo, hi}, both; "
        "mov.b32 {$w0}, {lo, lo}; mov.b32 {$w1}, {hi, hi}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[pair],
    )


def nvfp4_to_e4m3(codes: Int32, scale: Uint32) -> tuple[Uint32, ...]:
    """Eight e2m1 codes times an f16x2 scale, rounded once to e4m3 (nearest even, saturating): eight bytes in order."""
    pairs = range(4)
    return inline(
        "{ .reg .b8 c0, c1, c2, c3; .reg .b16 h0, h1, h2, h3; .reg .b32 p0, p1, p2, p3; "
        "mov.b32 {c0, c1, c2, c3}, {$r0}; "
        + "".join(
            f"cvt.rn.f16x2.e2m1x2 p{i}, c{i}; mul.rn.f16x2 p{i}, p{i}, {{$r1}}; "
            f"cvt.rn.satfinite.e4m3x2.f16x2 h{i}, p{i}; "
            for i in pairs
        )
        + "mov.b32 {$w0}, {h0, h1}; mov.b32 {$w1}, {h2, h3}; }",
        write_only_types=[Uint32] * 2,
        read_only_args=[codes, scale],
    )


def pack_f32x2(dtype: str, low: Float32, high: Float32) -> Uint32:
    """Two fp32 values rounded to nearest even as one f16x2 or bf16x2 register."""
    return inline(
        f"cvt.rn.{dtype}x2.f32 " + "{$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def unpack_bf16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """(low, high) of a bf16x2 register as fp32; exact."""
    return inline(
        "{ shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def unpack_f16x2(pair: Uint32) -> tuple[Float32, Float32]:
    """(low, high) of an f16x2 register as fp32; exact."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; cvt.f32.f16 {$w0}, lo; cvt.f32.f16 {$w1}, hi; }",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def spread_halves(pair: Uint32) -> tuple[Uint32, ...]:
    """A register with two times the low half, another with two times the high half."""
    return inline(
        "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, {$r0}; mov.b32 {$w0}, {lo, lo}; mov.b32 {$w1}, {hi, hi}; }",
        write_only_types=[Uint32, Uint32],
        read_only_args=[pair],
    )


def permute_bytes(value: Uint32, selector: int) -> Uint32:
    """The bytes of `value` that the nibbles of `selector` name, lowest first."""
    return inline(f"prmt.b32 {{$w0}}, {{$r0}}, 0, {selector:#06x};", write_only_types=[Uint32], read_only_args=[value])


def select_bytes(low: Uint32, high: Uint32, which: Sequence[int]) -> Uint32:
    """Four bytes, lowest first, of eight: 0 to 3 are those of `low`, 4 to 7 those of `high`."""
    selector = sum(byte << 4 * n for n, byte in enumerate(which))
    return inline(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#06x};", write_only_types=[Uint32], read_only_args=[low, high]
    )


def select_bytes_by(low: Uint32, high: Uint32, selector: Int32) -> Uint32:
    """`select_bytes` by a selector in a register: a nibble for each byte of the result, lowest first."""
    return inline(
        "prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Uint32], read_only_args=[low, high, selector]
    )


def multiply_f16x2(a: Uint32, b: Uint32) -> Uint32:
    """The products of two f16x2 registers, subnormals included."""
    return inline("mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b])


def exp2(x: Float32) -> Float32:
    """2**x, approximate (2 ulp), subnormals flushed to zero."""
    return inline("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def reciprocal(x: Float32) -> Float32:
    """1 / x, approximate (1 ulp); 0 for infinity."""
    return inline("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def log2(x: Float32) -> Float32:
    """log2 of x, approximate: 2**-22 absolute near 1, else relative; -inf for 0."""
    return inline("lg2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def here(x: Any) -> Any:
    """The same integer. What it depends on is computed before, what depends on it after, whatever the compiler thinks.

    It keeps from living in registers across a loop what is cheap to compute again behind it, and from being put off
    behind a wait what can be computed before.
    """
    kind = type(x)
    width = 64 if kind is Int64 else 32
    return inline(f"mov.b{width} " + "{$w0}, {$r0};", write_only_types=[kind], read_only_args=[x])


def float_bits(x: Float32) -> Int32:
    """The bits of an fp32 value."""
    return inline("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def bits_to_float(bits: Int32) -> Float32:
    """The fp32 value with these bits."""
    return inline("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[bits])


# -- memory --------------------------------------------------------------------------------------


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


# -- barriers and bulk copies --------------------------------------------------------------------


def mbarrier_init(barrier: Int32, count: int) -> None:
    """A barrier whose phase completes after `count` arrivals (and all expected bytes)."""
    inline("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[barrier, Int32(count)])


def mbarrier_arrive(barrier: Int32) -> None:
    """One arrival, releasing this thread's earlier accesses to the CTA."""
    inline("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_arrive_expect_tx(barrier: Int32, nbytes: int | Int32) -> None:
    """One arrival that also makes the phase wait for `nbytes` of bulk copies, or of what a cluster sends."""
    inline(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, Int32(nbytes)],
    )


def mbarrier_wait(barrier: Int32, parity: Int32, *, scope: str = "cta") -> None:
    """Block until the phase of this parity has completed, and acquire what `scope` released to it."""
    inline(
        "{ .reg .pred done; "
        f"WAIT: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [{{$r0}}], {{$r1}}; "
        "@!done bra WAIT; }",
        read_only_args=[barrier, parity],
    )


def copy_to_shared(destination: Int32, source: Int64, nbytes: int, read: Int32) -> None:
    """Start a copy of `nbytes` (4, 8 or 16, aligned) from global memory, of which only the first `read` are read.

    The rest of the destination becomes zero.
    """
    inline(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {nbytes}, {{$r2}};",
        read_only_args=[destination, source, read],
    )


def mbarrier_arrive_after_copies(barrier: Int32) -> None:
    """One of the phase's expected arrivals, made when this thread's earlier `copy_to_shared` have landed."""
    inline("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def fence_async_shared() -> None:
    """This thread's writes to shared memory become visible to products and bulk copies that it orders after them."""
    inline("fence.proxy.async.shared::cta;")


def prefetch_tensor_maps(*tensor_maps: Any) -> None:
    """Bring tensor maps, which lie in the kernel's parameters, close to the copy engine; one thread is enough."""
    for tensor_map in tensor_maps:
        inline("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map.get_ptr()])


def tma_load_4d(
    destination: Int32, tensor_map: Any, coordinates: Sequence[Any], barrier: Int32, policy: int | None = None
) -> None:
    """Start one box of a rank-4 tensor map; its bytes are credited to `barrier`. `policy`: how L2 keeps the lines."""
    inline(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        + ("" if policy is None else ".L2::cache_hint")
        + " [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}]"
        + (";" if policy is None else ", {$r7};"),
        read_only_args=[destination, tensor_map, *coordinates, barrier, *([] if policy is None else [Int64(policy)])],
    )


def prefetch_4d(tensor_map: Any, coordinates: Sequence[Any]) -> None:
    """Start to bring one box of a rank-4 tensor map into L2."""
    inline(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [{$r0}, {{$r1}, {$r2}, {$r3}, {$r4}}];",
        read_only_args=[tensor_map, *coordinates],
    )
