"""Loads, stores and atomics in every space, and their faults."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine, run

from cubinery.aot.ptxsim.faults import MisalignedFault, OutOfBoundsFault, UninitialisedFault
from cubinery.aot.ptxsim.machine import Checks


def test_narrow_loads_extend_and_narrow_stores_cut() -> None:
    data = np.array([0xFFFE8081, 0], np.uint32)
    body = """
    setp.ne.b32 %p1, %r9, 0; @%p1 ret;
    ld.global.s8 %r1, [%rd8]; ld.global.u8 %r2, [%rd8+1]; ld.global.s16 %r3, [%rd8+2];
    add.s32 %r4, %r1, %r2; add.s32 %r4, %r4, %r3; st.global.b8 [%rd8+4], %r4; st.global.b16 [%rd8+6], 0x12345;
    """
    machine(body, data).run()
    assert data[1] == 0x23450000 | ((-127 + 0x80 - 2) & 0xFF)


@pytest.mark.parametrize("name", ["smem", "own"])
def test_shared_variables_by_their_names(name: str) -> None:
    body = f"""
    .shared .align 8 .b8 own[16]; setp.eq.b32 %p1, %r9, 0;
    @%p1 st.shared.b32 [{name}+4], 5; bar.sync 0; red.shared.add.u32 [{name}+4], 2; bar.sync 0;
    ld.shared.b32 %r1, [{name}+4]; st.global.b32 [%rd9], %r1;
    """
    assert (run(body) == 69).all()


def test_vectors_through_shared_memory() -> None:
    body = """
    mov.b32 %r1, smem; shl.b32 %r2, %r9, 4; add.s32 %r1, %r1, %r2;
    add.s32 %r3, %r9, 100; st.shared.v4.b32 [%r1], {%r9, %r3, 7, 8};
    ld.shared.v2.b32 {%r4, %r5}, [%r1]; ld.shared.b64 %rd1, [%r1+8]; mov.b64 {%r10, %r11}, %rd1;
    mad.lo.s32 %r4, %r4, 3, %r5; add.s32 %r4, %r4, %r10; add.s32 %r4, %r4, %r11; st.global.b32 [%rd9], %r4;
    """
    lane = np.arange(32)
    assert (run(body) == 4 * lane + 100 + 15).all()


def test_generic_addresses_reach_shared_global_and_parameters() -> None:
    body = """
    mov.b32 %r1, smem; cvt.u64.u32 %rd1, %r1; cvta.shared.u64 %rd1, %rd1; shl.b32 %r2, %r9, 2; cvt.u64.u32 %rd2, %r2;
    add.s64 %rd1, %rd1, %rd2; st.b32 [%rd1], %r9; ld.b32 %r3, [%rd1];
    cvta.to.shared.u64 %rd3, %rd1; cvt.u32.u64 %r4, %rd3; ld.shared.b32 %r5, [%r4];
    mov.b64 %rd4, data; cvta.param.u64 %rd4, %rd4; ld.b64 %rd5, [%rd4]; sub.s64 %rd5, %rd5, %rd8; cvt.u32.u64 %r6, %rd5;
    isspacep.shared %p1, %rd1; selp.b32 %r10, 1000, 0, %p1; isspacep.global %p1, %rd8; selp.b32 %r11, 500, 0, %p1;
    add.s32 %r3, %r3, %r5; add.s32 %r3, %r3, %r6; add.s32 %r3, %r3, %r10; add.s32 %r3, %r3, %r11; st.b32 [%rd9], %r3;
    """
    assert (run(body) == np.arange(32) * 2 + 1500).all()


def test_local_memory_belongs_to_each_thread() -> None:
    body = """
    .local .align 8 .b8 own[16];
    mov.b64 %rd1, own; st.local.b32 [%rd1+4], %r9; ld.local.b32 %r1, [%rd1+4]; st.global.b32 [%rd9], %r1;
    """
    assert (run(body, 64, threads=64) == np.arange(64)).all()


@pytest.mark.parametrize(
    ("operation", "initial", "values", "after"),
    [
        ("add.u32", 5, "%r9", 5 + 496),
        ("min.s32", 5, "-3", (-3) & 0xFFFFFFFF),
        ("max.u32", 5, "%r9", 31),
        ("or.b32", 64, "%r9", 95),
        ("inc.u32", 0, "9", 32 % 10),
        ("dec.u32", 3, "4", 1),
        ("exch.b32", 5, "%r9", 31),
        ("cas.b32", 5, "5, 6", 6),
    ],
)
def test_atomics_take_every_lane_in_turn(operation: str, initial: int, values: str, after: int) -> None:
    data = np.full(1, initial, np.uint32)
    machine(f"atom.global.{operation} %r1, [%rd8], {values};", data).run()
    assert data[0] == after


def test_atomics_return_old_values_and_floats_add() -> None:
    body = """
    mov.b32 %r1, smem; setp.eq.b32 %p1, %r9, 0; @%p1 st.shared.b32 [%r1], 0; bar.warp.sync -1;
    atom.shared.add.u32 %r2, [%r1], 2; red.shared.add.f32 [%r1+4], 0f3F800000; st.global.b32 [%rd9], %r2;
    """
    body = body.replace("@%p1 st.shared.b32 [%r1], 0;", "@%p1 st.shared.v2.b32 [%r1], {0, 0};")
    assert sorted(run(body).tolist()) == list(range(0, 64, 2))


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ("st.global.b32 [%rd9+4], 1;", OutOfBoundsFault, "reach past the end of data|no allocation holds them"),
        ("ld.global.b32 %r1, [%rd8+-4]; st.global.b32 [%rd9], %r1;", OutOfBoundsFault, r"4 bytes before data"),
        ("ld.global.b32 %r1, [%rd8+2]; st.global.b32 [%rd9], %r1;", MisalignedFault, "expected a multiple of 4"),
        ("mov.b32 %r1, smem; st.shared.b32 [%r1+1024], 1;", OutOfBoundsFault, r"shared address 0x800"),
        ("st.shared.b32 [16], 1;", OutOfBoundsFault, r"expected 0x400 to"),
        ("mov.b32 %r1, smem; st.shared.v4.b32 [%r1+8], {1, 2, 3, 4};", MisalignedFault, "multiple of 16"),
        ("mov.b32 %r1, smem; ld.shared.b32 %r2, [%r1]; st.global.b32 [%rd9], %r2;",
         UninitialisedFault, "never written"),
        (".local .align 4 .b8 own[8]; mov.b64 %rd1, own; ld.local.b32 %r1, [%rd1]; st.global.b32 [%rd9], %r1;",
         UninitialisedFault, "never written"),
    ],
)  # fmt: skip
def test_faults(body: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        run(body)


def test_a_fault_names_block_warp_lane_and_line() -> None:
    body = "\nsetp.ne.b32 %p1, %r6, 105; @%p1 ret;\nst.global.b32 [%rd9+4000], 1;"
    with pytest.raises(OutOfBoundsFault) as found:
        run(body, 128, threads=64, blocks=2)
    place = found.value.place
    assert (place.line, place.block, place.warp, place.lane) == (12, (1, 0, 0), 1, 9)
    assert "k, PTX line 12, block (1, 0, 0), warp 1, lane 9: st.global.b32 [%rd9+4000], 1" in str(found.value)


def test_uninitialised_global_memory() -> None:
    data = np.zeros(32, np.uint32)
    body = "st.global.b32 [%rd9], 1; xor.b32 %r1, %r9, 1; ld.global.b32 %r2, [%rd9]; st.global.b32 [%rd9], %r2;"
    machine(body, data, initialised=False).run()
    with pytest.raises(UninitialisedFault, match="global address"):
        machine("ld.global.b32 %r2, [%rd9]; st.global.b32 [%rd9], %r2;", data, initialised=False).run()
    machine("ld.global.b32 %r2, [%rd9]; st.global.b32 [%rd9], %r2;", data, initialised=False, checks=Checks.off()).run()


def test_elements_that_nobody_uses_may_be_unwritten() -> None:
    data = np.zeros(32, np.uint32)
    body = """mov.b32 %r1, smem; shl.b32 %r4, %r9, 3; add.s32 %r1, %r1, %r4; st.shared.b32 [%r1], 3;
    ld.shared.v2.b32 {%r2, %r3}, [%r1]; st.global.b32 [%rd9], %r2;"""
    machine(body, data).run()
    assert (data == 3).all()


def test_lanes_reach_several_allocations_at_once() -> None:
    data, other = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32)
    delta = (other.ctypes.data - data.ctypes.data) % 2**64
    body = f"""
    and.b32 %r1, %r9, 1; setp.eq.b32 %p1, %r1, 0; selp.b64 %rd1, 0, {delta}, %p1; add.s64 %rd2, %rd9, %rd1;
    ld.global.b32 %r2, [%rd2]; add.s32 %r2, %r2, 1; st.global.b32 [%rd2], %r2;
    """
    machine(body, data, extra=(other,)).run()
    lane = np.arange(32)
    assert (data == lane + (lane % 2 == 0)).all()
    assert (other == lane + 100 + lane % 2).all()
