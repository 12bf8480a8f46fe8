"""Small ELF files with exactly what the readers look at, so that a gate can be tripped without a compiler."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from cubinery.runtime.arch import Arch
from cubinery.runtime.manifest import KernelRecord

Param = tuple[int, int]
PARAM_BASE = 0x380


def cubin(
    *,
    sm: int = 110,
    target: str | None = "sm_110a",
    symbols: Sequence[str] = ("toy_0",),
    registers: int = 32,
    stack: int = 0,
    shared: int = 0,
    params: Sequence[Param] = (),
    block: tuple[int, int, int] | None = (128, 1, 1),
    base: int = PARAM_BASE,
    machine: int = 190,
    payload: bytes = b"",
) -> bytes:
    """An ELF for the CUDA machine; `params` are (size, alignment); `shared` counts the reserved KiB."""
    strings, symtab = b"\0", b"\0" * 24
    sections: list[tuple[str, int, bytes, int, int]] = []
    common = b""
    for index, symbol in enumerate(symbols, 1):
        symtab += struct.pack("<IBBHQQ", len(strings), 0x12, 0x10, 1, 0, 16)
        strings += symbol.encode() + b"\0"
        common += struct.pack("<BBHII", 4, 0x2F, 8, index, registers)
        common += struct.pack("<BBHII", 4, 0x11, 8, index, stack)
        own, at, laid = b"", base, []
        for size, align in params:
            at = -(-at // align) * align
            laid.append((at - base, size))
            at += size
        for ordinal, (offset, size) in reversed(list(enumerate(laid))):
            own += struct.pack("<BBHIHHI", 4, 0x17, 12, 0, ordinal, offset, size << 18 | 0xF000)
        own += struct.pack("<BBHIHH", 4, 0x0A, 8, 9, base, at - base)
        own += struct.pack("<BBH", 3, 0x1B, 255)
        if block is not None:
            own += struct.pack("<BBHIII", 4, 0x10, 12, *block)
        sections.append((f".nv.info.{symbol}", 0x70000000, own, 0, 0))
        sections.append((f".text.{symbol}", 1, b"\0" * 16 + payload, 0, 0))
        if shared:
            sections.append((f".nv.shared.{symbol}", 8, b"", 0, shared))
    if target is not None:
        note = (
            b"NVIDIA Corp\0ptxas\0Cuda compilation tools, release 13.4, V13.4.59\0-O 3 -arch "
            + target.encode()
            + b" \0"
        )
        sections.append((".note.nv.tkinfo", 7, note, 0, 0))
    sections.append((".nv.info", 0x70000000, common, 0, 0))
    sections = [("", 0, b"", 0, 0), (".shstrtab", 3, b"", 0, 0), (".strtab", 3, strings, 0, 0),
                (".symtab", 2, symtab, 2, 0), *sections]  # fmt: skip
    names, offsets = b"", []
    for name, *_ in sections:
        offsets.append(len(names))
        names += name.encode() + b"\0"
    sections[1] = (".shstrtab", 3, names, 0, 0)
    body, headers = b"", b""
    for name_at, (_, kind, data, link, size) in zip(offsets, sections, strict=True):
        headers += struct.pack("<IIQQQQIIQQ", name_at, kind, 0, 0, 64 + len(body), size or len(data), link, 0, 4, 0)
        body += data
    head = b"\x7fELF\x02\x01\x01\x41\x08" + b"\0" * 7
    head += struct.pack("<HHIQQQI", 2, machine, 1, 0, 0, 64 + len(body), sm << 8 | 0x06000004)
    head += struct.pack("<HHHHHH", 64, 56, 0, 64, len(sections), 1)
    return head + body + headers


def ptx(
    *,
    symbol: str = "toy_0",
    params: Sequence[Param] = (),
    directive: str = ".reqntid 128, 1, 1",
    target: str = "sm_110a",
    version: str = "9.4",
) -> str:
    """The head of a PTX text as the compiler writes it; `params` are (size, alignment)."""
    spelled = {(8, 8): ".u64 .ptr .global .align 16 {}", (4, 4): ".u32 {}"}
    declared = ",\n\t".join(
        ".param " + spelled.get((size, align), f".align {align} .b8 {{}}[{size}]").format(f"{symbol}_param_{i}")
        for i, (size, align) in enumerate(params)
    )
    return (
        f"//\n// Generated\n//\n\n.version {version}\n.target {target}\n.address_size 64\n\n"
        f".visible .entry {symbol}(\n\t{declared}\n)\n{directive}\n{{\n\tret;\n}}\n"
    )


def of_record(record: KernelRecord, arch: Arch, payload: bytes = b"") -> tuple[bytes, str]:
    """A cubin and PTX that keep every promise of a launch record."""
    params = [(p.size, p.align) for p in record.params]
    block = record.block
    made = cubin(sm=arch.sm, target=arch.name, symbols=[record.symbol], params=params, block=block, payload=payload)
    directive = f".reqntid {block[0]}, {block[1]}, {block[2]}"
    return made, ptx(symbol=record.symbol, params=params, directive=directive, target=arch.name)
