"""The `cubinery` command: the only code that prints or exits."""

from __future__ import annotations

import click


@click.group()
def main() -> None:
    """Compile, inspect, verify and ship ahead-of-time GPU kernels."""
