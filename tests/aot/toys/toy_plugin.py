"""A family for tests: installs itself beside the real ones, here and in compile workers.

`compile_fake` makes a small cubin without any compiler and misbehaves where an axis says so;
`compile_real` is the product's own compile entry.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

import cubinery.aot.kernels
import cubinery.runtime.ops
from cubinery.aot.cache import Compiled
from cubinery.aot.worker import Job
from cubinery.runtime import families

HERE = Path(__file__).resolve().parent


def install() -> None:
    """Make `toy` a family of this process."""
    for package, folder in ((cubinery.runtime.ops, "ops"), (cubinery.aot.kernels, "kernels")):
        if str(HERE / folder) not in package.__path__:
            package.__path__.append(str(HERE / folder))
    families.families.cache_clear()
    families.configs.cache_clear()


install()

import fake_cubin  # noqa: E402 - the family must be there before its declaration is imported

from cubinery.aot.kernels.toy import abi  # noqa: E402
from cubinery.runtime.arch import resolve  # noqa: E402


def compile_fake(job: Job, scratch: Path) -> Compiled:
    """A cubin that passes every gate, after whatever the configuration's mode asks for."""
    config = families.config_class(job.family, job.impl).from_axes(job.axes)
    log = os.environ.get("TOY_LOG")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{job.key} {os.getpid()} {os.environ['CUTE_DSL_ARCH']}\n")
    mode = getattr(config, "mode", "ok")
    if mode == "segfault":
        ctypes.string_at(0)
    elif mode == "exit":
        print("the last words of a worker", flush=True)
        os._exit(3)
    elif mode == "hang":
        time.sleep(600)
    elif mode == "raise":
        raise ValueError("\x1b[91mno such layout\x1b[0m\n  in line 7")
    elif mode == "slow":
        time.sleep(float(os.environ.get("TOY_SLOW", "0.3")))
    elif mode == "greedy":
        block = bytearray(96 << 20)
        block[:: 1 << 12] = b"x" * len(block[:: 1 << 12])
    elif mode == "threads":
        for _ in range(8):
            threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    # A compiler that sees no GPU and ignores what it was asked for falls back to a chip of its own choice.
    target = resolve("sm_100a" if mode == "blind" else job.arch)
    record = abi.declare(config, target)
    cubin, ptx = fake_cubin.of_record(record, target, payload=job.key.encode())
    objects = {}
    for host in job.hosts:
        objects[host] = f"object of {job.key} for {host}".encode()
        objects[host.replace("object", "header", 1)] = f"header of {job.key}".encode()
    return Compiled(cubin, ptx, objects)


def compile_real(job: Job, scratch: Path) -> Compiled:
    """The product's compile entry; importing it late keeps the fake one free of it."""
    from cubinery.aot import compiler

    compiler.prepare(job.arch)
    return compiler.compile_item(job, scratch)


def compile_nothing(job: Job, scratch: Path) -> Compiled:
    """For builds that must not compile."""
    raise AssertionError(f"{job.key} was compiled")
