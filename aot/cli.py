"""The `cubinery` command. This module and `commands/` are the only code that prints or exits.

`main` is the console script; it works where only the run-time dependencies are installed as far as saying
what the command line itself needs.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line on `sys.argv` and exit with one of the codes of `commands.common.ExitCode`."""
    try:
        from cubinery.aot.commands import cli
    except ModuleNotFoundError as error:
        if error.name != "click":
            raise
        print(
            "cubinery: the command line needs click, which is not installed: `pip install click` to inspect bundles, "
            "`pip install 'cubinery[build]'` to compile. (Serving needs neither: import cubinery.runtime.)",
            file=sys.stderr,
        )
        sys.exit(3)
    cli()
