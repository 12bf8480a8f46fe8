"""A Driver of host memory that records what it is told to launch, and bundles that it can load.

Shared by tests of the runtime, the operators and the command line:

    write_bundle(tmp_path, "sm_90a", [config, *config.requires()])
    driver = FakeDriver(["sm_90a"])
    library = Library.open(tmp_path, driver=driver)
    ...
    driver.launches[0].values["num_work"]

Addresses are real host addresses, so a launch may be given `torch_tensor.data_ptr()` of a CPU tensor and
`on_launch` may stand in for the kernel: it receives each Launch and can read and write the memory behind it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cubinery import __version__
from cubinery.runtime.arch import resolve
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.driver import DeviceInfo, DevicePointer, LaunchConfig
from cubinery.runtime.errors import DriverError
from cubinery.runtime.manifest import Artifact, FileRecord, KernelRecord, Manifest, Resources, TensorMapSpec
from cubinery.runtime.ops.paged_decode.select import outcomes

MAGIC = b"\x7fFAKECUBIN\n"
_UNPACK = {"pointer": "<Q", "i32": "<i", "i64": "<q", "f32": "<f"}


def fake_image(kernels: Iterable[KernelRecord], salt: str = "") -> bytes:
    """Bytes that FakeDriver loads as a cubin holding these kernels."""
    table = {k.symbol: [[p.name, p.kind, p.offset, p.size] for p in k.params] for k in kernels}
    return MAGIC + json.dumps({"salt": salt, "kernels": table}).encode()


def fake_artifact(root: Path, key: str, kernels: Sequence[KernelRecord], **changes: Any) -> Artifact:
    """Write a fake cubin below the bundle folder `root` and return its manifest entry."""
    family, arch, impl, *_ = key.split("-")
    image = fake_image(kernels, key)
    digest = hashlib.sha256(image).hexdigest()
    file = FileRecord(f"cubins/{digest}.cubin", digest, len(image))
    (root / "cubins").mkdir(parents=True, exist_ok=True)
    (root / file.path).write_bytes(image)
    fields: dict[str, Any] = {
        "key": key, "family": family, "impl": impl, "arch": arch, "config": {}, "source_digest": "0" * 64,
        "cubin": file, "kernels": tuple(kernels),
    }  # fmt: skip
    return Artifact(**(fields | changes))


def fake_manifest(arch: str, artifacts: Sequence[Artifact], **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "arch": arch, "package_version": __version__, "toolchain": {"nvidia-cutlass-dsl": "4.8.1"},
        "min_driver": 13000, "ptx_version": "9.4", "artifacts": tuple(artifacts),
    }  # fmt: skip
    return Manifest(**(fields | changes))


def write_bundle(root: Path, arch: str, configs: Iterable[KernelConfig], **changes: Any) -> Path:
    """A bundle `root/<arch>` of these configurations, as their family declares them; returns its folder."""
    target, folder = resolve(arch), root / arch
    folder.mkdir(parents=True, exist_ok=True)
    artifacts = {}
    for config in configs:
        config = config.canonical()
        abi = importlib.import_module(f"cubinery.aot.kernels.{config.family}.abi")
        record = replace(abi.declare(config, target), resources=Resources(96, 0, 0, 1))
        key = config.key(arch)
        artifacts[key] = fake_artifact(
            folder, key, [record], config=config.axes(), requires=tuple(c.key(arch) for c in config.requires())
        )
    fake_manifest(arch, list(artifacts.values()), **changes).write(folder)
    return folder


def write_outcomes(root: Path, arch: str, domain: dict[str, Any]) -> Path:
    """A bundle `root/<arch>` of all decodes that the selector picks over a domain, and what they require."""
    needed = {c.key(arch): c for config in outcomes(domain, arch) for c in (config, *config.requires())}
    return write_bundle(root, arch, needed.values())


@dataclass(frozen=True)
class FakeTensorMap:
    """The arguments that a tensor map was encoded from."""

    spec: TensorMapSpec
    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Launch:
    """One recorded launch, with its parameters as bytes and unpacked by name."""

    device: int
    symbol: str
    config: LaunchConfig
    stream: int
    params: bytes
    values: dict[str, Any]

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.config.grid


@dataclass
class FakeModule:
    device: int
    kernels: dict[str, list[list[Any]]]


@dataclass
class FakeKernel:
    driver: FakeDriver
    device: int
    symbol: str
    params: list[list[Any]]
    dynamic_smem: int = 0
    carveout: int | None = None


class FakePrepared:
    """PreparedLaunch of the fake driver."""

    def __init__(self, kernel: FakeKernel, config: LaunchConfig, size: int) -> None:
        self.kernel, self.config = kernel, config
        self.params = memoryview(bytearray(size))

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        self.config = replace(self.config, grid=grid)

    def launch(self, stream: int) -> None:
        kernel = self.kernel
        driver, data = kernel.driver, bytes(self.params)
        if self.config.dynamic_smem > kernel.dynamic_smem:
            raise DriverError(f"{kernel.symbol}: {self.config.dynamic_smem} bytes of shared memory were never allowed")
        values = {name: driver.unpack(kind, data[at : at + size]) for name, kind, at, size in kernel.params}
        launch = Launch(kernel.device, kernel.symbol, self.config, stream, data, values)
        driver.launches.append(launch)
        if driver.on_launch is not None:
            driver.on_launch(launch)


def device(index: int, arch: str, driver_version: int = 13000) -> DeviceInfo:
    """What a driver would say of the chip that `arch` is for."""
    chip = resolve(arch)
    return DeviceInfo(index, chip.chip, chip.compute_capability, chip.sms, driver_version)


@dataclass
class FakeDriver:
    """Implements `cubinery.runtime.driver.Driver`; `archs` names one device each."""

    archs: Sequence[str] = ("sm_90a",)
    driver_version: int = 13000
    clusters: int = 14
    """That a device holds at once, of any kernel."""
    load_seconds: float = 0.0
    """Time that loading a module takes, to widen races."""
    on_launch: Callable[[Launch], None] | None = None
    current: int = 0
    devices: list[DeviceInfo] = field(default_factory=list)
    loads: list[tuple[int, str]] = field(default_factory=list)
    """(device, sha256 of the image) of every module loaded."""
    launches: list[Launch] = field(default_factory=list)
    smem_calls: list[tuple[int, str, int]] = field(default_factory=list)
    """(device, symbol, bytes) of every set_dynamic_smem."""
    encoded: list[FakeTensorMap] = field(default_factory=list)
    capturing: set[int] = field(default_factory=set)
    """Stream handles under capture."""
    synchronized: list[int] = field(default_factory=list)
    allocations: dict[tuple[int, int], ctypes.Array[ctypes.c_char]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if not self.devices:
            self.devices = [device(i, arch, self.driver_version) for i, arch in enumerate(self.archs)]

    # -- devices and modules -------------------------------------------------------------------

    def device_count(self) -> int:
        return len(self.devices)

    def current_device(self) -> int:
        return self.current

    def device_info(self, device: int) -> DeviceInfo:
        if not 0 <= device < len(self.devices):
            raise DriverError(f"device {device}: this machine has {len(self.devices)}")
        return self.devices[device]

    def torch_device(self, device: int) -> str:
        return "cpu"

    def load_module(self, device: int, image: bytes) -> FakeModule:
        time.sleep(self.load_seconds)
        self.loads.append((device, hashlib.sha256(image).hexdigest()))
        if not image.startswith(MAGIC):
            raise DriverError(f"loading a module on device {device}: CUDA_ERROR_INVALID_IMAGE")
        return FakeModule(device, json.loads(image[len(MAGIC) :])["kernels"])

    def get_kernel(self, module: FakeModule, symbol: str) -> FakeKernel:
        if symbol not in module.kernels:
            raise DriverError(f"getting kernel {symbol!r}: CUDA_ERROR_NOT_FOUND")
        return FakeKernel(self, module.device, symbol, module.kernels[symbol])

    def kernel_params(self, kernel: FakeKernel) -> Sequence[tuple[int, int]]:
        return [(offset, size) for _, _, offset, size in kernel.params]

    def set_dynamic_smem(self, kernel: FakeKernel, size: int) -> None:
        kernel.dynamic_smem = size
        self.smem_calls.append((kernel.device, kernel.symbol, size))

    def prepare(
        self, kernel: FakeKernel, config: LaunchConfig, param_layout: Sequence[tuple[int, int]]
    ) -> FakePrepared:
        assert list(param_layout) == list(self.kernel_params(kernel)), "layout differs from the loaded kernel"
        kernel.carveout = config.carveout
        return FakePrepared(kernel, config, max((at + size for at, size in param_layout), default=0))

    def max_clusters(self, kernel: FakeKernel, config: LaunchConfig) -> int:
        return self.clusters

    # -- tensor maps and parameters ------------------------------------------------------------

    def encode_tensor_map(
        self, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        with self._lock:
            self.encoded.append(FakeTensorMap(spec, address, tuple(extents), tuple(strides)))
            return struct.pack("<4sI120x", b"TMAP", len(self.encoded) - 1)

    def unpack(self, kind: str, data: bytes) -> Any:
        """The value that a parameter's bytes hold; a FakeTensorMap for a tensor map."""
        if kind == "tensor_map":
            magic, index = struct.unpack_from("<4sI", data)
            assert magic == b"TMAP", "a tensor map parameter holds something else"
            return self.encoded[index]
        return struct.unpack(_UNPACK[kind], data)[0]

    # -- memory --------------------------------------------------------------------------------

    def is_capturing(self, stream: int) -> bool:
        return stream in self.capturing

    def allocate(self, device: int, size: int) -> DevicePointer:
        self.device_info(device)
        buffer = ctypes.create_string_buffer(size + 256)
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.allocations[device, address] = buffer
        return DevicePointer(address)

    def free(self, device: int, pointer: DevicePointer) -> None:
        del self.allocations[device, pointer]

    def copy_to_device(self, device: int, pointer: DevicePointer, data: bytes) -> None:
        self._check(device, pointer, len(data))
        ctypes.memmove(pointer, data, len(data))

    def copy_from_device(self, device: int, pointer: DevicePointer, size: int) -> bytes:
        self._check(device, pointer, size)
        return ctypes.string_at(pointer, size)

    def _check(self, device: int, pointer: int, size: int) -> None:
        """A copy must lie inside one allocation of that device."""
        for (owner, address), buffer in self.allocations.items():
            if owner == device and address <= pointer and pointer + size <= address + len(buffer) - 256:
                return
        raise DriverError(f"copying {size} bytes at {pointer:#x} on device {device}: CUDA_ERROR_INVALID_VALUE")

    def synchronize(self, device: int) -> None:
        self.synchronized.append(device)
