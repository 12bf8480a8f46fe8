"""The written edge cases that concern kernels, gathered into trials: each makes a few launches of one kernel.

`TRIALS` says which cases a trial is about. Every launch goes through `Bench.run`, which fills outputs and workspace
with NaN between guard bytes, counts launches, and uses problems whose unused pages, tails and table padding hold poison
(cases 5, 6, 7, 20, 21 and 31 wherever else they are not named).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from gpu.problems import Case, Guarded, same_bits
from proof.bench import CPU, Bench

from cubinery.runtime.errors import PlanError
from cubinery.runtime.ops.paged_decode.layouts import LAYOUTS, unpack_lse


@dataclass(frozen=True, slots=True)
class Trial:
    """What is launched, and the numbers of the cases that it covers."""

    name: str
    cases: tuple[int, ...]
    run: Callable[[Bench], None]
    serves: Callable[[Bench], bool] = lambda bench: True
    """Whether the trial means anything for a kernel."""


def visible(case: Case, seq: int) -> torch.Tensor:
    """Keys that each packed row of a sequence sees, float64 (q_len * group,); of plain problems."""
    length = case.lengths[seq]
    seen = torch.full((case.q_len,), length) if not case.causal else length - case.q_len + 1 + torch.arange(case.q_len)
    return seen.clamp(min=0).repeat_interleave(case.group).double()


def lengths(bench: Bench) -> None:
    """Sequences around one tile, one page and one token, cut in three: poisoned, then clean, to the same bits."""
    q_len = bench.q_len
    case = bench.case([1, 0, 17, 127, 128, 129, 257, q_len, max(0, q_len - 2)])
    plan = bench.plan(case, force_splits=3)
    if bench.plain and bench.splits:
        assert plan.splits.splits[:, 0].tolist() == [1, 1, 1, 1, 1, 2, 3, 1, 1]
        assert [1, 0, 1] in plan.splits.work[:, :3].tolist()
    scales = {"v_descale": torch.full((1,), 0.5), "k_descale": torch.full((9, 1), 0.75), "out_scale": 4.0}
    out, lse = bench.run(plan, case, **scales)
    bench.check(plan, case, out, lse, **scales)
    assert not out.isnan().any()
    rows = case.rows_of(out)  # (seqs, h_k, q_len, group, d)
    if bench.plain:
        assert not rows[1].any()
        assert bool((lse[1] == -math.inf).all())
        for seq in range(len(case.lengths)):
            blind = visible(case, seq) == 0
            assert not rows[seq].flatten(1, 2)[:, blind].any()
            assert bool((lse[seq][:, blind] == -math.inf).all())
        if not bench.converts_nvfp4:  # whose value is another
            value = case.read("v", 0, [0])[0] * 2.0  # (h_k, d), exact in bf16
            assert torch.equal(rows[0, :, -1].float(), value[:, None].expand_as(rows[0, :, -1]))
    bench.sign(out, lse)
    # The empty sequence gets a key, of its neighbour's page, and everything unused holds zeros.
    bench.clear_tails(case)
    case.lengths[1], case.table[1, 0] = 1, case.table[0, 0]
    plan.update(case.lengths)
    again = bench.run(plan, case, **scales)
    bench.check(plan, case, *again, **scales)
    others = [seq for seq in range(len(case.lengths)) if seq != 1]
    assert same_bits(case.rows_of(again[0])[others], rows[others])
    assert same_bits(again[1][others], lse[others])


def zero_keys(bench: Bench) -> None:
    """Constant scores: every row's LSE is the logarithm of what it sees, and O the mean; values of nvfp4's extremes."""
    q_len = bench.q_len
    case = bench.case([300, q_len, max(0, q_len - 2)])
    case.fill("k", 0.0)
    out, lse = bench.solve(case, force_splits=2)
    if bench.plain:
        for seq in range(3):
            assert torch.allclose(lse[seq, 0].double(), visible(case, seq).log(), atol=1e-5)
    if bench.config.kv_format != "nvfp4":
        return
    case.fill("v", 0.0)
    out, _ = bench.solve(case, force_splits=2)
    assert not out.any()
    case.fill("v", 2688.0)  # code 7 with a block scale of 448
    scales = {"v_descale": 1 / 2688}
    out, _ = bench.solve(case, scales, force_splits=2)
    if bench.plain:
        value = 320 * 8 / 2688 if bench.converts_nvfp4 else 1.0
        seen = torch.stack([visible(case, seq) > 0 for seq in range(3)])
        rows = case.rows_of(out)[:, 0].flatten(1, 2)[seen].double()
        assert (rows - value).abs().max() <= value * 2**-8


def all_see_all(bench: Bench) -> None:
    """Without a causal mask, tokens with equal queries get equal bits, from the kernel of one token."""
    case = bench.case([257, 0, 5], q_len=3, causal=False, group=max(1, bench.config.row_tile // 3))
    tokens = case.q.view(3, 3, case.h_q, case.d)
    tokens[:, 1:] = tokens[:, :1].clone()
    out, lse = bench.solve(case, force_splits=3)
    rows, sums = case.rows_of(out), lse.view(3, 1, 3, case.group)
    for token in (1, 2):
        assert same_bits(rows[:, :, token], rows[:, :, 0])
        assert same_bits(sums[:, :, token], sums[:, :, 0])


def row_order(bench: Bench) -> None:
    """A row whose query is zero has the logarithm of what it sees as its LSE, at the row of its token and head."""
    case = bench.case([200, 131], heads=2)
    head, q_len = case.h_q - 1, case.q_len
    case.q[2 * q_len - 1, head] = 0
    _, lse = bench.solve(case)
    assert abs(float(lse[1, 1, q_len * case.group - 1]) - math.log(131)) < 1e-5
    assert abs(float(unpack_lse(lse, q_len=q_len)[2 * q_len - 1, head]) - math.log(131)) < 1e-5


def beyond_a_tile(bench: Bench) -> None:
    """More packed rows than a row tile holds; nothing is written past the last one."""
    case = bench.case([300, 17], heads=2, group=bench.group(beyond=True))
    plan = bench.plan(case, force_splits=3)
    assert plan.shape.n_q > bench.config.row_tile
    bench.check(plan, case, *bench.run(plan, case))


def long(bench: Bench) -> None:
    """4K keys, as planned, in one piece and in sixteen."""
    _split_every_way(bench, 4091)


def longest(bench: Bench) -> None:
    """128K keys, likewise."""
    _split_every_way(bench, 131072)


def _split_every_way(bench: Bench, length: int) -> None:
    case = bench.case([length], group=1 if bench.q_len > 1 else 2)
    for force_splits in (0, 1, 16) if bench.splits else (0,):
        plan = bench.plan(case, force_splits=force_splits)
        assert force_splits in (0, plan.splits.max_splits) or not (bench.plain and bench.splits)
        bench.check(plan, case, *bench.run(plan, case))


def padding_and_updates(bench: Bench) -> None:
    """Padding items change nothing; a plan updated in place computes the new step; launches share a workspace."""
    case = bench.case([700, 128])
    options: dict[str, Any] = {"policy": "thor", "max_splits": 4}
    plain = bench.plan(case, **options)
    items = plain.splits.num_items
    padded = bench.plan(case, pad_to=items + 7, cluster=plain.cluster, **options)
    assert padded.num_work == items + 7
    assert not padded.splits.work[items:].any()
    with pytest.raises(PlanError, match=f"pad_to = {items - 1}"):
        bench.plan(case, pad_to=items - 1, **options)
    expected = bench.run(plain, case)
    bench.check(plain, case, *expected)
    # The same workspace and no synchronisation between: with PDL a launch may start before its predecessor has ended.
    other = bench.case([700, 128], seed=6)
    workspace = Guarded((max(16, padded.workspace_bytes()),), torch.uint8, CPU)
    outs = [Guarded(case.q.shape, torch.bfloat16, CPU) for _ in range(2)]
    sums = [Guarded(padded.shape.lse, torch.float32, CPU) for _ in range(2)]
    for problem, o, s in zip((other, case), outs, sums, strict=True):
        padded.run(*problem.tensors, out=o.tensor, lse=s.tensor, workspace=workspace.tensor, **problem.extras)
    for guarded in (*outs, *sums, workspace):
        guarded.check("outputs or workspace")
    assert same_bits(outs[1].tensor, expected[0])
    assert same_bits(sums[1].tensor, expected[1])
    bench.check(padded, other, outs[0].tensor, sums[0].tensor)
    # Another step in the same grid and memory, as a replayed graph would run it. A window has let pages go that a much
    # shorter sequence would need.
    for now in ([700 if bench.has("window") else 257, 1], [0, 128]):
        case.lengths = now
        padded.update(now)
        found = bench.run(padded, case)
        bench.check(padded, case, *found)
        if bench.plain:
            fresh = bench.plan(case, pad_to=items + 7, **options)
            assert (fresh.splits.work == padded.splits.work).all()


def descales(bench: Bench) -> None:
    """Every granularity gives the same bits; descales multiply what they should."""
    case = bench.case([40, 17], heads=2)
    plan = bench.plan(case)
    scales = {"q_descale": 0.75, "k_descale": 1.25, "v_descale": 0.375}

    def spread(shape: tuple[int, ...], **changed: float) -> dict[str, Any]:
        return {name: torch.full(shape, value) for name, value in (scales | changed).items()}

    first = bench.run(plan, case, **spread((1,)))
    bench.check(plan, case, *first, **spread((1,)))
    for shape in ((2,), (2, 2)):
        found = bench.run(plan, case, **spread(shape))
        assert same_bits(found[0], first[0])
        assert same_bits(found[1], first[1])
    doubled = bench.run(plan, case, **spread((1,), v_descale=0.75))
    assert torch.equal(doubled[0].float(), first[0].float() * 2)
    assert same_bits(doubled[1], first[1])
    by_k = bench.run(plan, case, **spread((1,), k_descale=2.5))
    by_scale = bench.run(plan, case, **spread((1,)), softmax_scale=2 * case.d**-0.5)
    assert same_bits(by_k[0], by_scale[0])
    assert same_bits(by_k[1], by_scale[1])
    varied = {name: torch.rand(2, 2, generator=torch.Generator().manual_seed(3)) + 0.5 for name in scales}
    bench.check(plan, case, *bench.run(plan, case, **varied), **varied)


def layouts(bench: Bench) -> None:
    """Four physical layouts with the same content give the same bits, as do strided queries and outputs."""
    results = []
    case, cluster = None, None
    for layout in LAYOUTS:
        case = bench.case([129, 17], heads=2, layout=layout)
        plan = bench.plan(case, force_splits=2, cluster=cluster)
        cluster = plan.cluster
        results.append(bench.run(plan, case))
        if layout == LAYOUTS[0]:
            bench.check(plan, case, *results[0])
    assert case is not None
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])
    d, q_len, h_q = case.d, case.q_len, case.h_q
    wide_q = Guarded((2, q_len, h_q + 3, d + 16), case.q.dtype, CPU).tensor
    wide_o = Guarded((2, q_len, h_q + 1, d + 16), torch.bfloat16, CPU)
    q, o = wide_q[:, :, 1 : h_q + 1, :d], wide_o.tensor[:, :, :h_q, 8 : d + 8]
    q.copy_(case.q.view(2, q_len, h_q, d))
    found, _ = plan.run(q, case.k, case.v, case.table, out=o, **case.extras)
    assert same_bits(found.reshape(results[0][0].shape), results[0][0])
    o.view(torch.int16).fill_(-1)
    assert bool((wide_o.tensor.view(torch.int16) == -1).all()), "padding of O was written"
    wide_o.check("out")


def scores(bench: Bench) -> None:
    """Scores that rise with every tile, and one key 10^4 above all others in the first, a middle and the last tile."""
    q_len = bench.q_len
    case = bench.case([300, 300, 300, 300])
    case.q.copy_(case.q.float().nan_to_num().abs().to(case.q.dtype))
    case.fill("k", 0.0)
    for tile in range(3):
        case.write("k", 0, case.held(0, range(128 * tile, min(300, 128 * (tile + 1)))), tile + 1.0)
    peaks = {1: 5, 2: 150, 3: 300 - q_len}  # that every token sees
    for seq, position in peaks.items():
        case.write("k", seq, case.held(seq, [position]), 4.0)
    # Sums of a query's elements decide how far apart scores are.
    sums = case.q.double().sum(-1).view(4, q_len, case.group)
    bench.solve(case, {"softmax_scale": 0.1 * case.d**-0.5}, force_splits=1)
    bench.solve(case, {"softmax_scale": 0.1 * case.d**-0.5}, force_splits=2)
    if not bench.plain:
        return
    for force_splits in (1, 3):
        plan = bench.plan(case, force_splits=force_splits)
        scale = 1.1e4 / (4 * float(sums[1:].min()))
        out, lse = bench.run(plan, case, softmax_scale=scale)
        assert bool(out.isfinite().all())
        assert bool(lse.isfinite().all())
        for seq, position in peaks.items():
            key = case.read("k", seq, [position])[0, 0, 0]
            if bench.converts_nvfp4:  # what the tensor cores get is rounded again
                key = (key / 8).to(torch.float8_e4m3fn).float() * 8
            expected = scale * key.double() * sums[seq].flatten()
            assert ((lse[seq, 0].double() - expected).abs() <= 2e-6 * expected).all()
            if not bench.converts_nvfp4:
                value = case.read("v", seq, [position])[0, 0]
                rows = case.rows_of(out)[seq, 0].float()
                assert torch.equal(rows, value.expand_as(rows))


TRIALS = (
    Trial("lengths", (1, 2, 4, 5, 6, 7, 9, 10, 18, 20, 21, 31, 32, 36), lengths),
    Trial("zero keys", (3, 8, 9, 30, 34), zero_keys),
    Trial("scores", (34, 35), scores, lambda bench: not bench.has("q_lens")),
    Trial("beyond a tile", (13,), beyond_a_tile),
    Trial("padding and updates", (19, 37, 38), padding_and_updates),
    Trial("descales", (22,), descales),
    Trial("layouts", (23, 24), layouts),
    Trial("all see all", (11,), all_see_all, lambda bench: bench.plain and bench.q_len == 1),
    Trial("row order", (12,), row_order, lambda bench: bench.plain and bench.q_len > 1),
    Trial("long", (14,), long),
)
"""In the order of a campaign."""

LONGEST = Trial("longest", (14,), longest)
"""Case 14 at its full length, for few kernels."""
