"""PTX text to syntax: a whole module, its variables, its kernels and their instructions (PTX ISA, chapters 4, 5, 11).

Scopes are resolved here: registers and labels of inner blocks (inline assembly declares them in braces) get
names that are unique in the kernel, so that later stages see one flat list. What the parser does not
know is a ParseError with the line; it skips nothing but comments, debug sections and linking hints.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
import struct
from dataclasses import dataclass, field

from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.isa.base import (
    Address,
    Discard,
    Guard,
    Immediate,
    Instr,
    Not,
    Operand,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)


class ParseError(SimError):
    """The text is no PTX that the simulator reads; the message has file and line."""


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter."""

    name: str
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a state space, module-wide or of one kernel."""

    name: str
    space: str
    """shared, local, global or const."""
    align: int
    size: int
    """Bytes; 0 for an `.extern .shared` array, which is the launch's dynamic shared memory."""
    extern: bool = False
    data: bytes | None = None
    """Initial value, where one is given."""


@dataclass(frozen=True, slots=True)
class Label:
    """A branch target."""

    name: str
    line: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel."""

    name: str
    params: tuple[Param, ...]
    body: tuple[Instr | Label, ...]
    variables: tuple[Variable, ...]
    directives: dict[str, tuple[int, ...]]
    """reqntid, maxntid, minnctapersm, reqnctapercluster, maxclusterrank, maxnreg, ... with their numbers."""
    line: int

    @property
    def instructions(self) -> tuple[Instr, ...]:
        return tuple(item for item in self.body if isinstance(item, Instr))


@dataclass(frozen=True, slots=True)
class Module:
    """One PTX file."""

    version: str
    target: str
    entries: dict[str, Entry]
    variables: tuple[Variable, ...]
    files: dict[int, str]
    """Source files by the number that `.loc` uses."""


def parse(text: str, name: str = "PTX") -> Module:
    """Parse a module; `name` is what errors call it. Raises ParseError."""
    return _Parser(text, name).module()


# -- inside ----------------------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SPACE = re.compile(r"\s*")
_NAME = r"[A-Za-z_$%][\w$]*"
_LABEL = re.compile(rf"({_NAME})\s*:(?!:)")
_INSTR = re.compile(rf"(?:@(!?)({_NAME})\s+)?([a-z][\w]*(?:(?:\.|::)[\w]+)*)\s*(.*)\Z", re.S)
_REG = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)\Z", re.S)
_VARIABLE = re.compile(
    r"((?:\.(?:extern|visible|weak|common)\s+)*)\.(shared|local|global|const)\s+((?:\.\w+(?:\s+\d+)?\s+)*)"
    rf"({_NAME})\s*(\[[^=;]*\])?\s*(?:=\s*(.*))?\Z",
    re.S,
)
_PARAM = re.compile(rf"\.param\s+((?:\.\w+(?:\s+\d+)?\s+)*)({_NAME})\s*(?:\[(\d+)\])?\Z", re.S)
_ENTRY = re.compile(rf"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+({_NAME})\s*(?:\(([^)]*)\))?", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^\n]*")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"[^\n]*")
_RANGE = re.compile(rf"({_NAME})<(\d+)>\Z")
_NUMBERED = re.compile(r"(.*?)(\d+)\Z", re.S)
_INTEGER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?\Z")
_HEX_FLOAT = re.compile(r"0([fFdD])([0-9a-fA-F]+)\Z")
_DECIMAL = re.compile(r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?\Z")
_OFFSET = re.compile(rf"\s*({_NAME}|0[xX][0-9a-fA-F]+|\d+)\s*(?:\+\s*(-?\s*(?:0[xX][0-9a-fA-F]+|\d+))|(-\s*\d+))?\s*\Z")
_KERNEL_DIRECTIVES = re.compile(
    r"\.(reqntid|maxntid|minnctapersm|maxnctapersm|maxnreg|reqnctapercluster|maxclusterrank|explicitcluster|noreturn)"
    r"\b([\s\d,]*)"
)
_SPECIAL = re.compile(
    r"%(?:n?tid|n?ctaid|cluster_(?:n?ctaid|ctarank|nctarank)|n?clusterid)(?:\.[xyz])?\Z"
    r"|%(?:laneid|n?warpid|n?smid|gridid|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?|lanemask_(?:eq|le|lt|ge|gt)"
    r"|is_explicit_cluster|dynamic_smem_size|total_smem_size|aggr_smem_size|current_graph_exec|envreg\d+|pm\d+(?:_64)?)\Z"
)
_BITS = {"pred": "pred", "f16x2": "b32", "bf16x2": "b32", "f32x2": "b64", "bf16": "b16"}


def _register_type(name: str) -> str:
    if name in _BITS:
        return _BITS[name]
    return {"8": "b16", "16": "b16", "32": "b32", "64": "b64", "128": "b128"}.get(name[1:], "")


def _integer(text: str) -> int:
    text = text.replace(" ", "").rstrip("U")
    octal = len(text.lstrip("+-")) > 1 and text.lstrip("+-").isdigit() and text.lstrip("+-")[0] == "0"
    return int(text, 8 if octal else 0)


@dataclass(slots=True)
class _Scope:
    """A brace level: its own registers and labels."""

    number: int
    registers: dict[str, Register] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    operands: dict[str, Operand] = field(default_factory=dict)
    """Operands read so far in this scope by their text."""

    def unique(self, name: str) -> str:
        return name if self.number == 0 else f"{name}~{self.number}"


class _Parser:
    def __init__(self, text: str, name: str) -> None:
        self.name = name
        # Comments become blanks of the same lines, so positions still count lines.
        self.text = _COMMENT.sub(lambda m: "\n" * m[0].count("\n") or " ", text)
        self.ends = [m.start() for m in re.finditer("\n", self.text)]
        self.at = 0
        self.files: dict[int, str] = {}
        self.source: tuple[str, int] | None = None

    # -- module --------------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        entries: dict[str, Entry] = {}
        variables: list[Variable] = []
        while self._skip():
            if m := self._match(r"\.version\s+(\S+)"):
                version = m[1]
            elif m := self._match(r"\.target\s+([^\n]+)"):
                target = m[1].split(",")[0].strip()
            elif self._match(r"\.address_size\s+64\b"):
                pass
            elif m := self._take(_FILE):
                self.files[int(m[1])] = m[2]
            elif self._match(r"\.section\s+\S+\s*\{"):
                self._skip_section()
            elif (m := self._take(_ENTRY)) is not None:
                entry = self._entry(m)
                entries[entry.name] = entry
            elif re.compile(r"(?:\.\w+\s+)*\.(?:shared|global|const)\b").match(self.text, self.at):
                variables.append(self._variable(self._statement()))
            else:
                raise self._error(f"unknown directive: {self._excerpt()}")
        if not version or not target:
            raise self._error("no .version and .target: is this PTX text?")
        return Module(version, target, entries, tuple(variables), dict(self.files))

    def _skip_section(self) -> None:
        depth = 1
        for m in re.compile(r"[{}]").finditer(self.text, self.at):
            depth += 1 if m[0] == "{" else -1
            if depth == 0:
                self.at = m.end()
                return
        raise self._error("a .section is not closed")

    def _entry(self, m: re.Match[str]) -> Entry:
        line = self._line(m.start())
        params = self._params(m[2] or "")
        directives: dict[str, tuple[int, ...]] = {}
        while self._skip() and self.text[self.at] != "{":
            d = self._take(_KERNEL_DIRECTIVES)
            if d is None:
                raise self._error(f"unknown kernel directive: {self._excerpt()}")
            directives[d[1]] = tuple(int(n) for n in re.findall(r"\d+", d[2]))
        body, variables = self._body()
        return Entry(m[1], params, body, variables, directives, line)

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
            size *= _integer(count) if count else 0
        data = self._initial(m[6], element, text) if m[6] else None
        if data is not None and size == 0:
            size = len(data)
        return Variable(m[4], m[2], align or element, size, ".extern" in m[1], data)

    def _initial(self, text: str, element: int, statement: str) -> bytes:
        items = [item.strip() for item in text.strip().strip("{}").split(",") if item.strip()]
        out = b""
        for item in items:
            if h := _HEX_FLOAT.match(item):
                out += int(h[2], 16).to_bytes(element, "little")
            elif _INTEGER.match(item):
                out += (_integer(item) & ((1 << 8 * element) - 1)).to_bytes(element, "little")
            else:
                raise self._error(f"initial value {item} not understood: {statement}")
        return out

    # -- bodies --------------------------------------------------------------------------------

    def _body(self) -> tuple[tuple[Instr | Label, ...], tuple[Variable, ...]]:
        self.at += 1
        scopes = [_Scope(0)]
        made = 0
        items: list[Instr | Label] = []
        branches: list[tuple[int, tuple[_Scope, ...]]] = []
        variables: list[Variable] = []
        text = self.text
        while self._skip():
            c = text[self.at]
            if c == "{":
                made += 1
                scopes.append(_Scope(made))
                self.at += 1
            elif c == "}":
                scopes.pop()
                self.at += 1
                if not scopes:
                    return self._resolve(items, branches), tuple(variables)
            elif c == ".":
                self._directive(scopes, variables)
            elif (m := _LABEL.match(text, self.at)) is not None:
                unique = scopes[-1].unique(m[1])
                scopes[-1].labels[m[1]] = unique
                items.append(Label(unique, self._line(self.at)))
                self.at = m.end()
            else:
                line = self._line(self.at)
                instr = self._instr(self._statement(), line, scopes)
                if instr.opcode in ("bra", "brx"):
                    branches.append((len(items), tuple(scopes)))
                items.append(instr)
        raise self._error("a kernel's body is not closed")

    def _resolve(
        self, items: list[Instr | Label], branches: list[tuple[int, tuple[_Scope, ...]]]
    ) -> tuple[Instr | Label, ...]:
        """Give branches the unique names of their targets; a label may follow the branch to it."""
        for index, scopes in branches:
            instr = items[index]
            assert isinstance(instr, Instr)
            operands = []
            for operand in instr.operands:
                if isinstance(operand, Symbol):
                    found = next((s.labels[operand.name] for s in reversed(scopes) if operand.name in s.labels), None)
                    if found is None:
                        raise self._error(f"no label {operand.name}: {instr.text}", instr.line)
                    operand = Symbol(found)
                operands.append(operand)
            items[index] = dataclasses.replace(instr, operands=tuple(operands))
        return tuple(items)

    def _directive(self, scopes: list[_Scope], variables: list[Variable]) -> None:
        if m := self._take(_LOC):
            self.source = (self.files.get(int(m[1]), f"file {m[1]}"), int(m[2]))
            return
        statement = self._statement()
        if m := _REG.match(statement):
            kind = _register_type(m[1])
            if not kind:
                raise self._error(f"register type .{m[1]} is not known: {statement}")
            scope = scopes[-1]
            scope.operands.clear()  # an outer register of the same name is hidden from here on
            for name in (part.strip() for part in m[2].split(",")):
                if r := _RANGE.match(name):
                    scope.ranges[r[1]] = (int(r[2]), kind)
                else:
                    scope.registers[name] = Register(scope.unique(name), kind)
        elif re.match(r"\.(shared|local|global|const)\b", statement):
            variables.append(self._variable(statement))
        elif not statement.startswith(".pragma"):
            raise self._error(f"unknown directive: {statement}")

    def _instr(self, statement: str, line: int, scopes: list[_Scope]) -> Instr:
        m = _INSTR.match(statement)
        if m is None:
            raise self._error(f"not an instruction: {statement}", line)
        guard = None
        if m[2]:
            register = self._register(m[2], scopes)
            if register is None or register.type != "pred":
                raise self._error(f"{m[2]} is no predicate: {statement}", line)
            guard = Guard(register, m[1] == "!")
        words = m[3].split(".")
        try:
            operands = tuple(self._operand(part, scopes) for part in _split(m[4]))
        except ValueError as error:
            raise self._error(f"{error}: {statement}", line) from error
        text = " ".join(statement.split())
        return Instr(words[0], tuple(words[1:]), operands, guard, line, text, self.source)

    # -- operands ------------------------------------------------------------------------------

    def _operand(self, text: str, scopes: list[_Scope]) -> Operand:
        found = scopes[-1].operands.get(text)
        if found is None:
            found = scopes[-1].operands[text] = self._read_operand(text, scopes)
        return found

    def _read_operand(self, text: str, scopes: list[_Scope]) -> Operand:
        c = text[0]
        if c == "{":
            return Vector(tuple(self._operand(part, scopes) for part in _split(text[1:-1])))
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

    def _scalar(self, text: str, scopes: list[_Scope]) -> Operand:
        register = self._register(text, scopes)
        if register is not None:
            return register
        if _INTEGER.match(text):
            return Immediate(_integer(text))
        if m := _HEX_FLOAT.match(text):
            return Immediate(int(m[2], 16), 32 if m[1] in "fF" else 64)
        if _DECIMAL.match(text):
            return Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        if _SPECIAL.match(text):
            return Special(text[1:])
        if text in ("WARP_SZ", "%WARP_SZ"):
            return Immediate(32)
        if m := _OFFSET.match(text):
            name, offset = m[1], _integer(m[2] or m[3] or "0")
            if not name.startswith("%"):
                return Symbol(name, offset)
        raise ValueError(f"operand {text} is not understood")

    def _address(self, text: str, scopes: list[_Scope]) -> Address:
        parts = _split(text[1:-1])
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
        return Address(base, _integer(m[2] or m[3] or "0"), coords, offsets)

    def _register(self, name: str, scopes: list[_Scope]) -> Register | None:
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

    # -- text ----------------------------------------------------------------------------------

    def _skip(self) -> bool:
        """Skip blanks; False at the end."""
        m = _SPACE.match(self.text, self.at)
        assert m is not None
        self.at = m.end()
        return self.at < len(self.text)

    def _match(self, pattern: str) -> re.Match[str] | None:
        return self._take(re.compile(pattern))

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        m = pattern.match(self.text, self.at)
        if m is not None:
            self.at = m.end()
        return m

    def _statement(self) -> str:
        """The text up to the next semicolon, which is consumed."""
        end = self.text.find(";", self.at)
        if end < 0:
            raise self._error("a statement does not end")
        statement = self.text[self.at : end].strip()
        self.at = end + 1
        return statement

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self.ends, at) + 1

    def _excerpt(self) -> str:
        return self.text[self.at : self.at + 60].split("\n")[0]

    def _error(self, message: str, line: int = 0) -> ParseError:
        return ParseError(f"{self.name}:{line or self._line(self.at)}: {message}")


def _split(text: str) -> list[str]:
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
