"""Forked processes that run shares of a launch beside the one that launched."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, Generic, TypeVar

from cubinery.aot.ptxsim.errors import SimError

T = TypeVar("T")


class Claims:
    """Numbers of shares from 1 on, each handed out once and in order, to any number of processes."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("fork")
        self._next_and_last = context.Array("q", [1, count - 1])

    def __iter__(self) -> Iterator[int]:
        while True:
            with self._next_and_last.get_lock():
                share, last = self._next_and_last[:]
                self._next_and_last[0] = share + 1
            if share > last:
                return
            yield share

    def stop_after(self, share: int) -> None:
        """Later shares need not run: this one has failed."""
        with self._next_and_last.get_lock():
            self._next_and_last[1] = min(self._next_and_last[1], share)


class Helpers(Generic[T]):
    """Up to `count` children, started at most once; each runs `work` to its end and sends back what that gave.

    A child has this process's memory at the same addresses, as it was when it started; what it does there stays there.
    """

    def __init__(self, what: str, count: int, work: Callable[[], Iterable[T]]) -> None:
        self.what, self.count, self.work = what, count, work
        self._children: list[tuple[ForkProcess, Connection[Any, Any]]] = []

    def start(self) -> None:
        """Start them, unless they have been."""
        context = multiprocessing.get_context("fork")
        while len(self._children) < self.count:
            ours, theirs = context.Pipe(duplex=False)
            child = context.Process(target=self._run, args=(theirs,), daemon=True)
            with warnings.catch_warnings():
                # Newer Pythons warn where there are threads (torch's, say): a child uses nothing of theirs.
                warnings.simplefilter("ignore", DeprecationWarning)
                child.start()
            theirs.close()
            self._children.append((child, ours))

    def _run(self, to: Connection[Any, Any]) -> None:
        to.send(list(self.work()))
        to.close()

    def results(self) -> Iterator[T]:
        """What the children's work gave, in their order. Raises SimError where one has died."""
        for child, ours in self._children:
            try:
                yield from ours.recv()
            except EOFError:
                child.join()
                raise SimError(f"{self.what}: a process that simulated it ended with {child.exitcode}") from None

    def end(self) -> None:
        """Kill those that still run."""
        for child, ours in self._children:
            ours.close()
            child.kill()
            child.join()
