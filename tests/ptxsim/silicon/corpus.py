"""The whole corpus, by name."""

from __future__ import annotations

import hashlib
from functools import cache

from ptxsim.silicon.entries import HEADER, Entry
from ptxsim.silicon.groups import barriers, compare, convert, copies, floats, integer, matrix, memory, tensor, warp

ARCH = "sm_90a"
GROUPS = (integer, compare, floats, convert, warp, memory, barriers, matrix, copies, tensor)


@cache
def corpus() -> dict[str, Entry]:
    """Every entry, in the order of its group."""
    entries = [entry for group in GROUPS for entry in group.entries()]
    found = {entry.name: entry for entry in entries}
    assert len(found) == len(entries), "two entries of one name"
    return found


def module(entry: Entry) -> str:
    """The entry as a PTX module of its own."""
    shared = ".extern .shared .align 1024 .b8 smem[];\n" if "smem" in entry.body else ""
    return f"{HEADER}{shared}{entry.source()}"


def digest(entry: Entry) -> str:
    """Of all that decides the output: a record made from something else is stale."""
    launch = (entry.block, entry.grid, entry.cluster, entry.shared, entry.count, entry.maps)
    parts = (module(entry).encode(), entry.data, entry.initial_out(), repr(launch).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def key(name: str) -> str:
    """The bundle's key of an entry."""
    return f"corpus-{ARCH}-ptx-{name}"
