"""What a machine can build and run: facts about it, each with the command that would cure a lack."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cubinery.aot.inspect import find_tool
from cubinery.aot.pool import WORKER_MEMORY, available_cores, available_memory
from cubinery.runtime.arch import ARCHS, served_by
from cubinery.runtime.bundle import Bundle, open_all
from cubinery.runtime.driver import DeviceInfo, Driver
from cubinery.runtime.errors import CubineryError

DSL_VERSION = "4.8.1"
"""The one version of nvidia-cutlass-dsl that kernels are written against; pyproject.toml pins the same."""

Status = Literal["ok", "warning", "missing", "none"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the doctor's report."""

    name: str
    status: Status
    """`missing` stops what `needed_for` says; `none` is a lack that stops nothing here."""
    detail: str
    needed_for: Literal["build", "run", "inspect", ""] = ""
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All facts, and what follows from them."""

    facts: tuple[Fact, ...]
    can_build: tuple[str, ...]
    """Archs that this machine can compile for."""
    can_run: dict[str, tuple[str, ...]]
    """Device (`0: NVIDIA H200`) to the targets whose cubins it runs, best first."""
    devices: tuple[DeviceInfo, ...]
    bundles: dict[str, tuple[str, ...]]
    """Bundle folder to the devices that it serves; empty where none does."""

    def lacks(self, purpose: str) -> tuple[Fact, ...]:
        """The facts that stop `build`, `run` or `inspect`."""
        return tuple(fact for fact in self.facts if fact.status == "missing" and fact.needed_for == purpose)


def diagnose(paths: Iterable[Path], driver: Driver | None = None) -> Diagnosis:
    """Look at this machine and at the bundles under `paths` (folders that need not exist).

    `driver` stands in for the CUDA driver in tests. Imports neither torch nor the compiler.
    """
    devices, driver_fact = _devices(driver)
    facts = [
        _python(), _platform(), *_command_line(), *_compiler(), *_binary_tools(),
        _package("numpy", "numpy", "run", "pip install numpy"),
        _package("torch", "torch", "run", "pip install torch (on a Jetson: NVIDIA's own wheel)"),
        driver_fact, _cores(), _memory(), _disk(Path.cwd()),
    ]  # fmt: skip
    built = not any(fact.status == "missing" and fact.needed_for == "build" for fact in facts)
    names = {device.index: f"{device.index}: {device.name}" for device in devices}
    can_run = {names[d.index]: served_by(d.compute_capability) for d in devices}
    bundles: dict[str, tuple[str, ...]] = {}
    for path in paths:
        if not path.exists():
            continue
        try:
            found = open_all(path)
        except CubineryError as error:
            facts.append(Fact("bundle", "warning", str(error)))
            continue
        bundles |= {str(b.root): tuple(name for name, archs in can_run.items() if _runs(b, archs)) for b in found}
    return Diagnosis(tuple(facts), tuple(ARCHS) if built else (), can_run, devices, bundles)


def _runs(bundle: Bundle, archs: tuple[str, ...]) -> bool:
    return bundle.manifest.arch in archs


def _python() -> Fact:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= (3, 14):
        return Fact("Python", "warning", f"{version} at {sys.executable}: tested are 3.11 to 3.13")
    return Fact("Python", "ok", f"{version} at {sys.executable}")


def _platform() -> Fact:
    system, machine = platform.system(), platform.machine()
    detail = f"{system} {platform.release()} on {machine}"
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        return Fact("platform", "missing", detail, "build", "use Linux on x86-64 or aarch64")
    return Fact("platform", "ok", detail)


def _command_line() -> list[Fact]:
    return [
        _package("pyyaml", "yaml", "build", "pip install 'cubinery[build]'"),
        _package("rich", "rich", "build", "pip install 'cubinery[build]'"),
    ]


def _compiler() -> list[Fact]:
    fix = f"pip install 'nvidia-cutlass-dsl[cu13]=={DSL_VERSION}'"
    version = _version("nvidia-cutlass-dsl")
    if version is None:
        return [Fact("CuTe DSL", "missing", "nvidia-cutlass-dsl is not installed", "build", fix)]
    facts = [Fact("CuTe DSL", "ok", f"nvidia-cutlass-dsl {version}")]
    if version != DSL_VERSION:
        detail = f"nvidia-cutlass-dsl {version}: kernels are written against {DSL_VERSION}"
        facts = [Fact("CuTe DSL", "missing", detail, "build", fix)]
    libraries = _version("nvidia-cutlass-dsl-libs-cu13")
    if libraries is None:
        # Without these a request for sm_110a compiles, without a word, to code for sm_101a.
        detail = "nvidia-cutlass-dsl-libs-cu13 is not installed: sm_110a would come out as sm_101a, which no Thor loads"
        facts.append(Fact("CUDA 13 code generator", "missing", detail, "build", fix))
    elif libraries != version:
        detail = f"nvidia-cutlass-dsl-libs-cu13 {libraries} beside nvidia-cutlass-dsl {version}"
        facts.append(Fact("CUDA 13 code generator", "missing", detail, "build", fix))
    else:
        facts.append(Fact("CUDA 13 code generator", "ok", f"nvidia-cutlass-dsl-libs-cu13 {libraries}"))
    return facts


def _binary_tools() -> list[Fact]:
    """Disassembly is a help to readers; gates read the ELF themselves."""
    facts = []
    for tool in ("cuobjdump", "nvdisasm"):
        found, distribution = find_tool(tool), f"nvidia-cuda-{tool}"
        if found is None:
            facts.append(Fact(tool, "missing", "not found", "inspect", f"pip install {distribution}"))
        else:
            facts.append(Fact(tool, "ok", f"{_version(distribution) or ''} {found}".strip()))
    return facts


def _devices(driver: Driver | None) -> tuple[tuple[DeviceInfo, ...], Fact]:
    try:
        opened = _cuda() if driver is None else driver
        devices = tuple(opened.device_info(i) for i in range(opened.device_count()))
    except CubineryError as error:
        package = "cuda-python" in str(error)
        fix = "pip install 'cuda-python>=13,<14'" if package else "install the NVIDIA driver, or run on another machine"
        return (), _no_device(str(error), fix)
    if not devices:
        return (), _no_device("the driver sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    version = devices[0].driver_version
    names = ", ".join(f"{d.name} (SM {d.compute_capability[0]}.{d.compute_capability[1]})" for d in devices)
    return devices, Fact("CUDA driver", "ok", f"supports CUDA {version // 1000}.{version % 1000 // 10}; {names}")


def _cuda() -> Driver:
    """The real driver. Raises DriverError where cuda-python, the driver or a GPU is missing."""
    from cubinery.runtime.cuda import CudaDriver

    return CudaDriver()


def _no_device(detail: str, fix: str) -> Fact:
    return Fact("CUDA driver", "missing", detail, "run", fix)


def _package(name: str, module: str, purpose: Literal["build", "run"], fix: str) -> Fact:
    if importlib.util.find_spec(module) is None:
        return Fact(name, "missing", "not installed", purpose, fix)
    return Fact(name, "ok", _version(name) or "installed")


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> Fact:
    return Fact("cores", "ok", f"{available_cores()} usable")


def _memory() -> Fact:
    available = available_memory()
    workers = available // WORKER_MEMORY
    detail = f"{available / 1e9:.1f} GB free: room for {workers} compile workers"
    if workers < 1:
        return Fact("memory", "missing", detail, "build", f"free at least {WORKER_MEMORY / 1e9:.1f} GB")
    return Fact("memory", "ok", detail)


def _disk(path: Path) -> Fact:
    free = shutil.disk_usage(path).free
    status: Status = "ok" if free >= 1e9 else "warning"
    return Fact("disk", status, f"{free / 1e9:.1f} GB free at {path}", fix="" if status == "ok" else "free some space")
