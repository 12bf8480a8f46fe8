"""Loops of a disassembly, and the figures of a decode kernel that follow from them."""

from __future__ import annotations

import pytest

from cubinery.aot.errors import InspectError
from cubinery.aot.estimates import Figure, estimator_of
from cubinery.aot.estimates.paged_decode import estimate, is_exp, is_mma
from cubinery.aot.loops import find_loops, main_loop
from cubinery.runtime.arch import ARCHS
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig
from cubinery.runtime.ops.paged_decode.config import MmaConfig, Tcgen05Config, WgmmaConfig

THOR, B200, H200 = ARCHS["sm_110a"], ARCHS["sm_100a"], ARCHS["sm_90a"]


def listing(text: str) -> str:
    """A disassembly: an instruction a line, labels with a colon."""
    lines = [line.strip() for line in text.strip().splitlines()]
    return "\n".join(
        line if line.endswith(":") else f"        /*{16 * n:04x}*/                   {line} ;"
        for n, line in enumerate(lines)
    ).replace("                   @", "              @")


NESTED = listing("""
    kernel:
    MOV R1, R2
    .L_outer:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2
    @!P0 BRA `(.L_cold)
    .L_warm:
    HMMA.16816.F32 R4, R4, R4, R4
    .L_inner:
    MUFU.EX2 R5, R5
    BRA.U UP0, `(.L_inner)
    HMMA.16816.F32 R4, R4, R4, R4
    @P1 BRA `(.L_outer)
    EXIT
    .L_cold:
    SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2
    @!P0 BRA `(.L_cold)
    BRA `(.L_warm)
    .L_end:
    BRA `(.L_end)
""")
"""A loop in a loop; its wait spins behind the end, where the assembler puts it, and an end that nobody reaches."""


def test_a_loop_is_what_leads_back_wherever_it_lies() -> None:
    outer, *others = find_loops(NESTED)
    assert outer.header == ".L_outer"
    assert [loop.header for loop in others] == [".L_inner", ".L_cold"]
    assert (outer.counts["HMMA.16816.F32"], outer.counts["MUFU.EX2"]) == (2, 1)
    assert outer.counts["SYNCS.PHASECHK.TRANS64.TRYWAIT"] == 1, "the wait that spins is not part of an iteration"
    assert outer.size == 8  # wait, branch, two products, exponential, three branches
    assert [loop.header for loop in outer.inner] == [".L_inner"], "a wait that spins is no loop inside"
    assert outer.own.total() == 6
    executed = outer.executed(lambda loop: 10 if loop.header == ".L_inner" else 0)
    assert (executed["MUFU.EX2"], executed.total()) == (10, 26)


def test_the_main_loop_has_most_and_is_the_innermost() -> None:
    loops = find_loops(NESTED)
    inner, outer = main_loop(loops, is_exp), main_loop(loops, is_mma)
    assert inner is not None
    assert outer is not None
    assert (inner.header, outer.header) == (".L_inner", ".L_outer")
    assert main_loop(loops, lambda opcode: opcode == "UTCQMMA") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("// nothing", "holds no instruction"),
        (listing("kernel:\nBRA `(.L_gone)"), "leads to no known label: BRA .L_gone"),
        (listing("kernel:\nBRX R2 -0x10"), "leads to no known label: BRX"),
    ],
)
def test_what_is_no_disassembly_is_refused(text: str, message: str) -> None:
    with pytest.raises(InspectError) as caught:
        find_loops(text)
    assert message in str(caught.value)


def tensor_code(mmas: int, exps: int, others: int, convert: str = "") -> str:
    """One loop that issues products and one of the softmax, then what converts."""
    return listing(
        "kernel:\n.L_mma:\n"
        + "UTCQMMA gdesc[UR4], gdesc[UR8], tmem[UR5], tmem[UR10], idesc[UR11], UP0\n" * mmas
        + "UTCBAR [UR4], URZ\n@P0 BRA `(.L_mma)\n.L_softmax:\n"
        + "MUFU.EX2 R5, R5\n" * exps
        + "FADD R1, R1, R2\n" * others
        + "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ\nBAR.SYNC.DEFER_BLOCKING 0x1, 0x80\n@P0 BRA `(.L_softmax)\n"
        + convert
        + "EXIT"
    )


CONVERT = """.L_stages:
SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2
.L_blocks:
STTM.x16 tmem[UR4], R4
@P0 BRA `(.L_blocks)
@P1 BRA `(.L_stages)
"""
"""A loop in a loop, of two instructions each."""


def values(figures: tuple[Figure, ...]) -> dict[str, float]:
    assert all(figure.meaning for figure in figures)
    return {figure.name: figure.value for figure in figures}


def test_figures_of_the_tensor_core_decode() -> None:
    config = Tcgen05Config(head_dim=256, page_size=16, kv_format="fp8", q_dtype="e4m3")
    found = values(estimate(config, THOR, tensor_code(16, 20, 100)))
    assert (found["mmas"], found["tiles_per_iteration"]) == (16, 1)
    assert (found["softmax_path"], found["exponentials"], found["barriers"]) == (123, 20, 3)
    assert found["kv_bytes"] == 2 * 128 * 256
    # Written and read once; Q, and P written once and read for both blocks of V.
    assert found["shared_per_kv_byte"] == pytest.approx(2 + (16 * 256 + 3 * 16 * 128) / 65536)
    assert found["tensor_per_kv_byte"] == 0
    assert found["memory_clocks"] == pytest.approx(65536 / (273 / 20) * 1.575)
    assert found["converter_path"] == 0
    assert found["issue_clocks"] == 123
    assert found["ring_bytes"] == 2 * 4 * 16384
    assert found["ring_per_latency"] == pytest.approx(131072 / 13650)
    assert found["busiest_beside_memory"] < 1


def test_two_tiles_an_iteration_are_found() -> None:
    config = Tcgen05Config(head_dim=256, page_size=16, kv_format="fp8", q_dtype="e4m3")
    found = values(estimate(config, THOR, tensor_code(32, 40, 200)))
    assert (found["mmas"], found["tiles_per_iteration"]) == (16, 2)
    assert found["softmax_path"] == (40 + 200 + 3) / 2


@pytest.mark.parametrize(
    ("kv_format", "q_dtype", "shared", "tensor"),
    [("fp8", "e4m3", 2, 0), ("e2m3", "e4m3", 8 / 3, 0), ("e2m1", "e4m3", 4, 0), ("fp8", "bf16", 2, 4)],
)
def test_padded_and_converted_codes_move_more(kv_format: str, q_dtype: str, shared: float, tensor: float) -> None:
    """K and V alone: a padded code is a byte in shared memory; a widened one is two in tensor memory, twice."""
    config = Tcgen05Config(head_dim=512, page_size=16, kv_format=kv_format, q_dtype=q_dtype)
    found = values(estimate(config, THOR, tensor_code(32, 16, 9, CONVERT)))
    operands = (config.q_bytes + 5 * config.p_bytes) / found["kv_bytes"]
    assert found["shared_per_kv_byte"] == pytest.approx(shared + operands)
    assert found["tensor_per_kv_byte"] == tensor
    # Four blocks of a tile's K, in the inner loop.
    assert found["converter_path"] == (2 + 4 * 2 if tensor else 0)
    assert found["issue_clocks"] == found["softmax_path"] + found["converter_path"]


def test_nvfp4_is_written_and_read_twice() -> None:
    config = Tcgen05Config(head_dim=128, page_size=16, kv_format="nvfp4", q_dtype="e4m3")
    found = values(estimate(config, B200, tensor_code(8, 16, 9, CONVERT)))
    assert found["converter_path"] == 2 * (2 + 4 * 2), "a stage of K and one of V, a block each, in four steps"
    with pytest.raises(InspectError, match="no loop that converts"):
        estimate(config, B200, tensor_code(8, 16, 9))
    assert found["kv_bytes"] == 2 * 128 * (64 + 8)
    moved = 2 * (2 * 128 * (64 + 8)) + 2 * (2 * 128 * 128) + config.q_bytes + 2 * config.p_bytes
    assert found["shared_per_kv_byte"] == pytest.approx(moved / found["kv_bytes"])
    assert found["ring_bytes"] == 2 * 2 * 128 * (64 + 8)


@pytest.mark.parametrize(("row_tile", "mmas"), [(16, 64), (8, 32)])
def test_figures_of_the_portable_decode(row_tile: int, mmas: int) -> None:
    """64 products a tile for each of four warps of 32 keys: 16 x 8 x 16 each, of S and of PV; half for 8 rows."""
    config = MmaConfig(head_dim=128, page_size=16, kv_format="fp8", row_tile=row_tile)
    code = listing("kernel:\n.L:\n" + "HMMA.16816.F32 R4\n" * 32 + "MUFU.EX2 R5, R5\n" * 8 + "@P0 BRA `(.L)\nEXIT")
    found = values(estimate(config, H200, code))
    assert (found["mmas"], found["tiles_per_iteration"]) == (mmas, 32 / mmas)
    assert found["exponentials"] == 8 * mmas / 32
    assert found["softmax_path"] == mmas / 32 * 41
    assert found["shared_per_kv_byte"] == 2


@pytest.mark.parametrize(("row_tile", "mmas", "shared"), [(64, 12, 6), (128, 24, 8)])
def test_figures_of_the_warpgroup_decode(row_tile: int, mmas: int, shared: float) -> None:
    """A step of 64 keys is eight products of S and four of PV; both groups of 64 rows read what is widened once."""
    config = WgmmaConfig(head_dim=128, page_size=16, kv_format="fp8", row_tile=row_tile)
    code = listing(
        "kernel:\n.L:\n" + "HGMMA.64x64x16.F32 R4\n" * 12 + "MUFU.EX2 R5, R5\n" * 34 + "@P0 BRA `(.L)\n"
        ".L_widen:\nSYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R1], R2\nSTS.128 [R1], R4\n@P1 BRA `(.L_widen)\nEXIT"
    )
    found = values(estimate(config, H200, code))
    assert (found["mmas"], found["tiles_per_iteration"]) == (mmas, 12 / mmas)
    assert found["shared_per_kv_byte"] == shared
    assert found["converter_path"] == 3
    assert found["issue_clocks"] == (47 * (mmas / 12) * 8 + 3 * 4) / 4


def test_what_has_no_estimate_says_so() -> None:
    assert estimator_of("paged_decode") is estimate
    assert estimator_of("no_such_family") is None
    with pytest.raises(InspectError, match=r"paged_decode\.append: expected a decode; nothing else"):
        estimate(AppendConfig(head_dim=128, kv_format="fp8"), THOR, NESTED)
    config = Tcgen05Config(head_dim=128, page_size=16, kv_format="fp8", q_dtype="e4m3")
    with pytest.raises(InspectError, match="no loop with MMA instructions"):
        estimate(config, THOR, listing("kernel:\nEXIT"))
