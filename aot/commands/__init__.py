"""One module per command; each parses, calls the library, and shows the outcome."""

from __future__ import annotations

import click

from cubinery import __version__
from cubinery.aot.commands.build import build
from cubinery.aot.commands.bundles import diff, verify
from cubinery.aot.commands.check import check_reproducible
from cubinery.aot.commands.common import EXIT_CODES, Cli
from cubinery.aot.commands.doctor import doctor
from cubinery.aot.commands.listing import list_keys
from cubinery.aot.commands.show import show
from cubinery.aot.commands.wheel import wheel

__all__ = ["cli"]


@click.group(cls=Cli, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="cubinery")
def cli() -> None:
    """Compile GPU kernels ahead of time from YAML specs, prove them, and ship them."""


for command in (build, list_keys, show, verify, diff, check_reproducible, wheel, doctor):
    cli.add_command(command)
