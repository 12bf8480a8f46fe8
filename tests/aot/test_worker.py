"""What a worker says of a failure, in one line."""

from __future__ import annotations

import pytest

from cubinery.aot.worker import Job, _first_line

PAGES = {
    "plain": (ValueError("no such layout"), "ValueError: no such layout"),
    "empty": (KeyError(), "KeyError"),
    "several lines": (ValueError("first\nsecond"), "ValueError: first"),
    "a heading": (
        RuntimeError("\n[Error] Verification failed:\n  sizes differ\n more"),
        "RuntimeError: [Error] Verification failed: sizes differ",
    ),
    "colour and a place": (
        TypeError("\n\x1b[91m\x1b[1merror:\x1b[0m no name 'x'\n \x1b[94m-->\x1b[0m /k/mma.py:8\n  |\n8 | x"),
        "TypeError: error: no name 'x' (at /k/mma.py:8)",
    ),
}


@pytest.mark.parametrize(("error", "said"), PAGES.values(), ids=PAGES)
def test_a_failure_is_one_line(error: Exception, said: str) -> None:
    assert _first_line(error) == said


def test_a_job_travels_as_json() -> None:
    job = Job("k", "toy", "scale", {"width": 1, "masked": True}, "sm_110a", ("object",))
    assert Job.from_json(job.to_json()) == job
