"""What a kernel should cost, from its configuration and its machine code alone: for chips that nobody here can measure.

The registry is this folder: `cubinery.aot.estimates.<family>` holds the function
`estimate(config, arch, sass) -> tuple[Figure, ...]`, so a new family adds a file and edits no list.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of an estimate."""

    name: str
    value: float
    unit: str
    meaning: str
    """What it counts, in one line."""


Estimator = Callable[[KernelConfig, Arch, str], tuple[Figure, ...]]
"""Figures of a configuration on an arch from its disassembly. Raises InspectError."""


def estimator_of(family: str) -> Estimator | None:
    """The estimator of a family; None where it has none."""
    name = f"{__name__}.{family}"
    if importlib.util.find_spec(name) is None:
        return None
    found: Estimator = importlib.import_module(name).estimate
    return found
