"""cvt between every pair of types, against exact rational arithmetic (PTX ISA 9.7.9.21; cvt.pack 9.7.9.22)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ptx_floats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    NAMES,
    TF32,
    Format,
    Value,
    decode,
    encode,
    flush,
    is_negative,
    payload_kept,
    sample,
    saturated,
    specials,
)
from ptx_ops import run, specialise

from cubinery.aot.ptxsim.isa import formats
from cubinery.aot.ptxsim.isa.base import UnknownInstruction

INTEGERS = [f"{letter}{width}" for letter in "us" for width in (8, 16, 32, 64)]
MODES = ("rn", "rz", "rm", "rp")


def limits(kind: str) -> tuple[int, int]:
    width = int(kind[1:])
    return (0, (1 << width) - 1) if kind[0] == "u" else (-(1 << width - 1), (1 << width - 1) - 1)


def integers(kind: str) -> list[int]:
    low, high = limits(kind)
    width = int(kind[1:])
    near = [0, 1, 2, 3, 127, 128, 129, 255, 256, 2049, 4097, 32767, 32768, 65535, 65536, 16777217, 16777219, 33554435]
    near += [
        (1 << 31) - 1,
        1 << 31,
        (1 << 32) - 1,
        (1 << 53) + 1,
        (1 << 62) + 129,
        (1 << 63) - 1,
        1 << 63,
        high,
        high - 1,
    ]
    values = [x for v in near for x in (v, -v) if low <= x <= high] + [low, low + 1]
    return [x & ((1 << width) - 1) for x in values]


def number(bits: int, kind: str) -> int:
    width = int(kind[1:])
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def register_width(kind: str) -> int:
    return max(16, int(kind[1:]))


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integer_to_integer(target: str, source: str) -> None:
    """Extension by the source's sign, truncation, .sat; results narrower than the register extended by their sign."""
    values = integers(source)
    low, high = limits(target)
    width = int(target[1:])
    for to in ("b16", "b32", "b64"):
        if int(to[1:]) < register_width(target):
            continue
        mask = (1 << int(to[1:])) - 1
        plain = [number(number(x, source) & ((1 << width) - 1), target) & mask for x in values]
        assert run(f"cvt.{target}.{source}", values, to=to) == plain
        clamped = [max(low, min(high, number(x, source))) & mask for x in values]
        assert run(f"cvt.sat.{target}.{source}", values, to=to) == clamped


FLOATS = ("f16", "bf16", "f32", "f64")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", FLOATS)
def test_integer_to_float(target: str, source: str, mode: str) -> None:
    """Rounded once, also 64-bit integers to f32 and halves; .sat clamps to [0, 1]."""
    fmt, values = NAMES[target], integers(source)
    exact: list[Value] = [Fraction(number(x, source)) or 0.0 for x in values]
    bits = [encode(value, fmt, mode) for value in exact]
    assert run(f"cvt.{mode}.{target}.{source}", values) == bits
    if target != "bf16":
        assert run(f"cvt.{mode}.sat.{target}.{source}", values) == [saturated(x, fmt) for x in bits]


def float_values(fmt: Format) -> list[int]:
    """Edges, halves between integers, and the neighbourhood of every integer type's limits."""
    points = [Fraction(x, 2) for x in range(-9, 10)]
    points += [
        Fraction(sign * (1 << n) + d, 2)
        for n in (8, 9, 16, 17, 32, 33, 64, 65)
        for d in (-2, -1, 0, 1)
        for sign in (1, -1)
    ]
    return specials(fmt) + [encode(point or 0.0, fmt, "rz") for point in points] + sample(fmt, 30, 7)


ROUND = {
    "rni": lambda x: round(x),
    "rzi": lambda x: math.trunc(x),
    "rmi": lambda x: math.floor(x),
    "rpi": lambda x: math.ceil(x),
}


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("source", FLOATS)
def test_float_to_integer(source: str, target: str, mode: str) -> None:
    """Saturating; NaN gives 0, or 1 << (width - 1) where either side has 64 bits."""
    fmt = NAMES[source]
    low, high = limits(target)
    width, mask = int(target[1:]), (1 << register_width(target)) - 1

    def apply(bits: int) -> int:
        value = decode(bits, fmt)
        if value != value:
            wide = source == "f64" or width == 64
            return number(1 << (width - 1), target) & mask if wide else 0
        if value in (math.inf, -math.inf):
            return (high if value > 0 else low) & mask
        return max(low, min(high, ROUND[mode](Fraction(value)))) & mask

    values = float_values(fmt)
    to = f"b{register_width(target)}"
    assert run(f"cvt.{mode}.{target}.{source}", values, to=to) == [apply(x) for x in values]


def nan_kept(bits: int, fmt: Format, to: Format, keeps: bool) -> int:
    """A NaN with its sign and the payload that has room, made quiet (bf16 to f32 only moves it); 0 for the rest."""
    magnitude = bits & ~fmt.sign
    if not keeps or magnitude <= fmt.inf:
        return 0
    shift = to.mantissa - fmt.mantissa
    field = magnitude - fmt.inf
    field = field << shift if shift >= 0 else field >> -shift
    quiet = 0 if (fmt.mantissa, to.mantissa) == (7, 23) else 1 << (to.mantissa - 1)
    return to.inf | field | quiet | (to.sign if bits & fmt.sign else 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_float_to_float(target: str, source: str, mode: str) -> None:
    """One rounding from the exact source; .sat clamps; .ftz flushes f32, but for f16; NaN is canonical, or kept."""
    fmt, to = NAMES[source], NAMES[target]
    values = float_values(fmt) + [encode(decode(x, to), fmt) for x in specials(to)]
    if FLOATS.index(target) >= FLOATS.index(source) and source != "bf16" and target != "bf16":
        with pytest.raises(UnknownInstruction, match="widening conversion"):
            specialise(f"cvt.{mode}.{target}.{source}")
        name, mode = "cvt", "rn"
    else:
        name = f"cvt.{mode}"
    canonical = [encode(decode(x, fmt), to, mode) for x in values]
    keeps = "f64" in (source, target) or (source, target) == ("bf16", "f32")
    bits = [nan_kept(x, fmt, to, keeps and source != target) or y for x, y in zip(values, canonical, strict=True)]
    if source == target == "f64":
        bits = [payload_kept(y, x) for x, y in zip(values, canonical, strict=True)]
    assert run(f"{name}.{target}.{source}", values) == bits
    if "bf16" not in (source, target):
        assert run(f"{name}.sat.{target}.{source}", values) == [saturated(x, to) for x in bits]
    if "f32" in (source, target):
        inputs = [flush(x, fmt) if source == "f32" and target != "f16" else x for x in values]
        outputs = [encode(decode(x, fmt), to, mode) for x in inputs]
        if source == "f32" and target == "f64":  # the canonical NaN of f32, widened
            outputs = [0x7FFFFFFFE0000000 if x == to.nan else x for x in outputs]
        elif source == "f64":
            outputs = [nan_kept(x, fmt, to, True) or y for x, y in zip(values, outputs, strict=True)]
        outputs = [flush(x, to) if target == "f32" else x for x in outputs]
        assert run(f"{name}.ftz.{target}.{source}", values) == outputs


def test_widening_needs_no_mode() -> None:
    """Widening conversions are exact and are written without a rounding mode; narrowing ones are refused so."""
    values = specials(F16)
    assert run("cvt.f32.f16", values) == [encode(decode(x, F16), F32) for x in values]
    wide = [nan_kept(x, F32, F64, True) or encode(decode(x, F32), F64) for x in specials(F32)]
    assert run("cvt.f64.f32", specials(F32)) == wide
    for name in ("cvt.f16.f32", "cvt.f32.f64", "cvt.bf16.f16", "cvt.f32.s32", "cvt.s32.f32"):
        with pytest.raises(UnknownInstruction):
            specialise(name)


@pytest.mark.parametrize("mode", ROUND)
@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_round_to_integral_float(kind: str, mode: str) -> None:
    """cvt.rni.f32.f32 and kin: to an integer in the same format, zeros keeping the sign of the source."""
    fmt = NAMES[kind]

    def apply(bits: int) -> int:
        value = decode(bits, fmt)
        if not isinstance(value, Fraction):
            return payload_kept(encode(value, fmt), bits) if kind == "f64" else encode(value, fmt)
        whole = ROUND[mode](value)
        return encode(Fraction(whole) if whole else math.copysign(0.0, -1 if is_negative(value) else 1), fmt)

    values = float_values(fmt)
    assert run(f"cvt.{mode}.{kind}.{kind}", values) == [apply(x) for x in values]


def clamp(value: Value, relu: bool) -> Value:
    return 0.0 if relu and value == value and is_negative(value) else value


def f32_values(fmt: Format) -> list[int]:
    """f32 bits around every kind of code of a narrower format: exact, ties and their neighbours, overflow."""
    codes = [*specials(fmt), 0x15, 0x16, 0x2B & (fmt.sign - 1)]
    points = [decode(code, fmt) for code in codes if isinstance(decode(code, fmt), Fraction)]
    bits = specials(F32)
    for low in list(points):
        assert isinstance(low, Fraction)
        step = fmt.magnitude(1) if abs(low) < fmt.magnitude(1 << fmt.mantissa) else abs(low) / (1 << fmt.mantissa + 1)
        for shift in (0, Fraction(1, 2), 1, Fraction(3, 2)):
            centre = encode(low + shift * step or 0.0, F32)
            bits += [centre, centre + 1, max(centre - 1, 0)]
    return [x for x in bits if 0 <= x <= 0xFFFFFFFF] + sample(F32, 80, 9, spread=fmt.offset + 2)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("suffix", ["", ".relu", ".satfinite", ".relu.satfinite"])
def test_halves(kind: str, mode: str, suffix: str) -> None:
    """cvt.{rn,rz}{.relu}{.satfinite} to f16 and bf16, and to pairs: a in the upper half."""
    fmt = NAMES[kind]
    values = f32_values(fmt)
    relu, finite = "relu" in suffix, "satfinite" in suffix
    codes = [encode(clamp(decode(x, F32), relu), fmt, mode, finite) for x in values]
    assert run(f"cvt.{mode}{suffix}.{kind}.f32", values) == codes
    packed = run(f"cvt.{mode}{suffix}.{kind}x2.f32", values, values[::-1])
    assert packed == [high << 16 | low for high, low in zip(codes, codes[::-1], strict=True)]


@pytest.mark.parametrize("mode", ["rna", "rn", "rz"])
@pytest.mark.parametrize("suffix", ["", ".relu", ".satfinite"])
def test_tf32(mode: str, suffix: str) -> None:
    """cvt to tf32: ties away (rna) or to even, the low 13 bits zero; NaN 0x7fffe000, with .rna its own bits."""
    values = f32_values(TF32)
    if (mode, suffix) == ("rna", ".relu"):
        with pytest.raises(UnknownInstruction, match=r"takes no \.relu"):
            specialise("cvt.rna.relu.tf32.f32")
        return

    def apply(bits: int) -> int:
        value = clamp(decode(bits, F32), "relu" in suffix)
        nan = bits & 0xFFFFE000 if mode == "rna" else 0x7FFFE000
        return nan if value != value else encode(value, TF32, mode, "satfinite" in suffix) << 13

    assert run(f"cvt.{mode}{suffix}.tf32.f32", values) == [apply(x) for x in values]


NARROW = {"e4m3": E4M3, "e5m2": E5M2, "e2m3": E2M3, "e3m2": E3M2, "e2m1": E2M1}


@pytest.mark.parametrize("relu", ["", ".relu"])
@pytest.mark.parametrize("kind", NARROW)
def test_to_narrow(kind: str, relu: str) -> None:
    """cvt.rn.satfinite to 8, 6 and 4 bits from f32, f16x2 and bf16x2; a in the upper part, NaN as the format has it."""
    fmt = NARROW[kind]
    shift = 4 if kind == "e2m1" else 8
    values = f32_values(fmt)
    codes = [encode(clamp(decode(x, F32), bool(relu)), fmt, "rn", True) for x in values]
    joined = [high << shift | low for high, low in zip(codes, codes[::-1], strict=True)]
    assert run(f"cvt.rn.satfinite{relu}.{kind}x2.f32", values, values[::-1]) == joined
    for half in ("f16", "bf16"):
        halves = [encode(decode(x, F32), NAMES[half]) for x in values]
        codes = [encode(clamp(decode(x, NAMES[half]), bool(relu)), fmt, "rn", True) for x in halves]
        pairs = [high << 16 | low for high, low in zip(halves, halves[::-1], strict=True)]
        expected = [high << shift | low for high, low in zip(codes, codes[::-1], strict=True)]
        assert run(f"cvt.rn.satfinite{relu}.{kind}x2.{half}x2", pairs) == expected


@pytest.mark.parametrize("kind", NARROW)
def test_from_narrow(kind: str) -> None:
    """cvt.rn.f16x2 from every code: exact, NaN 0x7fff, padding bits ignored; .relu clamps."""
    fmt = NARROW[kind]
    shift, count = (4, 16) if kind == "e2m1" else (8, 256)
    codes = list(range(count))
    values = [decode(code & (2 * fmt.sign - 1), fmt) for code in codes]
    halves = [encode(value, F16) for value in values]
    packed = [code << shift | codes[-1 - code] for code in codes]
    assert run(f"cvt.rn.f16x2.{kind}x2", packed) == [halves[c] << 16 | halves[-1 - c] for c in codes]
    halves = [encode(clamp(value, True), F16) for value in values]
    assert run(f"cvt.rn.relu.f16x2.{kind}x2", packed) == [halves[c] << 16 | halves[-1 - c] for c in codes]


def test_narrow_by_hand() -> None:
    """Codes that the format definitions of 5.2.3 give directly."""
    one, pair = 0x3F800000, encode(Fraction(448), F32)
    assert run("cvt.rn.satfinite.e4m3x2.f32", [one, pair, 0x7F800000], [0xBF800000, 0, 0x7FC00000]) == [
        0x38B8,
        0x7E00,
        0x7E7F,
    ]
    assert run("cvt.rn.satfinite.e5m2x2.f32", [one, 0xFF800000], [one, one]) == [0x3C3C, 0xFB3C]
    assert run("cvt.rn.satfinite.e2m1x2.f32", [encode(Fraction(6), F32), 0x7FC00000], [one, 0xC0000000]) == [0x72, 0x7C]
    assert run("cvt.rn.satfinite.e2m3x2.f32", [encode(Fraction(15, 2), F32)], [one]) == [0x1F08]
    assert run("cvt.rn.satfinite.e3m2x2.f32", [encode(Fraction(28), F32)], [one]) == [0x1F0C]
    assert run("cvt.rn.f16x2.e4m3x2", [0x387E]) == [0x3C005F00]
    assert run("cvt.rn.bf16x2.ue8m0x2", [0x7FFF, 0x0001]) == [0x3F807FFF, 0x00400080]


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("finite", ["", ".satfinite"])
def test_ue8m0(mode: str, finite: str) -> None:
    """Powers of two: the sign dropped, rounded down or up, NaN 0xff, what is too large 0xff or 0xfe."""

    def apply(bits: int) -> int:
        value = decode(bits, F32)
        if value != value:
            return 0xFF
        if abs(value) == math.inf:
            return 0xFE if finite else 0xFF
        size = abs(Fraction(value))
        code = 0
        for candidate in range(255):
            if Fraction(2) ** (candidate - 127) <= size:
                code = candidate
        if mode == "rp" and size > Fraction(2) ** (code - 127):
            code += 1
        return min(code, 0xFE) if finite else code

    values = specials(F32) + sample(F32, 40, 3)
    codes = [apply(x) for x in values]
    expected = [high << 8 | low for high, low in zip(codes, codes[::-1], strict=True)]
    assert run(f"cvt.{mode}{finite}.ue8m0x2.f32", values, values[::-1]) == expected
    halves = specials(BF16)
    codes = [apply(x << 16) for x in halves]
    pairs = [x << 16 | x for x in halves]
    assert run(f"cvt.{mode}{finite}.ue8m0x2.bf16x2", pairs) == [code << 8 | code for code in codes]


@pytest.mark.parametrize(("kind", "bits"), [("f16", 13), ("bf16", 16)])
def test_stochastic(kind: str, bits: int) -> None:
    """cvt.rs: the value plus random bits below the last place, truncated; a takes the upper random half."""
    fmt = NAMES[kind]
    a, b = 0x3F800000 | 1 << (22 - fmt.mantissa), 0xBF800000 | 1 << (21 - fmt.mantissa)  # 1/2 and 1/4 of the last place
    one = fmt.offset << fmt.mantissa
    half, quarter = 1 << (bits - 1), 3 << (bits - 2)
    cases = {(0, 0): (0, 0), (half, 0): (1, 0), (half - 1, quarter): (0, 1), (half, quarter - 1): (1, 0)}
    for (upper, lower), (up_a, up_b) in cases.items():
        expected = (one + up_a) << 16 | fmt.sign | one + up_b
        assert run(f"cvt.rs.{kind}x2.f32", [a], [b], [upper << 16 | lower]) == [expected]


PACK = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


@pytest.mark.parametrize("kind", PACK)
def test_pack(kind: str) -> None:
    """9.7.9.22 cvt.pack.sat: clamped a above clamped b, c's low bits above both."""
    width = PACK[kind]
    low, high = limits(kind)
    values = [0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 5, 0xFFFFFFF9, 300, 70000]
    a, b = [x for x in values for _ in values], [y for _ in values for y in values]
    c = [0x89ABCDEF] * len(a)

    def field(x: int) -> int:
        return max(low, min(high, number(x, "s32"))) & ((1 << width) - 1)

    pairs = [field(x) << width | field(y) for x, y in zip(a, b, strict=True)]
    if width == 16:
        assert run(f"cvt.pack.sat.{kind}.s32", a, b) == pairs
    else:
        appended = [(c[0] << 2 * width | pair) & 0xFFFFFFFF for pair in pairs]
        assert run(f"cvt.pack.sat.{kind}.s32.b32", a, b, c) == appended


@given(
    st.integers(0, 0xFFFFFFFF),
    st.sampled_from(sorted(NARROW | {"f16": F16, "bf16": BF16})),
    st.sampled_from(("rn", "rz", "rm", "rp", "rna")),
)
def test_encode_property(bits: int, name: str, mode: str) -> None:
    """formats.encode rounds any f32 to any format in any mode as the oracle does, saturating or not."""
    fmt, value = NAMES[name], np.array([bits], np.uint32).view(np.float32).astype(np.float64)
    for finite in (False, True):
        found = int(formats.encode(value, formats.FORMATS[name], mode, finite)[0])
        assert found == encode(decode(bits, F32), fmt, mode, finite)


def test_nearest_f16_of_large_arrays() -> None:
    """The two ways of formats.nearest_f16 agree: one of 64 Ki values around every f16, one in small pieces."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    with np.errstate(all="ignore"):
        centres = halves.astype(np.float32).view(np.uint32)
        for offset in (0, 1, 0xFFF, 0x1000, 0x1001, 0xFFFFF000):
            bits = centres + np.uint32(offset)
            large = formats.nearest_f16(bits)
            small = np.concatenate([formats.nearest_f16(part) for part in np.split(bits, 64)])
            assert np.array_equal(large, small), hex(offset)
            some = slice(offset % 97, None, 97)
            assert large[some].tolist() == [encode(decode(int(x), F32), F16) for x in bits[some]]


def test_decode_tables() -> None:
    """formats.decode of every code of every narrow format."""
    for name, fmt in NARROW.items():
        for code, value in enumerate(formats.decode(np.arange(2 * fmt.sign, dtype=np.uint16), name)):
            exact = decode(code, fmt)
            assert float(exact) == value or (exact != exact and value != value), (name, code)


REFUSED = [
    "cvt.rn.e4m3x2.f32",
    "cvt.rz.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e4m3x4.f32",
    "cvt.rs.satfinite.e4m3x4.f32",
    "cvt.rn.ue8m0x2.f32",
    "cvt.rn.bf16x2.e4m3x2",
    "cvt.rm.f16x2.f32",
    "cvt.rn.relu.f32.f64",
    "cvt.rn.rni.f32.f32",
    "cvt.rni.s32.u32",
    "cvt.rna.f32.f64",
    "cvt.pack.u8.s32.b32",
    "cvt.rn.sat.bf16.f32",
    "cvt.rn.ftz.f16.f64",
    "cvt.rni.f32.f64",
    "cvt.rn.ftz.relu.f16.f32",
    "cvt.rz.ue8m0x2.f16x2",
    "cvt.rn.satfinite.scaled.e2m1x2.f32",
    "cvt.f32",
]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """What is no PTX, or is not executed, raises with the line."""
    with pytest.raises(UnknownInstruction, match="PTX line 1"):
        specialise(name)
