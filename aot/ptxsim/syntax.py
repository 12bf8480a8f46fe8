"""What PTX text is made of, once parsed: modules, kernels, parameters, variables, labels."""

from __future__ import annotations

from dataclasses import dataclass

from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.isa.base import Instr


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
