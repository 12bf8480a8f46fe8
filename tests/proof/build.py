"""Build the decode kernels of specs for other archs too, with the PTX that the simulator executes.

    PYTHONPATH=src:tests python -m proof.build --spec kernel_specs/proof/paged_decode.yaml \
        --arch sm_90a --arch sm_110a --out build/proof-sim

A spec's configurations are built for every arch that is named and that can have them: the twins of a covering set.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.spec import Gates, load_specs
from cubinery.aot.variants import BuildItem, expand
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import ConfigError
from cubinery.runtime.families import parse_key
from cubinery.runtime.ops.paged_decode.config import DecodeConfig


def twins(specs: Sequence[Path], archs: Sequence[str]) -> list[BuildItem]:
    """The specs' decode kernels, and what these require, for each arch; each once."""
    items: dict[str, BuildItem] = {}
    for item in expand(load_specs(specs)):
        if not isinstance(item.config, DecodeConfig):
            continue
        for arch in map(resolve, archs):
            for config in (item.config, *item.config.requires()):
                with contextlib.suppress(ConfigError):
                    config.check_arch(arch)
                    key = config.key(arch.name)
                    items[key] = BuildItem(key, config, arch, Gates(), ("ptx",), item.origin)
    return [items[key] for key in sorted(items)]


def build_keys(keys: Sequence[str], out: Path) -> None:
    """Kernels by key and what they require, with their PTX, into bundles under `out`; the cache makes it quick."""
    items: dict[str, BuildItem] = {}
    for key in keys:
        config, arch = parse_key(key)
        for needed in (config, *config.requires()):
            items[needed.key(arch)] = BuildItem(needed.key(arch), needed, resolve(arch), Gates(), ("ptx",), "test")
    report = build(list(items.values()), BuildOptions(out=out))
    assert report.ok, [(row.key, row.error) for row in report.rows]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.build", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--spec", type=Path, action="append", required=True)
    parser.add_argument("--arch", action="append", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--key", action="append", default=[], help="only keys that contain this (repeatable)")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    items = [
        item
        for item in twins(options.spec, options.arch)
        if not options.key or not isinstance(item.config, DecodeConfig) or any(text in item.key for text in options.key)
    ]
    report = build(items, BuildOptions(out=options.out, jobs=options.jobs))
    for row in report.rows:
        if row.error:
            print(f"{row.key}: {row.error}")
    print(f"{sum(not row.error for row in report.rows)} of {len(items)} kernels in {options.out}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
