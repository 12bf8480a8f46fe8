"""docs/field-reports.md names tests that exist, one for every report."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/field-reports.md").read_text()


def test_every_named_test_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
    assert len(named) > 40
    missing = [f"{f}::{name}" for f, name in named if f"\ndef {name}(" not in (ROOT / f).read_text()]
    assert missing == []


def test_every_numbered_report_has_a_test_that_needs_no_gpu() -> None:
    rows = {int(n): row for n, row in re.findall(r"^\| (\d+) \|(.*)$", TEXT, re.MULTILINE)}
    assert sorted(rows) == list(range(1, 26))
    assert [n for n, row in rows.items() if not re.search(r"`tests/(?!gpu/)[\w/]+\.py::test_\w+`", row)] == []
