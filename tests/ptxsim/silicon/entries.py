"""What an entry of the silicon corpus is: a small PTX kernel, its inputs, and how its outputs compare.

Every kernel has the parameters (in, out, n) and then its tensor maps: `in` holds the input bytes, `out` starts as
`SENTINEL` bytes, n is `count`. An output is a row of columns, each the results of one instruction for all threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

SENTINEL = 0xE5
"""What fills `out` before a launch: both sides must leave the same bytes untouched."""
SIZES = {"b8": 1, "b16": 2, "b32": 4, "b64": 8}
HEADER = """.version 8.7
.target sm_90a
.address_size 64
"""
IN_ALIGN = 1024


@dataclass(frozen=True, slots=True)
class Close:
    """A column that PTX leaves approximate: `kind` (f16, bf16, f32, f64), relative and absolute difference.

    Not-a-number and infinities must agree as such. With both differences 0 only a NaN's bits are left open.
    """

    kind: str
    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True, slots=True)
class Column:
    """`count` results of `size` bytes of one instruction, in order of the threads."""

    name: str
    size: int
    count: int
    close: Close | None = None
    """None where every bit must agree."""

    @property
    def nbytes(self) -> int:
        return self.size * self.count


@dataclass(frozen=True, slots=True)
class Map:
    """A tensor map over `in` or `out`; dimensions from the innermost, strides in bytes from dimension 1 up."""

    pointer: str
    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...] = ()
    swizzle: str = "none"
    interleave: str = "none"
    fill: str = "zero"


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel of the corpus; `body` is the text between the braces of its .entry."""

    name: str
    body: str
    data: bytes
    columns: tuple[Column, ...]
    block: int = 128
    grid: int = 1
    cluster: int = 1
    shared: int = 0
    """Bytes of dynamic shared memory."""
    count: int = 0
    maps: tuple[Map, ...] = ()
    directives: str = ""
    """What stands before the kernel in its module: constants, variables."""
    tuning: str = ""
    """Performance-tuning directives of the kernel."""
    seed_out: bytes = b""
    """First bytes of `out` before the launch, where the kernel reads or reduces into it."""

    @property
    def out_bytes(self) -> int:
        return sum(column.nbytes for column in self.columns)

    def source(self) -> str:
        """The entry as PTX, without the header of its module."""
        params = [".param .u64 in_", ".param .u64 out_", ".param .u32 n_"]
        params += [f".param .align 64 .b8 map{i}[128]" for i in range(len(self.maps))]
        required = f".reqntid {self.block}, 1, 1\n{self.tuning}"
        if self.cluster > 1:
            required += f".reqnctapercluster {self.cluster}, 1, 1\n"
        return (
            f"{self.directives}.visible .entry {self.name}({', '.join(params)})\n{required}{{\n{self.body}\nret;\n}}\n"
        )

    def initial_out(self) -> bytes:
        """`out` before the launch."""
        return self.seed_out + bytes([SENTINEL]) * (self.out_bytes - len(self.seed_out))


# -- kernels of one instruction a column -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Op:
    """PTX text whose result is `%d`; the register's type decides the size of the column."""

    name: str
    text: str
    type: str
    close: Close | None = None


_DESTINATIONS = {"d": "b32", "dl": "b64", "dh": "b16", "dp": "pred"}
_REGISTERS = frozenset(f"{p}{x}" for p in ("", "l", "h", "p") for x in "abc")


def op(text: str, close: Close | None = None, name: str = "") -> Op:
    """An operation written as `opcode d a b c`.

    Destinations: d (b32), dl (b64), dh (b16), dp (predicate). Sources: a, b, c (b32), la, lb, lc (b64), ha, hb, hc
    (b16), pa, pb, pc (predicates: the low bit of a, b, c); everything else is taken as it is.
    """
    opcode, target, *sources = text.split()
    operands = ["%d", *(f"%{s}" if s in _REGISTERS else s.replace("!", "!%") for s in sources)]
    return Op(name or text, f"{opcode} {', '.join(operands)};", _DESTINATIONS[target], close)


def raw(name: str, text: str, target: str = "b32", close: Close | None = None) -> Op:
    """Several instructions with a result `%d`; temporaries %t0-9, %lt0-9, %ht0-9, %p0-9, %ft0-9 (b32)."""
    return Op(name, text, target, close)


_PROLOGUE = """.reg .pred %p<10>, %pa, %pb, %pc; .reg .b16 %ha, %hb, %hc, %ht<10>;
.reg .b32 %a, %b, %c, %t<10>, %i, %j, %k; .reg .b64 %la, %lb, %lc, %lt<10>, %in, %out, %at, %o1, %o2, %o4, %o8;
ld.param.u64 %in, [in_]; ld.param.u64 %out, [out_]; ld.param.u32 %k, [n_];
mov.u32 %i, %ctaid.x; mov.u32 %j, %ntid.x; mov.u32 %t0, %tid.x; mad.lo.s32 %i, %i, %j, %t0;
mad.wide.u32 %at, %i, 8, %in; ld.global.b64 %la, [%at]; mad.wide.u32 %at, %k, 8, %at; ld.global.b64 %lb, [%at];
mad.wide.u32 %at, %k, 8, %at; ld.global.b64 %lc, [%at];
cvt.u32.u64 %a, %la; cvt.u32.u64 %b, %lb; cvt.u32.u64 %c, %lc;
cvt.u16.u64 %ha, %la; cvt.u16.u64 %hb, %lb; cvt.u16.u64 %hc, %lc;
and.b32 %t0, %a, 1; setp.ne.u32 %pa, %t0, 0; and.b32 %t0, %b, 1; setp.ne.u32 %pb, %t0, 0;
and.b32 %t0, %c, 1; setp.ne.u32 %pc, %t0, 0;
mad.wide.u32 %o1, %i, 1, %out; mad.wide.u32 %o2, %i, 2, %out; mad.wide.u32 %o4, %i, 4, %out;
mad.wide.u32 %o8, %i, 8, %out;
"""


def table(name: str, ops: list[Op], inputs: tuple[Any, Any, Any], block: int = 128) -> Entry:
    """A kernel that runs every operation on the inputs: three arrays, one value a thread, as uint64 bits."""
    a, b, c = (np.asarray(x, np.uint64) for x in inputs)
    n = len(a)
    body, columns, at = [_PROLOGUE], [], 0
    for i, one in enumerate(ops):
        size = 1 if one.type == "pred" else SIZES[one.type]
        text = one.text.replace("%d", f"%d{i}")
        body.append(f".reg .{one.type} %d{i}; {{ {text} }}" if "{" not in text else f".reg .{one.type} %d{i}; {text}")
        if one.type == "pred":
            body.append(f"selp.u32 %t9, 1, 0, %d{i}; st.global.u8 [%o1+{at}], %t9;")
        else:
            body.append(f"st.global.{one.type} [%o{size}+{at}], %d{i};")
        columns.append(Column(one.name, size, n, one.close))
        at += size * n
    data = np.concatenate([a, b, c]).tobytes()
    return Entry(name, "\n".join(body), data, tuple(columns), block, n // block, count=n)


def single(
    name: str, body: str, data: bytes | Any, words: int, *, close: Close | None = None, size: int = 4, **options: Any
) -> Entry:
    """A kernel with one column of `words` results of `size` bytes.

    Declared and set: %in, %out, %n, %thread, %lane, %warp, %cta; %mine is the address of this thread's 32-bit word
    of out (block and thread counted); registers %p0-19, %h0-49, %r0-199, %x0-49 (b64), %f0-199 (f32), %e0-19 (f64).
    """
    body = f"""
.reg .pred %p<20>; .reg .b16 %h<50>; .reg .b32 %r<200>, %n, %thread, %lane, %warp, %cta, %g;
.reg .b64 %x<50>, %in, %out, %mine;
.reg .f32 %f<200>; .reg .f64 %e<20>;
ld.param.u64 %in, [in_]; ld.param.u64 %out, [out_]; ld.param.u32 %n, [n_];
mov.u32 %thread, %tid.x; and.b32 %lane, %thread, 31; shr.u32 %warp, %thread, 5; mov.u32 %cta, %ctaid.x;
mov.u32 %g, %ntid.x; mad.lo.s32 %g, %cta, %g, %thread; mad.wide.u32 %mine, %g, 4, %out;
{body}"""
    data = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
    if options.get("shared"):
        options["directives"] = options.get("directives", "")
    return Entry(name, body, data or bytes(16), (Column(name, size, words, close),), **options)


class Writer:
    """Collects the lines of a kernel and the columns that they store; offsets of columns are multiples of 16."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.lines: list[str] = []
        self.columns: list[Column] = []
        self._at = 0

    def __call__(self, *lines: str) -> None:
        self.lines += lines

    def reserve(self, name: str, size: int, count: int, close: Close | None = None) -> int:
        """Add a column; returns its offset."""
        at = self._at
        self.columns.append(Column(name, size, count, close))
        self._at += size * count
        if self._at % 16:
            pad = 16 - self._at % 16
            self.columns.append(Column(f"gap at {self._at}", 1, pad))
            self._at += pad
        return at

    def out(self, name: str, *registers: str, size: int = 4, close: Close | None = None) -> None:
        """Store registers of every thread, one after the other; %x49 is overwritten."""
        at = self.reserve(name, size, self.threads * len(registers), close)
        self(f"mad.wide.u32 %x49, %g, {size * len(registers)}, %out;")
        self(*(f"st.global.b{8 * size} [%x49+{at + size * i}], {r};" for i, r in enumerate(registers)))

    def flag(self, name: str, predicate: str) -> None:
        """Store a predicate; %r199 is overwritten."""
        self(f"selp.u32 %r199, 1, 0, {predicate};")
        self.out(name, "%r199")

    def entry(self, name: str, data: Any = b"", **options: Any) -> Entry:
        """The kernel, with one block unless `grid` says otherwise."""
        options.setdefault("block", self.threads // options.get("grid", 1))
        one = single(name, "\n".join(self.lines), data, 1, **options)
        return replace(one, columns=tuple(self.columns))


def wait(parity: str, barrier: str = "%r100", tries: int = 4096) -> str:
    """Wait for the phase of an mbarrier, but not for ever: a trap ends the kernel."""
    return (
        "{ .reg .pred done, more; .reg .b32 tries; mov.u32 tries, 0;\n"
        f"WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [{barrier}], {parity};\n"
        f"@done bra READY; add.u32 tries, tries, 1; setp.lt.u32 more, tries, {tries}; @more bra WAIT; trap;\nREADY: }}"
    )
