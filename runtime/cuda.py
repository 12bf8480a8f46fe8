"""CudaDriver: a GPU through cuda-python. The only file that imports it.

Modules are loaded into each device's primary context, the one that torch and the CUDA runtime use too,
one load a device: on a machine of mixed GPUs a cubin never meets a chip that it is not for.
"""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cubinery.runtime.driver import DeviceInfo, DevicePointer, LaunchConfig
from cubinery.runtime.errors import CaptureError, DriverError
from cubinery.runtime.manifest import TensorMapSpec

try:
    from cuda.bindings import driver as cu
except ImportError as error:
    raise DriverError(f"cuda-python is missing ({error}): pip install 'cuda-python>=13,<14'") from error

_SUCCESS = 0
_PARAM_ALIGN = 64  # of a tensor map, the strictest parameter
_SPECIAL_STREAMS = 2
"""Handles up to this (default, legacy, per-thread) name a stream of whichever context is current."""
_PORTABLE_CLUSTER = 8
_NO_SUCH_CLUSTER = (
    cu.CUresult.CUDA_ERROR_INVALID_CLUSTER_SIZE,
    cu.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
)
_TENSOR_MAP_SINCE = 12000

_HINTS = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible: see nvidia-smi and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_NOT_INITIALIZED": "CUDA was started before this process was forked: start workers with 'spawn'",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the cubin is for another architecture",
    "CUDA_ERROR_INVALID_IMAGE": "the driver does not know this cubin: it may be older than the bundle needs",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and the user-mode driver differ: reboot or reinstall",
}


def _unwrap(result: tuple[Any, ...], attempted: str) -> Any:
    """The value of a driver call, or DriverError (CaptureError) saying which error, and what was attempted."""
    code, *values = result
    if code != _SUCCESS:
        raise _error(code, attempted)
    return values[0] if len(values) == 1 else tuple(values)


def _error(code: Any, attempted: str) -> DriverError:
    name = getattr(code, "name", f"CUDA error {int(code)}")
    status, text = cu.cuGetErrorString(cu.CUresult(code))
    description = text.decode(errors="replace") if status == _SUCCESS and text else "no description"
    hint = f" ({_HINTS[name]})" if name in _HINTS else ""
    if "STREAM_CAPTURE" in name:
        return CaptureError(
            f"{attempted}: {name}: {description}: not allowed during a graph capture; preload before it"
        )
    return DriverError(f"{attempted}: {name}: {description}{hint}")


def _encoder() -> Callable[..., int]:
    """cuTensorMapEncodeTiled as a function of plain integers and arrays."""
    result = cu.cuGetProcAddress(b"cuTensorMapEncodeTiled", _TENSOR_MAP_SINCE, 0)
    pointer, _ = _unwrap(result, "looking up cuTensorMapEncodeTiled")
    address, word = ctypes.c_void_p, ctypes.c_int
    kinds = (address, word, ctypes.c_uint32, address, address, address, address, address, word, word, word, word)
    return ctypes.CFUNCTYPE(word, *kinds)(int(pointer))


@dataclass(frozen=True, slots=True)
class _Module:
    device: int
    context: Any
    handle: Any


@dataclass(slots=True)
class _Kernel:
    device: int
    context: Any
    function: Any
    symbol: str
    attributes: dict[Any, int] = field(default_factory=dict)
    """Function attributes that were set, so that each is set once."""


class CudaDriver:
    """Driver over cuda.bindings. Safe for many threads. Contexts and modules live as long as the process."""

    def __init__(self) -> None:
        """Start CUDA. Raises DriverError where there is no driver or no device."""
        try:
            _unwrap(cu.cuInit(0), "starting CUDA")
            self._version: int = _unwrap(cu.cuDriverGetVersion(), "asking the driver's version")
            self._count: int = _unwrap(cu.cuDeviceGetCount(), "counting devices")
        except DriverError:
            raise
        except (RuntimeError, OSError) as error:  # how cuda-python says that libcuda.so.1 cannot be loaded
            raise DriverError(
                f"no CUDA driver on this machine ({error}): install the NVIDIA driver; "
                "building kernels needs none, running them does"
            ) from error
        self._contexts: dict[int, Any] = {}
        self._infos: dict[int, DeviceInfo] = {}
        self._lock = threading.Lock()
        self._encode = _encoder()

    # -- devices -------------------------------------------------------------------------------

    def device_count(self) -> int:
        return self._count

    def current_device(self) -> int:
        result = cu.cuCtxGetDevice()
        if result[0] == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # this thread chose none yet
            return 0
        return int(_unwrap(result, "asking for the current device"))

    def device_info(self, device: int) -> DeviceInfo:
        found = self._infos.get(device)
        if found is None:
            handle = self._device(device)
            attribute = cu.CUdevice_attribute
            major, minor, sms = (
                _unwrap(cu.cuDeviceGetAttribute(which, handle), f"asking an attribute of device {device}")
                for which in (
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                    attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                    attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                )
            )
            name = _unwrap(cu.cuDeviceGetName(256, handle), f"asking the name of device {device}")
            text = name.split(b"\0")[0].decode(errors="replace")
            found = self._infos[device] = DeviceInfo(device, text, (major, minor), sms, self._version)
        return found

    def torch_device(self, device: int) -> str:
        return f"cuda:{device}"

    def _device(self, device: int) -> Any:
        if not 0 <= device < self._count:
            raise DriverError(f"device {device}: expected 0 to {self._count - 1}, as CUDA sees {self._count} devices")
        return _unwrap(cu.cuDeviceGet(device), f"opening device {device}")

    def _context(self, device: int) -> Any:
        """The primary context, retained once and kept."""
        context = self._contexts.get(device)
        if context is None:
            with self._lock:
                context = self._contexts.get(device)
                if context is None:
                    what = f"retaining the primary context of device {device}"
                    context = _unwrap(cu.cuDevicePrimaryCtxRetain(self._device(device)), what)
                    self._contexts[device] = context
        return context

    @contextmanager
    def _on(self, device: int) -> Iterator[Any]:
        """Make a device's primary context current for a while, whatever was current before."""
        context = self._context(device)
        _unwrap(cu.cuCtxPushCurrent(context), f"entering the context of device {device}")
        try:
            yield context
        finally:
            _unwrap(cu.cuCtxPopCurrent(), f"leaving the context of device {device}")

    # -- modules and kernels -------------------------------------------------------------------

    def load_module(self, device: int, image: bytes) -> _Module:
        with self._on(device) as context:
            handle = _unwrap(cu.cuModuleLoadData(image), f"loading a cubin of {len(image)} bytes on device {device}")
        return _Module(device, context, handle)

    def get_kernel(self, module: _Module, symbol: str) -> _Kernel:
        what = f"kernel {symbol!r} on device {module.device}"
        with self._on(module.device):
            function = _unwrap(cu.cuModuleGetFunction(module.handle, symbol.encode()), f"getting {what}")
            # Under lazy loading the code would otherwise travel at the first launch, perhaps in a capture.
            _unwrap(cu.cuFuncLoad(function), f"loading {what}")
        return _Kernel(module.device, module.context, function, symbol)

    def kernel_params(self, kernel: _Kernel) -> Sequence[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        with self._on(kernel.device):
            while True:
                result = cu.cuFuncGetParamInfo(kernel.function, len(found))
                if result[0] == cu.CUresult.CUDA_ERROR_INVALID_VALUE:  # there is no parameter of this index
                    return found
                offset, size = _unwrap(result, f"asking for parameter {len(found)} of {kernel.symbol}")
                found.append((int(offset), int(size)))

    def set_dynamic_smem(self, kernel: _Kernel, size: int) -> None:
        self._set(kernel, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, size)

    def _set(self, kernel: _Kernel, attribute: Any, value: int) -> None:
        if kernel.attributes.get(attribute) == value:
            return
        with self._on(kernel.device):
            what = f"setting {attribute.name} = {value} for {kernel.symbol} on device {kernel.device}"
            _unwrap(cu.cuFuncSetAttribute(kernel.function, attribute, value), what)
        kernel.attributes[attribute] = value

    def prepare(
        self, kernel: _Kernel, config: LaunchConfig, param_layout: Sequence[tuple[int, int]]
    ) -> CudaPreparedLaunch:
        if config.carveout >= 0:
            which = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._set(kernel, which, config.carveout)
        x, y, z = config.cluster
        if x * y * z > _PORTABLE_CLUSTER:
            self._set(kernel, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1)
        return CudaPreparedLaunch(kernel, config, param_layout, several_devices=self._count > 1)

    def max_clusters(self, kernel: _Kernel, config: LaunchConfig) -> int:
        built = _launch_config(dataclasses.replace(config, grid=config.cluster))
        with self._on(kernel.device):
            found = cu.cuOccupancyMaxActiveClusters(kernel.function, built)
            if found[0] in _NO_SUCH_CLUSTER:
                return 0
            what = f"asking how many clusters of {kernel.symbol} device {kernel.device} holds"
            return int(_unwrap(found, what))

    def encode_tensor_map(
        self, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        # The result must lie on 64 bytes. The bindings' own CUtensorMap lies where Python's allocator puts it,
        # so the entry point is called with a buffer that is aligned here.
        buffer = ctypes.create_string_buffer(128 + _PARAM_ALIGN)
        skip = -ctypes.addressof(buffer) % _PARAM_ALIGN
        rank = spec.rank
        wide, narrow = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
        values = (
            ctypes.addressof(buffer) + skip,
            _DTYPES[spec.dtype],
            rank,
            address,
            wide(*extents),
            wide(*strides),
            narrow(*spec.box),
            narrow(*spec.element_strides),
            _INTERLEAVES[spec.interleave.lower()],
            _SWIZZLES[spec.swizzle.lower()],
            _L2_PROMOTIONS["none" if spec.l2_promotion == "none" else f"l2_{spec.l2_promotion.lower()}"],
            _OOB_FILLS[spec.oob_fill],
        )
        code = self._encode(*values)
        if code == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            # A thread that has not used CUDA yet. The map depends on no context, so any will do.
            with self._on(next(iter(self._contexts), 0)):
                code = self._encode(*values)
        if code != _SUCCESS:
            raise _error(
                cu.CUresult(code),
                f"encoding tensor map {spec.name} ({spec.dtype}, box {spec.box}, extents {tuple(extents)}, "
                f"strides {tuple(strides)} bytes, swizzle {spec.swizzle}) at {address:#x}",
            )
        return buffer.raw[skip : skip + 128]

    def is_capturing(self, stream: int) -> bool:
        result = cu.cuStreamIsCapturing(cu.CUstream(stream))
        if result[0] == cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
            return True  # asked of the legacy stream while a stream that it synchronises with is capturing
        if result[0] == cu.CUresult.CUDA_ERROR_INVALID_CONTEXT and stream <= _SPECIAL_STREAMS:
            return False  # no context is current, so the default stream belongs to none
        status = _unwrap(result, f"asking whether stream {stream:#x} is capturing")
        return bool(status != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, device: int, size: int) -> DevicePointer:
        with self._on(device):
            pointer = _unwrap(cu.cuMemAlloc(max(size, 1)), f"allocating {size} bytes on device {device}")
        return DevicePointer(int(pointer))

    def free(self, device: int, pointer: DevicePointer) -> None:
        with self._on(device):
            _unwrap(cu.cuMemFree(pointer), f"freeing {pointer:#x} on device {device}")

    def copy_to_device(self, device: int, pointer: DevicePointer, data: bytes) -> None:
        if data:
            with self._on(device):
                _unwrap(cu.cuMemcpyHtoD(pointer, data, len(data)), f"copying {len(data)} bytes to {pointer:#x}")

    def copy_from_device(self, device: int, pointer: DevicePointer, size: int) -> bytes:
        data = bytearray(size)
        if size:
            with self._on(device):
                _unwrap(cu.cuMemcpyDtoH(data, pointer, size), f"copying {size} bytes from {pointer:#x}")
        return bytes(data)

    def synchronize(self, device: int) -> None:
        with self._on(device):
            _unwrap(cu.cuCtxSynchronize(), f"waiting for device {device}")


def _values(kind: Any, prefix: str) -> dict[str, int]:
    """Enumerator to number, by the name that manifests use: what follows the prefix, in lower case."""
    return {name.removeprefix(prefix + "_").lower(): int(v) for name, v in kind.__members__.items()}


_DTYPES = _values(cu.CUtensorMapDataType, "CU_TENSOR_MAP_DATA_TYPE")
_INTERLEAVES = _values(cu.CUtensorMapInterleave, "CU_TENSOR_MAP_INTERLEAVE")
_SWIZZLES = _values(cu.CUtensorMapSwizzle, "CU_TENSOR_MAP_SWIZZLE")
_L2_PROMOTIONS = _values(cu.CUtensorMapL2promotion, "CU_TENSOR_MAP_L2_PROMOTION")
_OOB_FILLS = {
    "zero": int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    "nan": int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA),
}


class CudaPreparedLaunch:
    """A CUlaunchConfig and a parameter array, built once. Launching is one call of cuLaunchKernelEx."""

    __slots__ = (
        "_buffer",
        "_config",
        "_exported",
        "_function",
        "_kernel",
        "_launch",
        "_pointers",
        "_pointers_address",
        "_several",
        "_stream",
        "params",
    )

    def __init__(
        self, kernel: _Kernel, config: LaunchConfig, layout: Sequence[tuple[int, int]], *, several_devices: bool
    ) -> None:
        self._kernel, self._function, self._launch = kernel, kernel.function, cu.cuLaunchKernelEx
        self._several = several_devices
        size = max((offset + length for offset, length in layout), default=0)
        self._buffer = bytearray(size + _PARAM_ALIGN)
        # from_buffer holds the bytearray's memory in place, so these addresses stay good.
        self._exported = (ctypes.c_char * len(self._buffer)).from_buffer(self._buffer)
        base = ctypes.addressof(self._exported)
        start = -base % _PARAM_ALIGN
        self.params = memoryview(self._buffer)[start : start + size]
        self._pointers = (ctypes.c_void_p * len(layout))(*(base + start + offset for offset, _ in layout))
        self._pointers_address = ctypes.addressof(self._pointers) if layout else 0
        self._config = _launch_config(config)
        self._stream = 0

    def set_grid(self, grid: tuple[int, int, int]) -> None:
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = grid

    def launch(self, stream: int) -> None:
        if stream != self._stream:
            self._config.hStream = cu.CUstream(stream)
            self._stream = stream
        if self._several and stream <= _SPECIAL_STREAMS:
            self._launch_in_context()
            return
        code = self._launch(self._config, self._function, self._pointers_address, 0)[0]
        if code:
            self._recover(code)

    def _launch_in_context(self) -> None:
        """The default stream is the current context's: make sure that it is the kernel's."""
        context = self._kernel.context
        current = _unwrap(cu.cuCtxGetCurrent(), "asking for the current context")
        pushed = int(current) != int(context)
        if pushed:
            _unwrap(cu.cuCtxPushCurrent(context), f"entering the context of device {self._kernel.device}")
        try:
            code = self._launch(self._config, self._function, self._pointers_address, 0)[0]
        finally:
            if pushed:
                _unwrap(cu.cuCtxPopCurrent(), f"leaving the context of device {self._kernel.device}")
        if code:
            raise self._error(code)

    def _recover(self, code: Any) -> None:
        """A thread that has not used CUDA yet has no current context: enter the kernel's and launch once more."""
        if code in (cu.CUresult.CUDA_ERROR_INVALID_CONTEXT, cu.CUresult.CUDA_ERROR_INVALID_HANDLE):
            current = _unwrap(cu.cuCtxGetCurrent(), "asking for the current context")
            if int(current) != int(self._kernel.context):
                self._launch_in_context()
                return
        raise self._error(code)

    def _error(self, code: Any) -> DriverError:
        c = self._config
        return _error(
            code,
            f"launching {self._kernel.symbol} on device {self._kernel.device}, stream {self._stream:#x}, grid "
            f"({c.gridDimX}, {c.gridDimY}, {c.gridDimZ}), block ({c.blockDimX}, {c.blockDimY}, {c.blockDimZ}), "
            f"{c.sharedMemBytes} bytes of dynamic shared memory",
        )


def _launch_config(config: LaunchConfig) -> Any:
    built = cu.CUlaunchConfig()
    built.gridDimX, built.gridDimY, built.gridDimZ = config.grid
    built.blockDimX, built.blockDimY, built.blockDimZ = config.block
    built.sharedMemBytes = config.dynamic_smem
    built.hStream = cu.CUstream(0)
    attributes = []
    if config.pdl:
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if config.cluster != (1, 1, 1):
        attribute = cu.CUlaunchAttribute()
        attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster = attribute.value.clusterDim
        cluster.x, cluster.y, cluster.z = config.cluster
        attributes.append(attribute)
    if attributes:
        built.attrs = attributes
        built.numAttrs = len(attributes)
    return built
