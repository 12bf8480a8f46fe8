"""The few calls of torch.cuda that an operator makes, each of which does nothing for tensors on the CPU.

A driver that executes on the host (a simulator) has CPU tensors and no streams; the same operator runs on it.
Imported by op.py alone, after torch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch  # noqa: TID253 - only op.py imports this module
from numpy.typing import NDArray

from cubinery.runtime.driver import Driver
from cubinery.runtime.errors import ArgumentError, CaptureError
from cubinery.runtime.library import Library

_cuda: Any = torch.cuda  # partly untyped

_NOTHING = nullcontext()

# The raw handle without building a Stream object, which takes longer than all other host work of a launch.
_raw_current: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def device_index(library: Library, device: int | str | torch.device | None) -> int:
    """The driver's index of a device, the current one for None or a type without a number. Raises ArgumentError."""
    if device is None:
        return library.driver.current_device()
    if isinstance(device, int):
        return device
    try:
        named: Any = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"device = {device!r}: expected an index or a torch device ({error})") from error
    return library.driver.current_device() if named.index is None else named.index


def raw_stream(device: torch.device, stream: Any = None) -> int:
    """The raw handle of a torch stream, of a handle, or (None) of the device's current stream; 0 on a CPU."""
    if stream is None:
        if device.type == "cpu":
            return 0
        return _raw_current(device.index) if _raw_current else int(torch.cuda.current_stream(device).cuda_stream)
    raw = getattr(stream, "cuda_stream", stream)
    if type(raw) is not int or raw < 0:
        raise ArgumentError(f"stream = {stream!r}: expected a torch stream, a raw handle or None")
    return raw


def current_stream(device: torch.device) -> tuple[Callable[[Any], int], Any]:
    """A function and its argument, which give what `raw_stream(device)` does, as fast as can be."""
    if device.type == "cpu":
        return int, 0
    return (raw_stream, device) if _raw_current is None else (_raw_current, device.index)


def torch_stream(device: torch.device, raw: int) -> Any:
    """The torch stream of a raw handle of a CUDA device."""
    return _cuda.ExternalStream(raw, device) if raw else _cuda.default_stream(device)


def on_stream(device: torch.device, raw: int) -> AbstractContextManager[Any]:
    """Allocate and copy on a stream: a context, free where it is the current one already."""
    if device.type == "cpu" or raw == raw_stream(device):
        return _NOTHING
    return torch.cuda.stream(torch_stream(device, raw))


class Upload:
    """Device memory of int32 that the host rewrites in place, in stream order and without waiting."""

    def __init__(self, device: torch.device, size: int, raw: int) -> None:
        self.device, self.stream = device, raw
        self._size = size
        self._tensor: torch.Tensor | None = None
        self._event: Any = None

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer, which the first write allocates."""
        assert self._tensor is not None, "nothing was written yet"
        return self._tensor

    def write(self, parts: list[NDArray[np.int32]], raw: int) -> None:
        """Copy the concatenation of `parts` to the start of the buffer, ordered on stream `raw`."""
        total = sum(part.size for part in parts)
        # A fresh pinned block each time: torch's host allocator hands one out again only when the copy that
        # reads it has ended, so that the next write cannot overtake this one.
        staging = torch.empty(total, dtype=torch.int32, pin_memory=self.device.type != "cpu")
        np.concatenate([part.reshape(-1) for part in parts], out=staging.numpy())
        with on_stream(self.device, raw):
            if self._tensor is None:
                self._tensor = torch.empty(self._size, dtype=torch.int32, device=self.device)
            self.tensor[:total].copy_(staging, non_blocking=True)
        self.written(raw)

    def written(self, raw: int) -> None:
        """Work on stream `raw` has rewritten the buffer: other streams must follow it from here on."""
        self.stream = raw
        if self.device.type != "cpu":
            if self._event is None:
                self._event = _cuda.Event()
            self._event.record(torch_stream(self.device, raw))

    def order(self, raw: int, *tensors: torch.Tensor | None) -> None:
        """Make work on stream `raw` wait for the last write, and keep the memory until that work ends.

        `tensors` are others that the same work uses and that were allocated on another stream.
        """
        if raw == self.stream or self.device.type == "cpu":
            return
        stream = torch_stream(self.device, raw)
        stream.wait_event(self._event)
        for tensor in (self.tensor, *tensors):
            if tensor is not None:
                tensor.record_stream(stream)


def check_not_capturing(driver: Driver, what: str, stream: int) -> None:
    """Raise CaptureError if a graph capture is under way on a stream; `what` is what copies from the host."""
    if driver.is_capturing(stream):
        raise CaptureError(
            f"{what} copies from the host, which a graph must not repeat: plan before the capture, and call "
            "update before each replay"
        )
