"""The roofline of decode: achieved bandwidth of every shape under what the memory gives.

    python -m benchmarks.plots build/bench/results.json roofline.png

draws a run that was made where matplotlib is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paged_decode import OURS, Row

COLORS = {OURS: "#0b6e4f", "flashinfer_fa2": "#c8553d", "flashinfer_xqa": "#e09f3e", "fa3_vllm": "#5b5f97"}


def roofline(rows: Sequence[Row], copy_gbps: float, title: str, path: Path) -> str:
    """Draw one panel a KV format into `path` (PNG); returns why not where matplotlib is missing, else nothing."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        return f"matplotlib is not installed ({error}): pip install matplotlib"
    formats = list(dict.fromkeys(row.kv_format for row in rows))
    figure, panels = plt.subplots(len(formats), 1, figsize=(11, 4.6 * len(formats)), squeeze=False)
    for panel, kv_format in zip(panels[:, 0], formats, strict=True):
        _panel(panel, [row for row in rows if row.kv_format == kv_format], copy_gbps)
        panel.set_title(f"paged decode, {kv_format} KV: {title}", loc="left", fontsize=10, pad=20)  # above the legend
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return ""


def _panel(panel: Any, rows: Sequence[Row], copy_gbps: float) -> None:
    names = list(dict.fromkeys(name for row in rows for name, r in row.results.items() if r.time))
    width = 0.8 / max(1, len(names))
    for i, name in enumerate(names):
        found = [(at, row) for at, row in enumerate(rows) if name in row.results and row.results[name].time]
        places = [at - 0.4 + width * (i + 0.5) for at, _ in found]
        rates = [row.gbps(row.results[name].time.us) for _, row in found]  # type: ignore[union-attr]
        bars = panel.bar(places, rates, width * 0.92, color=COLORS.get(name), label=name)
        if name == OURS:
            panel.bar_label(bars, [f"{rate / copy_gbps:.2f}" for rate in rates], fontsize=7, padding=2)
    panel.axhline(copy_gbps, color="black", linestyle="--", linewidth=1, label=f"copy rate, {copy_gbps:.0f} GB/s")
    label: str | None = "plain read of the same bytes"
    for at, row in enumerate(rows):
        if row.floor is not None:
            panel.hlines(row.gbps(row.floor.us), at - 0.45, at + 0.45, color="black", linewidth=2, label=label)
            label = None
    panel.set_xticks(range(len(rows)), [row.shape.title.replace(", ", "\n") for row in rows], fontsize=6.5)
    panel.set_ylabel("GB of K and V a second")
    panel.set_ylim(bottom=0)
    panel.legend(fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the plot of a run's results.json; status 1 where that cannot be."""
    from benchmarks.report import rows_of

    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description="Draw the plot of a run.")
    parser.add_argument("results", type=Path, help="results.json of the run")
    parser.add_argument("plot", type=Path, help="the PNG to write")
    options = parser.parse_args(arguments)
    found = json.loads(options.results.read_text(encoding="utf-8"))
    why = roofline(rows_of(found), found["copy_gbps"], found["machine"]["gpu"], options.plot)
    print(why or f"written: {options.plot}", file=sys.stderr if why else sys.stdout)
    return bool(why)


if __name__ == "__main__":
    sys.exit(main())
