"""Declarations in PTX text: registers, variables with their initial values, parameters."""

from __future__ import annotations

import re

from cubinery.aot.ptxsim.operands import HEX_FLOAT, INTEGER, NAME, Operands, integer
from cubinery.aot.ptxsim.syntax import Param, Variable

_VARIABLE = re.compile(
    r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(shared|local|global|const|param)\s+((?:\.\w+(?:\s+\d+)?\s+)*)"
    rf"({NAME})\s*(\[[^=;]*\])?\s*(?:=\s*(.*))?\Z",
    re.S,
)
_PARAM = re.compile(rf"\.param\s+((?:\.\w+(?:\s+\d+)?\s+)*)({NAME})\s*(?:\[(\d+)\])?\Z", re.S)
_BITS = {"pred": "pred", "f16x2": "b32", "bf16x2": "b32", "f32x2": "b64", "bf16": "b16"}


def register_type(name: str) -> str:
    if name in _BITS:
        return _BITS[name]
    return {"8": "b16", "16": "b16", "32": "b32", "64": "b64", "128": "b128"}.get(name[1:], "")


class Declarations(Operands):
    """Reads declarations."""

    def _params(self, text: str) -> tuple[Param, ...]:
        params, offset = [], 0
        for part in filter(None, (p.strip() for p in text.split(","))):
            m = _PARAM.match(part)
            if m is None:
                raise self._error(f"parameter not understood: {part}")
            words = m[1].split()
            # `.ptr .global .align 16` tells of the memory behind a pointer, not of the parameter.
            own = words[: words.index(".ptr")] if ".ptr" in words else words
            align, size = 0, 0
            for i, word in enumerate(own):
                if word == ".align":
                    align = int(own[i + 1])
                elif word.startswith(".") and word[2:].isdigit():
                    size = int(word[2:]) // 8
            align, size = align or size, size * int(m[3] or 1)
            offset = -(-offset // align) * align
            params.append(Param(m[2], offset, size, align))
            offset += size
        return tuple(params)

    def _variable(self, text: str) -> Variable:
        m = _VARIABLE.match(text)
        if m is None:
            raise self._error(f"variable not understood: {text}")
        words, align, element = m[3].split(), 0, 0
        for i, word in enumerate(words):
            if word == ".align":
                align = int(words[i + 1])
            elif word.startswith(".v") and word[2:].isdigit():
                element = -int(word[2:])
            elif word.startswith(".") and word[2:].isdigit():
                size = int(word[2:]) // 8
                element = size * (-element if element < 0 else 1)
        counts = re.findall(r"\[\s*(\w*)\s*\]", m[5] or "")
        size = element
        for count in counts:
            size *= integer(count) if count else 0
        data = self._initial(m[6], element, text) if m[6] else None
        if data is not None and size == 0:
            size = len(data)
        return Variable(m[4], m[2], align or element, size, ".extern" in m[1], data)

    def _initial(self, text: str, element: int, statement: str) -> bytes:
        items = [item.strip() for item in text.strip().strip("{}").split(",") if item.strip()]
        out = b""
        for item in items:
            if h := HEX_FLOAT.match(item):
                out += int(h[2], 16).to_bytes(element, "little")
            elif INTEGER.match(item):
                out += (integer(item) & ((1 << 8 * element) - 1)).to_bytes(element, "little")
            else:
                raise self._error(f"initial value {item} not understood: {statement}")
        return out
