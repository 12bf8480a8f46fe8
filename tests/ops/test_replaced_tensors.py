"""Runs that differ from an earlier one in tensors' addresses alone, and those that only seem to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decode_problem import Problem
from fake_driver import FakeDriver

from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.kernel import BoundLaunch
from cubinery.runtime.ops.paged_decode import calls, tensors
from cubinery.runtime.ops.paged_decode.calls import Call
from cubinery.runtime.ops.paged_decode.op import PagedDecode, Plan

Make = Callable[..., tuple[PagedDecode, FakeDriver]]
Arguments = dict[str, Any]

BF = torch.bfloat16
DESCALES = ("q_descale", "k_descale", "v_descale")
CHECKS = ("queries", "caches", "block_scales", "block_table", "descale", "lse", "sinks", "q_lens", "workspace")
"""Functions of `tensors` that look at one argument in full."""

VALUES = {
    "q": "q", "block_table": "block_table", "out": "o", "lse": "lse", "q_descale": "q_descale",
    "k_descale": "k_descale", "v_descale": "v_descale", "sinks": "sinks", "q_lens": "q_lens",
}  # fmt: skip
"""The launch value that an argument's address becomes."""


def on_16(*shape: int, dtype: torch.dtype = torch.float32, skip: int = 0) -> torch.Tensor:
    """Zeros `skip` elements past 16 bytes."""
    size = int(np.prod(shape))
    base = torch.zeros(size + 64, dtype=dtype)
    start = -base.data_ptr() % 16 // base.element_size() + skip
    return base[start : start + size].view(shape)


@pytest.fixture
def arguments(p: Problem) -> Arguments:
    """All that a run of a plan with sinks and q_lens can be given."""
    return {
        "q": p.q, "k_cache": p.k, "v_cache": p.v, "block_table": p.table, "q_descale": on_16(1),
        "k_descale": on_16(2), "v_descale": on_16(3, 2), "out": torch.empty_like(p.q), "lse": on_16(3, 2, 4),
        "workspace": torch.empty(1 << 20, dtype=torch.uint8), "sinks": on_16(8),
        "q_lens": on_16(3, dtype=torch.int32),
    }  # fmt: skip


@pytest.fixture
def ran(make_decode: Make, p: Problem, arguments: Arguments) -> tuple[Plan, FakeDriver]:
    """A plan that ran with `arguments`."""
    decode, driver = make_decode(sinks=True, q_lens=True)
    plan = decode.plan(p.lengths, **p.heads, force_splits=2)
    plan.run(**arguments)
    return plan, driver


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the checks that were called."""
    called: list[str] = []
    for name in CHECKS:
        check = getattr(tensors, name)

        def spy(*given: Any, name: str = name, check: Any = check, **options: Any) -> Any:
            called.append(name)
            return check(*given, **options)

        monkeypatch.setattr(tensors, name, spy)
    return called


def checked_anew(plan: Plan, driver: FakeDriver, arguments: Arguments) -> bytes:
    """The parameters of a run that remembers nothing."""
    plan._calls.clear()
    plan._recent.clear()
    plan.run(**arguments)
    return driver.launches[-1].params


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_like_the_last_one_is_launched_without_a_full_check(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, full_checks: list[str], name: str
) -> None:
    plan, driver = ran
    before = driver.launches[-1].values
    kept = arguments[name]
    arguments[name] = kept.clone()
    for _ in range(2):  # and is remembered
        plan.run(**arguments)
        assert driver.launches[-1].values == before | {VALUES[name]: arguments[name].data_ptr()}
    plan.run(**(arguments | {name: kept}))
    assert driver.launches[-1].values == before
    assert full_checks == []
    assert driver.launches[-1].params == checked_anew(plan, driver, arguments | {name: kept})


@pytest.mark.parametrize("name", ["k_cache", "v_cache", "workspace", *VALUES])
def test_another_view_of_the_same_memory_changes_nothing(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, full_checks: list[str], name: str
) -> None:
    """Serving engines cut K and V of a layer out of one tensor at each step."""
    plan, driver = ran
    arguments[name] = arguments[name][:]
    plan.run(**arguments)
    assert full_checks == []
    assert driver.launches[0].params == driver.launches[1].params
    assert list(plan._recent) == [id(arguments["k_cache"])]


def test_any_sequence_of_changes_launches_what_full_checks_would(
    ran: tuple[Plan, FakeDriver], arguments: Arguments
) -> None:
    plan, driver = ran
    rng = np.random.default_rng(5)
    choices: dict[str, list[Any]] = {name: [x, x.clone(), x[:]] for name, x in arguments.items()}
    choices["q"].append(choices["q"][0].unflatten(0, (3, 1)))
    choices["out"].append(torch.empty(3, 8, 256, dtype=BF)[..., :128])
    choices["block_table"].append(torch.zeros(3, 200, dtype=torch.int32))
    choices["lse"].append(on_16(3, 2, 4, skip=1))
    for name in DESCALES:
        choices[name] += [None, 2.0, on_16(2, skip=3)]
    choices["softmax_scale"], choices["out_scale"] = [None, 0.5], [1.0, 2]
    chosen = {name: values[0] for name, values in choices.items()}
    for _ in range(150):
        for name in rng.choice(list(choices), rng.integers(1, 3)):
            chosen[name] = choices[name][rng.integers(len(choices[name]))]
        plan.run(**chosen)
        launched = driver.launches[-1].params
        kept = dict(plan._calls), dict(plan._recent)
        assert launched == checked_anew(plan, driver, chosen)
        plan._calls, plan._recent = kept  # type: ignore[assignment]


def wrong(name: str, kept: torch.Tensor) -> list[tuple[Any, str]]:
    """Values that differ from `kept` in one thing that is checked, and what is said of them."""
    shape = tuple(kept.shape)
    memory = bytearray(kept.numel() * kept.element_size() + 2)
    found: list[tuple[Any, str]] = [
        (np.zeros(shape), f"{name} is a ndarray: expected"),
        (kept.to("meta"), f"{name} is on meta: expected cpu"),
        (kept.new_zeros((*shape, 7)), f"{name} has shape {(*shape, 7)}"),
        (kept.to(torch.float64), f"{name} has dtype torch.float64: expected"),
        (kept.to_sparse(), f"{name} has layout torch.sparse_coo: expected torch.strided"),
        (torch.frombuffer(memory, dtype=kept.dtype, offset=2).view(shape), f"{name} lies at address 0x"),
    ]
    if kept.ndim == 2:  # one that refuses to say strides
        found.append((kept.to_sparse_csr(), f"{name} has layout torch.sparse_csr: expected torch.strided"))
    if name not in DESCALES:  # whose strides are free
        found.append((torch.zeros((*shape, 2), dtype=kept.dtype)[..., 0], f"{name} has s"))
    if name not in (*DESCALES, "out", "lse"):
        found.append((None, name))
    return found


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("name", VALUES)
def test_whatever_is_wrong_with_a_replacement_is_said_as_ever(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, name: str
) -> None:
    plan, driver = ran
    before = driver.launches[-1].params
    for value, message in wrong(name, arguments[name]):
        with pytest.raises(ArgumentError) as remembered:
            plan.run(**(arguments | {name: value}))
        assert message in str(remembered.value)
        assert len(driver.launches) == 1
        with pytest.raises(ArgumentError) as anew:
            checked_anew(plan, driver, arguments | {name: value})
        assert str(anew.value) == str(remembered.value)
        plan.run(**arguments)
        assert driver.launches.pop().params == before


def test_a_tensor_of_another_device_is_not_alike() -> None:
    """Where all memory is the host's, no tensor has another device and an address."""

    class Stand:
        dtype, layout, shape = BF, torch.strided, (3, 8, 128)

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

        def stride(self) -> tuple[int, ...]:
            return 1024, 128, 1

    call = Call.__new__(Call)
    call._likenesses = [calls._likeness(Stand("cuda:0")), None]
    assert call.is_alike(0, Stand("cuda:0"))
    assert not call.is_alike(0, Stand("cuda:1"))
    assert not call.is_alike(1, Stand("cuda:0"))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_codes_of_another_dtype_at_the_same_address_are_refused(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, name: str
) -> None:
    plan, driver = ran
    with pytest.raises(ArgumentError, match=r"v_cache has dtype .*, the dtype of k_cache"):
        plan.run(**(arguments | {name: arguments[name].view(torch.uint8)}))
    both = {other: arguments[other].view(torch.uint8) for other in ("k_cache", "v_cache")}
    plan.run(**(arguments | both))
    assert driver.launches[0].params == driver.launches[1].params


def test_other_numbers_of_pages_and_strides_at_the_same_address_are_seen(
    ran: tuple[Plan, FakeDriver], arguments: Arguments
) -> None:
    plan, driver = ran
    fewer = {name: arguments[name][:100] for name in ("k_cache", "v_cache")}
    plan.run(**(arguments | fewer))
    assert driver.launches[-1].values["k_map"].extents[-1] == 100
    q = torch.zeros(3, 8, 256, dtype=BF)[..., :128]
    plan.run(**(arguments | fewer | {"q": q}))
    assert driver.launches[-1].values["q_head"] == 256


@pytest.mark.parametrize("name", ["block_table", "lse", "k_descale", "sinks", "q_lens"])
def test_less_alignment_is_left_to_the_full_check(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, full_checks: list[str], name: str
) -> None:
    """These may lie on 4 bytes."""
    plan, driver = ran
    kept = arguments[name]
    arguments[name] = on_16(*kept.shape, dtype=kept.dtype, skip=1)
    plan.run(**arguments)
    assert driver.launches[-1].values[VALUES[name]] == arguments[name].data_ptr()
    assert full_checks == [name.replace("k_descale", "descale")]


def test_scales_are_compared_as_numbers_alone(ran: tuple[Plan, FakeDriver], arguments: Arguments) -> None:
    plan, driver = ran
    arguments |= {"softmax_scale": 1.0}
    plan.run(**arguments)
    for bad in (torch.ones(1), torch.ones(3), np.ones(3), True, "1"):
        with pytest.raises(ArgumentError, match=r"softmax_scale = .*: expected a finite number"):
            plan.run(**(arguments | {"softmax_scale": bad}))
        with pytest.raises(ArgumentError, match=r"out_scale = .*: expected a finite number"):
            plan.run(**(arguments | {"out_scale": bad}))
        arguments["q"] = arguments["q"].clone()
        with pytest.raises(ArgumentError, match=r"softmax_scale = .*: expected a finite number"):
            plan.run(**(arguments | {"softmax_scale": bad}))
    assert len(driver.launches) == 2
    before = driver.launches[-1].values
    plan.run(**(arguments | {"softmax_scale": 1, "out_scale": 1}))
    assert driver.launches[-1].values == before | {"q": arguments["q"].data_ptr()}
    plan.run(**(arguments | {"softmax_scale": 0.25}))
    assert driver.launches[-1].values["scale_qs"] == 0.25


def test_outputs_that_are_not_given_are_new_each_time(make_decode: Make, p: Problem, full_checks: list[str]) -> None:
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    wide = torch.zeros(3, 8, 256, dtype=BF)[..., :128]
    kept = []
    for q in (p.q, p.q.clone(), p.q.view(3, 1, 8, 128), wide, wide.clone(memory_format=torch.preserve_format)):
        for given in ({}, {"out": torch.empty_like(p.q)}, {"lse": torch.empty(3, 2, 4)}, {}):
            out, lse = plan.run(q, p.k, p.v, p.table, **given)
            assert (out.shape, out.dtype, out.is_contiguous()) == (given.get("out", q).shape, BF, True)
            assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((3, 2, 4), torch.float32, True)
            values = driver.launches[-1].values
            assert (values["o"], values["lse"]) == (out.data_ptr(), lse.data_ptr())
            kept.append((out, lse))
    assert len({out.data_ptr() for out, _ in kept}) == len({lse.data_ptr() for _, lse in kept}) == len(kept)
    full_checks.clear()
    plan.run(q.clone(), p.k, p.v, p.table)
    assert full_checks == []


def test_e4m3_queries_get_bf16_outputs(make_decode: Make) -> None:
    p = Problem([300], np.random.default_rng(1), torch, q_dtype="e4m3")
    decode, _ = make_decode(archs=("sm_110a",), q_dtype="e4m3")
    plan = decode.plan(p.lengths, **p.heads)
    for q in (p.q, p.q.clone(), p.q.view(torch.uint8)):
        assert plan.run(q, p.k, p.v, p.table)[0].dtype == BF


def test_a_new_q_after_an_update_still_meets_a_table_that_is_too_narrow(make_decode: Make, p: Problem) -> None:
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    plan.run(*p.tensors)
    plan.update([p.table.shape[1] * 16 + 1, 1, 1])
    with pytest.raises(ArgumentError, match="block_table has 96 columns of 16 keys: expected at least 97"):
        plan.run(p.q.clone(), p.k, p.v, p.table.clone())
    assert len(driver.launches) == 1


def test_tables_are_checked_on_request_whatever_is_remembered(
    ran: tuple[Plan, FakeDriver], arguments: Arguments
) -> None:
    plan, _ = ran
    table = arguments["block_table"].clone()
    table[0, 0] = 5000
    with pytest.raises(ArgumentError, match=r"block_table\[0, 0\] = 5000"):
        plan.run(**(arguments | {"block_table": table}), check_block_table=True)


def test_a_replaced_tensor_does_not_hide_the_one_before(ran: tuple[Plan, FakeDriver], arguments: Arguments) -> None:
    """Its address went with it."""
    plan, driver = ran
    first, second = arguments["q"], arguments["q"].clone()
    for q in (second, first, first, second, second):
        plan.run(**(arguments | {"q": q}))
        assert driver.launches[-1].values["q"] == q.data_ptr()
    second.set_(torch.zeros_like(first))  # the same object over other memory
    plan.run(**(arguments | {"q": second}))
    assert driver.launches[-1].values["q"] == second.data_ptr()


def test_layers_that_exchange_their_views_keep_apart(make_decode: Make, p: Problem) -> None:
    """Views die with each step, and their ids go to those of other layers."""
    decode, driver = make_decode()
    plan = decode.plan(p.lengths, **p.heads)
    layers = [(p.k.clone(), p.v.clone()) for _ in range(3)]
    for step in range(4):
        for k, v in layers[step % 3 :] + layers[: step % 3]:
            plan.run(p.q.clone(), k[:], v[:], p.table)
            values = driver.launches[-1].values
            assert (values["k_map"].address, values["v_map"].address) == (k.data_ptr(), v.data_ptr())
    assert len(driver.encoded) == 6


@pytest.mark.parametrize("step", ["set_address", "_enter"])
def test_an_interrupt_in_the_middle_leaves_no_call_half_changed(
    ran: tuple[Plan, FakeDriver], arguments: Arguments, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    plan, driver = ran
    owner: type = Call if step == "_enter" else BoundLaunch
    real = getattr(owner, step)

    def interrupted(*given: Any) -> None:
        real(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan.run(**arguments | {"q": arguments["q"].clone()})
    plan.run(**arguments)
    assert driver.launches[-1].values["q"] == arguments["q"].data_ptr()
    assert driver.launches[-1].params == checked_anew(plan, driver, arguments)
