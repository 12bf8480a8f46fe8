"""ldmatrix and stmatrix against the PTX ISA's figures of which lane holds what (9.7.14.5.15, 9.7.14.5.16)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cubinery.aot.ptxsim.isa import containers
from cubinery.aot.ptxsim.isa.base import Instr, UnknownInstruction
from cubinery.aot.ptxsim.isa.matrix_memory import load, load_form, store, store_form


def instr(name: str) -> Instr:
    opcode, *modifiers = name.split(".")
    return Instr(opcode, tuple(modifiers), (), text=name)


def rows_of(count: int) -> Any:
    return np.random.default_rng(count).integers(0, 256, (2, count, 16)).astype(np.uint8)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_m8n8(count: int, trans: bool) -> None:
    words = "trans." if trans else ""
    form = load_form(instr(f"ldmatrix.sync.aligned.m8n8.x{count}.{words}shared.b16"))
    assert (form.rows, form.registers) == (8 * count, count)
    rows = rows_of(8 * count)
    registers = load(form, rows)
    matrices = rows.view(np.uint16).reshape(2, count, 8, 8)
    for warp in range(2):
        for i in range(count):
            for lane in range(32):
                g, t = divmod(lane, 4)
                at = [(2 * t, g), (2 * t + 1, g)] if trans else [(g, 2 * t), (g, 2 * t + 1)]
                low, high = (int(matrices[warp, i][where]) for where in at)
                assert int(registers[warp, i, lane]) == low | high << 16
    back = store_form(instr(f"stmatrix.sync.aligned.m8n8.x{count}.{words}shared.b16"))
    assert (store(back, registers) == rows).all()


@pytest.mark.parametrize("count", [1, 2])
def test_m16n16_of_bytes_is_transposed(count: int) -> None:
    form = load_form(instr(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.b8"))
    assert (form.rows, form.registers) == (16 * count, 2 * count)
    rows = rows_of(16 * count)
    registers = load(form, rows)
    for i in range(count):
        for r in range(2):
            for lane in range(32):
                for byte in range(4):
                    expected = rows[1, 16 * i + 4 * (lane % 4) + byte, lane // 4 + 8 * r]
                    assert int(registers[1, 2 * i + r, lane]) >> 8 * byte & 0xFF == expected


def unpacked(container: Any, bits: int) -> list[int]:
    """Sixteen elements of a padded container, lowest bits first."""
    word = int.from_bytes(container.tobytes(), "little")
    return [word >> i * bits & (1 << bits) - 1 for i in range(16)]


@pytest.mark.parametrize(("source", "bits"), [("b4x16_p64", 4), ("b6x16_p32", 6)])
def test_sub_byte_loads_widen(source: str, bits: int) -> None:
    form = load_form(instr(f"ldmatrix.sync.aligned.m8n16.x2.shared.b8x16.{source}"))
    rows = rows_of(form.rows)
    registers = load(form, rows)
    for i in range(2):
        for lane in range(32):
            elements = unpacked(rows[0, 8 * i + lane // 4], bits)
            for byte in range(4):
                assert int(registers[0, i, lane]) >> 8 * byte & 0xFF == elements[4 * (lane % 4) + byte]
    form = load_form(instr(f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.{source}"))
    registers = load(form, rows)
    for r in range(2):
        for lane in range(32):
            for byte in range(4):
                elements = unpacked(rows[0, 4 * (lane % 4) + byte], bits)
                assert int(registers[0, r, lane]) >> 8 * byte & 0xFF == elements[lane // 4 + 8 * r]


def test_stmatrix_of_bytes_writes_an_accumulator_by_columns() -> None:
    """The m16n8 fragment has (e0, e1) in row g and (e2, e3) in row g + 8; memory rows are its columns."""
    form = store_form(instr("stmatrix.sync.aligned.m16n8.x2.trans.shared.b8"))
    registers = np.random.default_rng(5).integers(0, 1 << 32, (2, 2, 32), dtype=np.uint64).astype(np.uint32)
    rows = store(form, registers)
    for i in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for e in range(4):
                row, column = g + 8 * (e // 2), 2 * t + e % 2
                assert rows[1, 8 * i + column, row] == int(registers[1, i, lane]) >> 8 * e & 0xFF


@pytest.mark.parametrize("bits", [4, 6])
def test_narrowing_undoes_widening(bits: int) -> None:
    elements = np.random.default_rng(bits).integers(0, 1 << bits, (3, 32)).astype(np.uint8)
    narrow, widen = {4: (containers.narrow4, containers.widen4), 6: (containers.narrow6, containers.widen6)}[bits]
    packed = narrow(elements)
    assert packed.shape == (3, 32 * bits // 8)
    assert (widen(packed) == elements).all()


@pytest.mark.parametrize(
    "name",
    [
        "ldmatrix.sync.aligned.m16n16.x1.shared.b8",
        "ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8",
        "ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64",
        "ldmatrix.sync.aligned.m8n8.x3.shared.b16",
        "ldmatrix.sync.aligned.m8n8.x1.shared.b8",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8",
    ],
)
def test_unknown_forms_are_refused(name: str) -> None:
    with pytest.raises(UnknownInstruction):
        (load_form if name.startswith("ld") else store_form)(instr(name))
