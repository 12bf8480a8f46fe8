"""Options that several benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cubinery.runtime.errors import CubineryError, DriverError


def choose(option: str, text: str, known: Sequence[str], *, none: bool = False) -> list[str]:
    """The comma-separated names, each of `known`. Raises CubineryError."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if none and names == ["none"]:
        return []
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        allowed = ", ".join([*known, "none"] if none else known)
        raise CubineryError(f"{option} {text!r}: expected one or more of {allowed}")
    return list(dict.fromkeys(names))


def select_device(index: int) -> torch.device:
    """Make a device current and return it. Raises DriverError where there is none."""
    if not torch.cuda.is_available():
        raise DriverError("no CUDA device that torch can use: run this on a machine with a GPU (see nvidia-smi)")
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise DriverError(f"--device {index}: expected 0 to {count - 1}")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    torch.empty(1, device=device)  # makes the primary context current in this thread
    return device
