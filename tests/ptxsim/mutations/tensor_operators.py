"""Ways to break what a kernel does with tensor memory (see operators.py).

A kernel issues products in runs whose operands lie a step apart; of each run the first is broken.
"""

from __future__ import annotations

import re
from collections.abc import Callable

Edit = Callable[[re.Match[str]], str]

_PRODUCT = r"(tcgen05\.mma\.[^;\[]*\[%?\w+\], \[?%?\w+\]?, )(?P<b>%?\w+), (?P<instruction>%?\w+), (?P<adds>%?\w+);"
"""A product; its groups are what stands before B's descriptor, that, the instruction's, and the predicate."""


def first_products(code: str) -> set[int]:
    """Where the first product of each run starts: a run ends where a thread waits or commits."""
    found, last = set(), ""
    for match in re.finditer(r"tcgen05\.(?:mma|commit)\b|mbarrier\.\w+_wait", code):
        if match[0] == "tcgen05.mma" != last:
            found.add(match.start())
        last = match[0]
    return found


def _drop(_: re.Match[str]) -> str:
    return ""


def _flipped(group: str, type_: str, bit: int) -> Edit:
    """A bit of a descriptor turned over."""

    def edit(m: re.Match[str]) -> str:
        names = {"b": m["b"], "instruction": m["instruction"], group: "bad"}
        change = f"xor.{type_} bad, {m[group]}, {1 << bit};"
        return f"{{ .reg .{type_} bad; {change} {m[1]}{names['b']}, {names['instruction']}, {m['adds']}; }}"

    return edit


def _adds(always: bool) -> Edit:
    """The product adds to D always, or never."""
    test = f"setp.{'eq' if always else 'ne'}.u32 bad, 0, 0;"
    return lambda m: f"{{ .reg .pred bad; {test} {m[1]}{m['b']}, {m['instruction']}, bad; }}"


PRODUCT_OPERATORS: tuple[tuple[str, str, Edit], ...] = (
    ("drop tcgen05.mma", _PRODUCT, _drop),
    ("product that always adds", _PRODUCT, _adds(True)),
    ("product that never adds", _PRODUCT, _adds(False)),
    ("matrix B: address", _PRODUCT, _flipped("b", "b64", 3)),
    ("matrix B: stride", _PRODUCT, _flipped("b", "b64", 35)),
    ("matrix B: version", _PRODUCT, _flipped("b", "b64", 46)),
    ("matrix B: base offset", _PRODUCT, _flipped("b", "b64", 49)),
    ("matrix B: swizzle", _PRODUCT, _flipped("b", "b64", 62)),
    ("instruction: type of D", _PRODUCT, _flipped("instruction", "b32", 4)),
    ("instruction: type of A", _PRODUCT, _flipped("instruction", "b32", 7)),
    ("instruction: type of B", _PRODUCT, _flipped("instruction", "b32", 10)),
    ("instruction: sign of A", _PRODUCT, _flipped("instruction", "b32", 13)),
    ("instruction: order of B", _PRODUCT, _flipped("instruction", "b32", 16)),
    ("instruction: N", _PRODUCT, _flipped("instruction", "b32", 17)),
    ("instruction: M", _PRODUCT, _flipped("instruction", "b32", 26)),
)
"""Applied to the first product of each run."""

_FENCE, _WAIT = r"tcgen05\.fence::\w+;", r"tcgen05\.wait::(?:ld|st)[\w.]*;"
DROPPED_WHOLLY = (
    ("drop every tcgen05.fence", _FENCE),
    ("drop every tcgen05.wait::ld", _WAIT.replace("(?:ld|st)", "ld")),
)
"""(kind, pattern): all matches at once, which is one mutant: as a kernel looks whose author does not know of them."""

TENSOR_OPERATORS: tuple[tuple[str, str, Edit], ...] = (
    ("drop tcgen05.fence", _FENCE, _drop),
    ("drop tcgen05.wait", _WAIT, _drop),
    ("drop tcgen05.st", r"tcgen05\.st\.[^;]*;", _drop),
    ("drop tcgen05.commit", r"tcgen05\.commit[^;]*;", _drop),
    ("commit to the next mbarrier", r"(tcgen05\.commit[^;\[]*\[)(%?\w+)(\][^;]*;)", lambda m: f"{m[1]}{m[2]}+8{m[3]}"),
    ("drop tcgen05.dealloc", r"tcgen05\.dealloc[^;]*;", _drop),
    ("half the columns", r"(tcgen05\.(?:alloc|dealloc)[^;]*, )(\d+);", lambda m: f"{m[1]}{int(m[2]) // 2};"),
    *PRODUCT_OPERATORS,
)
"""(kind, pattern, edit): every match is a site, of products the first ones."""
