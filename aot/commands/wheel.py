"""`wheel`: pack bundles for shipping."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from cubinery.aot.commands.common import DEFAULT_BUNDLE, UserError, human_bytes, json_option, plural, show_json
from cubinery.aot.commands.sources import arch_option


@click.command()
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    default=DEFAULT_BUNDLE,
    show_default=True,
    help="One arch's folder, or the folder above several.",
)
@arch_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("dist"), show_default=True)
@click.option(
    "--max-size",
    type=click.FloatRange(min=0, min_open=True),
    default=100.0,
    show_default=True,
    metavar="MB",
    help="Refuse a larger wheel; 100 MB is what PyPI takes.",
)
@json_option
def wheel(bundle: Path, archs: tuple[str, ...], out: Path, max_size: float, as_json: bool) -> None:
    """Pack a bundle as one data wheel per arch (cubinery-kernels-sm110a).

    Without --arch, all that the bundle holds. It is verified first. A wheel holds cubins and their manifest: no
    code, no NVIDIA binary, no PTX. It installs on x86-64 and aarch64 alike, and Library.installed() finds it.
    """
    from cubinery.aot.wheel import pack
    from cubinery.runtime.bundle import open_all

    found = open_all(bundle)
    for name in archs:
        if name not in [b.manifest.arch for b in found]:
            raise UserError(
                f"{bundle}: no bundle for {name}: it holds {', '.join(b.manifest.arch for b in found)}; "
                f"build it with: make kernels ARCH={name}"
            )
    chosen = [b for b in found if not archs or b.manifest.arch in archs]
    reports = [pack(b, out, max_size=int(max_size * 1e6)) for b in chosen]
    if as_json:
        show_json({"wheels": [dataclasses.asdict(report) for report in reports]})
        return
    for report in reports:
        click.echo(
            f"{report.path}: {human_bytes(report.size)} ({plural(report.kernels, 'artifact')}, "
            f"{human_bytes(report.unpacked)} installed), sha256 {report.sha256}"
        )
