"""Plans that give an SM one CTA at most, and the kernel that serves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the operator needs torch")

from fake_driver import FakeDriver, write_bundle

from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.op import PagedDecode

Make = Callable[..., tuple[PagedDecode, FakeDriver]]


def test_a_plan_of_few_ctas_gets_all_warps_of_an_sm(make_decode: Make) -> None:
    """Where its chunks are neither short nor long, where nobody forces a number of CTAs, and if the bundle has it."""
    decode, _ = make_decode()
    heads = {"num_q_heads": 32, "num_kv_heads": 8}
    narrow, wide = decode.keys(4)[1::-1]

    def key(lengths: list[int], **options: Any) -> str:
        plan = decode.plan(lengths, **heads, **options)
        grid = plan.num_work * 8
        assert plan.keys != (narrow,) or grid <= decode.info.sm_count, "padding does not wait for an SM"
        return plan.keys[0]

    assert key([16384]) == key([16384], capturable=True) == key([16384], pad_to=16) == narrow
    assert key([4096]) == key([131072]) == wide, "three tiles a chunk, and 64"
    assert key([16384], pad_to=17) == wide, "136 CTAs"
    assert key([2048] * 16, max_splits=1) == narrow
    assert key([2048] * 17, max_splits=1) == wide
    plan = decode.plan([16384], **heads, capturable=True)
    plan.update([131072])
    assert plan.keys == (narrow,), "a captured graph keeps its kernel"
    forced = PagedDecode(decode.library, head_dim=128, page_size=16, kv_format="fp8", ctas_per_sm=2)
    assert forced.plan([16384], **heads).keys == (wide,)


def test_a_bundle_without_that_kernel_serves_all_plans_with_the_other(make_decode: Make, tmp_path: Path) -> None:
    decode, _ = make_decode()
    config = decode.config(4)
    driver = FakeDriver(["sm_90a"])
    write_bundle(tmp_path / "less", "sm_90a", [config, *config.requires()])
    library = Library.open(tmp_path / "less", driver=driver)
    less = PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8")
    assert less.keys(4) == (config.key("sm_90a"), "paged_decode-sm_90a-plan")
    assert less.plan([16384], num_q_heads=32, num_kv_heads=8).keys == less.keys(4)[:1]
    assert not library.misses
