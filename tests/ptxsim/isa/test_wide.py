"""128-bit registers (PTX ISA 5.2, 9.7.9.1 mov, 9.7.9.8 ld, 9.7.9.11 st, 9.7.13.5 atom)."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import machine, run, translate

from cubinery.aot.ptxsim.faults import MisalignedFault, UninitialisedFault
from cubinery.aot.ptxsim.isa.base import UnknownInstruction

LANES = np.arange(32, dtype=np.uint32)
REGISTERS = ".reg .b128 %q<9>; cvt.u64.u32 %rd1, %r9; mul.wide.u32 %rd2, %r9, 16; add.u64 %rd3, %rd8, %rd2;"


def words(body: str) -> np.ndarray:
    """Each lane's four words at %rd3."""
    return run(REGISTERS + body, words=128).reshape(32, 4)


def test_moves_pack_unpack_and_copy() -> None:
    out = words("""
        add.u64 %rd4, %rd1, 100; mov.b128 %q1, {%rd1, %rd4}; mov.b128 %q2, %q1; mov.b128 {%rd5, %rd6}, %q2;
        st.global.v2.b64 [%rd3], {%rd6, %rd5};
    """)
    assert (out[:, 0] == LANES + 100).all()
    assert (out[:, 2] == LANES).all()


def test_a_guard_keeps_the_old_value_and_lanes_of_two_ways_meet() -> None:
    out = words("""
        mov.b128 %q1, {%rd1, %rd1}; setp.lt.u32 %p1, %r9, 9; @%p1 mov.b128 %q1, 5; setp.gt.u32 %p2, %r9, 20;
        @%p2 bra HIGH; mov.b128 %q2, %q1; bra.uni MET; HIGH: mov.b128 %q2, {%rd1, 7}; MET: st.global.b128 [%rd3], %q2;
    """)
    assert (out[:, 0] == np.where(LANES < 9, 5, LANES)).all()
    assert (out[:, 2] == np.where(LANES < 9, 0, np.where(LANES > 20, 7, LANES))).all()


@pytest.mark.parametrize(("space", "address"), [("shared", "%r1"), ("local", "%rd12"), ("global", "%rd3")])
def test_loads_and_stores(space: str, address: str) -> None:
    out = words(f"""
        .shared .align 16 .b8 here[512]; .local .align 16 .b8 mine[16];
        mov.u32 %r1, here; mad.lo.u32 %r1, %r9, 16, %r1; mov.u64 %rd12, mine;
        add.u64 %rd4, %rd1, 3; mov.b128 %q1, {{%rd4, %rd1}};
        st.{space}.b128 [{address}], %q1;
        ld.{space}.b128 %q2, [{address}];
        mov.b128 {{%rd5, %rd6}}, %q2; st.global.v2.b64 [%rd3], {{%rd6, %rd5}};
    """)
    assert (out[:, 0] == LANES).all()
    assert (out[:, 2] == LANES + 3).all()


def test_exchange_and_compare_and_swap() -> None:
    data = np.zeros(128 + 4, np.uint32)
    data[128:] = 1, 0, 2, 0
    machine(REGISTERS + """
        mov.b128 %q1, {%rd1, %rd1}; mov.b128 %q2, {1, 2}; mov.b128 %q3, {1, 3};
        atom.global.exch.b128 %q4, [%rd3], %q1;
        setp.eq.u32 %p1, %r9, 4; @%p1 atom.global.cas.b128 %q5, [%rd8+512], %q3, %q1;
        @%p1 atom.global.cas.b128 %q6, [%rd8+512], %q2, %q1; @%p1 st.global.b128 [%rd3], %q5;
    """, data).run()  # fmt: skip
    assert data[128:].tolist() == [4, 0, 4, 0]  # the second found what it expected
    out = data[:128].reshape(32, 4)
    assert out[4].tolist() == [1, 0, 2, 0]  # what the first saw, and left
    assert (out[5:, [0, 2]] == LANES[5:, None]).all()


def test_exchanges_at_one_address_follow_each_other() -> None:
    out = words("""
        setp.eq.u32 %p1, %r9, 0; @%p1 st.shared.b128 [smem], 77; bar.sync 0;
        mov.b128 %q1, {%rd1, %rd1}; atom.shared.exch.b128 %q2, [smem], %q1; st.global.b128 [%rd3], %q2;
    """)
    assert out[:, 0].tolist() == [77, *range(31)]


def test_faults() -> None:
    with pytest.raises(MisalignedFault, match="a multiple of 16"):
        run(REGISTERS + "ld.global.b128 %q1, [%rd3+8];", words=132)
    half = ".shared .align 16 .b8 x[16]; st.shared.b64 [x], 1; bar.sync 0; ld.shared.b128 %q1, [x];"
    with pytest.raises(UninitialisedFault):
        run(f"{REGISTERS}{half} st.global.b128 [%rd3], %q1;", words=128)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("mov.b128 %q1, {%r1, %r2, %r3, %r4};", "128 bits are packed from two registers"),
        ("mov.b128 {%r1, %r2, %r3, %r4}, %q1;", "128 bits are unpacked to two registers"),
        ("mov.b128 %q1, %rd1;", "128 bits where fewer are expected"),
        ("atom.global.add.b128 %q1, [%rd8], %q2;", "add of .b128 does not exist"),
    ],
)
def test_what_does_not_exist(text: str, why: str) -> None:
    with pytest.raises(UnknownInstruction, match=why):
        translate(REGISTERS + text)
