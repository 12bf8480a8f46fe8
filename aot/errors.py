"""Errors of the build side. Each is a CubineryError, so a command line prints it in one line."""

from __future__ import annotations

from cubinery.runtime.errors import CubineryError


class SpecError(CubineryError, ValueError):
    """A spec is wrong. `file`, `line` (from 1) and `where` (a path such as `matrix[0].arch`) say where."""

    def __init__(self, message: str, *, file: str, line: int | None = None, where: str = "") -> None:
        place = file if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {where}: {message}" if where else f"{place}: {message}")
        self.file, self.line, self.where = file, line, where


class ClosureError(SpecError):
    """The selector can pick a configuration that the bundle would not hold. `missing` lists the keys."""

    missing: tuple[str, ...] = ()


class BuildError(CubineryError):
    """A build cannot run at all: the compiler is not installed, or the output folder cannot be written."""


class CompileError(CubineryError):
    """The compiler refused one configuration."""


class CompileCrashError(CompileError):
    """The worker died while it compiled one configuration."""


class CompileTimeoutError(CompileError):
    """One configuration took longer than the build's time limit."""


class StoreError(CubineryError):
    """A file of a bundle or of the cache cannot be written."""


class InspectError(CubineryError, ValueError):
    """Bytes that should be a cubin or PTX text are malformed."""


class GateError(CubineryError):
    """A compiled kernel is not what its configuration, declaration or spec demands."""


class ArchGateError(GateError):
    """The cubin is for another chip or another target than was asked for."""


class SymbolGateError(GateError):
    """The declared kernel is not in the cubin, or not alone in it."""


class AbiGateError(GateError):
    """The compiled parameters differ from the declared ones in count, offset, size or alignment."""


class BlockGateError(GateError):
    """The compiled block size contradicts the declared one."""


class RegisterGateError(GateError):
    """The kernel uses more registers than the spec or the hardware allows."""


class StackGateError(GateError):
    """The kernel spills or keeps arrays on the stack beyond the spec's limit."""


class SharedMemoryGateError(GateError):
    """One CTA needs more shared memory than the arch lets it have."""


class TensorMemoryGateError(GateError):
    """The code allocates tensor memory and declares none, or the other way round, or more than an SM has."""


class OccupancyGateError(GateError):
    """Fewer CTAs fit an SM than the configuration promises."""
