"""The cache writer's public call on a fake driver: what it launches, and what it refuses before it does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, write_bundle

from cubinery.runtime.errors import ArgumentError, CaptureError, ConfigError, KernelNotFoundError
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.append import CacheWriter
from cubinery.runtime.ops.paged_decode.append_config import AppendConfig

Make = Callable[..., tuple[CacheWriter, FakeDriver]]


@pytest.fixture
def make_writer(tmp_path: Path) -> Make:
    """make_writer(kv_format="fp8", head_dim=128) -> (writer, driver)."""

    def make(kv_format: str = "fp8", head_dim: int = 128, **options: Any) -> tuple[CacheWriter, FakeDriver]:
        driver = FakeDriver(["sm_90a"])
        write_bundle(tmp_path, "sm_90a", [AppendConfig(head_dim=head_dim, kv_format=kv_format)])
        return CacheWriter(
            Library.open(tmp_path, driver=driver), head_dim=head_dim, kv_format=kv_format, **options
        ), driver

    return make


def arguments(kv_format: str = "fp8", d: int = 128, tokens: int = 5, heads: int = 2, **changes: Any) -> dict[str, Any]:
    """Valid arguments of `append`, with changes."""
    row = {"fp8": d, "bf16": d, "e3m2": d * 6 // 8, "e2m3": d * 6 // 8, "e2m1": d // 2, "nvfp4": d // 2}[kv_format]
    dtype = torch.bfloat16 if kv_format == "bf16" else torch.uint8
    found: dict[str, Any] = {name: torch.zeros(tokens, heads, d, dtype=torch.bfloat16) for name in "kv"}
    found |= {f"{name}_cache": torch.zeros(4, 16, heads, row, dtype=dtype) for name in "kv"}
    found["slot_mapping"] = torch.zeros(tokens, dtype=torch.int64)
    if kv_format == "nvfp4":
        found |= {f"{name}_scales": torch.zeros(4, 16, heads, d // 16, dtype=torch.uint8) for name in "kv"}
    return found | changes


def test_the_launch(make_writer: Make) -> None:
    writer, driver = make_writer("e2m3")
    qkv = torch.zeros(7, 6, 128, dtype=torch.bfloat16)
    storage = torch.zeros(4, 2, 2, 16, 96, dtype=torch.uint8)  # hnd
    cache = [storage[:, i].swapaxes(1, 2) for i in range(2)]
    given = arguments("e2m3", k=qkv[:, 2:4], v=qkv[:, 4:6], k_cache=cache[0], v_cache=cache[1])
    given["slot_mapping"] = torch.zeros(5, dtype=torch.int32)
    scale = torch.ones(5, 2)
    writer.append(**given, k_descale=scale, v_descale=0.5)
    (launch,) = driver.launches
    assert launch.grid == (1, 1, 1)  # 5 tokens, 2 heads, 8 threads a row
    found = launch.values
    assert {n: found[n] for n in ("num_tokens", "num_kv_heads", "page_size", "num_slots", "slot_bytes")} == {
        "num_tokens": 5, "num_kv_heads": 2, "page_size": 16, "num_slots": 64, "slot_bytes": 4,
    }  # fmt: skip
    assert (found["k"], found["k_token"], found["k_head"]) == (qkv.data_ptr() + 2 * 2 * 128, 6 * 128, 128)
    assert (found["k_page_bytes"], found["k_row_bytes"], found["k_head_bytes"]) == (2 * 2 * 16 * 96, 96, 16 * 96)
    assert found["v_cache"] == storage.data_ptr() + 2 * 16 * 96
    assert (found["k_descale"], found["k_descale_token"], found["k_descale_head"]) == (scale.data_ptr(), 2, 1)
    assert (found["v_descale"], found["v_descale_value"]) == (0, 0.5)
    assert (found["k_scales"], found["k_scales_page_bytes"]) == (0, 0)


@pytest.mark.parametrize(
    ("shape", "strides"), [((1,), (0, 0)), ((), (0, 0)), ((1, 1), (0, 0)), ((2,), (0, 1)), ((5, 2), (2, 1))]
)
def test_granularity_of_descales(make_writer: Make, shape: tuple[int, ...], strides: tuple[int, int]) -> None:
    writer, driver = make_writer()
    writer.append(**arguments(), k_descale=torch.ones(shape))
    found = driver.launches[0].values
    assert (found["k_descale_token"], found["k_descale_head"]) == strides
    assert (found["v_descale"], found["v_descale_value"]) == (0, 1.0)


def test_the_grid_covers_every_row(make_writer: Make) -> None:
    writer, driver = make_writer("bf16")
    for tokens in (1, 8, 9, 1000):
        writer.append(**arguments("bf16", tokens=tokens))
    assert [launch.grid[0] for launch in driver.launches] == [1, 1, 2, 125]  # 256 threads, 32 a token


def test_a_repeated_call_differs_by_its_addresses(make_writer: Make) -> None:
    """The second call of a kind is packed from the first; what it changes must arrive, and what is wrong must not."""
    writer, driver = make_writer()
    first = arguments(k_descale=torch.ones(2), v_descale=0.5)
    second = arguments(k_descale=torch.ones(2), v_descale=0.5)
    other = arguments(k_descale=torch.ones(2), v_descale=0.25)
    for given in (first, second, other, first):
        writer.append(**given)
    for given, launch in zip((first, second, other, first), driver.launches, strict=True):
        for name in ("k", "v", "k_cache", "v_cache", "slot_mapping", "k_descale"):
            assert launch.values[name] == given[name].data_ptr()
        assert (launch.values["v_descale"], launch.values["v_descale_value"]) == (0, given["v_descale"])
    odd = torch.zeros(5 * 2 * 128 + 1, dtype=torch.bfloat16)[1:].view(5, 2, 128)
    with pytest.raises(ArgumentError, match=r"k lies at address .*: expected a multiple of 16"):
        writer.append(**(first | {"k": odd}))
    with pytest.raises(ArgumentError, match="v_descale = True"):
        writer.append(**(first | {"v_descale": True}))
    assert len(driver.launches) == 4


def test_nothing_to_append_launches_nothing(make_writer: Make) -> None:
    writer, driver = make_writer()
    writer.append(**arguments(tokens=0))
    assert driver.launches == []


def test_rows_without_a_slot_are_allowed(make_writer: Make) -> None:
    writer, driver = make_writer()
    writer.append(**arguments(slot_mapping=torch.zeros(3, dtype=torch.int32)))
    assert driver.launches[0].values["num_tokens"] == 3


@pytest.mark.parametrize(
    ("kv_format", "changes", "message"),
    [
        ("fp8", {"slot_mapping": torch.zeros(5)}, "slot_mapping has dtype torch.float32: expected torch.int32 or"),
        ("fp8", {"slot_mapping": torch.zeros(10, dtype=torch.int64)[::2]}, r"strides \(2,\): expected a contiguous"),
        (
            "fp8",
            {"slot_mapping": torch.zeros(6, dtype=torch.int64)},
            r"k has shape \(5, 2, 128\): expected \(at least 6",
        ),
        ("fp8", {"k": torch.zeros(5, 2, 128)}, "k has dtype torch.float32: expected torch.bfloat16"),
        ("fp8", {"v": torch.zeros(5, 3, 128).bfloat16()}, "v has 3 KV heads: expected 2, as k has"),
        ("fp8", {"k": torch.zeros(5, 2, 256).bfloat16()[..., ::2]}, "k has stride 2 along head_dim: expected 1"),
        ("fp8", {"k": torch.zeros(5, 2, 132).bfloat16()[..., :128]}, "stride of 264 bytes along head: expected a mul"),
        ("fp8", {"k": 3}, "k is a int: expected a torch tensor"),
        ("fp8", {"v_descale": [1.0]}, "v_descale is a list: expected None, a number or a torch tensor"),
        ("fp8", {"k_cache": torch.zeros(4, 16, 2, 128)}, "k_cache has dtype torch.float32"),
        ("fp8", {"v_cache": torch.zeros(5, 16, 2, 128, dtype=torch.uint8)}, "v_cache has 5 pages of 16 rows: expected"),
        ("fp8", {"k_cache": torch.zeros(4, 16, 3, 128, dtype=torch.uint8)}, r"expected \(num_pages, page_size, 2, 128"),
        ("e2m3", {"k_cache": torch.zeros(4, 16, 2, 128, dtype=torch.uint8)}, r"expected \(num_pages, page_size, 2, 96"),
        ("e2m1", {"k_cache": torch.zeros(1, 16, 2, 64, dtype=torch.uint8).expand(4, 16, 2, 64)}, "do not share memory"),
        ("fp8", {"k_descale": torch.ones(3)}, r"k_descale has shape \(3,\): expected 1 element, \(2,\) or \(5, 2\)"),
        ("fp8", {"v_descale": torch.ones(2).double()}, "v_descale has dtype torch.float64: expected torch.float32"),
        ("fp8", {"v_descale": 0.0}, "v_descale = 0.0: expected a number above 0"),
        ("fp8", {"v_descale": 1e39}, r"v_descale = 1e\+39: expected .* as fp32"),
        ("fp8", {"v_descale": "1"}, "v_descale is a str: expected None, a number or a torch tensor"),
        ("bf16", {"k_descale": 1.0}, "k_descale is given: expected None for bf16, which is copied"),
        ("fp8", {"k_scales": torch.zeros(1)}, "k_scales is given: expected None for fp8"),
        ("nvfp4", {"v_scales": None}, "v_scales is None: expected a tensor"),
        ("nvfp4", {"k_scales": torch.zeros(4, 16, 2, 4, dtype=torch.uint8)}, r"expected \(4, 16, 2, 8\)"),
        ("nvfp4", {"k_descale": torch.ones(2)}, "expected 1 element, as nvfp4 has one global scale"),
    ],
)
def test_wrong_arguments(make_writer: Make, kv_format: str, changes: dict[str, Any], message: str) -> None:
    writer, driver = make_writer(kv_format)
    with pytest.raises(ArgumentError, match=message):
        writer.append(**arguments(kv_format, **changes))
    assert driver.launches == []


def test_a_configuration_that_no_kernel_has(make_writer: Make) -> None:
    with pytest.raises(ConfigError, match="kv_format = 'int8' is not supported: expected one of bf16"):
        make_writer("int8")


def test_a_miss_prints_the_spec_lines(make_writer: Make) -> None:
    writer, driver = make_writer()
    other = CacheWriter(writer.library, head_dim=64, kv_format="e3m2")
    with pytest.raises(KernelNotFoundError) as caught:
        other.append(**arguments("e3m2", d=64))
    text = str(caught.value)
    for line in (
        "impl: append",
        "head_dim: [64]",
        "kv_format: [e3m2]",
        "nearest: paged_decode-sm_90a-append-d128-kvfp8",
    ):
        assert line in text
    assert [miss["key"] for miss in writer.library.misses] == [other.key]
    assert driver.launches == []


def test_loading_during_a_capture_is_refused(make_writer: Make) -> None:
    writer, driver = make_writer()
    driver.capturing.add(0)
    with pytest.raises(CaptureError, match="preload"):
        writer.append(**arguments())
    driver.capturing.clear()
    writer.preload()
    driver.capturing.add(0)
    writer.append(**arguments())
    assert len(driver.launches) == 1
