"""Readers of cubins and PTX on hand-made bytes: every form they must know, and every damage they must survive."""

from __future__ import annotations

import contextlib

import fake_cubin
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubinery.aot.errors import InspectError
from cubinery.aot.inspect import elf_sm, elf_symbols, ptx_block, ptx_params, ptx_version, read_cubin, resources, sass

PARAMS = [(8, 8), (4, 4), (128, 64), (4, 4)]
GOOD = fake_cubin.cubin(symbols=["a", "b"], registers=77, stack=16, shared=1024 + 48, params=PARAMS, block=(64, 2, 1))


def test_what_a_cubin_says() -> None:
    info = read_cubin(GOOD)
    assert (info.sm, info.arch, info.toolkit) == (110, "sm_110a", (13, 4))
    assert elf_symbols(GOOD) == ("a", "b")
    found = resources(GOOD, "b")
    assert (found.registers, found.stack, found.static_smem, found.block) == (77, 16, 48, (64, 2, 1))
    assert found.params == ((0, 8), (8, 4), (64, 128), (192, 4))
    assert elf_sm(fake_cubin.cubin(sm=90)) == 90


def test_a_cubin_without_notes_and_without_shared_memory() -> None:
    info = read_cubin(fake_cubin.cubin(target=None, block=None))
    assert (info.arch, info.toolkit) == (None, None)
    assert (info.kernels["toy_0"].static_smem, info.kernels["toy_0"].block, info.kernels["toy_0"].params) == (
        0,
        None,
        (),
    )


def test_a_kernel_that_is_not_in_the_cubin() -> None:
    with pytest.raises(InspectError, match="no kernel 'c' in the cubin: it holds a, b"):
        resources(GOOD, "c")


@given(st.integers(0, len(GOOD) - 1))
def test_a_cubin_cut_anywhere_is_an_inspect_error(length: int) -> None:
    with pytest.raises(InspectError):
        read_cubin(GOOD[:length])


@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_a_damaged_cubin_is_read_or_refused_and_never_anything_else(edits: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for at, value in edits:
        data[at] = value
    with contextlib.suppress(InspectError):
        assert read_cubin(bytes(data)).sm <= 255


PTX = """\
.version 9.4
.target sm_90a
.visible .func (.param .b32 r) f(.param .b64 x);
.visible .entry other_0(
\t.param .u64 a
)
{ ret; }
.visible .entry k_0(
\t.param .u64 .ptr .global .align 16 k_0_param_0,
\t.param .u64 .ptr .shared k_0_param_1,
\t.param .u64 .ptr k_0_param_2,
\t.param .u32 k_0_param_3,
\t.param .f32 k_0_param_4,
\t.param .b8 k_0_param_5,
\t.param .align 64 .b8 k_0_param_6[128],
\t.param .align 4 .b8 k_0_param_7[12],
\t.param .b16 k_0_param_8[3]
)
.maxntid 256, 2
.minnctapersm 2
{
\t.reg .b32 %r<3>;
\tret;
}
"""


def test_ptx_parameters_of_every_form() -> None:
    assert ptx_params(PTX, "k_0") == [(8, 8), (8, 8), (8, 8), (4, 4), (4, 4), (1, 1), (128, 64), (12, 4), (6, 2)]
    assert ptx_params(PTX, "other_0") == [(8, 8)]
    assert ptx_block(PTX, "k_0") == ("maxntid", (256, 2, 1))
    assert ptx_block(PTX, "other_0") is None
    assert ptx_version(PTX) == "9.4"


def test_an_entry_without_parameters() -> None:
    assert ptx_params(".entry e()\n.reqntid 32\n{ }", "e") == []
    assert ptx_params(".entry e {}", "e") == []
    assert ptx_block(".entry e()\n.reqntid 32\n{ }", "e") == ("reqntid", (32, 1, 1))


def test_ptx_that_cannot_be_read() -> None:
    with pytest.raises(InspectError, match="no entry 'k'"):
        ptx_params(PTX, "k")  # a prefix of k_0 is another name
    with pytest.raises(InspectError, match=r"cannot read the PTX parameter '\.param \.texref t'"):
        ptx_params(".entry e(.param .texref t) { }", "e")
    with pytest.raises(InspectError, match="states no version"):
        ptx_version("// empty")


def test_sass_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cubinery.aot.inspect.find_tool", lambda name: None)
    with pytest.raises(InspectError, match="pip install nvidia-cuda-nvdisasm"):
        sass(GOOD)
