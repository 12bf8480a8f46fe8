"""One configuration to cubin, PTX and host objects with the CuTe DSL. Runs in a worker process only.

With `kernels/` the only code that imports `cutlass`. The DSL reads its target from the environment at
import and keeps global state, so a process serves one arch; `CUTE_DSL_ARCH` is set by the builder
before the process starts.
"""

from __future__ import annotations

import importlib
import os
import shlex
from pathlib import Path
from typing import Any

from cubinery.aot.cache import Compiled
from cubinery.aot.errors import CompileError
from cubinery.aot.worker import Job
from cubinery.runtime.arch import resolve
from cubinery.runtime.families import config_class

FLAGS = "--keep-cubin --keep-ptx"
HOST_TARGETS = {"object": "", "object-linux-aarch64": "linux-aarch64"}
"""Emit name to the DSL's host target; the native host has none."""


def prepare(arch: str) -> None:
    """Import the compiler for `arch`, once per process. Raises CompileError where that cannot work."""
    if os.environ.get("CUTE_DSL_ARCH") != arch:
        raise CompileError(f"CUTE_DSL_ARCH is {os.environ.get('CUTE_DSL_ARCH')!r} in the worker: expected {arch!r}")
    importlib.import_module("cutlass.cute")


def compile_item(job: Job, scratch: Path) -> Compiled:
    """Compile a job in its private folder. Raises whatever the compiler raises, and CompileError."""
    config = config_class(job.family, job.impl).from_axes(job.axes)
    module = importlib.import_module(f"cubinery.aot.kernels.{job.family}.{job.impl}")
    function, arguments = module.entry(config, resolve(job.arch))
    compiled = _compile(function, arguments, job.arch, scratch / "device", "")
    cubin, ptx = compiled.artifacts.CUBIN, compiled.artifacts.PTX
    if not cubin or not ptx:
        raise CompileError(f"{job.key}: the compiler returned no {'PTX' if cubin else 'cubin'}")
    objects: dict[str, bytes] = {}
    for emit in job.hosts:
        target = HOST_TARGETS[emit]
        host = compiled if not target else _compile(function, arguments, job.arch, scratch / emit, target)
        if cubin != host.artifacts.CUBIN:
            raise CompileError(f"{job.key}: compiling for the host {target} changed the cubin")
        folder = scratch / f"{emit}-export"
        folder.mkdir()
        # The name ends up in C symbols; a key is lower case letters, digits, `_` and `-`.
        name = job.key.replace("-", "_")
        host.export_to_c(file_path=str(folder), file_name=name, function_prefix=name)
        objects[emit] = (folder / f"{name}.o").read_bytes()
        objects[emit.replace("object", "header", 1)] = (folder / f"{name}.h").read_bytes()
    return Compiled(cubin=bytes(cubin), ptx=str(ptx), objects=objects)


def _compile(function: Any, arguments: tuple[Any, ...], arch: str, folder: Path, host_target: str) -> Any:
    cute: Any = importlib.import_module("cutlass.cute")
    # Dumped names leave out compile-time constants: two variants in one folder overwrite each other.
    folder.mkdir()
    options = f"--gpu-arch {arch} {FLAGS} --dump-dir {shlex.quote(str(folder))}"
    if host_target:
        options += f" --host-target {host_target}"
    return cute.compile(function, *arguments, options=options)
