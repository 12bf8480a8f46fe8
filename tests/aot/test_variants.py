"""Expansion, merging, required artifacts, closure, and lists of recorded misses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from toy_builds import toy_items, toy_spec

from cubinery.aot.errors import ClosureError, SpecError
from cubinery.aot.spec import Gates, parse_specs
from cubinery.aot.variants import check_closure, expand, from_misses
from cubinery.runtime.errors import ArchError


def keys(items: list) -> list[str]:
    return [item.key for item in items]


def test_items_are_canonical_unique_and_sorted() -> None:
    items = toy_items("[{arch: thor, width: [2, 1], masked: [true, false]}, {arch: thor, width: 2}]")
    assert keys(items) == ["toy-sm_110a-scale-w1", "toy-sm_110a-scale-w2", "toy-sm_110a-scale-w2-maskedoff"]
    assert items[0].config.masked is True
    assert items[0].origin == "toy.yaml:3"


def test_an_arch_restriction_takes_aliases_and_names_what_there_is() -> None:
    spec = toy_spec("{arch: [thor, h200], width: 1}")
    assert keys(expand([spec], ["sm_101a"])) == ["toy-sm_110a-scale-w1"]
    with pytest.raises(ArchError, match=r"no spec asks for sm_103a: toy\.yaml build sm_110a, sm_90a"):
        expand([spec], ["b300"])
    with pytest.raises(ArchError, match="unknown arch 'sm_75'"):
        expand([spec], ["sm_75"])
    with pytest.raises(ArchError, match="no arch given"):
        expand([spec], [])


def test_an_exclude_is_judged_on_the_whole_spec_not_on_the_archs_of_one_build() -> None:
    spec = toy_spec("{arch: [thor, h200], width: [1, 8], dtype: bf16}", exclude="{arch: h200, width: 8}")
    assert keys(expand([spec], ["thor"])) == ["toy-sm_110a-scale-w1-tbf16", "toy-sm_110a-scale-w8-tbf16"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"gates": "{max_registers: 40}"},
            r"gates differ: \{max_registers: 40, max_stack: 0\} here, \{max_stack: 0\} at a",
        ),
        ({"emit": "[ptx]"}, r"emit differ: \[ptx\] here, \[\] at a\.yaml:3"),
    ],
)
def test_specs_that_share_a_key_agree_or_fail_naming_both_places(entries: dict[str, str], message: str) -> None:
    first, second = toy_spec("{arch: thor, width: [1, 2]}"), toy_spec("{arch: thor, width: [2, 4]}", **entries)
    same = parse_specs("family: toy\nimpl: scale\nmatrix: {arch: thor, width: [1, 2]}\n", "a.yaml")
    with pytest.raises(SpecError, match=rf"toy\.yaml:3: matrix: toy-sm_110a-scale-w2: {message}"):
        expand([*same, second])
    assert keys(expand([first, toy_spec("{arch: thor, width: [2, 4]}")])) == [
        f"toy-sm_110a-scale-w{width}" for width in (1, 2, 4)
    ]


def test_required_artifacts_come_along_with_default_gates_and_the_same_outputs() -> None:
    items = toy_items("{arch: [thor, h200], width: 1, helper: true}", gates="{max_registers: 40}", emit="[ptx]")
    helpers = [item for item in items if item.config.impl == "helper"]
    assert keys(helpers) == ["toy-sm_110a-helper", "toy-sm_90a-helper"]
    assert all(not h.explicit and h.gates == Gates() and h.emit == ("ptx",) for h in helpers)
    assert next(i for i in items if i.key == "toy-sm_110a-scale-w1-helperon").requires == ("toy-sm_110a-helper",)


def test_an_explicit_artifact_keeps_its_gates_and_emits_what_others_need_of_it() -> None:
    helper = parse_specs("family: toy\nimpl: helper\nmatrix: {arch: thor}\ngates: {max_registers: 20}\n", "h.yaml")
    items = expand([*helper, toy_spec("{arch: thor, width: 1, helper: true}", emit="[ptx]")])
    found = next(item for item in items if item.key == "toy-sm_110a-helper")
    assert (found.explicit, found.gates.max_registers, found.emit) == (True, 20, ("ptx",))


def test_closure_holds_when_every_outcome_is_built() -> None:
    spec = toy_spec(
        "{arch: [thor, h200], width: [1, 4], helper: [true, false]}", domain="{length: [3, 8], sums: [true, false]}"
    )
    check_closure([spec], expand([spec]))
    check_closure([spec], expand([spec], ["thor"]))


def test_report_selector_a_hole_in_the_closure_names_the_keys_and_the_domain() -> None:
    """A selector picked a tile that was not shipped."""
    spec = toy_spec("{arch: [thor, h200], width: 4}", domain="{length: [3, 8]}")
    with pytest.raises(ClosureError, match=r"toy\.yaml:4: domain: the selector can pick 2 kernels") as caught:
        check_closure([spec], expand([spec]))
    assert caught.value.missing == ("toy-sm_90a-scale-w1", "toy-sm_110a-scale-w1")
    assert "{width: 1, dtype: f32, masked: true" in str(caught.value)
    with pytest.raises(ClosureError, match="can pick 1 kernel that") as caught:
        check_closure([spec], expand([spec], ["thor"]))
    assert caught.value.missing == ("toy-sm_110a-scale-w1",)


def test_a_hole_closed_by_another_spec_is_no_hole() -> None:
    spec, other = toy_spec("{arch: thor, width: 4}", domain="{length: [3, 8]}"), toy_spec("{arch: thor, width: 1}")
    check_closure([spec, other], expand([spec, other]))


def test_required_artifacts_of_outcomes_belong_to_the_closure() -> None:
    spec = toy_spec("{arch: thor, width: 4, helper: true}", domain="{length: 8, sums: true}")
    items = expand([spec])
    check_closure([spec], items)
    with pytest.raises(ClosureError) as caught:
        check_closure([spec], [item for item in items if item.config.impl != "helper"])
    assert caught.value.missing == ("toy-sm_110a-helper",)


def test_a_wrong_domain_is_an_error_at_its_line() -> None:
    spec = toy_spec("{arch: thor, width: 4}", domain="{lenght: 8}")
    with pytest.raises(SpecError, match=r"toy\.yaml:4: domain: toy: unknown domain axis 'lenght'.*\(on sm_110a\)"):
        check_closure([spec], expand([spec]))


def test_a_domain_without_a_selector_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    spec = toy_spec("{arch: thor, width: 4}", domain="{length: 8}")
    monkeypatch.setitem(sys.modules, "cubinery.runtime.ops.toy.select", None)
    with pytest.raises(SpecError, match="toy has no selector"):
        check_closure([spec], expand([spec]))


# -- recorded misses -----------------------------------------------------------------------------

FULL = {
    "key": "toy-sm_110a-scale-w2-helperon",
    "family": "toy",
    "impl": "scale",
    "arch": "sm_110a",
    "axes": {"width": 2, "helper": True},
}


@pytest.mark.parametrize("entry", [FULL, {"key": FULL["key"]}, {k: v for k, v in FULL.items() if k != "key"}])
@pytest.mark.parametrize("lines", [True, False])
def test_misses_become_items_with_what_they_require(entry: dict, lines: bool, tmp_path: Path) -> None:
    file = tmp_path / "misses.json"
    file.write_text(
        json.dumps(entry) + "\n\n" + json.dumps(entry) + "\n" if lines else json.dumps([entry, entry], indent=1)
    )
    items = from_misses(file)
    assert keys(items) == ["toy-sm_110a-helper", "toy-sm_110a-scale-w2-helperon"]
    assert items[1].origin == (f"{file}:1" if lines else f"{file} [0]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the list holds no misses"),
        ("[]", "the list holds no misses"),
        ('{"key": "toy-sm_110a-scale-w1"}\n{"key"', r":2: not valid JSON"),
        ("[1", "not valid JSON"),
        ("[1]", r"\[0\]: expected an object .* found 1"),
        ('{"family": "toy"}', r":1: expected `key`, or all of"),
        ('{"key": 3}', "key: expected text, found 3"),
        ('{"key": "toy-sm_110a-scale-w3"}', r":1: key 'toy-sm_110a-scale-w3': 'w3' names no axis value"),
        ('{"key": "toy-sm_110a-scale"}', "no value for width"),
        ('{"key": "toy-sm_75-scale-w1"}', "unknown arch 'sm_75'"),
        ('{"key": "toy-sm_90a-scale-w8-tbf16"}', "needs tensor memory"),
        (
            json.dumps({**FULL, "axes": {"width": 4}}),
            "the axes spell toy-sm_110a-scale-w4, but the key is toy-sm_110a-scale-w2",
        ),
        (json.dumps({**FULL, "axes": [1]}), r"axes: expected an object, found \[1\]"),
        (json.dumps({**FULL, "axes": {"width": "2"}}), "width = '2' is not supported"),
        (json.dumps({**FULL, "family": "toys"}), "unknown family 'toys'"),
    ],
)
def test_bad_misses_are_one_line_with_their_place(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "misses.jsonl"
    file.write_text(text)
    with pytest.raises(SpecError, match=message) as caught:
        from_misses(file)
    assert str(caught.value).startswith(str(file))
    assert "\n" not in str(caught.value)


def test_a_list_of_misses_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot read the list of misses: No such file"):
        from_misses(tmp_path / "none")
