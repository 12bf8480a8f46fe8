"""A peer in a process of its own: what it breaks, leaks or hangs stays there, and the run goes on.

The process makes the same tensors from the same seed, proves the peer's result against the same reference and
times it with the same timer; it idles while anything else is measured. It is started anew after it died.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.paged_decode import Result, measure_peer
from benchmarks.peers import Peer, first_line
from benchmarks.shapes import Problem, Shape
from benchmarks.timing import Timer, wait

MOST_FAILURES = 3
"""Times that a peer's process may die before it is not started again."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that a peer's process may take."""

    start: float = 120.0
    """To import the library and report."""
    compile: float = 240.0
    """For a first call of a configuration, with whatever the library compiles."""
    measure: float = 60.0
    """To prove and time one problem."""


@dataclass(frozen=True, slots=True)
class FirstCall:
    """The first call of a configuration: where a library compiles at run time, it does so here."""

    title: str
    seconds: float
    error: str = ""


class Lost(Exception):
    """The peer's process did not answer."""


class PeerProcess:
    """One peer, measured in a process of its own. `start` it, then `join` before anything else."""

    def __init__(
        self,
        name: str,
        make_peer: Callable[[torch.device], Peer],
        make_timer: Callable[[torch.device], Timer],
        device: torch.device,
        *,
        limits: Limits | None = None,
        absent: str = "",
    ) -> None:
        """`make_peer` and `make_timer` are called in the process, so they must be importable there.

        `absent` says why the peer is not there, if that is known; then no process is started.
        """
        self.name, self.version, self.absent = name, "", absent
        self._make: tuple[Any, ...] = (make_peer, make_timer, device)
        self._limits = limits or Limits()
        self._failures = 0
        self._process: Any = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Start the process, without waiting for it."""
        if self.absent:
            return
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, *self._make), daemon=True)
        self._process.start()
        theirs.close()

    def join(self) -> None:
        """Wait until the library is imported; sets `version`, or `absent`."""
        if self.absent:
            return
        try:
            self.version, self.absent = self._receive(self._limits.start)
        except Lost as error:
            self.absent = str(error)

    def request_first_calls(self, problems: Sequence[tuple[Shape, str]]) -> None:
        """Ask for a first call of each (shape, kv_format), without waiting for it."""
        if not self.absent:
            self._send(("first calls", tuple(problems)))

    def first_calls(self, problems: Sequence[tuple[Shape, str]]) -> Iterator[FirstCall]:
        """What `request_first_calls` of the same problems brought, one by one; ends early with what ended it."""
        if self.absent:
            return
        for shape, kv_format in problems:
            try:
                found: FirstCall = self._receive(self._limits.compile)
            except Lost as error:
                yield FirstCall(configuration(shape, kv_format), 0.0, str(error))
                return  # `measure` starts a new process
            yield found
            if self._connection is None:  # it said that it cannot go on
                return

    def measure(self, shape: Shape, kv_format: str) -> Result:
        """Prove and time one problem; a process that dies or takes too long is a result, too."""
        if self._failures >= MOST_FAILURES:
            return Result(error=f"not tried: its process was lost {self._failures} times")
        try:
            if self._connection is None:
                self.start()
                self._receive(self._limits.start)
            self._send(("measure", ((shape, kv_format),)))
            found: Result = self._receive(self._limits.measure)
        except Lost as error:
            return Result(error=str(error))
        return found

    def close(self) -> None:
        """End the process."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(5)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(5)
        self._process = self._connection = None

    def _send(self, message: Any) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it is dead: the receive that follows says so
                self._connection.send(message)

    def _receive(self, seconds: float) -> Any:
        if self._connection is None:
            raise Lost("its process is gone")
        try:
            if not self._connection.poll(seconds):
                self._failures += 1
                self._process.kill()  # a kernel that hangs ends with its process, and nothing else ends it
                self.close()
                raise Lost(f"no answer within {seconds:g} s: its process was ended")
            answer, usable = self._connection.recv()
        except (EOFError, OSError):
            self._failures += 1
            self._process.join(5)
            code = self._process.exitcode
            self.close()
            raise Lost(f"its process ended with exit code {code}") from None
        if not usable:
            self._failures += 1
            self.close()
        return answer


def serve(
    connection: Connection,
    make_peer: Callable[[torch.device], Peer],
    make_timer: Callable[[torch.device], Timer],
    device: torch.device,
) -> None:
    """The process: say what was found, then answer until the other end is closed."""
    os.dup2(2, 1)  # whatever a library prints must not end up in somebody's JSON
    if device.type != "cpu":
        torch.cuda.set_device(device)
    peer = make_peer(device)
    connection.send(((peer.version, peer.absent), True))
    if peer.absent:
        return
    timer = make_timer(device)
    while True:
        try:
            kind, problems = connection.recv()
        except EOFError:
            return
        for shape, kv_format in problems:
            answer: Any
            if kind == "measure":
                answer = measure_peer(peer, Problem(shape, kv_format, device), timer)
            else:
                answer = _first_call(peer, shape, kv_format, device)
            usable = _clean(device)
            connection.send((answer, usable))
            if not usable:
                return


def _clean(device: torch.device) -> bool:
    """Give memory back; returns whether the device still works, which it does not after a fault in a kernel."""
    gc.collect()
    if device.type == "cpu":
        return True
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        return False
    return True


def configuration(shape: Shape, kv_format: str) -> str:
    """`32/8/128, p16, q 1, fp8`: what a library may compile a kernel of its own for."""
    return f"{shape.h_q}/{shape.h_k}/{shape.d}, p{shape.page_size}, q {shape.q_len}, {kv_format}"


def configurations(problems: Sequence[tuple[Shape, str]]) -> list[tuple[Shape, str]]:
    """Short problems, one for each combination that a library may compile a kernel of its own for."""
    found: dict[Any, tuple[Shape, str]] = {}
    for shape, kv_format in problems:
        key = (kv_format, shape.h_q // shape.h_k, shape.d, shape.page_size, shape.q_len)
        found.setdefault(key, (replace(shape, lens=(4 * shape.page_size, shape.page_size)), kv_format))
    return list(found.values())


def _first_call(peer: Peer, shape: Shape, kv_format: str, device: torch.device) -> FirstCall:
    began = time.perf_counter()
    error = ""
    try:
        peer.prepare(Problem(shape, kv_format, device))()
        wait(device)
    except Exception as raised:  # noqa: BLE001 - whatever another library raises is its result
        error = first_line(raised)
    return FirstCall(configuration(shape, kv_format), time.perf_counter() - began, error)
