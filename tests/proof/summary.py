"""What a campaign's results say, as a section of docs/results: by implementation and arch, and by written case."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from proof.campaign import SCHEDULES, Result, Task
from proof.trials import LONGEST, TRIALS

from cubinery.runtime.families import parse_key

SPEED_AXES = ("max_kv_stages", "pdl", "l2_prefetch", "kv_evict_first")
"""Axes that may not change a bit of a result (case 36)."""


def disagreements(results: Iterable[Result]) -> list[str]:
    """Kernels whose bits depend on the schedule, and siblings that differ in SPEED_AXES alone and in their bits."""
    groups: dict[tuple[Any, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for row in results:
        if row.digest and not row.error:
            config, arch = parse_key(row.key)
            groups[sibling(config), arch][row.digest].add(f"{row.key} ({row.schedule})")
    return [" differs from ".join(min(runs) for runs in group.values()) for group in groups.values() if len(group) > 1]


def sibling(config: Any) -> Any:
    """The configuration with every axis that may not change a bit at its default."""
    fields = config.__dataclass_fields__
    return replace(config, **{name: fields[name].default for name in SPEED_AXES if name in fields})


def siblings(results: Iterable[Result]) -> int:
    """Groups of kernels that differ in SPEED_AXES alone and were compared."""
    groups: dict[Any, set[str]] = defaultdict(set)
    for row in results:
        if row.digest and not row.error:
            config, arch = parse_key(row.key)
            groups[sibling(config), arch].add(row.key)
    return sum(len(keys) > 1 for keys in groups.values())


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows)]


def summary(found: Sequence[Task], results: Sequence[Result]) -> str:
    """Markdown: how much of the campaign ran, what it found, and what each written case rests on."""
    wanted = {task.id for task in found}
    rows = [row for row in results if row.id in wanted]
    lines: list[str] = []
    by_kind: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    planned: dict[tuple[str, str, str], set[tuple[str, ...]]] = defaultdict(set)
    for task in found:
        planned[kind(task.key)].add(task.id)
    for row in rows:
        by_kind[kind(row.key)].append(row)
    main = []
    for which in sorted(planned):
        own = by_kind[which]
        failed = sum(bool(row.error) for row in own)
        good = [row for row in own if not row.error]
        worst = [max((getattr(row, name) for row in good), default=0.0) for name in ("o", "rms", "lse", "exact")]
        keys, done = len({task_id[0] for task_id in planned[which]}), f"{len(own)} of {len(planned[which])}"
        launches = f"{sum(row.launches for row in own):,}"
        main.append((*which[:2], f"`{which[2]}`", keys, done, failed, launches, *(f"{x:.1e}" for x in worst)))
    lines += table(
        ("kernel", "P", "arch", "keys", "trials run", "failed", "launches", "O, worst row", "O, rms of rows", "LSE",
         "O from exact P"), main,
    )  # fmt: skip
    count, seconds = sum(row.instructions for row in rows), sum(row.seconds for row in rows)
    rate = seconds / max(1, len(rows))
    text = (
        f"{count / 1e6:,.0f} million warp instructions in {seconds / 60:.0f} minutes of one process, {rate:.1f} s a "
        f"trial; all {len(wanted):,} take about {rate * len(wanted) / 3600:.1f} hours. "
        f"{siblings(rows)} groups of kernels that differ in ring depth, PDL, prefetch or eviction alone were compared; "
        f"outputs that depend on those or on the schedule: {len(disagreements(rows))}."
    )
    lines += ["", text, ""]
    columns = sorted({which[:1] + which[2:] for which in planned})
    body = []
    for trial in (*TRIALS, LONGEST):
        cells = []
        for impl, arch in columns:
            own = [row for row in rows if row.trial == trial.name and kind(row.key)[::2] == (impl, arch)]
            keys = {row.key for row in own if not row.error}
            names = ", ".join(s.split(":")[0] for s in SCHEDULES if any(row.schedule == s for row in own))
            bad = len({row.key for row in own if row.error})
            cells.append(f"{len(keys)} ({names})" + (f", {bad} FAILED" if bad else "") if own else "-")
        body.append((", ".join(map(str, trial.cases)), trial.name, *cells))
    lines += table(("cases", "trial", *(f"{impl} {arch}, kernels" for impl, arch in columns)), body)
    return "\n".join(lines) + "\n"


def kind(key: str) -> tuple[str, str, str]:
    """(implementation, element of P, arch)."""
    config: Any
    config, arch = parse_key(key)
    return config.impl, {"e4m3": "e4m3", "bf16": "f16"}[config.q_dtype] if config.impl == "tcgen05" else "bf16", arch
