"""The narrow seam between cubinery and whatever executes a kernel.

`CudaDriver` (cuda.py) is a GPU through cuda-python; `SimDriver` (aot/ptxsim) executes PTX on the CPU;
tests bring fakes. All receive the same manifest records, packed parameters and tensor maps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NewType, Protocol

from cubinery.runtime.manifest import TensorMapSpec

DevicePointer = NewType("DevicePointer", int)
"""An address in a device's memory."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What a driver says of one device."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    sm_count: int
    driver_version: int
    """CUDA API version that the driver supports: 13000."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Everything of a launch that is not a parameter."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    carveout: int = -1
    pdl: bool = False


class PreparedLaunch(Protocol):
    """A launch whose driver structures exist already, so that repeating it costs one driver call.

    It works on any stream of its device, whichever device is current, and under graph capture.

    `params` is the packed parameter buffer (one bytearray, offsets as in the manifest); the owner
    may change its bytes between launches. Not safe for two threads at once.
    """

    params: memoryview

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        """CTAs of the next launches, within what a grid may be."""

    def launch(self, stream: int) -> None:
        """Enqueue on a raw stream handle (0 is the default stream). Raises DriverError."""


class Driver(Protocol):
    """One process's access to its devices."""

    def device_count(self) -> int:
        """Devices that this process sees."""

    def current_device(self) -> int:
        """The device that the calling thread uses now; 0 where it chose none."""

    def device_info(self, device: int) -> DeviceInfo:
        """What is known of a device. Raises DriverError where there is no such index."""

    def torch_device(self, device: int) -> str:
        """Where torch tensors must live whose addresses a launch on `device` may be given: `cuda:0`, or `cpu`."""

    def load_module(self, device: int, image: bytes) -> Any:
        """Load a cubin (or what this driver executes) on a device; returns an opaque module.

        Modules stay loaded for the life of the process: a captured graph may hold their kernels.
        """

    def get_kernel(self, module: Any, symbol: str) -> Any:
        """The kernel of that name in a module; returns an opaque kernel bound to the module's device."""

    def kernel_params(self, kernel: Any) -> Sequence[tuple[int, int]]:
        """(offset, size) of every parameter, as the loaded code has them."""

    def set_dynamic_smem(self, kernel: Any, size: int) -> None:
        """Allow launches of `kernel` to use `size` bytes of dynamic shared memory."""

    def prepare(self, kernel: Any, config: LaunchConfig, param_layout: Sequence[tuple[int, int]]) -> PreparedLaunch:
        """Build what a launch needs; `param_layout` is (offset, size) of every parameter.

        The first call for a kernel also sets its shared memory carveout, so make it before a capture.
        """

    def max_clusters(self, kernel: Any, config: LaunchConfig) -> int:
        """Clusters of a launch that the device holds at once, as far as it is empty; 0: it cannot hold such a one."""

    def encode_tensor_map(
        self, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        """The 128 bytes of a CUtensorMap; extents in elements, strides in bytes for dimensions 1 and up."""

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph capture is under way on a raw stream handle."""

    def allocate(self, device: int, size: int) -> DevicePointer:
        """`size` bytes on a device, aligned to 256. Raises DriverError."""

    def free(self, device: int, pointer: DevicePointer) -> None:
        """Give back what `allocate` returned."""

    def copy_to_device(self, device: int, pointer: DevicePointer, data: bytes) -> None:
        """Copy bytes there; done when it returns."""

    def copy_from_device(self, device: int, pointer: DevicePointer, size: int) -> bytes:
        """Copy `size` bytes back, after all earlier work of the default stream."""

    def synchronize(self, device: int) -> None:
        """Wait for all work of a device. Raises DriverError with the failure of any of it."""
