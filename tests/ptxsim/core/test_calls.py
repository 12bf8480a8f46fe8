"""Functions and their calls (PTX ISA 5.1.6.3, 7.1 and 9.7.12, call)."""

from __future__ import annotations

import numpy as np
import pytest
from ptx_bench import run, source

from cubinery.aot.ptxsim.faults import TrapFault
from cubinery.aot.ptxsim.parser import parse
from cubinery.aot.ptxsim.syntax import ParseError

LANES = np.arange(32, dtype=np.uint32)
TWICE = """
.visible .func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
{
.reg .b32 %r<5>;
ld.param.b32 %r1, [twice_param_0];
add.u32 %r2, %r1, %r1;
st.param.b32 [func_retval0+0], %r2;
ret;
}
"""
CALL = """
{ // callseq 0, 0
.param .b32 param0;
st.param.b32 [param0+0], %r9;
.param .b32 retval0;
call.uni (retval0), twice, (param0);
ld.param.b32 %r1, [retval0+0];
} // callseq 0
"""


def test_a_call_through_parameters() -> None:
    assert (run(CALL + "st.global.b32 [%rd9], %r1;", functions=TWICE) == 2 * LANES).all()


def test_each_call_has_registers_and_parameters_of_its_own() -> None:
    again = CALL.replace("%r9", "%r1").replace("%r1, [retval", "%r2, [retval")
    out = run(CALL + again + "add.u32 %r3, %r1, %r2; st.global.b32 [%rd9], %r3;", functions=TWICE)
    assert (out == 6 * LANES).all()


def test_parameters_that_are_registers_and_constants() -> None:
    functions = """
    .func (.reg .b32 %out, .reg .pred %big) clamp(.reg .b32 %x, .param .b32 limit)
    { .reg .b32 %r<3>; ld.param.b32 %r1, [limit]; min.u32 %out, %x, %r1; setp.gt.u32 %big, %x, %r1; }
    """
    body = """
    call (%r1, %p1), clamp, (%r9, 7); selp.b32 %r2, 100, 0, %p1; add.u32 %r1, %r1, %r2; st.global.b32 [%rd9], %r1;
    """
    assert (run(body, functions=functions) == np.minimum(LANES, 7) + np.where(LANES > 7, 100, 0)).all()


def test_a_register_gets_what_a_variable_returns_and_the_reverse() -> None:
    functions = TWICE + ".func (.reg .b32 %out) half(.reg .b32 %in) { shr.u32 %out, %in, 1; }"
    body = """
    .param .b32 there;
    call (%r1), twice, (%r9);
    st.param.b32 [there], %r1;
    call (there), half, (there);
    ld.param.b32 %r2, [there]; st.global.b32 [%rd9], %r2;
    """
    assert (run(body, functions=functions) == LANES).all()


def test_a_structure_by_value() -> None:
    functions = """
    .func (.param .align 8 .b8 out[16]) swap(.param .align 8 .b8 in[16])
    { .reg .b64 %rd<3>;
    ld.param.v2.b64 {%rd1, %rd2}, [in]; st.param.b64 [out], %rd2; st.param.b64 [out+8], %rd1; ret; }
    """
    body = """
    cvt.u64.u32 %rd10, %r9;
    { .param .align 8 .b8 p[16]; .param .align 8 .b8 q[16];
    st.param.v2.b64 [p], {%rd10, 5}; call.uni (q), swap, (p); ld.param.v2.b64 {%rd11, %rd12}, [q]; }
    add.u64 %rd12, %rd12, %rd11; cvt.u32.u64 %r1, %rd12; st.global.b32 [%rd9], %r1;
    """
    assert (run(body.replace("{%rd10, 5}", "{%rd10, %rd10}"), functions=functions) == 2 * LANES).all()


def test_lanes_that_return_early_and_calls_under_a_guard() -> None:
    functions = """
    .func (.reg .b32 %out) odd(.reg .b32 %x)
    { .reg .pred %p<2>; .reg .b32 %r<3>;
    mov.b32 %out, 1; and.b32 %r1, %x, 1; setp.eq.u32 %p1, %r1, 0; @%p1 ret; mov.b32 %out, 2; ret.uni; }
    """
    body = "mov.b32 %r1, 9; setp.lt.u32 %p1, %r9, 20; @!%p1 call (%r1), odd, (%r9); st.global.b32 [%rd9], %r1;"
    assert (run(body, functions=functions) == np.where(LANES < 20, 9, 1 + LANES % 2)).all()


def test_functions_call_functions_that_stand_anywhere() -> None:
    functions = """
    .func (.reg .b32 %out) quad(.reg .b32 %x) { .reg .b32 %t; call (%t), dbl, (%x); call (%out), dbl, (%t); ret; }
    .func (.reg .b32 %out) dbl(.reg .b32 %x)
    { .reg .b32 %t; mov.b32 %t, 0; LOOP: add.u32 %t, %t, 2; .reg .pred %p; setp.lt.u32 %p, %t, 4; @%p bra LOOP;
    shr.u32 %t, %t, 1; mul.lo.u32 %out, %x, %t; ret; }
    """
    declared = ".extern .func (.param .b32 r) nobody(.param .b64 a);\n.visible .func nothing();\n"
    assert (
        run("call (%r1), quad, (%r9); st.global.b32 [%rd9], %r1;", functions=declared + functions) == 4 * LANES
    ).all()


def test_shared_memory_of_a_function_is_one_and_its_local_memory_is_each_threads() -> None:
    functions = """
    .func count(.reg .b32 %x)
    { .shared .align 4 .b32 sum; .local .align 4 .b32 mine; .reg .b32 %r<3>; .reg .pred %p;
    setp.eq.u32 %p, %x, 0; @%p st.shared.b32 [sum], 0; bar.sync 0;
    st.local.b32 [mine], %x; ld.local.b32 %r1, [mine]; atom.shared.add.u32 %r2, [sum], %r1; bar.sync 0; ret; }
    .func (.reg .b32 %out) total()
    { .shared .align 4 .b32 other; st.shared.b32 [other], 3; bar.sync 0; ld.shared.b32 %out, [other]; }
    """
    body = """
    .shared .align 4 .b32 sum; st.shared.b32 [sum], 77; bar.sync 0;
    call count, (%r9); call (%r1), total; add.u32 %r10, %r9, 1; call count, (%r10);
    mov.u32 %r11, sum; ld.shared.b32 %r2, [%r11]; ld.shared.b32 %r3, [%r11+4];
    add.u32 %r2, %r2, %r1; mad.lo.u32 %r2, %r3, 1000, %r2; st.global.b32 [%rd9], %r2;
    """
    # The second call starts from 496, which the first left: lane 0 does not clear it then.
    assert (run(body, functions=functions) == 77 + 3 + 1000 * (496 + 528)).all()


def test_a_fault_inside_names_the_functions_line() -> None:
    functions = ".func stop()\n{\ntrap;\nret;\n}\n"
    with pytest.raises(TrapFault) as info:
        run("call stop;", functions=functions)
    assert info.value.place.line == source("call stop;", functions).split("\n").index("trap;") + 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("call (%r1), vprintf, (%rd1, %rd2);", "a call of vprintf, which the module does not define, is not executed"),
        ("call (%r1), %rd1, (%r2);", "a call through a register is not executed"),
        ("call (%r1), %rd1, (%r2), proto;", "call is not executed"),
        ("call twice, (%r1);", "the call does not fit the parameters of twice"),
        ("call (5), twice, (%r1);", "a constant where func_retval0 is returned"),
        ("call (%r1), twice, (%nope);", "operand %nope is not understood"),
        ("call (%r1), twice, ({%r1, %r2});", "is no parameter, register or constant"),
        (".param .b64 wide; call (%r1), twice, (wide);", "wide has another size than twice_param_0"),
        ("call again;", "recursion is not executed: call again"),
        ("@%r1 call again;", "%r1 is no predicate"),
    ],
)
def test_what_is_refused(body: str, message: str) -> None:
    functions = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);" + TWICE
    functions += ".func again() { call over; } .func over() { call again; }"
    with pytest.raises(ParseError, match=message):
        parse(source(body, functions), "x.ptx")


@pytest.mark.parametrize(
    ("text", "message"),
    [(".func f() { ret;", "the body of f is not closed"), (".func f() .what { }", "function directive not understood")],
)
def test_functions_that_are_not_understood(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(source("", text), "x.ptx")
