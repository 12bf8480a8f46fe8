"""Compile and call launch_loop.c."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("launch_loop.c")

LaunchTriple = tuple[int, int, int]
"""(CUlaunchConfig, CUfunction, array of parameter addresses), each as an address."""

Loop = Callable[[int, Sequence[LaunchTriple], int], float]
"""(address of cuLaunchKernelEx, launches, repeats) -> nanoseconds a repeat; RuntimeError where a launch fails."""


class _Launch(ctypes.Structure):
    _fields_ = [("config", ctypes.c_void_p), ("function", ctypes.c_void_p), ("params", ctypes.c_void_p)]


def compilers() -> list[list[str]]:
    """Command lines, without files, of the C compilers that this machine has, $CC first."""
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    found = [[path, "-O2", "-shared", "-fPIC"] for name in names if name and (path := shutil.which(name))]
    return found + ([[nvcc, "-O2", "-shared", "-Xcompiler", "-fPIC"]] if nvcc else [])


def build() -> tuple[Loop | None, str]:
    """(the compiled loop, "") or (None, why there is none)."""
    tried = []
    for command in compilers():
        with tempfile.TemporaryDirectory(prefix="cubinery-bench-") as folder:
            target = Path(folder) / "launch_loop.so"
            done = subprocess.run(
                [*command, "-o", str(target), str(SOURCE)], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return _bind(ctypes.CDLL(str(target))), ""  # loaded code outlives its file
            tried.append(f"{command[0]}: {(done.stderr.strip().splitlines() or ['failed'])[0]:.80}")
    return None, "; ".join(tried) or "no C compiler (cc, gcc, clang or nvcc)"


def _bind(library: ctypes.CDLL) -> Loop:
    function = library.launch_loop
    function.restype = ctypes.c_int
    function.argtypes = [
        ctypes.c_void_p, ctypes.POINTER(_Launch), ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_double)
    ]  # fmt: skip

    def loop(launch: int, launches: Sequence[LaunchTriple], repeats: int) -> float:
        table = (_Launch * len(launches))(*(_Launch(*triple) for triple in launches))
        spent = ctypes.c_double()
        code = function(launch, table, len(launches), repeats, ctypes.byref(spent))
        if code:
            raise RuntimeError(f"cuLaunchKernelEx returned {code}")
        return spent.value / repeats

    return loop


def launch_address() -> int:
    """The address of cuLaunchKernelEx in the driver that this process uses."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.cast(driver.cuLaunchKernelEx, ctypes.c_void_p).value
    assert address is not None
    return address
