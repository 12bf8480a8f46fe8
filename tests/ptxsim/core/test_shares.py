"""Launches cut into shares: the same results and the same fault on any number of processes."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ptx_bench import translate
from ptxsim.silicon import bundle as corpus_bundle
from ptxsim.silicon.entries import Column, Entry
from ptxsim.silicon.running import run as run_entry

from cubinery.aot.ptxsim import launch as launching
from cubinery.aot.ptxsim.dependent import READ, WRITTEN
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.faults import Fault, MisalignedFault, RaceFault, UninitialisedFault
from cubinery.aot.ptxsim.helpers import Claims, Helpers
from cubinery.aot.ptxsim.isolation import Snapshot
from cubinery.aot.ptxsim.launch import Launch
from cubinery.aot.ptxsim.machine import Checks, Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.schedule import SCHEDULES
from cubinery.aot.ptxsim.shares import Cut, communication, cut
from cubinery.runtime.library import Library

BLOCKS = 64
OWN = "st.global.b32 [%rd9], %r9; "
THEIRS = "xor.b32 %r20, %r6, 1024; mul.wide.u32 %rd10, %r20, 4; add.s64 %rd10, %rd8, %rd10; "
"""%rd10: the word of a thread 32 CTAs away."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes start however small the work is."""
    monkeypatch.setattr(launching, "WORTH", 0.0)


@pytest.fixture(params=[1, 2, 4])
def processes(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def words() -> Any:
    return np.zeros(BLOCKS * 32, np.uint32)


def launch(
    body: str, data: Any, processes: int, *, cluster: int = 1, kind: str = "fair", initialised: bool = True,
    checks: Checks = Checks(),  # noqa: B008 - immutable
) -> Launch:  # fmt: skip
    """Run a kernel of 64 CTAs of one warp in four shares on `data`, which it may change."""
    kernel, memory = translate(body), GlobalMemory()
    memory.register(data.ctypes.data, data.nbytes, name="data", initialised=initialised, owner=data)

    def make(share: int, clusters: Sequence[int] | None) -> Machine:
        return Machine(
            kernel, memory, struct.pack("<Q184x", data.ctypes.data), grid=(BLOCKS, 1, 1), block=(32, 1, 1),
            cluster=(cluster, 1, 1), clusters=clusters, share=share, schedule=SCHEDULES[kind](3).of_share(share),
            checks=checks,
        )  # fmt: skip

    parts = [range(n // cluster, (n + 16) // cluster) for n in range(0, BLOCKS, 16)]
    found = Launch(make, memory, Cut(parts), cluster, "k")
    found.run(processes)
    return found


def fault(body: str, processes: int, **options: Any) -> Fault:
    with pytest.raises(Fault) as info:
        launch(body, words(), processes, **options)
    return info.value


# -- the cut ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clusters", "size", "sizes"),
    [
        (1, 1, [1]),
        (23, 1, [23]),
        (24, 1, [12, 12]),
        (40, 1, [20, 20]),
        (64, 1, [32, 32]),
        (200, 1, [100, 100]),
        (300, 1, [75] * 4),
        (12, 2, [6, 6]),
        (1, 40, [1]),
        (3, 16, [1, 2]),
        (10_000, 1, [625] * 16),
    ],
)
def test_shares_hold_whole_clusters_and_are_about_equal(clusters: int, size: int, sizes: list[int]) -> None:
    found = cut(translate(OWN), (clusters * size, 1, 1), (size, 1, 1))
    assert [len(part) for part in found.shares] == sizes
    assert [n for part in found.shares for n in part] == list(range(clusters))
    assert not found.supposed


@pytest.mark.parametrize(
    "text",
    [
        "atom.global.add.u32 %r1, [%rd8], 1;",
        "atom.add.u32 %r1, [%rd8], 1;",
        "red.global.add.u32 [%rd8], 1;",
        "st.release.gpu.global.b32 [%rd8], %r9;",
        "st.relaxed.gpu.global.b32 [%rd8], %r9;",
        "st.volatile.b32 [%rd8], %r9;",
        "fence.acq_rel.gpu;",
        "fence.sc.sys;",
        "membar.gl;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd8], [%r1], 16;",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd8, {%r1}], [%r2];",
    ],
)
def test_what_may_tell_another_cta_something(text: str) -> None:
    kernel = translate(OWN + text)
    found = communication(kernel)
    assert found is not None
    assert found.text == text.rstrip(";")
    assert cut(kernel, (256, 1, 1), (1, 1, 1)) == Cut([range(256)])
    assert cut(kernel, (128, 2, 1), (1, 1, 1)) == Cut([list(range(128)), list(range(128, 256))], supposed=True)


@pytest.mark.parametrize(
    "text",
    [
        "atom.shared.add.u32 %r1, [smem], 1;",
        "red.shared::cta.add.u32 [smem], 1;",
        "st.volatile.shared.b32 [smem], %r9;",
        "ld.relaxed.gpu.global.b32 %r1, [%rd8];",
        "ld.acquire.gpu.global.b32 %r1, [%rd8];",
        "fence.acq_rel.cta;",
        "fence.proxy.async;",
        "fence.mbarrier_init.release.cluster;",
        "membar.cta;",
        "bar.sync 0;",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd8], [%r1], 16;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.inc.u32 [%r1], [%r2], 8, [%r3];",
    ],
)
def test_what_stays_within_a_cluster_does_not(text: str) -> None:
    assert communication(translate(text)) is None


# -- the same on any number of processes -----------------------------------------------------------


@pytest.mark.parametrize("kind", list(SCHEDULES))
def test_results(kind: str, processes: int) -> None:
    data = words()
    body = "bar.sync 0; mad.lo.s32 %r1, %r6, 3, 5; st.global.b32 [%rd9], %r1;"
    found = launch(body, data, processes, kind=kind)
    assert (data == 3 * np.arange(len(data)) + 5).all()
    assert found.counters.instructions == BLOCKS * 11  # seven of the prologue, three here, and ret
    assert found.counters.seconds > 0


def test_results_of_clusters(processes: int) -> None:
    data = words()
    body = "mov.u32 %r1, %cluster_ctarank; st.global.b32 [%rd9], %r1; barrier.cluster.arrive; barrier.cluster.wait;"
    launch(body, data, processes, cluster=4)
    assert (data.reshape(-1, 32) == np.arange(BLOCKS)[:, None] % 4).all()


def test_every_way_of_writing_is_put_together(processes: int) -> None:
    data = words()
    body = """
        mov.u32 %r1, smem; shl.b32 %r2, %r9, 2; add.u32 %r1, %r1, %r2; st.shared.b32 [%r1], %r6;
        fence.proxy.async; bar.sync 0; setp.eq.u32 %p1, %r9, 0; setp.lt.u32 %p2, %r8, 32; and.pred %p3, %p1, %p2;
        @!%p2 st.b32 [%rd9], %r6;
        mov.u32 %r3, smem;
        @%p3 cp.async.bulk.global.shared::cta.bulk_group [%rd9], [%r3], 128;
        cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    """
    kernel_shared = body.replace("smem", "own")
    launch(".shared .align 128 .b8 own[128];" + kernel_shared, data, processes)
    assert (data == np.arange(len(data))).all()


def test_the_first_share_that_fails_is_reported(processes: int) -> None:
    body = OWN + "setp.ge.u32 %p1, %r8, 60; @%p1 trap; setp.eq.u32 %p2, %r8, 20; @%p2 ld.global.b32 %r1, [%rd9+2];"
    found = fault(body, processes)
    assert isinstance(found, MisalignedFault)
    assert found.place.block == (20, 0, 0)
    assert found.place == fault(body, 1).place


def test_a_fault_leaves_the_same_memory(processes: int) -> None:
    data, expected = words(), words()
    body = OWN + "setp.eq.u32 %p2, %r8, 40; @%p2 trap;"
    for target, count in ((data, processes), (expected, 1)):
        with pytest.raises(Fault):
            launch(body, target, count)
    assert (data == expected).all()
    assert data[33 * 32 - 1] == 31
    assert not data[50 * 32 :].any()


def test_what_another_share_writes_is_never_seen(processes: int) -> None:
    body = THEIRS + "st.global.b32 [%rd9], 7; ld.global.b32 %r1, [%rd10]; st.global.b32 [%rd9], %r1;"
    data = words()
    data[:] = 9
    launch(body, data, processes, checks=Checks.off())
    assert (data == 9).all()


def test_through_driver_library_and_launch(processes: int, tmp_path: Path) -> None:
    """A variable of the module, made by the first launch, is changed by another share and read by the second launch."""
    body = """
        .reg .pred %p<2>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %tid.x; mad.lo.u32 %r3, %r1, 32, %r2; ld.param.b64 %rd1, [out_];
        mul.wide.u32 %rd2, %r3, 4; add.u64 %rd1, %rd1, %rd2; mov.u64 %rd3, table; add.u64 %rd3, %rd3, %rd2;
        ld.global.b32 %r4, [%rd3]; add.u32 %r4, %r4, %r3; st.global.b32 [%rd3], %r4; st.global.b32 [%rd1], %r4;
    """
    entry = Entry(
        "shares", body, bytes(16), (Column("sum", 4, BLOCKS * 32),), block=32, grid=BLOCKS,
        directives=f".global .align 4 .b32 table[{BLOCKS * 32}];\n",
    )  # fmt: skip
    told: list[tuple[int, int]] = []
    driver = SimDriver(
        "sm_90a", [corpus_bundle.write(tmp_path, [entry])], processes=processes,
        progress=lambda *numbers: told.append(numbers),
    )  # fmt: skip
    library = Library.open(tmp_path, driver)
    for launches in (1, 2):
        out = np.frombuffer(run_entry(entry, library, driver), np.uint32)
        assert (out == launches * np.arange(BLOCKS * 32)).all()
    assert driver.ctas == 2 * BLOCKS
    assert told == 2 * [(BLOCKS // 2, BLOCKS), (BLOCKS, BLOCKS)]
    assert driver.counters.launches == 2
    assert driver.counters.instructions == 2 * BLOCKS * 13


# -- races between CTAs ----------------------------------------------------------------------------


def test_reading_what_another_cta_writes_is_a_race(processes: int) -> None:
    body = THEIRS + "st.global.b32 [%rd9], 7; ld.global.b32 %r1, [%rd10];"
    found = fault(body, processes)
    assert isinstance(found, RaceFault)
    assert "CTAs 0 to 15 read what CTAs 32 to 47 write, byte 4096 of data, and nothing orders CTAs" in str(found)


def test_writing_different_values_is_a_race(processes: int) -> None:
    found = fault("shr.u32 %r1, %r8, 4; add.s32 %r1, %r1, 1; st.global.b32 [%rd8+64], %r1;", processes)
    assert isinstance(found, RaceFault)
    assert "CTAs 0 to 15 and CTAs 16 to 31 write different values, byte 64 of data" in str(found)


def test_writing_back_what_another_cta_changes_is_a_race(processes: int) -> None:
    found = fault("shr.u32 %r1, %r8, 4; and.b32 %r1, %r1, 1; st.global.b32 [%rd8+64], %r1;", processes)
    assert isinstance(found, RaceFault)
    assert "CTAs 0 to 15 write another value than CTAs 48 to 63 write, byte 64 of data" in str(found)


def test_writing_the_same_is_none(processes: int) -> None:
    data = words()
    launch("st.global.b32 [%rd8+64], 5;", data, processes)
    assert data[16] == 5


def test_reads_of_what_only_another_share_has_written_are_uninitialised(processes: int) -> None:
    found = fault(THEIRS + OWN + "ld.global.b32 %r1, [%rd10]; st.global.b32 [%rd9], %r1;", processes, initialised=False)
    assert isinstance(found, UninitialisedFault)
    assert found.place.block == (0, 0, 0)


def test_what_shares_write_counts_as_written(processes: int) -> None:
    data = words()
    found = launch(OWN, data, processes, initialised=False)
    allocation = found.memory.at(data.ctypes.data)
    start = allocation.base - allocation.origin
    assert (allocation.block.written[start : start + data.nbytes] == 255).all()


def test_footprints_are_put_together(processes: int) -> None:
    data = words()
    found = launch(OWN + "ld.global.b32 %r1, [%rd9];", data, processes)
    assert found.footprint is not None
    allocation = found.memory.at(data.ctypes.data)
    index = np.arange(data.nbytes) + allocation.base - allocation.origin
    for mark in (READ, WRITTEN):
        assert found.footprint.touched(allocation, index, 1, mark).all()


# -- pieces ----------------------------------------------------------------------------------------


def test_a_snapshot_touches_only_what_is_written() -> None:
    """Registrations outlive their tensors: what nobody writes to may be somebody else's by now."""
    memory, used, gone = GlobalMemory(), np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    for array in (used, gone):
        memory.register(array.ctypes.data, array.nbytes, initialised=False)
    memory.snapshot = snapshot = Snapshot()
    held = memory.at(used.ctypes.data)
    memory.writes(held).store(np.arange(3) + held.base - held.origin, 1, (np.full(3, 5, np.uint8),))
    gone[:] = 1
    changes = snapshot.changes()
    snapshot.restore(changes)
    assert not used.any()
    assert not held.block.written.any()
    assert gone.all()
    snapshot.apply(memory, changes)
    assert used.tolist() == [5] * 3 + [0] * 61
    assert held.block.written[held.base - held.origin :][:4].tolist() == [255] * 3 + [0]


def test_claims_are_handed_out_once_and_in_order() -> None:
    claims = Claims(6)
    assert list(claims) == [1, 2, 3, 4, 5]
    claims = Claims(6)
    claims.stop_after(4)
    claims.stop_after(2)
    claims.stop_after(3)
    assert list(claims) == [1, 2]


def test_a_process_that_dies_is_an_error() -> None:
    helpers = Helpers[int]("k", 1, lambda: os._exit(3))
    helpers.start()
    with pytest.raises(SimError, match="k: a process that simulated it ended with 3"):
        list(helpers.results())
    helpers.end()


def test_processes_that_still_run_are_ended() -> None:
    def work() -> Iterator[int]:
        time.sleep(60)
        yield 1

    helpers = Helpers[int]("k", 2, work)
    helpers.start()
    helpers.start()
    began = time.monotonic()
    helpers.end()
    assert time.monotonic() - began < 30
