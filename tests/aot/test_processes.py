"""Builders as processes: killed in the middle, racing each other, without the right to write."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cubinery.aot import store

CODE = """\
import sys
from pathlib import Path
from toy_builds import FAKE, toy_items
from cubinery.aot.builder import BuildOptions, build
root, matrix, merge = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "merge"
options = BuildOptions(out=root / "out", cache_dir=Path(sys.argv[4]), compile_entry=FAKE, jobs=2, merge=merge)
report = build(toy_items(matrix, emit="[ptx]"), options)
for row in report.rows:
    print(row.status, row.key, row.error or "")
for warning in report.warnings:
    print("warning", warning)
"""


def start(
    root: Path, matrix: str, *, merge: bool = False, cache: Path | None = None, **options: object
) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **options.pop("env", {})}
    arguments = [str(root), matrix, "merge" if merge else "replace", str(cache or root / "cache")]
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, **options,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> str:
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def widths(root: Path) -> list[int]:
    found = store.existing_artifacts(root / "out/sm_110a")  # raises where any file is wrong
    assert found is not None
    return [artifact.config["width"] for artifact in found.artifacts]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("delay", [0.05, 0.25, 0.45])
def test_kill_9_leaves_a_valid_bundle_no_worker_and_a_build_that_goes_on(delay: float, tmp_path: Path) -> None:
    finish(start(tmp_path, "{arch: sm_110a, width: 1}"))
    log = tmp_path / "log"
    slow = "{arch: sm_110a, width: [1, 2, 4], mode: slow}"
    victim = start(tmp_path, slow, env={"TOY_LOG": str(log), "TOY_SLOW": "0.25"})
    until = time.monotonic() + 30
    while not log.exists() and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(delay)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert widths(tmp_path) in ([1], [1, 2, 4])
    workers = {int(line.split()[1]) for line in log.read_text().splitlines()}
    assert workers
    until = time.monotonic() + 5
    while any(alive(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)
    finish(start(tmp_path, slow, env={"TOY_SLOW": "0"}))
    assert widths(tmp_path) == [1, 2, 4]
    names = {p.name for p in (tmp_path / "out/sm_110a").rglob("*")}
    assert not [name for name in names if name.startswith(".tmp-")]


def test_concurrent_builds_of_the_same_thing_agree(tmp_path: Path) -> None:
    builders = [start(tmp_path, "{arch: sm_110a, width: [1, 2, 4]}") for _ in range(4)]
    for builder in builders:
        output = finish(builder)
        assert "failed" not in output
        assert "warning" not in output
    assert widths(tmp_path) == [1, 2, 4]


def test_concurrent_builds_of_different_things_take_turns_or_merge(tmp_path: Path) -> None:
    builders = [start(tmp_path, f"{{arch: sm_110a, width: {width}}}") for width in (1, 2, 4)]
    for builder in builders:
        finish(builder)
    assert widths(tmp_path) in ([1], [2], [4])
    builders = [start(tmp_path, f"{{arch: sm_110a, width: {width}}}", merge=True) for width in (1, 2, 4, 8)]
    for builder in builders:
        finish(builder)
    assert widths(tmp_path) == [1, 2, 4, 8]


PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER = 24, 1, 2, 3
LIBC = ctypes.CDLL(None, use_errno=True)
SOMEONE_ELSE = 65534


def obey_permissions() -> None:
    """Before exec: from then on root, too, is refused what the mode of a file refuses."""
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "cannot drop a capability")


def give_away(folder: Path, mode: int) -> None:
    """Make someone else own a folder and what is in it; `mode` is that of folders."""
    for path in (folder, *folder.rglob("*")):
        path.chmod(mode if path.is_dir() else mode & 0o666)
        os.chown(path, SOMEONE_ELSE, SOMEONE_ELSE)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make files that belong to someone else")
def test_a_cache_that_cannot_be_written_or_read_is_no_failure(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    finish(start(tmp_path / "first", "{arch: sm_110a, width: 1}", cache=cache))
    give_away(cache, 0o755)
    lines = finish(
        start(tmp_path / "second", "{arch: sm_110a, width: [1, 2]}", cache=cache, preexec_fn=obey_permissions)
    ).splitlines()
    assert lines[:2] == ["cached toy-sm_110a-scale-w1 ", "built toy-sm_110a-scale-w2 "]
    assert len(lines) == 3
    assert lines[2].startswith("warning cache not written: ")
    assert "Permission denied" in lines[2]
    assert widths(tmp_path / "second") == [1, 2]
    give_away(cache, 0o700)
    output = finish(start(tmp_path / "third", "{arch: sm_110a, width: 1}", cache=cache, preexec_fn=obey_permissions))
    assert output.startswith("built toy-sm_110a-scale-w1")
    assert "cannot read: Permission denied: compiling instead" in output


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount")
def test_a_disk_that_fills_up_leaves_the_old_bundle(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        finish(start(disk, "{arch: sm_110a, width: 1}", cache=tmp_path / "cache"))
        (disk / "filler").write_bytes(b"x" * (disk_free(disk) - 8192))
        full = start(disk, "{arch: sm_110a, width: [1, 2, 4, 8]}", cache=tmp_path / "cache")
        output, _ = full.communicate(timeout=60)
        assert full.returncode != 0
        assert "No space left on device: free some space and run again" in output
        assert widths(disk) == [1]
        assert not [p for p in (disk / "out").rglob("*") if p.name.startswith(".tmp-")]
        (disk / "filler").unlink()
        assert "built" not in finish(start(disk, "{arch: sm_110a, width: [1, 2, 4, 8]}", cache=tmp_path / "cache"))
        assert widths(disk) == [1, 2, 4, 8]
    finally:
        subprocess.run(["umount", disk], check=True)


def disk_free(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_bsize
