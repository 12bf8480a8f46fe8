"""The GPU tests' summary as JSON, and as a Markdown table for docs/results."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch
from gpu.running import ACCURACY, MEASURED

from cubinery import __version__
from cubinery.aot.references.tolerances import PAGED_DECODE
from cubinery.runtime.library import Library


def environment(library: Library) -> dict[str, Any]:
    """What was tested, and on what."""
    info = library.driver.device_info(library.driver.current_device())
    manifest = library.bundles[0].manifest
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpu": info.name,
        "sms": info.sm_count,
        "compute_capability": ".".join(map(str, info.compute_capability)),
        "driver_cuda": f"{info.driver_version // 1000}.{info.driver_version % 1000 // 10}",
        "driver": _kernel_driver(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda_bindings": importlib.metadata.version("cuda-bindings"),
        "cubinery": __version__,
        "bundle_arch": manifest.arch,
        "bundle_keys": len(library),
        "bundle_toolchain": dict(manifest.toolchain),
    }


def _kernel_driver() -> str:
    """The version of the kernel module, which the CUDA API does not tell."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return "unknown"
    return next((word for word in text.split() if word.count(".") >= 1 and word[0].isdigit()), "unknown")


def write_report(folder: Path, outcomes: dict[str, int], library: Library) -> list[Path]:
    """Write gpu-tests.json and gpu-tests.md into `folder`, which is made; returns their paths."""
    data = {
        "environment": environment(library),
        "tests": outcomes,
        "worst": [
            {"kv_format": kv_format, "head_dim": head_dim, **dataclasses.asdict(worst)}
            for (kv_format, head_dim), worst in sorted(MEASURED.items())
        ],
        "accuracy": [
            {
                "kv_format": kv_format,
                "q_dtype": q_dtype,
                "head_dim": head_dim,
                "o_relative_l2": o,
                "o_relative_l2_of_rounding": rounding,
                "lse_absolute": lse,
            }
            for (kv_format, q_dtype, head_dim), (o, rounding, lse) in ACCURACY.items()
        ],
        "tolerance": dataclasses.asdict(PAGED_DECODE["mma"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "gpu-tests.json", folder / "gpu-tests.md"]
    paths[0].write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(data), encoding="utf-8")
    return paths


def markdown(data: dict[str, Any]) -> str:
    """The report as Markdown."""
    env, tests, limits = data["environment"], data["tests"], data["tolerance"]
    lines = [
        f"{env['date']}, {env['gpu']} ({env['sms']} SMs), driver {env['driver']} (CUDA {env['driver_cuda']}), "
        f"torch {env['torch']}, cuda-bindings {env['cuda_bindings']}, Python {env['python']}, cubinery "
        f"{env['cubinery']}, {env['bundle_keys']} keys for {env['bundle_arch']} built with "
        + ", ".join(f"{name} {version}" for name, version in env["bundle_toolchain"].items())
        + ".",
        "",
        ", ".join(f"{count} {name}" for name, count in tests.items()) + ".",
        "",
        "| KV format | head_dim | checks | worst O, relative L2 of a row | worst LSE, absolute |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['kv_format']} | {row['head_dim']} | {row['checks']} | {row['o_relative_l2']:.2e} "
        f"| {row['lse_absolute']:.2e} |"
        for row in data["worst"]
    ]
    lines += ["", f"Limits: {limits['o_relative_l2']:.0e} and {limits['lse_absolute']:.0e}.", ""]
    if data["accuracy"]:
        lines += [
            (
                "What formats cost: distance from float64 attention over K, V and Q before they were quantised (normal "
                "values, 4096 and 1000 keys; scales per KV head, of nvfp4 per tensor), of the kernel and of float64 "
                "attention over the quantised values."
            ),
            "",
            "| KV format | Q | head_dim | O, relative L2 | of rounding alone | LSE, absolute |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['kv_format']} | {row['q_dtype']} | {row['head_dim']} | {row['o_relative_l2']:.4f} "
            f"| {row['o_relative_l2_of_rounding']:.4f} | {row['lse_absolute']:.1e} |"
            for row in data["accuracy"]
        ]
        lines.append("")
    return "\n".join(lines)
