"""Words that instructions of memory share: spaces, scopes, orderings, cache hints, types and vectors."""

from __future__ import annotations

from cubinery.aot.ptxsim.codegen import Scope
from cubinery.aot.ptxsim.isa.base import Instr, Modifiers

CACHE_HINTS = (
    "ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc",
    "L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate",
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B",
)  # fmt: skip
"""Words that tell a cache what to expect: no effect on values."""
SCOPES = ("cta", "cluster", "gpu", "sys")
SPACES = {
    "global": "global", "shared": "shared", "shared::cta": "shared", "shared::cluster": "shared", "local": "local",
    "const": "global", "param": "param", "param::entry": "param",
}  # fmt: skip
TYPES = (
    "b8", "u8", "s8", "b16", "u16", "s16", "f16", "bf16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64",
    "f16x2", "bf16x2", "b128",
)  # fmt: skip


def index_of(scope: Scope, instr: Instr) -> int:
    """The instruction's number, by which the machine finds line and text for a fault."""
    index: int = scope.program.index(instr)
    return index


def width_of(kind: str) -> int:
    """Bytes of a type in memory."""
    return {"f16x2": 4, "bf16x2": 4, "bf16": 2}.get(kind) or int(kind.lstrip("bsuf")) // 8


def memory_words(mods: Modifiers) -> tuple[str, str]:
    """(space, ordering) of ld, st, atom and red; cache hints dropped."""
    order = mods.choose("weak", "relaxed", "acquire", "release", "acq_rel", "volatile", "mmio")
    if order == "mmio":
        mods.expect("relaxed")
    space = SPACES.get(mods.choose(*SPACES), "generic")
    mods.choose(*SCOPES)
    while mods.choose(*CACHE_HINTS):
        pass
    return space, order


def vector_of(mods: Modifiers) -> int:
    """Elements of a vector: the number in .v2, .v4 or .v8, 1 without."""
    return int((mods.choose("v2", "v4", "v8") or "v1")[1:])
