"""Windows, sinks, soft-caps and tokens per sequence in the public call: arguments, and what a launch is given."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver

from cubinery.runtime.errors import ArgumentError, ConfigError
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

Make = Callable[..., tuple[PagedDecode, FakeDriver]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "window = 0: expected None or an integer of 1 to 1073741824 keys"),
        ({"window": True}, "window = True: expected None or an integer"),
        ({"softcap": 0.0}, "softcap = 0.0: expected a number above 0"),
        ({"softcap": 1e-9}, "softcap = 1e-09: expected at least 0.001"),
        ({"softcap": math.inf}, "softcap = inf: expected a finite number"),
    ],
)
def test_windows_and_caps_out_of_range(make_decode: Make, options: dict[str, Any], message: str) -> None:
    decode, _ = make_decode()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        PagedDecode(decode.library, head_dim=128, page_size=16, kv_format="fp8", **options)


def test_a_window_needs_a_causal_mask(make_decode: Make) -> None:
    decode, _ = make_decode()
    with pytest.raises(ConfigError, match="window = True with causal = False: expected causal = True"):
        PagedDecode(decode.library, head_dim=128, page_size=16, kv_format="fp8", q_len=4, causal=False, window=9)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("sinks", None, "sinks = None: expected a tensor, as PagedDecode was made with sinks=True"),
        ("sinks", torch.zeros(8).bfloat16(), "sinks has dtype torch.bfloat16: expected torch.float32"),
        ("sinks", torch.zeros(2), "sinks has shape (2,) and strides (1,): expected a contiguous (8,)"),
        ("sinks", torch.zeros(16)[::2], "sinks has shape (8,) and strides (2,): expected a contiguous (8,)"),
        ("q_lens", None, "q_lens = None: expected a tensor, as PagedDecode was made with q_lens=True"),
        ("q_lens", torch.zeros(3).long(), "q_lens has dtype torch.int64: expected torch.int32"),
        ("q_lens", torch.zeros(4, dtype=torch.int32), "q_lens has shape (4,) and strides (1,): expected"),
        ("q_lens", [1, 1, 1], "q_lens is a list: expected a torch tensor"),
    ],
)
def test_sinks_and_q_lens(make_decode: Make, p: Problem, name: str, value: Any, message: str) -> None:
    decode, driver = make_decode(sinks=True, q_lens=True)
    plan = decode.plan(p.lengths, **p.heads)
    given = {"sinks": torch.zeros(8), "q_lens": torch.ones(3, dtype=torch.int32)}
    plan.run(*p.tensors, **given)
    driver.launches.clear()
    with pytest.raises(ArgumentError, match=re.escape(message)):
        plan.run(*p.tensors, **(given | {name: value}))
    assert not driver.launches


@pytest.mark.parametrize("name", ["sinks", "q_lens"])
def test_what_a_decode_was_not_made_for(made: tuple[Plan, FakeDriver], p: Problem, name: str) -> None:
    value = torch.zeros(8) if name == "sinks" else torch.ones(3, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=f"{name} is given: expected None, as PagedDecode was made without {name}"):
        made[0].run(*p.tensors, **{name: value})


def test_launch_values_of_the_axes(make_decode: Make, p: Problem) -> None:
    """Each kernel takes what its axes need, another layer brings sinks of its own, and dead tensors are not reused."""
    decode, driver = make_decode(window=77, softcap=30.0, sinks=True, q_lens=True)
    plan = decode.plan(p.lengths, **p.heads)
    q_lens = torch.ones(3, dtype=torch.int32)
    for sinks in (torch.zeros(8), torch.ones(8)):
        plan.run(*p.tensors, sinks=sinks, q_lens=q_lens)
        values = driver.launches[-1].values
        assert (values["window"], values["softcap"]) == (77, 30.0)
        assert (values["sinks"], values["q_lens"]) == (sinks.data_ptr(), q_lens.data_ptr())


def test_a_block_table_is_checked_from_the_window_on(make_decode: Make, p: Problem) -> None:
    decode, _ = make_decode(window=100)
    plan = decode.plan(p.lengths, **p.heads)
    p.table[2, :87] = -5  # key 1400 is the first of token 0, and lies in column 87
    plan.run(*p.tensors, check_block_table=True)
    p.table[2, 87] = -5
    with pytest.raises(ArgumentError, match=r"block_table\[2, 87\] = -5"):
        plan.run(*p.tensors, check_block_table=True)
