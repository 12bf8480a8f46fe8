"""Counting, finding, extracting and inserting bits (PTX ISA 9.7.1.14 to 9.7.1.22)."""

from __future__ import annotations

import numpy as np

from cubinery.aot.ptxsim.isa.base import Compiled, Instr, Modifiers, Operation, binary, ternary, unary
from cubinery.aot.ptxsim.isa.values import INTEGERS, Array, IntType


def _kind(mods: Modifiers, *names: str) -> IntType:
    return INTEGERS[mods.expect(*names)]


def popc(instr: Instr) -> Compiled:
    """9.7.1.14 popc: the number of one bits; d is 32 bits."""
    mods = Modifiers(instr)
    kind = _kind(mods, "b32", "b64")
    mods.done()
    return Compiled(("b32",), (kind.register,), lambda a: np.bitwise_count(a).astype(np.uint32))


def highest_bit(bits: Array) -> Array:
    """The index of the highest one bit of uint32 or uint64 words as int64; -1 where there is none."""
    high = (bits.astype(np.uint64) >> 32).astype(np.float64)
    low = (bits.astype(np.uint64) & np.uint64(0xFFFFFFFF)).astype(np.float64)  # exact: frexp gives the bit's place
    above = np.frexp(high)[1].astype(np.int64) + 31
    return np.where(high != 0, above, np.frexp(low)[1].astype(np.int64) - 1)


def clz(instr: Instr) -> Compiled:
    """9.7.1.15 clz: zero bits above the highest one; the width for zero."""
    mods = Modifiers(instr)
    kind = _kind(mods, "b32", "b64")
    mods.done()
    return Compiled(("b32",), (kind.register,), lambda a: (kind.width - 1 - highest_bit(a)).astype(np.uint32))


def bfind(instr: Instr) -> Compiled:
    """9.7.1.16 bfind: the place of the highest bit that is not the sign, all ones if none; .shiftamt counts from the
    top."""
    mods = Modifiers(instr)
    shift = mods.take("shiftamt")
    kind = _kind(mods, "u32", "u64", "s32", "s64")
    mods.done()

    def find(a: Array) -> Array:
        if kind.signed:
            a = np.where(a.view(kind.dtype) < 0, ~a, a)
        place = highest_bit(a)
        return (np.where(place < 0, place, kind.width - 1 - place) if shift else place).astype(np.uint32)

    return Compiled(("b32",), (kind.register,), find)


def brev(instr: Instr) -> Compiled:
    """9.7.1.18 brev: bits in reverse order, by swapping ever larger neighbours."""
    mods = Modifiers(instr)
    kind = _kind(mods, "b32", "b64")
    mods.done()
    steps = []
    step = kind.width
    while step > 1:
        step //= 2
        pattern = sum(((1 << step) - 1) << at for at in range(0, kind.width, 2 * step))
        steps.append((step, kind.bits(pattern)))

    def reverse(a: Array) -> Array:
        for shift, mask in steps:
            a = ((a >> shift) & mask) | ((a & mask) << shift)
        return a

    return unary(kind.register, reverse)


def fns(instr: Instr) -> Compiled:
    """9.7.1.17 fns: the place of the n-th set bit of a mask from a base, upwards or downwards; all ones if none."""
    mods = Modifiers(instr)
    mods.expect("b32")
    mods.done()

    def find(mask: Array, base: Array, offset: Array) -> Array:
        mask, start, signed = np.broadcast_arrays(mask, base.astype(np.int64), offset.view(np.int32).astype(np.int64))
        found = np.full(mask.shape, 0xFFFFFFFF, np.uint32)
        lanes = np.arange(32).reshape((32,) + (1,) * mask.ndim)
        is_set = (mask >> lanes.astype(np.uint32)) & 1 != 0
        ahead = np.where(signed > 0, lanes >= start, lanes <= start) & is_set & (start < 32)
        rank = np.where(signed > 0, np.cumsum(ahead, 0), np.cumsum(ahead[::-1], 0)[::-1])
        hit = np.where(signed == 0, is_set & (lanes == start), ahead & (rank == np.abs(signed)))
        return np.where(hit.any(0), hit.argmax(0).astype(np.uint32), found)

    return ternary("b32", find)


def _place(number: Array, kind: IntType) -> Array:
    return (number if kind.width == 64 else number & 0xFF).astype(np.int64)


def bfe(instr: Instr) -> Compiled:
    """9.7.1.19 bfe: `len` bits from `pos`, extended; bits past the top repeat the sign for signed types.

    pos and len are taken modulo 256; PTX asks for 0 to 255, and code for 64 bits that ptxas makes does not cut them.
    With len 0 the result is 0; the sign is bit min(pos + len - 1, msb).
    """
    mods = Modifiers(instr)
    kind = _kind(mods, "u32", "u64", "s32", "s64")
    mods.done()
    top = kind.width - 1

    def extract(a: Array, position: Array, length: Array) -> Array:
        at, count = _place(position, kind), _place(length, kind)
        field = np.where(at > top, 0, a >> np.minimum(at, top).astype(kind.bits))
        mask = ~np.where(count > top, 0, kind.bits((1 << kind.width) - 1) << np.minimum(count, top).astype(kind.bits))
        if not kind.signed:
            return (field & mask).astype(kind.bits)
        sign = (a >> np.minimum(at + count - 1, top).clip(0).astype(kind.bits)) & 1 != 0
        # Above the field, and above the top bit where the field reaches past it, stands the sign.
        reach = np.clip(top + 1 - at, 0, top + 1)
        inside = np.where(count < reach, count, reach)
        keep = ~np.where(inside > top, 0, kind.bits((1 << kind.width) - 1) << np.minimum(inside, top).astype(kind.bits))
        return np.where(count == 0, 0, np.where(sign, (field & keep) | ~keep, field & keep)).astype(kind.bits)

    return Compiled((kind.register,), (kind.register, "b32", "b32"), extract)


def bfi(instr: Instr) -> Compiled:
    """9.7.1.20 bfi: b with its `len` bits from `pos` replaced by the low bits of a; what passes the top is lost."""
    mods = Modifiers(instr)
    kind = _kind(mods, "b32", "b64")
    mods.done()
    top = kind.width - 1
    ones = kind.bits((1 << kind.width) - 1)

    def insert(a: Array, b: Array, position: Array, length: Array) -> Array:
        at, count = _place(position, kind), _place(length, kind)
        shift = np.minimum(at, top).astype(kind.bits)
        field = ~np.where(count > top, 0, ones << np.minimum(count, top).astype(kind.bits))
        mask = np.where(at > top, 0, field.astype(kind.bits) << shift)
        return ((b & ~mask) | ((a << shift) & mask)).astype(kind.bits)

    return Compiled((kind.register,), (kind.register, kind.register, "b32", "b32"), insert)


def szext(instr: Instr) -> Compiled:
    """9.7.1.21 szext: the low b bits of a, sign- or zero-extended; .wrap takes b modulo 32, .clamp at most 32."""
    mods = Modifiers(instr)
    mode, kind = mods.expect("clamp", "wrap"), _kind(mods, "u32", "s32")
    mods.done()

    def extend(a: Array, b: Array) -> Array:
        whole = (b >= 32) if mode == "clamp" else np.zeros_like(b, np.bool_)
        count = b & 31
        mask = np.uint32(0xFFFFFFFF) << count
        kept = a & ~mask
        if kind.signed:
            negative = (count != 0) & ((a >> ((count - 1) & 31)) & 1 != 0)
            kept = np.where(negative, kept | mask, kept)
        return np.where(whole, a, kept)

    return binary("b32", extend)


def bmsk(instr: Instr) -> Compiled:
    """9.7.1.22 bmsk: b ones from bit a up; .clamp stops both at 32, .wrap takes them modulo 32."""
    mods = Modifiers(instr)
    mode = mods.expect("clamp", "wrap")
    mods.expect("b32")
    mods.done()

    def mask(a: Array, b: Array) -> Array:
        clamp = mode == "clamp"
        start = (np.minimum(a, 32) if clamp else a & 31).astype(np.uint64)
        count = (np.minimum(b, 32) if clamp else b & 31).astype(np.uint64)
        return (((np.uint64(1) << count) - np.uint64(1)) << start).astype(np.uint32)

    return binary("b32", mask)


OPCODES: dict[str, Operation] = {
    "popc": Operation(popc),
    "clz": Operation(clz),
    "bfind": Operation(bfind),
    "brev": Operation(brev),
    "fns": Operation(fns),
    "bfe": Operation(bfe),
    "bfi": Operation(bfi),
    "szext": Operation(szext),
    "bmsk": Operation(bmsk),
}
