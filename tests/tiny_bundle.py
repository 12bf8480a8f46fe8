"""Bundles of tiny, hand-made cubins: real keys, real launch records and real ELF files, with no code in them.

What the build side reads back from a cubin (architecture, symbols, parameters, registers, stack, shared memory)
is all there, so that tests of packing and verification need no compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Sequence
from pathlib import Path

from cubinery.aot.inspect import occupancy
from cubinery.aot.kernels.paged_decode.abi import declare
from cubinery.runtime.arch import resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.manifest import Artifact, FileRecord, KernelRecord, Manifest, Resources
from cubinery.runtime.ops.paged_decode.config import MmaConfig

REGISTERS = 64


def configs(**axes: object) -> list[KernelConfig]:
    """A decode configuration and what it requires."""
    decode = MmaConfig.from_axes({"head_dim": 128, "page_size": 16, "kv_format": "fp8", **axes})
    return [decode, *decode.requires()]


def cubin(
    record: KernelRecord, sm: int, *, registers: int = REGISTERS, stack: int = 0, params: Sequence[tuple[int, int]] = ()
) -> bytes:
    """An ELF for the CUDA machine that says of one kernel what a compiler would; `params` overrides the record's."""
    name = record.symbol.encode()
    layout = list(params) or [(p.offset, p.size) for p in record.params]
    info = _attribute(0x2F, struct.pack("<II", 1, registers)) + _attribute(0x11, struct.pack("<II", 1, stack))
    own = b"".join(_attribute(0x17, struct.pack("<IHHI", 0, i, at, size << 18)) for i, (at, size) in enumerate(layout))
    strings = b"\0" + name + b"\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 2, 0x10, 0, 0, 0)
    sections = [
        (b"", 0, b"", 0),
        (b".strtab", 3, strings, 0),
        (b".symtab", 2, symbols, 1),
        (b".nv.info", 0x70000000, info, 0),
        (b".nv.info." + name, 0x70000000, own, 0),
    ]
    return _elf(sections, sm)


def _attribute(number: int, payload: bytes) -> bytes:
    return struct.pack("<BBH", 4, number, len(payload)) + payload


def _elf(sections: list[tuple[bytes, int, bytes, int]], sm: int) -> bytes:
    names = b"\0".join(name for name, _, _, _ in sections) + b"\0.shstrtab\0"
    sections = [*sections, (b".shstrtab", 3, names, 0)]
    body, headers, at = b"", b"", 64
    for name, kind, data, link in sections:
        place = 0 if not name else names.index(name + b"\0")
        headers += struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, at, len(data), link, 0, 1, 0)
        body += data
        at += len(data)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    tail = (2, 190, 1, 0, 0, at, sm << 8, 64, 0, 0, 64, len(sections), len(sections) - 1)
    return ident + struct.pack("<HHIQQQIHHHHHH", *tail) + body + headers


def artifact_of(config: KernelConfig, arch_name: str, folder: Path, *, ptx: bool = False) -> Artifact:
    """Write a configuration's tiny cubin into a bundle folder and describe it."""
    arch = resolve(arch_name)
    record = declare(config, arch)
    threads = record.block[0] * record.block[1] * record.block[2]
    fit, _ = occupancy(arch, threads=threads, registers=REGISTERS, smem=record.dynamic_smem)
    resources = Resources(registers=REGISTERS, stack=0, static_smem=0, ctas_per_sm=fit)
    record = dataclasses.replace(record, resources=resources, min_ctas_per_sm=min(record.min_ctas_per_sm, fit))
    key = config.key(arch.name)
    emitted = {}
    if ptx:
        text = _ptx(record).encode()
        emitted["ptx"] = _write(folder, f"emitted/{key}.ptx", text)
    data = cubin(record, arch.sm)
    return Artifact(
        key=key,
        family=config.family,
        impl=config.impl,
        arch=arch.name,
        config=config.canonical().axes(),
        source_digest="0" * 64,
        cubin=_write(folder, f"cubins/{hashlib.sha256(data).hexdigest()}.cubin", data),
        kernels=(record,),
        requires=tuple(other.key(arch.name) for other in config.requires()),
        emitted=emitted,
    )


def _ptx(record: KernelRecord) -> str:
    names = {"pointer": ".u64", "i32": ".u32", "i64": ".u64", "f32": ".f32"}
    params = ", ".join(
        f".param .align 64 .b8 p{i}[128]" if p.kind == "tensor_map" else f".param {names[p.kind]} p{i}"
        for i, p in enumerate(record.params)
    )
    return f".version 9.4\n.target sm_90a\n.visible .entry {record.symbol}({params})\n{{\n ret;\n}}\n"


def _write(folder: Path, name: str, data: bytes) -> FileRecord:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return FileRecord(name, hashlib.sha256(data).hexdigest(), len(data))


def write_manifest(folder: Path, arch: str, artifacts: Sequence[Artifact]) -> Manifest:
    """The manifest of such artifacts, written into the folder."""
    manifest = Manifest(
        arch=arch,
        package_version="0.1.0",
        toolchain={"nvidia-cutlass-dsl": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": "4.8.1"},
        min_driver=13000,
        ptx_version="9.4",
        artifacts=tuple(sorted(artifacts, key=lambda artifact: artifact.key)),
    )
    manifest.write(folder)
    return manifest


def make_bundle(above: Path, arch: str = "sm_110a", *, ptx: bool = False, **axes: object) -> Path:
    """A whole bundle at `above/<arch>`; returns that folder."""
    folder = above / arch
    folder.mkdir(parents=True)
    write_manifest(folder, arch, [artifact_of(config, arch, folder, ptx=ptx) for config in configs(**axes)])
    return folder
