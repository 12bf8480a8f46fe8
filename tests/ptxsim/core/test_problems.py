"""The registry of problems: found by module name, one file an implementation."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import fields
from pathlib import Path

from cubinery.aot import problems
from cubinery.runtime import ops
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.families import configs, families


def any_config(cls: type[KernelConfig]) -> KernelConfig:
    """The first legal configuration in the order of the axes' choices."""
    for values in itertools.product(*(f.metadata["choices"] for f in fields(cls))):
        with contextlib.suppress(ConfigError):
            return cls(**dict(zip(cls.axis_names(), values, strict=True)))
    raise AssertionError(f"no combination of {cls.__name__}'s axes is legal")


def test_every_implementation_has_a_check_or_is_required_by_one_that_has() -> None:
    shipped = {path.name for path in Path(ops.__file__).parent.iterdir()}  # other tests bring a family of their own
    for family in shipped.intersection(families()):
        known = configs(family)
        checked = {impl for impl in known if problems.check_of(family, impl) is not None}
        parts = {part.impl for impl in checked for part in any_config(known[impl]).requires()}
        assert checked | parts == set(known), family


def test_an_implementation_is_found_by_its_module() -> None:
    from cubinery.aot.problems.paged_decode import mma

    assert problems.check_of("paged_decode", "mma") is mma.check
    assert problems.check_of("paged_decode", "no_such_kernel") is None
    assert problems.check_of("no_such_family", "mma") is None
    assert problems.where("paged_decode", "append") == "aot/problems/paged_decode/append.py"


def test_subject_reads_its_key() -> None:
    library = object()
    found = problems.Subject.of(library, "paged_decode-sm_110a-mma-d128-p16-kvfp8", dict)  # type: ignore[arg-type]
    assert (found.config.family, found.config.impl, found.arch, found.seed) == ("paged_decode", "mma", "sm_110a", 7)
