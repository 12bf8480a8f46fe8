"""Opened bundles: kernels by key, loaded once per device, checked before they run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

from cubinery.runtime import bundle as bundles
from cubinery.runtime import misses, process
from cubinery.runtime.arch import served_by
from cubinery.runtime.arguments import TensorMapCache
from cubinery.runtime.bundle import Bundle, StrPath
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.driver import DeviceInfo, Driver
from cubinery.runtime.errors import (
    AbiError,
    ArchError,
    ArgumentError,
    CaptureError,
    DriverError,
    KernelNotFoundError,
)
from cubinery.runtime.kernel import Kernel
from cubinery.runtime.manifest import Artifact, KernelRecord


class Library:
    """Kernels of one bundle or several, by key. Safe for many threads; knows no family.

    Opening reads and validates manifests. A cubin is read when its key is first asked for on a device: its
    sha256 must be the manifest's, and the loaded parameters those of the launch record. What is loaded stays
    loaded for the life of the process, because a captured graph may hold it. Bundles are only ever read.
    """

    def __init__(self, opened: Sequence[Bundle], driver: Driver | None = None) -> None:
        """Use `Library.open` or `Library.installed`."""
        self.bundles = tuple(opened)
        self._entries = bundles.merge(self.bundles)
        self._artifacts = {key: artifact for key, (_, artifact) in sorted(self._entries.items())}
        self._driver = driver
        self._maps: TensorMapCache | None = None
        self._lock = threading.RLock()
        self._kernels: dict[tuple[str, int], dict[str, Kernel]] = {}
        self._modules: dict[tuple[str, int], Any] = {}
        self._archs: dict[int, tuple[str, ...]] = {}
        self._log = misses.MissLog()
        self._generation = process.generation

    @classmethod
    def open(cls, paths: StrPath | Sequence[StrPath], driver: Driver | None = None) -> Self:
        """Open bundles: one arch's folder, the folder above, or a list of such paths.

        `driver` defaults to CUDA, started when a kernel is first needed. Raises BundleError,
        ManifestVersionError, BundleConflictError; each names the file and the place in it.
        """
        return cls(bundles.open_all(paths), driver)

    @classmethod
    def installed(cls, driver: Driver | None = None) -> Self:
        """Open every installed kernel wheel. Raises BundleError when there is none."""
        return cls(bundles.installed(), driver)

    # -- what it holds -------------------------------------------------------------------------

    def keys(self) -> tuple[str, ...]:
        """All keys, sorted, of every arch."""
        return tuple(self._artifacts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._artifacts)

    def __len__(self) -> int:
        return len(self._artifacts)

    def __contains__(self, key: object) -> bool:
        return key in self._artifacts

    def __repr__(self) -> str:
        return f"<Library of {len(self)} kernels from {', '.join(str(b.root) for b in self.bundles)}>"

    def artifact(self, key: str) -> Artifact:
        """The manifest entry of a key. Raises KernelNotFoundError, and records the miss."""
        if not isinstance(key, str):
            raise ArgumentError(f"key = {key!r}: expected text, such as {next(iter(self._artifacts), 'a key')!r}")
        found = self._artifacts.get(key)
        if found is None:
            roots = [b.root for b in self.bundles]
            raise KernelNotFoundError(misses.explain(key, self._artifacts, roots, self._log))
        return found

    @property
    def misses(self) -> tuple[dict[str, Any], ...]:
        """Every key that was asked for and is missing: key, family, arch, impl, axes. Kept in memory alone."""
        return self._log.entries()

    def save_misses(self, path: StrPath) -> None:
        """Write `misses` as JSON for `cubinery build --from-misses`. Raises ArgumentError inside a bundle."""
        self._log.save(path, [b.root for b in self.bundles])

    # -- devices -------------------------------------------------------------------------------

    @property
    def driver(self) -> Driver:
        """The driver; the first use starts CUDA unless one was given. Raises DriverError, ForkError."""
        if self._generation != process.generation:
            process.check(self._generation, repr(self))
        if self._driver is None:
            from cubinery.runtime.cuda import CudaDriver

            with self._lock:
                if self._driver is None:
                    self._driver = CudaDriver()
        return self._driver

    def archs_for(self, device: int | None = None) -> tuple[str, ...]:
        """Archs of these bundles that a device runs, best first: its exact target, then its family's.

        Raises ArchError when there is none. Never a numeric comparison of architectures.
        """
        driver = self.driver
        device = driver.current_device() if device is None else device
        found = self._archs.get(device)
        if found is None:
            info = driver.device_info(device)
            held = dict.fromkeys(b.manifest.arch for b in self.bundles)
            targets = served_by(info.compute_capability)
            found = tuple(target for target in targets if target in held)
            if not found:
                what = (
                    f"device {device} ({info.name}, compute capability {'.'.join(map(str, info.compute_capability))})"
                )
                runs = f"runs {' or '.join(targets)}" if targets else "is served by no target that cubinery knows"
                hint = f": build with `make kernels ARCH={targets[0]}`" if targets else ""
                raise ArchError(f"{what} {runs}, and the opened bundles hold {', '.join(held)}{hint}")
            self._archs[device] = found
        return found

    def arch_for(self, device: int | None = None) -> str:
        """The best arch that these bundles hold for a device (the current one by default). Raises ArchError."""
        return self.archs_for(device)[0]

    def key_for(self, config: KernelConfig, device: int | None = None) -> str:
        """The key that serves a configuration on a device: exact target first, then the family target.

        Where no bundle holds it, the key of the exact target, which `kernel` then reports as a miss.
        """
        keys = [config.key(arch) for arch in self.archs_for(device)]
        return next((key for key in keys if key in self._artifacts), keys[0])

    def table_for(self, family: str, device: int | None = None) -> tuple[bytes, str] | None:
        """(bytes, file) of the table that a family's selector consults on a device; None where no bundle has one.

        That of the first bundle which has one, among those of the device's best arch.
        """
        for arch in self.archs_for(device):
            for opened in self.bundles:
                if opened.manifest.arch == arch and family in opened.tables:
                    return opened.tables[family], str(opened.root / opened.manifest.tables[family].path)
        return None

    # -- kernels -------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Kernel:
        """The kernel of a key on the current device; see `kernel`."""
        return self.kernel(key)

    def kernel(
        self, key: str, device: int | None = None, *, role: str | None = None, stream: int | None = None
    ) -> Kernel:
        """The kernel of a key on a device (the current one by default), loading it at the first request.

        `role` picks one of an artifact that holds several (the first by default). `stream` is the raw handle of
        the stream that it will run on: with it, a load that a graph capture forbids is a CaptureError instead of
        a spoilt capture. Raises KernelNotFoundError, ArchError, IntegrityError, AbiError, DriverError, ForkError.
        """
        if self._generation != process.generation:
            process.check(self._generation, repr(self))
        if device is None:
            device = self.driver.current_device()
        loaded = self._kernels.get((key, device))
        if loaded is None:
            loaded = self._load(self.artifact(key), device, stream)
        if role is None:
            return next(iter(loaded.values()))
        if role not in loaded:
            self.artifact(key).kernel(role)  # raises, naming the roles there are
        return loaded[role]

    def preload(
        self, keys: Iterable[str] | None = None, devices: Iterable[int] | None = None, *, stream: int | None = None
    ) -> int:
        """Load kernels now: these keys and what they require, or all that a device runs; returns how many.

        `devices` defaults to the current one. After it, no launch of these keys loads anything, so it may be
        captured. Raises what `kernel` raises.
        """
        if isinstance(keys, str):
            raise ArgumentError(f"keys = {keys!r}: expected a list of keys; for one, [{keys!r}]")
        chosen = None if keys is None else list(dict.fromkeys(keys))
        count = 0
        for device in [self.driver.current_device()] if devices is None else list(devices):
            archs = self.archs_for(device)
            names = [k for k, a in self._artifacts.items() if a.arch in archs] if chosen is None else list(chosen)
            for key in names:  # grows while it runs: a key brings what it requires
                names.extend(r for r in self.artifact(key).requires if r not in names)
                self.kernel(key, device, stream=stream)
                count += 1
        return count

    # -- loading -------------------------------------------------------------------------------

    def _load(self, artifact: Artifact, device: int, stream: int | None) -> dict[str, Kernel]:
        driver = self.driver
        if type(device) is not int:
            raise ArgumentError(f"device = {device!r}: expected an index")
        with self._lock:
            loaded = self._kernels.get((artifact.key, device))
            if loaded is not None:
                return loaded
            owner, _ = self._entries[artifact.key]
            self._check_device(owner, artifact, device, driver)
            if driver.is_capturing(stream or 0):
                raise CaptureError(
                    f"{artifact.key} is not loaded on device {device}, and a graph capture is under way, which "
                    f"forbids loading: call Library.preload([{artifact.key!r}], [{device}]) before the capture"
                )
            module_key = (artifact.cubin.sha256, device)
            if module_key not in self._modules:
                self._modules[module_key] = driver.load_module(device, owner.read(artifact.cubin))
            module = self._modules[module_key]
            loaded = {r.role: self._kernel(artifact, r, device, driver, module) for r in artifact.kernels}
            self._kernels[artifact.key, device] = loaded
            return loaded

    def _check_device(self, owner: Bundle, artifact: Artifact, device: int, driver: Driver) -> None:
        archs = self.archs_for(device)
        info = driver.device_info(device)
        if artifact.arch not in archs:
            raise ArchError(
                f"{artifact.key} is code for {artifact.arch}, and {_device(info)} runs {' or '.join(archs)}: "
                "ask for a key of that arch"
            )
        needed = owner.manifest.min_driver
        if info.driver_version < needed:
            raise DriverError(
                f"device {device}: its driver supports CUDA {_cuda(info.driver_version)}, and {owner.root} needs "
                f"CUDA {_cuda(needed)} or newer: update the NVIDIA driver"
            )

    def _kernel(self, artifact: Artifact, record: KernelRecord, device: int, driver: Driver, module: Any) -> Kernel:
        handle = driver.get_kernel(module, record.symbol)
        found, expected = list(driver.kernel_params(handle)), [(p.offset, p.size) for p in record.params]
        if found != expected:
            raise AbiError(f"{artifact.key}: {record.symbol}: {_difference(found, record)}: build the bundle again")
        if record.dynamic_smem:
            driver.set_dynamic_smem(handle, record.dynamic_smem)
        if self._maps is None:
            self._maps = TensorMapCache(driver)
        return Kernel(artifact.key, device, record, driver, handle, self._maps)


def _difference(found: list[tuple[int, int]], record: KernelRecord) -> str:
    """Where loaded parameters leave the launch record."""
    if len(found) != len(record.params):
        return f"the loaded code takes {len(found)} parameters and its manifest records {len(record.params)}"
    for i, (here, spec) in enumerate(zip(found, record.params, strict=True)):
        if here != (spec.offset, spec.size):
            return (
                f"parameter {i} ({spec.name}) is {here[1]} bytes at offset {here[0]} in the loaded code, "
                f"and its manifest records {spec.size} bytes at {spec.offset}"
            )
    raise AssertionError("equal parameter lists compared unequal")


def _device(info: DeviceInfo) -> str:
    major, minor = info.compute_capability
    return f"device {info.index} ({info.name}, compute capability {major}.{minor})"


def _cuda(version: int) -> str:
    """13000 -> 13.0"""
    return f"{version // 1000}.{version % 1000 // 10}"
