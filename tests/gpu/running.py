"""Plan, run and check decode problems; what was measured is kept for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.problems import Case, Guarded
from gpu.reference import attention

from cubinery.aot.references.tolerances import PAGED_DECODE, Deviation, deviation
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan


@dataclass
class Worst:
    """Largest distances of all checks of one kind of problem."""

    checks: int = 0
    o_relative_l2: float = 0.0
    lse_absolute: float = 0.0


MEASURED: dict[tuple[str, int], Worst] = {}
"""By (kv_format, head_dim); filled by `check`, read by the report."""

ACCURACY: dict[tuple[str, str, int], tuple[float, float, float]] = {}
"""By (kv_format, q_dtype, head_dim): relative L2 distance of O from unquantised attention, that of exact attention
over the rounded values, and the largest distance of the LSE; read by the report."""


def run(plan: Plan, case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a plan with NaN-filled outputs and workspace between guard bytes, which it checks. Waits."""
    out = Guarded(case.q.shape, torch.bfloat16, case.device)
    lse = Guarded(plan.shape.lse, torch.float32, case.device)
    size = plan.workspace_bytes()
    workspace = Guarded((size,), torch.uint8, case.device) if size else None
    found = plan.run(
        *case.tensors,
        out=out.tensor,
        lse=lse.tensor,
        workspace=workspace and workspace.tensor,
        **case.extras,
        **options,
    )
    assert found[0] is out.tensor
    assert found[1] is lse.tensor
    out.check("out")
    lse.check("lse")
    if workspace is not None:
        workspace.check("the workspace")
    return out.tensor, lse.tensor


def expect(case: Case, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference's (o, lse) for the run options that bear on it."""
    return attention(
        case.q, case.k, case.v, case.table, case.lengths, q_len=case.q_len, causal=case.causal,
        kv_format=case.kv_format, window=case.window, softcap=case.softcap, **case.extras, **options,
    )  # fmt: skip


def check(
    plan: Plan,
    case: Case,
    out: torch.Tensor,
    lse: torch.Tensor,
    expected: tuple[torch.Tensor, torch.Tensor] | None = None,
    **options: Any,
) -> Deviation:
    """Hold outputs to the reference (computed here if not given), every row to the table of tolerances."""
    o_reference, lse_reference = expected or expect(case, **options)
    arrays = (out.reshape(case.q.shape).double(), lse, o_reference, lse_reference)
    found = deviation(*(x.detach().cpu().numpy() for x in arrays))
    worst = MEASURED.setdefault((case.kv_format, case.d), Worst())
    worst.checks += 1
    worst.o_relative_l2 = max(worst.o_relative_l2, found.o_relative_l2)
    worst.lse_absolute = max(worst.lse_absolute, found.lse_absolute)
    assert found.within(PAGED_DECODE[plan.config.impl]), f"{found}; {plan!r}, lengths {list(case.lengths)[:16]}"
    return found


@dataclass
class Gpu:
    """A device and the library under test."""

    library: Library
    device: torch.device
    _decodes: dict[Any, PagedDecode] = field(default_factory=dict)

    def case(self, lengths: Sequence[int], **fields: Any) -> Case:
        return Case(lengths, self.device, **fields)

    def decode(self, case: Case, **choices: Any) -> PagedDecode:
        """The operator for a case; `choices` are row_tile, ctas_per_sm and pdl."""
        problem = {
            "head_dim": case.d, "page_size": case.page_size, "kv_format": case.kv_format, "q_len": case.q_len,
            "causal": case.causal, "q_dtype": case.q_dtype, "window": case.window, "softcap": case.softcap,
            "sinks": case.with_sinks, "q_lens": case.with_q_lens,
        } | choices  # fmt: skip
        key = tuple(sorted(problem.items()))
        if key not in self._decodes:
            self._decodes[key] = PagedDecode(self.library, device=self.device.index or 0, **problem)
        return self._decodes[key]

    def plan(self, case: Case, choices: dict[str, Any] | None = None, **options: Any) -> Plan:
        """`options` are those of PagedDecode.plan."""
        return self.decode(case, **(choices or {})).plan(case.lengths, **case.heads, **options)

    def solve(
        self, case: Case, choices: dict[str, Any] | None = None, run_options: dict[str, Any] | None = None,
        expected: tuple[torch.Tensor, torch.Tensor] | None = None, **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Plan, run and check; returns (out, lse)."""
        plan = self.plan(case, choices, **options)
        out, lse = run(plan, case, **(run_options or {}))
        check(plan, case, out, lse, expected, **(run_options or {}))
        return out, lse

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Recording:
    """A prepared launch that notes its kernel's symbol whenever it is enqueued in `into`."""

    def __init__(self, inner: Any, symbol: str, into: list[str]) -> None:
        self.inner, self.symbol, self.into = inner, symbol, into
        self.params, self.set_grid = inner.params, inner.set_grid

    def launch(self, stream: int) -> None:
        self.into.append(self.symbol)
        self.inner.launch(stream)
