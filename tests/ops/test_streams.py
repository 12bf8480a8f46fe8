"""Uploads and stream ordering, with stand-ins for torch.cuda where a stream matters; and what imports torch."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.ops.paged_decode import streams
from cubinery.runtime.ops.paged_decode.streams import Upload, current_stream, on_stream, raw_stream

CPU = torch.device("cpu")
CUDA = torch.device("cuda:1")


def current(device: torch.device) -> int:
    function, argument = current_stream(device)
    return function(argument)


def test_raw_streams() -> None:
    class Stream:
        cuda_stream = 12

    assert raw_stream(CPU) == current(CPU) == 0
    assert raw_stream(CUDA, 7) == 7
    assert raw_stream(CUDA, Stream()) == 12
    for bad in ("0", 1.0, -1, True):
        with pytest.raises(ArgumentError, match="expected a torch stream, a raw handle or None"):
            raw_stream(CUDA, bad)


def test_the_current_stream_is_that_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_raw_current", lambda index: 100 + index)
    assert raw_stream(CUDA) == current(CUDA) == 101
    assert isinstance(on_stream(CUDA, 101), nullcontext)
    monkeypatch.setattr(streams, "_raw_current", None)  # an older or a vendor's torch
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("S", (), {"cuda_stream": 200 + device.index}))
    assert raw_stream(CUDA) == current(CUDA) == 201


def test_uploads_concatenate_and_rewrite() -> None:
    upload = Upload(CPU, 7, 0)
    upload.write([np.arange(4, dtype=np.int32).reshape(2, 2), np.array([9, 8, 7], np.int32)], 0)
    address = upload.tensor.data_ptr()
    assert upload.tensor.tolist() == [0, 1, 2, 3, 9, 8, 7]
    upload.write([np.array([5, 5], np.int32)], 0)
    assert upload.tensor.tolist() == [5, 5, 2, 3, 9, 8, 7]
    assert upload.tensor.data_ptr() == address


def test_another_stream_waits_for_the_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[Any] = []

    class Stream:
        def __init__(self, raw: int, device: Any = None) -> None:
            self.raw = raw

        def wait_event(self, event: Any) -> None:
            log.append(("wait", self.raw, event))

    class Tensor:
        def __init__(self, name: str) -> None:
            self.name = name

        def record_stream(self, stream: Stream) -> None:
            log.append(("keep", self.name, stream.raw))

    monkeypatch.setattr(streams._cuda, "ExternalStream", Stream)
    monkeypatch.setattr(streams._cuda, "default_stream", lambda device: Stream(0))
    upload = Upload(CPU, 1, 0)
    upload.device, upload.stream, upload._event, upload._tensor = CUDA, 5, "uploaded", Tensor("plan")  # type: ignore[assignment]
    upload.order(5, Tensor("workspace"))  # type: ignore[arg-type]
    assert log == []
    upload.order(6, Tensor("workspace"), None)  # type: ignore[arg-type]
    assert log == [("wait", 6, "uploaded"), ("keep", "plan", 6), ("keep", "workspace", 6)]
    log.clear()
    upload.order(0)
    assert log == [("wait", 0, "uploaded"), ("keep", "plan", 0)]


def test_only_the_public_call_imports_torch() -> None:
    """A builder, a planner or a selector must not pay the seconds that torch takes."""
    modules = ["config", "select", "planner", "formats", "quantize", "layouts", "tensors"]
    names = ", ".join(f"cubinery.runtime.ops.paged_decode.{m}" for m in modules)
    code = f"import sys, {names}; assert 'torch' not in sys.modules; assert 'cuda' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
