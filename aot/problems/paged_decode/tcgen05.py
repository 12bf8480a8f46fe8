"""A paged decode of the `tcgen05` kernel, of sequences in several chunks, against its emulation."""

from __future__ import annotations

from cubinery.aot.problems import Finding, Subject
from cubinery.aot.problems.paged_decode.mma import SPLITS, decode
from cubinery.aot.references import tolerances
from cubinery.runtime.arch import resolve
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, Tcgen05Config


def check(subject: Subject) -> Finding:
    """A decode of the sequences of `lengths`, held to the implementation's tolerance."""
    config = subject.config
    assert isinstance(config, Tcgen05Config)
    found = decode(subject, keys=lengths(config, subject.arch))
    return Finding(found.within(tolerances.paged_decode(config.impl, config.q_dtype)), str(found))


def lengths(config: Tcgen05Config, arch: str) -> tuple[int, ...]:
    """Keys of each sequence: enough for every chunk to go around the ring of stages, none, and less than a tile."""
    tiles = config.kv_stages(resolve(arch)) // config.tile_stages + 2
    return SPLITS * tiles * TILE_KEYS + 44, 0, 77
