"""Axes of the toy family: a kernel that scales a vector, in shapes and with faults of every kind."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig, axis
from cubinery.runtime.errors import ConfigError

MODES = ("ok", "segfault", "exit", "hang", "raise", "slow", "greedy", "threads", "blind")
BODIES = ("plain", "stack", "static_smem", "dynamic_smem", "undeclared")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleConfig(KernelConfig):
    family: ClassVar[str] = "toy"
    impl: ClassVar[str] = "scale"

    width: int = axis("w", choices=(1, 2, 4, 8), doc="elements of one thread")
    dtype: str = axis("t", choices=("f32", "bf16", "f16"), default="f32", doc="element")
    masked: bool = axis("masked", choices=(True, False), default=True, doc="guard the tail")
    body: str = axis("body", choices=BODIES, default="plain", doc="what the kernel spends")
    mode: str = axis("mode", choices=MODES, default="ok", doc="how compiling it goes")
    helper: bool = axis("helper", choices=(True, False), default=False, doc="needs the helper kernel")
    ctas_per_sm: int = axis("cps", choices=(1, 2, 8), default=1, doc="CTAs that must fit one SM")

    def canonical(self) -> Self:
        return dataclasses.replace(self, masked=True) if self.width == 1 else self

    def check(self) -> None:
        if self.dtype == "f16" and self.width == 8:
            raise ConfigError("toy.scale: dtype f16 takes width 4 at most, found 8")

    def check_arch(self, arch: Arch) -> None:
        if self.dtype == "bf16" and self.width == 8 and arch.sm == 90:
            raise ConfigError(f"toy.scale: bf16 at width 8 needs tensor memory, which {arch.name} lacks")

    def requires(self) -> tuple[KernelConfig, ...]:
        return (HelperConfig(),) if self.helper else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperConfig(KernelConfig):
    family: ClassVar[str] = "toy"
    impl: ClassVar[str] = "helper"

    mode: str = axis("mode", choices=MODES, default="ok", doc="how compiling it goes")


CONFIGS: dict[str, type[KernelConfig]] = {c.impl: c for c in (ScaleConfig, HelperConfig)}
