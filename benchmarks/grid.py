"""What the tools that measure a grid of plans share: a row for each plan, a file of rows, a command line."""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, get_type_hints

import torch

from benchmarks.options import select_device
from benchmarks.timing import GpuTimer, Timer
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.library import Library

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    class Line(DataclassInstance, Protocol):
        """A row: a dataclass of numbers and words, whose fields are the columns of the file."""

        @property
        def line(self) -> str:
            """The row for people."""

    R = TypeVar("R", bound=Line)
else:
    R = TypeVar("R")

Measure = Callable[[Library, Timer, torch.device], Iterator["R | str"]]
"""Yields rows, and what is wrong with plans that have none."""


def write(path: Path, kind: type[R], rows: Iterable[R]) -> None:
    """The rows as CSV, each as soon as it is there."""
    names = [field.name for field in fields(kind)]
    with path.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(names)
        for row in rows:
            out.writerow([getattr(row, name) for name in names])
            file.flush()


def read(path: Path, kind: type[R]) -> list[R]:
    """What `write` wrote."""
    types = get_type_hints(kind)
    with path.open(newline="") as file:
        return [kind(**{name: types[name](value) for name, value in entry.items()}) for entry in csv.DictReader(file)]


def main(
    tool: str, about: str, kind: type[R], header: str, measure: Measure[R], argv: Sequence[str] | None = None
) -> int:
    """Run `measure`; returns the exit code: 0 all was measured, 1 something is wrong, 2 the run could not start."""
    program = f"benchmarks.{tool}"
    p = argparse.ArgumentParser(prog=f"python -m {program}", description=about)
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR")
    p.add_argument("--out", type=Path, default=Path(f"build/{tool}.csv"), metavar="FILE", help="the rows, as CSV")
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    options = p.parse_args(argv)
    wrong = 0

    def rows() -> Iterator[R]:
        nonlocal wrong
        for found in measure(library, GpuTimer(device, warmup_ms=5, rep_ms=50), device):
            said = found if isinstance(found, str) else found.line
            print(said, flush=True)
            if isinstance(found, str):
                wrong += 1
            else:
                yield found

    try:
        library = Library.open(options.bundle)
        device = select_device(options.device)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        print(header)
        write(options.out, kind, rows())
    except (CubineryError, OSError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    print(f"written: {options.out}")
    return 1 if wrong else 0
