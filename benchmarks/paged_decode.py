"""Paged decode of this library and of its peers: each result is proved, then timed, in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.ceilings import ReadFloor
from benchmarks.peers import Peer, first_line
from benchmarks.shapes import Problem, Shape
from benchmarks.timing import Time, Timer
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.errors import ConfigError, CubineryError, KernelNotFoundError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

OURS = "cubinery"

PEER_RELATIVE_L2 = 0.1
"""Largest distance of a peer's output row from the reference: some round Q and P to fp8."""


@dataclass(frozen=True, slots=True)
class Result:
    """One implementation on one problem: its time, or what kept it from having one."""

    time: Time | None = None
    error: str = ""
    detail: str = ""
    """What ran: kernel keys and the plan."""
    missing: bool = False
    """The bundle has no kernel for it, or the family none at all."""
    cluster: int = 1
    """CTAs of a cluster, of ours."""
    items: int = 0
    """Work items of the plan, of ours."""


class Guest(Protocol):
    """A peer as `measure` sees it: asked for one problem at a time."""

    name: str
    version: str
    absent: str
    """Why it is not there; empty where it is."""

    def measure(self, shape: Shape, kv_format: str) -> Result:
        """Prove and time one problem. Never raises."""


@dataclass(slots=True)
class Row:
    """One shape and KV format."""

    shape: Shape
    kv_format: str
    floor: Time | None = None
    """A plain read of the same bytes."""
    results: dict[str, Result] = field(default_factory=dict)
    """By implementation."""

    @property
    def kv_bytes(self) -> int:
        return self.shape.kv_bytes(self.kv_format)

    @property
    def ours(self) -> Result:
        return self.results[OURS]

    def gbps(self, us: float) -> float:
        """GB of K and V a second."""
        return self.kv_bytes / us / 1e3

    @property
    def best_peer(self) -> tuple[str, float] | None:
        """(name, us) of the fastest peer that computed this problem."""
        times = [(name, r.time.us) for name, r in self.results.items() if name != OURS and r.time is not None]
        return min(times, key=lambda pair: pair[1], default=None)


def measure(
    shapes: Sequence[Shape],
    kv_formats: Sequence[str],
    library: Library,
    peers: Sequence[Guest],
    timer: Timer,
    floor: ReadFloor | None,
    device: torch.device,
) -> Iterator[Row]:
    """Measure every shape in every format; yields each row when it is complete."""
    for shape in shapes:
        for kv_format in kv_formats:
            row = Row(shape, kv_format)
            row.results[OURS] = measure_ours(library, shape, kv_format, timer, device)
            for peer in peers:
                if not peer.absent:
                    row.results[peer.name] = peer.measure(shape, kv_format)
            if floor is not None:
                row.floor = floor.time(row.kv_bytes)
            yield row


def measure_ours(
    library: Library, shape: Shape, kv_format: str, timer: Timer, device: torch.device, **choices: Any
) -> Result:
    """Prove and time this library; `choices` are PagedDecode's `row_tile`, `ctas_per_sm` and the like."""
    try:
        decode = PagedDecode(
            library, head_dim=shape.d, page_size=shape.page_size, kv_format=kv_format, q_len=shape.q_len,
            device=device.index, **choices,
        )  # fmt: skip
        decode.preload(shape.h_q // shape.h_k)  # before gigabytes are filled for nothing
        try:
            return measure_plan(decode, Problem(shape, kv_format, device), timer)
        finally:
            gc.collect()  # a plan and its graph hold each other, and with them the cache
    except (KernelNotFoundError, ConfigError) as error:
        return Result(error=first_line(error), missing=True)
    except CubineryError as error:
        return Result(error=first_line(error))


def measure_plan(decode: PagedDecode, problem: Problem, timer: Timer, **options: Any) -> Result:
    """Prove and time one plan; `options` are those of PagedDecode.plan. Raises what that does."""
    s = problem.shape
    plan = decode.plan(np.array(s.lens), num_q_heads=s.h_q, num_kv_heads=s.h_k, **options)
    out = torch.empty_like(problem.q)
    lse = torch.empty(plan.shape.lse, dtype=torch.float32, device=problem.device)
    workspace = torch.empty(max(16, plan.workspace_bytes()), dtype=torch.uint8, device=problem.device)

    given: dict[str, Any] = {"out": out, "lse": lse, "workspace": workspace}
    if problem.k_scales is not None:
        given |= {"k_scales": problem.k_scales, "v_scales": problem.v_scales}

    def call() -> torch.Tensor:
        plan.run(problem.q, problem.k, problem.v, problem.table, **given)
        return out

    def wrong() -> str:
        for seq in problem.checked():
            o_expected, lse_expected = (x.cpu().numpy() for x in problem.reference(seq))
            found = deviation(problem.rows(out, seq), lse[seq].cpu().numpy(), o_expected, lse_expected)
            tolerance = PAGED_DECODE[plan.config.impl]
            if not found.within(tolerance):
                return f"wrong result, sequence {seq}: {found}"
        return ""

    def poison() -> None:
        out.fill_(float("nan"))
        lse.fill_(float("nan"))

    clusters = f" in clusters of {plan.cluster}" if plan.cluster > 1 else ""
    detail = f"{' + '.join(plan.keys)}{clusters}; {plan.splits.num_items} work items"
    found = _prove_and_time(call, poison, wrong, timer, detail)
    return replace(found, cluster=plan.cluster, items=plan.splits.num_items)


def measure_peer(peer: Peer, problem: Problem, timer: Timer) -> Result:
    """Prove and time a peer in this process. Whatever it raises is its result."""
    last: list[torch.Tensor] = []

    def wrong() -> str:
        for seq in problem.checked():
            expected = problem.reference(seq)[0].cpu().numpy()
            rows = problem.rows(last[-1], seq)
            norm = np.linalg.norm(rows - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
            if not norm.max() <= PEER_RELATIVE_L2:  # a NaN is not
                return f"wrong result, sequence {seq}: O relative L2 {norm.max():.3e}"
        return ""

    def poison() -> None:
        for out in last[-1:]:
            out.fill_(float("nan"))

    try:
        run = peer.prepare(problem)

        def call() -> torch.Tensor:
            last[:] = [run()]
            return last[0]

        return _prove_and_time(call, poison, wrong, timer, peer.version)
    except Exception as error:  # noqa: BLE001 - whatever another library raises is its result
        return Result(error=first_line(error))


def _prove_and_time(
    call: Callable[[], torch.Tensor],
    poison: Callable[[], None],
    wrong: Callable[[], str],
    timer: Timer,
    detail: str,
) -> Result:
    """Time what a replay computes, once a replay into poisoned outputs was compared with the reference."""
    call()
    replay = timer.capture(call)
    poison()
    replay()
    said = wrong()
    if said:
        return Result(error=said, detail=detail)
    return Result(time=timer.time(replay), detail=detail)
