"""Runs the launches that `capture.py` read, on the simulator."""

from __future__ import annotations

import struct
from typing import Any

from cubinery.aot.ptxsim.machine import Checks, Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.parser import parse
from cubinery.aot.ptxsim.schedule import Counters, schedule
from cubinery.aot.ptxsim.tensormap import TensorMap
from cubinery.aot.ptxsim.translate import Translation

SHARED = 227 << 10
"""Dynamic shared memory of every launch: what a CTA may have on these chips. The IR names no smaller number."""


def _param(value: dict[str, Any], size: int, tensors: tuple[Any, ...]) -> bytes:
    if "pointer" in value:
        data = struct.pack("<Q", tensors[value["pointer"]].data_ptr())
        data += struct.pack(f"<{len(value['behind'])}i", *value["behind"])
    elif "map" in value:
        m = value["map"]
        data = TensorMap(
            m["dtype"], tensors[m["pointer"]].data_ptr(), tuple(m["extents"]), tuple(m["strides"]), tuple(m["box"]),
            (1,) * len(m["extents"]), m["swizzle"],
        ).encode()  # fmt: skip
    elif "divisor" in value:
        data = _divisor(value["divisor"])
    else:  # an MMA atom is all zeros at a launch: no accumulation yet, no negation, no lanes left out
        data = bytes.fromhex(value.get("bytes", ""))
    assert len(data) <= size
    return data.ljust(size, b"\0")


def _divisor(divisor: int) -> bytes:
    """A divisor as the DSL passes it: itself, multiplier and shifts (Granlund and Montgomery 1994)."""
    shift = (divisor - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1
    return struct.pack("<iIBB2x", divisor, multiplier & 0xFFFFFFFF, min(shift, 1), max(shift - 1, 0))


def run(trace: dict[str, Any], ptx: str, tensors: tuple[Any, ...], plan: str, *, races: bool = True) -> Counters:
    """All launches of a trace one after the other, with `ptx` for its code. Raises Fault.

    The published kernels hold no tcgen05.fence and few tcgen05.wait::ld, so nothing is asked of them there.
    """
    module = parse(ptx, "example")
    memory = GlobalMemory()
    for i, tensor in enumerate(tensors):
        memory.register(tensor.data_ptr(), tensor.untyped_storage().nbytes(), name=f"argument {i}")
    total = Counters()
    for launch in trace["launches"]:
        entry = module.entries[launch["symbol"]]
        buffer = bytearray(max(p.offset + p.size for p in entry.params))
        for param, value in zip(entry.params, launch["params"], strict=True):
            buffer[param.offset : param.offset + param.size] = _param(value, param.size, tensors)
        kernel = Translation(module, entry, "example")
        machine = Machine(
            kernel, memory, bytes(buffer), grid=tuple(launch["grid"]), block=tuple(launch["block"]),
            cluster=tuple(launch["cluster"]), dynamic_smem=SHARED - kernel.static_shared,
            schedule=schedule(plan), checks=Checks(races=races, tensor_fences=False),
        )  # fmt: skip
        counters = machine.run()
        total.instructions += counters.instructions
        total.seconds += counters.seconds
    return total
