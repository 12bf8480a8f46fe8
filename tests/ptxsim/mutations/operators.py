"""Ways to break a kernel: where its PTX text, or its tensor maps, can be changed so that it is wrong.

Every mutation is one edit of one statement. The classes are those mistakes that synchronisation invites: something
left out, something counted wrong, a phase mistaken, a field of a descriptor mixed up. What cannot make a kernel wrong
is no mistake: `griddepcontrol.launch_dependents` left out, the stride of an operand that is one group of rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ptxsim.mutations.tensor_operators import DROPPED_WHOLLY, PRODUCT_OPERATORS, TENSOR_OPERATORS, first_products

from cubinery.runtime.manifest import TensorMapSpec


@dataclass(frozen=True, slots=True)
class Mutation:
    """One edit of a PTX text: `text[start:end]` becomes `after`."""

    kind: str
    line: int
    before: str
    after: str
    start: int

    @property
    def name(self) -> str:
        """Unique in its text: `kind@line`, and the column's offset where a line has several."""
        return f"{self.kind}@{self.line}:{self.start}"

    def apply(self, text: str) -> str:
        end = self.start + len(self.before)
        assert text[self.start : end] == self.before
        return text[: self.start] + self.after + text[end:]


@dataclass(frozen=True, slots=True)
class MapMutation:
    """One field of one tensor map changed: `index` counts the maps in the order of their encoding."""

    kind: str
    map: str
    change: Callable[[TensorMapSpec], TensorMapSpec]

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.map}"


Edit = Callable[[re.Match[str]], str]

_GUARD = r"(?:@!?%\w+\s+)?"
_TRY = rf"({_GUARD})(mbarrier\.(?:try|test)_wait\.parity[\w.:]*\s+)(%?\w+), (\[[^\]]*\]), (%?\w+)((?:, %?\w+)?);"


def _drop(_: re.Match[str]) -> str:
    return ""


def _number(change: Callable[[int], int]) -> Edit:
    """Groups are what stands before a number, the number, and what stands after it."""
    return lambda m: f"{m[1]}{change(int(m[2]))}{m[3]}"


def _passes(m: re.Match[str]) -> str:
    """The wait succeeds at once."""
    return f"{m[1]}setp.eq.u32 {m[3]}, 0, 0;"


def _other_parity(m: re.Match[str]) -> str:
    if m[5].isdigit():
        return f"{m[1]}{m[2]}{m[3]}, {m[4]}, {int(m[5]) ^ 1}{m[6]};"
    return f"{{ .reg .b32 other; xor.b32 other, {m[5]}, 1; {m[1]}{m[2]}{m[3]}, {m[4]}, other{m[6]}; }}"


def _swapped(at: int) -> Edit:
    """Coordinates `at` and `at` + 1 of a box exchanged."""

    def edit(m: re.Match[str]) -> str:
        found = [c.strip() for c in m[2].split(",")]
        if at + 1 >= len(found):
            return m[0]
        found[at], found[at + 1] = found[at + 1], found[at]
        return f"{m[1]}{', '.join(found)}{m[3]}"

    return edit


def _flipped(bit: int) -> Edit:
    """A bit of the last shared-memory descriptor of a wgmma turned over."""
    return lambda m: f"{{ .reg .b64 bad; xor.b64 bad, {m[2]}, {1 << bit}; {m[1]}bad{m[3]} }}"


def _after(bytes_: int) -> Edit:
    """An address moved on. Groups are what stands before it, the base, its offset or nothing, and what stands after."""
    return lambda m: f"{m[1]}{m[2]}+{int(m[3] or 0) + bytes_}{m[4]}"


_AT = r"(%?\w+)(?:\+(\d+))?"
_EXPECT = rf"({_GUARD}mbarrier\.arrive\.expect_tx[^;]*, )(\d+)(;)"
_INIT = rf"({_GUARD}mbarrier\.init[^;]*\], )(\d+)(;)"
_COPY = (
    rf"({_GUARD}cp\.(?:reduce\.)?async\.bulk\.tensor\.[^;{{]*(?:\[%?\w+(?:\+\d+)?\], )?\[%?\w+, \{{)([^}}]*)(\}}[^;]*;)"
)
_WGMMA = rf"({_GUARD}wgmma\.mma_async[^;]*\}}, (?:%\w+, |\{{[^}}]*\}}, ))(%x\w+|%rd\w+)(, [^;]*;)"

OPERATORS: tuple[tuple[str, str, Edit], ...] = (
    ("drop fence", rf"{_GUARD}(?<!wgmma\.)\bfence\.[\w.:]+;", _drop),
    ("drop CTA barrier", rf"{_GUARD}\b(?:bar|barrier)(?:\.cta)?\.(?:sync|arrive)(?:\.aligned)?\s[^;]*;", _drop),
    (
        "drop cluster barrier",
        rf"{_GUARD}\bbarrier\.cluster\.arrive[\w.]*; {_GUARD}barrier\.cluster\.wait[\w.]*;",
        _drop,
    ),
    ("drop cluster wait", rf"{_GUARD}\bbarrier\.cluster\.wait[\w.]*;", _drop),
    ("barrier of 32 threads more", r"(\bbar\.sync\s+\d+, )(\d+)(;)", _number(lambda n: n + 32)),
    ("barrier of 32 threads fewer", r"(\bbar\.sync\s+\d+, )(\d+)(;)", _number(lambda n: n - 32)),
    ("drop warp barrier", rf"{_GUARD}\bbar\.warp\.sync[^;]*;", _drop),
    ("drop arrive", rf"{_GUARD}mbarrier\.arrive(?!\.expect_tx)[\w.:]*\s+_, [^;]*;", _drop),
    ("arrive twice", rf"{_GUARD}mbarrier\.arrive(?!\.expect_tx)[\w.:]*\s+_, [^;]*;", lambda m: f"{m[0]} {m[0]}"),
    ("drop arrive.expect_tx", rf"{_GUARD}mbarrier\.arrive\.expect_tx[^;]*;", _drop),
    ("arrive without expect_tx", rf"({_GUARD}mbarrier\.arrive)\.expect_tx([^;]*), \d+;", lambda m: f"{m[1]}{m[2]};"),
    ("expect_tx + 16", _EXPECT, _number(lambda n: n + 16)),
    ("expect_tx - 16", _EXPECT, _number(lambda n: n - 16)),
    ("expect_tx x 2", _EXPECT, _number(lambda n: 2 * n)),
    ("expect_tx / 2", _EXPECT, _number(lambda n: n // 2)),
    ("drop wait", _TRY, _passes),
    ("flip parity", _TRY, _other_parity),
    ("drop init", rf"{_GUARD}mbarrier\.init[^;]*;", _drop),
    ("init count + 1", _INIT, _number(lambda n: n + 1)),
    ("init count - 1", _INIT, _number(lambda n: n - 1)),
    ("arrive at the next mbarrier", rf"({_GUARD}mbarrier\.arrive(?!\.expect_tx)[^;\[]*\[){_AT}(\][^;]*;)", _after(8)),
    ("expect at the next mbarrier", rf"({_GUARD}mbarrier\.arrive\.expect_tx[^;\[]*\[){_AT}(\][^;]*;)", _after(8)),
    ("wait at the next mbarrier", rf"({_GUARD}mbarrier\.try_wait[^;\[]*\[){_AT}(\][^;]*;)", _after(8)),
    (
        "copy counted at the next mbarrier",
        rf"({_GUARD}cp\.async\.bulk\.[^;]*complete_tx[^;]*, \[){_AT}(\][^;\[]*;)",
        _after(8),
    ),
    (
        "copy to 128 bytes further",
        rf"({_GUARD}cp\.async\.bulk\.[^;\[]*complete_tx[^;\[]*\[){_AT}(\][^;]*;)",
        _after(128),
    ),
    ("another barrier", r"(\bbar\.(?:sync|arrive)\s+)(\d+)(,)", _number(lambda n: (n + 1) % 16)),
    ("drop copy", rf"{_GUARD}cp\.(?:reduce\.)?async\.bulk\.(?!commit|wait|prefetch)[^;]*;", _drop),
    ("copy twice", rf"{_GUARD}cp\.async\.bulk\.[^;]*complete_tx[^;]*;", lambda m: f"{m[0]} {m[0]}"),
    ("swap coordinates 0, 1", _COPY, _swapped(0)),
    ("swap coordinates 1, 2", _COPY, _swapped(1)),
    ("swap coordinates 2, 3", _COPY, _swapped(2)),
    ("drop commit_group", rf"{_GUARD}cp\.async(?:\.bulk)?\.commit_group;", _drop),
    ("drop wait_group", rf"{_GUARD}cp\.async(?:\.bulk)?\.wait_(?:group|all)[^;]*;", _drop),
    ("drop wgmma.fence", r"wgmma\.fence[\w.]*;", _drop),
    ("drop wgmma.commit_group", r"wgmma\.commit_group[\w.]*;", _drop),
    ("drop wgmma.wait_group", r"wgmma\.wait_group[^;]*;", _drop),
    ("wgmma.wait_group 1", r"wgmma\.wait_group([\w.]*) 0;", lambda m: f"wgmma.wait_group{m[1]} 1;"),
    ("descriptor: address", _WGMMA, _flipped(3)),
    ("descriptor: leading offset", _WGMMA, _flipped(19)),
    ("descriptor: stride", _WGMMA.replace(r"mma_async", r"mma_async[\w.]*n(?!8k)\d+k", 1), _flipped(35)),
    ("descriptor: base offset", _WGMMA, _flipped(49)),
    ("descriptor: swizzle", _WGMMA, _flipped(62)),
    ("atomic that does not acquire", r"(atom\.)acq_rel(\.gpu)", lambda m: f"{m[1]}release{m[2]}"),
    ("atomic that does not release", r"(atom\.)acq_rel(\.gpu)", lambda m: f"{m[1]}acquire{m[2]}"),
    ("atomic of the CTA's scope", r"(atom\.acq_rel\.)gpu", lambda m: f"{m[1]}cta"),
    ("drop griddepcontrol.wait", r"griddepcontrol\.wait;", _drop),
    ("drop shuffle", r"shfl\.sync\.bfly\.b32\s+(%\w+), (%\w+), [^;]*;", lambda m: f"mov.b32 {m[1]}, {m[2]};"),
    ("vote the other way", r"vote\.sync\.any\.", lambda _: "vote.sync.all."),
    *TENSOR_OPERATORS,
)
"""(kind, pattern, edit): every match is a site."""


def mutations(text: str) -> Iterator[Mutation]:
    """Every mutation of a PTX text, in the order of `OPERATORS` and then of the text.

    Where nobody waits for an mbarrier, what initialises one cannot be broken. Where nobody arrives at a barrier
    without waiting, all meet at one statement, and another number is but another name.
    """
    code = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    waits, arrives = re.search(r"mbarrier\.(?:try|test)_wait", code), re.search(r"\bbar\.arrive", code)
    products, first = {kind for kind, *_ in PRODUCT_OPERATORS}, first_products(code)
    for kind, pattern, edit in OPERATORS:
        for match in re.finditer(pattern, code):
            if kind in products and match.start() not in first:
                continue
            if not waits and re.search(r"mbarrier[._]init", match[0]):
                continue
            if kind == "another barrier" and not arrives:
                continue
            after = edit(match)
            if after != match[0]:
                yield Mutation(kind, text.count("\n", 0, match.start()) + 1, match[0], after, match.start())
    for kind, pattern in DROPPED_WHOLLY:
        found = list(re.finditer(pattern, code))
        if len(found) > 1:
            start, end = found[0].start(), found[-1].end()
            after = re.sub(pattern, "", text[start:end])
            yield Mutation(kind, text.count("\n", 0, start) + 1, text[start:end], after, start)


def map_mutations(spec: TensorMapSpec) -> Iterator[MapMutation]:
    """Every mutation of a tensor map's record."""

    def box(axis: int, factor: float) -> Callable[[TensorMapSpec], TensorMapSpec]:
        return lambda s: replace(s, box=tuple(max(1, int(b * factor)) if i == axis else b for i, b in enumerate(s.box)))

    for axis, size in enumerate(spec.box):
        if size > 1:
            yield MapMutation(f"box {axis} halved", spec.name, box(axis, 0.5))
        yield MapMutation(f"box {axis} doubled", spec.name, box(axis, 2))
    for swizzle in ("none", "32B", "64B", "128B"):
        if swizzle != spec.swizzle:
            yield MapMutation(
                f"swizzle {swizzle}",
                spec.name,
                lambda s, swizzle=swizzle: replace(s, swizzle=swizzle),  # type: ignore[misc]
            )
