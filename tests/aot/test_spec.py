"""Specs: what good ones mean, and that every mistake is one line with file, line, path and the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from cubinery.aot.errors import SpecError
from cubinery.aot.spec import MAX_COMBINATIONS, Gates, load_specs, parse_specs

GOOD = """\
family: toy
impl: scale
defaults: {dtype: bf16}
matrix:
  - arch: [sm_90a, thor]
    width: [1, 2]
  - arch: sm_110a
    width: 4
    masked: false
exclude:
  - {arch: sm_90a, width: 2}
include:
  - {arch: sm_90a, width: 2, dtype: f32}
gates: {max_registers: 64, min_ctas_per_sm: 2}
emit: [object, ptx]
domain:
  - {length: [4, 7], sums: false}
"""


def test_a_spec_enumerates_products_defaults_excludes_and_includes() -> None:
    (spec,) = parse_specs(GOOD, "good.yaml")
    assert [point.config.key(point.arch.name) for point in spec.points] == [
        "toy-sm_90a-scale-w1-tbf16",
        "toy-sm_110a-scale-w1-tbf16",
        "toy-sm_110a-scale-w2-tbf16",
        "toy-sm_110a-scale-w4-tbf16-maskedoff",
        "toy-sm_90a-scale-w2",
    ]
    assert spec.archs == ("sm_90a", "sm_110a")
    assert spec.gates == Gates(max_registers=64, max_stack=0, min_ctas_per_sm=2)
    assert spec.emit == ("ptx", "object")
    assert [domain for domain, _ in spec.domain] == [{"length": [4, 7], "sums": [False]}]
    assert [str(point.place) for point in spec.points] == ["good.yaml:5"] * 3 + ["good.yaml:7", "good.yaml:13"]


def test_several_documents_of_one_file_are_several_specs() -> None:
    text = HEAD + "matrix: {arch: thor, width: 1}\n---\nfamily: toy\nimpl: helper\nmatrix: {arch: thor}\n"
    assert [spec.impl for spec in parse_specs(text)] == ["scale", "helper"]


def test_axes_at_their_default_match_an_exclude() -> None:
    (spec,) = parse_specs(
        "family: toy\nimpl: scale\nmatrix: {arch: thor, width: [2, 4]}\nexclude: {masked: true, width: [1, 2]}\n"
    )
    assert [point.config.width for point in spec.points] == [4]


HEAD = "family: toy\nimpl: scale\n"
MISTAKES = {
    "unknown entry": (
        "family: toy\nimpl: scale\nmatrx: {}\n",
        3,
        "matrx: unknown entry 'matrx'",
        "did you mean 'matrix'?",
    ),
    "no family": ("impl: scale\n", 1, "no 'family' given", ""),
    "no impl": ("family: toy\n", 1, "no 'impl' given", ""),
    "unknown family": (
        "family: paged_decod\nimpl: x\n",
        1,
        "unknown family 'paged_decod'",
        "did you mean 'paged_decode'?",
    ),
    "unknown impl": ("family: toy\nimpl: scal\n", 2, "unknown implementation of toy 'scal'", "did you mean 'scale'?"),
    "family is a list": ("family: [toy]\nimpl: scale\n", 1, "expected the name of a family, found a list", ""),
    "nothing to build": (HEAD, 1, "nothing to build: expected `matrix`, `include` or both", ""),
    "top is a list": ("- family: toy\n", 1, "expected a mapping with `family`, `impl` and `matrix`, found a list", ""),
    "empty": ("", 1, "the spec is empty", ""),
    "unknown axis": (
        HEAD + "matrix:\n  arch: thor\n  widht: 2\n",
        5,
        "matrix.widht: unknown axis 'widht'",
        "did you mean 'width'?",
    ),
    "unknown axis of a default": (
        HEAD + "defaults: {widt: 2}\nmatrix: {arch: thor}\n",
        3,
        "defaults.widt: unknown axis",
        "'width'?",
    ),
    "list in defaults": (
        HEAD + "defaults:\n  width: [1, 2]\nmatrix: {arch: thor}\n",
        4,
        "expected one value of width",
        "go into `matrix`",
    ),
    "value out of range": (
        HEAD + "matrix:\n  - arch: thor\n    width:\n      - 1\n      - 3\n",
        7,
        "matrix[0].width[1]: 3 is not a value of width",
        "expected one of 1, 2, 4, 8",
    ),
    "nearest value": (
        HEAD + "matrix: {arch: thor, width: 1, dtype: bf61}\n",
        3,
        "'bf61' is not a value of dtype",
        "did you mean 'bf16'?",
    ),
    "text for a number": (
        HEAD + "matrix: {arch: thor, width: '2'}\n",
        3,
        "'2' is not a value of width",
        "expected one of 1, 2",
    ),
    "1 is not true": (
        HEAD + "matrix: {arch: thor, width: 2, masked: 1}\n",
        3,
        "1 is not a value of masked",
        "expected one of true, false",
    ),
    "true is not 1": (HEAD + "matrix: {arch: thor, width: true}\n", 3, "True is not a value of width", ""),
    "empty list": (
        HEAD + "matrix: {arch: thor, width: []}\n",
        3,
        "matrix.width: expected a list of values of width, found an empty list",
        "",
    ),
    "empty matrix": (HEAD + "matrix: {}\n", 3, "matrix: expected at least one axis, found an empty mapping", ""),
    "no blocks": (HEAD + "matrix: []\n", 3, "found an empty list", ""),
    "no value": (HEAD + "matrix: {arch: thor, width: }\n", 3, "found nothing", ""),
    "nested list": (
        HEAD + "matrix: {arch: thor, width: [[1]]}\n",
        3,
        "matrix.width[0]: expected one value of width, found a list",
        "",
    ),
    "value twice": (
        HEAD + "matrix: {arch: thor, width: [1, 2, 1]}\n",
        3,
        "matrix.width[2]: 1 is given twice for width",
        "",
    ),
    "arch twice by alias": (
        HEAD + "matrix: {arch: [sm_110a, thor], width: 1}\n",
        3,
        "'thor' is given twice for arch",
        "",
    ),
    "missing arch": (HEAD + "matrix:\n  - width: 1\n", 4, "no arch given", "sm_110a"),
    "missing arch of an include": (
        HEAD + "matrix: {arch: thor, width: 1}\ninclude: {width: 2}\n",
        4,
        "include: no arch given",
        "",
    ),
    "missing axis": (HEAD + "matrix: {arch: thor}\n", 3, "no value for width", "add it here or to `defaults`"),
    "unknown arch": (
        HEAD + "matrix: {arch: [thor, sm_120a], width: 1}\n",
        3,
        "matrix.arch[1]: unknown arch 'sm_120a'",
        "expected one of sm_90a",
    ),
    "arch is a number": (HEAD + "matrix: {arch: 110, width: 1}\n", 3, "unknown arch 110", ""),
    "duplicate key": (
        HEAD + "matrix:\n  arch: thor\n  width: 1\n  width: 2\n",
        6,
        "'width' is given twice: first on line 5",
        "",
    ),
    "duplicate entry": (HEAD + "impl: helper\n", 3, "'impl' is given twice: first on line 2", ""),
    "rule of the family": (
        HEAD + "matrix: {arch: thor, width: [4, 8], dtype: f16}\n",
        3,
        "dtype f16 takes width 4 at most",
        "arch: sm_110a, width: 8, dtype: f16",
    ),
    "rule of the arch": (
        HEAD + "matrix: {arch: [thor, h200], width: 8, dtype: bf16}\n",
        3,
        "needs tensor memory, which sm_90a lacks",
        "exclude it",
    ),
    "dead exclude": (
        HEAD + "matrix: {arch: thor, width: 1}\nexclude:\n  - {width: 1, dtype: f16}\n",
        5,
        "exclude[0]: excludes nothing",
        "",
    ),
    "all excluded": (
        HEAD + "matrix: {arch: thor, width: 1}\nexclude: {width: 1}\n",
        1,
        "`exclude` leaves no combination",
        "",
    ),
    "unknown gate": (
        HEAD + "matrix: {arch: thor, width: 1}\ngates: {max_regs: 3}\n",
        4,
        "gates.max_regs: unknown gate 'max_regs'",
        "did you mean 'max_registers'?",
    ),
    "gate out of range": (
        HEAD + "matrix: {arch: thor, width: 1}\ngates: {max_registers: 256}\n",
        4,
        "expected an integer from 1 to 255, found 256",
        "",
    ),
    "gate of a wrong type": (
        HEAD + "matrix: {arch: thor, width: 1}\ngates:\n  max_stack: none\n",
        5,
        "expected an integer from 0 to",
        "found 'none'",
    ),
    "gate is true": (
        HEAD + "matrix: {arch: thor, width: 1}\ngates: {min_ctas_per_sm: true}\n",
        4,
        "expected an integer from 1 to 32, found True",
        "",
    ),
    "unknown output": (
        HEAD + "matrix: {arch: thor, width: 1}\nemit: [ptx, objekt]\n",
        4,
        "emit[1]: unknown output 'objekt'",
        "did you mean 'object'?",
    ),
    "output twice": (
        HEAD + "matrix: {arch: thor, width: 1}\nemit: [ptx, ptx]\n",
        4,
        "emit[1]: 'ptx' is given twice",
        "",
    ),
    "domain is text": (
        HEAD + "matrix: {arch: thor, width: 1}\ndomain: all\n",
        4,
        "domain: expected a mapping or a list of mappings",
        "found 'all'",
    ),
    "domain holds a mapping": (
        HEAD + "matrix: {arch: thor, width: 1}\ndomain: {length: {from: 1}}\n",
        4,
        "domain.length: expected a list of values",
        "",
    ),
    "bad syntax": (HEAD + "matrix: {arch: [thor\n", 4, "not valid YAML", "expected ',' or ']'"),
    "unsafe tag": (HEAD + "matrix: !!python/object/apply:os.system ['true']\n", 3, "matrix: unknown tag", "os.system"),
    "unknown tag on a scalar": (HEAD + "matrix: {arch: !secret thor}\n", 3, "not valid YAML", "!secret"),
    "merge key": (
        HEAD + "defaults: &d {width: 1}\nmatrix: {<<: *d, arch: thor}\n",
        4,
        "merge keys (<<) are not supported",
        "",
    ),
    "name is a number": (HEAD + "matrix: {1: 2}\n", 3, "expected text as the name of an entry, found 1", ""),
    "undefined alias": (HEAD + "matrix: *none\n", 3, "not valid YAML", "undefined alias"),
    "too deep": (HEAD + "matrix: " + "[" * 40 + "]" * 40 + "\n", 3, "nested deeper than", ""),
}


@pytest.mark.parametrize(("text", "line", "message", "hint"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_with_its_place(text: str, line: int, message: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_specs(text, "specs/bad.yaml")
    said = str(caught.value)
    assert said.startswith(f"specs/bad.yaml:{line}: ")
    assert message in said
    assert hint in said
    assert "\n" not in said
    assert (caught.value.file, caught.value.line) == ("specs/bad.yaml", line)


def test_an_absurd_product_is_refused_before_it_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_COMBINATIONS >= 10_000
    monkeypatch.setattr("cubinery.aot.spec.MAX_COMBINATIONS", 5)
    with pytest.raises(SpecError, match=r"x\.yaml:3: matrix: 6 combinations: expected at most 5"):
        parse_specs(HEAD + "matrix: {arch: [thor, h200], width: [1, 2, 4]}\n", "x.yaml")


def test_files_that_cannot_be_read_are_spec_errors(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"none\.yaml: cannot read the spec: No such file"):
        load_specs([tmp_path / "none.yaml"])
    (tmp_path / "latin.yaml").write_bytes(b"family: caf\xe9\n")
    with pytest.raises(SpecError, match=r"latin\.yaml: expected UTF-8"):
        load_specs([tmp_path / "latin.yaml"])
    (tmp_path / "nul.yaml").write_bytes(b"family: a\x00b\n")
    with pytest.raises(SpecError, match=r"nul\.yaml.*not valid YAML"):
        load_specs([tmp_path / "nul.yaml"])


def test_specs_are_read_in_the_order_given(tmp_path: Path) -> None:
    for name, width in (("b.yaml", 2), ("a.yaml", 1)):
        (tmp_path / name).write_text(HEAD + f"matrix: {{arch: thor, width: {width}}}\n")
    specs = load_specs([tmp_path / "b.yaml", tmp_path / "a.yaml"])
    assert [spec.points[0].config.axes()["width"] for spec in specs] == [2, 1]
    assert specs[0].file == str(tmp_path / "b.yaml")
