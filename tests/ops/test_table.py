"""Selector tables: read and refused, what they choose, and the ones that ship."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import FakeDriver, write_bundle
from jsonschema import Draft202012Validator

from cubinery.runtime.arch import ARCHS, resolve
from cubinery.runtime.errors import BundleError, ConfigError, IntegrityError, ManifestVersionError
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import FileRecord
from cubinery.runtime.ops.paged_decode.config import CONFIGS, HEAD_DIMS, KV_BITS, DecodeConfig, MmaConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode
from cubinery.runtime.ops.paged_decode.rule_rows import rows_of_rules
from cubinery.runtime.ops.paged_decode.select import Problem, choose, outcomes, select
from cubinery.runtime.ops.paged_decode.table import Option, Row, SelectorTable, loads

H200 = resolve("sm_90a")
PLAIN = {"head_dim": 128, "page_size": 16, "kv_format": "fp8"}


def mma(row_tile: int = 16, ctas_per_sm: int = 2, **split: Any) -> Option:
    return Option("mma", {"row_tile": row_tile, "ctas_per_sm": ctas_per_sm}, **split)


def table(*rows: tuple[dict[str, Any], list[Option]]) -> SelectorTable:
    return SelectorTable("sm_90a", "a test", tuple(Row(when, tuple(options), "measured") for when, options in rows))


def problem(**changes: Any) -> Problem:
    return Problem(**(PLAIN | {"group_size": 4} | changes))


# -- choosing ------------------------------------------------------------------------------------------


def test_the_first_row_that_holds_decides() -> None:
    rows = table(
        ({"head_dim": (64,)}, [mma(64, 1)]),
        ({"kv_format": ("bf16", "fp8"), "n_q": (1, 4)}, [mma(32, 1, policy="thor", lone_tile_cost=40)]),
        ({"n_q": (1, None)}, [mma(128, 1)]),
    )
    found = choose(problem(), H200, table=rows)
    assert (found.config.row_tile, found.config.ctas_per_sm, found.row) == (32, 1, 1)
    assert (found.policy, found.lone_tile_cost) == ("thor", 40)
    found = choose(problem(group_size=5), H200, table=rows)
    assert (found.config.row_tile, found.row) == (128, 2)
    assert (found.policy, found.lone_tile_cost) == ("balanced", found.config.lone_tile_cost)


@pytest.mark.parametrize("n_q", [8, 9, 16, 17])
def test_both_ends_of_a_range_are_in_it(n_q: int) -> None:
    rows = table(({"n_q": (9, 16)}, [mma(64, 1)]))
    assert (choose(problem(group_size=n_q), H200, table=rows).row == 0) == (9 <= n_q <= 16)


def test_rows_speak_of_features_too() -> None:
    rows = table(({"window": (True,), "q_len": (2, 3)}, [mma(64, 1)]))
    assert select(problem(window=True, q_len=3), H200, table=rows).row_tile == 64
    assert select(problem(window=False, q_len=3), H200, table=rows).row_tile == 16
    assert select(problem(window=True, q_len=1), H200, table=rows).row_tile == 8


def test_an_option_that_cannot_serve_is_passed_over() -> None:
    """No tensor memory on Hopper, no room for two CTAs of wide tiles; then the rules have the word."""
    tcgen05 = Option("tcgen05", {"row_tile": 16, "ctas_per_sm": 1})
    rows = table(({}, [tcgen05, mma(128, 2), mma(64, 1)]), ({}, [tcgen05]))
    assert choose(problem(), H200, table=rows).config == MmaConfig(**PLAIN, row_tile=64, ctas_per_sm=1)
    none = table(({}, [tcgen05]))
    found = choose(problem(), H200, table=none)
    assert (found.config, found.row) == (select(problem(), H200), None)


def test_what_is_forced_outranks_the_table() -> None:
    rows = table(({}, [mma(32, 1), mma(16, 1)]))
    assert choose(problem(), H200, table=rows, row_tile=16).row == 0
    assert select(problem(), H200, table=rows, row_tile=16) == MmaConfig(**PLAIN, row_tile=16, ctas_per_sm=1)
    found = choose(problem(), H200, table=rows, ctas_per_sm=2, pdl=True)
    assert (found.config, found.row) == (select(problem(), H200, ctas_per_sm=2, pdl=True), None)
    assert select(problem(), H200, table=rows, pdl=True).pdl
    with pytest.raises(ConfigError, match="row_tile = 24"):
        select(problem(), H200, table=rows, row_tile=24)


def test_a_problem_that_nobody_serves_is_still_an_error() -> None:
    with pytest.raises(ConfigError, match="page_size = 48 is not supported"):
        select(problem(page_size=48), H200, table=table(({}, [mma()])))


def test_outcomes_are_those_of_the_table() -> None:
    domain = {name: [value] for name, value in PLAIN.items()} | {"group_size": [4, 20]}
    rows = table(({"n_q": (1, 8)}, [mma(64, 1)]))
    assert set(outcomes(domain, "sm_90a", rows)) == {
        MmaConfig(**PLAIN, row_tile=64, ctas_per_sm=1), *choose(problem(group_size=20), H200).kernels,
    }  # fmt: skip


# -- the public call -----------------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[..., Path]:
    """bundle(table, name="a") -> a folder that holds kernels and, where there is one, the table."""

    def make(rows: SelectorTable | None, name: str = "a") -> Path:
        folder = tmp_path / name / "sm_90a"
        configs = [MmaConfig(**PLAIN, row_tile=t, ctas_per_sm=c) for t, c in ((16, 2), (16, 1), (64, 1))]
        tables = {}
        if rows is not None:
            (folder / "tables").mkdir(parents=True)
            data = rows.dumps().encode()
            (folder / "tables/t.json").write_bytes(data)
            tables["paged_decode"] = FileRecord("tables/t.json", hashlib.sha256(data).hexdigest(), len(data))
        return write_bundle(tmp_path / name, "sm_90a", [*configs, *configs[0].requires()], tables=tables)

    return make


def decode(*folders: Path, **options: Any) -> PagedDecode:
    return PagedDecode(Library.open(list(folders), driver=FakeDriver(["sm_90a"])), **PLAIN, **options)


def test_a_decode_asks_the_bundles_table(bundle: Callable[..., Path]) -> None:
    folder = bundle(table(({"n_q": (1, 8)}, [mma(64, 1, policy="thor", lone_tile_cost=30)])))
    own = decode(folder)
    assert own.config(4) == MmaConfig(**PLAIN, row_tile=64, ctas_per_sm=1)
    assert own.config(16) == MmaConfig(**PLAIN, row_tile=16, ctas_per_sm=2)
    lengths = [128 * 100]
    assert own.plan(lengths, num_q_heads=4, num_kv_heads=1).splits.max_splits <= 16, "thor splits no further"
    assert own.plan(lengths, num_q_heads=4, num_kv_heads=1, policy="balanced").splits.max_splits > 16
    assert decode(folder, row_tile=16).config(4).row_tile == 16
    assert decode(folder, table=table()).config(4) == MmaConfig(**PLAIN, row_tile=8, ctas_per_sm=2)


def test_a_cost_reaches_the_planner(bundle: Callable[..., Path]) -> None:
    """The more a tile costs a lone CTA, the more merging is worth."""
    lengths, heads = [128 * 132], {"num_q_heads": 4, "num_kv_heads": 1}
    splits = [
        decode(bundle(table(({}, [mma(16, 2, lone_tile_cost=cost)])), str(cost))).plan(lengths, **heads).splits
        for cost in (4, 100)
    ]
    counts = [plan.max_splits for plan in splits]
    assert counts[0] < counts[1]


def test_without_a_table_the_rules_decide(bundle: Callable[..., Path]) -> None:
    own = decode(bundle(None))
    assert own.table is None
    assert own.selection(4) == choose(problem(), H200)


def test_the_first_bundle_that_has_a_table_gives_it(bundle: Callable[..., Path]) -> None:
    folders = [bundle(None, "a"), bundle(table(({}, [mma(64, 1)])), "b"), bundle(table(({}, [mma(16, 1)])), "c")]
    assert decode(*folders).config(4).row_tile == 64
    assert decode(*reversed(folders)).config(4).row_tile == 16


def test_a_table_that_was_changed_is_refused_when_the_bundle_is_opened(bundle: Callable[..., Path]) -> None:
    folder = bundle(table(({}, [mma(64, 1)])))
    file = folder / "tables/t.json"
    file.write_text(file.read_text().replace("64", "16"))
    with pytest.raises(IntegrityError, match=r"tables/t.json: sha256 .* corrupted, or from another build"):
        Library.open(folder)
    file.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        Library.open(folder)


def test_a_table_of_another_version_names_its_file(bundle: Callable[..., Path], monkeypatch: Any) -> None:
    from cubinery.runtime.ops.paged_decode import table as module

    folder = bundle(table(({}, [mma(64, 1)])))
    monkeypatch.setattr(module, "SCHEMA_VERSION", 2)
    with pytest.raises(ManifestVersionError, match=r"tables/t.json: \$.schema_version: 1 is unknown"):
        decode(folder)


# -- reading -------------------------------------------------------------------------------------------


def document(**changes: Any) -> dict[str, Any]:
    """A table as JSON values; changes replace members of its only row."""
    row = {
        "when": {"head_dim": [128], "n_q": [1, None]},
        "options": [{"impl": "mma", "row_tile": 16, "ctas_per_sm": 2, "policy": "balanced", "lone_tile_cost": 13}],
        "basis": "measured",
        "note": "32 x 4K: 76.9 us",
    }
    head = {"format": "cubinery.selector", "schema_version": 1, "family": "paged_decode", "arch": "sm_90a"}
    return head | {"source": "a test", "rows": [row | changes]}


@pytest.fixture(scope="module")
def schema(root: Path) -> Any:
    found = json.loads((root / "docs/selector.schema.json").read_text())
    Draft202012Validator.check_schema(found)
    return Draft202012Validator(found)


def test_a_table_survives_writing_and_reading(schema: Any) -> None:
    own = loads(json.dumps(document()), "x")
    assert own.rows[0].when == {"head_dim": (128,), "n_q": (1, None)}
    assert own.rows[0].options == (mma(16, 2, policy="balanced", lone_tile_cost=13),)
    text = own.dumps()
    assert loads(text, "x") == own
    assert loads(text, "x").dumps() == text
    schema.validate(json.loads(text))


OPTION = {"impl": "mma", "row_tile": 16, "ctas_per_sm": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"when": {"heads": [1]}}, "$.rows[0].when.heads: unknown condition: expected one of head_dim,"),
        ({"when": {"head_dim": []}}, "$.rows[0].when.head_dim: empty"),
        ({"when": {"head_dim": [96]}}, "$.rows[0].when.head_dim[0]: 96: expected one of 64, 128, 256, 512"),
        ({"when": {"window": [1]}}, "$.rows[0].when.window[0]: 1: expected one of True, False"),
        ({"when": {"n_q": [1]}}, "$.rows[0].when.n_q: [1]: expected a list of 2"),
        ({"when": {"n_q": [0, 1]}}, "$.rows[0].when.n_q[0]: 0: expected an integer of at least 1"),
        ({"when": {"n_q": [5, 4]}}, "$.rows[0].when.n_q[1]: 4: expected an integer of at least 5"),
        ({"options": []}, "$.rows[0].options: empty"),
        ({"options": [OPTION | {"impl": "append"}]}, "options[0].impl: 'append': expected one of mma"),
        ({"options": [{"impl": "mma", "row_tile": 16}]}, "options[0]: no ctas_per_sm"),
        ({"options": [OPTION | {"row_tile": 24}]}, "options[0].row_tile: 24: expected one of"),
        ({"options": [OPTION | {"ctas_per_sm": True}]}, "options[0].ctas_per_sm: True: expected one of 1, 2"),
        ({"options": [OPTION | {"max_kv_stages": 2}]}, "options[0].max_kv_stages: unknown member: expected one"),
        ({"options": [OPTION | {"head_dim": 64}]}, "options[0].head_dim: unknown member"),
        ({"options": [OPTION | {"policy": "fair"}]}, "options[0].policy: 'fair': expected one of thor, balanced"),
        ({"options": [OPTION | {"lone_tile_cost": 0}]}, "options[0].lone_tile_cost: 0: expected an integer from 1"),
        ({"options": [OPTION | {"policy": None}]}, "options[0].policy: None: expected one of thor, balanced"),
        ({"basis": "guess"}, "$.rows[0].basis: 'guess': expected one of measured, estimate"),
        ({"more": 1}, "$.rows[0].more: unknown member"),
    ],
)
def test_what_is_refused(schema: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError) as error:
        loads(json.dumps(document(**changes)), "x.json")
    assert str(error.value).startswith("x.json: $")
    assert message in str(error.value)
    # Rules that a schema cannot state: the axes of an implementation, and an order of two numbers.
    beyond = ("max_kv_stages", "head_dim: unknown", "expected an integer of at least 5")
    assert schema.is_valid(document(**changes)) == any(part in message for part in beyond)


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", BundleError, "not a selector table: malformed or truncated JSON"),
        ("[]", BundleError, "expected 'cubinery.selector': this is not a selector table"),
        (json.dumps(document() | {"schema_version": 2}), ManifestVersionError, "2 is unknown: this cubinery reads"),
        (json.dumps(document() | {"schema_version": True}), ManifestVersionError, "True is unknown"),
        (json.dumps(document() | {"family": "mla_decode"}), BundleError, "$.family: 'mla_decode': expected one of"),
        (json.dumps(document() | {"rows": {}}), BundleError, "$.rows: {}: expected a list"),
        (json.dumps(document() | {"rows": [1]}), BundleError, "$.rows[0]: 1: expected an object"),
        (json.dumps({n: v for n, v in document().items() if n != "source"}), BundleError, "$: no source"),
    ],
)
def test_what_is_no_table(text: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        loads(text, "x.json")
    assert str(caught.value).startswith("x.json: ")
    assert message in str(caught.value)


# -- the tables that ship ------------------------------------------------------------------------------


@pytest.fixture(params=list(ARCHS))
def shipped(root: Path, request: pytest.FixtureRequest) -> SelectorTable:
    arch: str = request.param
    file = root / f"kernel_specs/selectors/paged_decode.{arch}.json"
    assert file.is_file(), f"no table for {arch}: python -m benchmarks.tune --rules {arch} --out {file}"
    found = loads(file.read_bytes(), str(file))
    assert found.arch == arch
    assert found.dumps() == file.read_text()
    return found


def test_shipped_tables_are_valid_by_their_schema(shipped: SelectorTable, schema: Any) -> None:
    schema.validate(json.loads(shipped.dumps()))


def test_estimates_are_the_rules(shipped: SelectorTable) -> None:
    """A change of the rules writes the tables anew: `python -m benchmarks.tune --rules ARCH`."""
    estimates = tuple(row for row in shipped.rows if row.basis == "estimate")
    file = f"kernel_specs/selectors/paged_decode.{shipped.arch}.json"
    assert estimates == rows_of_rules(resolve(shipped.arch)), (
        f"the rules have changed: python -m benchmarks.tune --rules {shipped.arch} --out {file}"
    )
    assert shipped.rows[len(shipped.rows) - len(estimates) :] == estimates, "what was measured goes first"


def test_only_the_chip_that_was_measured_has_measured_rows(shipped: SelectorTable) -> None:
    measured = [row for row in shipped.rows if row.basis == "measured"]
    assert bool(measured) == (shipped.arch == "sm_90a")
    assert all(row.note for row in measured)


def test_what_a_tile_costs_in_measured_rows_is_still_true(shipped: SelectorTable) -> None:
    """These rows win over a configuration's own cost: a change of that must not pass them by."""
    for row in shipped.rows:
        if row.basis != "measured":
            continue
        for option, kv_format in itertools.product(row.options, row.when["kv_format"]):
            own = CONFIGS[option.impl].from_axes(
                {"head_dim": row.when["head_dim"][0], "page_size": 64, "kv_format": kv_format, **option.axes}
            )
            assert isinstance(own, DecodeConfig)
            assert option.lone_tile_cost is not None
            assert abs(option.lone_tile_cost - own.lone_tile_cost) <= 1, (row.when, option)


@pytest.mark.parametrize("arch", list(ARCHS))
def test_rules_as_rows_choose_what_the_rules_choose(arch: str) -> None:
    """Every kind of problem at both ends of every range of rows, with and without what not every kernel has."""
    own, target = SelectorTable(arch, "rules", rows_of_rules(resolve(arch))), resolve(arch)
    features = [{}, {"window": True}, {"q_len": 2, "sinks": True, "softcap": True}]
    seen = 0
    for head_dim, kv_format, q_dtype, group, page_size, feature in itertools.product(
        HEAD_DIMS, KV_BITS, ("bf16", "e4m3"), (1, 8, 9, 16, 17, 64, 65, 300), (16, 128), features
    ):
        given = problem(
            head_dim=head_dim, kv_format=kv_format, q_dtype=q_dtype, page_size=page_size, group_size=group, **feature
        )
        try:
            ruled = choose(given, target)
        except ConfigError:
            with pytest.raises(ConfigError):
                choose(given, target, table=own)
            continue
        found = choose(given, target, table=own)
        assert (found.config, found.policy, found.lone_tile_cost) == (ruled.config, ruled.policy, ruled.lone_tile_cost)
        assert found.row is not None, given
        seen += 1
    assert seen > 1000


def test_every_option_that_ships_is_a_kernel(shipped: SelectorTable) -> None:
    arch = resolve(shipped.arch)
    for row in shipped.rows:
        least = row.when["n_q"][0]
        dims = row.when.get("head_dim", HEAD_DIMS)
        formats = row.when.get("kv_format", tuple(KV_BITS))
        for option in row.options:
            only = SelectorTable(arch.name, "one", (Row({}, (option,), "estimate"),))
            found = [
                choose(
                    problem(head_dim=d, kv_format=f, group_size=least, page_size=page_size,
                            q_dtype=row.when.get("q_dtype", ("bf16",))[0]),
                    arch, table=only,
                )
                for d in dims for f in formats for page_size in (16, 128)
            ]  # fmt: skip
            assert any(choice.row == 0 for choice in found), option
            assert all(isinstance(choice.config, DecodeConfig) for choice in found)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("head_dim", "kv_format"), [(64, "bf16"), (128, "fp8"), (128, "bf16"), (256, "e2m1")])
def test_a_forced_row_tile_is_shared_out_as_the_rules_do(root: Path, arch: str, head_dim: int, kv_format: str) -> None:
    """Rows of wider problems name narrower tiles too: with as many CTAs an SM as suit the tile that is forced."""
    target = resolve(arch)
    table = loads((root / f"kernel_specs/selectors/paged_decode.{arch}.json").read_bytes(), arch)
    for group_size, tile in itertools.product((1, 9, 17, 33, 65), (8, 16, 32, 64)):
        asked = Problem(head_dim=head_dim, page_size=16, kv_format=kv_format, group_size=group_size)
        found = choose(asked, target, table=table, impl="mma", row_tile=tile).config
        assert found == choose(asked, target, impl="mma", row_tile=tile).config, (group_size, tile)


@pytest.mark.parametrize("bad", [[16], {16}, True, 16.0, "16"])
def test_a_forced_value_of_another_type_is_refused_with_a_table_too(root: Path, bad: Any) -> None:
    table = loads((root / "kernel_specs/selectors/paged_decode.sm_90a.json").read_bytes(), "sm_90a")
    asked = Problem(head_dim=128, page_size=16, kv_format="fp8", group_size=4)
    for given in (None, table):
        with pytest.raises(ConfigError, match="row_tile"):
            choose(asked, resolve("sm_90a"), table=given, row_tile=bad)
