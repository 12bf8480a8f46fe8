"""Open bundles of compiled kernels and launch them by key. Importing this touches no GPU and no compiler.

    from cubinery.runtime import Library
    library = Library.open("build/kernels")
    kernel = library["paged_decode-sm_90a-mma-d128-p16-kvfp8"]

`Library` and the classes beside it load on first use; the errors are in `cubinery.runtime.errors` and here.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cubinery.runtime.errors import (
    AbiError,
    ArchError,
    ArgumentError,
    BundleConflictError,
    BundleError,
    CaptureError,
    ConfigError,
    CubineryError,
    DriverError,
    ForkError,
    IntegrityError,
    KernelNotFoundError,
    KeyFormatError,
    ManifestVersionError,
    PlanError,
)

if TYPE_CHECKING:
    from cubinery.runtime.kernel import BoundLaunch, Kernel
    from cubinery.runtime.library import Library
    from cubinery.runtime.manifest import Manifest

_LAZY = {
    "Library": "cubinery.runtime.library",
    "Kernel": "cubinery.runtime.kernel",
    "BoundLaunch": "cubinery.runtime.kernel",
    "Manifest": "cubinery.runtime.manifest",
}

__all__ = [
    "Library",
    "Kernel",
    "BoundLaunch",
    "Manifest",
    "CubineryError",
    "AbiError",
    "ArchError",
    "ArgumentError",
    "BundleConflictError",
    "BundleError",
    "CaptureError",
    "ConfigError",
    "DriverError",
    "ForkError",
    "IntegrityError",
    "KernelNotFoundError",
    "KeyFormatError",
    "ManifestVersionError",
    "PlanError",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found  # later look-ups find it here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
