"""`show`: one key's launch, resources and code."""

from __future__ import annotations

import dataclasses
import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cubinery.aot.commands.common import (
    DEFAULT_BUNDLE,
    UserError,
    human_bytes,
    json_option,
    show_json,
    show_table,
)

if TYPE_CHECKING:
    from cubinery.runtime.bundle import Bundle
    from cubinery.runtime.manifest import Artifact, KernelRecord


@click.command()
@click.argument("key")
@click.option("--bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE, show_default=True)
@click.option("--sass", is_flag=True, help="Print the machine code (needs nvdisasm).")
@click.option("--ptx", is_flag=True, help="Print the PTX, where the spec said `emit: [ptx]`.")
@click.option("--estimate", is_flag=True, help="Print what the code should cost on its chip (needs nvdisasm).")
@json_option
def show(key: str, bundle: Path, sass: bool, ptx: bool, estimate: bool, as_json: bool) -> None:
    """Show KEY's launch record and resources, its code with --sass or --ptx, or its cost with --estimate."""
    found, artifact = _find(bundle, key)
    asked = [name for name, given in (("--sass", sass), ("--ptx", ptx), ("--estimate", estimate)) if given]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)} exclude each other: give one")
    if estimate:
        _show_estimate(found, artifact, as_json)
        return
    if sass or ptx:
        text = _sass(found, artifact) if sass else _ptx(found, artifact)
        if as_json:
            show_json({"key": key, "sass" if sass else "ptx": text})
        else:
            click.echo(text, nl=not text.endswith("\n"))
    elif as_json:
        show_json(dataclasses.asdict(artifact))
    else:
        _describe(found, artifact)


def _find(path: Path, key: str) -> tuple[Bundle, Artifact]:
    from cubinery.runtime.bundle import open_all
    from cubinery.runtime.errors import KernelNotFoundError
    from cubinery.runtime.families import parse_key

    bundles = open_all(path)
    for bundle in bundles:
        for artifact in bundle.manifest.artifacts:
            if artifact.key == key:
                return bundle, artifact
    parse_key(key)  # a malformed key is an error of its own, which says what is wrong in it
    known = [artifact.key for bundle in bundles for artifact in bundle.manifest.artifacts]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.5)
    hint = f"; the nearest: {', '.join(near)}" if near else ""
    raise KernelNotFoundError(f"{path}: holds no {key}{hint}; `cubinery list --bundle {path}` shows all")


def _sass(bundle: Bundle, artifact: Artifact) -> str:
    from cubinery.aot.inspect import sass

    return sass(bundle.read(artifact.cubin))


def _show_estimate(bundle: Bundle, artifact: Artifact, as_json: bool) -> None:
    from cubinery.aot.estimates import estimator_of
    from cubinery.runtime.arch import resolve
    from cubinery.runtime.families import parse_key

    estimator = estimator_of(artifact.family)
    if estimator is None:
        raise UserError(f"{artifact.key}: the family {artifact.family} has no estimate")
    config, arch = parse_key(artifact.key)
    figures = estimator(config, resolve(arch), _sass(bundle, artifact))
    if as_json:
        figured = [dataclasses.asdict(figure) for figure in figures]
        show_json({"key": artifact.key, "chip": resolve(arch).chip, "figures": figured})
        return
    click.echo(f"{artifact.key}, a tile of 128 keys of one KV head, {resolve(arch).chip}")
    rows = [(f.name, f"{f.value:,.2f}".rstrip("0").rstrip("."), f.unit, f.meaning) for f in figures]
    show_table(("figure", "value", "unit", "meaning"), rows, right="value")


def _ptx(bundle: Bundle, artifact: Artifact) -> str:
    record = artifact.emitted.get("ptx")
    if record is None:
        raise UserError(
            f"{bundle.root}: {artifact.key} was built without its PTX: add `emit: [ptx]` to its spec and rebuild"
        )
    return bundle.read(record).decode()


def _describe(bundle: Bundle, artifact: Artifact) -> None:
    click.echo(artifact.key)
    rows: list[tuple[str, Any]] = [
        ("family", artifact.family),
        ("implementation", artifact.impl),
        ("arch", artifact.arch),
        *((f"  {axis}", value) for axis, value in artifact.config.items()),
        ("requires", ", ".join(artifact.requires) or "nothing"),
        ("cubin", f"{bundle.root / artifact.cubin.path} ({human_bytes(artifact.cubin.size)})"),
        ("sha256", artifact.cubin.sha256),
        ("source digest", artifact.source_digest),
        *((f"emitted {name}", bundle.root / record.path) for name, record in artifact.emitted.items()),
    ]
    show_table(("", ""), rows)
    for record in artifact.kernels:
        click.echo()
        _describe_kernel(record)


def _describe_kernel(record: KernelRecord) -> None:
    resources = record.resources
    rows: list[tuple[str, Any]] = [
        ("symbol", record.symbol),
        ("grid", _by(record.grid)),
        ("block", _by(record.block)),
        ("cluster", _by(record.cluster)),
        ("dynamic shared memory", f"{record.dynamic_smem} B"),
        ("carveout", "the driver's default" if record.carveout < 0 else f"{record.carveout} %"),
        ("tensor memory", f"{record.tmem_columns} columns"),
        ("CTAs an SM must hold", record.min_ctas_per_sm),
        ("programmatic dependent launch", "yes" if record.pdl else "no"),
    ]
    if resources is not None:
        rows += [
            ("registers a thread", resources.registers),
            ("stack a thread", f"{resources.stack} B"),
            ("static shared memory", f"{resources.static_smem} B"),
            ("CTAs that fit an SM", resources.ctas_per_sm),
        ]
    show_table(("kernel", record.role), rows)
    click.echo()
    params = [(i, p.name, p.kind, p.offset, p.size, p.align) for i, p in enumerate(record.params)]
    show_table(("parameter", "name", "kind", "offset", "size", "align"), params, right="parameter,offset,size,align")
    if record.tensor_maps:
        click.echo()
        maps = [
            (m.name, m.pointer, m.dtype, _by(m.box), _by(m.extents), _by(m.strides), m.swizzle, m.l2_promotion)
            for m in record.tensor_maps
        ]
        show_table(("tensor map", "of", "dtype", "box", "extents", "strides", "swizzle", "L2 promotion"), maps)


def _by(values: tuple[int | str, ...]) -> str:
    return " x ".join(map(str, values))
