"""Kernels whose CTAs may speak with each other, cut along y: where a share was none, the whole launch decides."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from decode_sim import simulate
from ptx_bench import translate

from cubinery.aot.ptxsim import driver as drivers
from cubinery.aot.ptxsim import launch as launching
from cubinery.aot.ptxsim import shares as cutting
from cubinery.aot.ptxsim.dependent import READ, WRITTEN
from cubinery.aot.ptxsim.faults import Fault, MisalignedFault, RaceFault, TrapFault, UninitialisedFault
from cubinery.aot.ptxsim.independence import REPEATS, Touches, independent
from cubinery.aot.ptxsim.launch import Launch
from cubinery.aot.ptxsim.machine import Checks, Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.schedule import SCHEDULES
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.ptxsim.shares import Cut, cut
from cubinery.aot.ptxsim.trace import ChromeTrace
from cubinery.runtime.ops.paged_decode.config import MmaConfig

GRID = (2, 4, 8)
"""64 CTAs of a warp. Two shares: y of 0 and 1, and y of 2 and 3."""
CTAS = 64
EVERY_CHECK = Checks()
WORDS = 2 * CTAS * 32
OWN = """
    mov.u32 %r1, %ctaid.y; mov.u32 %r2, %ctaid.z; mad.lo.u32 %r3, %r2, 4, %r1; mad.lo.u32 %r3, %r3, 2, %r8;
    mad.lo.u32 %r4, %r3, 32, %r9; mul.wide.u32 %rd1, %r4, 4; add.u64 %rd2, %rd8, %rd1; add.u64 %rd2, %rd2, 8192;
    mul.wide.u32 %rd3, %r1, 4; add.u64 %rd4, %rd8, %rd3; setp.eq.u32 %p1, %r9, 0;
"""
"""%r1: the CTA's y; %r3: its number; %rd2: its thread's word in the second half of the data; %rd4: the counter of its
y, in the first half; %p1: the first lane."""
COUNTS = OWN + "@%p1 red.global.add.u32 [%rd4], 1;"
"""Communication that stays within a y."""
TICKET = "@%p1 atom.global.add.u32 %r5, [%rd4], 1; shfl.sync.idx.b32 %r5, %r5, 0, 31, -1; st.global.b32 [%rd2], %r5;"
AT_ZERO = "mov.u64 %rd4, %rd8;"
"""All count at one counter."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start however small the work is."""
    monkeypatch.setattr(launching, "WORTH", 0.0)


@pytest.fixture(params=[1, 2])
def processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@dataclass
class Done:
    """What became of a launch."""

    data: Any
    machines: list[Sequence[int] | None]
    """Clusters of the machines that this process made; None: all."""
    launch: Launch
    fault: Fault | None = None
    told: list[tuple[int, int]] = field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the launch ran whole in the end."""
        return self.machines[-1] is None


def run(
    body: str, processes: int, *, whole: bool = False, kind: str = "fair", checks: Checks = EVERY_CHECK,
    initialised: bool = True, tracer: ChromeTrace | None = None,
) -> Done:  # fmt: skip
    """Run a kernel on WORDS zeros, cut as it would be or `whole`."""
    kernel, memory, data = translate(body), GlobalMemory(), np.zeros(WORDS, np.uint32)
    memory.register(data.ctypes.data, data.nbytes, name="data", initialised=initialised, owner=data)
    parts = Cut([range(CTAS)]) if whole else cut(kernel, GRID, (1, 1, 1))
    machines: list[Sequence[int] | None] = []
    told: list[tuple[int, int]] = []

    def make(share: int, clusters: Sequence[int] | None) -> Machine:
        machines.append(clusters)
        return Machine(
            kernel, memory, struct.pack("<Q184x", data.ctypes.data), grid=GRID, block=(32, 1, 1), clusters=clusters,
            share=share, supposed=clusters is not None, schedule=SCHEDULES[kind](3).of_share(share), checks=checks,
            dynamic_smem=1024, tracer=tracer,
        )  # fmt: skip

    again = None if tracer is None else tracer.again
    launch = Launch(make, memory, parts, 1, "k", lambda *numbers: told.append(numbers), again)
    fault = None
    try:
        launch.run(processes)
    except Fault as raised:
        fault = raised
    return Done(data, machines, launch, fault, told)


def words(fault: Fault | None) -> str:
    """A fault without the addresses, which are this process's."""
    return re.sub(r"0x[0-9a-f]{6,}", "address", str(fault))


def falls_back(body: str, processes: int, **options: Any) -> Done:
    """Run a kernel that must turn out to be one share: all is as in a whole run."""
    found, expected = run(body, processes, **options), run(body, 1, whole=True, **options)
    assert found.machines[0] is not None
    assert found.whole
    assert (found.data == expected.data).all()
    assert words(found.fault) == words(expected.fault)
    if expected.fault is None:
        assert found.launch.counters.instructions == expected.launch.counters.instructions
        assert found.launch.counters.segments == expected.launch.counters.segments
    return found


@pytest.fixture(autouse=True)
def small_launches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere only those are that gain by it."""
    monkeypatch.setattr(cutting, "LEAST_SUPPOSED", CTAS)


# -- the cut ---------------------------------------------------------------------------------------


def test_large_launches_are_cut_without_this_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert len(cut(translate(COUNTS), (1, 2, 127), (1, 1, 1)).shares) == 1
    assert len(cut(translate(COUNTS), (1, 2, 128), (1, 1, 1)).shares) == 2


@pytest.mark.parametrize(
    ("grid", "cluster", "sizes"),
    [
        ((64, 1, 1), (1, 1, 1), [64]),
        ((1, 1, 64), (1, 1, 1), [64]),
        ((31, 2, 1), (1, 1, 1), [62]),  # too few
        ((63, 1, 1), (1, 1, 1), [63]),
        ((32, 2, 1), (1, 1, 1), [32, 32]),
        ((2, 3, 12), (1, 1, 1), [24, 48]),
        ((4, 8, 16), (1, 1, 1), [64] * 8),
        ((4, 2, 100), (1, 1, 1), [400, 400]),
        ((4, 4, 4), (2, 2, 1), [8, 8]),  # two y in a cluster
        ((4, 2, 8), (1, 2, 1), [32]),  # all of them
    ],
)
def test_shares_are_sets_of_y(grid: tuple[int, int, int], cluster: tuple[int, int, int], sizes: list[int]) -> None:
    found = cut(translate(COUNTS), grid, cluster)
    assert [len(part) for part in found.shares] == sizes
    clusters = grid[0] * grid[1] * grid[2] // (cluster[0] * cluster[1] * cluster[2])
    assert sorted(n for part in found.shares for n in part) == list(range(clusters))
    assert found.supposed == (len(sizes) > 1)
    x, y = grid[0] // cluster[0], grid[1] // cluster[1]
    rows = [{n // x % y for n in part} for part in found.shares]
    assert sum(map(len, rows)) == y


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_cut_where_groups_are_of_one_y(kind: str, processes: int) -> None:
    found = run(OWN + TICKET, processes, kind=kind)
    assert not found.whole
    assert found.fault is None
    assert found.data[:4].tolist() == [CTAS // 4] * 4
    tickets = found.data[CTAS * 32 :].reshape(8, 4, 2, 32)  # z, y, x
    for y in range(4):
        assert sorted(tickets[:, y, :, 0].ravel().tolist()) == list(range(16))
    assert (found.data == run(OWN + TICKET, 1, kind=kind).data).all()
    assert found.launch.counters.instructions == run(OWN + TICKET, 1, whole=True).launch.counters.instructions
    assert found.told == [(32, 64), (64, 64)]


def test_the_fair_schedule_gives_what_the_whole_launch_does(processes: int) -> None:
    assert (run(OWN + TICKET, processes).data == run(OWN + TICKET, 1, whole=True).data).all()


# -- shares that are none --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize("checks", [Checks(), Checks.off()], ids=["checks", "off"])
def test_a_counter_of_all(kind: str, checks: Checks, processes: int) -> None:
    found = falls_back(OWN + AT_ZERO + TICKET, processes, kind=kind, checks=checks)
    assert found.data[0] == CTAS
    assert sorted(found.data[CTAS * 32 :: 32].tolist()) == list(range(CTAS))


@pytest.mark.parametrize("checks", [Checks(), Checks.off()], ids=["checks", "off"])
def test_a_counter_that_returns_to_its_old_value(checks: Checks, processes: int) -> None:
    """Each share has 32 CTAs, so that neither changes what it counts at."""
    found = falls_back(OWN + AT_ZERO + TICKET.replace("add.u32 %r5, [%rd4], 1", "inc.u32 %r5, [%rd4], 31"), processes,
                       checks=checks)  # fmt: skip
    assert found.data[0] == 0


THERE = "add.u64 %rd5, %rd8, 2048; setp.ge.u32 %p2, %r1, 2; and.pred %p3, %p1, %p2; not.pred %p4, %p2;"
"""%rd5: a place that all know; %p3: first lanes of the second share; %p4: the first share."""
COPY = """
    mov.u32 %r10, smem; add.u32 %r11, %r10, 64; @%p1 mbarrier.init.shared.b64 [%r10], 1;
    @%p1 st.shared.v4.b32 [%r11], {%r1, %r1, %r1, %r1}; fence.proxy.async; bar.sync 0; and.pred %p5, %p1, %p4;
"""
"""Every CTA has its y at %r11, for bulk copies, and an mbarrier at %r10; %p5: first lanes of the first share."""
BULK_READ = """
    @%p3 st.global.b32 [%rd5+8], 7; @%p5 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 16;
    @%p5 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r11], [%rd5], 16, [%r10];
    L: @%p5 mbarrier.try_wait.parity.shared.b64 %p6, [%r10], 0; not.pred %p6, %p6; and.pred %p6, %p6, %p5; @%p6 bra L;
"""
BULK_WRITE = """
    @%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd5], [%r11], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; @%p4 ld.global.b32 %r5, [%rd5+12];
"""
BULK_REDUCE = """
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd5], [%r11], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
"""
THREAD_COPY = """
    mov.u32 %r10, smem; @%p3 st.global.b32 [%rd5], 7; @%p4 cp.async.ca.shared.global [%r10], [%rd5], 4;
    cp.async.wait_all;
"""


@pytest.mark.parametrize(
    "text",
    [
        "@%p3 st.global.b32 [%rd5], 7; @%p4 ld.global.b32 %r5, [%rd5]; st.global.b32 [%rd2], %r5;",
        "@%p3 st.global.b32 [%rd5], 7; @%p4 ld.global.v4.b32 {%r5, %r11, %r12, %r13}, [%rd5];",
        "@%p3 st.global.b8 [%rd5+2], 0; @%p4 ld.b32 %r5, [%rd5];",
        "@%p3 st.release.gpu.global.b32 [%rd5], 7; @%p4 ld.acquire.gpu.global.b32 %r5, [%rd5];",
        "@%p1 st.global.b32 [%rd5], 7;",
        "@%p3 st.volatile.global.b32 [%rd5], 0; @%p4 atom.global.or.b32 %r5, [%rd5], 0;",
        THREAD_COPY,
        COPY + BULK_READ,
        COPY + BULK_WRITE,
        COPY + BULK_REDUCE,
    ],
    ids=["store", "vector", "byte", "ordered", "equal", "atomic", "cp.async", "bulk-read", "bulk-write", "bulk-reduce"],
)
def test_memory_that_one_share_writes_and_another_uses(text: str, processes: int) -> None:
    falls_back(COUNTS + THERE + text, processes, checks=Checks.off())


@pytest.mark.parametrize("load", ["ld.acquire.gpu.global", "ld.volatile.global", "ld.global", "ld"])
def test_waiting_for_what_another_share_writes_ends(load: str, processes: int) -> None:
    body = THERE + f"@%p3 st.release.gpu.global.b32 [%rd5], 7; L: {load}.b32 %r5, [%rd5]; setp.ne.u32 %p6, %r5, 7;"
    found = falls_back(OWN + body + "@%p6 bra L; st.global.b32 [%rd2], %r5;", processes, checks=Checks.off())
    assert (found.data[CTAS * 32 :] == 7).all()


def test_an_atomic_that_waits_for_another_share_ends(processes: int) -> None:
    """A barrier of all CTAs: they count, and then add nothing until all have counted."""
    body = """
        @%p1 red.release.gpu.global.add.u32 [%rd8], 1;
        L: mov.u32 %r5, 64; @%p1 atom.acquire.gpu.global.add.u32 %r5, [%rd8], 0; setp.lt.u32 %p6, %r5, 64;
        @%p6 bra L; st.global.b32 [%rd2], %r5;
    """
    found = falls_back(OWN + body, processes)
    assert (found.data[CTAS * 32 :] == CTAS).all()


@pytest.mark.parametrize("count", [REPEATS // 2, 3 * REPEATS])
def test_a_loop_over_one_word_costs_time_alone(count: int, processes: int) -> None:
    loop = f"""
        mov.u32 %r5, 0; mov.u32 %r10, 0;
        L: ld.global.b32 %r11, [%rd8+1024]; add.u32 %r11, %r11, 2; add.u32 %r10, %r10, %r11;
        add.u32 %r5, %r5, 1; setp.lt.u32 %p6, %r5, {count}; @%p6 bra L; st.global.b32 [%rd2], %r10;
    """
    found = run(COUNTS + loop, processes)
    assert found.whole == (count > REPEATS)
    assert (found.data[CTAS * 32 :] == 2 * count).all()


# -- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(SCHEDULES))
@pytest.mark.parametrize(
    ("text", "fault", "checks"),
    [
        ("setp.ge.u32 %p5, %r3, 13; @%p5 trap;", TrapFault, Checks.off()),
        ("setp.eq.u32 %p5, %r3, 12; @%p5 ld.global.b32 %r5, [%rd2+2];", MisalignedFault, Checks()),
        ("@%p3 ld.global.b32 %r5, [%rd5];", UninitialisedFault, Checks()),
        ("@%p1 st.global.b32 [%rd5], %r1;", RaceFault, Checks()),
        ("@%p3 st.global.b32 [%rd5], 7; @%p4 ld.global.b32 %r5, [%rd5];", RaceFault, Checks()),
    ],
)
def test_the_fault_is_that_of_the_whole_launch(
    text: str, fault: type[Fault], checks: Checks, kind: str, processes: int
) -> None:
    marks = "st.global.b32 [%rd2], 5;"
    body = OWN + THERE + marks + text + "@%p1 fence.acq_rel.gpu;"
    found = falls_back(body, processes, kind=kind, checks=checks, initialised=fault is not UninitialisedFault)
    assert isinstance(found.fault, fault)


def test_a_trace_holds_what_counts(processes: int) -> None:
    traces = [ChromeTrace() for _ in range(3)]
    run(OWN + TICKET, processes=1, tracer=traces[0])
    run(OWN + AT_ZERO + TICKET, processes=1, tracer=traces[1])
    run(OWN + AT_ZERO + TICKET, processes=1, whole=True, tracer=traces[2])
    assert traces[1].events == traces[2].events
    assert {event["pid"].split()[0] for trace in traces for event in trace.events} == {"1"}


# -- the proof -------------------------------------------------------------------------------------


def touched(marks: Sequence[int], copied: Sequence[tuple[int, int]] = ()) -> tuple[Sequence[int], Any]:
    return marks, np.array(copied, np.int64).reshape(-1, 2)


R, W, RW, NO = int(READ), int(WRITTEN), int(READ | WRITTEN), 0


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (touched([R, R]), touched([R, R]), True),
        (touched([W, NO]), touched([NO, W]), True),
        (touched([RW, NO]), touched([NO, RW]), True),
        (touched([W, NO]), touched([W, NO]), False),
        (touched([W, NO]), touched([RW, NO]), False),
        (touched([R, NO]), touched([W, NO]), False),
        (touched([W, NO]), touched([NO, R], [(1, 2)]), True),
        (touched([W, NO]), touched([NO, R], [(-9, 1)]), False),
        (touched([NO, W]), touched([NO, NO], [(0, 1), (1, 90)]), False),
        (touched([NO, W], [(1, 2)]), touched([NO, NO]), True),
        (touched([NO, R], [(1, 2)]), touched([NO, NO], [(0, 3)]), True),
        (touched([NO, NO], [(5, 5)]), touched([W, W], [(0, 2)]), True),
    ],
)
def test_independence(one: Any, other: Any, expected: bool) -> None:
    """Two bytes of one allocation; runs of copies count from the first."""
    memory, data = GlobalMemory(), np.zeros(256, np.uint8)
    memory.register(data.ctypes.data, data.nbytes)
    found = memory.at(data.ctypes.data)
    shares = []
    for marks, copied in (one, other):
        bytes_ = np.zeros(len(found.block.data), np.uint8)
        bytes_[found.base - found.origin :][:2] = marks
        shares.append(Touches({found.base: bytes_}, copied + found.base))
    assert independent(memory, shares) is expected
    assert independent(memory, shares[::-1]) is expected
    assert independent(memory, [*shares, Touches({}, np.zeros((0, 2), np.int64))]) is expected


# -- decodes ---------------------------------------------------------------------------------------


def whole(*_: Any) -> Cut:
    return Cut([range(24)])


def test_a_split_decode_of_two_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chunks of a sequence meet at a counter that returns to zero; those of two KV heads never do."""
    pytest.importorskip("cutlass", reason="the compiler is not installed")
    config = MmaConfig(head_dim=64, page_size=16, kv_format="fp8")
    simulated = simulate([config], "sm_110a", tmp_path)
    driver = simulated.driver
    told: list[tuple[int, int]] = []
    driver.progress = lambda *numbers: told.append(numbers)
    monkeypatch.setattr(cutting, "LEAST_SUPPOSED", 24)
    runs: dict[str, tuple[int, Callable[..., Cut]]] = {"one": (1, cut), "two": (2, cut), "whole": (1, whole)}
    for schedule, checks, names in (
        ("fair:0", Checks(), ("one", "two", "whole")),
        ("late:3", Checks(), ("one", "two")),
        ("fair:0", Checks.off(), ("one", "whole")),
    ):
        driver.checks, driver.schedule = checks, partial(named_schedule, schedule)
        results = []
        for name in names:
            driver.processes, how = runs[name]
            monkeypatch.setattr(drivers, "cut", how)
            told.clear()
            before = driver.counters.instructions
            p = Problem([130, 129, 150, 256, 140, 190], np.random.default_rng(5), torch, h_q=4, h_k=2, d=64)
            tensors = simulated.check(config, p, force_splits=2)
            assert told == [(12, 24), (24, 24)] if how is cut else len(told) == 24
            results.append(([x.view(torch.uint8) for x in tensors], driver.counters.instructions - before))
        for found, instructions in results[1:]:
            assert all(map(torch.equal, found, results[0][0]))
            assert instructions == results[0][1]
