"""The manifest: written and read back, and refused with file, place, value and expectation."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_driver import fake_manifest
from hypothesis import given
from hypothesis import strategies as st

from cubinery.aot.kernels.paged_decode.abi import declare
from cubinery.runtime.arch import resolve
from cubinery.runtime.errors import BundleError, ManifestVersionError
from cubinery.runtime.manifest import (
    Artifact,
    FileRecord,
    KernelRecord,
    Manifest,
    Resources,
    TensorMapSpec,
    pack_params,
)
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig

DIGEST = "ab" * 32


def decode_artifact(**axes: Any) -> Artifact:
    config = MmaConfig(**({"head_dim": 128, "page_size": 16, "kv_format": "fp8"} | axes))
    record = dataclasses.replace(declare(config, resolve("sm_90a")), resources=Resources(96, 0, 1024, 2))
    return Artifact(
        config.key("sm_90a"), "paged_decode", "mma", "sm_90a", config.axes(), "c" * 64,
        FileRecord(f"cubins/{DIGEST}.cubin", DIGEST, 1000), (record,), ("paged_decode-sm_90a-plan",),
        {"ptx": FileRecord("emitted/a.ptx", DIGEST, 7)},
    )  # fmt: skip


def plan_artifact() -> Artifact:
    config = PlanConfig()
    file = FileRecord("cubins/r.cubin", "0" * 64, 5)
    kernels = (dataclasses.replace(declare(config, resolve("sm_90a")), carveout=-1),)
    return Artifact(
        config.key("sm_90a"), "paged_decode", "plan", "sm_90a", config.axes(), "d" * 64, file, kernels
    )  # fmt: skip


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    tables = {"paged_decode": FileRecord("tables/a.json", DIGEST, 9)}
    return fake_manifest("sm_90a", [decode_artifact(), plan_artifact()], tables=tables)


@pytest.fixture
def document(manifest: Manifest) -> Any:
    return json.loads(manifest.dumps())


def load(document: Any) -> Manifest:
    return Manifest.loads(json.dumps(document), "some/manifest.json")


# -- writing and reading back ------------------------------------------------------------------


def test_what_is_written_reads_back_equal(tmp_path: Path, manifest: Manifest) -> None:
    file = manifest.write(tmp_path)
    assert file == tmp_path / "manifest.json"
    assert os.listdir(tmp_path) == ["manifest.json"], "no temporary file may stay behind"
    assert file.stat().st_mode & 0o777 == 0o644
    assert Manifest.read(tmp_path) == Manifest.read(file) == manifest


def test_equal_manifests_have_equal_bytes_whatever_the_order(manifest: Manifest) -> None:
    shuffled = dataclasses.replace(
        manifest, artifacts=manifest.artifacts[::-1], toolchain=dict(reversed(manifest.toolchain.items()))
    )
    assert shuffled.dumps() == manifest.dumps()


def test_members_with_a_default_may_be_left_out(document: Any, manifest: Manifest) -> None:
    kernel = document["artifacts"][1]["kernels"][0]
    for name in ("tensor_maps", "cluster", "carveout", "pdl", "tmem_columns", "resources", "min_ctas_per_sm"):
        del kernel[name]
    del document["artifacts"][1]["requires"], document["artifacts"][1]["emitted"]
    assert load(document) == manifest


def test_a_bundle_may_have_no_table(document: Any) -> None:
    del document["tables"]
    assert load(document).tables == {}


def test_a_writer_cannot_produce_what_no_reader_takes(tmp_path: Path, manifest: Manifest) -> None:
    bad = dataclasses.replace(manifest, artifacts=(manifest.artifacts[0],) * 2)
    with pytest.raises(BundleError, match="more than once"):
        bad.write(tmp_path)
    assert os.listdir(tmp_path) == []


names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
kinds = st.sampled_from(["pointer", "i32", "i64", "f32"])


@st.composite
def records(draw: st.DrawFn) -> KernelRecord:
    used = draw(st.lists(names, min_size=4, max_size=12, unique=True))
    grid, pointer, map_name, extent, *scalars = used[:4] + used[4:]
    rank = draw(st.integers(1, 5))
    tensor_map = TensorMapSpec(
        map_name,
        pointer,
        draw(st.sampled_from(["uint8", "bfloat16", "float32"])),
        tuple(draw(st.lists(st.integers(1, 8), min_size=rank, max_size=rank))),
        (1,) * rank,
        tuple(draw(st.lists(st.one_of(st.just(extent), st.integers(1, 2**32)), min_size=rank, max_size=rank))),
        tuple(draw(st.lists(st.integers(1, 2**40), min_size=rank - 1, max_size=rank - 1))),
        draw(st.sampled_from(["none", "32B", "64B", "128B"])),
        "none",
        draw(st.sampled_from(["none", "64B", "128B", "256B"])),
        draw(st.sampled_from(["zero", "nan"])),
    )
    params = [(name, draw(kinds)) for name in scalars]
    params.insert(draw(st.integers(0, len(params))), (map_name, "tensor_map"))
    return KernelRecord(
        "main", "kernel_0", (draw(st.integers(1, 32)), 1, 2), (grid, draw(st.integers(1, 9)), 1),
        pack_params(*params), (tensor_map,), (draw(st.integers(1, 4)), 2, 1), draw(st.integers(0, 232448)),
        draw(st.integers(-1, 100)), draw(st.integers(1, 4)), draw(st.booleans()), draw(st.sampled_from([0, 32, 512])),
    )  # fmt: skip


@given(record=records(), config=st.dictionaries(names, st.one_of(st.booleans(), st.integers(), names), max_size=4))
def test_round_trip_of_any_valid_record(record: KernelRecord, config: dict[str, Any]) -> None:
    file = FileRecord("cubins/x.cubin", DIGEST, 9)
    artifact = Artifact("toy-sm_100f-one-a1", "toy", "one", "sm_100f", config, "s", file, (record,))
    manifest = fake_manifest("sm_100f", [artifact])
    assert Manifest.loads(manifest.dumps()) == manifest


# -- refusals ----------------------------------------------------------------------------------


def test_truncation_at_any_length_is_a_bundle_error(manifest: Manifest) -> None:
    data = manifest.dumps().encode()
    for length in [*range(200), *range(200, len(data) - 1, 97), len(data) - 2]:
        with pytest.raises(BundleError, match=r"^x\.json: "):
            Manifest.loads(data[:length], "x.json")


@pytest.mark.parametrize("data", [b"", b"\xff\xfe\x00", b"[]", b"3", b'{"a": 1}', b"[" * 100_000, b'{"a": NaN}'])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError, match=r"^x\.json: "):
        Manifest.loads(data, "x.json")


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.0])
def test_unknown_schema_versions_are_named(document: Any, version: Any) -> None:
    document["schema_version"] = version
    with pytest.raises(ManifestVersionError, match=r"schema_version: .* is unknown: this cubinery reads version 1"):
        load(document)


def test_an_object_may_not_hold_a_name_twice(manifest: Manifest) -> None:
    text = manifest.dumps().replace('"arch": "sm_90a",', '"arch": "sm_90a", "arch": "sm_110a",', 1)
    with pytest.raises(BundleError, match="holds arch more than once"):
        Manifest.loads(text)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json: cannot read the manifest: No such file"):
        Manifest.read(tmp_path)


Change = Callable[[Any], Any]


def at(*path: Any) -> Callable[[Any], Change]:
    """A change that sets one place of the document."""

    def to(value: Any) -> Change:
        def change(document: Any) -> None:
            node = document
            for step in path[:-1]:
                node = node[step]
            node[path[-1]] = value(node[path[-1]]) if callable(value) else value

        return change

    return to


def artifact(*path: Any) -> Callable[[Any], Change]:
    return at("artifacts", 0, *path)


def kernel(*path: Any) -> Callable[[Any], Change]:
    return artifact("kernels", 0, *path)


REFUSALS: list[tuple[Change, str]] = [
    (at("arch")("hopper"), r"\$\.arch: 'hopper': expected an arch name"),
    (at("arch")("sm_110a"), r"\$\.artifacts\[0\]\.arch: 'sm_90a': expected 'sm_110a', the arch of this manifest"),
    (at("min_driver")("13000"), r"\$\.min_driver: '13000': expected an integer"),
    (at("min_driver")(True), r"\$\.min_driver: True: expected an integer"),
    (at("package_version")("new"), r"\$\.package_version: 'new': expected a version"),
    (at("toolchain")([]), r"\$\.toolchain: \[\]: expected an object"),
    (at("artifacts")({}), r"\$\.artifacts: \{\}: expected a list"),
    (at("future")(1), r"\$\.future: unknown member: expected one of arch, "),
    (at("artifacts", 1, "key")(lambda _: "paged_decode-sm_90a-mma-d128-p16-kvfp8"), r"impl: 'plan': expected 'mma'"),
    (artifact("key")("Nope"), r"\$\.artifacts\[0\]\.key: key 'Nope' is malformed"),
    (artifact("family")("mla"), r"\.family: 'mla': expected 'paged_decode', as the key"),
    (artifact("config", "head_dim")([128]), r"config\.head_dim: \[128\]: expected a string, a number or a boolean"),
    (artifact("kernels")([]), r"kernels: empty"),
    (artifact("kernels")(lambda k: k * 2), r"kernels: role 'decode' more than once"),
    (artifact("requires")(["a-b-c", "a-b-c"]), r"requires: key 'a-b-c' more than once"),
    (artifact("cubin", "path")("../x.cubin"), r"cubin\.path: '\.\./x\.cubin': expected a relative path inside"),
    (artifact("cubin", "path")("/etc/passwd"), r"cubin\.path: '/etc/passwd': expected a relative path"),
    (artifact("cubin", "path")("a/../../x"), r"cubin\.path: "),
    (artifact("cubin", "path")("a//b"), r"cubin\.path: "),
    (artifact("cubin", "path")("a\\b"), r"cubin\.path: "),
    (artifact("cubin", "path")("c:/b"), r"cubin\.path: "),
    (artifact("cubin", "path")("./b"), r"cubin\.path: "),
    (artifact("cubin", "path")("b\n"), r"cubin\.path: "),
    (artifact("emitted", "ptx", "path")("../../a.ptx"), r"emitted\.ptx\.path: "),
    (artifact("cubin", "sha256")("AB" * 32), r"cubin\.sha256: .*expected 64 lower-case"),
    (artifact("cubin", "size")(0), r"cubin\.size: 0: expected an integer of at least 1"),
    (artifact("emitted", "ptx")({"path": f"cubins/{DIGEST}.cubin", "sha256": DIGEST, "size": 1}), "two different"),
    (kernel("symbol")("a b"), r"kernels\[0\]\.symbol: 'a b': expected a symbol"),
    (kernel("block")([1024, 2, 1]), r"block: \[1024, 2, 1\]: expected a product of at most 1024"),
    (kernel("block")([0, 1, 1]), r"block\[0\]: 0: expected an integer of at least 1"),
    (kernel("block")([32, 1]), r"block: \[32, 1\]: expected a list of 3"),
    (kernel("cluster")([4, 4, 2]), r"cluster: .*at most 16"),
    (kernel("grid")(["num work", 1, 1]), r"grid\[0\]: 'num work': expected a name or an integer"),
    (kernel("grid")([0, 1, 1]), r"grid\[0\]: 0: expected an integer of at least 1"),
    (kernel("grid")(["q", 1, 1]), r"grid\[0\]: 'q' is of kind pointer: expected an integer"),
    (kernel("grid")(["k", 1, 1]), r"grid\[0\]: 'k' is of kind pointer: expected an integer"),
    (kernel("grid")(["scale_o", 1, 1]), r"grid\[0\]: 'scale_o' is of kind f32"),
    (kernel("tmem_columns")(96), r"tmem_columns: 96: expected one of 0, 32"),
    (kernel("tmem_columns")(True), r"tmem_columns: True: expected one of 0, 32"),
    (kernel("dynamic_smem")(-1), r"dynamic_smem: -1: expected an integer from 0"),
    (kernel("carveout")(101), r"carveout: 101: expected an integer from -1 to 100"),
    (kernel("pdl")(1), r"pdl: 1: expected true or false"),
    (kernel("resources", "stack")(-4), r"resources\.stack: -4"),
    (kernel("params", 2, "kind")("u8"), r"params\[2\]\.kind: 'u8': expected one of pointer, i32"),
    (kernel("params", 2, "size")(4), r"params\[2\]\.size: 4: expected 8, the size of pointer"),
    (kernel("params", 2, "align")(16), r"params\[2\]\.align: 16: expected 8"),
    (kernel("params", 2, "offset")(260), r"params\[2\]\.offset: 260: expected a multiple of 8 from 256"),
    (kernel("params", 2, "offset")(0), r"params\[2\]\.offset: 0: expected a multiple of 8 from 256"),
    (kernel("params", 2, "offset")(256.0), r"params\[2\]\.offset: 256\.0: expected"),
    (kernel("params", 2, "offset")(1 << 20), r"params\[2\]\.offset: 1048576"),
    (kernel("params", 3, "name")("q"), r"params: parameter 'q' more than once"),
    (kernel("params", 2)({"name": "q"}), r"params\[2\]: no align, kind"),
    (kernel("params", 0, "name")("x_map"), r"params\[0\]\.name: 'x_map': no tensor map has this name"),
    (kernel("tensor_maps", 0, "name")("x_map"), r"params\[0\]\.name: 'k_map': no tensor map"),
    (kernel("tensor_maps")(lambda m: [*m, m[0]]), r"tensor_maps: map 'k_map' more than once"),
    (kernel("tensor_maps")(lambda m: [*m, m[0] | {"name": "z"}]), r"tensor_maps\[2\]\.name: 'z': no parameter"),
    (kernel("tensor_maps", 0, "pointer")("n_q"), r"pointer: 'n_q' is a parameter of kind i32: expected a pointer"),
    (kernel("tensor_maps", 0, "box")([1] * 6), r"box: rank 6: expected 1 to 5"),
    (kernel("tensor_maps", 0, "box")([]), r"box: rank 0"),
    (kernel("tensor_maps", 0, "box", 0)(257), r"box\[0\]: 257: expected an integer from 1 to 256"),
    (kernel("tensor_maps", 0, "box", 0)(256), r"box\[0\]: 256 of uint8: expected at most 128 bytes, the swizzle's"),
    (kernel("tensor_maps", 0, "extents")([1, 2]), r"extents: \[1, 2\]: expected a list of 4"),
    (kernel("tensor_maps", 0, "strides")([1, 2]), r"strides: \[1, 2\]: expected a list of 3"),
    (kernel("tensor_maps", 0, "strides", 0)("q"), r"strides\[0\]: 'q' is of kind pointer"),
    (kernel("tensor_maps", 0, "element_strides")([1]), r"element_strides: \[1\]: expected a list of 4"),
    (kernel("tensor_maps", 0, "dtype")("fp8"), r"dtype: 'fp8': expected one of uint8"),
    (kernel("tensor_maps", 0, "swizzle")("256B"), r"swizzle: '256B': expected one of none, 32B"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), REFUSALS, ids=[m for _, m in REFUSALS])
def test_what_breaks_a_rule_is_refused_with_its_place(document: Any, change: Change, message: str) -> None:
    before = copy.deepcopy(document)
    change(document)
    assert json.dumps(document) != json.dumps(before)
    with pytest.raises(BundleError, match=r"^some/manifest\.json: .*" + message):
        load(document)


def test_a_list_that_was_seen_before_is_still_checked(document: Any) -> None:
    """Equal parameter lists are checked once; one that only compares equal (2 == 2.0) is not the same."""
    first = document["artifacts"][0]
    second = copy.deepcopy(first)
    second["key"] += "-q2"
    document["artifacts"].append(second)
    load(document)
    second["kernels"][0]["params"][2]["offset"] = 256.0
    with pytest.raises(BundleError, match=r"artifacts\[2\]\.kernels\[0\]\.params\[2\]\.offset"):
        load(document)


def test_a_manifest_of_a_hundred_keys_reads_quickly() -> None:
    axes = [(p, t, q, d) for p in (16, 32, 64, 128) for t in (16, 32) for q in range(1, 9) for d in (False, True)]
    artifacts = [decode_artifact(page_size=p, row_tile=t, q_len=q, pdl=d, ctas_per_sm=1) for p, t, q, d in axes[:100]]
    text = fake_manifest("sm_90a", artifacts).dumps()
    best = min(_seconds(lambda: Manifest.loads(text)) for _ in range(5))
    assert best < 0.1, f"{best * 1e3:.1f} ms"  # 10 to 25 ms where nothing else runs


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start
