"""Gates: each proves one property of a compiled kernel before it may enter a bundle."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from cubinery.aot.errors import (
    AbiGateError,
    ArchGateError,
    BlockGateError,
    OccupancyGateError,
    RegisterGateError,
    SharedMemoryGateError,
    StackGateError,
    SymbolGateError,
    TensorMemoryGateError,
)
from cubinery.aot.inspect import (
    CubinInfo,
    KernelInfo,
    occupancy,
    ptx_allocates_tensor_memory,
    ptx_block,
    ptx_params,
    read_cubin,
)
from cubinery.aot.spec import Gates
from cubinery.runtime.arch import SMEM_RESERVED_PER_CTA, Arch
from cubinery.runtime.manifest import KernelRecord, ParamSpec, Resources

MAX_REGISTERS = 255
"""Registers one thread can have."""


@dataclass(frozen=True, slots=True)
class Inspected:
    """What the gates read back: the resources for the manifest, and what the report shows beside."""

    resources: Resources
    params: tuple[ParamSpec, ...]
    """The declared parameters at the offsets that the cubin gives them, which loaded code reports too."""
    limited_by: str
    """What keeps more CTAs from fitting an SM."""
    toolkit: tuple[int, int] | None


def check(key: str, arch: Arch, record: KernelRecord, gates: Gates, cubin: bytes, ptx: str) -> Inspected:
    """Pass every gate or raise the first GateError; InspectError where the bytes are malformed.

    `record` is the declared launch; `key` only names the artifact in messages.
    """
    info = read_cubin(cubin)
    _check_arch(key, arch, info)
    kernel = _check_symbol(key, record, info)
    _check_abi(key, record, kernel, ptx)
    _check_block(key, record, kernel, ptx)
    _check_tensor_memory(key, arch, record, ptx)
    return _check_resources(key, arch, record, gates, kernel, info)


def _check_arch(key: str, arch: Arch, info: CubinInfo) -> None:
    if info.sm != arch.sm:
        hint = ""
        if (info.sm, arch.sm) == (101, 110):
            hint = ": CUDA 12 named Thor so; install nvidia-cutlass-dsl[cu13]"
        raise ArchGateError(f"{key}: the cubin is for SM {info.sm}, expected {arch.sm} ({arch.name}){hint}")
    if info.arch is not None and info.arch != arch.name:
        raise ArchGateError(f"{key}: the cubin was assembled for {info.arch}, expected {arch.name}")


def _check_symbol(key: str, record: KernelRecord, info: CubinInfo) -> KernelInfo:
    if tuple(info.kernels) != (record.symbol,):
        held = ", ".join(info.kernels) or "none"
        raise SymbolGateError(f"{key}: the cubin's kernels are {held}: expected {record.symbol} and no other")
    return info.kernels[record.symbol]


def _check_abi(key: str, record: KernelRecord, kernel: KernelInfo, ptx: str) -> None:
    compiled = ptx_params(ptx, record.symbol)
    if len(compiled) != len(record.params):
        raise AbiGateError(
            f"{key}: {record.symbol} takes {len(compiled)} parameters, but {len(record.params)} are declared"
        )
    for i, (declared, (size, align)) in enumerate(zip(record.params, compiled, strict=True)):
        if (declared.size, declared.align) != (size, align):
            raise AbiGateError(
                f"{key}: parameter {i} ({declared.name}) has size {size} and alignment {align} in the PTX, "
                f"declared {declared.kind} with size {declared.size} and alignment {declared.align}"
            )
    if len(kernel.params) != len(record.params):
        raise AbiGateError(
            f"{key}: the cubin has {len(kernel.params)} parameters, but {len(record.params)} are declared"
        )
    address = kernel.param_base
    for i, (declared, read) in enumerate(zip(record.params, kernel.params, strict=True)):
        address = -(-address // declared.align) * declared.align
        expected = (address - kernel.param_base, declared.size)
        if read != expected:
            raise AbiGateError(
                f"{key}: parameter {i} ({declared.name}) lies at offset {read[0]} with size {read[1]} in the cubin, "
                f"the declared parameters put it at {expected[0]} with size {expected[1]}"
            )
        address += declared.size


def _check_block(key: str, record: KernelRecord, kernel: KernelInfo, ptx: str) -> None:
    declared = ptx_block(ptx, record.symbol)
    required = [kernel.block] if kernel.block is not None else []
    if declared is not None and declared[0] == "reqntid":
        required.append(declared[1])
    for block in required:
        if block != record.block:
            raise BlockGateError(f"{key}: the code requires block {block}, but {record.block} is declared")
    threads = record.block[0] * record.block[1] * record.block[2]
    if declared is not None and declared[0] == "maxntid":
        most = declared[1][0] * declared[1][1] * declared[1][2]
        if threads > most:
            raise BlockGateError(f"{key}: block {record.block} has {threads} threads, the code allows {most}")
    if not 1 <= threads <= 1024:
        raise BlockGateError(f"{key}: block {record.block} has {threads} threads: expected 1 to 1024")


def _check_tensor_memory(key: str, arch: Arch, record: KernelRecord, ptx: str) -> None:
    if ptx_allocates_tensor_memory(ptx) != bool(record.tmem_columns):
        does = "allocates no" if record.tmem_columns else "allocates"
        raise TensorMemoryGateError(f"{key}: the code {does} tensor memory, {record.tmem_columns} columns are declared")
    if record.tmem_columns > arch.tmem_columns:
        raise TensorMemoryGateError(
            f"{key}: a CTA needs {record.tmem_columns} columns of tensor memory, {arch.name} has {arch.tmem_columns}"
        )


def _check_resources(
    key: str, arch: Arch, record: KernelRecord, gates: Gates, kernel: KernelInfo, info: CubinInfo
) -> Inspected:
    most = MAX_REGISTERS if gates.max_registers is None else gates.max_registers
    if kernel.registers > most:
        raise RegisterGateError(f"{key}: {kernel.registers} registers per thread, at most {most} allowed")
    if kernel.stack > gates.max_stack:
        raise StackGateError(
            f"{key}: {kernel.stack} bytes of stack per thread (spills or indexed arrays), "
            f"at most {gates.max_stack} allowed"
        )
    smem = kernel.static_smem + record.dynamic_smem
    if smem > arch.smem_per_cta:
        raise SharedMemoryGateError(
            f"{key}: a CTA needs {smem} bytes of shared memory ({record.dynamic_smem} dynamic), "
            f"{arch.name} gives at most {arch.smem_per_cta}"
        )
    threads = record.block[0] * record.block[1] * record.block[2]
    fit, limit = occupancy(
        arch, threads=threads, registers=kernel.registers, smem=smem, tmem_columns=record.tmem_columns
    )
    wanted = record.min_ctas_per_sm if gates.min_ctas_per_sm is None else gates.min_ctas_per_sm
    if fit < wanted:
        raise OccupancyGateError(
            f"{key}: {fit} CTA{'s' * (fit != 1)} fit an SM of {arch.name}, at least {wanted} needed; limited by "
            f"{limit} ({threads} threads of {kernel.registers} registers, {smem} + {SMEM_RESERVED_PER_CTA} bytes of "
            f"shared memory, {record.tmem_columns} columns of tensor memory)"
        )
    placed = zip(record.params, kernel.params, strict=True)
    return Inspected(
        resources=Resources(kernel.registers, kernel.stack, kernel.static_smem, fit),
        params=tuple(dataclasses.replace(spec, offset=offset) for spec, (offset, _) in placed),
        limited_by=limit,
        toolkit=info.toolkit,
    )
