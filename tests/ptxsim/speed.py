"""How fast the simulator executes a decode whose grid has 40 CTAs.

    PYTHONPATH=src:tests python -m ptxsim.speed --bundle build/smoke/sm_90a

Prints millions of warp instructions a second, with every check on and with those off that `--no-checks` leaves out.
Seconds are of the processor, so that other programs do not count; translation and reference do not count either.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from unittest.mock import patch

from cubinery.aot.problems.paged_decode.mma import NUM_KV_HEADS, decode
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.machine import Checks
from cubinery.aot.ptxsim.schedule import Counters
from cubinery.aot.verify import Task, subject
from cubinery.runtime.bundle import Bundle

SEQUENCES, KEYS, SPLITS = 10, 600, 2
CTAS = SEQUENCES * SPLITS * NUM_KV_HEADS


def measure(bundle: Path, key: str, checks: Checks) -> tuple[int, float]:
    """(warp instructions, seconds of the processor) of the decode."""
    arch = Bundle.open(bundle).manifest.arch
    driver = SimDriver(arch, [bundle], checks=checks, processes=1)
    task = Task(bundle, arch, key, "fair:0")
    with subject(driver, task, 7) as called, patch("time.perf_counter", time.process_time):
        decode(called, keys=(77,), splits=1)  # translates it
        driver.counters, driver.ctas = Counters(), 0
        decode(called, keys=(KEYS,) * SEQUENCES, splits=SPLITS)
    assert driver.ctas == CTAS, f"{driver.ctas} CTAs ran, not {CTAS}"
    return driver.counters.instructions, driver.counters.seconds


def main() -> None:
    """Measure a kernel, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, required=True, help="folder of one arch's bundle")
    parser.add_argument("--key", default="paged_decode-sm_90a-mma-d128-p16-kvfp8", help="a decode of it")
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    for name, checks in (("every check", Checks()), ("checks off", Checks.off())):
        for _ in range(options.runs):
            count, seconds = measure(options.bundle, options.key, checks)
            rate = count / seconds / 1e6
            print(f"{name}: {CTAS} CTAs, {count:,} warp instructions in {seconds:.2f} s, {rate:.2f} M/s", flush=True)


if __name__ == "__main__":
    main()
