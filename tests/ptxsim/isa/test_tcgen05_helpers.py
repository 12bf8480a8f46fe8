"""What the kernels' tensor-core helpers encode, as the simulator decodes it."""

from __future__ import annotations

import pytest

from cubinery.aot.ptxsim.isa import descriptors, instruction_descriptors
from cubinery.aot.ptxsim.isa.instruction_descriptors import InstructionDescriptor
from cubinery.aot.ptxsim.isa.tensor_memory import COLUMNS, AccessForm, cells

pytest.importorskip("cutlass", reason="the compiler is not installed")

from cubinery.aot.kernels.common import tcgen05 as tc


@pytest.mark.parametrize(
    ("kind", "a", "b", "m", "n", "turned"),
    [
        ("f8f6f4", "e4m3", "e4m3", 128, 16, (False, False)),
        ("f8f6f4", "e2m3", "e4m3", 128, 32, (True, True)),
        ("f8f6f4", "e3m2", "e4m3", 128, 16, (False, True)),
        ("f8f6f4", "e2m1", "e5m2", 64, 256, (True, False)),
        ("f16", "bf16", "bf16", 128, 8, (False, True)),
        ("f16", "f16", "f16", 128, 32, (False, False)),
    ],
)
def test_instruction(kind: str, a: str, b: str, m: int, n: int, turned: tuple[bool, bool]) -> None:
    expected = InstructionDescriptor(kind, m, n, a, b, "f32", a_mn_major=turned[0], b_mn_major=turned[1])
    found = tc.instruction(a, b, m, n, a_mn_major=turned[0], b_mn_major=turned[1])
    assert instruction_descriptors.decode(found, kind) == expected


@pytest.mark.parametrize("swizzle", sorted(tc.SWIZZLE_CODES))
@pytest.mark.parametrize(("start", "leading", "stride"), [(0x400, 128, 2048), (0x3_8C00, 0, 1024)])
def test_matrix(swizzle: str, start: int, leading: int, stride: int) -> None:
    matrix = tc.Matrix(swizzle, leading, stride)
    found = descriptors.decode(matrix.high << 32 | matrix.low(start), True)
    assert (found.start, found.leading, found.stride, found.swizzle.name) == (start, leading, stride, swizzle)


@pytest.mark.parametrize("columns", [8, 16, 32])
def test_quads_hold_what_their_docstring_says(columns: int) -> None:
    """Two loads of 16 lanes: lane 4g + t has rows g and g + 8 of each, at columns 8i + 2t and 8i + 2t + 1."""
    (where,) = cells(AccessForm("16x256b", columns // 8))
    for row in range(2):
        registers = tc._quad_registers(row, columns)
        assert len(registers) == columns // 4
        for n, register in enumerate(registers):
            for lane in range(32):
                expected = (lane // 4 + 8 * row, 8 * (n // 2) + 2 * (lane % 4) + n % 2)
                assert divmod(int(where[register, lane]), COLUMNS) == expected
