"""Kernels that were asked for and are in no bundle: recorded, and explained as what would add them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cubinery.runtime.config import KernelConfig
from cubinery.runtime.errors import ArgumentError, ConfigError, KeyFormatError
from cubinery.runtime.families import parse_key
from cubinery.runtime.manifest import Artifact

NEAREST = 3
"""Keys that a message suggests."""


class MissLog:
    """The missing keys of one library, each once, in order of the first request. Safe for many threads."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def record(self, key: str, config: KernelConfig, arch: str) -> None:
        """Note a missing key, once."""
        entry = {"key": key, "family": config.family, "arch": arch, "impl": config.impl, "axes": config.axes()}
        with self._lock:
            self._entries.setdefault(key, entry)

    def entries(self) -> tuple[dict[str, Any], ...]:
        """What was noted: key, family, arch, impl and axes of each."""
        with self._lock:
            return tuple(self._entries.values())

    def save(self, path: str | os.PathLike[str], roots: Sequence[Path]) -> Path:
        """Write a JSON list that `cubinery build --from-misses` reads; never inside a bundle of `roots`."""
        file = Path(path)
        for root in roots:
            if file.resolve().is_relative_to(root.resolve()):
                raise ArgumentError(f"{file}: lies in the bundle {root}, which is read only: name another place")
        try:
            file.write_text(json.dumps(self.entries(), indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentError(
                f"{file}: cannot write the misses there: {error.strerror}: name another place"
            ) from error
        return file


def explain(key: str, artifacts: Mapping[str, Artifact], roots: Sequence[Path], log: MissLog) -> str:
    """Record a miss and say what is nearest and what would add it. The message of KernelNotFoundError."""
    where = ", ".join(str(root) for root in roots)
    text = f"no kernel {key!r} in {where} ({len(artifacts)} keys)"
    try:
        config, arch = parse_key(key)
    except (KeyFormatError, ConfigError) as error:
        import difflib

        close = difflib.get_close_matches(key, artifacts, NEAREST, 0.0)
        return f"{text}: {error}" + (f"\nnearest: {', '.join(close)}" if close else "")
    log.record(key, config, arch)
    lines = [text, *(f"nearest: {name} ({why})" for name, why in _nearest(config, arch, artifacts))]
    lines += ["to add it, build these spec lines:", *(f"  {line}" for line in spec_lines(config, arch))]
    lines.append("or save the misses (Library.save_misses(FILE)) and run: cubinery build --from-misses FILE")
    return "\n".join(lines)


def spec_lines(config: KernelConfig, arch: str) -> list[str]:
    """A YAML spec of one configuration."""
    lines = [f"family: {config.family}", f"impl: {config.impl}", "matrix:", f"  arch: [{arch}]"]
    return lines + [f"  {name}: [{json.dumps(value).strip(chr(34))}]" for name, value in config.axes().items()]


def _nearest(config: KernelConfig, arch: str, artifacts: Mapping[str, Artifact]) -> list[tuple[str, str]]:
    """Keys of the family with the fewest differences, and the differences."""
    ranked = []
    for artifact in artifacts.values():
        if artifact.family != config.family:
            continue
        axes = config.axes()
        differs = [f"arch {artifact.arch}"] if artifact.arch != arch else []
        differs += [f"impl {artifact.impl}"] if artifact.impl != config.impl else []
        differs += [f"{n} {v}" for n, v in artifact.config.items() if n in axes and axes[n] != v]
        # Another implementation or arch is further away than any axis.
        distance = len(differs) + 100 * (artifact.impl != config.impl) + 50 * (artifact.arch != arch)
        ranked.append((distance, artifact.key, "it has " + ", ".join(differs or ["other axes"])))
    return [(key, why) for _, key, why in sorted(ranked)[:NEAREST]]
