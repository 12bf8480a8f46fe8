"""The simulator's errors, all under cubinery's base."""

from __future__ import annotations

from cubinery.runtime.errors import CubineryError


class SimError(CubineryError):
    """The simulator cannot execute this, or the kernel did something wrong (see faults.py)."""
