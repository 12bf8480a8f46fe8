"""`list`: the keys that specs enumerate, or that a bundle or the installed wheels hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cubinery.aot.commands.common import UserError, human_bytes, json_option, plural, show_json, show_table
from cubinery.aot.commands.sources import arch_option, spec_files, spec_option


@click.command("list")
@arch_option
@spec_option
@click.option("--bundle", type=click.Path(path_type=Path), help="List what this bundle holds instead.")
@click.option("--installed", is_flag=True, help="List what the installed kernel wheels hold instead.")
@json_option
def list_keys(
    archs: tuple[str, ...], specs: tuple[Path, ...], bundle: Path | None, installed: bool, as_json: bool
) -> None:
    """List keys: those that the specs enumerate, or those of a bundle.

    Without --arch, of every arch.
    """
    if sum((bool(specs), bundle is not None, installed)) > 1:
        raise UserError("--spec, --bundle and --installed exclude each other: give one")
    columns: tuple[str, ...]
    if bundle is not None or installed:
        rows = _of_bundles(bundle, archs)
        columns, right = ("key", "cubin", "registers", "CTAs/SM", "requires"), "cubin,registers,CTAs/SM"
    else:
        rows = _of_specs(specs, archs)
        columns, right = ("key", "emit", "from"), ""
    if as_json:
        show_json({"keys": rows})
        return
    show_table(columns, [_cells(row) for row in rows], right=right)
    click.echo(plural(len(rows), "key"))


def _of_bundles(path: Path | None, archs: tuple[str, ...]) -> list[dict[str, Any]]:
    from cubinery.runtime.bundle import installed, open_all

    wanted = set(archs)
    bundles = installed() if path is None else open_all(path)
    held = sorted({found.manifest.arch for found in bundles})
    if missing := sorted(wanted - set(held)):
        raise UserError(f"no bundle here is for {', '.join(missing)}: found {', '.join(held) or 'none'}")
    return [
        {
            "key": artifact.key,
            "size": artifact.cubin.size,
            "registers": max((k.resources.registers for k in artifact.kernels if k.resources), default=None),
            "ctas_per_sm": min((k.resources.ctas_per_sm for k in artifact.kernels if k.resources), default=None),
            "requires": list(artifact.requires),
        }
        for found in bundles
        if not wanted or found.manifest.arch in wanted
        for artifact in found.manifest.artifacts
    ]


def _of_specs(specs: tuple[Path, ...], archs: tuple[str, ...]) -> list[dict[str, Any]]:
    from cubinery.aot.spec import load_specs
    from cubinery.aot.variants import expand

    items = expand(load_specs(spec_files(specs)), archs or None)
    return [{"key": item.key, "emit": list(item.emit), "origin": item.origin} for item in items]


def _cells(row: dict[str, Any]) -> list[Any]:
    return [
        human_bytes(value) if name == "size" else ", ".join(value) if isinstance(value, list) else value
        for name, value in row.items()
    ]
