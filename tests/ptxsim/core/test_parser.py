"""PTX text to syntax."""

from __future__ import annotations

import pytest

from cubinery.aot.ptxsim.isa.base import (
    Address,
    Discard,
    Guard,
    Immediate,
    Not,
    Pair,
    Register,
    Special,
    Symbol,
    Vector,
)
from cubinery.aot.ptxsim.parser import parse
from cubinery.aot.ptxsim.syntax import Entry, Label, ParseError, Variable

HEADER = ".version 9.4\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, registers: str = ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<99>;") -> Entry:
    """A kernel `k` with this body on lines from 5."""
    return parse(f"{HEADER}.visible .entry k() {{ {registers}\n{body}\nret; }}").entries["k"]


def test_module_level() -> None:
    module = parse(
        HEADER
        + """
        // a comment ; with a semicolon
        .file 1 "kernels/x.py"
        .extern .shared .align 1024 .b8 smem[];
        .global .align 4 .u32 table[2] = {1, 0x10};
        .shared .align 16 .b8 fixed[48];
        .visible .entry first(
            .param .align 64 .b8 first_param_0[128],
            .param .u64 .ptr .global .align 16 first_param_1,
            .param .u16 first_param_2,
            .param .f32 first_param_3
        )
        .reqntid 160, 1, 1
        .minnctapersm 2
        { ret; }
        .entry second() { ret; }
        .section .debug_str { .b8 1, 2 }
        """
    )
    assert (module.version, module.target, module.files) == ("9.4", "sm_90a", {1: "kernels/x.py"})
    assert module.variables == (
        Variable("smem", "shared", 1024, 0, extern=True),
        Variable("table", "global", 4, 8, data=bytes([1, 0, 0, 0, 16, 0, 0, 0])),
        Variable("fixed", "shared", 16, 48),
    )
    first = module.entries["first"]
    assert [(p.offset, p.size, p.align) for p in first.params] == [(0, 128, 64), (128, 8, 8), (136, 2, 2), (140, 4, 4)]
    assert first.directives == {"reqntid": (160, 1, 1), "minnctapersm": (2,)}
    assert list(module.entries) == ["first", "second"]


@pytest.mark.parametrize(
    ("text", "operand"),
    [
        ("%r7", Register("%r7", "b32")),
        ("-5", Immediate(-5)),
        ("0xFFU", Immediate(255)),
        ("010", Immediate(8)),
        ("0f3F800000", Immediate(0x3F800000, 32)),
        ("0d3FF0000000000000", Immediate(0x3FF0000000000000, 64)),
        ("1.0", Immediate(0x3FF0000000000000, 64)),
        ("%tid.x", Special("tid.x")),
        ("%lanemask_lt", Special("lanemask_lt")),
        ("WARP_SZ", Immediate(32)),
        ("smem", Symbol("smem")),
        ("smem+16", Symbol("smem", 16)),
        ("_", Discard()),
        ("!%p1", Not(Register("%p1", "pred"))),
        ("%r1|%p2", Pair(Register("%r1", "b32"), Register("%p2", "pred"))),
        ("{%r1, _, 3}", Vector((Register("%r1", "b32"), Discard(), Immediate(3)))),
        ("[%rd1]", Address(Register("%rd1", "b64"))),
        ("[%rd1+-8]", Address(Register("%rd1", "b64"), -8)),
        ("[smem+0x10]", Address(Symbol("smem"), 16)),
        ("[64]", Address(Immediate(64))),
        (
            "[%rd1, {0, %r2}]",
            Address(Register("%rd1", "b64"), 0, (Immediate(0), Register("%r2", "b32"))),
        ),
    ],
)
def test_operands(text: str, operand: object) -> None:
    (instr, _) = kernel(f"op.b32 {text};").instructions
    assert instr.operands == (operand,)


def test_instruction_keeps_words_guard_line_and_text() -> None:
    (instr, _) = kernel("@!%p1 mbarrier.try_wait.shared::cta.b64\n  %p2, [%r1];").instructions
    assert (instr.opcode, instr.modifiers) == ("mbarrier", ("try_wait", "shared::cta", "b64"))
    assert instr.guard == Guard(Register("%p1", "pred"), negated=True)
    assert (instr.line, instr.text) == (5, "@!%p1 mbarrier.try_wait.shared::cta.b64 %p2, [%r1]")


def test_scopes_rename_what_they_declare() -> None:
    loop = "{ .reg .pred done; WAIT: mbarrier.try_wait.b64 done, [%r1]; @!done bra WAIT; }"
    entry = kernel(f"{loop} {loop}")
    labels = [item.name for item in entry.body if isinstance(item, Label)]
    first, _, second, branch, _ = entry.instructions
    assert len(set(labels)) == 2
    assert first.operands[0] != second.operands[0]
    assert branch.operands == (Symbol(labels[1]),)
    assert branch.guard == Guard(second.operands[0], negated=True)  # type: ignore[arg-type]


def test_inner_register_hides_an_outer_one() -> None:
    entry = kernel("op.b32 %r1; { .reg .b64 %r1; op.b64 %r1; } op.b32 %r1;")
    outer, inner, again, _ = (i.operands for i in entry.instructions)
    assert outer == again == (Register("%r1", "b32"),)
    assert inner[0].type == "b64"  # type: ignore[union-attr]


def test_source_lines() -> None:
    text = f'{HEADER}.file 1 "a.py"\n.entry k() {{\n.loc 1 42 7\nret; }}'
    assert parse(text).entries["k"].instructions[0].source == ("a.py", 42)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("op.b32 %nope;", "x.ptx:5: operand %nope is not understood"),
        ("@%r1 bra X;", "%r1 is no predicate"),
        ("bra NOWHERE;", "no label NOWHERE"),
        (".align 4;", "unknown directive"),
        ("op.b32 %r1; {", "a kernel's body is not closed"),
        ("op.b32 [%r1, %r2];", r"address \[%r1, %r2\] is not understood"),
        ("op.b32 %r1", "x.ptx:5: a statement does not end"),
        ("OP;", "not an instruction"),
    ],
)
def test_errors_name_the_line(body: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        parse(f"{HEADER}.entry k() {{ .reg .b32 %r<3>;\n{body} }}", "x.ptx")


def test_text_that_is_no_ptx() -> None:
    with pytest.raises(ParseError, match="unknown directive"):
        parse("hello")
    with pytest.raises(ParseError, match="is this PTX"):
        parse("")
