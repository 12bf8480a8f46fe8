"""Run an entry of the corpus through the product's runtime, on whichever driver, and compare outputs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ptxsim.silicon.corpus import key
from ptxsim.silicon.entries import Close, Column, Entry

from cubinery.runtime.driver import Driver
from cubinery.runtime.library import Library

DATA = Path(__file__).parent / "data" / "h200.npz"
"""What an H200 answered."""
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def run(entry: Entry, library: Library, driver: Driver, device: int = 0) -> bytes:
    """The output of one entry. Raises what the driver raises."""
    source, target = driver.allocate(device, len(entry.data)), driver.allocate(device, entry.out_bytes)
    driver.copy_to_device(device, source, entry.data)
    driver.copy_to_device(device, target, entry.initial_out())
    kernel = library.kernel(key(entry.name), device)
    kernel.bind({"input": source, "output": target, "count": entry.count}).launch(0)
    driver.synchronize(device)
    output = driver.copy_from_device(device, target, entry.out_bytes)
    driver.free(device, source)
    driver.free(device, target)
    return output


@dataclass(frozen=True, slots=True)
class Recorded:
    """What silicon answered to one entry."""

    digest: str
    output: bytes
    fault: str
    """What the launch failed with; empty where it ran."""


def load_records(path: Path = DATA) -> dict[str, Recorded]:
    """All records of a file; nothing where there is none."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        about = json.loads(file["about"].tobytes())
        return {
            name: Recorded(one["digest"], file[name].tobytes() if not one["fault"] else b"", one["fault"])
            for name, one in about["entries"].items()
        }


def save_records(path: Path, records: dict[str, Recorded], device: dict[str, Any]) -> None:
    """Write records, compressed."""
    entries = {name: {"digest": r.digest, "fault": r.fault} for name, r in sorted(records.items())}
    about = json.dumps({"device": device, "entries": entries}).encode()
    arrays = {name: np.frombuffer(r.output, np.uint8) for name, r in sorted(records.items()) if not r.fault}
    np.savez_compressed(path, about=np.frombuffer(about, np.uint8), **arrays)


def differences(entry: Entry, mine: bytes, silicon: bytes) -> list[str]:
    """One line for each column that differs: how many results, and the first of them."""
    assert len(mine) == len(silicon) == entry.out_bytes, f"{len(mine)} and {len(silicon)} bytes of {entry.out_bytes}"
    found, at = [], 0
    for column in entry.columns:
        a, b = (np.frombuffer(x, _UNSIGNED[column.size], column.count, at) for x in (mine, silicon))
        at += column.nbytes
        bad = np.flatnonzero(_differs(column, a, b))
        if len(bad):
            i = int(bad[0])
            width = 2 * column.size + 2
            values = f"{int(a[i]):#0{width}x}, silicon {int(b[i]):#0{width}x}"
            found.append(f"{column.name}: {len(bad)} of {column.count}, first [{i}] {values}")
    return found


def _differs(column: Column, a: Any, b: Any) -> Any:
    if column.close is None:
        return a != b
    exact = not (column.close.relative or column.close.absolute)
    with np.errstate(invalid="ignore", over="ignore"):
        x, y = _numbers(column.close, a), _numbers(column.close, b)
        near = np.abs(x - y) <= column.close.absolute + column.close.relative * np.abs(y)
    same = (x == y) & (np.signbit(x) == np.signbit(y)) if exact else (x == y) | near
    same |= np.isnan(x) & np.isnan(y)
    if len(x) != len(a):  # two halves in each element
        same = same.reshape(-1, 2).all(axis=1)
    return ~same


def _numbers(close: Close, bits: Any) -> Any:
    match close.kind:
        case "f16":
            return bits.view(np.float16).astype(np.float64)
        case "bf16":
            return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        case "f32":
            return bits.view(np.float32).astype(np.float64)
        case _:
            return bits.view(np.float64)
