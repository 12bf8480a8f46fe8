"""Compile-time configurations: frozen dataclasses whose axes spell a readable, injective key.

A key is `family-arch-impl` followed by one `tag` + value token for each axis that has no default or
differs from it, in declaration order: `paged_decode-sm_90a-mma-d128-p16-kvfp8-q4`. Adding an axis
with a default therefore renames no key. Keys are file-name safe and parse back to the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Self

from cubinery.runtime.arch import Arch
from cubinery.runtime.errors import ConfigError, KeyFormatError


def axis(tag: str, *, choices: tuple[Any, ...], default: Any = MISSING, doc: str = "") -> Any:
    """A dataclass field that is a compile-time axis: its key tag and the values it may take."""
    metadata = {"tag": tag, "choices": choices, "doc": doc}
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """Base of every family's configurations. Construction validates; an instance is always legal.

    A subclass declares axes with `axis(...)`, sets `family` and `impl`, and overrides
    `canonical`, `check` and `requires` where it has something to say.
    """

    family: ClassVar[str]
    impl: ClassVar[str]

    def __post_init__(self) -> None:
        for f in fields(self):
            value, choices = getattr(self, f.name), f.metadata["choices"]
            # `True == 1`, so compare the type too: a boolean axis never accepts 1.
            if value not in choices or type(value) is not type(choices[choices.index(value)]):
                raise ConfigError(
                    f"{self.family}.{self.impl}: {f.name} = {value!r} is not supported: "
                    f"expected one of {', '.join(str(c) for c in choices)}"
                )
        self.check()

    # -- what a family may override ------------------------------------------------------------

    def check(self) -> None:
        """Raise ConfigError when a combination of axes breaks a rule on every arch."""

    def check_arch(self, arch: Arch) -> None:
        """Raise ConfigError when this configuration cannot be built for `arch` (budgets)."""

    def canonical(self) -> Self:
        """The representative of all configurations that compile to the same kernel."""
        return self

    def requires(self) -> tuple[KernelConfig, ...]:
        """Configurations of other artifacts that a launch of this one may need."""
        return ()

    # -- keys ----------------------------------------------------------------------------------

    @classmethod
    def axis_names(cls) -> tuple[str, ...]:
        """Names of the axes, in the order in which keys list them."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_axes(cls, axes: Mapping[str, Any]) -> Self:
        """Build from a mapping of axis names. Raises ConfigError on unknown or missing names."""
        known = cls.axis_names()
        for name in axes:
            if name not in known:
                raise ConfigError(f"{cls.family}.{cls.impl}: unknown axis {name!r}: expected {', '.join(known)}")
        missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in axes]
        if missing:
            raise ConfigError(f"{cls.family}.{cls.impl}: no value for {', '.join(missing)}")
        return cls(**axes)

    def axes(self) -> dict[str, Any]:
        """Axis name to value, in declaration order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def key(self, arch: str) -> str:
        """The key of the canonical configuration for `arch` (a canonical arch name)."""
        config = self.canonical()
        tokens = [self.family, arch, self.impl]
        for f in fields(config):
            value = getattr(config, f.name)
            if f.default is MISSING or value != f.default:
                tokens.append(f.metadata["tag"] + _spell(value))
        return "-".join(tokens)

    @classmethod
    def parse_tokens(cls, tokens: list[str], key: str) -> Self:
        """The configuration that the axis tokens of a key spell. Raises KeyFormatError."""
        spelled = {f.metadata["tag"] + _spell(c): (f.name, c) for f in fields(cls) for c in f.metadata["choices"]}
        axes: dict[str, Any] = {}
        for token in tokens:
            if token not in spelled:
                raise KeyFormatError(f"key {key!r}: {token!r} names no axis value of {cls.family}.{cls.impl}")
            name, value = spelled[token]
            if name in axes:
                raise KeyFormatError(f"key {key!r}: {name} is given twice")
            axes[name] = value
        try:
            config = cls.from_axes(axes)
        except ConfigError as error:
            raise KeyFormatError(f"key {key!r}: {error}") from error
        return config


def _spell(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


_KEY = re.compile(r"^[a-z0-9_]+(-[a-z0-9_]+){2,}$")


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A key in its parts; `tokens` are the axes that differ from their defaults."""

    family: str
    arch: str
    impl: str
    tokens: tuple[str, ...]


def split_key(key: str) -> ParsedKey:
    """The parts of a key, without knowing its family. Raises KeyFormatError."""
    if not _KEY.match(key):
        raise KeyFormatError(f"key {key!r} is malformed: expected family-arch-impl[-axis...]")
    family, arch, impl, *tokens = key.split("-")
    return ParsedKey(family, arch, impl, tuple(tokens))
