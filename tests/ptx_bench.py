"""Small PTX kernels for tests of the simulator: write a body, run it, look at memory or at the fault.

    out = run("mov.u32 %r1, %tid.x; st.global.b32 [%rd9], %r1;", words=32)

Registers %p0-%p19, %h0-%h19 (b16), %r0-%r99, %rd0-%rd49 are declared. The kernel's parameter is an array of
32-bit words; %rd8 holds its address, %rd9 the address of this thread's word (block and thread counted), %r9 the
thread in its block, and `smem` is dynamic shared memory.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.machine import Checks, Machine
from cubinery.aot.ptxsim.memory import GlobalMemory
from cubinery.aot.ptxsim.parser import parse
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.ptxsim.translate import Translation

_HEADER = """.version 9.4
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .u64 data, .param .align 64 .b8 map[128])
{
.reg .pred %p<20>; .reg .b16 %h<20>; .reg .b32 %r<100>; .reg .b64 %rd<50>;
ld.param.b64 %rd8, [data]; mov.u32 %r9, %tid.x; mov.u32 %r8, %ctaid.x; mov.u32 %r7, %ntid.x;
mad.lo.s32 %r6, %r8, %r7, %r9; mul.wide.u32 %rd7, %r6, 4; add.s64 %rd9, %rd8, %rd7;
"""


def source(body: str, functions: str = "") -> str:
    """The whole module; the body's first line is line 10. `functions` stand at its end."""
    return f"{_HEADER}{body}\nret;\n}}\n{functions}"


def translate(body: str, functions: str = "") -> Translation:
    module = parse(source(body, functions))
    return Translation(module, module.entries["k"])


def machine(
    body: str,
    data: Any,
    *,
    threads: int = 32,
    blocks: int = 1,
    cluster: int = 1,
    shared: int = 1024,
    schedule: str = "fair",
    checks: Checks = Checks(),  # noqa: B008 - immutable
    initialised: bool = True,
    tensor_map: bytes = bytes(128),
    extra: tuple[Any, ...] = (),
    functions: str = "",
    **options: Any,
) -> Machine:
    """A machine about to run the kernel on `data`; `extra` arrays are accessible too."""
    memory = GlobalMemory()
    memory.register(data.ctypes.data, data.nbytes, initialised=initialised, name="data", owner=data)
    for array in extra:
        memory.register(array.ctypes.data, array.nbytes, name="extra", owner=array)
    params = struct.pack("<Q56x128s", data.ctypes.data, tensor_map)
    return Machine(
        translate(body, functions), memory, params, grid=(blocks, 1, 1), block=(threads, 1, 1), cluster=(cluster, 1, 1),
        dynamic_smem=shared, schedule=named_schedule(schedule), checks=checks, **options,
    )  # fmt: skip


def run(body: str, words: int = 32, **options: Any) -> Any:
    """Run the kernel on `words` zeros; returns them afterwards as uint32."""
    data = np.zeros(words, np.uint32)
    machine(body, data, **options).run()
    return data
