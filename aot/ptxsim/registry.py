"""Which function executes an opcode: the tables of all `isa` files in one."""

from __future__ import annotations

import functools
import importlib

from cubinery.aot.ptxsim.isa.base import Instr, Operation

PURE_FILES = (
    "integer", "bitfield", "logic", "float32", "float64", "half", "special", "convert", "compare", "warp", "matrix",
)  # fmt: skip
"""Files of `isa/` with an OPCODES table of register-to-register instructions."""


@functools.cache
def _table() -> dict[str, tuple[tuple[frozenset[str], Operation], ...]]:
    table: dict[str, tuple[tuple[frozenset[str], Operation], ...]] = {}
    for name in PURE_FILES:
        module = importlib.import_module(f"cubinery.aot.ptxsim.isa.{name}")
        types = frozenset(getattr(module, "TYPES", ()))
        for opcode, operation in module.OPCODES.items():
            table[opcode] = (*table.get(opcode, ()), (types, operation))
    return table


def find(instr: Instr) -> Operation | None:
    """The pure operation of an instruction, or None where its opcode is not one.

    Where several files have the opcode (`add` of integers, of f32, of f16), the first type in it
    decides: that of the result (`add.f32.f16`).
    """
    candidates = _table().get(instr.opcode, ())
    if len(candidates) <= 1:
        return candidates[0][1] if candidates else None
    for word in instr.modifiers:
        for types, operation in candidates:
            if word in types:
                return operation
    return candidates[0][1]
