"""`verify` and `diff`: bundles examined after the fact."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from cubinery.aot.commands.common import (
    DEFAULT_BUNDLE,
    ExitCode,
    FailedError,
    human_bytes,
    json_option,
    plural,
    show_json,
    show_table,
)
from cubinery.aot.commands.simulation import show_outcomes, simulate


@click.command()
@click.argument("bundle", type=click.Path(path_type=Path), default=DEFAULT_BUNDLE)
@click.option("--sim", is_flag=True, help="Execute the PTX of every kernel on the simulator, against its reference.")
@click.option(
    "--schedules",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Warp schedules to simulate: a fair one, then hostile ones.",
)
@click.option("--key", "keys", multiple=True, help="Simulate only keys that contain this text; repeat for more.")
@click.option(
    "--trace", type=click.Path(path_type=Path, dir_okay=False), help="Write a Chrome trace of what is simulated."
)
@click.option("--no-checks", is_flag=True, help="Simulate without looking for races and uninitialised reads: faster.")
@click.option("--jobs", type=click.IntRange(min=1), default=None, help="Processes that simulate. Default: one a core.")
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    bundle: Path,
    sim: bool,
    schedules: int,
    keys: tuple[str, ...],
    trace: Path | None,
    no_checks: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Prove that BUNDLE (default build/kernels) is what its manifest says.

    Hashes every file again and reads architecture, symbols, parameters, registers, stack and occupancy back
    from the cubins. With --sim it also executes the kernels' PTX on the CPU, under several warp schedules and with
    every check on, and compares the results with the reference. Exit code 1 if anything differs.
    """
    from cubinery.aot.audit import verify
    from cubinery.runtime.bundle import open_all
    from cubinery.runtime.errors import BundleError
    from cubinery.runtime.manifest import MANIFEST_NAME

    try:
        audits = [verify(found) for found in open_all(bundle)]
    except BundleError as error:
        if not [*bundle.glob(MANIFEST_NAME), *bundle.glob(f"*/{MANIFEST_NAME}")]:
            raise  # no bundle at all: a wrong path
        if as_json:
            show_json({"ok": False, "bundles": [], "error": str(error)})
        raise FailedError(str(error)) from error
    if not sim and (trace is not None or keys or no_checks):
        raise click.UsageError("--trace, --key and --no-checks need --sim")
    outcomes = simulate(bundle, schedules, keys, trace, not no_checks, jobs) if sim else []
    good = all(audit.ok for audit in audits) and all(outcome.ok for outcome in outcomes)
    if as_json:
        report = {"ok": good, "bundles": [dataclasses.asdict(a) | {"ok": a.ok} for a in audits]}
        if sim:
            report["simulated"] = [dataclasses.asdict(o) | {"ok": o.ok} for o in outcomes]
        show_json(report)
    else:
        for audit in audits:
            summary = f"{plural(audit.artifacts, 'artifact')}, {human_bytes(audit.bytes_hashed)} hashed"
            click.echo(f"{audit.path}: {audit.arch}: {summary}: {'ok' if audit.ok else 'FAILED'}")
            for stray in audit.strays:
                click.echo(f"  note: {stray} is not named by the manifest")
        findings = [(f.key or "(bundle)", f.check, f.message) for audit in audits for f in audit.findings]
        if findings:
            show_table(("key", "check", "finding"), findings)
        if sim:
            show_outcomes(outcomes)
    ctx.exit(int(ExitCode.OK if good else ExitCode.FAILED))


@click.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@json_option
@click.pass_context
def diff(ctx: click.Context, old: Path, new: Path, as_json: bool) -> None:
    """Compare two bundles: keys added and removed, launches and resources changed.

    Exit code 1 if they differ, like diff(1).
    """
    from cubinery.aot.audit import diff_bundles
    from cubinery.runtime.bundle import open_all

    result = diff_bundles(open_all(old), open_all(new))
    if as_json:
        show_json(dataclasses.asdict(result) | {"same": result.same})
    elif result.same:
        click.echo(f"no difference: {plural(result.unchanged, 'artifact')} of the same launches and hashes")
    else:
        rows = [(key, "added", "", "") for key in result.added] + [(key, "removed", "", "") for key in result.removed]
        for key, changes in result.changed.items():
            rows += [(key, field, before, after) for field, (before, after) in changes.items()]
        rows += [("(bundle)", field, before, after) for field, (before, after) in result.bundle.items()]
        show_table(("key", "what", "old", "new"), rows)
        click.echo(
            f"{len(result.added)} added, {len(result.removed)} removed, {len(result.changed)} changed, "
            f"{result.unchanged} the same"
        )
    ctx.exit(int(ExitCode.OK if result.same else ExitCode.FAILED))
