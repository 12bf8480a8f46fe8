"""The 32-bit instruction descriptor of tcgen05.mma, for every kind (PTX ISA 9.7.16.4.2).

kinds tf32, f16, f8f6f4, i8:
    2 sparse   3 saturate (i8)   4-5 type of D   7-9 type of A   10-12 type of B   13, 14 negate A, B
    15, 16 A, B is MN-major   17-22 N / 8   24-28 M / 16   30-31 largest shift (.ws)
kinds mxf8f6f4, mxf4, mxf4nvf4:
    2 sparse   4-5 byte of B's scales   7-9 type of A   10-12 type of B   13, 14 negate   15, 16 MN-major   17-22 N / 8
    23 type of the scales   24-28 M / 16   29-30 byte of A's scales   31 K = 96
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cubinery.aot.ptxsim.faults import DescriptorFault

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERANDS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _F8F6F4,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_ACCUMULATORS: dict[str, dict[int, str]] = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
"""Elements along K of one dense instruction: 32 bytes."""
BLOCK_SCALED = ("mxf8f6f4", "mxf4", "mxf4nvf4")
_SCALES = {
    "mxf8f6f4": ("ue8m0",), "mxf4": ("ue8m0",), "mxf4nvf4": ("ue4m3", "ue8m0"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class InstructionDescriptor:
    """What an instruction descriptor says. M counts the rows of all CTAs of the group together."""

    kind: str
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_negate: bool = False
    b_negate: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    saturate: bool = False
    scale_type: str = ""
    a_scale_byte: int = 0
    b_scale_byte: int = 0

    @property
    def k(self) -> int:
        return K[self.kind]

    def encode(self) -> int:
        """The 32 bits; handy in tests."""
        codes = {name: code for code, name in _OPERANDS[self.kind].items()}
        value = codes[self.a_type] << 7 | codes[self.b_type] << 10 | self.a_negate << 13 | self.b_negate << 14
        value |= self.a_mn_major << 15 | self.b_mn_major << 16 | (self.n >> 3) << 17 | (self.m >> 4) << 24
        if self.kind in BLOCK_SCALED:
            return value | self.b_scale_byte << 4 | (self.scale_type == "ue8m0") << 23 | self.a_scale_byte << 29
        accumulator = {"f16": 0, "f32": 1, "s32": 2}[self.d_type]
        return value | self.saturate << 3 | accumulator << 4


def _shape_error(m: int, n: int, kind: str, group: int, ws: bool) -> str:
    """Words for a shape that does not exist (9.7.16.2.1, Table 41), or nothing."""
    if ws:
        return "" if m in (32, 64, 128) and n in (64, 128, 256) else "expected M 32, 64 or 128 and N 64, 128 or 256"
    rows = (128, 256) if group == 2 else (128,) if kind in BLOCK_SCALED else (64, 128)
    if m not in rows:
        return f"expected M of {' or '.join(map(str, rows))} for cta_group::{group}"
    # The table wants steps of 16 for M = 128 in one CTA; published kernels for sm_100a multiply 128 x 8 all the same.
    step = 16 if group == 2 or (kind == "i8" and n > 32) else 8
    if not 0 < n <= 256 or n % step:
        return f"expected N of {step} to 256 in steps of {step}"
    return ""


def _field(value: int, low: int, bits: int) -> int:
    return value >> low & ((1 << bits) - 1)


def decode(value: int, kind: str, group: int = 1, ws: bool = False) -> InstructionDescriptor:
    """Read 32 bits for an instruction of `kind` and cta_group; raises DescriptorFault for what does not exist."""
    field = partial(_field, value)

    def refuse(reason: str) -> DescriptorFault:
        return DescriptorFault(f"instruction descriptor {value:#010x} of kind::{kind}: {reason}")

    operands = _OPERANDS[kind]
    a, b = operands.get(field(7, 3)), operands.get(field(10, 3))
    if a is None or b is None:
        raise refuse(f"types {field(7, 3)} and {field(10, 3)} of A and B: expected {operands}")
    if field(2, 1):
        raise refuse("sparse matrices are not executed")
    m, n = field(24, 5) << 4, field(17, 6) << 3
    if reason := _shape_error(m, n, kind, group, ws):
        raise refuse(f"M {m}, N {n}: {reason}")
    a_major, b_major = bool(field(15, 1)), bool(field(16, 1))
    if kind in ("mxf4", "mxf4nvf4") and (a_major or b_major):
        raise refuse("packed 4-bit elements are K-major")
    if kind in BLOCK_SCALED:
        if field(31, 1):
            raise refuse("K = 96 is not executed")
        scale = "ue8m0" if field(23, 1) else "ue4m3"
        if scale not in _SCALES[kind]:
            raise refuse(f"scales of type {scale}: expected {' or '.join(_SCALES[kind])}")
        return InstructionDescriptor(
            kind, m, n, a, b, "f32", bool(field(13, 1)), bool(field(14, 1)), a_major, b_major,
            scale_type=scale, a_scale_byte=field(29, 2), b_scale_byte=field(4, 2),
        )  # fmt: skip
    d = _ACCUMULATORS[kind].get(field(4, 2))
    if d is None:
        raise refuse(f"type {field(4, 2)} of D: expected {_ACCUMULATORS[kind]}")
    negate_a, negate_b = bool(field(13, 1)), bool(field(14, 1))
    if kind == "i8" and (negate_a or negate_b):
        raise refuse("integers have no negation")
    if field(3, 1) and kind != "i8":
        raise refuse("only integers saturate")
    return InstructionDescriptor(
        kind, m, n, a, b, d, negate_a, negate_b, a_major, b_major, saturate=bool(field(3, 1))
    )  # fmt: skip
