"""One module per command; each parses, calls the library, and shows the outcome."""

from __future__ import annotations

import click

from cubinery import __version__
from cubinery.aot.commands import build, bundles, check, doctor, listing, show, wheel
from cubinery.aot.commands.common import EXIT_CODES, Cli

__all__ = ["cli"]


@click.group(cls=Cli, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cubinery")
def cli() -> None:
    """Compile GPU kernels ahead of time from YAML specs, prove them, and ship them."""


for command in (
    build.build,
    listing.list_keys,
    show.show,
    bundles.verify,
    bundles.diff,
    check.check_reproducible,
    wheel.wheel,
    doctor.doctor,
):
    cli.add_command(command)
