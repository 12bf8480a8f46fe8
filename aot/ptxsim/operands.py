"""Operands of PTX instructions, in scopes: registers of inner blocks hide outer ones (PTX ISA, chapters 4 and 5)."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from cubinery.aot.ptxsim.cursor import Cursor
from cubinery.aot.ptxsim.isa.base import (
    Address,
    Discard,
    Immediate,
    Not,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)

NAME = r"[A-Za-z_$%][\w$]*"
_NUMBERED = re.compile(r"(.*?)(\d+)\Z", re.S)
INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\Z")
HEX_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)\Z")
_DECIMAL = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?\Z")
_OFFSET = re.compile(rf"\s*({NAME}|0[xX][0-9a-fA-F]+|\d+)\s*(?:\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))|(-\s*\d+))?\s*\Z")
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|cluster_(?:n?ctaid|ctarank|nctarank)|n?clusterid)(?:\.[xyz])?\Z"
    r"|%(?:laneid|n?warpid|n?smid|gridid|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?|lanemask_(?:eq|le|lt|ge|gt)"
    r"|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size|current_graph_exec|envreg\d+|pm\d+(?:_64)?)\Z"
)


def integer(text: str) -> int:
    text = text.replace(" ", "").rstrip("U")
    octal = len(text.lstrip("+-")) > 1 and text.lstrip("+-").isdigit() and text.lstrip("+-")[0] == "0"
    return int(text, 8 if octal else 0)


@dataclass(slots=True)
class Scope:
    """A brace level: its own registers and labels."""

    number: int
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)
    """Operands read so far in this scope by their text."""
    variables: dict[str, str] = field(default_factory=dict)
    """Variables that it declares, with the names that they have in the kernel."""
    end: str = ""
    """Of a function's outermost scope: the label where its caller goes on."""

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}~{self.number}"


class Operands(Cursor):
    """Reads operands."""

    def _operand(self, text: str, scopes: list[Scope]) -> Operand:
        found = scopes[-1].operands.get(text)
        if found is None:
            found = scopes[-1].operands[text] = self._read_operand(text, scopes)
        return found

    def _read_operand(self, text: str, scopes: list[Scope]) -> Operand:
        c = text[0]
        if c == "{":
            return Vector(tuple(self._operand(part, scopes) for part in split_operands(text[1:-1])))
        if c == "[":
            return self._address(text, scopes)
        if c == "!":
            register = self._register(text[1:].strip(), scopes)
            if register is None:
                raise ValueError(f"{text} is no negated predicate")
            return Not(register)
        if text == "_":
            return Discard()
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), scopes), self._operand(second.strip(), scopes))
        return self._scalar(text, scopes)

    def _scalar(self, text: str, scopes: list[Scope]) -> Operand:
        register = self._register(text, scopes)
        if register is not None:
            return register
        if INTEGER.match(text):
            return Immediate(integer(text))
        if m := HEX_FLOAT.match(text):
            return Immediate(int(m[2], 16), 32 if m[1] in "fF" else 64)
        if _DECIMAL.match(text):
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        if _SPECIAL.match(text):
            return Special(text[1:])
        if text in ("WARP_SZ", "%WARP_SZ"):
            return Immediate(32)
        if m := _OFFSET.match(text):
            name, offset = m[1], integer(m[2] or m[3] or "0")
            if not name.startswith("%"):
                return Symbol(next((s.variables[name] for s in reversed(scopes) if name in s.variables), name), offset)
        raise ValueError(f"operand {text} is not understood")

    def _address(self, text: str, scopes: list[Scope]) -> Address:
        parts = split_operands(text[1:-1])
        m = _OFFSET.match(parts[0])
        if m is None:
            raise ValueError(f"address {text} is not understood")
        base = self._scalar(m[1], scopes)
        if not isinstance(base, Register | Symbol | Immediate):
            raise ValueError(f"address {text} is not understood")
        vectors = [self._operand(part, scopes) for part in parts[1:]]
        elements = [v.elements for v in vectors if isinstance(v, Vector)]
        if len(elements) != len(vectors) or len(vectors) > 2:
            raise ValueError(f"address {text} is not understood")
        coords, offsets = [*elements, None, None][:2]
        return Address(base, integer(m[2] or m[3] or "0"), coords, offsets)

    def _register(self, name: str, scopes: list[Scope]) -> Register | None:
        for scope in reversed(scopes):
            found = scope.registers.get(name)
            if found is not None:
                return found
            if scope.ranges and (m := _NUMBERED.match(name)) and m[1] in scope.ranges:
                count, kind = scope.ranges[m[1]]
                if int(m[2]) < count:
                    found = scope.registers[name] = Register(scope.unique(name), kind)
                    return found
        return None


def split_operands(text: str) -> list[str]:
    """Operands at the top level of commas; brackets and braces hold theirs together."""
    if not text:
        return []
    if "{" not in text and "[" not in text:
        return [part.strip() for part in text.split(",")]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[":
            depth += 1
        elif c in "}]":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts
