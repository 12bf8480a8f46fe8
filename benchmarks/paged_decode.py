"""Paged decode of this library and of its peers: each result is proved, then timed, in one run."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.ceilings import ReadFloor
from benchmarks.peers import Peer
from benchmarks.shapes import Problem, Shape
from benchmarks.timing import Time, Timer
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.runtime.errors import CubineryError
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
    peers: Sequence[Peer],
    timer: Timer,
    floor: ReadFloor | None,
    device: torch.device,
) -> Iterator[Row]:
    """Measure every shape in every format; yields each row when it is complete."""
    for shape in shapes:
        for kv_format in kv_formats:
            row = Row(shape, kv_format)
            problem = Problem(shape, kv_format, device)
            row.results[OURS] = _ours(library, problem, timer)
            for peer in peers:
                if not peer.absent:
                    row.results[peer.name] = _peer(peer, problem, timer)
            del problem
            gc.collect()
            if floor is not None:
                row.floor = floor.time(row.kv_bytes)
            yield row


def _ours(library: Library, problem: Problem, timer: Timer) -> Result:
    try:
        return _cubinery(library, problem, timer)
    except CubineryError as error:
        return Result(error=_first_line(error))


def _cubinery(library: Library, problem: Problem, timer: Timer) -> Result:
    s = problem.shape
    decode = PagedDecode(
        library, head_dim=s.d, page_size=s.page_size, kv_format=problem.kv_format, q_len=s.q_len,
        device=problem.device.index,
    )  # fmt: skip
    plan = decode.plan(np.array(s.lens), num_q_heads=s.h_q, num_kv_heads=s.h_k)
    out = torch.empty_like(problem.q)
    lse = torch.empty(plan.shape.lse, dtype=torch.float32, device=problem.device)
    workspace = torch.empty(max(16, plan.workspace_bytes()), dtype=torch.uint8, device=problem.device)

    def call() -> torch.Tensor:
        plan.run(problem.q, problem.k, problem.v, problem.table, out=out, lse=lse, workspace=workspace)
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

    return _prove_and_time(call, poison, wrong, timer, f"{' + '.join(plan.keys)}; {plan.splits.num_items} work items")


def _peer(peer: Peer, problem: Problem, timer: Timer) -> Result:
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
        return Result(error=_first_line(error))


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


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
