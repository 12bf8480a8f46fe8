"""`python -m benchmarks.tune`: measure which configuration is the fastest for which problems, as a selector table.

Every configuration of the bundle's is timed on a large batch and on one long sequence of each class of problems that
it can serve: a head_dim, a KV format, an element of Q and a range of packed query rows. For the fastest, split
policies are tried too. What was not measured keeps the rows of the rules, marked as estimates.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import sections
from benchmarks.options import choose, select_device
from benchmarks.paged_decode import measure_ours
from benchmarks.report import machine
from benchmarks.shapes import Shape
from benchmarks.timing import Timer
from cubinery.runtime.arch import Arch, resolve
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import HEAD_DIMS, KV_BITS, DecodeConfig
from cubinery.runtime.ops.paged_decode.rule_rows import ROW_CLASSES, option, rows_of_rules
from cubinery.runtime.ops.paged_decode.select import split_policy
from cubinery.runtime.ops.paged_decode.table import Option, Row, SelectorTable, loads

PROGRAM = "benchmarks.tune"
PAGE_SIZE = 64
"""Of the configurations that are compared: the page size makes no difference to what is the fastest."""
WIDEST_GROUP = 128
"""Packed rows of the class without an end."""
HEAD_ELEMENTS = 1024
"""KV heads times head_dim, of every shape: as many bytes a key whatever the head_dim."""
BATCHES = ((4096,) * 32, (65536,))
COST_FACTORS = (0.75, 1.0, 4 / 3)
"""Of a configuration's own lone_tile_cost."""
BETTER = 0.99
"""A split policy replaces the default where it takes less than this of the time."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Class:
    """Problems that one row speaks of."""

    head_dim: int
    kv_format: str
    rows: tuple[int, int | None]

    def shapes(self) -> tuple[Shape, ...]:
        """What is measured for it."""
        heads = HEAD_ELEMENTS // self.head_dim
        group = self.rows[1] or WIDEST_GROUP
        return tuple(Shape("tune", group * heads, heads, self.head_dim, PAGE_SIZE, lens) for lens in BATCHES)


@dataclass(frozen=True, slots=True)
class Timed:
    """An option and what its shapes took."""

    option: Option
    us: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Geometric mean over the shapes, us."""
        return math.exp(sum(map(math.log, self.us)) / len(self.us))


def classes(head_dims: Sequence[int], kv_formats: Sequence[str]) -> Iterator[Class]:
    """Every class, in the order of a table's rows."""
    for rows in ROW_CLASSES:
        for head_dim in head_dims:
            for kv_format in kv_formats:
                yield Class(head_dim, kv_format, rows)


def options_of(library: Library, arch: str, kind: Class) -> list[Option]:
    """The bundle's plain configurations for a class: a bf16 Q, one token a sequence, no feature."""
    found: list[Option] = []
    for key in library:
        config, own = parse_key(key)
        if not isinstance(config, DecodeConfig) or own != arch or (config.head_dim, config.kv_format) != (
            kind.head_dim, kind.kv_format
        ):  # fmt: skip
            continue
        plain = type(config)(
            head_dim=kind.head_dim, page_size=PAGE_SIZE, kv_format=kind.kv_format,
            **{name: config.axes()[name] for name in option(config, "").axes},
        )  # fmt: skip
        if config == plain.canonical():
            found.append(option(config, split_policy(resolve(arch))))
    return found


def tune(
    library: Library, arch: Arch, wanted: Sequence[Class], timer: Timer, device: torch.device, say: Say
) -> list[Row]:
    """Measured rows, for the classes that the bundle serves."""
    rows = []
    for kind in wanted:
        options = options_of(library, arch.name, kind)
        timed = sorted(_timed(library, arch, kind, options, timer, device, say), key=lambda entry: entry.mean)
        if not timed:
            say(f"{_title(kind)}: nothing in the bundle serves it; the rules' rows stay")
            continue
        best = _split(library, arch, kind, timed[0], timer, device, say)
        rows.append(_row(kind, [best, *timed[1:]]))
        say(f"{_title(kind)}: {_spell(best.option)}, {best.mean:.1f} us")
    return rows


def _timed(
    library: Library, arch: Arch, kind: Class, options: Sequence[Option], timer: Timer, device: torch.device, say: Say
) -> Iterator[Timed]:
    for chosen in options:
        only = SelectorTable(arch.name, "one option", (Row({}, (chosen,), "estimate"),))
        results = []
        for shape in kind.shapes():
            results.append(measure_ours(library, shape, kind.kv_format, timer, device, table=only))
            if device.type != "cpu":
                torch.cuda.empty_cache()
        times = [result.time for result in results if result.time is not None]
        if len(times) < len(results):
            error = next(result.error for result in results if result.time is None)
            say(f"{_title(kind)}: {_spell(chosen)}: {error}")
        else:
            yield Timed(chosen, tuple(time.us for time in times))


def _split(
    library: Library, arch: Arch, kind: Class, best: Timed, timer: Timer, device: torch.device, say: Say
) -> Timed:
    """The fastest configuration, with the split policy that suits it."""
    own = best.option.lone_tile_cost
    assert own is not None, "an option that was made from a configuration has its cost"
    tried = [replace(best.option, policy="thor")]
    tried += [replace(best.option, policy="balanced", lone_tile_cost=max(1, round(own * f))) for f in COST_FACTORS]
    others = [entry for entry in tried if entry != best.option]
    fastest = min(_timed(library, arch, kind, others, timer, device, say), key=lambda t: t.mean, default=best)
    return fastest if fastest.mean < BETTER * best.mean else best


def _row(kind: Class, timed: Sequence[Timed]) -> Row:
    titles = ", ".join(shape.title.partition(",")[0] for shape in kind.shapes())
    note = f"us for {titles}: " + "; ".join(
        f"{', '.join(f'{us:.1f}' for us in entry.us)} with {_spell(entry.option)}" for entry in timed[:3]
    )
    when = {"head_dim": (kind.head_dim,), "kv_format": (kind.kv_format,), "q_dtype": ("bf16",), "n_q": kind.rows}
    return Row(when, tuple(entry.option for entry in timed), "measured", note)


def _title(kind: Class) -> str:
    least, most = kind.rows
    rows = f"{least} rows and more" if most is None else f"{least} to {most} rows"
    return f"head_dim {kind.head_dim}, {kind.kv_format}, {rows}"


def _spell(chosen: Option) -> str:
    axes = ", ".join(f"{name} {value}" for name, value in chosen.axes.items())
    return f"{chosen.impl}, {axes}, {chosen.policy} {chosen.lone_tile_cost}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code: 0 a table was written, 1 nothing could be measured, 2 the run could not start."""
    p = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__)
    p.add_argument("--bundle", default=os.environ.get("CUBINERY_BUNDLE", "build/kernels"), metavar="DIR")
    p.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="where the table goes (default: build/<family>.<arch>.json); rows that were measured there before, of "
        "other problems, stay",
    )
    p.add_argument("--rules", metavar="ARCH", help="measure nothing: write what the rules say on ARCH, as estimates")
    p.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)), metavar="D[,D]", help="default: all")
    p.add_argument("--formats", default=",".join(KV_BITS), metavar="KV[,KV]", help="default: all")
    p.add_argument("--quick", action="store_true", help="fewer repeats: for a look, not for a record")
    p.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    options = p.parse_args(argv)
    try:
        head_dims = [int(d) for d in choose("--head-dims", options.head_dims, [str(d) for d in HEAD_DIMS])]
        formats = choose("--formats", options.formats, tuple(KV_BITS))
        if options.rules:
            return _write(resolve(options.rules), (), "estimates: the rules of the selector", options.out)
        library = Library.open(options.bundle)
        device = select_device(options.device)
        arch = resolve(library.arch_for(options.device))
        timer = sections.short_timer(options.quick, device)
        rows = tune(library, arch, list(classes(head_dims, formats)), timer, device, print)
        if not rows:
            print(f"{PROGRAM}: error: nothing was measured: no table is written", file=sys.stderr)
            return 1
        where = machine(library, options.device)
        source = f"measured on {where.gpu}, driver {where.driver}; rows that say so are estimates"
        return _write(arch, rows, source, options.out)
    except CubineryError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _write(arch: Arch, rows: Sequence[Row], source: str, out: Path | None) -> int:
    """Write measured rows and those of the rules. What a table at `out` has measured of other problems stays."""
    path = out or Path("build", f"{DecodeConfig.family}.{arch.name}.json")
    table = SelectorTable(arch.name, source, (*rows, *rows_of_rules(arch)))
    try:
        if path.is_file():
            table = _completed(table, loads(path.read_bytes(), str(path)), path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(table.dumps(), encoding="utf-8")
    except OSError as error:
        raise CubineryError(f"--out {path}: cannot be written: {error.strerror}") from error
    measured = sum(row.basis == "measured" for row in table.rows)
    print(f"written: {path}, {measured} measured rows and {len(table.rows) - measured} estimates")
    return 0


def _completed(table: SelectorTable, known: SelectorTable, path: Path) -> SelectorTable:
    """A table with the measured rows of another one, of problems that its own do not speak of."""
    if known.arch != table.arch:
        raise CubineryError(f"--out {path}: holds a table for {known.arch}: expected one for {table.arch}, or no file")
    own = [row.when for row in table.rows if row.basis == "measured"]
    kept = [row for row in known.rows if row.basis == "measured" and row.when not in own]
    source = known.source if kept and not own else table.source
    return replace(table, source=source, rows=(*table.rows[: len(own)], *kept, *table.rows[len(own) :]))


if __name__ == "__main__":
    sys.exit(main())
