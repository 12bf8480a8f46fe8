"""cvt from s2f6x2 against its definition: a two's complement byte over 64, times a power of two."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from ptx_ops import run

from cubinery.aot.ptxsim.isa.base import UnknownInstruction

SCALED = "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2"


def bf16(value: float) -> int:
    """Bits of a number that bf16 holds exactly."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    assert bits & 0xFFFF == 0
    return int(bits >> 16)


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


@pytest.mark.parametrize("scale", [0, 1, 121, 127, 133, 246])
def test_every_byte_at_a_scale(scale: int) -> None:
    """Both elements, each with a scale of its own."""
    low, high = np.arange(256), np.arange(256)[::-1]
    bits = (low | high << 8).astype(np.uint16)
    scales = np.full(256, scale | 127 << 8, np.uint16)
    found = run(SCALED, bits.tolist(), scales.tolist())
    expected = [
        bf16(signed(int(h)) / 64) << 16 | bf16(signed(int(w)) / 64 * 2.0 ** (scale - 127))
        for w, h in zip(low, high, strict=True)
    ]
    assert found == expected


def test_without_scales_and_relu() -> None:
    found = run("cvt.rn.satfinite.relu.bf16x2.s2f6x2", [0x80C0, 0x7F01])
    assert found == [0, bf16(127 / 64) << 16 | bf16(1 / 64)]


def test_too_large_stays_finite_and_nan_stays_nan() -> None:
    bits, scales = np.array([0x807F, 0x0101]), np.array([0xFEFE, 0xFFFF])
    found = run(SCALED, bits.tolist(), scales.tolist())
    assert found == [0xFF7F << 16 | 0x7F7E, 0x7FFF7FFF]


@pytest.mark.parametrize(
    "name", ["cvt.rn.bf16x2.s2f6x2", "cvt.rz.satfinite.bf16x2.s2f6x2", "cvt.rn.satfinite.f16x2.s2f6x2"]
)
def test_other_forms_do_not_exist(name: str) -> None:
    with pytest.raises(UnknownInstruction):
        run(name, [0])
