"""Readers of compiled code: what a cubin's ELF and a PTX text say about arch, parameters and resources.

The layout of NVIDIA's ELF attributes (`.nv.info`) was read off cubins with `cuobjdump` and `readelf`;
tests compare these readers with `cuobjdump --dump-resource-usage`.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cubinery.aot.errors import InspectError
from cubinery.runtime.arch import SMEM_RESERVED_PER_CTA, Arch

EM_CUDA = 190
_STT_FUNC, _STO_ENTRY = 2, 0x10
_REGCOUNT, _FRAME_SIZE = 0x2F, 0x11
_KPARAM_INFO, _REQNTID, _PARAM_CBANK = 0x17, 0x10, 0x0A
_REGISTER_UNIT = 256
"""Registers are handed to a warp in units of this many."""
_SMEM_UNIT = 128
_SUB_PARTITIONS = 4
"""Quarters of an SM, each with its own registers; a warp lives in one of them."""


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    offset: int
    size: int
    link: int
    no_bits: bool


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """What a cubin says of one kernel. Sizes in bytes."""

    symbol: str
    registers: int
    stack: int
    static_smem: int
    params: tuple[tuple[int, int], ...]
    """(offset, size) of each parameter in order, counted from `param_base`."""
    param_base: int
    """Where parameters start in the constant bank. Alignment is that of the address, base included: on
    sm_90 the base is 528, so that a tensor map (alignment 64) lies at offset 48 even as the first."""
    block: tuple[int, int, int] | None
    """The block size that the code requires, where it says so."""


@dataclass(frozen=True, slots=True)
class CubinInfo:
    """What a cubin says of itself."""

    sm: int
    arch: str | None
    """The exact `-arch` it was assembled for (tells `sm_100a` from `sm_100f`), where recorded."""
    toolkit: tuple[int, int] | None
    """CUDA release of the assembler, where recorded."""
    kernels: dict[str, KernelInfo]


class _Elf:
    """Sections and symbols of a 64-bit little-endian ELF for the CUDA machine."""

    def __init__(self, data: bytes) -> None:
        if len(data) < 64 or data[:4] != b"\x7fELF":
            raise InspectError(f"not a cubin: expected an ELF file, found {bytes(data[:4])!r} in {len(data)} bytes")
        machine = struct.unpack_from("<H", data, 18)[0]
        if machine != EM_CUDA or data[4:6] != b"\x02\x01":
            raise InspectError(f"not a cubin: ELF machine {machine}, expected {EM_CUDA} (CUDA), 64 bit")
        self.data = data
        self.flags = struct.unpack_from("<I", data, 48)[0]
        (table,) = struct.unpack_from("<Q", data, 40)
        entry, count, names = struct.unpack_from("<HHH", data, 58)
        raw = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * entry) for i in range(count)]
        strings = raw[names][4]
        self.sections = [_Section(self._text(strings + r[0]), r[4], r[5], r[6], r[1] == 8) for r in raw]

    def _text(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode("ascii")

    def bytes_of(self, section: _Section) -> bytes:
        if section.no_bits:
            return b""
        if section.offset + section.size > len(self.data):
            raise InspectError(f"the cubin is cut short inside section {section.name}")
        return self.data[section.offset : section.offset + section.size]

    def named(self, name: str) -> _Section | None:
        return next((s for s in self.sections if s.name == name), None)

    def entries(self) -> dict[int, str]:
        """Symbol index to name of every kernel entry."""
        table = self.named(".symtab")
        if table is None:
            raise InspectError("the cubin has no symbol table")
        strings, data, found = self.sections[table.link].offset, self.bytes_of(table), {}
        for index in range(len(data) // 24):
            name, info, other, _shndx, _value, _size = struct.unpack_from("<IBBHQQ", data, index * 24)
            if info & 15 == _STT_FUNC and other & _STO_ENTRY:
                found[index] = self._text(strings + name)
        return found

    def attributes(self, name: str) -> list[tuple[int, bytes]]:
        """(attribute, payload) of an `.nv.info` section; formats 1 to 3 hold two bytes, 4 is sized."""
        section = self.named(name)
        data, at, found = b"" if section is None else self.bytes_of(section), 0, []
        while at + 4 <= len(data):
            form, attribute, value = struct.unpack_from("<BBH", data, at)
            at += 4
            if form == 4:
                found.append((attribute, data[at : at + value]))
                at += value
            else:
                found.append((attribute, struct.pack("<H", value)))
        return found


def read_cubin(cubin: bytes) -> CubinInfo:
    """Everything that gates need from a cubin. Raises InspectError on bytes that are not one."""
    try:
        elf = _Elf(cubin)
        entries = elf.entries()
        kernels = {name: _kernel(elf, index, name) for index, name in entries.items()}
        arch, toolkit = _tool_note(elf)
    except (struct.error, IndexError, ValueError, KeyError) as error:
        if isinstance(error, InspectError):
            raise
        raise InspectError(f"the cubin is damaged: {error}") from None
    return CubinInfo(elf.flags >> 8 & 0xFF, arch, toolkit, kernels)


def _kernel(elf: _Elf, index: int, name: str) -> KernelInfo:
    counts = {}
    for attribute, payload in elf.attributes(".nv.info"):
        if attribute in (_REGCOUNT, _FRAME_SIZE):
            symbol, value = struct.unpack("<II", payload)
            if symbol == index:
                counts[attribute] = value
    if _REGCOUNT not in counts:
        raise InspectError(f"the cubin records no register count for {name}")
    params: dict[int, tuple[int, int]] = {}
    base, block = 0, None
    for attribute, payload in elf.attributes(f".nv.info.{name}"):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = struct.unpack("<IHHI", payload)
            params[ordinal] = (offset, packed >> 18)
        elif attribute == _REQNTID:
            block = struct.unpack("<III", payload)
        elif attribute == _PARAM_CBANK:
            _, base, _size = struct.unpack("<IHH", payload)
    shared = elf.named(f".nv.shared.{name}")
    # The section of a kernel that uses shared memory starts with the part that the hardware reserves.
    static = 0 if shared is None else max(0, shared.size - SMEM_RESERVED_PER_CTA)
    ordered = tuple(params[i] for i in range(len(params)))
    return KernelInfo(name, counts[_REGCOUNT], counts.get(_FRAME_SIZE, 0), static, ordered, base, block)


def _tool_note(elf: _Elf) -> tuple[str | None, tuple[int, int] | None]:
    section = elf.named(".note.nv.tkinfo")
    text = b"" if section is None else elf.bytes_of(section)
    arch = re.search(rb"-arch[ =](sm_[0-9]+[a-z]?)\b", text)
    release = re.search(rb"release (\d+)\.(\d+)", text)
    return (
        None if arch is None else arch[1].decode(),
        None if release is None else (int(release[1]), int(release[2])),
    )


def elf_sm(cubin: bytes) -> int:
    """The SM number in the cubin's ELF flags: 90, 100, 103, 110. Raises InspectError."""
    return read_cubin(cubin).sm


def elf_symbols(cubin: bytes) -> tuple[str, ...]:
    """Names of the kernels that a cubin holds. Raises InspectError."""
    return tuple(read_cubin(cubin).kernels)


def resources(cubin: bytes, symbol: str) -> KernelInfo:
    """Registers, stack, static shared memory, parameters of one kernel. Raises InspectError."""
    kernels = read_cubin(cubin).kernels
    if symbol not in kernels:
        raise InspectError(f"no kernel {symbol!r} in the cubin: it holds {', '.join(kernels) or 'none'}")
    return kernels[symbol]


# -- PTX -----------------------------------------------------------------------------------------

_PTX_SIZE = {"8": 1, "16": 2, "32": 4, "64": 8}
_PARAM = re.compile(
    r"\.param\s+\.[bsuf](?P<bits>8|16|32|64)\s*(?:\.ptr(?:\s*\.(?:global|shared|const|local|param))?"
    r"(?:\s*\.align\s+\d+)?)?\s*[\w$%]+\s*(?:\[(?P<count>\d+)\])?"
    r"|\.param\s+\.align\s+(?P<align>\d+)\s+\.[bsuf](?P<abits>8|16|32|64)\s+[\w$%]+\s*(?:\[(?P<acount>\d+)\])?"
)
_BLOCK = re.compile(r"\.(reqntid|maxntid)\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?")


def _entry(ptx: str, symbol: str) -> tuple[str, str]:
    """The parameter list and the directives of an entry."""
    match = re.search(rf"\.entry\s+{re.escape(symbol)}(?![\w$%])\s*(?:\(([^)]*)\))?([^{{]*)\{{", ptx)
    if match is None:
        raise InspectError(f"the PTX has no entry {symbol!r}")
    return match[1] or "", match[2]


def ptx_params(ptx: str, symbol: str) -> list[tuple[int, int]]:
    """(size, alignment) in bytes of each parameter of an entry, in order. Raises InspectError."""
    found = []
    for declared in filter(None, (part.strip() for part in _entry(ptx, symbol)[0].split(","))):
        match = _PARAM.fullmatch(declared)
        if match is None:
            raise InspectError(f"cannot read the PTX parameter {declared!r} of {symbol}")
        unit = _PTX_SIZE[match["bits"] or match["abits"]]
        count = int(match["count"] or match["acount"] or 1)
        found.append((unit * count, int(match["align"] or unit)))
    return found


def ptx_block(ptx: str, symbol: str) -> tuple[str, tuple[int, int, int]] | None:
    """(`reqntid` or `maxntid`, block) that an entry declares, or None. Raises InspectError."""
    match = _BLOCK.search(_entry(ptx, symbol)[1])
    return None if match is None else (match[1], (int(match[2]), int(match[3] or 1), int(match[4] or 1)))


def ptx_allocates_tensor_memory(ptx: str) -> bool:
    """True where the code asks for tensor memory at all (how much may be known at run time alone)."""
    if "tcgen05.alloc" not in ptx:  # a pattern over megabytes of text is what a cached build would wait for
        return False
    return re.search(r"^\s*(?:@!?%\w+\s+)?tcgen05\.alloc\b", ptx, re.MULTILINE) is not None


def ptx_version(ptx: str) -> str:
    """The `.version` of a PTX text, such as `9.4`. Raises InspectError."""
    match = re.search(r"^\s*\.version\s+(\d+\.\d+)", ptx, re.MULTILINE)
    if match is None:
        raise InspectError("the PTX states no version")
    return match[1]


# -- occupancy and disassembly -------------------------------------------------------------------


def occupancy(arch: Arch, *, threads: int, registers: int, smem: int, tmem_columns: int = 0) -> tuple[int, str]:
    """(CTAs that fit one SM, what limits them); `smem` is static plus dynamic bytes of a CTA.

    A warp's registers are rounded up to 256 and come from one quarter of the SM; a CTA's shared
    memory is rounded up to 128 bytes with the 1024 that the hardware reserves. A CTA that finds no tensor
    memory would wait for it, so columns bound what fits as well.
    """
    warps = -(-threads // 32)
    per_warp = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = arch.registers_per_sm // _SUB_PARTITIONS // per_warp * _SUB_PARTITIONS
    per_cta = -(-(smem + SMEM_RESERVED_PER_CTA) // _SMEM_UNIT) * _SMEM_UNIT
    limits = {
        "registers": by_registers // warps,
        "threads": arch.threads_per_sm // 32 // warps,
        "shared memory": arch.smem_per_sm // per_cta,
        "resident CTAs": arch.ctas_per_sm,
    }
    if tmem_columns:
        limits["tensor memory"] = arch.tmem_columns // tmem_columns
    reason = min(limits, key=lambda name: limits[name])
    return limits[reason], reason


def find_tool(name: str) -> Path | None:
    """`nvdisasm` or `cuobjdump`: from its PyPI package, else from the PATH; None where absent."""
    for root in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in sorted(Path(root).glob(f"nvidia/*/bin/{name}")):
            return found
    found_on_path = shutil.which(name)
    return None if found_on_path is None else Path(found_on_path)


def sass(cubin: bytes) -> str:
    """The disassembly of a cubin. Raises InspectError where `nvdisasm` is missing or fails."""
    tool = find_tool("nvdisasm")
    if tool is None:
        raise InspectError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InspectError(f"nvdisasm failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
