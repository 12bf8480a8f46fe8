"""Selector tables on their way into a bundle: chosen, refused, proved by, written, merged, replaced."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toy_builds import toy_items

from cubinery.aot import tables
from cubinery.aot.audit import diff_bundles, verify
from cubinery.aot.errors import ClosureError, SpecError
from cubinery.aot.spec import load_specs, parse_specs
from cubinery.aot.tables import Table
from cubinery.aot.variants import check_closure, expand
from cubinery.runtime.bundle import Bundle, open_all
from cubinery.runtime.errors import BundleError, IntegrityError
from cubinery.runtime.manifest import Manifest
from cubinery.runtime.ops.paged_decode.config import HEAD_DIMS, KV_BITS, MmaConfig
from cubinery.runtime.ops.paged_decode.table import SelectorTable

DECODE = ("paged_decode", "sm_90a")
ITEMS = "{arch: sm_110a, width: [1, 2]}"


def document(arch: str = "sm_90a", row_tile: int = 64) -> dict[str, Any]:
    """A table by which every problem takes one row tile."""
    option = {"impl": "mma", "row_tile": row_tile, "ctas_per_sm": 1}
    return {
        "format": "cubinery.selector", "schema_version": 1, "family": "paged_decode", "arch": arch, "source": "a test",
        "rows": [{"when": {}, "options": [option], "basis": "estimate"}],
    }  # fmt: skip


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def toy_table(text: bytes) -> dict[tuple[str, str], Table]:
    return {("toy", "sm_110a"): Table(text, None, "a test"), ("toy", "sm_90a"): Table(b"other", None, "a test")}


# -- which table ---------------------------------------------------------------------------------------


def test_the_tables_that_ship_are_the_default(root: Path) -> None:
    found = tables.load([DECODE, ("toy", "sm_90a")])
    assert list(found) == [DECODE]
    assert found[DECODE].data == (root / "kernel_specs/selectors/paged_decode.sm_90a.json").read_bytes()
    assert tables.rows(found, *DECODE).arch == "sm_90a"
    assert tables.rows(found, "toy", "sm_90a") is None


def test_a_given_table_takes_the_place_of_the_one_that_ships(tmp_path: Path) -> None:
    file = write(tmp_path / "own.json", document())
    found = tables.load([DECODE, ("paged_decode", "sm_110a")], [file])
    assert found[DECODE].data == file.read_bytes()
    assert "selectors" in found["paged_decode", "sm_110a"].origin


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("[]", SpecError, "not a selector table: expected JSON with `family` and `arch`"),
        ("{", SpecError, "not a selector table"),
        (json.dumps(document("sm_110a")), SpecError, "a table for paged_decode on sm_110a, and this build is"),
        (json.dumps(document(row_tile=3)), BundleError, "options[0].row_tile: 3: expected one of"),
        (json.dumps(document() | {"family": "toy"}), SpecError, "toy has no selector that takes a table"),
    ],
)
def test_what_is_refused(tmp_path: Path, content: str, error: type[Exception], message: str) -> None:
    file = tmp_path / "own.json"
    file.write_text(content)
    with pytest.raises(error) as caught:
        tables.load([DECODE, ("toy", "sm_90a")], [file])
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_two_tables_for_one_arch_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / name, document()) for name in ("a.json", "b.json")]
    with pytest.raises(SpecError, match=r"b.json: a second table for paged_decode on sm_90a, beside .*a.json"):
        tables.load([DECODE], files)
    with pytest.raises(SpecError, match=r"none.json: cannot read the selector table: No such file"):
        tables.load([DECODE], [tmp_path / "none.json"])


# -- the proof -----------------------------------------------------------------------------------------


def spec(row_tiles: str) -> str:
    return (
        f"family: paged_decode\nimpl: mma\nmatrix: {{arch: sm_90a, head_dim: 128, page_size: 16, kv_format: fp8, "
        f"row_tile: {row_tiles}, ctas_per_sm: 1}}\n"
        "domain: {head_dim: [128], page_size: [16], kv_format: [fp8], group_size: [4]}\n"
    )


def test_closure_is_proved_by_the_table_that_ships_with_the_bundle(tmp_path: Path) -> None:
    own = tables.load([DECODE], [write(tmp_path / "own.json", document())])
    wide = parse_specs(spec("64"), "wide.yaml")
    check_closure(wide, expand(wide), own)
    with pytest.raises(ClosureError, match="mma-d128-p16-kvfp8-t8 "):
        check_closure(wide, expand(wide))
    narrow = parse_specs(spec("16"), "narrow.yaml")
    with pytest.raises(ClosureError, match="mma-d128-p16-kvfp8-t64-cps1 "):
        check_closure(narrow, expand(narrow), own)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_110a"])
def test_the_default_spec_is_closed_under_the_tables_that_ship(root: Path, arch: str) -> None:
    specs = load_specs([root / "kernel_specs/paged_decode.yaml"])
    items = expand(specs, [arch])
    check_closure(specs, items, tables.load({(item.config.family, arch) for item in items}))


# -- the bundle ----------------------------------------------------------------------------------------


def test_a_bundle_holds_the_table_of_its_arch(run_build: Callable[..., Any], tmp_path: Path) -> None:
    assert run_build(toy_items(ITEMS), tables=toy_table(b"rows")).ok
    folder = tmp_path / "out/sm_110a"
    own = Bundle.open(folder)
    assert own.tables == {"toy": b"rows"}
    (file,) = (folder / "tables").iterdir()
    assert own.manifest.tables["toy"].path == f"tables/{file.name}"
    assert file.name.startswith("toy.")
    audit = verify(own)
    assert (audit.strays, audit.findings) == ((), ())


def test_the_next_build_replaces_or_removes_it(run_build: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "out/sm_110a"
    run_build(toy_items(ITEMS), tables=toy_table(b"first"))
    before = open_all(folder)
    run_build(toy_items(ITEMS), tables=toy_table(b"second"))
    after = open_all(folder)
    assert after[0].tables == {"toy": b"second"}
    assert len(list((folder / "tables").iterdir())) == 1
    found = diff_bundles(before, after)
    assert list(found.bundle) == ["sm_110a selector table of toy"]
    assert not found.same
    run_build(toy_items(ITEMS))
    assert Manifest.read(folder).tables == {}
    assert not (folder / "tables").exists()


def test_merging_keeps_a_table_that_the_new_build_has_not(run_build: Callable[..., Any], tmp_path: Path) -> None:
    run_build(toy_items(ITEMS), tables=toy_table(b"first"))
    run_build(toy_items("{arch: sm_110a, width: 4}"), merge=True)
    own = Bundle.open(tmp_path / "out/sm_110a")
    assert own.tables == {"toy": b"first"}
    assert len(own.manifest.artifacts) == 3
    run_build(toy_items("{arch: sm_110a, width: 8}"), merge=True, tables=toy_table(b"second"))
    assert Bundle.open(tmp_path / "out/sm_110a").tables == {"toy": b"second"}


def test_adding_to_a_bundle_with_a_damaged_table_is_refused(run_build: Callable[..., Any], tmp_path: Path) -> None:
    run_build(toy_items(ITEMS), tables=toy_table(b"first"))
    (file,) = (tmp_path / "out/sm_110a/tables").iterdir()
    file.write_bytes(b"other")
    with pytest.raises(BundleError, match=r"tables/toy.* of toy's selector is missing or damaged"):
        run_build(toy_items("{arch: sm_110a, width: 4}"), merge=True)
    with pytest.raises(IntegrityError, match="tables/toy"):
        Bundle.open(tmp_path / "out/sm_110a")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_110a"])
def test_what_is_tuned_are_the_options_that_ship(root: Path, arch: str) -> None:
    """Every configuration of `mma` that a row names, at one page size, and nothing that no row names."""
    found = {item.key for item in expand(load_specs([root / "kernel_specs/tune/paged_decode.yaml"]), [arch])}
    table: SelectorTable = tables.rows(tables.load([("paged_decode", arch)]), "paged_decode", arch)
    named = set()
    for row in table.rows:
        for d, kv_format, option in itertools.product(
            row.when.get("head_dim", HEAD_DIMS), row.when.get("kv_format", tuple(KV_BITS)), row.options
        ):
            if option.impl == "mma":
                config = MmaConfig(head_dim=d, page_size=64, kv_format=kv_format, **option.axes)
                named |= {config.key(arch), *(other.key(arch) for other in config.requires())}
    assert found == named
