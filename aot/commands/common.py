"""What all commands share: exit codes, error lines, tables for people and JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import click

from cubinery.runtime.errors import CubineryError

F = TypeVar("F", bound=Callable[..., Any])

DEFAULT_BUNDLE = Path("build/kernels")


class ExitCode(IntEnum):
    """What a program may conclude from the exit status; docs/cli.md documents the same."""

    OK = 0
    FAILED = 1
    """The command ran and found what it looks for: a failed key, a bad bundle, a difference."""
    USAGE = 2
    """The command line, a spec, a key or a path is wrong; nothing was done."""
    MACHINE = 3
    """This machine cannot do it: a package, tool, disk space or permission is missing."""
    INTERNAL = 70
    """A bug in cubinery; the traceback is for its authors."""
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done and good; 1 done, and something failed or differs; 2 wrong usage, spec, key or path; "
    "3 this machine lacks something; 70 a bug in cubinery; 130 interrupted."
)


class UserError(click.ClickException):
    """The caller has to change something: one line on stderr, and exit code 2."""

    exit_code = int(ExitCode.USAGE)

    def show(self, file: Any = None) -> None:
        click.echo(f"cubinery: error: {self.format_message()}", file=file, err=file is None)


class FailedError(UserError):
    """A check that was asked for failed."""

    exit_code = int(ExitCode.FAILED)


class MachineError(UserError):
    """This machine cannot do it."""

    exit_code = int(ExitCode.MACHINE)


class Cli(click.Group):
    """A group whose commands never show a traceback for what a user can cause or cure."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        try:
            return super().make_context(*args, **extra)
        except click.UsageError as error:
            raise one_line(error) from error

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # The reader (head, less) has left; point stdout elsewhere so that the interpreter's last flush is silent.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except click.UsageError as error:
            raise one_line(error) from error
        except (CubineryError, OSError) as error:
            raise kind_of(error)(describe(error)) from error
        except KeyboardInterrupt:
            click.echo("cubinery: interrupted; finished kernels are kept in the cache", err=True)
            ctx.exit(int(ExitCode.INTERRUPTED))
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception:  # noqa: BLE001 - the outermost frame, where a bug gets its own exit code
            import traceback

            traceback.print_exc()
            click.echo("cubinery: this is a bug in cubinery: please report it with the lines above", err=True)
            ctx.exit(int(ExitCode.INTERNAL))


def one_line(error: click.UsageError) -> click.ClickException:
    """A wrong command line in one line; a bare `cubinery` still shows its help."""
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return error
    command = error.ctx.command_path if error.ctx is not None else "cubinery"
    return UserError(f"{error.format_message().rstrip('.')} (see `{command} --help`)")


def describe(error: Exception) -> str:
    """One line for an error: its message, or the file and reason of an OSError."""
    if isinstance(error, OSError) and not isinstance(error, CubineryError):
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror or error}"
    return str(error)


def kind_of(error: Exception) -> type[UserError]:
    """Whether a check failed, the machine has to change, or the caller."""
    from cubinery.aot.audit import CheckFailedError
    from cubinery.aot.errors import BuildError, StoreError
    from cubinery.runtime.errors import DriverError, IntegrityError

    if isinstance(error, CheckFailedError | IntegrityError):
        return FailedError
    if isinstance(error, BuildError | StoreError | DriverError) or not isinstance(error, CubineryError):
        return MachineError
    return UserError


def json_option(function: F) -> F:
    """`--json`: one JSON document on stdout instead of text."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(function)


def show_json(document: Any) -> None:
    """Print a document with sorted members, for programs and for diffs."""
    click.echo(json.dumps(document, indent=2, sort_keys=True, default=str))


def show_table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", right: str = "") -> None:
    """A table: drawn by rich on a terminal, aligned plain text otherwise.

    `right` names the columns to align right, comma-separated.
    """
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    align_right = [column != "" and column in right.split(",") for column in columns]
    if sys.stdout.isatty() and _draw(columns, cells, align_right, title):
        return
    if title:
        click.echo(title)
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    for row in [list(columns), *cells]:
        padded = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, align_right, strict=True))
        click.echo("  ".join(padded).rstrip())


def _draw(columns: Sequence[str], cells: list[list[str]], align_right: list[bool], title: str) -> bool:
    """Draw with rich; False where rich is not installed (a machine that only inspects bundles)."""
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        return False
    drawn = Table(title=title or None, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for column, right in zip(columns, align_right, strict=True):
        drawn.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in cells:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(drawn)
    return True


_STYLES = {"ok": "green", "failed": "bold red", "missing": "bold red", "timeout": "bold red", "crashed": "bold red",
           "cached": "cyan", "warning": "yellow"}  # fmt: skip


def human_bytes(size: float) -> str:
    """`131.2 KB`; decimal units, as disks and indexes count."""
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable")


def plural(count: int, noun: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
