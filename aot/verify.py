"""Kernels executed on the simulator and compared with their reference: what `cubinery verify --sim` does.

Each artifact of a bundle that answers a public call runs on a small problem of its own configuration, through the
same library, planner and argument packing as on a GPU, once under every schedule.
"""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.ptxsim.machine import Checks
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.ptxsim.trace import ChromeTrace
from cubinery.aot.references import tolerances
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.runtime.arch import resolve
from cubinery.runtime.bundle import Bundle
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import Artifact
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig
from cubinery.runtime.ops.paged_decode.layouts import kv_views, storage_shapes

NUM_KV_HEADS = 2
SPLITS = 2
"""Chunks a sequence, so that the reduction runs too."""


@dataclass(frozen=True, slots=True)
class Task:
    """One artifact under one schedule."""

    bundle: Path
    arch: str
    key: str
    schedule: str
    checks: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one task found."""

    key: str
    schedule: str
    error: str
    """A fault, or a distance from the reference beyond its tolerance; empty where all is well."""
    deviation: str
    instructions: int
    """Warp instructions executed."""
    seconds: float
    """Spent executing them."""
    ctas: int

    @property
    def ok(self) -> bool:
        return not self.error


def tasks(bundle: Bundle, schedules: Sequence[str], *, checks: bool = True) -> list[Task]:
    """What to run for a bundle. Raises SimError where an artifact has no PTX, or nothing can be run."""
    silent = [a.key for a in bundle.manifest.artifacts if "ptx" not in a.emitted]
    if silent:
        raise SimError(
            f"{bundle.root}: {silent[0]}{f' and {len(silent) - 1} more keep' if len(silent) > 1 else ' keeps'} no PTX, "
            "which is what the simulator executes: build from a spec that says `emit: [ptx]`"
        )
    found = [
        Task(bundle.root, bundle.manifest.arch, artifact.key, name, checks)
        for artifact in bundle.manifest.artifacts
        if _is_called(artifact)
        for name in schedules
    ]
    if not found:
        raise SimError(f"{bundle.root}: no artifact that answers a public call, so there is nothing to run")
    return found


def lengths(config: DecodeConfig, arch: str) -> tuple[int, ...]:
    """Keys of each sequence: enough for every chunk to go around the ring of stages, none, and less than a tile."""
    stages = config.stages(resolve(arch)) // 2 + 2  # the ring holds K and V
    tiles = -(-stages * config.stage_keys // TILE_KEYS)
    return SPLITS * tiles * TILE_KEYS + 44, 0, 77


def _is_called(artifact: Artifact) -> bool:
    """Reductions run as part of the decodes that require them."""
    return isinstance(parse_key(artifact.key)[0], DecodeConfig)


def run_all(work: Sequence[Task], *, jobs: int = 1, trace: Path | None = None) -> Iterator[Outcome]:
    """Run tasks and yield their outcomes as they come: in `jobs` processes, or here where a trace is wanted."""
    if jobs <= 1 or trace is not None or len(work) == 1:
        tracer = None if trace is None else ChromeTrace()
        with contextlib.ExitStack() as stack:
            if tracer is not None and trace is not None:
                stack.callback(tracer.write, trace)
            for task in work:
                yield run(task, tracer)
        return
    with ProcessPoolExecutor(min(jobs, len(work)), multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(run, task) for task in work]):
            yield future.result()


def run(task: Task, tracer: ChromeTrace | None = None, progress: Callable[[int, int], None] | None = None) -> Outcome:
    """Run one task; a fault becomes the outcome's error."""
    driver = SimDriver(
        task.arch,
        [task.bundle],
        schedule=lambda: named_schedule(task.schedule),
        checks=Checks() if task.checks else Checks.off(),
        tracer=tracer,
        progress=progress,
    )
    error = deviation = ""
    try:
        found = decode(driver, task)
        deviation = str(found)
        if not found.within(tolerances.PAGED_DECODE["mma"]):
            error = f"far from the reference: {found}"
    except CubineryError as fault:
        error = str(fault)
    done = driver.counters
    return Outcome(task.key, task.schedule, error, deviation, done.instructions, done.seconds, driver.ctas)


def decode(
    driver: SimDriver, task: Task, seed: int = 7, *, keys: Sequence[int] = (), splits: int = SPLITS
) -> tolerances.Deviation:
    """A paged decode of the artifact's configuration, against the reference. Raises Fault.

    `seed` makes values, `keys` are the sequences' lengths (those of `lengths` if there are none).
    """
    from cubinery.runtime.ops.paged_decode.op import PagedDecode

    config, _ = parse_key(task.key)
    assert isinstance(config, DecodeConfig)
    library = Library.open(task.bundle, driver=driver)
    group = max(1, min(config.row_tile, 16 * config.q_len) // config.q_len)
    keys = tuple(keys) or lengths(config, task.arch)
    problem = decode_problem(config, group, keys, seed)
    with watching(driver):
        driver.register_tensors(**problem)
        op = PagedDecode(
            library, head_dim=config.head_dim, page_size=config.page_size, kv_format=config.kv_format,
            q_len=config.q_len, causal=config.causal, q_dtype=config.q_dtype, impl=config.impl,
            row_tile=config.row_tile, ctas_per_sm=config.ctas_per_sm, pdl=config.pdl,
        )  # fmt: skip
        if op.keys(group)[0] != task.key:
            raise SimError(f"{task.key}: the public call picks {op.keys(group)[0]} for its configuration")
        plan = op.plan(list(keys), num_q_heads=group * NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS, force_splits=splits)
        if config.pdl:  # once more: the second decode may start before the first reduction has ended
            plan.run(*problem.values())
        o, lse = plan.run(*problem.values())
    q, k, v, table = problem.values()
    expected = paged_attention(q, k, v, table, keys, q_len=config.q_len, causal=config.causal)
    return tolerances.deviation(o.double().numpy(), lse.numpy(), *expected)


def decode_problem(config: DecodeConfig, group: int, lengths: Sequence[int], seed: int = 7) -> dict[str, Any]:
    """q, k, v and block table of a random problem; pages that no sequence owns are NaN, the table's padding invalid."""
    import torch

    rng = np.random.default_rng(seed)
    blocks = [-(-length // config.page_size) for length in lengths]
    pages = sum(blocks) + 3
    order = rng.permutation(pages)
    table = np.full((len(lengths), max(blocks) + 1), -(2**31), np.int32)
    taken = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[taken : taken + count]
        taken += count
    shapes = storage_shapes(
        "nhd", num_pages=pages, page_size=config.page_size, num_kv_heads=NUM_KV_HEADS, row=config.head_dim
    )
    dtype = torch.bfloat16 if config.kv_format == "bf16" else torch.float8_e4m3fn
    k, v = kv_views("nhd", *[torch.zeros(shape).to(dtype) for shape in shapes])
    for view in (k, v):
        values = rng.standard_normal(tuple(view.shape)).astype(np.float32)
        values[order[taken:]] = np.nan
        view.copy_(torch.from_numpy(values).to(dtype))
    shape = (len(lengths) * config.q_len, group * NUM_KV_HEADS, config.head_dim)
    q = torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).bfloat16()
    return {"q": q, "k_cache": k, "v_cache": v, "block_table": torch.from_numpy(table)}
