"""docs/manifest.schema.json says what the reader does: kept in step with the records and tried against both."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import pytest
from fake_driver import write_bundle
from jsonschema import Draft202012Validator

from cubinery.runtime import manifest as m
from cubinery.runtime.errors import BundleError
from cubinery.runtime.manifest import Manifest
from cubinery.runtime.manifest_kernel import TENSOR_MAP_BITS
from cubinery.runtime.ops.paged_decode.config import MmaConfig

RECORDS = {
    "artifact": m.Artifact,
    "file": m.FileRecord,
    "kernel": m.KernelRecord,
    "param": m.ParamSpec,
    "tensor_map": m.TensorMapSpec,
    "resources": m.Resources,
}


@pytest.fixture(scope="module")
def schema(root: Path) -> Any:
    found = json.loads((root / "docs/manifest.schema.json").read_text())
    Draft202012Validator.check_schema(found)
    return found


@pytest.fixture
def document(tmp_path: Path) -> Any:
    config = MmaConfig(head_dim=128, page_size=16, kv_format="fp8")
    return json.loads((write_bundle(tmp_path, "sm_90a", [config, *config.requires()]) / m.MANIFEST_NAME).read_text())


@pytest.mark.parametrize("name", RECORDS)
def test_members_are_those_of_the_record(schema: Any, name: str) -> None:
    fields = dataclasses.fields(RECORDS[name])
    required = {f.name for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING}
    definition = schema["$defs"][name]
    assert list(definition["properties"]) == [f.name for f in fields]
    assert set(definition["required"]) == required
    assert definition["additionalProperties"] is False


def test_top_level_members_are_those_of_the_manifest(schema: Any) -> None:
    expected = ["format", "schema_version", *(f.name for f in dataclasses.fields(Manifest))]
    assert list(schema["properties"]) == expected == [*schema["required"], "tables"]
    assert schema["properties"]["format"]["const"] == m.FORMAT
    assert schema["properties"]["schema_version"]["const"] == m.SCHEMA_VERSION


def test_enumerations_are_those_of_the_records(schema: Any) -> None:
    maps = schema["$defs"]["tensor_map"]["properties"]
    assert maps["swizzle"]["enum"] == list(get_args(m.Swizzle))
    assert maps["interleave"]["enum"] == list(get_args(m.Interleave))
    assert maps["l2_promotion"]["enum"] == list(get_args(m.L2Promotion))
    assert maps["oob_fill"]["enum"] == list(get_args(m.OobFill))
    assert maps["dtype"]["enum"] == list(TENSOR_MAP_BITS)
    kinds = schema["$defs"]["param"]
    assert kinds["properties"]["kind"]["enum"] == list(get_args(m.ParamKind))
    rules = {r["properties"]["kind"]["const"]: r["properties"] for r in kinds["oneOf"]}
    assert {k: r["size"]["const"] for k, r in rules.items()} == m.PARAM_SIZE
    assert {k: r["align"]["const"] for k, r in rules.items()} == m.PARAM_ALIGN


def test_written_manifests_are_valid(schema: Any, document: Any) -> None:
    Draft202012Validator(schema).validate(document)


def _places(node: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for step, child in items:
        yield from _places(child, (*path, step))


# The rules that a schema cannot state are tried in test_manifest.py; these values no place takes.
@pytest.mark.parametrize("junk", [None, -7, [], {"x": [1]}, ""], ids=repr)
def test_reader_and_schema_agree_about_junk_at_every_place(schema: Any, document: Any, junk: Any) -> None:
    del document["artifacts"][1:]
    record = document["artifacts"][0]["kernels"][0]
    # A parameter of each kind is enough, and one tensor map: the others follow the same rules.
    record["params"] = [p for p in record["params"] if p["name"] in ("k_map", "q", "n_q", "scale_o")]
    del record["tensor_maps"][1:]
    Manifest.loads(json.dumps(document))
    validator = Draft202012Validator(schema)
    disagreements = []
    for path in list(_places(document))[1:]:
        parent = document
        for step in path[:-1]:
            parent = parent[step]
        old, parent[path[-1]] = parent[path[-1]], junk
        valid = validator.is_valid(document)
        try:
            Manifest.loads(json.dumps(document))
        except BundleError:
            read = False
        else:
            read = True
        if valid and not read and not _beyond_schema(path):
            disagreements.append((path, "the schema takes it"))
        if read and not valid:
            disagreements.append((path, "the reader takes it"))
        parent[path[-1]] = old
    assert disagreements == []


def _beyond_schema(path: tuple[Any, ...]) -> bool:
    """Places where the reader compares with another place, as the schema's description says."""
    return path[-1] in ("params", "tensor_maps") or path[-1] in ("family", "impl")
