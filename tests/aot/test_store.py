"""Writing: whole files or none, bundles that are valid at every moment, and a cache that never hurts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubinery.aot import store
from cubinery.aot.cache import Cache, Compiled, decode, default_folder, encode
from cubinery.aot.errors import StoreError
from cubinery.runtime.manifest import Artifact, KernelRecord, Manifest, ParamSpec

COMPILED = Compiled(b"\x7fELF cubin", ".version 9.4\n", {"object": b"o", "header": b"h"}, 1.25, 3 << 20)


def manifest(*cubins: bytes, emitted: bytes | None = None) -> tuple[Manifest, dict]:
    files, artifacts = {}, []
    kernel = KernelRecord("r", "s_0", (32, 1, 1), ("n", 1, 1), (ParamSpec("x", "pointer", 0, 8, 8),))
    for i, data in enumerate(cubins):
        record = store.cubin_record(data)
        files[record] = data
        extra = {}
        if emitted is not None:
            extra["ptx"] = store.emitted_record(f"toy-sm_110a-k{i}", ".ptx", emitted)
            files[extra["ptx"]] = emitted
        artifacts.append(
            Artifact(f"toy-sm_110a-k{i}", "toy", f"k{i}", "sm_110a", {"a": i}, "0" * 64, record, (kernel,), (), extra)
        )
    return Manifest("sm_110a", "0.1.0", {"nvidia-cutlass-dsl": "4.8.1"}, 13000, "9.4", tuple(artifacts)), files


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_write_replaces_a_file_whole_and_leaves_no_other(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file"
    store.atomic_write(target, b"one")
    store.atomic_write(target, b"two")
    assert tree(tmp_path) == {"deep/file": b"two"}
    assert target.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_old_file_and_nothing_half_written(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    store.atomic_write(target, b"old")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "write":
        real = os.fdopen

        def opened(*args: object, **options: object) -> object:
            stream = real(*args, **options)
            monkeypatch.setattr(stream.raw if hasattr(stream, "raw") else stream, "write", full, raising=False)
            return _Full(stream)

        monkeypatch.setattr(os, "fdopen", opened)
    else:
        monkeypatch.setattr(os, step, full)
    with pytest.raises(StoreError, match=r"file: cannot write: No space left on device: free some space"):
        store.atomic_write(target, b"new")
    monkeypatch.undo()
    assert tree(tmp_path) == {"file": b"old"}


class _Full:
    """A file on a disk without room."""

    def __init__(self, stream: object) -> None:
        self._stream = stream

    def __enter__(self) -> _Full:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def write(self, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_bundle_holds_its_files_and_drops_what_it_no_longer_names(tmp_path: Path) -> None:
    folder = tmp_path / "sm_110a"
    first, files = manifest(b"one", b"two", emitted=b"text")
    store.write_bundle(folder, first, files)
    assert Manifest.read(folder) == first
    assert all(store.holds(folder, record) for record in files)
    (folder / "cubins" / ".tmp-dead").write_bytes(b"half")
    (folder / ".tmp-dead").write_bytes(b"half")
    second, files = manifest(b"two")
    store.write_bundle(folder, second, files)
    assert set(tree(folder)) == {"manifest.json", store.cubin_record(b"two").path}


def test_writing_the_same_bundle_again_touches_nothing(tmp_path: Path) -> None:
    made, files = manifest(b"one", emitted=b"text")
    store.write_bundle(tmp_path / "b", made, files)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "b").rglob("*")}
    store.write_bundle(tmp_path / "b", made, files)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "b").rglob("*")} == before


def test_a_damaged_file_of_a_bundle_is_written_anew(tmp_path: Path) -> None:
    made, files = manifest(b"one")
    store.write_bundle(tmp_path / "b", made, files)
    (record,) = files
    (tmp_path / "b" / record.path).write_bytes(b"onf")
    store.write_bundle(tmp_path / "b", made, files)
    assert store.holds(tmp_path / "b", record)


def test_the_bundle_is_valid_after_every_single_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop before each rename and each removal in turn: the old or the new manifest, and all its files."""
    old, old_files = manifest(b"one", b"two", emitted=b"old")
    new, new_files = manifest(b"two", b"three", b"four", emitted=b"new")
    real = {"replace": os.replace, "unlink": os.unlink}
    seen = set()
    for stop in range(40):
        folder = tmp_path / str(stop) / "b"
        store.write_bundle(folder, old, old_files)
        steps = iter(range(1000))

        class Killed(BaseException):
            pass

        def stepping(name: str, steps=steps, stop=stop, killed=Killed):
            def call(*args, **options):
                if next(steps) == stop:
                    raise killed
                return real[name](*args, **options)

            return call

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stepping("replace"))
            patch.setattr(os, "unlink", stepping("unlink"))
            try:
                store.write_bundle(folder, new, new_files)
            except Killed:
                finished = False
            else:
                finished = True
        found = store.existing_artifacts(folder)
        assert found in (old, new)
        seen.add(found == new)
        if finished:
            assert found == new
            break
    else:
        pytest.fail("never finished")
    assert seen == {False, True}
    assert stop > 8


def test_existing_artifacts_names_what_is_missing(tmp_path: Path) -> None:
    from cubinery.runtime.errors import BundleError

    assert store.existing_artifacts(tmp_path / "none") is None
    made, files = manifest(b"one")
    store.write_bundle(tmp_path / "b", made, files)
    (record,) = files
    (tmp_path / "b" / record.path).unlink()
    with pytest.raises(BundleError, match=r"\.cubin of toy-sm_110a-k0 is missing or damaged"):
        store.existing_artifacts(tmp_path / "b")


def test_the_lock_waits_for_its_turn_and_goes_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cubinery.aot import store\n"
        "with store.lock(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(tmp_path / "sm_110a")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout.readline() == b"held\n"
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as waiter:
            waiter.stdin.close()
            with pytest.raises(subprocess.TimeoutExpired):
                waiter.wait(0.4)
            holder.kill()  # no clean-up runs: the kernel lets go of the lock
            assert waiter.stdout.readline() == b"held\n"
            assert waiter.wait(5) == 0
    assert list(tmp_path.iterdir()) == [tmp_path / ".sm_110a.lock"]


# -- cache ---------------------------------------------------------------------------------------


def test_the_cache_gives_back_what_it_was_given(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.get("ab" * 32) is None
    cache.put("ab" * 32, COMPILED)
    assert cache.get("ab" * 32) == COMPILED
    assert cache.get("cd" * 32) is None
    assert cache.warnings == []


entry = encode(COMPILED)


@given(st.integers(0, len(entry) - 1), st.integers(1, 255))
def test_any_flipped_byte_of_an_entry_is_noticed(at: int, change: int) -> None:
    damaged = bytearray(entry)
    damaged[at] ^= change
    with pytest.raises(ValueError):
        decode(bytes(damaged))


@pytest.mark.parametrize("length", [0, 5, 80, 100, len(entry) - 1])
def test_a_damaged_entry_is_discarded_with_a_warning(length: int, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("ab" * 32, COMPILED)
    cache.path("ab" * 32).write_bytes(entry[:length])
    assert cache.get("ab" * 32) is None
    assert len(cache.warnings) == 1
    assert "is damaged" in cache.warnings[0]
    assert not cache.path("ab" * 32).exists()
    cache.put("ab" * 32, COMPILED)
    assert cache.get("ab" * 32) == COMPILED


def test_a_cache_that_cannot_be_written_warns_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    cache = Cache(tmp_path / "file" / "cache")
    for digest in ("ab" * 32, "cd" * 32):
        cache.put(digest, COMPILED)
    assert cache.get("ab" * 32) is None
    assert [w for w in cache.warnings if w.startswith("cache not written")] == cache.warnings[:1]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBINERY_CACHE", "/a/b")
    assert default_folder() == Path("/a/b")
    monkeypatch.delenv("CUBINERY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert default_folder() == Path("/c/cubinery")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_folder() == Path("/home/x/.cache/cubinery")
