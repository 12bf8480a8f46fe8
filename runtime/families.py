"""Families found by module name: `cubinery.runtime.ops.<family>.config` declares a family.

No list of families exists anywhere; adding the folder adds the family.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from cubinery.runtime.config import KernelConfig, split_key
from cubinery.runtime.errors import ConfigError, KeyFormatError


@cache
def families() -> tuple[str, ...]:
    """Names of the families this installation knows."""
    from cubinery.runtime import ops

    return tuple(sorted(m.name for m in pkgutil.iter_modules(ops.__path__) if m.ispkg))


@cache
def configs(family: str) -> dict[str, type[KernelConfig]]:
    """Implementation name to configuration class. Raises ConfigError for an unknown family."""
    if family not in families():
        raise ConfigError(f"unknown family {family!r}: expected one of {', '.join(families())}")
    found: dict[str, type[KernelConfig]] = importlib.import_module(f"cubinery.runtime.ops.{family}.config").CONFIGS
    return found


def config_class(family: str, impl: str) -> type[KernelConfig]:
    """The configuration class of one implementation. Raises ConfigError."""
    known = configs(family)
    if impl not in known:
        raise ConfigError(f"{family}: unknown implementation {impl!r}: expected one of {', '.join(known)}")
    return known[impl]


def parse_key(key: str) -> tuple[KernelConfig, str]:
    """(configuration, arch name) of a key. Raises KeyFormatError."""
    parts = split_key(key)
    try:
        cls = config_class(parts.family, parts.impl)
    except ConfigError as error:
        raise KeyFormatError(f"key {key!r}: {error}") from error
    config = cls.parse_tokens(list(parts.tokens), key)
    if config.key(parts.arch) != key:
        raise KeyFormatError(f"key {key!r} is not canonical: expected {config.key(parts.arch)!r}")
    return config, parts.arch
