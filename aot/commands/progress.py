"""Progress of a build on stderr: a bar on a terminal, one line per compiled key elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cubinery.aot.builder import Progress, ProgressCallback


@contextmanager
def build_progress(label: str = "building") -> Iterator[ProgressCallback]:
    """A callback for `aot.builder.build` that shows how far it is; stdout stays free for the outcome."""
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    now = TextColumn("{task.fields[now]}", markup=False)
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, now="")

        def update(progress: Progress) -> None:
            running = ", ".join(progress.running)
            bar.update(task, completed=progress.done, total=progress.total, now=running)
            if progress.row is not None and progress.row.status == "failed":
                bar.console.print(f"failed: {progress.row.error}", markup=False, highlight=False, soft_wrap=True)

        yield update


def _lines(progress: Progress) -> None:
    """One line for each key that was compiled or failed; what the cache had is only counted at the end."""
    row = progress.row
    if row is not None and row.status != "cached":
        what = f"{row.key}: {row.seconds:.1f} s" if row.status == "built" else row.error
        click.echo(f"[{progress.done}/{progress.total}] {row.status} {what}", err=True)
