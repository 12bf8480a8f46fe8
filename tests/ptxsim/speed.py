"""How fast the simulator executes a decode whose grid has 40 CTAs, or more.

    PYTHONPATH=src:tests python -m ptxsim.speed --bundle build/smoke/sm_90a
    PYTHONPATH=src:tests python -m ptxsim.speed --bundle build/smoke/sm_90a --sequences 32 --processes 2

Prints millions of warp instructions a second, with every check on and with those off that `--no-checks` leaves out.
Translation and reference do not count. Seconds are of the processor, so that other programs do not count, but where
`--processes` says in how many processes a launch may run: then they are the clock's.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from unittest.mock import patch

from cubinery.aot.problems.paged_decode.mma import NUM_KV_HEADS, decode
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.machine import Checks
from cubinery.aot.ptxsim.schedule import Counters
from cubinery.aot.verify import Task, subject
from cubinery.runtime.bundle import Bundle

KEYS, SPLITS = 600, 2


def measure(bundle: Path, key: str, checks: Checks, sequences: int, processes: int) -> tuple[int, int, float]:
    """(CTAs, warp instructions, seconds) of the decode; `processes`: 0 for one, and seconds of the processor."""
    arch = Bundle.open(bundle).manifest.arch
    driver = SimDriver(arch, [bundle], checks=checks, processes=max(1, processes))
    task = Task(bundle, arch, key, "fair:0")
    clock = contextlib.nullcontext() if processes else patch("time.perf_counter", time.process_time)
    with subject(driver, task, 7) as called, clock:
        decode(called, keys=(77,), splits=1)  # translates it
        driver.counters, driver.ctas = Counters(), 0
        decode(called, keys=(KEYS,) * sequences, splits=SPLITS)
    ctas = sequences * SPLITS * NUM_KV_HEADS
    assert driver.ctas == ctas, f"{driver.ctas} CTAs ran, not {ctas}"
    return ctas, driver.counters.instructions, driver.counters.seconds


def main() -> None:
    """Measure a kernel, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of one arch's bundle")
    parser.add_argument("--key", default="paged_decode-sm_90a-mma-d128-p16-kvfp8", help="a decode of it")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=10)
    parser.add_argument("--processes", type=int, default=0)
    options = parser.parse_args()
    for name, checks in (("every check", Checks()), ("checks off", Checks.off())):
        for _ in range(options.runs):
            ctas, count, seconds = measure(options.bundle, options.key, checks, options.sequences, options.processes)
            rate = count / seconds / 1e6
            print(f"{name}: {ctas} CTAs, {count:,} warp instructions in {seconds:.2f} s, {rate:.2f} M/s", flush=True)


if __name__ == "__main__":
    main()
