"""Break every kernel in every way, and write what became of each mutant.

    PYTHONPATH=src:tests python -m ptxsim.mutations.survey --bundle build/smoke --out table.md

The bundle is that of kernel_specs/smoke.yaml for sm_90a and sm_110a. The corpus needs none. A mutant runs under the
default schedules until one reports it, and one that survives them under further hostile ones before it counts as a
survivor. Results are appended to a file of JSON lines beside the table, and what stands there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ptxsim.mutations.operators import Mutation
from ptxsim.mutations.subjects import FURTHER, SCHEDULES, Corpus, Decode, Subject, examine
from ptxsim.mutations.tensor_operators import DROPPED_WHOLLY, TENSOR_OPERATORS
from ptxsim.silicon import bundle as corpus_bundle
from ptxsim.silicon.corpus import corpus

ENTRIES = (
    "mbarrier_ring", "barrier_named", "bulk_load", "cluster_bulk", "cluster_bulk_multicast", "tensor_load_4d",
    "tensor_load_multicast", "bulk_store", "wgmma_bf16_random", "wgmma_e4m3_e4m3_f32_random",
)  # fmt: skip
"""Kernels of the silicon corpus that synchronise."""
EVERY = (*SCHEDULES, *FURTHER)
SHUFFLES = {"drop shuffle", "vote the other way"}
TENSOR = {kind for kind, *_ in (*TENSOR_OPERATORS, *DROPPED_WHOLLY)}
DECODES: dict[str, Callable[[str], bool]] = {
    "paged_decode-sm_90a-mma-d128-p16-kvfp8": lambda _: True,
    "paged_decode-sm_110a-mma-d128-p16-kvbf16": lambda kind: kind not in SHUFFLES,
    "paged_decode-sm_90a-mma-d128-p32-kvfp8-q4-t32-pdlon": lambda kind: kind not in SHUFFLES,
    "paged_decode-sm_110a-tcgen05-d128-p128-kvfp8": lambda kind: kind in TENSOR,
}
"""Decodes of the bundle, and which classes of their mutants run. The second and third have the shuffles of the first;
of the one on tensor memory, what concerns that is broken."""


def subjects(bundle: Path | None, folder: Path, chosen: set[str]) -> Iterator[Subject]:
    """What is broken: entries of the corpus (their bundle is written to `folder`), then kernels of the bundle."""
    entries = [name for name in ENTRIES if not chosen or name in chosen]
    if entries:
        root = corpus_bundle.write(folder, [corpus()[name] for name in entries])
        for name in entries:
            yield Corpus(root, name)
    for key, wanted in DECODES.items() if bundle is not None else ():
        assert bundle is not None
        if not chosen or key in chosen:
            arch = key.split("-")[1]
            yield Decode(bundle / arch, arch, key, wanted)


def survey(
    found: Iterable[Subject], log: Path, schedules: Sequence[str] = EVERY, share: tuple[int, int] = (0, 1)
) -> None:
    """Examine every mutant of every subject that the log does not hold yet, or one of several shares of them.

    What the unbroken kernel does not pass would be put down to its mutants, so that it must pass all schedules too;
    shares divide these as well.
    """
    index, count = share
    done = {(row["subject"], row["mutation"]) for row in rows(log)}
    for subject in found:
        for schedule in schedules[index::count]:
            report = subject.judge(None, schedule)
            assert not report, f"{subject.name} does not pass unbroken, {schedule}: {report}"
        for mutation in list(subject.mutations())[index::count]:
            if (subject.name, mutation.name) in done:
                continue
            start = time.perf_counter()
            try:
                verdict = examine(subject, mutation, schedules)
                schedule, said = verdict.schedule, verdict.report
            except Exception as error:  # noqa: BLE001 - a mutant that breaks the simulator is a finding too
                schedule, said = "crash", f"{type(error).__name__}: {error}"
            row = {
                "subject": subject.name, "mutation": mutation.name, "kind": mutation.kind, "schedule": schedule,
                "report": said[:300], "seconds": round(time.perf_counter() - start, 2),
                "before": mutation.before[:160] if isinstance(mutation, Mutation) else "",
            }  # fmt: skip
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")


def rows(log: Path) -> list[dict[str, str]]:
    """What a log holds."""
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def table(found: list[dict[str, str]]) -> str:
    """Mutants and survivors by kernel and by class, and the survivors."""
    lines = ["| kernel | mutants | survive |", "|---|---|---|"]
    for subject in dict.fromkeys(row["subject"] for row in found):
        these = [row["schedule"] for row in found if row["subject"] == subject]
        lines.append(f"| {subject} | {len(these)} | {these.count('')} |")
    heads = ("class", "mutants", "reported, fair", "first by a hostile one", "by a further one", "survive")
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    classes: dict[str, list[str]] = {}
    for row in found:
        classes.setdefault(row["kind"], []).append(row["schedule"])
    for kind, these in [*classes.items(), ("**all**", [row["schedule"] for row in found])]:
        fair, alive, further = these.count("fair:0"), these.count(""), sum(s in FURTHER for s in these)
        hostile = len(these) - fair - further - alive
        lines.append(f"| {kind} | {len(these)} | {fair} | {hostile} | {further} | {alive} |")
    lines += ["", *(f"- {r['subject']}, {r['mutation']}: `{r['before']}`" for r in found if not r["schedule"])]
    return "\n".join(lines) + "\n"


def _run(options: argparse.Namespace, share: tuple[int, int] = (0, 1)) -> None:
    """A share of the survey that the command line asks for."""
    chosen = {name for name in options.kernels.split(",") if name}
    with tempfile.TemporaryDirectory() as folder:
        found = subjects(options.bundle, Path(folder), chosen)
        survey(found, options.out.with_suffix(".jsonl"), options.schedules.split(","), share)


def main() -> None:
    """Run the survey and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="folder of smoke bundles; without it the corpus alone is broken")
    parser.add_argument("--out", type=Path, default=Path("mutations.md"))
    parser.add_argument("--kernels", default="", help="names of what to break, separated by commas; all otherwise")
    parser.add_argument("--schedules", default=",".join(EVERY), help="tried in this order until one reports")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the mutants")
    options = parser.parse_args()
    if options.jobs == 1:
        _run(options)
    else:
        shares = [(index, options.jobs) for index in range(options.jobs)]
        workers = [multiprocessing.Process(target=_run, args=(options, share)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        failed = sum(worker.exitcode != 0 for worker in workers)
        if failed:
            raise SystemExit(f"{failed} of {len(workers)} processes ended early; run again to go on")
    found = rows(options.out.with_suffix(".jsonl"))
    order = {name: place for place, name in enumerate((*ENTRIES, *DECODES))}
    options.out.write_text(table(sorted(found, key=lambda row: order[row["subject"]])))


if __name__ == "__main__":
    main()
