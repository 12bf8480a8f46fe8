"""`doctor`: what this machine can build and run, and the cure for what it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from cubinery.aot.commands.common import DEFAULT_BUNDLE, ExitCode, json_option, show_json, show_table


@click.command()
@click.option(
    "--bundle",
    "bundles",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Say which devices this bundle serves; repeat for more. Default: build/kernels, if it is there.",
)
@click.option(
    "--for",
    "purpose",
    type=click.Choice(["build", "run"]),
    help="Exit with 3 unless this machine can do that. Default: unless it can do either.",
)
@json_option
@click.pass_context
def doctor(ctx: click.Context, bundles: tuple[Path, ...], purpose: str | None, as_json: bool) -> None:
    """Say what this machine can build and run, and how to mend what it cannot."""
    from cubinery.aot.machine import diagnose

    found = diagnose(bundles or (DEFAULT_BUNDLE,))
    can = {"build": bool(found.can_build), "run": bool(found.devices) and not found.lacks("run")}
    if as_json:
        show_json(dataclasses.asdict(found) | {"can": can})
    else:
        show_table(("", "state", "what"), [(fact.name, fact.status, fact.detail) for fact in found.facts])
        click.echo()
        click.echo("builds for:  " + (", ".join(found.can_build) or "nothing"))
        for device, archs in found.can_run.items():
            click.echo(f"runs on {device}:  " + (", ".join(archs) or "nothing: no target for this chip"))
        if not found.devices:
            click.echo("runs:        nothing")
        for path, devices in found.bundles.items():
            served = f"serves {', '.join(devices)}" if devices else "serves no device of this machine"
            click.echo(f"{path}:  {served}")
        fixes = [fact for fact in found.facts if fact.fix]
        if fixes:
            click.echo()
            show_table(("to mend", "needed to", "do"), [(f.name, f.needed_for, f.fix) for f in fixes])
    good = can[purpose] if purpose else any(can.values())
    ctx.exit(int(ExitCode.OK if good else ExitCode.MACHINE))
