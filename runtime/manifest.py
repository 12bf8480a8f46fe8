"""The manifest: everything a launch needs, as data. The reader owns the format.

`Manifest.read` validates once and returns frozen dataclasses; inner code trusts them.
The JSON Schema of the same format is published as docs/manifest.schema.json. In the file, names are
those of the dataclass fields; fields that have a default may be left out, unknown ones are errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from cubinery.runtime.errors import BundleError

FORMAT = "cubinery.manifest"
"""What the file says it is, in its first member."""

SCHEMA_VERSION = 1
"""Version this reader writes and the only one that it accepts."""

MANIFEST_NAME = "manifest.json"

MAX_PARAM_BYTES = 32764
"""Most bytes of parameters that a kernel may take."""

ParamKind = Literal["pointer", "i32", "i64", "f32", "tensor_map"]
PARAM_SIZE: dict[str, int] = {"pointer": 8, "i32": 4, "i64": 8, "f32": 4, "tensor_map": 128}
PARAM_ALIGN: dict[str, int] = {"pointer": 8, "i32": 4, "i64": 8, "f32": 4, "tensor_map": 64}

Swizzle = Literal["none", "32B", "64B", "128B"]
Interleave = Literal["none", "16B", "32B"]
L2Promotion = Literal["none", "64B", "128B", "256B"]
OobFill = Literal["zero", "nan"]


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One kernel parameter. `name` is the launch value (or tensor map) that fills it.

    `offset` is what the cubin and `cuKernelGetParamInfo` say. It counts from where parameters start in
    the constant bank, but alignment is that of the address there: on sm_90 they start at byte 528, so a
    tensor map (alignment 64) that comes first lies at offset 48, and at 0 on sm_100 and later.
    """

    name: str
    kind: ParamKind
    offset: int
    size: int
    align: int


@dataclass(frozen=True, slots=True)
class TensorMapSpec:
    """How to encode one CUtensorMap.

    `extents` (innermost first, elements) and `strides` (bytes, for dimensions 1 and up, so one
    fewer than `extents`) hold launch-value names or literal integers; `pointer` names the launch
    value with the base address.
    """

    name: str
    pointer: str
    dtype: str
    """CUtensorMapDataType without its prefix, lower case: uint8, bfloat16, ..."""
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    extents: tuple[str | int, ...]
    strides: tuple[str | int, ...]
    swizzle: Swizzle = "none"
    interleave: Interleave = "none"
    l2_promotion: L2Promotion = "none"
    oob_fill: OobFill = "zero"

    @property
    def rank(self) -> int:
        """Dimensions of the tensor."""
        return len(self.box)


@dataclass(frozen=True, slots=True)
class Resources:
    """What the compiler spent, read back from the cubin."""

    registers: int
    stack: int
    """Bytes of stack frame a thread: spills and dynamically indexed arrays."""
    static_smem: int
    ctas_per_sm: int
    """CTAs that really fit an SM of the arch by registers, threads, shared memory and tensor memory."""


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """The launch of one kernel of an artifact."""

    role: str
    """What the family calls it: `decode`, `append`."""
    symbol: str
    block: tuple[int, int, int]
    grid: tuple[str | int, str | int, str | int]
    """Names of launch values, or literals."""
    params: tuple[ParamSpec, ...]
    tensor_maps: tuple[TensorMapSpec, ...] = ()
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    carveout: int = -1
    """Preferred shared memory carveout in percent; -1 leaves the driver's default."""
    min_ctas_per_sm: int = 1
    pdl: bool = False
    tmem_columns: int = 0
    """Tensor memory columns that one CTA allocates: 0, or a power of two from 32 to 512."""
    resources: Resources | None = None
    smaller_clusters: bool = False
    """Whether the clusters of a launch may have fewer CTAs along x than `cluster` says: 2, 4 or 8."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of the bundle: path relative to the manifest, with its sha256 and size in bytes."""

    path: str
    sha256: str
    size: int

    def locate(self, root: Path) -> Path:
        """The file below the bundle folder `root`, or BundleError where a link leads out of it.

        The path itself was checked when the manifest was read; links are only visible on disk.
        """
        found = root / self.path
        if not found.resolve().is_relative_to(root.resolve()):
            raise BundleError(f"{root}: {self.path} leads outside of the bundle, to {found.resolve()}: refused")
        return found


@dataclass(frozen=True, slots=True)
class Artifact:
    """One key's cubin and everything needed to launch it."""

    key: str
    family: str
    impl: str
    arch: str
    config: dict[str, Any]
    source_digest: str
    cubin: FileRecord
    kernels: tuple[KernelRecord, ...]
    requires: tuple[str, ...] = ()
    emitted: dict[str, FileRecord] = field(default_factory=dict)
    """Files kept beside the cubin by `emit`: ptx, object, header."""

    def kernel(self, role: str) -> KernelRecord:
        """The record with that role. Raises BundleError naming the roles there are."""
        for record in self.kernels:
            if record.role == role:
                return record
        roles = ", ".join(record.role for record in self.kernels)
        raise BundleError(f"{self.key}: no kernel has the role {role!r}: expected one of {roles}")


@dataclass(frozen=True, slots=True)
class Manifest:
    """One arch's bundle."""

    arch: str
    package_version: str
    toolchain: dict[str, str]
    """Distribution name to version, of all that shaped the code."""
    min_driver: int
    """CUDA driver API version that the cubins need, as cuDriverGetVersion gives it: 13000."""
    ptx_version: str
    artifacts: tuple[Artifact, ...]
    tables: dict[str, FileRecord] = field(default_factory=dict)
    """By family, the table that its selector consults; a family without one has rules."""

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read and validate a manifest; `path` is the file or the bundle folder that holds it.

        Raises BundleError (file, place inside it, value, expectation) and ManifestVersionError.
        """
        file = Path(path)
        if file.is_dir():
            file = file / MANIFEST_NAME
        try:
            data = file.read_bytes()
        except OSError as error:
            raise BundleError(f"{file}: cannot read the manifest: {error.strerror}") from error
        return cls.loads(data, str(file))

    @classmethod
    def loads(cls, data: bytes | str, source: str = "<manifest>") -> Self:
        """Parse and validate a manifest's text; `source` names it in errors."""
        from cubinery.runtime.manifest_json import decode

        return decode(cls, data, source)

    def dumps(self) -> str:
        """The manifest as JSON text: the same bytes for equal manifests, artifacts in key order.

        Validates what it wrote by reading it back, so that no writer can produce what no reader takes.
        """
        from cubinery.runtime.manifest_json import encode

        text = encode(self)
        type(self).loads(text, "<manifest being written>")
        return text

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write to a file, or to `manifest.json` of a folder, whole or not at all. Returns the file."""
        import tempfile  # writers alone need it

        file = Path(path)
        if file.is_dir():
            file = file / MANIFEST_NAME
        text = self.dumps()
        handle, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            os.chmod(temporary, 0o644)  # mkstemp made it private; a bundle is for others to read
            os.replace(temporary, file)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return file


def pack_params(*params: tuple[str, ParamKind]) -> tuple[ParamSpec, ...]:
    """Lay out (name, kind) pairs in order by the kernel ABI: each aligned to its own alignment."""
    specs, offset = [], 0
    for name, kind in params:
        size, align = PARAM_SIZE[kind], PARAM_ALIGN[kind]
        offset = -(-offset // align) * align
        specs.append(ParamSpec(name, kind, offset, size, align))
        offset += size
    return tuple(specs)
