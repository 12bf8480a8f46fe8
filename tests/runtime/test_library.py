"""Library: loading once, on the right device, at the right time; and what it says when it cannot."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, device, fake_artifact, fake_image, fake_manifest, write_bundle

from cubinery.aot.spec import load_specs
from cubinery.aot.variants import expand, from_misses
from cubinery.runtime import Kernel, Library
from cubinery.runtime.driver import DeviceInfo
from cubinery.runtime.errors import (
    AbiError,
    ArchError,
    ArgumentError,
    BundleError,
    CaptureError,
    DriverError,
    KernelNotFoundError,
)
from cubinery.runtime.manifest import KernelRecord, Manifest, pack_params
from cubinery.runtime.ops.paged_decode.config import MmaConfig

CONFIG = MmaConfig(head_dim=128, page_size=16, kv_format="fp8")
OTHER = MmaConfig(head_dim=128, page_size=64, kv_format="bf16")
KEY, OTHER_KEY = CONFIG.key("sm_90a"), OTHER.key("sm_90a")
PART_KEY = CONFIG.requires()[0].key("sm_90a")
MISSING = MmaConfig(head_dim=128, page_size=16, kv_format="fp8", q_len=4)


def toy(symbol: str = "toy_0", role: str = "main") -> KernelRecord:
    return KernelRecord(role, symbol, (32, 1, 1), ("n", 1, 1), pack_params(("x", "pointer"), ("n", "i32")))


# -- loading -----------------------------------------------------------------------------------


def test_opening_asks_nothing_of_a_driver(bundle: Path) -> None:
    library = Library.open(bundle)  # without one: CUDA would be started, and there is none here
    assert library.artifact(KEY).kernels[0].role == "decode"
    assert "3 kernels" in repr(library)


def test_a_kernel_loads_at_the_first_request_and_only_then(bundle: Path) -> None:
    driver = FakeDriver()
    library = Library.open(bundle, driver=driver)
    assert driver.loads == []
    first = library[KEY]
    assert library[KEY] is first is library.kernel(KEY, 0)
    assert len(driver.loads) == 1


def test_one_load_for_a_key_and_device_with_32_threads(bundle: Path) -> None:
    driver = FakeDriver(["sm_90a", "sm_90a"], load_seconds=0.02)
    library = Library.open(bundle, driver=driver)
    start = threading.Barrier(32)

    def ask(i: int) -> Kernel:
        start.wait()
        return library.kernel(KEY, i % 2)

    with ThreadPoolExecutor(32) as pool:
        kernels = list(pool.map(ask, range(32)))
    assert sorted(d for d, _ in driver.loads) == [0, 1]
    assert len({id(k) for k in kernels}) == 2


def test_keys_that_share_a_cubin_share_its_module(tmp_path: Path) -> None:
    first = fake_artifact(tmp_path, "toy-sm_90a-one", [toy()])
    second = dataclasses.replace(first, key="toy-sm_90a-one-x2")
    fake_manifest("sm_90a", [first, second]).write(tmp_path)
    driver = FakeDriver()
    assert Library.open(tmp_path, driver=driver).preload() == 2
    assert len(driver.loads) == 1


def test_an_artifact_of_several_kernels_serves_each_by_role(tmp_path: Path) -> None:
    artifact = fake_artifact(tmp_path, "toy-sm_90a-one", [toy("a", "first"), toy("b", "second")])
    fake_manifest("sm_90a", [artifact]).write(tmp_path)
    library = Library.open(tmp_path, driver=FakeDriver())
    assert library["toy-sm_90a-one"].record.symbol == "a"
    assert library.kernel("toy-sm_90a-one", role="second").record.symbol == "b"
    with pytest.raises(BundleError, match="no kernel has the role 'third': expected one of first, second"):
        library.kernel("toy-sm_90a-one", role="third")


def test_report_10_and_24_after_preload_nothing_loads(bundle: Path) -> None:
    driver = FakeDriver(["sm_90a", "sm_90a"])
    library = Library.open(bundle, driver=driver)
    assert library.preload(devices=[0, 1]) == 6
    loads = list(driver.loads)
    driver.capturing = {0, 7}
    for index in (0, 1):
        for key in library:
            library.kernel(key, index, stream=7)
    assert driver.loads == loads
    assert library.preload(devices=[0, 1]) == 6
    assert driver.loads == loads


def test_preload_of_one_key_brings_what_it_requires(bundle: Path) -> None:
    driver = FakeDriver()
    library = Library.open(bundle, driver=driver)
    assert library.preload([KEY]) == 2
    assert {sha for _, sha in driver.loads} == {library.artifact(k).cubin.sha256 for k in (KEY, PART_KEY)}


def test_preload_names_a_required_key_that_is_missing(tmp_path: Path) -> None:
    library = Library.open(write_bundle(tmp_path, "sm_90a", [CONFIG]), driver=FakeDriver())
    with pytest.raises(KernelNotFoundError, match=f"no kernel '{PART_KEY}'"):
        library.preload()


def test_report_23_what_a_graph_may_hold_outlives_the_library(bundle: Path) -> None:
    driver = FakeDriver()
    assert not hasattr(driver, "unload_module"), "the seam has no way to unload"
    kernel = Library.open(bundle, driver=driver)[KEY]
    gc.collect()
    bound = kernel.bind(dict.fromkeys(kernel.names, 16))
    bound.launch(0)
    assert len(driver.launches) == 1


def test_a_failed_load_is_tried_again(bundle: Path) -> None:
    driver = FakeDriver()
    library = Library.open(bundle, driver=driver)
    file = bundle / library.artifact(KEY).cubin.path
    good = file.read_bytes()
    file.write_bytes(b"x")
    with pytest.raises(BundleError):
        library[KEY]
    file.write_bytes(good)
    assert library[KEY].key == KEY


# -- capture -----------------------------------------------------------------------------------


def test_a_load_during_capture_says_to_preload(bundle: Path) -> None:
    driver = FakeDriver(capturing={7})
    library = Library.open(bundle, driver=driver)
    with pytest.raises(CaptureError, match=r"forbids loading: call Library\.preload\(\['paged_decode-.*'\], \[0\]\)"):
        library.kernel(KEY, stream=7)
    assert driver.loads == []
    driver.capturing.clear()
    library.preload([KEY])
    driver.capturing.add(7)
    library.kernel(KEY, stream=7)


def test_preloaded_kernels_bind_and_launch_under_capture_without_a_driver_call_but_the_launch(bundle: Path) -> None:
    driver = FakeDriver()
    library = Library.open(bundle, driver=driver)
    library.preload()
    calls = (list(driver.loads), list(driver.smem_calls))
    driver.capturing.add(7)
    kernel = library.kernel(KEY, stream=7)
    kernel.bind(dict.fromkeys(kernel.names, 16)).launch(7)
    assert (driver.loads, driver.smem_calls) == calls


# -- devices -----------------------------------------------------------------------------------


def test_report_7_mixed_gpus_each_get_their_own_code(tmp_path: Path) -> None:
    for arch in ("sm_90a", "sm_110a"):
        write_bundle(tmp_path, arch, [CONFIG, *CONFIG.requires()])
    driver = FakeDriver(["sm_90a", "sm_110a"])
    library = Library.open(tmp_path, driver=driver)
    assert [library.arch_for(d) for d in (0, 1)] == ["sm_90a", "sm_110a"]
    for index in (0, 1):
        kernel = library.kernel(library.key_for(CONFIG, index), index)
        assert (kernel.device, kernel.key.split("-")[1]) == (index, library.arch_for(index))
    driver.current = 1
    assert library[CONFIG.key("sm_110a")].device == 1
    assert library.arch_for() == "sm_110a"
    with pytest.raises(ArchError, match=r"is code for sm_90a, and device 1 \(Jetson AGX Thor.*\) runs sm_110a"):
        library[KEY]
    assert library.preload(devices=[0, 1]) == 4


def test_report_8_shared_memory_is_allowed_on_every_device(bundle: Path) -> None:
    driver = FakeDriver(["sm_90a", "sm_90a"])
    library = Library.open(bundle, driver=driver)
    size = library.artifact(KEY).kernels[0].dynamic_smem
    assert size > 48 * 1024
    for index in (0, 1):
        kernel = library.kernel(KEY, index)
        kernel.bind(dict.fromkeys(kernel.names, 16)).launch(0)
    symbol = library.artifact(KEY).kernels[0].symbol
    assert driver.smem_calls == [(0, symbol, size), (1, symbol, size)]
    assert [launch.device for launch in driver.launches] == [0, 1]


def test_report_6_a_chip_that_is_not_listed_is_refused_not_guessed(bundle: Path) -> None:
    for capability in ((12, 1), (9, 1), (10, 0), (8, 9)):
        driver = FakeDriver(devices=[DeviceInfo(0, "Other", capability, 48, 13000)])
        library = Library.open(bundle, driver=driver)
        with pytest.raises(ArchError, match=r"device 0 \(Other, compute capability .*opened bundles hold sm_90a"):
            library[KEY]
        assert driver.loads == []


def test_the_exact_target_wins_and_the_family_target_serves(tmp_path: Path) -> None:
    record = toy()
    for arch in ("sm_100f", "sm_103a"):
        folder = tmp_path / arch
        fake_manifest(arch, [fake_artifact(folder, f"toy-{arch}-one", [record])]).write(folder)
    driver = FakeDriver(["sm_100a", "sm_103a", "sm_110a"])
    library = Library.open(tmp_path, driver=driver)
    assert library.archs_for(0) == ("sm_100f",)
    assert library.archs_for(1) == ("sm_103a", "sm_100f")
    assert library.kernel("toy-sm_100f-one", 0).device == 0
    assert library.kernel("toy-sm_100f-one", 1).device == 1
    with pytest.raises(ArchError, match=r"runs sm_110a or sm_110f, and the opened bundles hold .*ARCH=sm_110a"):
        library.arch_for(2)


def test_report_22_an_old_driver_is_told_the_version_that_it_needs(bundle: Path) -> None:
    driver = FakeDriver(devices=[device(0, "sm_90a", 12080)])
    with pytest.raises(DriverError, match=r"supports CUDA 12\.8, and .*sm_90a needs CUDA 13\.0 or newer: update"):
        Library.open(bundle, driver=driver)[KEY]
    assert driver.loads == []


def test_a_device_that_does_not_exist_is_a_driver_error(bundle: Path) -> None:
    with pytest.raises(DriverError, match="device 3"):
        Library.open(bundle, driver=FakeDriver()).kernel(KEY, 3)


# -- the loaded code against its record --------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ((("x", "pointer"),), "the loaded code takes 1 parameters and its manifest records 2"),
        ((("x", "pointer"), ("n", "i64")), r"parameter 1 \(n\) is 8 bytes at offset 8 .* records 4 bytes at 8"),
        ((("n", "i32"), ("x", "pointer")), r"parameter 0 \(x\) is 4 bytes at offset 0"),
    ],
)
def test_parameters_that_differ_from_the_record_are_an_abi_error(tmp_path: Path, params: object, message: str) -> None:
    lying = dataclasses.replace(toy(), params=pack_params(*params))  # type: ignore[misc]
    artifact = fake_artifact(tmp_path, "toy-sm_90a-one", [lying])
    fake_manifest("sm_90a", [dataclasses.replace(artifact, kernels=(toy(),))]).write(tmp_path)
    with pytest.raises(AbiError, match=message):
        Library.open(tmp_path, driver=FakeDriver())["toy-sm_90a-one"]


def test_a_symbol_that_is_not_in_the_cubin_is_named(tmp_path: Path) -> None:
    artifact = fake_artifact(tmp_path, "toy-sm_90a-one", [toy("other_0")])
    fake_manifest("sm_90a", [dataclasses.replace(artifact, kernels=(toy(),))]).write(tmp_path)
    with pytest.raises(DriverError, match="toy_0"):
        Library.open(tmp_path, driver=FakeDriver())["toy-sm_90a-one"]


def test_the_fake_driver_refuses_what_is_no_fake_image() -> None:
    with pytest.raises(DriverError, match="INVALID_IMAGE"):
        FakeDriver().load_module(0, fake_image([toy()])[1:])


# -- misses ------------------------------------------------------------------------------------


def test_a_miss_lists_the_nearest_keys_and_the_spec_lines(bundle: Path) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    key = MISSING.key("sm_90a")
    with pytest.raises(KernelNotFoundError) as caught:
        library[key]
    lines = str(caught.value).splitlines()
    assert lines[0] == f"no kernel {key!r} in {bundle} (3 keys)"
    assert lines[1] == f"nearest: {KEY} (it has q_len 1)"
    assert "cubinery build --from-misses FILE" in lines[-1]
    assert library.misses == (
        {"key": key, "family": "paged_decode", "arch": "sm_90a", "impl": "mma", "axes": MISSING.axes()},
    )


def test_the_spec_lines_of_a_miss_build_exactly_that_key(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(KernelNotFoundError) as caught:
        Library.open(bundle, driver=FakeDriver())[MISSING.key("sm_90a")]
    spec = tmp_path / "spec.yaml"
    spec.write_text("\n".join(line[2:] for line in str(caught.value).splitlines() if line.startswith("  ")) + "\n")
    keys = [item.key for item in expand(load_specs([spec]), None)]
    assert MISSING.key("sm_90a") in keys
    assert set(keys) == {MISSING.key("sm_90a"), PART_KEY}


def test_saved_misses_are_what_the_builder_reads(bundle: Path, tmp_path: Path) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    for config in (MISSING, MISSING, MmaConfig(head_dim=256, page_size=16, kv_format="fp8")):
        with pytest.raises(KernelNotFoundError):
            library.artifact(config.key("sm_90a"))
    assert len(library.misses) == 2, "each missing key is recorded once"
    file = tmp_path / "misses.json"
    library.save_misses(file)
    assert json.loads(file.read_text()) == list(library.misses)
    built = {item.key for item in from_misses(file)}
    assert {miss["key"] for miss in library.misses} <= built


def test_misses_from_many_threads_are_recorded_once(bundle: Path) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    configs = [MmaConfig(head_dim=128, page_size=16, kv_format="fp8", q_len=q) for q in range(2, 9)]

    def ask(i: int) -> None:
        with pytest.raises(KernelNotFoundError):
            library.artifact(configs[i % len(configs)].key("sm_90a"))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(70)))
    assert sorted(m["axes"]["q_len"] for m in library.misses) == list(range(2, 9))


def test_a_key_that_is_no_key_is_no_miss(bundle: Path) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    for key in ("nonsense", "mla-sm_90a-mma-d64", f"{KEY}-zz9"):
        with pytest.raises(KernelNotFoundError, match=f"no kernel '{key}' in"):
            library[key]
    with pytest.raises(KernelNotFoundError, match=f"nearest: .*{KEY}"):
        library[f"{KEY}-zz9"]
    assert library.misses == ()


def test_arguments_of_another_type_are_named(bundle: Path) -> None:
    library: Any = Library.open(bundle, driver=FakeDriver())
    for key in (3, None):
        with pytest.raises(ArgumentError, match=f"key = {key}: expected text, such as 'paged_decode-"):
            library[key]
    with pytest.raises(ArgumentError, match="device = 'cuda:0': expected an index"):
        library.kernel(KEY, "cuda:0")
    with pytest.raises(ArgumentError, match=r"expected a list of keys; for one, \["):
        library.preload(KEY)
    with pytest.raises(ArgumentError, match=r"/proc/misses: cannot write the misses there: .*: name another place"):
        library.save_misses("/proc/misses")
    kernel = library[KEY]
    with pytest.raises(ArgumentError, match="values is a list: expected a mapping from names to numbers"):
        kernel.bind([1])
    bound = kernel.bind(dict.fromkeys(kernel.names, 16))
    with pytest.raises(ArgumentError, match="values is a NoneType: expected a mapping"):
        bound.rebind(None)


def test_key_for_names_the_exact_target_when_nothing_serves(bundle: Path) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    assert library.key_for(CONFIG) == KEY
    assert library.key_for(MISSING) == MISSING.key("sm_90a")


def test_two_libraries_in_one_process_are_independent(bundle: Path, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "second", "sm_90a", [MISSING])
    driver = FakeDriver()
    one, two = Library.open(bundle, driver=driver), Library.open(other, driver=driver)
    assert one[KEY].key == KEY
    assert two[MISSING.key("sm_90a")].key == MISSING.key("sm_90a")
    with pytest.raises(KernelNotFoundError):
        two[KEY]
    assert one.misses == ()
    assert len(two.misses) == 1


def test_manifests_are_read_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library.open(bundle, driver=FakeDriver())
    monkeypatch.setattr(Manifest, "read", lambda *_: pytest.fail("a manifest was read again"))
    library.preload()
