"""PTX text to syntax: a whole module, its variables, its kernels and their instructions (PTX ISA, chapters 4, 5, 11).

Scopes are resolved here: registers and labels of inner blocks (inline assembly declares them in braces) get
names that are unique in the kernel, so that later stages see one flat list; bodies of functions stand in place of their
calls. What the parser does not know is a ParseError with the line; it skips nothing but comments, debug sections and
linking hints.
"""

from __future__ import annotations

import dataclasses
import re

from cubinery.aot.ptxsim.calls import Body, Calls, Function, of_thread
from cubinery.aot.ptxsim.declarations import register_type
from cubinery.aot.ptxsim.isa.base import Guard, Instr, Register, Symbol
from cubinery.aot.ptxsim.operands import NAME, Scope, split_operands
from cubinery.aot.ptxsim.syntax import Entry, Label, Module, Variable


def parse(text: str, name: str = "PTX") -> Module:
    """Parse a module; `name` is what errors call it. Raises ParseError."""
    return _Parser(text, name).module()


_LABEL = re.compile(rf"({NAME})\s*:(?!:)")
_INSTR = re.compile(rf"(?:@(!?)({NAME})\s+)?([a-z][\w]*(?:(?:\.|::)[\w]+)*)\s*(.*)\Z", re.S)
_REG = re.compile(r"\.reg\s+(?:\.v[24]\s+)?\.(\w+)\s+(.*)\Z", re.S)
_ENTRY = re.compile(rf"(?:\.(?:visible|weak|extern)\s+)*\.entry\s+({NAME})\s*(?:\(([^)]*)\))?", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+[^\n]*")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"[^\n]*")
_IS_CALL = re.compile(rf"(?:@!?{NAME}\s+)?call\b")
_RANGE = re.compile(rf"({NAME})<(\d+)>\Z")
_KERNEL_DIRECTIVES = re.compile(
    r"\.(reqntid|maxntid|minnctapersm|maxnctapersm|maxnreg|reqnctapercluster|maxclusterrank|explicitcluster|noreturn)"
    r"\b([\s\d,]*)"
)


class _Parser(Calls):
    def __init__(self, text: str, name: str) -> None:
        super().__init__(text, name)
        self.files: dict[int, str] = {}
        self.source: tuple[str, int] | None = None
        self.functions: dict[str, Function] = {}

    # -- module --------------------------------------------------------------------------------

    def module(self) -> Module:
        version = target = ""
        heads: list[tuple[re.Match[str], int]] = []
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
                self._skip_braces("a .section")
            elif m := self._take(_ENTRY):
                heads.append((m, self.at))
                self.at = self.text.find("{", self.at) + 1 or len(self.text)
                self._skip_braces("a kernel's body")
            elif re.compile(r"(?:\.\w+\s+)*\.(?:shared|global|const)\b").match(self.text, self.at):
                variables.append(self._variable(self._statement()))
            elif not self._function():
                raise self._error(f"unknown directive: {self._excerpt()}")
        if not version or not target:
            raise self._error("no .version and .target: is this PTX text?")
        entries = {m[1]: self._entry(m, at) for m, at in heads}  # now that every function is known
        return Module(version, target, entries, tuple(variables), dict(self.files))

    def _entry(self, m: re.Match[str], at: int) -> Entry:
        self.at, self.source = at, None
        line = self._line(m.start())
        params = self._params(m[2] or "")
        directives: dict[str, tuple[int, ...]] = {}
        while self._skip() and self.text[self.at] != "{":
            d = self._take(_KERNEL_DIRECTIVES)
            if d is None:
                raise self._error(f"unknown kernel directive: {self._excerpt()}")
            directives[d[1]] = tuple(int(n) for n in re.findall(r"\d+", d[2]))
        self.at += 1
        body = Body()
        self._block(body, [Scope(0)])
        return Entry(m[1], params, self._resolve(body), tuple(body.variables.values()), directives, line)

    # -- bodies --------------------------------------------------------------------------------

    def _block(self, body: Body, scopes: list[Scope]) -> None:
        text = self.text
        while self._skip():
            c = text[self.at]
            if c == "{":
                scopes.append(body.scope())
                self.at += 1
            elif c == "}":
                scopes.pop()
                self.at += 1
                if not scopes:
                    return
            elif c == ".":
                self._directive(body, scopes)
            elif (m := _LABEL.match(text, self.at)) is not None:
                unique = scopes[-1].unique(m[1])
                scopes[-1].labels[m[1]] = unique
                body.items.append(Label(unique, self._line(self.at)))
                self.at = m.end()
            else:
                line = self._line(self.at)
                statement = self._statement()
                if _IS_CALL.match(statement):
                    self._call(body, statement, line, scopes)
                else:
                    self._instr(body, statement, line, scopes)
        raise self._error("a body is not closed")

    def _resolve(self, body: Body) -> tuple[Instr | Label, ...]:
        """Give branches the unique names of their targets; a label may follow the branch to it."""
        for index, scopes in body.branches:
            instr = body.items[index]
            assert isinstance(instr, Instr)
            operands = []
            for operand in instr.operands:
                if isinstance(operand, Symbol):
                    found = next((s.labels[operand.name] for s in reversed(scopes) if operand.name in s.labels), None)
                    if found is None:
                        raise self._error(f"no label {operand.name}: {instr.text}", instr.line)
                    operand = Symbol(found)
                operands.append(operand)
            body.items[index] = dataclasses.replace(instr, operands=tuple(operands))
        return tuple(body.items)

    def _directive(self, body: Body, scopes: list[Scope]) -> None:
        if m := self._take(_LOC):
            self.source = (self.files.get(int(m[1]), f"file {m[1]}"), int(m[2]))
            return
        statement = self._statement()
        scope = scopes[-1]
        scope.operands.clear()  # what is declared hides what outer scopes call so, from here on
        if m := _REG.match(statement):
            kind = register_type(m[1])
            if not kind:
                raise self._error(f"register type .{m[1]} is not known: {statement}")
            for name in (part.strip() for part in m[2].split(",")):
                if r := _RANGE.match(name):
                    scope.ranges[r[1]] = (int(r[2]), kind)
                else:
                    scope.registers[name] = Register(scope.unique(name), kind)
        elif re.match(r"\.(shared|local|global|const|param)\b", statement):
            self._declare(body, scope, self._variable(statement))
        elif not statement.startswith(".pragma"):
            raise self._error(f"unknown directive: {statement}")

    def _declare(self, body: Body, scope: Scope, variable: Variable) -> None:
        """A variable of a body: one of a thread is its block's own, any other the function's, however often called."""
        if variable.space in ("local", "param"):
            unique = scope.unique(variable.name)
        else:
            unique = "~".join((*body.inside[-1:], variable.name))
        scope.variables[variable.name] = unique
        space = "local" if variable.space == "param" else variable.space
        body.declare(dataclasses.replace(variable, name=unique, space=space), variable.space == "param")

    def _instr(self, body: Body, statement: str, line: int, scopes: list[Scope]) -> None:
        m = _INSTR.match(statement)
        if m is None:
            raise self._error(f"not an instruction: {statement}", line)
        guard = None
        if m[2]:
            register = self._register(m[2], scopes)
            if register is None or register.type != "pred":
                raise self._error(f"{m[2]} is no predicate: {statement}", line)
            guard = Guard(register, m[1] == "!")
        opcode, *words = m[3].split(".")
        try:
            operands = tuple(self._operand(part, scopes) for part in split_operands(m[4]))
        except ValueError as error:
            raise self._error(f"{error}: {statement}", line) from error
        if opcode in ("bra", "brx"):
            body.branches.append((len(body.items), tuple(scopes)))
        elif opcode == "ret" and scopes[0].end:  # of a function: its caller goes on
            opcode, words, operands = "bra", [], (Symbol(scopes[0].end),)
        words = of_thread(body, opcode, words, operands)
        text = " ".join(statement.split())
        body.items.append(Instr(opcode, tuple(words), operands, guard, line, text, self.source))
