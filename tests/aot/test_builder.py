"""Building with a fake compiler: parallel, incremental, isolated, bounded, repeatable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from toy_builds import FAKE, NOTHING, toy_items

from cubinery.aot import builder, pool, store
from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.errors import BuildError, StoreError
from cubinery.aot.report import BuildReport, BuildRow
from cubinery.runtime.manifest import Manifest

Run = Callable[..., BuildReport]
THREE = "{arch: sm_110a, width: [1, 2, 4]}"


def row(report: BuildReport, key: str) -> BuildRow:
    return next(row for row in report.rows if row.key == key)


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def bundle(tmp_path: Path, arch: str = "sm_110a", out: str = "out") -> Manifest:
    """The manifest, after every file that it names was checked."""
    found = store.existing_artifacts(tmp_path / out / arch)
    assert found is not None
    return found


def test_a_build_writes_one_bundle_per_arch_and_a_report(run_build: Run, tmp_path: Path) -> None:
    items = toy_items(
        "{arch: [sm_110a, sm_90a], width: [1, 2], helper: true}", emit="[ptx, object, object-linux-aarch64]"
    )
    report = run_build(items)
    assert report.ok
    assert [r.status for r in report.rows] == ["built"] * 6
    assert [r.key for r in report.rows] == sorted(item.key for item in items)
    assert report.bundles == (str(tmp_path / "out/sm_110a"), str(tmp_path / "out/sm_90a"))
    made = bundle(tmp_path)
    assert [a.key for a in made.artifacts] == [
        "toy-sm_110a-helper", "toy-sm_110a-scale-w1-helperon", "toy-sm_110a-scale-w2-helperon",
    ]  # fmt: skip
    assert (made.min_driver, made.ptx_version, made.package_version) == (13000, "9.4", "0.1.0")
    assert "nvidia-cutlass-dsl" in made.toolchain
    scale = made.artifacts[1]
    assert scale.requires == ("toy-sm_110a-helper",)
    assert scale.config["width"] == 1
    assert scale.kernels[0].resources is not None
    assert set(scale.emitted) == {"ptx", "object", "header", "object-linux-aarch64", "header-linux-aarch64"}
    assert scale.emitted["object-linux-aarch64"].path.startswith("emitted/toy-sm_110a-scale-w1-helperon.")
    assert scale.emitted["object-linux-aarch64"].path.endswith(".linux-aarch64.o")
    written = json.loads((tmp_path / "out/report.json").read_text())
    assert written == json.loads(report.dumps())
    assert (written["ok"], written["counts"]) == (True, {"built": 6, "cached": 0, "failed": 0})
    assert written["rows"][1]["registers"] == 32
    assert written["rows"][1]["origin"] == "toy.yaml:3"
    assert report.peak_memory > 1 << 20


def test_report_4_code_for_a_chip_that_nobody_asked_for_is_refused(run_build: Run, tmp_path: Path) -> None:
    """A compile worker that saw no GPU built sm_100a and said nothing."""
    report = run_build(toy_items("[{arch: sm_110a, width: [1, 2], mode: blind}, {arch: sm_110a, width: 4}]"))
    assert {r.key: r.error_type for r in report.rows} == {
        "toy-sm_110a-scale-w1-modeblind": "ArchGateError",
        "toy-sm_110a-scale-w2-modeblind": "ArchGateError",
        "toy-sm_110a-scale-w4": None,
    }
    assert row(report, "toy-sm_110a-scale-w1-modeblind").error == (
        "toy-sm_110a-scale-w1-modeblind: the cubin is for SM 100, expected 110 (sm_110a)"
    )
    assert [a.key for a in bundle(tmp_path).artifacts] == ["toy-sm_110a-scale-w4"]


def test_report_3_each_worker_serves_one_arch_that_is_set_before_it_starts(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arch variable that was set after the import built for the wrong chip."""
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_75")  # whatever the shell holds, a worker gets its own
    report = run_build(toy_items("{arch: [sm_90a, sm_100a, sm_110a], width: [1, 2, 4, 8]}"))
    served: dict[str, set[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        key, pid, arch = line.split()
        assert key.split("-")[1] == arch
        served.setdefault(pid, set()).add(arch)
    assert all(len(archs) == 1 for archs in served.values())
    assert 3 <= len(served) <= report.workers <= 5  # the first two at once, and one more import per change of arch


def test_a_second_build_compiles_nothing_and_changes_no_byte(run_build: Run, tmp_path: Path) -> None:
    items = toy_items(THREE, emit="[ptx]")
    run_build(items)
    before = files(tmp_path / "out/sm_110a")
    stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "out/sm_110a").rglob("*")}
    began = time.perf_counter()
    report = run_build(items)
    assert time.perf_counter() - began < 1
    assert (report.ok, report.workers, report.compile_seconds, report.peak_memory) == (True, 0, 0, 0)
    assert [r.status for r in report.rows] == ["cached"] * 3
    assert row(report, items[0].key).registers == 32
    assert files(tmp_path / "out/sm_110a") == before
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out/sm_110a").rglob("*")} == stamps


def test_the_cache_serves_another_folder_and_force_ignores_it(run_build: Run, tmp_path: Path) -> None:
    items = toy_items(THREE)
    run_build(items)
    assert run_build(items, out=tmp_path / "other").count("cached") == 3
    assert run_build(items, force=True).count("built") == 3
    assert files(tmp_path / "other/sm_110a") == files(tmp_path / "out/sm_110a")


def test_only_what_changed_is_compiled(run_build: Run) -> None:
    run_build(toy_items("{arch: sm_110a, width: [1, 2]}"))
    report = run_build(toy_items("{arch: sm_110a, width: [1, 2, 4]}"))
    assert [r.status for r in report.rows] == ["cached", "cached", "built"]


def test_the_parent_never_imports_the_compiler(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from toy_builds import toy_items, FAKE\n"
        "from cubinery.aot.builder import BuildOptions, build\n"
        "from cubinery.aot.variants import check_closure\n"
        "root = Path(sys.argv[1])\n"
        "options = BuildOptions(out=root / 'out', cache_dir=root / 'cache', compile_entry=FAKE)\n"
        "assert build(toy_items('{arch: sm_110a, width: 1}'), options).ok\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'cutlass', 'cuda', 'torch', 'numpy'}, loaded\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, timeout=60)


# -- isolation -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "error_type", "message", "detail"),
    [
        ("segfault", "CompileCrashError", "the compiler crashed with SIGSEGV", "Segmentation fault"),
        ("exit", "CompileCrashError", "the compiler ended with exit code 3", "the last words of a worker"),
        ("hang", "CompileTimeoutError", "not compiled after 0.7 s: killed", ""),
        ("raise", "CompileError", "ValueError: no such layout", "in line 7"),
    ],
)
def test_report_5_a_crash_of_the_compiler_fails_one_key_alone(
    mode: str, error_type: str, message: str, detail: str, run_build: Run, tmp_path: Path
) -> None:
    items = toy_items(f"[{THREE}, {{arch: sm_110a, width: 2, mode: {mode}}}, {{arch: sm_90a, width: 1}}]")
    report = run_build(items, timeout_s=0.7, jobs=1)
    bad = row(report, f"toy-sm_110a-scale-w2-mode{mode}")
    assert not report.ok
    assert (bad.status, bad.error_type) == ("failed", error_type)
    assert bad.error == f"{bad.key}: {message}"
    assert detail in bad.detail
    assert "\x1b" not in bad.detail
    assert {r.key for r in report.rows if r.status == "built"} == {item.key for item in items} - {bad.key}
    assert [a.key for a in bundle(tmp_path).artifacts] == [f"toy-sm_110a-scale-w{w}" for w in (1, 2, 4)]
    assert json.loads((tmp_path / "out/report.json").read_text())["ok"] is False
    again = run_build(items, timeout_s=0.7, jobs=1)  # the good ones are not compiled again
    assert (again.count("cached"), again.count("failed")) == (4, 1)


def test_a_key_that_needs_a_failed_one_is_not_shipped(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cubinery.runtime.ops.toy import config

    monkeypatch.setattr(config.ScaleConfig, "requires", lambda self: (config.HelperConfig(mode="raise"),) * self.helper)
    report = run_build(toy_items("{arch: sm_110a, width: 1, helper: [true, false]}"))
    lost = row(report, "toy-sm_110a-scale-w1-helperon")
    assert (lost.status, lost.error) == ("failed", f"{lost.key}: needs toy-sm_110a-helper-moderaise, which failed")
    assert [a.key for a in bundle(tmp_path).artifacts] == ["toy-sm_110a-scale-w1"]


def test_when_every_key_fails_the_bundle_that_was_there_stays(run_build: Run, tmp_path: Path) -> None:
    run_build(toy_items(THREE))
    before = files(tmp_path / "out/sm_110a")
    report = run_build(toy_items("{arch: sm_110a, width: 1, mode: raise}"))
    assert (report.ok, report.bundles) == (False, ())
    assert files(tmp_path / "out/sm_110a") == before


def test_a_gate_fails_one_key_and_passes_after_the_spec_changes_without_compiling(
    run_build: Run, tmp_path: Path
) -> None:
    report = run_build(toy_items(THREE, gates="{max_registers: 31}"))
    assert [r.error_type for r in report.rows] == ["RegisterGateError"] * 3
    assert not (tmp_path / "out/sm_110a").exists()
    report = run_build(toy_items(THREE, gates="{max_registers: 32}"), compile_entry=FAKE)
    assert (report.ok, report.count("cached")) == (True, 3)


def test_a_compiler_that_cannot_be_loaded_fails_each_key_once_and_quickly(run_build: Run, tmp_path: Path) -> None:
    report = run_build(toy_items(THREE), compile_entry="toy_unstartable:compile_fake", jobs=1)
    assert report.workers == 1
    assert [r.error for r in report.rows] == [
        f"{r.key}: the compile worker cannot start: ImportError: libtoy.so: cannot open shared object file"
        for r in report.rows
    ]


def test_one_worker_that_cannot_start_leaves_the_work_to_the_others(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_ONCE", str(tmp_path / "once"))
    report = run_build(toy_items(THREE), compile_entry="toy_once:compile_fake", jobs=2)
    assert [r.status for r in report.rows] == ["built"] * 3
    assert report.workers == 2


def test_a_subset_without_what_it_needs_says_so(run_build: Run) -> None:
    items = [i for i in toy_items("{arch: sm_110a, width: 1, helper: true}") if i.config.impl == "scale"]
    report = run_build(items)
    assert str(report.rows[0].error).endswith("needs toy-sm_110a-helper, which is not asked for")


def test_an_uninstalled_compiler_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "toolchain", dict)
    with pytest.raises(BuildError, match=r"the compiler is not installed: pip install 'cubinery\[build\]'"):
        build(toy_items(THREE), BuildOptions(out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_source_that_changes_while_it_compiles_fails_its_key(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "read_sources", lambda family, impl: {"cubinery.runtime.arch": b"as it was before"})
    report = run_build(toy_items("{arch: sm_110a, width: 1}"))
    assert report.rows[0].error == (
        "toy-sm_110a-scale-w1: cubinery.runtime.arch changed while it was compiled: run the build again"
    )
    assert not list((tmp_path / "cache").rglob("*.entry"))


@pytest.mark.parametrize("options", [{"jobs": 0}, {"timeout_s": -1}, {"memory_bytes": 0}])
def test_options_out_of_range(options: dict, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected at least"):
        BuildOptions(out=tmp_path, **options)


def test_nothing_to_build(run_build: Run, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="nothing to build"):
        run_build([])
    assert not (tmp_path / "out").exists()


# -- scheduling ----------------------------------------------------------------------------------


def most_at_once(run_build: Run, **options: object) -> int:
    running = [0]
    run_build(
        toy_items("{arch: sm_110a, width: [1, 2, 4], dtype: [f32, bf16], mode: slow}"),
        progress=lambda p: running.append(len(p.running)),
        **options,
    )
    return max(running) + 1  # the callback runs between the end of one job and the start of the next


def test_report_18_jobs_and_memory_bound_the_workers(run_build: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parallel compiles ran a machine out of memory."""
    monkeypatch.setenv("TOY_SLOW", "0.3")
    assert most_at_once(run_build, jobs=3, memory_bytes=1 << 40) == 3
    assert most_at_once(run_build, jobs=3, memory_bytes=2 * pool.WORKER_MEMORY, force=True) == 2
    monkeypatch.setenv("TOY_SLOW", "0")
    assert most_at_once(run_build, jobs=3, memory_bytes=1, force=True) == 1  # one always runs


def test_workers_that_turn_out_greedy_become_fewer(run_build: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.WorkerPool, "__init__", _with_small_estimate(pool.WorkerPool.__init__))
    running: list[int] = []
    items = toy_items("{arch: sm_110a, width: [1, 2, 4, 8], dtype: [f32, bf16], mode: greedy}")
    report = run_build(items, lambda p: running.append(len(p.running)), jobs=2, memory_bytes=150 << 20)
    assert report.ok
    assert 100 << 20 < report.peak_memory < 200 << 20
    assert max(running[len(running) // 2 :]) == 0  # one at a time, once their appetite is known


def _with_small_estimate(original: Callable) -> Callable:
    def init(self, *args, **options) -> None:
        original(self, *args, **{**options, "worker_memory": 32 << 20})

    return init


def test_report_19_a_worker_that_leaks_threads_is_replaced(run_build: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long compile loop in one process gathered threads until it could start no more."""
    items = toy_items("{arch: sm_110a, width: [1, 2, 4, 8], dtype: [f32, bf16], mode: threads}")
    assert run_build(items, jobs=1).workers == 1
    monkeypatch.setattr(pool, "WORKER_THREADS", 18)  # the third job, at eight threads each, goes beyond
    report = run_build(items, jobs=1, force=True)
    assert report.ok
    assert report.workers == 3


def test_memory_that_is_free_is_some_of_what_there_is() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < pool.available_memory() <= total


def test_progress_tells_every_key_once(run_build: Run) -> None:
    told = []
    report = run_build(toy_items(THREE), told.append)
    assert (told[0].done, told[0].total, told[0].row) == (0, 3, None)
    assert sorted(p.row.key for p in told if p.row) == [r.key for r in report.rows]
    assert told[-1].done == 3


def test_parallel_compiles_take_the_time_of_their_share(run_build: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOY_SLOW", "0.2")
    items = toy_items(
        "{arch: sm_110a, width: [1, 2, 4], dtype: [f32, bf16], masked: [true], mode: slow, ctas_per_sm: [1, 2]}"
    )
    report = run_build(items, jobs=4)
    assert report.compile_seconds >= 12 * 0.2
    assert report.seconds < 0.75 * report.compile_seconds + report.start_seconds


# -- the folder ----------------------------------------------------------------------------------


def test_a_subset_replaces_the_bundle_and_merge_adds_to_it(run_build: Run, tmp_path: Path) -> None:
    run_build(toy_items("{arch: sm_110a, width: [1, 2]}"))
    run_build(toy_items("{arch: sm_110a, width: [2, 4]}"))
    assert [a.config["width"] for a in bundle(tmp_path).artifacts] == [2, 4]
    run_build(toy_items("{arch: sm_110a, width: [1, 4]}"), merge=True)
    assert [a.config["width"] for a in bundle(tmp_path).artifacts] == [1, 2, 4]
    run_build(toy_items("{arch: sm_90a, width: 1}"))
    assert [a.config["width"] for a in bundle(tmp_path).artifacts] == [1, 2, 4]


def test_merging_keeps_what_was_emitted_beside_an_unchanged_cubin(run_build: Run, tmp_path: Path) -> None:
    run_build(toy_items("{arch: sm_110a, width: [1, 2]}", emit="[ptx]"))
    before = bundle(tmp_path)
    run_build(toy_items("{arch: sm_110a, width: 2}"), merge=True)
    assert bundle(tmp_path) == before


def test_merging_with_what_does_not_fit_is_refused(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_build(toy_items("{arch: sm_110a, width: 1}"))
    before = files(tmp_path / "out/sm_110a")
    monkeypatch.setattr(builder, "toolchain", lambda: {"nvidia-cutlass-dsl": "5.0"})
    with pytest.raises(BuildError, match=r"cannot add to this bundle: its toolchain is .* rebuild the bundle"):
        run_build(toy_items("{arch: sm_110a, width: 2}"), merge=True)
    assert files(tmp_path / "out/sm_110a") == before


def test_an_unwritable_folder_is_refused_before_anything_is_compiled(run_build: Run, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"a file")
    with pytest.raises(StoreError, match=r"out: cannot write: File exists"):
        run_build(toy_items(THREE), compile_entry=NOTHING)
    assert not (tmp_path / "cache").exists()


def test_a_damaged_cache_entry_is_compiled_again_and_reported(run_build: Run, tmp_path: Path) -> None:
    items = toy_items(THREE)
    run_build(items)
    good = files(tmp_path / "out/sm_110a")
    entry = sorted((tmp_path / "cache").rglob("*.entry"))[0]
    entry.write_bytes(entry.read_bytes()[:-1] + b"?")
    report = run_build(items)
    assert (report.ok, report.count("built"), report.count("cached")) == (True, 1, 2)
    assert len(report.warnings) == 1
    assert str(entry) in report.warnings[0]
    assert files(tmp_path / "out/sm_110a") == good
    assert run_build(items).warnings == ()


def test_an_unwritable_cache_is_a_warning(run_build: Run, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"a file")
    report = run_build(toy_items(THREE))
    assert report.ok
    assert any("cache not written" in warning for warning in report.warnings)
    assert bundle(tmp_path).artifacts


def test_a_full_disk_while_the_bundle_is_written_leaves_the_old_one(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_build(toy_items("{arch: sm_110a, width: 1}"))
    old = bundle(tmp_path)
    real = store.atomic_write

    def full(path: Path, data: bytes, **options: bool) -> None:
        if "out/" in str(path) and path.suffix == ".cubin":
            raise StoreError(f"{path}: cannot write: No space left on device")
        real(path, data, **options)

    monkeypatch.setattr(store, "atomic_write", full)
    with pytest.raises(StoreError, match="No space left"):
        run_build(toy_items(THREE))
    monkeypatch.undo()
    assert bundle(tmp_path) == old
    report = run_build(toy_items(THREE))  # what had been compiled was not lost
    assert report.count("cached") == 3


def test_a_cache_from_elsewhere_is_no_part_of_the_bytes(run_build: Run, tmp_path: Path) -> None:
    items = toy_items("{arch: [sm_110a, sm_90a], width: [1, 2, 4], helper: [true, false]}", emit="[ptx, object]")
    run_build(items)
    run_build(list(reversed(items)), out=tmp_path / "second", cache_dir=tmp_path / "cache2", jobs=1)
    for arch in ("sm_110a", "sm_90a"):
        assert files(tmp_path / "out" / arch) == files(tmp_path / "second" / arch)


def test_an_interrupt_kills_the_workers_and_keeps_what_is_done(
    run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "log"))

    def interrupt(progress: builder.Progress) -> None:
        if progress.row is not None:
            raise KeyboardInterrupt

    items = toy_items("[{arch: sm_110a, width: 1}, {arch: sm_110a, width: [2, 4], mode: hang}]")
    with pytest.raises(KeyboardInterrupt):
        run_build(items, interrupt, jobs=3)
    assert not (tmp_path / "out/sm_110a").exists()
    for line in (tmp_path / "log").read_text().splitlines():
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[1]), 0)
    assert len(list((tmp_path / "cache").rglob("*.entry"))) == 1
