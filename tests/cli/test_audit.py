"""Verification finds each kind of lie that a bundle can tell, and comparison each kind of difference."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_bundle import REGISTERS, artifact_of, configs, cubin, make_bundle, write_manifest

from cubinery.aot.audit import diff_bundles, verify
from cubinery.runtime.bundle import open_all
from cubinery.runtime.manifest import Artifact, FileRecord, KernelRecord, Manifest, Resources


def _decode(manifest: Manifest) -> Artifact:
    return next(artifact for artifact in manifest.artifacts if artifact.requires)


def _change(folder: Path, change: Callable[[Artifact], Artifact]) -> str:
    """Rewrite the decode artifact's entry; returns its key."""
    manifest = Manifest.read(folder)
    target = _decode(manifest)
    write_manifest(folder, manifest.arch, [change(a) if a is target else a for a in manifest.artifacts])
    return target.key


def _replace_cubin(folder: Path, data: bytes) -> Callable[[Artifact], Artifact]:
    import hashlib

    digest = hashlib.sha256(data).hexdigest()
    (folder / f"cubins/{digest}.cubin").write_bytes(data)
    record = FileRecord(f"cubins/{digest}.cubin", digest, len(data))
    return lambda artifact: dataclasses.replace(artifact, cubin=record)


def _with_record(**changes: object) -> Callable[[Artifact], Artifact]:
    def change(artifact: Artifact) -> Artifact:
        return dataclasses.replace(artifact, kernels=(dataclasses.replace(artifact.kernels[0], **changes),))

    return change


def _with_resources(**changes: int) -> Callable[[Artifact], Artifact]:
    def change(artifact: Artifact) -> Artifact:
        resources = artifact.kernels[0].resources
        assert resources is not None
        return _with_record(resources=dataclasses.replace(resources, **changes))(artifact)

    return change


def _checks(folder: Path) -> list[tuple[str, str]]:
    return [(finding.check, finding.message) for finding in verify(open_all(folder)[0]).findings]


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a", "sm_110a"])
def test_a_good_bundle_has_no_findings(tmp_path: Path, arch: str) -> None:
    audit = verify(open_all(make_bundle(tmp_path, arch, ptx=True))[0])
    assert audit.ok
    assert (audit.artifacts, audit.strays) == (2, ())
    assert audit.bytes_hashed > 0


@given(data=st.data())
def test_any_flipped_byte_of_any_file_is_found(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = make_bundle(tmp_path_factory.mktemp("flip"), ptx=True)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    path = data.draw(st.sampled_from(files))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert [check for check, _ in _checks(folder)] == ["emitted" if path.suffix == ".ptx" else "sha256"]


def test_report_11_a_missing_and_a_shortened_file_are_found(tmp_path: Path) -> None:
    """A download skipped files and said nothing."""
    folder = make_bundle(tmp_path)
    first, second = sorted((folder / "cubins").iterdir())
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    messages = [message for _, message in _checks(folder)]
    assert any("No such file" in message for message in messages)
    assert any("bytes, expected" in message for message in messages)


def test_swapped_cubins_are_found_although_each_hash_is_right(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    manifest = Manifest.read(folder)
    one, two = manifest.artifacts
    swapped = [dataclasses.replace(one, cubin=two.cubin), dataclasses.replace(two, cubin=one.cubin)]
    write_manifest(folder, manifest.arch, swapped)
    assert [check for check, _ in _checks(folder)] == ["symbol", "symbol"]


def test_code_for_another_chip_is_found(tmp_path: Path) -> None:
    """What the compiler makes of sm_110a when its CUDA 13 half is missing."""
    folder = make_bundle(tmp_path, "sm_110a")
    record = _decode(Manifest.read(folder)).kernels[0]
    _change(folder, _replace_cubin(folder, cubin(record, 101)))
    assert _checks(folder) == [("arch", "the cubin is for SM 101, expected 110 (sm_110a)")]


def test_bytes_that_are_no_cubin_are_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    _change(folder, _replace_cubin(folder, b"not an ELF file"))
    ((check, message),) = _checks(folder)
    assert check == "arch"
    assert "not a cubin" in message


def test_parameters_that_moved_are_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    record = _decode(Manifest.read(folder)).kernels[0]
    layout = [(p.offset, p.size) for p in record.params]
    layout[3] = (layout[3][0] + 4, layout[3][1])
    _change(folder, _replace_cubin(folder, cubin(record, 110, params=layout)))
    ((check, message),) = _checks(folder)
    assert check == "abi"
    assert "parameter 3 is at" in message


def test_a_missing_parameter_is_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    record = _decode(Manifest.read(folder)).kernels[0]
    layout = [(p.offset, p.size) for p in record.params][:-1]
    _change(folder, _replace_cubin(folder, cubin(record, 110, params=layout)))
    ((check, message),) = _checks(folder)
    assert check == "abi"
    assert f"takes {len(layout)} parameters, the manifest lists {len(layout) + 1}" in message


def test_spills_that_the_manifest_hides_are_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    record = _decode(Manifest.read(folder)).kernels[0]
    _change(folder, _replace_cubin(folder, cubin(record, 110, stack=64)))
    assert _checks(folder) == [("resources", f"{record.symbol}: stack is 64 in the cubin, 0 in the manifest")]


def test_understated_registers_are_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    _change(folder, _with_resources(registers=REGISTERS - 8))
    ((check, message),) = _checks(folder)
    assert check == "resources"
    assert f"registers is {REGISTERS} in the cubin, {REGISTERS - 8} in the manifest" in message


def test_an_occupancy_that_cannot_be_is_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    _change(folder, _with_record(min_ctas_per_sm=9))
    ((check, message),) = _checks(folder)
    assert check == "occupancy"
    assert "expected 9" in message


def test_missing_resources_are_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    _change(folder, _with_record(resources=None))
    assert [check for check, _ in _checks(folder)] == ["resources"]


def test_a_required_artifact_that_is_not_there_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "sm_90a"
    folder.mkdir()
    decode = configs()[0]
    write_manifest(folder, "sm_90a", [artifact_of(decode, "sm_90a", folder)])
    assert [check for check, _ in _checks(folder)] == ["requires"]


def test_a_configuration_that_the_key_does_not_spell_is_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    _change(folder, lambda artifact: dataclasses.replace(artifact, config=artifact.config | {"page_size": 32}))
    assert "key" in [check for check, _ in _checks(folder)]


def test_ptx_of_another_kernel_is_found(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path, ptx=True)
    other = next(a for a in Manifest.read(folder).artifacts if not a.requires).emitted["ptx"]
    _change(folder, lambda artifact: dataclasses.replace(artifact, emitted={"ptx": other}))
    assert [check for check, _ in _checks(folder)] == ["abi"]


def test_strays_are_reported_but_are_no_finding(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path)
    (folder / "cubins/old.cubin").write_bytes(b"x")
    (folder / "report.json").write_text("{}")
    audit = verify(open_all(folder)[0])
    assert audit.ok
    assert audit.strays == ("cubins/old.cubin",)


# -- diff --------------------------------------------------------------------------------------------


def test_equal_bundles_do_not_differ(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a", ptx=True)
    make_bundle(tmp_path / "b", ptx=True)
    result = diff_bundles(open_all(tmp_path / "a"), open_all(tmp_path / "b"))
    assert result.same
    assert result.unchanged == 2


def test_added_removed_changed_and_toolchain(tmp_path: Path) -> None:
    make_bundle(tmp_path / "a", "sm_110a", page_size=16)
    other = make_bundle(tmp_path / "b", "sm_110a", page_size=32)
    manifest = Manifest.read(other)
    plan = next(a for a in manifest.artifacts if not a.requires)
    resources = plan.kernels[0].resources
    assert isinstance(resources, Resources)
    slower: KernelRecord = dataclasses.replace(
        plan.kernels[0], pdl=not plan.kernels[0].pdl, resources=dataclasses.replace(resources, registers=128)
    )
    changed = dataclasses.replace(plan, kernels=(slower,))
    new = dataclasses.replace(
        manifest,
        toolchain=manifest.toolchain | {"nvidia-cutlass-dsl": "4.9.0"},
        artifacts=tuple(changed if a is plan else a for a in manifest.artifacts),
    )
    new.write(other)
    result = diff_bundles(open_all(tmp_path / "a"), open_all(tmp_path / "b"))
    assert not result.same
    assert ["-p32-" in key + "-" for key in result.added] == [True]
    assert ["-p16-" in key + "-" for key in result.removed] == [True]
    assert set(result.changed) == {plan.key}
    assert result.changed[plan.key]["plan registers"] == (str(REGISTERS), "128")
    assert set(result.changed[plan.key]) == {"plan registers", "plan pdl"}
    assert result.bundle == {"sm_110a nvidia-cutlass-dsl": ("4.8.1", "4.9.0")}
