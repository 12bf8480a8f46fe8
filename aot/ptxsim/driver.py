"""SimDriver: cubinery's Driver on the CPU. It executes the PTX that a bundle keeps beside its cubins.

The same manifest, argument packing, tensor-map records and planner as on a GPU; torch tensors live on the CPU,
and device addresses are addresses of this process. Launches run to their end inside `launch`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cubinery.aot.inspect import KernelInfo, read_cubin
from cubinery.aot.ptxsim.dependent import Footprint
from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.faults import LaunchFault
from cubinery.aot.ptxsim.isa.tensor_memory import COLUMNS
from cubinery.aot.ptxsim.launch import Launch, usable_cores
from cubinery.aot.ptxsim.machine import Checks, Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.schedule import Counters, Fair
from cubinery.aot.ptxsim.shares import cut
from cubinery.aot.ptxsim.tensormap import TensorMap
from cubinery.aot.ptxsim.translate import Code, Translation, code
from cubinery.aot.ptxsim.waits import Tracer
from cubinery.runtime.arch import SMEM_RESERVED_PER_CTA, resolve
from cubinery.runtime.bundle import Bundle, open_all
from cubinery.runtime.driver import DeviceInfo, DevicePointer, LaunchConfig
from cubinery.runtime.errors import DriverError
from cubinery.runtime.manifest import TensorMapSpec

DRIVER_VERSION = 13000
MAX_THREADS = 1024


@dataclass(frozen=True, slots=True)
class SimModule:
    """A loaded cubin: the code of its PTX, and what the cubin says of its kernels."""

    device: int
    code: Code
    kernels: dict[str, KernelInfo]
    name: str


@dataclass(slots=True)
class SimKernel:
    """A kernel of a module, translated."""

    translation: Translation
    info: KernelInfo
    tensor_columns: int
    """Columns of tensor memory that its record says a CTA allocates."""
    dynamic_smem: int = 0
    """Bytes that launches were allowed to use."""


@dataclass
class SimDriver:
    """Implements `cubinery.runtime.driver.Driver` for one simulated device of `arch`.

    `bundles` are the folders (or opened bundles) whose cubins it can execute. `schedule` makes the schedule of each
    launch, `checks` says what is looked for; both may be changed between launches.
    """

    arch: str
    bundles: Iterable[Bundle | str | os.PathLike[str]] = ()
    schedule: Callable[[], Fair] = Fair
    checks: Checks = field(default_factory=Checks)
    resident: int = 64
    """CTAs that run at a time."""
    processes: int | None = None
    """Most processes that simulate a launch; as many as there are cores where None. They change no result."""
    tracer: Tracer | None = None
    progress: Callable[[int, int], None] | None = None
    memory: GlobalMemory = field(default_factory=GlobalMemory)
    counters: Counters = field(default_factory=Counters)
    """Sums over all launches."""
    ctas: int = 0
    """CTAs of all launches."""
    executed: set[str] = field(default_factory=set)
    """Keys of the artifacts that were launched."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """PTX by artifact key, executed instead of what the bundle keeps: for looking at a change of it."""

    footprint: Footprint | None = None
    """What the last launch touched, where it let a dependent launch overlap with it."""

    def __post_init__(self) -> None:
        self._chip = resolve(self.arch)
        self._ptx: dict[str, tuple[Bundle, Any, str]] = {}
        self._known: dict[str, str] = {}
        self._columns: dict[tuple[str, str], int] = {}
        for item in self.bundles:
            for bundle in [item] if isinstance(item, Bundle) else open_all(Path(item)):
                self._index(bundle)

    def _index(self, bundle: Bundle) -> None:
        for artifact in bundle.manifest.artifacts:
            self._known[artifact.cubin.sha256] = artifact.key
            self._columns |= {(artifact.key, record.symbol): record.tmem_columns for record in artifact.kernels}
            if "ptx" in artifact.emitted:
                self._ptx[artifact.cubin.sha256] = (bundle, artifact.emitted["ptx"], artifact.key)

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def device_info(self, device: int) -> DeviceInfo:
        if device != 0:
            raise DriverError(f"device {device}: the simulator has one, 0")
        chip = self._chip
        return DeviceInfo(0, f"{chip.chip} (simulated)", chip.compute_capability, chip.sms, DRIVER_VERSION)

    def torch_device(self, device: int) -> str:
        return "cpu"

    # -- code ----------------------------------------------------------------------------------

    def load_module(self, device: int, image: bytes) -> SimModule:
        """Find the PTX of a cubin. Raises SimError where its bundle keeps none."""
        digest = hashlib.sha256(image).hexdigest()
        if digest not in self._ptx:
            key = self._known.get(digest, f"the cubin {digest[:16]}…")
            raise SimError(
                f"{key}: its bundle keeps no PTX, which is what the simulator executes: "
                "build it from a spec that says `emit: [ptx]`"
            )
        bundle, file, key = self._ptx[digest]
        text = self.texts[key] if key in self.texts else bundle.read(file).decode()
        return SimModule(device, code(text, key), read_cubin(image).kernels, key)

    def get_kernel(self, module: SimModule, symbol: str) -> SimKernel:
        found = module.code.kernel(symbol)
        if found is None or symbol not in module.kernels:
            raise DriverError(f"{module.name} holds no kernel {symbol!r}")
        return SimKernel(found, module.kernels[symbol], self._columns.get((module.name, symbol), COLUMNS))

    def kernel_params(self, kernel: SimKernel) -> Sequence[tuple[int, int]]:
        return kernel.info.params

    def set_dynamic_smem(self, kernel: SimKernel, size: int) -> None:
        limit = self._chip.smem_per_cta - kernel.translation.static_shared
        if size > limit:
            raise DriverError(f"{size} bytes of dynamic shared memory: {self._chip.name} allows {limit}")
        kernel.dynamic_smem = size

    def prepare(self, kernel: SimKernel, config: LaunchConfig, param_layout: Sequence[tuple[int, int]]) -> SimPrepared:
        return SimPrepared(self, kernel, config, tuple(param_layout))

    def max_clusters(self, kernel: SimKernel, config: LaunchConfig) -> int:
        """By SMs and the shared memory of a CTA; which SMs are neighbours is not known here."""
        ctas = self._chip.sms * max(1, self._chip.smem_per_sm // (config.dynamic_smem + SMEM_RESERVED_PER_CTA))
        return ctas // math.prod(config.cluster)

    def encode_tensor_map(
        self, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        return TensorMap.of(spec, address, extents, strides).encode()

    def is_capturing(self, stream: int) -> bool:
        return False

    # -- memory --------------------------------------------------------------------------------

    def register_host(self, address: int, size: int, initialised: bool = True, name: str = "host buffer") -> None:
        """Let kernels access memory of this process, which must stay alive; any other access is a fault."""
        self.memory.register(address, size, initialised=initialised, name=name)

    def register_tensors(self, **tensors: Any) -> None:
        """Register the storage of CPU torch tensors, under the names that faults then call them by."""
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            self.register_host(storage.data_ptr(), storage.nbytes(), name=name)

    def allocate(self, device: int, size: int) -> DevicePointer:
        self.device_info(device)
        return DevicePointer(self.memory.allocate(size))

    def free(self, device: int, pointer: DevicePointer) -> None:
        try:
            self.memory.remove(pointer)
        except KeyError:
            raise DriverError(f"freeing {pointer:#x}: nothing was allocated there") from None

    def copy_to_device(self, device: int, pointer: DevicePointer, data: bytes) -> None:
        found = self.memory.find(pointer)
        if found is None or pointer + len(data) > found.end:
            raise DriverError(f"copying {len(data)} bytes to {pointer:#x}: outside every allocation")
        start = pointer - found.origin
        found.block.data[start : start + len(data)] = memoryview(data)
        found.block.mark(start, start + len(data))

    def copy_from_device(self, device: int, pointer: DevicePointer, size: int) -> bytes:
        try:
            found: bytes = self.memory.bytes(pointer, size).tobytes()
        except KeyError:
            raise DriverError(f"copying {size} bytes from {pointer:#x}: outside every allocation") from None
        return found

    def synchronize(self, device: int) -> None:
        """Nothing to wait for: launches run to their end."""


class SimPrepared:
    """PreparedLaunch of the simulator."""

    def __init__(
        self, driver: SimDriver, kernel: SimKernel, config: LaunchConfig, layout: tuple[tuple[int, int], ...]
    ) -> None:
        self.driver, self.kernel, self.config, self.layout = driver, kernel, config, layout
        self.params = memoryview(bytearray(max((at + size for at, size in layout), default=0)))

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        self.config = replace(self.config, grid=grid)

    def launch(self, stream: int) -> None:
        """Run to the end. Raises Fault."""
        driver, kernel, config = self.driver, self.kernel, self.config
        self._check()
        params, known = self._ptx_params(), kernel.translation.entry.directives
        parts = cut(kernel.translation, config.grid, config.cluster)

        def machine(share: int, clusters: Sequence[int] | None) -> Machine:
            return Machine(
                kernel.translation,
                driver.memory,
                params,
                grid=config.grid,
                block=config.block,
                cluster=config.cluster,
                dynamic_smem=config.dynamic_smem,
                clusters=clusters,
                share=share,
                supposed=parts.supposed and clusters is not None,
                schedule=driver.schedule().of_share(share),
                checks=driver.checks,
                resident=driver.resident,
                tracer=driver.tracer,
                progress=driver.progress if clusters is None else None,
                predecessor=driver.footprint if config.pdl else None,
                registers=kernel.info.registers if {"reqntid", "maxntid", "maxnreg"} & known.keys() else 0,
                tensor_columns=kernel.tensor_columns,
            )

        for v in kernel.translation.static_globals:  # global memory like any other: there before a share begins
            driver.memory.variable(kernel.translation.name, v)
        size = math.prod(config.cluster)
        total = math.prod(config.grid)
        name, again = kernel.translation.entry.name, None if driver.tracer is None else driver.tracer.again
        launch = Launch(machine, driver.memory, parts, size, name, driver.progress, again)
        launch.run(1 if driver.tracer is not None else driver.processes or usable_cores())
        driver.footprint = launch.footprint if kernel.translation.lets_go else None
        driver.counters.instructions += launch.counters.instructions
        driver.counters.segments += launch.counters.segments
        driver.counters.seconds += launch.counters.seconds
        driver.counters.launches += 1
        driver.ctas += total
        driver.executed.add(kernel.translation.name)

    def _ptx_params(self) -> bytes:
        """The parameters at the offsets that the PTX text has: the cubin's may differ (see ParamSpec)."""
        entry = self.kernel.translation.entry
        buffer = bytearray(max((p.offset + p.size for p in entry.params), default=0))
        for param, (offset, size) in zip(entry.params, self.layout, strict=True):
            buffer[param.offset : param.offset + size] = self.params[offset : offset + size]
        return bytes(buffer)

    def _check(self) -> None:
        """What the chip would refuse. Raises LaunchFault."""
        chip, config, kernel = self.driver._chip, self.config, self.kernel
        name = kernel.translation.entry.name
        threads = config.block[0] * config.block[1] * config.block[2]
        shared = config.dynamic_smem + kernel.translation.static_shared
        required = kernel.translation.entry.directives.get("reqntid")
        entry = kernel.translation.entry
        if not 1 <= threads <= MAX_THREADS:
            raise LaunchFault(f"{name}: a block of {threads} threads: expected 1 to {MAX_THREADS}")
        if required and (*required, 1, 1)[:3] != config.block:
            raise LaunchFault(f"{name}: block {config.block}, and its code requires {required}")
        if config.dynamic_smem > kernel.dynamic_smem and config.dynamic_smem > 48 << 10:
            raise LaunchFault(f"{name}: {config.dynamic_smem} bytes of dynamic shared memory were never allowed")
        if shared > chip.smem_per_cta:
            raise LaunchFault(f"{name}: {shared} bytes of shared memory: {chip.name} has {chip.smem_per_cta}")
        if kernel.info.registers * -(-threads // 128) * 128 > chip.registers_per_sm:
            raise LaunchFault(
                f"{name}: {threads} threads of {kernel.info.registers} registers: "
                f"{chip.name} has {chip.registers_per_sm}"
            )
        if any(g % c for g, c in zip(config.grid, config.cluster, strict=True)):
            raise LaunchFault(f"{name}: grid {config.grid}: expected multiples of the cluster {config.cluster}")
        if len(entry.params) != len(self.layout):
            raise LaunchFault(f"{name}: {len(self.layout)} parameters, and its PTX takes {len(entry.params)}")
