"""`check-reproducible`: the same inputs give the same bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from cubinery.aot.commands.build import items_of_specs, limit_options
from cubinery.aot.commands.common import ExitCode, json_option, plural, show_json, show_table
from cubinery.aot.commands.progress import build_progress
from cubinery.aot.commands.sources import arch_option, selector_option, spec_option


@click.command()
@arch_option
@spec_option
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    help="Compile once and compare with this bundle. Default: compile twice.",
)
@selector_option
@limit_options
@json_option
@click.pass_context
def check_reproducible(
    ctx: click.Context,
    archs: tuple[str, ...],
    specs: tuple[Path, ...],
    bundle: Path | None,
    selectors: tuple[Path, ...],
    jobs: int | None,
    timeout: float,
    memory: float | None,
    as_json: bool,
) -> None:
    """Build again without any cache, and compare every byte.

    Works in a temporary folder. Exit code 1 if anything differs.
    """
    from cubinery.aot.builder import BuildOptions
    from cubinery.aot.reproduce import reproduce
    from cubinery.runtime.bundle import open_all

    if bundle is not None:
        open_all(bundle)  # a bundle that cannot be read is an error before minutes of compiling, not after
    items, tables = items_of_specs(specs, archs, selectors)
    limits = BuildOptions(
        out=Path(), jobs=jobs, timeout_s=timeout, memory_bytes=None if memory is None else int(memory * 1e9),
        tables=tables,
    )  # fmt: skip
    with build_progress("rebuilding") as progress:
        found = reproduce(items, limits, bundle, progress)
    if as_json:
        show_json(dataclasses.asdict(found) | {"same": found.same})
    elif found.same:
        click.echo(f"reproducible: {plural(found.keys, 'key')}, every byte the same ({found.seconds:.1f} s)")
    else:
        rows = [(key, "only in the second", "", "") for key in found.diff.added]
        rows += [(key, "only in the first", "", "") for key in found.diff.removed]
        for key, changes in (found.diff.changed | {"(bundle)": found.diff.bundle}).items():
            rows += [(key, field, before, after) for field, (before, after) in changes.items()]
        rows += [(f"{arch}/manifest.json", "bytes differ", "", "") for arch in found.manifests]
        show_table(("key", "what", "first", "second"), rows)
        click.echo(f"NOT reproducible: {plural(len(found.diff.changed), 'key')} of {found.keys} differ", err=True)
    ctx.exit(int(ExitCode.OK if found.same else ExitCode.FAILED))
