"""CudaDriver against a stand-in for libcuda.so.1: every driver call it makes, on a machine without a GPU.

The stand-in (stub_libcuda.c) is compiled here and keeps the driver's rules about contexts and streams; its
log shows what really crossed the C interface.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STUB = Path(__file__).with_name("stub_libcuda.c")
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler for the stand-in of libcuda.so.1")

SCRIPT = """
import ctypes, json, sys, threading
from cubinery.runtime.cuda import CudaDriver
from cubinery.runtime.driver import LaunchConfig
from cubinery.runtime.errors import CubineryError
from cubinery.runtime.manifest import TensorMapSpec
stub = ctypes.CDLL("libcuda.so.1")
stub.stub_log.restype = ctypes.c_char_p
result = {}
def log():
    lines = stub.stub_log().decode().splitlines()
    stub.stub_clear()
    return lines
def attempt(call):
    try:
        return call()
    except CubineryError as error:
        return [type(error).__name__, str(error)]
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-in, for LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("stub")
    assert COMPILER is not None
    command = [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(STUB)]
    subprocess.run(command, check=True)
    return folder


def run(root: Path, stub: Path, body: str, **env: str) -> Any:
    """Run a script against the stand-in; what it left in `result`."""
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + body + "\nprint(json.dumps(result))"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths, "LD_LIBRARY_PATH": str(stub), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def results(root: Path, stub: Path) -> Any:
    return run(root, stub, """
driver = CudaDriver()
result["start"] = log()
result["count"] = driver.device_count()
info = driver.device_info(1)
result["info"] = [info.index, info.name, info.compute_capability, info.sm_count, info.driver_version]
result["current"] = [driver.current_device()]
stub.cuCtxSetCurrent(ctypes.c_void_p(101))
result["current"].append(driver.current_device())
stub.cuCtxSetCurrent(ctypes.c_void_p(100))
result["bad device"] = attempt(lambda: driver.device_info(2))

module = driver.load_module(1, b"STUB kern 3 0 128 128 8 136 4\\0")
kernel = driver.get_kernel(module, "kern")
result["load"] = log()
result["params"] = driver.kernel_params(kernel)
result["no symbol"] = attempt(lambda: driver.get_kernel(module, "nope"))
result["bad image"] = attempt(lambda: driver.load_module(0, b"\\x7fELF"))
log()

layout = [(0, 128), (128, 8), (136, 4)]
config = LaunchConfig((1, 1, 1), (128, 1, 1), (2, 1, 1), 90000, 100, True)
driver.set_dynamic_smem(kernel, 90000)
prepared = driver.prepare(kernel, config, layout)
driver.prepare(kernel, config, layout)
result["attributes"] = log()
prepared.params[:] = bytes(range(140))
prepared.set_grid((3, 4, 5))
prepared.launch(0)
prepared.launch(0x5001)
prepared.params[136:140] = b"\\xff" * 4
prepared.launch(0x5001)
prepared.launch(2)
result["launches"] = log()
result["context after"] = driver.current_device()
result["foreign stream"] = attempt(lambda: prepared.launch(0x5000))
greedy = driver.prepare(kernel, LaunchConfig((1, 1, 1), (32, 1, 1), dynamic_smem=90001), layout)
result["too much smem"] = attempt(lambda: greedy.launch(0x5001))
big = driver.prepare(kernel, LaunchConfig((1, 1, 1), (32, 1, 1), (16, 1, 1)), layout)
result["big cluster"] = log()
result["clusters"] = [
    attempt(lambda: driver.max_clusters(kernel, LaunchConfig((9, 9, 9), (32, 1, 1), (size, 1, 1))))
    for size in (2, 8, 16, 17)
]

empty = driver.get_kernel(driver.load_module(0, b"STUB none 0\\0"), "none")
bare = driver.prepare(empty, LaunchConfig((7, 1, 1), (32, 1, 1)), [])
log()
def in_thread():
    bare.launch(0)
    bare.launch(0x5000)
    result["thread device"] = driver.current_device()
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
result["thread"] = log()

result["capturing"] = [driver.is_capturing(s) for s in (0, 1, 0x5001, 0x6001)]
def fresh():
    result["capturing without context"] = driver.is_capturing(0)
thread = threading.Thread(target=fresh)
thread.start()
thread.join()

spec = TensorMapSpec("m", "p", "bfloat16", (8, 16), (1, 2), ("a", "b"), ("c",), "128B", "none", "256B", "nan")
result["map"] = driver.encode_tensor_map(spec, 4096, (64, 100), (128,)).hex()
def encode_in_thread():
    result["map in a thread"] = driver.encode_tensor_map(spec, 4096, (64, 100), (128,)).hex()
    result["thread device after a map"] = driver.current_device()
thread = threading.Thread(target=encode_in_thread)
thread.start()
thread.join()
spec = TensorMapSpec("m", "p", "16u6_align16b", (128,), (1,), ("a",), (), "none", "16B", "none", "zero")
result["map of rank 1"] = driver.encode_tensor_map(spec, 32, (1 << 32,), ()).hex()
spec = TensorMapSpec("bad", "p", "uint8", (1,) * 5, (1,) * 5, (1,) * 5, (16,) * 4)
result["bad map"] = attempt(lambda: driver.encode_tensor_map(spec, 16, (1,) * 5, (16,) * 4))
result["aligned"] = all(driver.encode_tensor_map(
    TensorMapSpec("m", "p", "uint8", (8,), (1,), (8,), ()), 16, (8,), ()) for _ in range(50))

pointer = driver.allocate(1, 10)
driver.copy_to_device(1, pointer, b"0123456789")
result["copied"] = driver.copy_from_device(1, pointer + 2, 3).decode()
driver.copy_to_device(1, pointer, b"")
result["empty"] = driver.copy_from_device(1, pointer, 0).decode()
driver.free(1, pointer)
driver.free(1, driver.allocate(1, 0))
log()
driver.synchronize(1)
result["synchronize"] = log()
""")  # fmt: skip


def test_starting_touches_no_device(results: Any) -> None:
    assert results["start"] == []
    assert results["count"] == 2
    assert results["info"] == [1, "Stub 1", [10, 0], 133, 13020]


def test_the_current_device_is_that_of_the_current_context(results: Any) -> None:
    assert results["current"] == [0, 1]
    assert results["bad device"][0] == "DriverError"
    assert "device 2: expected 0 to 1" in results["bad device"][1]


def test_modules_load_into_the_context_of_their_device_and_at_once(results: Any) -> None:
    assert results["load"] == ["retain 1", "load 1 #1", "funcload kern"]
    assert results["params"] == [[0, 128], [128, 8], [136, 4]]
    assert "getting kernel 'nope' on device 1: CUDA_ERROR_NOT_FOUND: stub description" in results["no symbol"][1]
    assert "loading a cubin of 4 bytes on device 0: CUDA_ERROR_INVALID_IMAGE" in results["bad image"][1]


def test_attributes_are_set_once_on_the_device_of_the_kernel(results: Any) -> None:
    assert results["attributes"] == ["attribute 1 8=90000", "attribute 1 9=100"]
    assert results["big cluster"] == ["attribute 1 14=1"], "only clusters that are not portable ask for it"


def test_how_many_clusters_fit(results: Any) -> None:
    """None where a cluster is too large for the device; other failures are errors that say what was asked."""
    *counts, failure = results["clusters"]
    assert counts == [32, 8, 0]
    assert failure[0] == "DriverError"
    assert "asking how many clusters of kern device 1 holds" in failure[1]


def test_a_launch_carries_config_attributes_and_parameters_to_the_stream(results: Any) -> None:
    what = "grid=3,4,5 block=128,1,1 smem=90000 pdl=1 cluster=2,1,1 params="
    first, changed = bytes(range(140)).hex(), (bytes(range(136)) + b"\xff" * 4).hex()
    assert results["launches"] == [
        f"launch 1 stream=0 {what}{first}",
        f"launch 1 stream={0x5001} {what}{first}",
        f"launch 1 stream={0x5001} {what}{changed}",
        f"launch 1 stream=2 {what}{changed}",
    ]
    assert results["context after"] == 0, "another current device stays current"


def test_a_failed_launch_says_what_was_attempted(results: Any) -> None:
    kind, text = results["foreign stream"]
    assert kind == "DriverError"
    assert text.startswith("launching kern on device 1, stream 0x5000, grid (3, 4, 5), block (128, 1, 1), 90000 bytes")
    assert "CUDA_ERROR_INVALID_HANDLE" in text
    assert "CUDA_ERROR_INVALID_VALUE" in results["too much smem"][1]


def test_a_thread_that_never_used_cuda_can_launch(results: Any) -> None:
    assert [line.split(" block")[0] for line in results["thread"]] == [
        "launch 0 stream=0 grid=7,1,1", f"launch 0 stream={0x5000} grid=7,1,1",
    ]  # fmt: skip


def test_capture_is_seen_on_any_stream(results: Any) -> None:
    assert results["capturing"] == [False, True, False, True]
    assert results["capturing without context"] is False


def test_tensor_maps_carry_every_field(results: Any) -> None:
    def fields(text: str) -> tuple[int, ...]:
        return struct.unpack("<11Q", bytes.fromhex(text)[:88])

    assert len(bytes.fromhex(results["map"])) == 128
    # type, rank, address, interleave, swizzle, L2 promotion, fill; last extent, stride, box, element stride
    assert fields(results["map"]) == (9, 2, 4096, 0, 3, 3, 1, 100, 128, 16, 2)
    assert fields(results["map of rank 1"]) == (15, 1, 32, 1, 0, 0, 0, 1 << 32, 0, 128, 1)
    assert "encoding tensor map bad (uint8, box (1, 1, 1, 1, 1)" in results["bad map"][1]
    assert results["aligned"], "the stand-in refuses a result that does not lie on 64 bytes"


def test_a_thread_that_never_used_cuda_can_encode_a_map(results: Any) -> None:
    assert results["map in a thread"] == results["map"]
    assert results["thread device after a map"] == 0


def test_memory_goes_there_and_back(results: Any) -> None:
    assert (results["copied"], results["empty"]) == ("234", "")
    assert results["synchronize"] == ["synchronize 1"]


def test_a_library_runs_on_it(root: Path, stub: Path, tmp_path: Path) -> None:
    """From bundle to launch: the packed parameters arrive, on a machine of two different chips."""
    found = run(root, stub, f"""
import dataclasses, hashlib
from pathlib import Path
from fake_driver import fake_artifact, fake_manifest
from cubinery.runtime import Library
from cubinery.runtime.manifest import FileRecord, KernelRecord, pack_params
record = KernelRecord("main", "kern", (64, 1, 1), ("n", 1, 1), pack_params(("p", "pointer"), ("n", "i32")),
                      dynamic_smem=70000, carveout=75)
root = Path({str(tmp_path)!r})
for arch in ("sm_90a", "sm_100a"):
    image = f"STUB kern 2 0 8 8 4 {{arch}}".encode() + bytes(1)
    name = hashlib.sha256(image).hexdigest()
    artifact = fake_artifact(root / arch, f"toy-{{arch}}-one", [record])
    (root / arch / "cubins" / name).write_bytes(image)
    file = FileRecord(f"cubins/{{name}}", name, len(image))
    fake_manifest(arch, [dataclasses.replace(artifact, cubin=file)]).write(root / arch)
library = Library.open(root)
library.preload(devices=[0, 1])
result["preload"] = log()
for device, arch in ((0, "sm_90a"), (1, "sm_100a")):
    kernel = library.kernel(f"toy-{{arch}}-one", device, stream=0x5000 + device)
    kernel.bind({{"p": 258, "n": device + 1}}).launch(0x5000 + device)
result["launches"] = log()
result["capture"] = attempt(lambda: Library.open(root).kernel("toy-sm_90a-one", 0, stream=0x6000))
result["loads in capture"] = log()
""")  # fmt: skip
    assert [line for line in found["preload"] if not line.startswith("retain")] == [
        "load 0 #1", "funcload kern", "attribute 0 8=70000", "attribute 0 9=75",
        "load 1 #2", "funcload kern", "attribute 1 8=70000", "attribute 1 9=75",
    ]  # fmt: skip
    assert found["launches"] == [
        f"launch {d} stream={0x5000 + d} grid={d + 1},1,1 block=64,1,1 smem=70000 params=02010000000000000{d + 1}000000"
        for d in (0, 1)
    ]
    assert found["capture"][0] == "CaptureError"
    assert found["loads in capture"] == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("100", "starting CUDA: CUDA_ERROR_NO_DEVICE: stub description (no GPU is visible"),
        ("3", "CUDA_ERROR_NOT_INITIALIZED: stub description (CUDA was started before this process was forked"),
        ("803", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    ],
)
def test_cuda_that_does_not_start_says_why(root: Path, stub: Path, code: str, message: str) -> None:
    kind, text = run(root, stub, 'result = attempt(lambda: CudaDriver() and "started")', STUB_INIT=code)
    assert kind == "DriverError"
    assert message in text


def test_without_a_driver_the_first_kernel_says_what_is_missing(root: Path, bundle: Path) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a CUDA driver")
    code = f"""
from cubinery.runtime import DriverError, Library
library = Library.open({str(bundle)!r})
try:
    library[library.keys()[0]]
except DriverError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(root / "src")},
    )  # fmt: skip
    assert done.stdout.startswith("no CUDA driver on this machine ("), done.stderr
    assert "install the NVIDIA driver" in done.stdout
