"""Run the corpus on a GPU and write what it answered: `python record.py --bundle FOLDER --out FOLDER`.

A child process does the launches. Where one fails or hangs, the parent notes the fault and starts another child for
the rest, because a failed launch ends its CUDA context.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2] / "src")]

from ptxsim.silicon.corpus import corpus, digest, key, module  # noqa: E402
from ptxsim.silicon.running import Recorded, run, save_records  # noqa: E402

SILENCE = 25.0
"""Seconds without progress after which a child is taken to hang."""


def child(bundle: Path, names: list[str], results: Path) -> None:
    """Run these entries one after the other; tell the parent which is under way."""
    from cubinery.runtime.cuda import CudaDriver
    from cubinery.runtime.library import Library

    driver = CudaDriver()
    library = Library.open(bundle, driver)
    for name in names:
        text = hashlib.sha256(module(corpus()[name]).encode()).hexdigest()
        if library.artifact(key(name)).emitted["ptx"].sha256 != text:
            raise SystemExit(f"{bundle} holds another {name}: write it again with bundle.py")
    info = driver.device_info(0)
    device = {"name": info.name, "compute_capability": info.compute_capability, "driver_version": info.driver_version}
    (results / "device.json").write_text(json.dumps(device))
    for name in names:
        print(name, flush=True)
        output = run(corpus()[name], library, driver)
        (results / f"{name}.bin").write_bytes(output)
    print("", flush=True)


def _spawn(bundle: Path, names: list[str], results: Path) -> tuple[str, str]:
    """(entry at which a child ended, why); empty where it did all."""
    listing = results / "names.json"
    listing.write_text(json.dumps(names))
    command = [sys.executable, __file__, "--bundle", str(bundle), "--child", str(listing)]
    errors = results / "errors.txt"
    with errors.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        timer: threading.Timer | None = None
        last, hung = "starting", False

        def hang() -> None:
            nonlocal hung
            hung = True
            process.kill()

        assert process.stdout is not None
        try:
            timer = threading.Timer(SILENCE, hang)
            timer.start()
            for line in process.stdout:
                timer.cancel()
                last = line.strip()
                timer = threading.Timer(SILENCE, hang)
                timer.start()
        finally:
            if timer is not None:
                timer.cancel()
        code = process.wait()
    if code == 0 and not last:
        return "", ""
    lines = errors.read_text().strip().splitlines() or [f"exit status {code}"]
    return last, "no progress" if hung else lines[-1]


def record(bundle: Path, names: list[str], out: Path) -> dict[str, Recorded]:
    """Run and save; returns the records."""
    records: dict[str, Recorded] = {}
    device: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        results, left = Path(folder), list(names)
        while left:
            failed, why = _spawn(bundle, left, results)
            if failed and failed not in left:
                print(
                    f"a child failed before its first launch: {why}\n{(results / 'errors.txt').read_text()}", flush=True
                )
                break
            for name in left[: left.index(failed)] if failed else left:
                records[name] = Recorded(digest(corpus()[name]), (results / f"{name}.bin").read_bytes(), "")
            if failed:
                records[failed] = Recorded(digest(corpus()[failed]), b"", why)
                print(f"{failed}: {why}", flush=True)
            left = left[left.index(failed) + 1 :] if failed else []
        about = results / "device.json"
        device = json.loads(about.read_text()) if about.exists() else {}
    if not records:
        raise SystemExit("nothing was recorded")
    save_records(out / "h200.npz", records, device)
    return records


def record_decodes(bundle: Path, out: Path) -> None:
    """Run every decode of a bundle on the current GPU and save what it gives."""
    from ptxsim.silicon import decodes

    from cubinery.runtime.library import Library

    library = Library.open(bundle)
    found = {key: decodes.decode(library, key) for key in decodes.decode_keys(library)}
    decodes.save(out / decodes.DATA.name, found)
    print(f"{len(found)} decodes")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Record what a GPU answers to the silicon corpus.")
    parser.add_argument("--bundle", type=Path, help="the assembled corpus, as bundle.py writes it")
    parser.add_argument("--smoke", type=Path, help="the smoke bundle, to record its decodes as well")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    parser.add_argument("--only", default="", help="entries whose names start so")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.bundle, json.loads(options.child.read_text()), options.child.parent)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    if options.bundle:
        names = [name for name in corpus() if name.startswith(options.only)]
        records = record(options.bundle, names, options.out)
        faults = sum(1 for r in records.values() if r.fault)
        missing = [name for name in names if name not in records]
        size = (options.out / "h200.npz").stat().st_size
        print(f"{len(records)} entries, {faults} with faults, {size} bytes; missing: {missing}", flush=True)
    if options.smoke:
        record_decodes(options.smoke, options.out)


if __name__ == "__main__":
    main()
