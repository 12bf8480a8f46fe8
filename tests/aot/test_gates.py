"""Each gate with an artifact that trips it, and one that passes them all."""

from __future__ import annotations

from typing import Any

import fake_cubin
import pytest

from cubinery.aot import gates
from cubinery.aot.errors import (
    AbiGateError,
    ArchGateError,
    BlockGateError,
    GateError,
    InspectError,
    OccupancyGateError,
    RegisterGateError,
    SharedMemoryGateError,
    StackGateError,
    SymbolGateError,
    TensorMemoryGateError,
)
from cubinery.aot.inspect import occupancy
from cubinery.aot.spec import Gates
from cubinery.runtime.arch import ARCHS, resolve
from cubinery.runtime.manifest import KernelRecord, Resources, pack_params

THOR, H200 = resolve("thor"), resolve("h200")
PARAMS = pack_params(("x", "pointer"), ("n", "i32"), ("x_map", "tensor_map"), ("f", "f32"))
LAID_OUT = [(p.size, p.align) for p in PARAMS]


ALLOCATES = ".reqntid 128, 1, 1\n{\n\t@%p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 512;\n}"


def record(**changes: Any) -> KernelRecord:
    base = {"role": "r", "symbol": "toy_0", "block": (128, 1, 1), "grid": ("n", 1, 1), "params": PARAMS}
    return KernelRecord(**{**base, **changes})


def check(
    *,
    arch: str = "thor",
    launch: KernelRecord | None = None,
    limits: Gates | None = None,
    ptx: dict | None = None,
    **elf: Any,
) -> gates.Inspected:
    target = resolve(arch)
    cubin = fake_cubin.cubin(**{"sm": target.sm, "target": target.name, "params": LAID_OUT, **elf})
    text = fake_cubin.ptx(**{"params": LAID_OUT, **(ptx or {})})
    return gates.check("the-key", target, launch or record(), limits or Gates(), cubin, text)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_kernel_that_keeps_every_promise_passes(arch: str) -> None:
    found = check(arch=arch, launch=record(dynamic_smem=4096, min_ctas_per_sm=2), shared=1024 + 256, registers=64)
    fit, limit = occupancy(resolve(arch), threads=128, registers=64, smem=4096 + 256)
    assert found.resources == Resources(registers=64, stack=0, static_smem=256, ctas_per_sm=fit)
    assert (found.limited_by, found.toolkit) == (limit, (13, 4))


def test_parameters_are_laid_out_from_the_bank_s_base() -> None:
    # On sm_90 parameters start at 528: a tensor map is aligned by address, not by offset.
    leading = pack_params(("x_map", "tensor_map"), ("n", "i32"))
    sizes = [(p.size, p.align) for p in leading]
    found = check(arch="h200", launch=record(params=leading), params=sizes, base=0x210, ptx={"params": sizes})
    assert found.resources.registers == 32


TRIPPED: dict[str, tuple[type[GateError], str, dict[str, Any]]] = {
    "CUDA 12's Thor": (ArchGateError, "is for SM 101, expected 110 .*install nvidia-cutlass-dsl.cu13", {"sm": 101}),
    "the host's arch": (ArchGateError, "is for SM 100, expected 110", {"sm": 100, "target": "sm_100a"}),
    "the family target": (ArchGateError, "assembled for sm_110f, expected sm_110a", {"target": "sm_110f"}),
    "the plain target": (ArchGateError, "assembled for sm_110, expected sm_110a", {"target": "sm_110"}),
    "another symbol": (SymbolGateError, "kernels are toy_1: expected toy_0", {"symbols": ["toy_1"]}),
    "no symbol": (SymbolGateError, "kernels are none: expected toy_0", {"symbols": []}),
    "one symbol too many": (
        SymbolGateError,
        "toy_0, toy_1: expected toy_0 and no other",
        {"symbols": ["toy_0", "toy_1"]},
    ),
    "one parameter fewer": (AbiGateError, "takes 3 parameters, but 4 are declared", {"ptx": {"params": LAID_OUT[:3]}}),
    "one parameter more": (AbiGateError, "takes 5 parameters, but 4", {"ptx": {"params": [*LAID_OUT, (4, 4)]}}),
    "no parameter": (AbiGateError, "takes 0 parameters, but 4", {"ptx": {"params": []}}),
    "a parameter's size": (
        AbiGateError,
        r"parameter 1 \(n\) has size 8 and alignment 8 in the PTX, declared i32 with size 4",
        {"ptx": {"params": [LAID_OUT[0], (8, 8), *LAID_OUT[2:]]}},
    ),
    "a parameter's alignment": (
        AbiGateError,
        r"parameter 2 \(x_map\) has size 128 and alignment 128 in the PTX, declared tensor_map",
        {"ptx": {"params": [*LAID_OUT[:2], (128, 128), LAID_OUT[3]]}},
    ),
    "parameters swapped": (
        AbiGateError,
        r"parameter 0 \(x\) has size 4",
        {"ptx": {"params": [LAID_OUT[1], LAID_OUT[0], *LAID_OUT[2:]]}},
    ),
    "the cubin's parameters": (
        AbiGateError,
        r"parameter 1 \(n\) lies at offset 8 with size 8 in the cubin",
        {"params": [LAID_OUT[0], (8, 8), *LAID_OUT[2:]]},
    ),
    "the cubin's parameter count": (AbiGateError, "the cubin has 3 parameters, but 4", {"params": LAID_OUT[:3]}),
    "the cubin's block": (BlockGateError, r"requires block \(64, 1, 1\), but \(128, 1, 1\)", {"block": (64, 1, 1)}),
    "the PTX's block": (
        BlockGateError,
        r"requires block \(64, 2, 1\), but",
        {"ptx": {"directive": ".reqntid 64, 2"}, "block": None},
    ),
    "a block over the most": (
        BlockGateError,
        "128 threads, the code allows 96",
        {"ptx": {"directive": ".maxntid 96"}, "block": None},
    ),
    "a block that no chip takes": (
        BlockGateError,
        "1056 threads: expected 1 to 1024",
        {"launch": record(block=(1056, 1, 1)), "block": None, "ptx": {"directive": ""}},
    ),
    "registers over the limit": (
        RegisterGateError,
        "41 registers per thread, at most 40",
        {"limits": Gates(max_registers=40), "registers": 41},
    ),
    "stack by default": (StackGateError, "8 bytes of stack per thread .*at most 0", {"stack": 8}),
    "stack over the limit": (StackGateError, "72 bytes of stack", {"stack": 72, "limits": Gates(max_stack=64)}),
    "dynamic shared memory": (
        SharedMemoryGateError,
        "needs 232449 bytes of shared memory .*gives at most 232448",
        {"launch": record(dynamic_smem=232449)},
    ),
    "static and dynamic shared memory": (
        SharedMemoryGateError,
        "needs 232452 bytes",
        {"launch": record(dynamic_smem=232448), "shared": 1028},
    ),
    "occupancy by registers": (
        OccupancyGateError,
        "1 CTA fit an SM of sm_110a, at least 2 needed; limited by registers",
        {
            "launch": record(block=(512, 1, 1), min_ctas_per_sm=2),
            "registers": 72,
            "block": (512, 1, 1),
            "ptx": {"directive": ""},
        },
    ),
    "occupancy by threads": (
        OccupancyGateError,
        "limited by threads",
        {"launch": record(min_ctas_per_sm=13), "registers": 16},
    ),
    "occupancy by shared memory": (
        OccupancyGateError,
        "limited by shared memory .*115713 . 1024 bytes",
        {"launch": record(min_ctas_per_sm=2, dynamic_smem=115713)},
    ),
    "occupancy by tensor memory": (
        OccupancyGateError,
        "1 CTA fit an SM of sm_110a, at least 2 needed; limited by tensor memory .*, 512 columns of tensor memory",
        {"launch": record(min_ctas_per_sm=2, tmem_columns=512), "ptx": {"directive": ALLOCATES}},
    ),
    "tensor memory that nobody declared": (
        TensorMemoryGateError,
        "the code allocates tensor memory, 0 columns are declared",
        {"ptx": {"directive": ALLOCATES}},
    ),
    "tensor memory that nobody allocates": (
        TensorMemoryGateError,
        "the code allocates no tensor memory, 64 columns are declared",
        {"launch": record(tmem_columns=64)},
    ),
    "tensor memory that the chip lacks": (
        TensorMemoryGateError,
        "needs 64 columns of tensor memory, sm_90a has 0",
        {"arch": "h200", "launch": record(tmem_columns=64), "ptx": {"directive": ALLOCATES}},
    ),
    "a register file that cannot hold one": (
        OccupancyGateError,
        "0 CTAs fit",
        {"launch": record(block=(1024, 1, 1)), "registers": 136, "block": (1024, 1, 1), "ptx": {"directive": ""}},
    ),
    "occupancy by the spec": (
        OccupancyGateError,
        "at least 13 needed",
        {"limits": Gates(min_ctas_per_sm=13), "registers": 16},
    ),
}


def test_report_1_code_under_cuda_12s_name_of_thor_is_refused_with_the_cure() -> None:
    """A CUDA 12 toolkit turns a request for sm_110a into code for SM 101, which loads on no Thor."""
    with pytest.raises(ArchGateError, match=r"is for SM 101, expected 110 \(sm_110a\): .*nvidia-cutlass-dsl\[cu13\]"):
        check(arch="sm_101a", sm=101, target="sm_101a")


@pytest.mark.parametrize(("error", "message", "made"), TRIPPED.values(), ids=TRIPPED)
def test_each_gate_is_tripped(error: type[GateError], message: str, made: dict[str, Any]) -> None:
    with pytest.raises(error, match=message) as caught:
        check(**made)
    assert type(caught.value) is error
    assert str(caught.value).startswith("the-key: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "made",
    [
        {"limits": Gates(max_registers=40), "registers": 40},
        {"limits": Gates(max_stack=64), "stack": 64},
        {"launch": record(dynamic_smem=232448)},
        {"launch": record(min_ctas_per_sm=2, dynamic_smem=115712)},
        {"launch": record(min_ctas_per_sm=12), "registers": 40},
        {"ptx": {"directive": ".maxntid 128"}, "block": None},
        {"target": None},
        {"launch": record(block=(1024, 1, 1)), "registers": 64, "block": (1024, 1, 1), "ptx": {"directive": ""}},
    ],
)
def test_a_limit_itself_is_allowed(made: dict[str, Any]) -> None:
    assert check(**made).resources.ctas_per_sm >= 1


def test_a_spec_may_ask_for_less_occupancy_than_the_kernel_declares() -> None:
    wide = {"launch": record(min_ctas_per_sm=13), "registers": 16}
    assert check(**wide, limits=Gates(min_ctas_per_sm=12)).resources.ctas_per_sm == 12


def test_what_is_no_cubin_or_no_ptx_is_an_inspect_error() -> None:
    good = fake_cubin.cubin(params=LAID_OUT)
    with pytest.raises(InspectError, match="not a cubin"):
        gates.check("k", THOR, record(), Gates(), b"", fake_cubin.ptx(params=LAID_OUT))
    with pytest.raises(InspectError, match="ELF machine 62, expected 190"):
        check(machine=62)
    with pytest.raises(InspectError, match="the PTX has no entry 'toy_0'"):
        gates.check("k", THOR, record(), Gates(), good, "")


@pytest.mark.parametrize(
    ("threads", "registers", "smem", "expected"),
    [
        # Worked by hand: 65536 registers, in quarters of 16384; 64 warps; 228 KiB with 1 KiB reserved a CTA.
        (128, 24, 0, (16, "threads")),
        (256, 128, 0, (2, "registers")),
        (160, 168, 0, (2, "registers")),  # 168 * 32 = 5376: 3 warps a quarter, 12 an SM
        (160, 129, 0, (2, "registers")),  # 129 * 32 rounds up to 4352: 3 warps a quarter
        (160, 128, 0, (3, "registers")),
        (384, 168, 0, (1, "registers")),
        (1024, 65, 0, (0, "registers")),
        (32, 16, 0, (32, "resident CTAs")),
        (128, 32, 113 * 1024, (2, "shared memory")),
        (128, 32, 113 * 1024 + 1, (1, "shared memory")),
        (128, 32, 227 * 1024, (1, "shared memory")),
    ],
)
def test_occupancy_of_worked_examples(threads: int, registers: int, smem: int, expected: tuple[int, str]) -> None:
    assert occupancy(H200, threads=threads, registers=registers, smem=smem) == expected


def test_tensor_memory_bounds_what_fits() -> None:
    few = {"threads": 128, "registers": 32, "smem": 0}
    assert occupancy(THOR, **few, tmem_columns=128) == (4, "tensor memory")
    assert occupancy(THOR, **few, tmem_columns=512) == (1, "tensor memory")
    assert occupancy(THOR, **few, tmem_columns=32) == (12, "threads")


def test_the_budget_of_the_arch_table_and_the_occupancy_gate_agree() -> None:
    for arch in ARCHS.values():
        for ctas in (1, 2, 3, 4):
            budget = arch.smem_budget(ctas)
            assert occupancy(arch, threads=32, registers=32, smem=budget)[0] >= ctas
            if ctas > 1:
                assert occupancy(arch, threads=32, registers=32, smem=budget + 128)[0] < ctas
