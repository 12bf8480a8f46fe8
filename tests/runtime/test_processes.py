"""Imports stay light and offline; forks and many cold processes behave."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cubinery.runtime.ops.paged_decode.config import MmaConfig

KEY = MmaConfig(head_dim=128, page_size=16, kv_format="fp8").key("sm_90a")

ALONE = """
import importlib.abc, socket, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in {"cutlass", "cuda", "torch", "numpy", "yaml", "click", "rich", "triton"}:
            raise ImportError(name + " is refused by this test")
sys.meta_path.insert(0, Refuse())
def refuse(*_, **__):
    raise OSError("the network is refused by this test")
socket.socket = socket.create_connection = socket.getaddrinfo = refuse
"""


def python(root: Path, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(root / "src"), str(root / "tests")])
    return subprocess.run(
        [sys.executable, *args, "-c", code],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths, **env},
    )  # fmt: skip


def test_report_9_a_library_serves_without_compiler_gpu_package_or_network(root: Path, bundle: Path) -> None:
    code = f"""{ALONE}
import cubinery.runtime
from cubinery.runtime import Library, CubineryError
from fake_driver import FakeDriver
driver = FakeDriver()
library = Library.open({str(bundle)!r}, driver=driver)
kernel = library[{KEY!r}]
kernel.bind(dict.fromkeys(kernel.names, 16)).launch(0)
try:
    library["paged_decode-sm_90a-mma-d256-p128-kvbf16"]
except CubineryError as error:
    assert "to add it" in str(error), error
print(len(driver.launches), sorted(m for m in ("cutlass", "cuda", "torch", "numpy") if m in sys.modules))
"""
    done = python(root, code)
    assert done.stdout == "1 []\n", done.stderr


def test_importing_the_runtime_is_light(root: Path) -> None:
    code = """
import sys
before = set(sys.modules)
import time
start = time.process_time()
import cubinery.runtime
spent = time.process_time() - start
new = {m.split(".")[0] for m in set(sys.modules) - before}
from cubinery.runtime import Library, Kernel, BoundLaunch, Manifest
full = time.process_time() - start
print(spent, full, ",".join(sorted(new & {"torch", "numpy", "cuda", "cutlass", "yaml", "click", "rich"})))
"""
    runs = [python(root, code) for _ in range(3)]
    assert all(done.returncode == 0 for done in runs), runs[0].stderr
    spent, full, heavy = zip(*(done.stdout.rstrip("\n").split(" ") for done in runs), strict=True)
    assert set(heavy) == {""}
    assert min(map(float, spent)) < 0.1
    assert min(map(float, full)) < 0.2, "with Library and all that it needs"


def test_unknown_attributes_are_attribute_errors() -> None:
    import cubinery.runtime as runtime

    assert {"Library", "Kernel", "CubineryError"} <= set(dir(runtime))
    with pytest.raises(AttributeError, match="has no attribute 'Libary'"):
        runtime.Libary  # noqa: B018


def test_report_25_use_after_fork_is_a_named_error(root: Path, bundle: Path) -> None:
    code = f"""
import os
from cubinery.runtime import Library, ForkError
from fake_driver import FakeDriver
library = Library.open({str(bundle)!r}, driver=FakeDriver())
kernel = library[{KEY!r}]
bound = kernel.bind(dict.fromkeys(kernel.names, 16))
def tries():
    for name, use in (
        ("loaded", lambda: library[{KEY!r}]),
        ("new", lambda: library.preload()),
        ("bind", lambda: kernel.bind(bound.values)),
        ("launch", lambda: bound.launch(0)),
        ("driver", lambda: library.driver),
    ):
        try:
            use()
        except ForkError as error:
            assert "does not survive fork" in str(error) and "spawn" in str(error), error
            print(name, "refused", flush=True)
    fresh = Library.open({str(bundle)!r}, driver=FakeDriver())
    print(fresh[{KEY!r}].device, len(library), flush=True)
child = os.fork()
if child == 0:
    tries()
    os._exit(0)
os.waitpid(child, 0)
bound.launch(0)
print("parent", flush=True)
"""
    done = python(root, code)
    expected = [f"{name} refused" for name in ("loaded", "new", "bind", "launch", "driver")] + ["0 3", "parent"]
    assert done.stdout.splitlines() == expected, done.stderr


def test_report_14_and_21_many_cold_processes_open_one_bundle(root: Path, bundle: Path) -> None:
    """Each of 32 processes opens and loads by itself, all released at once; only the imports are shared."""
    code = f"""
import os
from cubinery.runtime import Library
from fake_driver import FakeDriver
import cubinery.runtime.bundle, cubinery.runtime.manifest_json
wait, go = os.pipe()
children = []
for _ in range(32):
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)  # ends when the parent closes its end
        loaded = 0
        try:
            loaded = Library.open({str(bundle)!r}, driver=FakeDriver()).preload()
        finally:
            os._exit(loaded)
    children.append(child)
os.close(go)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""
    done = python(root, code)
    assert done.stdout == f"{[3] * 32}\n", done.stderr
