"""Launch values to bytes: packed as struct would, checked by name, repacked only where they changed."""

from __future__ import annotations

import dataclasses
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, FakeTensorMap, fake_artifact, fake_manifest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cubinery.runtime import Kernel, Library
from cubinery.runtime.arguments import ArgumentPlan, TensorMapCache
from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.manifest import KernelRecord, TensorMapSpec, pack_params
from cubinery.runtime.ops.paged_decode.config import MmaConfig

KEY = "toy-sm_90a-one"
MAP = TensorMapSpec("x_map", "x", "bfloat16", (64, 8), (1, 1), (64, "rows"), ("row_bytes",), "128B")
RECORD = KernelRecord(
    "main", "toy_0", (128, 1, 1), ("ctas", "rows", 2),
    pack_params(("x_map", "tensor_map"), ("y", "pointer"), ("rows", "i32"), ("total", "i64"), ("scale", "f32")),
    (MAP,), (2, 1, 1), 4096, 50, 1, True,
)  # fmt: skip
VALUES: dict[str, Any] = {
    "x": 0x1000, "row_bytes": 128, "rows": 7, "y": 0x2008, "total": -(1 << 40), "scale": 0.5, "ctas": 6,
}  # fmt: skip


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def kernel(tmp_path: Path, driver: FakeDriver) -> Kernel:
    fake_manifest("sm_90a", [fake_artifact(tmp_path, KEY, [RECORD])]).write(tmp_path)
    return Library.open(tmp_path, driver=driver)[KEY]


def test_names_are_every_value_that_a_launch_needs(kernel: Kernel) -> None:
    assert set(kernel.names) == set(VALUES)
    assert "one" in repr(kernel)


def test_a_launch_is_what_the_record_and_the_values_say(kernel: Kernel, driver: FakeDriver) -> None:
    kernel.bind(VALUES).launch(42)
    (launch,) = driver.launches
    assert launch.values == {
        "x_map": FakeTensorMap(MAP, 0x1000, (64, 7), (128,)),
        "y": 0x2008, "rows": 7, "total": -(1 << 40), "scale": 0.5,
    }  # fmt: skip
    assert launch.stream == 42
    config = launch.config
    assert (config.grid, config.block, config.cluster) == ((6, 7, 2), (128, 1, 1), (2, 1, 1))
    assert (config.dynamic_smem, config.carveout, config.pdl) == (4096, 50, True)


def test_clusters_that_fit_are_asked_of_the_driver_once(kernel: Kernel, driver: FakeDriver) -> None:
    driver.clusters = 5
    assert kernel.max_clusters == 5
    driver.clusters = 6
    assert kernel.max_clusters == 5


def test_clusters_may_be_smaller_where_the_record_says_so(tmp_path: Path, driver: FakeDriver) -> None:
    record = dataclasses.replace(RECORD, cluster=(16, 1, 1), smaller_clusters=True)
    fake_manifest("sm_90a", [fake_artifact(tmp_path, KEY, [record])]).write(tmp_path)
    kernel = Library.open(tmp_path, driver=driver)[KEY]
    assert kernel.in_clusters_of(16) is kernel
    for size in (2, 4, 8):
        smaller = kernel.in_clusters_of(size)
        smaller.bind(VALUES | {"ctas": 3 * size}).launch(0)
        assert driver.launches[-1].config.cluster == (size, 1, 1)
        with pytest.raises(ArgumentError, match=rf"multiples of the cluster \({size}, 1, 1\)"):
            smaller.bind(VALUES | {"ctas": 3 * size - 1})
    for wrong in (0, 1, 3, 32, "8"):
        with pytest.raises(ArgumentError, match=r"clusters of .* CTAs: expected 2 or 4 or 8 or 16"):
            kernel.in_clusters_of(wrong)


def test_clusters_have_one_size_where_the_record_does_not(kernel: Kernel) -> None:
    assert kernel.in_clusters_of(2) is kernel
    with pytest.raises(ArgumentError, match=r"clusters of 4 CTAs: expected 2$"):
        kernel.in_clusters_of(4)


def test_report_carveout_is_set_before_the_first_launch(kernel: Kernel, driver: FakeDriver) -> None:
    assert kernel._handle.carveout == 50


KINDS = {
    "pointer": st.integers(0, 2**64 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f32": st.floats(width=32, allow_nan=False, allow_infinity=False),
}
CODES = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f"}


@given(kinds=st.lists(st.sampled_from(list(KINDS)), min_size=1, max_size=20), data=st.data())
def test_packing_equals_struct_with_native_alignment(kinds: list[Any], data: st.DataObject) -> None:
    record = KernelRecord("m", "m_0", (1, 1, 1), (1, 1, 1), pack_params(*((f"v{i}", k) for i, k in enumerate(kinds))))
    plan = ArgumentPlan(record, TensorMapCache(FakeDriver()))
    values = {f"v{i}": data.draw(KINDS[k]) for i, k in enumerate(kinds)}
    expected = struct.pack("@" + "".join(CODES[k] for k in kinds), *values.values())
    assert plan.pack(values) == expected
    # Changing one value patches exactly its bytes.
    name = data.draw(st.sampled_from(list(values)))
    values[name] = data.draw(KINDS[kinds[int(name[1:])]])
    buffer = bytearray(expected)
    for offset, patch in plan.changes(values, [name]):
        buffer[offset : offset + len(patch)] = patch
    assert bytes(buffer) == struct.pack("@" + "".join(CODES[k] for k in kinds), *values.values())


# -- refusals ----------------------------------------------------------------------------------

REFUSALS = [
    ({"y": -1}, r"y = -1: expected 0 to 18446744073709551615, as pointer"),
    ({"y": 2**64}, r"y = 18446744073709551616: expected 0"),
    ({"y": None}, r"y = None: expected an integer"),
    ({"y": 1.0}, r"y = 1\.0: expected an integer"),
    ({"total": 2**63}, r"total = .* as i64"),
    ({"rows": 2**31}, r"rows = 2147483648: expected -2147483648 to 2147483647, as i32"),
    ({"scale": float("nan")}, r"scale = nan: expected a finite 32-bit number"),
    ({"scale": float("inf")}, r"scale = inf: expected a finite"),
    ({"scale": 1e39}, r"scale = 1e\+39: expected a finite 32-bit"),
    ({"scale": "1"}, r"scale = '1': expected a finite 32-bit"),
    ({"ctas": 0}, r"grid \(ctas = 0, rows = 7, 2 = 2\): expected 1 to 2147483647"),
    ({"ctas": 3}, r"grid \(3, 7, 2\): expected multiples of the cluster \(2, 1, 1\)"),
    ({"ctas": 2.5}, r"ctas = 2\.5: expected an integer"),
    ({"rows": 70_000}, r"grid .*rows = 70000.* twice 1 to 65535"),
    ({"rows": 0}, r"rows = 0: expected 1 to 4294967296 elements for x_map"),
    ({"x": 0}, r"x = 0x0: expected an address on 16 bytes"),
    ({"x": 0x1008}, r"x = 0x1008: expected an address on 16 bytes"),
    ({"x": "a"}, r"x = 'a': expected an integer"),
    ({"x": [1]}, r"x = \[1\]: expected an integer"),
    ({"row_bytes": 24}, r"row_bytes = 24: expected bytes in multiples of 16"),
    ({"row_bytes": 1 << 40}, r"row_bytes = 1099511627776: expected bytes .* below 2\*\*40"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_a_wrong_value_is_named_at_bind_and_at_update(
    kernel: Kernel, driver: FakeDriver, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        kernel.bind(VALUES | change)
    bound = kernel.bind(VALUES)
    bound.launch(0)
    with pytest.raises(ArgumentError, match=message):
        bound.update(**({"y": 64, "total": 5} | change))
    with pytest.raises(ArgumentError, match=message):
        bound.rebind(VALUES | {"y": 64, "total": 5} | change)
    bound.launch(0)
    assert driver.launches[0].params == driver.launches[1].params, "a refused update changes nothing"
    assert driver.launches[0].grid == driver.launches[1].grid
    assert bound.values == VALUES


def test_missing_and_unknown_names_are_named(kernel: Kernel) -> None:
    with pytest.raises(ArgumentError, match=r"kernel main \(toy_0\): no value for row_bytes, y|no value for y, row"):
        kernel.bind({k: v for k, v in VALUES.items() if k not in ("y", "row_bytes")})
    with pytest.raises(ArgumentError, match=r"unknown value scales: did you mean scale"):
        kernel.bind(VALUES | {"scales": 1})
    with pytest.raises(ArgumentError, match=r"no value for scale, and zz is not among its names"):
        kernel.bind({k: v for k, v in VALUES.items() if k != "scale"} | {"zz": 1})
    bound = kernel.bind(VALUES)
    with pytest.raises(ArgumentError, match=r"unknown value rwos: did you mean rows"):
        bound.update(rwos=3)
    with pytest.raises(ArgumentError, match="no value for y"):
        bound.rebind({k: v for k, v in VALUES.items() if k != "y"})
    with pytest.raises(ArgumentError, match=r"unknown value x_map"):
        kernel.bind(VALUES | {"x_map": 1})


# -- updates -----------------------------------------------------------------------------------


def test_an_update_equals_a_new_bind(kernel: Kernel, driver: FakeDriver) -> None:
    changes: list[dict[str, Any]] = [
        {"y": 0x3000}, {"scale": 2}, {"ctas": 8}, {"rows": 9}, {"x": 0x4000, "row_bytes": 256}, {}, {"total": 1},
    ]  # fmt: skip
    bound, values = kernel.bind(VALUES), dict(VALUES)
    for change in changes:
        values |= change
        bound.update(**change)
        bound.launch(1)
        kernel.bind(values).launch(1)
        updated, fresh = driver.launches[-2:]
        assert updated.values == fresh.values
        assert updated.grid == fresh.grid
        assert bound.values == values


def test_an_address_that_is_set_equals_an_update(kernel: Kernel, driver: FakeDriver) -> None:
    bound, updated = kernel.bind(VALUES), kernel.bind(VALUES)
    for name, address in (("y", 0x3000), ("x", 0x4000), ("y", 2**64 - 1), ("x", 0x4000), ("scale", 3)):
        bound.set_address(name, address)
        updated.update(**{name: address})
        bound.launch(1)
        updated.launch(1)
        assert driver.launches[-2].params == driver.launches[-1].params
        assert bound.values == updated.values
    before = dict(bound.values)
    for name, bad in (("y", 2**64), ("y", -1), ("y", 1.5), ("y", None), ("x", 8), ("z", 16)):
        with pytest.raises(ArgumentError, match=rf"{name}.* = ({bad}|0x8)|unknown value {name}"):
            bound.set_address(name, bad)  # type: ignore[arg-type]
    bound.launch(1)
    assert driver.launches[-1].params == driver.launches[-2].params
    assert bound.values == before


def test_kernel_launch_follows_its_values(kernel: Kernel, driver: FakeDriver) -> None:
    for change in ({}, {"y": 8}, {"x": 0x8000}, {}):
        kernel.launch(VALUES | change, 3)
        kernel.bind(VALUES | change).launch(3)
        assert driver.launches[-1].values == driver.launches[-2].values
    with pytest.raises(ArgumentError, match="unknown value w"):
        kernel.launch(VALUES | {"w": 1}, 3)


def test_bound_values_are_read_only_and_the_callers_dict_is_its_own(kernel: Kernel, driver: FakeDriver) -> None:
    mine = dict(VALUES)
    bound = kernel.bind(mine)
    mine["y"] = 99
    bound.launch(0)
    assert driver.launches[-1].values["y"] == VALUES["y"]
    with pytest.raises(TypeError):
        bound.values["y"] = 1  # type: ignore[index]


def test_a_kernel_launches_from_many_threads(kernel: Kernel, driver: FakeDriver) -> None:
    def run(i: int) -> None:
        for step in range(50):
            kernel.launch(VALUES | {"y": i << 16 | step, "rows": i + 1}, i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(driver.launches) == 400
    for launch in driver.launches:
        assert launch.values["y"] >> 16 == launch.stream
        assert launch.grid[1] == launch.values["rows"] == launch.stream + 1 == launch.values["x_map"].extents[1]


# -- tensor maps -------------------------------------------------------------------------------


def test_a_map_is_encoded_once_for_equal_numbers(kernel: Kernel, driver: FakeDriver) -> None:
    for x in (0x1000, 0x2000, 0x1000, 0x2000):
        kernel.bind(VALUES | {"x": x, "scale": x * 1.0})
    assert [m.address for m in driver.encoded] == [0x1000, 0x2000]


def test_equal_specs_share_maps_and_different_ones_do_not() -> None:
    driver = FakeDriver()
    maps = TensorMapCache(driver)
    other = dataclasses.replace(MAP, swizzle="64B")
    for spec in (MAP, dataclasses.replace(MAP), other):
        record = dataclasses.replace(RECORD, tensor_maps=(spec,))
        ArgumentPlan(record, maps).pack(VALUES)
    assert [m.spec for m in driver.encoded] == [MAP, other]


def test_the_cache_is_bounded_and_forgets_the_least_recently_used() -> None:
    driver = FakeDriver()
    maps = TensorMapCache(driver, capacity=2)
    plan = ArgumentPlan(RECORD, maps)
    for address in (16, 32, 16, 48, 16, 32):
        plan.pack(VALUES | {"x": address})
    assert len(maps) == 2
    assert [m.address for m in driver.encoded] == [16, 32, 48, 32]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(names=st.lists(st.sampled_from(sorted(VALUES)), max_size=4), extra=st.text(max_size=4))
def test_any_set_of_names_but_the_right_one_is_refused(kernel: Kernel, names: list[str], extra: str) -> None:
    values = {k: v for k, v in VALUES.items() if k not in names} | {extra: 1}
    assume(set(values) != set(VALUES))
    with pytest.raises(ArgumentError):
        kernel.bind(values)


def test_paged_decode_binds_with_exactly_the_names_of_its_record(bundle: Path, driver: FakeDriver) -> None:
    config = MmaConfig(head_dim=128, page_size=16, kv_format="fp8")
    kernel = Library.open(bundle, driver=driver)[config.key("sm_90a")]
    values = {name: 16 * (i + 1) for i, name in enumerate(kernel.names)}
    kernel.bind(values).launch(0)
    launch = driver.launches[0]
    maps = {spec.name for spec in kernel.record.tensor_maps}
    assert {n: v for n, v in launch.values.items() if n not in maps} == {
        p.name: values[p.name] for p in kernel.record.params if p.name not in maps
    }
    for spec in kernel.record.tensor_maps:
        found = launch.values[spec.name]
        assert found.address == values[spec.pointer]
        assert found.strides == tuple(values[str(s)] for s in spec.strides)
