"""Options that say what to build: archs and spec files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cubinery.aot.commands.common import UserError

F = TypeVar("F", bound=Callable[..., Any])


def split_archs(_context: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """`--arch sm_90a,sm_110a` and `--arch sm_90a --arch sm_110a` alike, as canonical names, each once."""
    from cubinery.runtime.arch import resolve
    from cubinery.runtime.errors import ArchError

    names = [name for value in values for name in value.replace(",", " ").split()]
    if values and not names:
        raise click.BadParameter("empty: name an arch such as sm_110a")
    try:
        return tuple(dict.fromkeys(resolve(name).name for name in names))
    except ArchError as error:
        raise click.BadParameter(str(error)) from None


def arch_option(function: F) -> F:
    """`--arch A`, repeatable or comma-separated; the parameter is called `archs`."""
    help_text = "Compile target, such as sm_110a or thor; repeat, or separate with commas."
    return click.option("--arch", "archs", multiple=True, callback=split_archs, metavar="ARCH", help=help_text)(
        function
    )


def spec_option(function: F) -> F:
    """`--spec FILE`, repeatable; the parameter is called `specs`."""
    help_text = "A spec, or a folder of them; repeat for more. Default: every top-level spec but smoke.yaml."
    return click.option("--spec", "specs", multiple=True, type=click.Path(path_type=Path), help=help_text)(function)


def selector_option(function: F) -> F:
    """`--selector FILE`, repeatable; the parameter is called `selectors`."""
    help_text = "A selector table of one family and arch for the bundle; repeat for more. Default: cubinery's own."
    return click.option(
        "--selector", "selectors", multiple=True, type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
        help=help_text,
    )(function)  # fmt: skip


def specs_folder() -> Path:
    """Where the specs that come with cubinery are: `kernel_specs/` of a checkout, package data elsewhere."""
    import cubinery

    return Path(cubinery.__file__).resolve().parent / "specs"


def spec_files(given: tuple[Path, ...]) -> list[Path]:
    """The spec files to read: those given (a folder stands for its YAML files), else the default set.

    Raises UserError where a file or the default set is missing.
    """
    if not given:
        found = sorted(path for path in specs_folder().glob("*.yaml") if path.name != "smoke.yaml")
        if not found:
            raise UserError(f"{specs_folder()}: holds no spec: name one with --spec FILE")
        return [_short(path) for path in found]
    files: list[Path] = []
    for path in given:
        if path.is_dir():
            inside = sorted(path.glob("*.yaml"))
            if not inside:
                raise UserError(f"{path}: a folder without any .yaml file: expected specs")
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path}: no such spec{_suggestion(path)}")
    return files


def _suggestion(path: Path) -> str:
    """Where a spec of that name does exist, or what there is."""
    known = sorted(found.name for found in specs_folder().glob("*.yaml"))
    if path.name in known:
        return f": did you mean {_short(specs_folder() / path.name)}?"
    return f": cubinery brings {', '.join(known)} in {_short(specs_folder())}" if known else ""


def _short(path: Path) -> Path:
    """Relative to the working folder where it lies below it, as a person would type it."""
    resolved, here = path.resolve(), Path.cwd().resolve()
    return resolved.relative_to(here) if resolved.is_relative_to(here) else path
