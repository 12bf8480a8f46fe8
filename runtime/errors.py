"""Every error that cubinery raises on purpose.

One base, narrow subclasses. A message names the value, what was expected and where it was found;
`CubineryError` is what a command line may print without a traceback.
"""

from __future__ import annotations


class CubineryError(Exception):
    """Base of all errors that a caller can cause or cure."""


class ConfigError(CubineryError, ValueError):
    """A compile-time configuration names an unknown axis or breaks a rule of its family."""


class KeyFormatError(CubineryError, ValueError):
    """A kernel key cannot be parsed back to a configuration."""


class ArchError(CubineryError, ValueError):
    """An architecture name is unknown, missing or not served by a bundle."""


class BundleError(CubineryError):
    """A bundle's folder or manifest is missing, malformed or of an unknown version."""


class ManifestVersionError(BundleError):
    """A manifest's format or schema version is not one that this reader knows."""


class BundleConflictError(BundleError):
    """Two opened bundles hold the same key with different bytes."""


class IntegrityError(BundleError):
    """A file's bytes are not those that its manifest recorded."""


class AbiError(BundleError):
    """A loaded kernel's parameters are not those that its manifest recorded."""


class KernelNotFoundError(CubineryError, KeyError):
    """No opened bundle holds the kernel that was asked for."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0]) if self.args else ""


class ArgumentError(CubineryError, ValueError):
    """A launch argument has the wrong name, dtype, shape, stride, alignment, device or range."""


class PlanError(ArgumentError):
    """Sequence lengths or planner options that no plan can serve."""


class DriverError(CubineryError, RuntimeError):
    """The CUDA driver is missing, too old, or returned an error."""


class CaptureError(DriverError):
    """Something that a CUDA graph capture forbids (loading a module) was asked for during one."""


class ForkError(DriverError):
    """A library opened in a parent process was used in a forked child."""
