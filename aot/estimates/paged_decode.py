"""Figures of a decode kernel: bytes moved, instructions, barriers, and which of them sets the pace.

Everything is per tile of 128 keys of one KV head, K and V together, for one CTA. `docs/notes/estimates.md` says how the
defaults follow from these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cubinery.aot.errors import InspectError
from cubinery.aot.estimates import Figure
from cubinery.aot.loops import Loop, find_loops, main_loop
from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig, MmaConfig, Tcgen05Config, WgmmaConfig
from cubinery.runtime.ops.paged_decode.tcgen05_config import BLOCK_DIM

SHARED_BYTES_PER_CLOCK = 128
"""What an SM's shared memory reads or writes in a clock."""

SCHEDULERS = 4
"""Schedulers of an SM: each issues one instruction a clock."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one CTA does for one tile, by its configuration."""

    kv_bytes: int
    """K and V as memory holds them, block scales included."""
    shared_bytes: float
    """Written to and read from shared memory."""
    tensor_bytes: float
    """Written to and read from tensor memory by converters and as the A operand; accumulators left out."""
    mmas: float
    """MMA instructions of one issuing warp."""
    softmax_warps: int
    """Warps that take the softmax's path."""
    ring_bytes: int
    """K and V that can be on their way to one CTA."""
    blocks: int = 1
    """Times that loops of the issuing warp and of a rescale go around for one tile."""
    convert: tuple[float, ...] = ()
    """Times that the converters' loops go around for one tile: the outer one, then those inside it."""
    convert_warps: int = 0
    """Warps that share the conversion of a tile, a scheduler each."""


def mma_work(config: MmaConfig, arch: Arch) -> Work:
    """A stage is written once, and read by every group of rows (K also by every group of columns).

    An MMA takes 8 keys, or 8 columns of V, and 16 of both where the query rows are its other operand.
    """
    tile = TILE_KEYS * config.row_bytes
    scales = 2 * TILE_KEYS * config.scale_bytes
    reads = tile * config.row_warps * config.col_warps + tile * config.row_warps
    taken = 16 if config.keys_first else 8
    scores = TILE_KEYS // taken * (config.head_dim // 16) / config.key_warps
    output = config.head_dim // config.col_warps // taken * (TILE_KEYS // 16) / config.key_warps
    return Work(
        kv_bytes=2 * tile + scales,
        shared_bytes=2 * tile + scales + reads,
        tensor_bytes=0,
        mmas=scores + output,
        softmax_warps=config.consumer_warps,
        ring_bytes=config.ring_depth(arch, arch.sms * config.ctas_per_sm) * config.stage_bytes,
    )


def wgmma_work(config: WgmmaConfig, arch: Arch) -> Work:
    """A stage is written once, read by the widener and written in f16, which each group of 64 rows reads once.

    Two warpgroups multiply; those of the same rows have half of a tile's keys each. Products take 16 columns of
    head_dim or 16 keys at a time; scores come 64 keys at a time.
    """
    tile, wide = TILE_KEYS * config.row_bytes, TILE_KEYS * config.head_dim * 2
    keys = TILE_KEYS / config.key_warps
    return Work(
        kv_bytes=2 * tile,
        shared_bytes=2 * (tile + tile + wide + wide * config.row_tile // 64),
        tensor_bytes=0,
        mmas=keys / 64 * (config.head_dim / 16) + keys / 16,
        softmax_warps=config.consumer_warps,
        ring_bytes=config.ring_depth(arch, arch.sms * config.ctas_per_sm) * config.stage_bytes,
        convert=(TILE_KEYS / config.stage_keys,),
        convert_warps=config.widening_warps,
    )


def tcgen05_work(config: Tcgen05Config, arch: Arch) -> Work:
    """The tensor core reads each block of K and V, all of Q a tile and P once for every block of V.

    nvfp4 is written packed, read, written converted and read again; for a bf16 Q a block is read by its converter,
    written to tensor memory as bf16 and read there.
    """
    blocks = config.head_dim // BLOCK_DIM
    block = config.STAGE_BYTES
    packed, scales = 2 * TILE_KEYS * config.row_bytes, 2 * TILE_KEYS * config.scale_bytes
    passes = 2 * 2 * blocks * block + (2 * (packed + scales) if config.packed_stages else 0)
    convert: tuple[float, ...] = ()
    if config.packed_stages:
        convert = (2 * blocks / config.packed_blocks, *_loops(config.packed_blocks, 4))
    elif config.converters:
        convert = (1, *_loops(blocks // config.converters))
    operands = config.q_bytes + (1 + blocks) * config.p_bytes
    elements_per_mma = 32 // config.q_element_bytes
    ring = config.kv_stages(arch) * config.stage_tx_bytes
    return Work(
        kv_bytes=packed + scales,
        shared_bytes=passes + operands,
        tensor_bytes=2 * 2 * blocks * block * 2 if config.q_dtype == "bf16" else 0,
        mmas=2 * blocks * BLOCK_DIM // elements_per_mma,
        softmax_warps=4,
        ring_bytes=config.packed_stages * config.packed_stage_bytes or ring,
        blocks=blocks,
        convert=convert,
        convert_warps=4 * config.converters,
    )


def _loops(*trips: int) -> tuple[int, ...]:
    """What goes around once is no loop in the code."""
    return tuple(n for n in trips if n > 1)


def estimate(config: KernelConfig, arch: Arch, sass: str) -> tuple[Figure, ...]:
    """Figures of a decode kernel on the chip of `arch`. Raises InspectError for code that is not a decode's."""
    if isinstance(config, Tcgen05Config):
        work = tcgen05_work(config, arch)
    elif isinstance(config, WgmmaConfig):
        work = wgmma_work(config, arch)
    elif isinstance(config, MmaConfig):
        work = mma_work(config, arch)
    else:
        raise InspectError(f"{config.family}.{config.impl}: expected a decode; nothing else has an estimate")
    loops = find_loops(sass)
    issue, softmax = _loop(loops, is_mma, "MMA"), _loop(loops, is_exp, "exponential")
    issued = issue.executed(lambda loop: work.blocks if loop.count(is_mma) else 1)
    path = (
        issued if softmax is issue else softmax.executed(lambda loop: work.blocks if loop.count(is_tensor_load) else 1)
    )
    tiles = _count(issued, is_mma) / work.mmas
    # A thread of tcgen05 has row_tile scores of a tile; factors of a rescale are fewer exponentials than another tile.
    soft_tiles = tiles if softmax is issue else max(1, _count(path, is_exp) // config.row_tile)
    barriers = _count(issued, is_barrier) / tiles
    if softmax is not issue:
        barriers += _count(path, is_barrier) / soft_tiles
    counts = Counts(
        tiles, _count(issued, is_mma) / tiles, path.total() / soft_tiles, _count(path, is_exp) / soft_tiles, barriers,
        _conversion(loops, work.convert),
    )  # fmt: skip
    return (*_moved(work), *_code(counts), *_pace(config, arch, work, counts))


@dataclass(frozen=True, slots=True)
class Counts:
    """Instructions for one tile, by the code."""

    tiles: float
    """Tiles of one iteration of the loop that issues products."""
    mmas: float
    softmax: float
    exponentials: float
    barriers: float
    converter: float
    """Of one warp of the converters; 0 where there are none."""


def _conversion(loops: Sequence[Loop], trips: tuple[float, ...]) -> float:
    """Instructions of a converter's warp for one tile, whose loops go around as often as `trips` says."""
    if not trips:
        return 0
    others = (is_mma, is_exp, is_copy)
    found = max(
        (x for x in loops if x.count(is_barrier) and not any(x.count(other) for other in others)),
        key=lambda loop: loop.size,
        default=None,
    )
    if found is None:
        raise InspectError("the code has no loop that converts: expected one, by the configuration")
    depth = {id(found): 0}

    def times(loop: Loop) -> int:
        return int(trips[depth[id(loop)]]) if depth[id(loop)] < len(trips) else 1

    pending = [found]
    while pending:
        loop = pending.pop()
        depth.update({id(x): depth[id(loop)] + 1 for x in loop.inner})
        pending += loop.inner
    return found.executed(times).total() * trips[0]


def is_mma(opcode: str) -> bool:
    """A matrix product, of a warp, a warpgroup or the tensor core."""
    return opcode.partition(".")[0] in ("HMMA", "QMMA", "HGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA")


def is_exp(opcode: str) -> bool:
    return opcode.startswith("MUFU.EX2")


def is_barrier(opcode: str) -> bool:
    """An mbarrier's arrival or wait, a named barrier, or a commit of the tensor core's work."""
    return opcode.partition(".")[0] in ("SYNCS", "BAR", "UTCBAR")


def is_copy(opcode: str) -> bool:
    """A bulk copy to shared memory."""
    return opcode.startswith("UTMALDG")


def is_tensor_load(opcode: str) -> bool:
    return opcode.startswith("LDTM")


def _count(opcodes: Counter[str], wanted: Callable[[str], bool]) -> int:
    return sum(number for opcode, number in opcodes.items() if wanted(opcode))


def _loop(loops: Sequence[Loop], wanted: Callable[[str], bool], what: str) -> Loop:
    found = main_loop(loops, wanted)
    if found is None:
        raise InspectError(f"the code has no loop with {what} instructions: expected the main loop of a decode")
    return found


def _moved(work: Work) -> tuple[Figure, ...]:
    return (
        Figure("kv_bytes", work.kv_bytes, "B", "K and V of a tile in memory, block scales included"),
        Figure("shared_per_kv_byte", work.shared_bytes / work.kv_bytes, "B/B", "shared memory written and read"),
        Figure("tensor_per_kv_byte", work.tensor_bytes / work.kv_bytes, "B/B", "tensor memory, but accumulators"),
    )


def _code(counts: Counts) -> tuple[Figure, ...]:
    return (
        Figure("tiles_per_iteration", counts.tiles, "", "tiles of one pass of the loop that issues MMAs"),
        Figure("mmas", counts.mmas, "", "MMA instructions of a warp that issues them"),
        Figure("softmax_path", counts.softmax, "", "instructions of a warp on the softmax's path"),
        Figure("exponentials", counts.exponentials, "", "of them exponentials"),
        Figure("converter_path", counts.converter, "", "instructions of a warp that converts K and V"),
        Figure("barriers", counts.barriers, "", "barrier operations on the paths of MMAs and softmax"),
    )


def _pace(config: DecodeConfig, arch: Arch, work: Work, counts: Counts) -> tuple[Figure, ...]:
    """Clocks of an SM for a tile of one of its CTAs, by what they are spent on; the largest sets the pace."""
    memory = work.kv_bytes / arch.bytes_per_ns * arch.clock_mhz / 1000
    shared = work.shared_bytes / SHARED_BYTES_PER_CLOCK
    issue = (counts.softmax * work.softmax_warps + counts.converter * work.convert_warps) / SCHEDULERS
    flight = work.ring_bytes * config.ctas_per_sm
    return (
        Figure("memory_clocks", memory, "", f"to read the tile at the SM's share of {arch.bandwidth_gbps} GB/s"),
        Figure("shared_clocks", shared, "", f"of shared memory at {SHARED_BYTES_PER_CLOCK} B a clock"),
        Figure("issue_clocks", issue, "", f"to issue softmax and conversion on {SCHEDULERS} schedulers"),
        Figure("busiest_beside_memory", max(shared, issue) / memory, "", "below 1: memory sets the pace"),
        Figure("ring_bytes", flight, "B", "K and V on their way to an SM when all stages are empty"),
        Figure("latency_bytes", arch.latency_bytes, "B", f"an SM needs at {arch.latency_ns} ns of latency (assumed)"),
        Figure("ring_per_latency", flight / arch.latency_bytes, "", "2 keeps memory busy while half is being read"),
    )
