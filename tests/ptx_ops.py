"""Execute one PTX instruction on lists of integers, for tests of the simulator's instruction groups."""

from __future__ import annotations

from typing import Any

import numpy as np

from cubinery.aot.ptxsim.isa.base import DTYPES, VIEWS, Compiled, Immediate, Instr, Operand, Pair, Register
from cubinery.aot.ptxsim.registry import find


class _Source:
    """What stands for `{0}` and `{0:f32}` in a compiled text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __format__(self, view: str) -> str:
        return f"{self.name}.view(np.{np.dtype(VIEWS[view]).name})" if view else self.name


def instruction(name: str, *sources: Operand, pair: bool = False, to: str = "b32") -> Instr:
    """An instruction as the parser would give it, with made-up registers for its results."""
    opcode, *modifiers = name.split(".")
    target: Operand = Register("d", to)
    if pair:
        target = Pair(target, Register("p", "pred"))
    text = f"{name} ...;"
    return Instr(opcode, tuple(modifiers), (target, *sources), line=1, text=text)


def specialise(name: str, *sources: Operand, pair: bool = False, to: str = "b32") -> Compiled:
    """The compiled form of an instruction."""
    instr = instruction(name, *sources, pair=pair, to=to)
    operation = find(instr)
    if operation is None:
        instr.unknown("opcode")
    return operation.specialise(instr)


def evaluate(compiled: Compiled, arrays: list[Any], active: Any = None) -> tuple[Any, ...]:
    """Run a compiled instruction; check that each result has the register type that it declares."""
    with np.errstate(all="ignore"):
        if compiled.text:
            names = {f"s{i}": array for i, array in enumerate(arrays)}
            code = compiled.text.format(*(_Source(name) for name in names))
            value = eval(code, {"np": np, **names})
            expected = VIEWS[compiled.view] if compiled.view else DTYPES[compiled.dst[0]]
            assert value.dtype == expected, f"{code}: {value.dtype}, not {expected}"
            return (value.view(DTYPES[compiled.dst[0]]),)
        assert compiled.fn is not None
        result = compiled.fn(*([active] if compiled.active else []), *arrays)
    results = result if isinstance(result, tuple) else (result,)
    assert len(results) == len(compiled.dst)
    for value, kind in zip(results, compiled.dst, strict=True):
        assert value.dtype == DTYPES[kind], f"{value.dtype} for a register of type {kind}"
    return results


def run(name: str, *sources: Any, pair: bool = False, to: str = "b32", active: Any = None) -> Any:
    """Execute `name` on lists of raw bits as integers, or on one integer: a constant of the text.

    Returns a list of integers, or a tuple of lists where there are several results. All lists have one length;
    sources are given the shape (1, length) that the machine gives them.
    """
    operands: list[Operand] = [
        Immediate(source) if isinstance(source, int) else Register(f"s{i}", "b32") for i, source in enumerate(sources)
    ]
    compiled = specialise(name, *operands, pair=pair, to=to)
    length = max((len(source) for source in sources if not isinstance(source, int)), default=32)
    arrays = []
    hidden = () if len(sources) == len(compiled.src) else ("carry",)
    assert len(sources) + len(hidden) == len(compiled.src)
    for source, kind in zip(sources, compiled.src, strict=True):
        bits = 1 if kind == "pred" else 8 * np.dtype(DTYPES[kind]).itemsize
        values = [source] if isinstance(source, int) else source
        arrays.append(np.array([[value & ((1 << bits) - 1) for value in values]], DTYPES[kind]))
    lanes = None if active is None else np.array([active], np.bool_)
    results = evaluate(compiled, arrays, lanes)
    lists = tuple([int(value) for value in np.broadcast_to(result, (1, length))[0]] for result in results)
    return lists[0] if len(lists) == 1 else lists
