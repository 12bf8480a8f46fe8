"""Functions and their calls: a call is replaced by the function's body (PTX ISA 7.1 and 9.7.12, call).

Parameters of functions are variables of their thread: formal names stand for the caller's variables, and loads and
stores of them are those of local memory. Registers and labels of each body that is put in place are its own. What
takes a stack is refused: recursion, and calls through a register.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from cubinery.aot.ptxsim.declarations import Declarations, register_type
from cubinery.aot.ptxsim.isa.base import Address, Guard, Immediate, Instr, Operand, Register, Symbol
from cubinery.aot.ptxsim.operands import NAME, Scope, split_operands
from cubinery.aot.ptxsim.syntax import Label, Variable

_FUNCTION = re.compile(
    rf"(?:\.(?:visible|weak|extern)\s+)*\.func\s*(?:\(([^)]*)\)\s*)?({NAME})\s*(?:\(([^)]*)\))?(?:\s*\.noreturn)?", re.S
)
_CALL = re.compile(
    rf"(?:@(!?)({NAME})\s+)?call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?({NAME})\s*(?:,\s*\(([^)]*)\)\s*)?(?:,\s*({NAME})\s*)?\Z",
    re.S,
)
_FORMAL_REGISTER = re.compile(rf"\.reg\s+\.(\w+)\s+({NAME})\Z")


@dataclass(frozen=True, slots=True)
class Formal:
    """A formal parameter or result of a function."""

    name: str
    register: str
    """Its type where it is a register; empty for a variable."""
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the module."""

    name: str
    results: tuple[Formal, ...]
    params: tuple[Formal, ...]
    at: int
    """Where its body begins in the text."""


@dataclass(slots=True)
class Body:
    """A kernel's body as far as it has been read."""

    items: list[Instr | Label] = field(default_factory=list)
    branches: list[tuple[int, tuple[Scope, ...]]] = field(default_factory=list)
    """Items that are branches, with the scopes in which to look for their labels."""
    variables: dict[str, Variable] = field(default_factory=dict)
    scopes: int = 0
    """Numbers that inner scopes have taken."""
    inside: tuple[str, ...] = ()
    """Functions whose bodies are being read."""
    parameters: set[str] = field(default_factory=set)
    """Those that are parameters of calls."""

    def declare(self, variable: Variable, parameter: bool = True) -> None:
        """Add a variable."""
        self.variables[variable.name] = variable
        if parameter:
            self.parameters.add(variable.name)

    def scope(self) -> Scope:
        """A new inner scope."""
        self.scopes += 1
        return Scope(self.scopes)


class Calls(Declarations):
    """Reads functions, and bodies of functions in place of their calls."""

    functions: dict[str, Function]
    source: tuple[str, int] | None

    def _block(self, body: Body, scopes: list[Scope]) -> None:
        """Read up to the brace that closes the last of `scopes`. Provided by the parser."""
        raise NotImplementedError

    def _function(self) -> bool:
        """Read a function's head and skip its body, if one is here."""
        m = self._take(_FUNCTION)
        if m is None:
            return False
        self._skip()
        if self.text[self.at : self.at + 1] == ";":  # a declaration
            self.at += 1
            return True
        if self.text[self.at : self.at + 1] != "{":
            raise self._error(f"function directive not understood: {self._excerpt()}")
        self.at += 1
        self.functions[m[2]] = Function(m[2], self._formals(m[1] or ""), self._formals(m[3] or ""), self.at)
        self._skip_braces(f"the body of {m[2]}")
        return True

    def _formals(self, text: str) -> tuple[Formal, ...]:
        formals = []
        for part in filter(None, (p.strip() for p in text.split(","))):
            if m := _FORMAL_REGISTER.match(part):
                formals.append(Formal(m[2], register_type(m[1]), 0, 0))
            else:
                (param,) = self._params(part)
                formals.append(Formal(param.name, "", param.size, param.align))
        return tuple(formals)

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, body: Body, statement: str, line: int, scopes: list[Scope]) -> None:
        """Put the body of the function that a statement calls in its place."""
        m = _CALL.match(statement)
        if m is None or m[6]:
            raise self._error(f"call is not executed: {statement}", line)
        function = self.functions.get(m[4])
        if function is None:
            what = "through a register" if m[4].startswith("%") else f"of {m[4]}, which the module does not define,"
            raise self._error(f"a call {what} is not executed: {statement}", line)
        if function.name in body.inside:
            raise self._error(f"recursion is not executed: {statement}", line)
        results, actuals = (split_operands((text or "").strip()) for text in (m[3], m[5]))
        if len(results) != len(function.results) or len(actuals) != len(function.params):
            raise self._error(f"the call does not fit the parameters of {function.name}: {statement}", line)
        root = body.scope()
        end, over = root.unique("return"), root.unique("over")
        root.end = end
        text = " ".join(statement.split())

        def emit(opcode: str, words: tuple[str, ...], *operands: Operand, guard: Guard | None = None) -> None:
            body.items.append(Instr(opcode, words, operands, guard, line, text, self.source))

        if m[2]:
            register = self._register(m[2], scopes)
            if register is None or register.type != "pred":
                raise self._error(f"{m[2]} is no predicate: {statement}", line)
            emit("bra", (), Symbol(over), guard=Guard(register, m[1] != "!"))
        back = []
        try:
            for formal, actual in zip(function.params, actuals, strict=True):
                for outer in self._bind(body, formal, actual, root, scopes):
                    emit(*_move_in(formal, root, outer))
            for formal, actual in zip(function.results, results, strict=True):
                back += [_move_out(formal, root, outer) for outer in self._bind(body, formal, actual, root, scopes)]
        except ValueError as error:
            raise self._error(f"{error}: {statement}", line) from error
        here, source, inside = self.at, self.source, body.inside
        self.at, body.inside = function.at, (*inside, function.name)
        self._block(body, [root])
        self.at, self.source, body.inside = here, source, inside
        body.items.append(Label(end, line))
        for move in back:
            emit(*move)
        if m[2]:
            body.items.append(Label(over, line))

    def _bind(self, body: Body, formal: Formal, actual: str, root: Scope, scopes: list[Scope]) -> tuple[Operand, ...]:
        """Declare a formal name in a function's scope; gives what must be moved there or from there, if anything."""
        name = next((s.variables[actual] for s in reversed(scopes) if actual in s.variables), "")
        if name and body.variables[name].size != formal.size and not formal.register:
            raise ValueError(f"{actual} has another size than {formal.name}")
        if name and not formal.register:
            root.variables[formal.name] = name  # it is the caller's variable itself
            return ()
        unique = root.unique(formal.name)
        if formal.register:
            root.registers[formal.name] = Register(unique, formal.register)
        else:
            root.variables[formal.name] = unique
            body.declare(Variable(unique, "local", formal.align, formal.size))
        value = Address(Symbol(name)) if name else self._operand(actual, scopes)
        if not isinstance(value, Register | Immediate | Address):
            raise ValueError(f"{actual} is no parameter, register or constant")
        return (value,)


def of_thread(body: Body, opcode: str, words: list[str], operands: tuple[Operand, ...]) -> list[str]:
    """An instruction's words, with local memory in place of parameters of calls."""
    bases = [o.base for o in operands if isinstance(o, Address)]
    if opcode not in ("ld", "st") or not any(isinstance(b, Symbol) and b.name in body.parameters for b in bases):
        return words
    return ["local" if word in ("param", "param::func") else word for word in words]


_Move = tuple[str, tuple[str, ...], Operand, Operand]
"""Opcode, words and operands."""


def _move_in(formal: Formal, root: Scope, outer: Operand) -> _Move:
    """From a caller's operand to the formal parameter."""
    if formal.register:
        inner, kind = root.registers[formal.name], formal.register
        if isinstance(outer, Address):
            return "ld", ("local", kind), inner, outer
        return "mov", (kind,), inner, outer
    return "st", ("local", f"b{8 * formal.size}"), Address(Symbol(root.variables[formal.name])), outer


def _move_out(formal: Formal, root: Scope, outer: Operand) -> _Move:
    """From the formal result to a caller's operand."""
    if isinstance(outer, Immediate):
        raise ValueError(f"a constant where {formal.name} is returned")
    if formal.register:
        inner, kind = root.registers[formal.name], formal.register
        if isinstance(outer, Address):
            return "st", ("local", kind), outer, inner
        return "mov", (kind,), outer, inner
    return "ld", ("local", f"b{8 * formal.size}"), outer, Address(Symbol(root.variables[formal.name]))
