"""A paged decode of sequences in several chunks, against its reference: for `mma`, and for others to use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cubinery.aot.problems import SEED, Finding, Subject
from cubinery.aot.references import tolerances
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.paged_decode_tcgen05 import chunks_of, emulated_attention
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig, MmaConfig, Tcgen05Config
from cubinery.runtime.ops.paged_decode.quantize import quantize_kv
from cubinery.runtime.ops.paged_decode.select import TCGEN05_KNOBS

NUM_KV_HEADS = 2
WINDOW, SOFTCAP = 170, 2.0
"""Of kernels that have one: the window begins inside a tile, and pages lie before it."""
SPLITS = 2
"""Chunks a sequence, so that they are merged too."""


def check(subject: Subject) -> Finding:
    """A decode of the sequences of `lengths`, held to the implementation's tolerance."""
    found = decode(subject)
    return Finding(found.within(tolerances.PAGED_DECODE["mma"]), str(found))


def lengths(config: MmaConfig, arch: str) -> tuple[int, ...]:
    """Keys of each sequence: enough for each chunk (or CTA of a cluster) to go around its ring, none, and a few."""
    stages = config.stages(resolve(arch)) // 2 + 2  # the ring holds K and V
    tiles = -(-stages * config.stage_keys // TILE_KEYS)
    return max(SPLITS, config.cluster) * tiles * TILE_KEYS + 44, 0, 77


def decode(subject: Subject, *, keys: Sequence[int] = (), splits: int = SPLITS) -> tolerances.Deviation:
    """How far a decode is from the reference. Raises Fault.

    `keys` are the sequences' lengths (for `mma`, those of `lengths` if there are none), `splits` the chunks of each
    (a cluster shares it whole).
    """
    from cubinery.runtime.ops.paged_decode.op import PagedDecode

    config = subject.config
    assert isinstance(config, DecodeConfig)
    group = max(1, min(config.row_tile, 64 * config.q_len) // config.q_len)
    if not keys:
        assert isinstance(config, MmaConfig)
        keys = lengths(config, subject.arch)
    problem = subject.place(**decode_problem(config, group, keys, subject.seed))
    op = PagedDecode(
        subject.library, head_dim=config.head_dim, page_size=config.page_size, kv_format=config.kv_format,
        q_len=config.q_len, causal=config.causal, q_dtype=config.q_dtype, impl=config.impl,
        row_tile=config.row_tile, ctas_per_sm=config.ctas_per_sm, cluster=config.cluster, pdl=config.pdl,
        sinks=config.sinks, q_lens=config.q_lens, **launch_values(config), **knobs(config),
    )  # fmt: skip
    if op.keys(group)[0] != subject.key:
        raise CubineryError(f"{subject.key}: the public call picks {op.keys(group)[0]} for its configuration")
    plan = op.plan(
        list(keys), num_q_heads=group * NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS,
        force_splits=splits if config.cluster == 1 else 0,
    )  # fmt: skip
    if config.pdl:  # once more: the second decode may start before the first has ended
        plan.run(**problem)
    o, lse = plan.run(**problem)
    axes: dict[str, Any] = {"q_len": config.q_len, "causal": config.causal, "kv_format": config.kv_format}
    if isinstance(config, Tcgen05Config):
        chunks = chunks_of(plan.splits.work, len(keys))
        expected = emulated_attention(**problem, seq_lens=keys, chunks=chunks, q_dtype=config.q_dtype, **axes)
    else:
        expected = paged_attention(**problem, seq_lens=keys, **axes, **launch_values(config))
    return tolerances.deviation(o.cpu().double().numpy(), lse.cpu().numpy(), *expected)


def launch_values(config: DecodeConfig) -> dict[str, Any]:
    """What PagedDecode is told of the axes that have a size."""
    return {"window": WINDOW if config.window else None, "softcap": SOFTCAP if config.softcap else None}


def knobs(config: DecodeConfig) -> dict[str, Any]:
    """What PagedDecode is told of the axes that `tcgen05` alone has."""
    return {name: getattr(config, name) for name in TCGEN05_KNOBS} if isinstance(config, Tcgen05Config) else {}


def decode_problem(config: DecodeConfig, group: int, lengths: Sequence[int], seed: int = SEED) -> dict[str, Any]:
    """Tensors of a random problem, by their names in `Plan.run`.

    Pages that no sequence owns hold NaN, or the largest value of a format without; the table's padding names such pages
    by turns with pages that do not exist, beginning with one that does (an empty sequence must look up neither).
    So are pages before a window, and queries of tokens that a sequence does not bring hold NaN.
    """
    import torch

    rng = np.random.default_rng(seed)
    blocks = [-(-length // config.page_size) for length in lengths]
    pages = sum(blocks) + 3
    order = rng.permutation(pages)
    table = np.full((len(lengths), max(blocks) + 1), -(2**31), np.int32)
    taken = 0
    for row, count in enumerate(blocks):
        table[row, :count] = order[taken : taken + count]
        taken += count
    for row, count in enumerate(blocks):
        table[row, count::2] = order[taken]
    # Some sequences bring all tokens, some fewer, none included.
    tokens = [config.q_len - i % (config.q_len + 1) if config.q_lens else config.q_len for i in range(len(lengths))]
    gone = [
        max(0, length - count + 1 - WINDOW) // config.page_size if config.window else 0
        for length, count in zip(lengths, tokens, strict=True)
    ]
    unowned = [*order[taken:], *(page for row, count in enumerate(gone) for page in table[row, :count])]
    for row, count in enumerate(gone):
        table[row, :count] = -(2**31)
    shape = (pages, config.page_size, NUM_KV_HEADS, config.head_dim)
    problem: dict[str, Any] = {}
    for name in "kv":
        values = rng.standard_normal(shape).astype(np.float32)
        values[unowned] = np.nan
        scale = None if config.kv_format == "bf16" else torch.ones(1 if config.kv_format == "nvfp4" else NUM_KV_HEADS)
        stored = quantize_kv(torch.from_numpy(values), config.kv_format, scale)
        problem[f"{name}_cache"] = stored.data
        if stored.block_scales is not None:
            problem[f"{name}_scales"] = stored.block_scales
    rows = (len(lengths) * config.q_len, group * NUM_KV_HEADS, config.head_dim)
    q = torch.from_numpy(rng.standard_normal(rows).astype(np.float32))
    for seq, count in enumerate(tokens):
        q[seq * config.q_len + count : (seq + 1) * config.q_len] = np.nan
    q = q.bfloat16() if config.q_dtype == "bf16" else q.to(torch.float8_e4m3fn)
    problem = {"q": q, **problem, "block_table": torch.from_numpy(table)}
    if config.sinks:
        sinks = rng.uniform(-2, 4, group * NUM_KV_HEADS).astype(np.float32)
        problem["sinks"] = torch.from_numpy(sinks)
    if config.q_lens:
        problem["q_lens"] = torch.tensor(tokens, dtype=torch.int32)
    return problem
