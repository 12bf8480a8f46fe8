"""Forms of the tcgen05 instructions: which one it is, with its operands by name (PTX ISA 9.7.16).

`form(instr)` reads one instruction when a kernel is translated and refuses what it does not know. What the forms do is
in tcgen05.py (mma) and tensor_memory.py (everything else).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cubinery.aot.ptxsim.isa.base import Address, Immediate, Instr, Modifiers, Operand, Vector, flatten
from cubinery.aot.ptxsim.isa.tensor_memory import AccessForm, CopyForm

_COUNTS = ("x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128")
_KINDS = ("f16", "tf32", "f8f6f4", "i8", "mxf8f6f4", "mxf4", "mxf4nvf4")


@dataclass(frozen=True, slots=True)
class Mma:
    """9.7.16.10.9 tcgen05.mma and .ws. Collector hints change no value."""

    kind: str
    group: int
    ws: bool
    d: Address
    a: Operand
    """A register with a descriptor, or an Address of tensor memory."""
    b: Operand
    descriptor: Operand
    enable_d: Operand
    scale_d: int = 0
    disabled: tuple[Operand, ...] = ()
    """32-bit registers, lowest lanes first."""
    vector: int = 0
    a_scales: Address | None = None
    b_scales: Address | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """9.7.16.8.1 tcgen05.ld (.red) and tcgen05.st."""

    store: bool
    form: AccessForm
    address: Address
    registers: tuple[Operand, ...]
    reduction: str = ""
    """ld.red: min or max over the thread's registers, into `reduced`."""
    type: str = ""
    absolute: bool = False
    nan: bool = False
    reduced: Operand | None = None


@dataclass(frozen=True, slots=True)
class Copy:
    """9.7.16.8.2 tcgen05.cp."""

    form: CopyForm
    group: int
    address: Address
    descriptor: Operand


@dataclass(frozen=True, slots=True)
class Allocation:
    """9.7.16.7.1 alloc (writes the address to shared memory), dealloc and relinquish_alloc_permit."""

    operation: str
    group: int
    address: Operand | None = None
    columns: Operand | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """9.7.16.11 tcgen05.commit."""

    group: int
    barrier: Address
    mask: Operand | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """wait::ld, wait::st, fence::before_thread_sync, fence::after_thread_sync."""

    what: str


@dataclass(frozen=True, slots=True)
class Shift:
    """9.7.16.8.3 tcgen05.shift.down."""

    group: int
    address: Address


Form = Mma | Access | Copy | Allocation | Commit | Order | Shift


def form(instr: Instr) -> Form:
    """Read a tcgen05 instruction."""
    mods = Modifiers(instr)
    word = mods.next()
    reader = _READERS.get(word)
    if reader is None:
        instr.unknown("instruction is not executed")
    return reader(instr, mods, word)


def _group(mods: Modifiers) -> int:
    return int(mods.expect("cta_group::1", "cta_group::2")[-1])


def _address(instr: Instr, index: int) -> Address:
    operand = instr.operands[index] if index < len(instr.operands) else None
    if not isinstance(operand, Address):
        instr.unknown("expected an address in brackets")
    return operand


def _mma(instr: Instr, mods: Modifiers, _word: str) -> Mma:
    ws = mods.take("ws")
    group = _group(mods)
    kind = mods.expect(*(f"kind::{k}" for k in _KINDS)).removeprefix("kind::")
    vector = _vector(instr, mods, kind)
    buffers = ("b0", "b1", "b2", "b3") if ws else ("a",)
    mods.choose(*(f"collector::{b}::{op}" for b in buffers for op in ("fill", "use", "lastuse", "discard")))
    mods.done()
    operands = list(instr.operands)
    if len(operands) < 5 or (ws and (group == 2 or vector)):
        instr.unknown("operands not understood")
    d, a, b, descriptor, *rest = operands
    scales: list[Address] = []
    if vector:
        scales = [operand for operand in rest[:2] if isinstance(operand, Address)]
        rest = rest[2:]
        if len(scales) != 2:
            instr.unknown("expected the addresses of two scale matrices")
    disabled: tuple[Operand, ...] = ()
    if rest and isinstance(rest[0], Vector):
        disabled, rest = rest[0].elements, rest[1:]
        if len(disabled) != 4 * group or vector or ws:
            instr.unknown(f"expected {4 * group} registers of disabled lanes")
    scale_d = 0
    last = rest[-1] if len(rest) == 2 and kind in ("f16", "tf32") and not ws else None
    if isinstance(last, Immediate):
        scale_d, rest = last.value, rest[:-1]
    if len(rest) != 1 or not 0 <= scale_d <= 15 or not isinstance(d, Address):
        instr.unknown("operands not understood")
    return Mma(kind, group, ws, d, a, b, descriptor, rest[0], scale_d, disabled, vector, *(scales or (None, None)))


def _vector(instr: Instr, mods: Modifiers, kind: str) -> int:
    """Scales along K of one instruction, from .scale_vec::nX, .block16 or .block32, or the kind's default."""
    scaled = kind.startswith("mx")
    if mods.take("block_scale") != scaled:
        instr.unknown(".block_scale belongs to the kinds mxf8f6f4, mxf4 and mxf4nvf4")
    if not scaled:
        return 0
    word = mods.choose("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32")
    default = {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 0}[kind]
    if word == "block32":
        return 1 if kind == "mxf8f6f4" else 2
    vector = 4 if word == "block16" else int(word[-2]) if word else default
    if not vector:
        instr.unknown("expected .scale_vec or .block16, .block32")
    return vector


def _access(instr: Instr, mods: Modifiers, word: str) -> Access:
    store = word == "st"
    reduced = not store and mods.take("red")
    mods.expect("sync")
    mods.expect("aligned")
    shape = mods.expect("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
    count = int(mods.expect(*_COUNTS)[1:])
    pack = mods.take("unpack::16b" if store else "pack::16b")
    operation = mods.expect("min", "max") if reduced else ""
    absolute, nan = (mods.take("abs"), mods.take("NaN")) if reduced else (False, False)
    kind = mods.expect("f32", "u32", "s32") if reduced else mods.expect("b32")
    mods.done()
    operands = list(instr.operands)
    offset = 0
    if shape == "16x32bx2":
        where = 1 if store else len(operands) - 1
        value = operands.pop(where) if where < len(operands) else None
        if not isinstance(value, Immediate):
            instr.unknown("expected a constant half-split offset")
        offset = value.value
    access = AccessForm(shape, count, pack, offset)
    address, vector = (operands[0], operands[1:]) if store else (operands[-1], operands[:-1])
    if len(operands) != 2 + reduced or not isinstance(address, Address):
        instr.unknown("operands not understood")
    registers = flatten(vector[0])
    if len(registers) != access.registers or access.registers > 128:
        instr.unknown(f"expected {access.registers} registers")
    if reduced and shape not in ("32x32b", "16x32bx2"):
        instr.unknown("shape has no reduction")
    return Access(
        store, access, address, registers, operation, kind if reduced else "", absolute, nan,
        vector[1] if reduced else None,
    )  # fmt: skip


def _copy(instr: Instr, mods: Modifiers, _word: str) -> Copy:
    group = _group(mods)
    shape = mods.expect("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
    multicast = mods.choose("warpx2::02_13", "warpx2::01_23", "warpx4")
    widened = mods.take("b8x16")
    source = mods.expect("b6x16_p32", "b4x16_p64") if widened else ""
    mods.done()
    copy = CopyForm(shape, multicast, source)
    if not copy.exists or len(instr.operands) != 2:
        instr.unknown("shape and multicast do not go together")
    return Copy(copy, group, _address(instr, 0), instr.operands[1])


def _allocation(instr: Instr, mods: Modifiers, operation: str) -> Allocation:
    group = _group(mods)
    mods.expect("sync")
    mods.expect("aligned")
    if operation == "relinquish_alloc_permit":
        mods.done()
        return Allocation(operation, group)
    if operation == "alloc":
        mods.choose("shared::cta")
    mods.expect("b32")
    mods.done()
    if len(instr.operands) != 2 or isinstance(instr.operands[0], Address) != (operation == "alloc"):
        instr.unknown("operands not understood")
    return Allocation(operation, group, *instr.operands)


def _commit(instr: Instr, mods: Modifiers, _word: str) -> Commit:
    group = _group(mods)
    mods.expect("mbarrier::arrive::one")
    mods.choose("shared::cluster")
    multicast = mods.take("multicast::cluster")
    mods.expect("b64")
    mods.done()
    if len(instr.operands) != 1 + multicast:
        instr.unknown("operands not understood")
    return Commit(group, _address(instr, 0), instr.operands[1] if multicast else None)


def _order(_instr: Instr, mods: Modifiers, word: str) -> Order:
    if word.startswith("wait"):
        mods.expect("sync")
        mods.expect("aligned")
    mods.done()
    return Order(word)


def _shift(instr: Instr, mods: Modifiers, _word: str) -> Shift:
    group = _group(mods)
    mods.expect("down")
    mods.done()
    return Shift(group, _address(instr, 0))


_READERS: dict[str, Callable[[Instr, Modifiers, str], Form]] = {
    "mma": _mma,
    "ld": _access,
    "st": _access,
    "cp": _copy,
    "alloc": _allocation,
    "dealloc": _allocation,
    "relinquish_alloc_permit": _allocation,
    "commit": _commit,
    "shift": _shift,
    "wait::ld": _order,
    "wait::st": _order,
    "fence::before_thread_sync": _order,
    "fence::after_thread_sync": _order,
}
