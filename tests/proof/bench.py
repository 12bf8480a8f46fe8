"""One decode kernel on the simulator: problems of its configuration, run through the public call and held to the
reference of its implementation.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from gpu.problems import Case
from gpu.reference import attention
from gpu.running import run as run_guarded

from cubinery.aot.problems.paged_decode.mma import SOFTCAP, WINDOW, knobs
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.references import tolerances
from cubinery.aot.references.paged_decode_tcgen05 import chunks_of, emulated_attention
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.clusters import CLUSTER_SIZES
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

Outputs = tuple[torch.Tensor, torch.Tensor]

CPU = torch.device("cpu")
ROWS_RMS = 5e-3
"""Bound on the root mean square over rows of O's relative L2 distance, whatever the implementation: a key that is left
out, or a wrong scale, shows in every row, while P rounded to its neighbour shows in one."""
P_ROUNDING = {"bf16": 5e-3, "e4m3": 6.5e-2}
"""Bounds on a row's distance from attention with exact P: with P rounded to e4m3, as `tcgen05` does with a Q of it, and
to 16 bits. nvfp4 with converted values has none."""


@dataclass
class Worst:
    """Largest distances of all checks."""

    o: float = 0.0
    rms: float = 0.0
    lse: float = 0.0
    exact: float = 0.0
    """Of a row from attention with exact P."""


@dataclass
class Bench:
    """The kernel under test. Everything here runs inside `watching(driver)`."""

    driver: SimDriver
    library: Library
    key: str
    config: Any
    worst: Worst = field(default_factory=Worst)
    digest: str = ""
    """Of the outputs that every sibling of the kernel must repeat to the bit, under any schedule."""
    _calls: dict[tuple[int, bool, int], PagedDecode] = field(default_factory=dict)
    _plans: int = 0

    @property
    def cluster(self) -> int:
        """CTAs of the next plan's clusters: all sizes in turn, from another one on for another kernel.

        From the same one for kernels that must agree to the bit.
        """
        if self.splits:
            return 1
        first = zlib.crc32(repr(replace(self.config, pdl=False)).encode())
        return CLUSTER_SIZES[(first + self._plans) % len(CLUSTER_SIZES)]

    # -- what the configuration allows ---------------------------------------------------------

    @property
    def q_len(self) -> int:
        return int(self.config.q_len)

    def has(self, axis: str) -> bool:
        """Whether one of the optional axes is on; implementations lack some."""
        return bool(getattr(self.config, axis, False))

    @property
    def plain(self) -> bool:
        """Rows are plain softmax attention: what a row sees, and its sums, follow from lengths alone."""
        return not any(map(self.has, ("window", "sinks", "softcap", "q_lens")))

    @property
    def splits(self) -> bool:
        """Plans cut sequences, as they are told; otherwise a cluster shares each, whatever a trial asks for."""
        return bool(self.config.cluster == 1)

    @property
    def converts_nvfp4(self) -> bool:
        """The tensor cores get e4m3(code * scale / 8)."""
        return bool(self.config.impl == "tcgen05" and self.config.kv_format == "nvfp4")

    def group(self, *, beyond: bool = False) -> int:
        """Query heads of a KV head whose packed rows fill the row tile as far as whole tokens do, or go past it."""
        fitting = max(1, min(64, self.config.row_tile // self.q_len))
        return fitting + 1 if beyond else fitting

    # -- problems ------------------------------------------------------------------------------

    def case(self, lengths: Sequence[int], *, heads: int = 1, group: int | None = None, **fields: Any) -> Case:
        """A problem of this configuration, with poison and garbage wherever the kernel must not look."""
        config = self.config
        axes: dict[str, Any] = {
            "d": config.head_dim, "page_size": config.page_size, "kv_format": config.kv_format,
            "q_dtype": config.q_dtype, "q_len": self.q_len, "causal": config.causal,
            "window": WINDOW if self.has("window") else None, "softcap": SOFTCAP if self.has("softcap") else None,
            "with_sinks": self.has("sinks"), "with_q_lens": self.has("q_lens"),
        }  # fmt: skip
        axes |= {"layout": "nhd", "seed": 5} | fields
        return Case(lengths, CPU, h_q=heads * (group or self.group()), h_k=heads, **axes)

    def clear_tails(self, case: Case) -> None:
        """Zeros, which every format has, in place of what is stored where no sequence has keys."""
        for stored in (*case.raw.values(), *case.scales.values()):
            stored[~case.live] = 0

    # -- running -------------------------------------------------------------------------------

    def plan(self, case: Case, *, cluster: int | None = None, **options: Any) -> Plan:
        """A plan of the kernel under test. Fails where the public call would launch another.

        `cluster`: CTAs of its clusters where they may not be the next ones in turn: where two plans must agree.
        """
        size = cluster or self.cluster
        self._plans += 1
        call = self._calls.get((case.q_len, case.causal, size))
        if call is None:
            call = self._calls[case.q_len, case.causal, size] = PagedDecode(
                self.library, impl=self.config.impl, row_tile=self.config.row_tile, head_dim=case.d,
                page_size=case.page_size, kv_format=case.kv_format,
                q_len=case.q_len, causal=case.causal, q_dtype=case.q_dtype, window=case.window, softcap=case.softcap,
                sinks=case.with_sinks, q_lens=case.with_q_lens, ctas_per_sm=self.config.ctas_per_sm,
                cluster=size, pdl=self.config.pdl, **knobs(self.config),
            )  # fmt: skip
        if not self.splits:
            options = {name: x for name, x in options.items() if name not in ("force_splits", "max_splits")}
        plan = call.plan(case.lengths, **case.heads, **options)
        assert plan.keys == (self.key,), f"the plan launches {plan.keys}"
        return plan

    def run(self, plan: Plan, case: Case, **options: Any) -> Outputs:
        """One launch, with NaN in outputs and workspace, and guard bytes around them."""
        before = self.driver.counters.launches
        found = run_guarded(plan, case, **options)
        assert self.driver.counters.launches == before + 1, "a run is one launch"
        return found

    def check(self, plan: Plan, case: Case, out: torch.Tensor, lse: torch.Tensor, **options: Any) -> None:
        """Hold outputs to the reference of the implementation, and to attention with exact P."""
        exact = [x.numpy() for x in attention(
            case.q, case.k, case.v, case.table, case.lengths, q_len=case.q_len, causal=case.causal,
            kv_format=case.kv_format, window=case.window, softcap=case.softcap, **case.extras, **options,
        )]  # fmt: skip
        shaped = out.reshape(case.q.shape).double().numpy(), lse.numpy()
        if self.config.impl == "tcgen05":
            expected = emulated_attention(
                *case.tensors, case.lengths, chunks=chunks_of(plan.splits.work, len(case.lengths)),
                q_dtype=case.q_dtype, q_len=case.q_len, causal=case.causal, kv_format=case.kv_format, **case.scales,
                **options,
            )  # fmt: skip
        else:
            expected = exact[0], exact[1]
        found = tolerances.deviation(*shaped, *expected)
        rms = _rows_rms(shaped[0], expected[0])
        far = tolerances.deviation(*shaped, *exact).o_relative_l2
        worst = self.worst
        worst.o, worst.lse = max(worst.o, found.o_relative_l2), max(worst.lse, found.lse_absolute)
        worst.rms = max(worst.rms, rms)
        where = f"{plan!r}, lengths {list(case.lengths)}"
        assert found.within(tolerances.paged_decode(self.config.impl, case.q_dtype)), f"{found}; {where}"
        assert rms <= ROWS_RMS, f"O is off by {rms:.1e} in the mean of its rows, {found}; {where}"
        if not self.converts_nvfp4:
            worst.exact = max(worst.exact, far)
            limit = P_ROUNDING[case.q_dtype if self.config.impl == "tcgen05" else "bf16"]
            assert far <= limit, f"O is {far:.1e} from attention with exact P; {where}"

    def solve(self, case: Case, run_options: dict[str, Any] | None = None, **options: Any) -> Outputs:
        """Plan, run and check."""
        plan = self.plan(case, **options)
        found = self.run(plan, case, **(run_options or {}))
        self.check(plan, case, *found, **(run_options or {}))
        return found

    def sign(self, *outputs: torch.Tensor) -> None:
        """Make these outputs the digest."""
        content = hashlib.sha256()
        for tensor in outputs:
            content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        self.digest = content.hexdigest()[:16]


def _rows_rms(o: Any, reference: Any) -> float:
    """Root mean square, over rows that are not zero, of the relative L2 distance."""
    norm = np.linalg.norm(reference, axis=-1)
    off = np.linalg.norm(o - reference, axis=-1)
    return float(np.sqrt(np.mean((off[norm > 0] / norm[norm > 0]) ** 2))) if (norm > 0).any() else 0.0
