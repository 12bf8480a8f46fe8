"""`build`: specs into bundles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cubinery.aot.commands.common import (
    DEFAULT_BUNDLE,
    ExitCode,
    UserError,
    human_bytes,
    json_option,
    show_json,
    show_table,
)
from cubinery.aot.commands.progress import build_progress
from cubinery.aot.commands.sources import arch_option, selector_option, spec_files, spec_option

if TYPE_CHECKING:
    from cubinery.aot.report import BuildReport
    from cubinery.aot.tables import Table, TableName
    from cubinery.aot.variants import BuildItem

F = TypeVar("F", bound=Callable[..., Any])


def limit_options(function: F) -> F:
    """`--jobs`, `--timeout` and `--memory`, which `build` and `check-reproducible` share."""
    options = (
        click.option("--jobs", type=click.IntRange(min=1), help="Most compile workers. Default: one a core."),
        click.option("--timeout", type=click.FloatRange(min=0, min_open=True), default=300.0, show_default=True,
                     metavar="SECONDS", help="Longest that one configuration may take."),
        click.option("--memory", type=click.FloatRange(min=0, min_open=True), metavar="GB",
                     help="What all workers together may take. Default: nine tenths of what is free."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


@click.command()
@arch_option
@spec_option
@click.option(
    "--from-misses",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Build the kernels that a serving process recorded as missing, and add them to the bundle.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=DEFAULT_BUNDLE, show_default=True)
@limit_options
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Default: $CUBINERY_CACHE, else the user's cache folder.",
)
@selector_option
@click.option("--force", "--no-cache", is_flag=True, help="Compile even what the cache has.")
@json_option
@click.pass_context
def build(
    ctx: click.Context,
    archs: tuple[str, ...],
    specs: tuple[Path, ...],
    from_misses: Path | None,
    out: Path,
    jobs: int | None,
    timeout: float,
    memory: float | None,
    cache: Path | None,
    selectors: tuple[Path, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Compile specs into OUT/<arch>, check every kernel, and write OUT/report.json.

    A key that fails fails alone: the others are in the bundle, and the exit code is 1.
    """
    from cubinery.aot.builder import BuildOptions
    from cubinery.aot.builder import build as run

    if from_misses is not None and specs:
        raise UserError("--from-misses and --spec exclude each other: give one")
    if from_misses is not None:
        items = _missed(from_misses, archs)
        tables = tables_for(items, selectors)
    else:
        items, tables = items_of_specs(specs, archs, selectors)
    options = BuildOptions(
        out=out,
        jobs=jobs,
        timeout_s=timeout,
        memory_bytes=None if memory is None else int(memory * 1e9),
        cache_dir=cache,
        force=force,
        merge=from_misses is not None,
        tables=tables,
    )
    with build_progress() as progress:
        report = run(items, options, progress)
    for warning in report.warnings:
        click.echo(f"cubinery: warning: {warning}", err=True)
    if as_json:
        show_json(report.to_json())
    else:
        _show(report, out)
    ctx.exit(int(ExitCode.OK if report.ok else ExitCode.FAILED))


def items_of_specs(
    specs: tuple[Path, ...], archs: tuple[str, ...], selectors: tuple[Path, ...]
) -> tuple[list[BuildItem], dict[TableName, Table]]:
    """What specs ask for on these archs, and the selector tables by which their domains are proved closed.

    No arch is an error, never a guess.
    """
    from cubinery.aot.spec import load_specs
    from cubinery.aot.variants import check_closure, expand
    from cubinery.runtime.arch import ARCHS

    if not archs:
        raise UserError(f"no arch given: name one or more with --arch: {', '.join(ARCHS)}")
    loaded = load_specs(spec_files(specs))
    items = expand(loaded, archs)
    tables = tables_for(items, selectors)
    check_closure(loaded, items, tables)
    return items, tables


def tables_for(items: list[BuildItem], selectors: tuple[Path, ...]) -> dict[TableName, Table]:
    """The selector tables of what is built: those given, else those that cubinery brings."""
    from cubinery.aot.tables import load

    return load({(item.config.family, item.arch.name) for item in items}, selectors)


def _missed(file: Path, archs: tuple[str, ...]) -> list[BuildItem]:
    from cubinery.aot.variants import from_misses

    items = from_misses(file)
    chosen = [item for item in items if not archs or item.arch.name in archs]
    if not chosen:
        held = ", ".join(sorted({item.arch.name for item in items}))
        raise UserError(f"{file}: holds no miss for {', '.join(archs)}, only for {held}")
    return chosen


def _failures(report: BuildReport) -> dict[str, list[str]]:
    """What went wrong, each thing once, to the keys that it struck."""
    found: dict[str, list[str]] = {}
    for row in report.rows:
        if row.status == "failed":
            message = f"{row.error_type}: {(row.error or '').removeprefix(f'{row.key}: ')}"
            found.setdefault(message, []).append(row.key)
    return found


def _show(report: BuildReport, out: Path) -> None:
    right = "seconds,peak memory,cubin,registers,stack,shared,CTAs/SM"
    columns = ("key", "status", *right.split(","), "limited by")
    show_table(
        columns,
        [
            (
                row.key,
                row.status,
                f"{row.seconds:.1f}",
                None if row.peak_memory is None else human_bytes(row.peak_memory),
                None if row.cubin_size is None else human_bytes(row.cubin_size),
                row.registers,
                row.stack,
                None if row.static_smem is None else row.static_smem + (row.dynamic_smem or 0),
                row.ctas_per_sm,
                row.limited_by,
            )
            for row in report.rows
        ],
        right=right,
    )
    for message, keys in _failures(report).items():
        others = f" (and {len(keys) - 1} more keys)" if len(keys) > 1 else ""
        click.echo(f"cubinery: failed: {keys[0]}{others}: {message}", err=True)
    line = f"{report.count('built')} built, {report.count('cached')} cached, {report.count('failed')} failed"
    line += f" in {report.seconds:.1f} s"
    if report.workers:
        line += (
            f"; compiling took {report.compile_seconds:.1f} s on {report.jobs} workers"
            f", the largest of which held {human_bytes(report.peak_memory)}"
        )
    click.echo(line)
    for folder in report.bundles:
        click.echo(f"bundle: {folder}")
    if not report.ok:
        click.echo(f"details: {out / 'report.json'}", err=True)
