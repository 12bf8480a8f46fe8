"""Peers of the decode benchmark that need no GPU, in a module that a spawned process can import."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch

from benchmarks.shapes import Problem
from benchmarks.timing import Time


class CountingTimer:
    """Runs what it is given, and says how often."""

    def __init__(self) -> None:
        self.timed = 0

    def capture(self, call: Callable[[], object]) -> Callable[[], object]:
        return call

    def time(self, call: Callable[[], object]) -> Time:
        call()
        self.timed += 1
        return Time(10.0, 9.0, 11.0, 1)


def counting_timer(device: torch.device) -> CountingTimer:
    return CountingTimer()


class TorchPeer:
    """A peer that computes the reference, or (`factor`) something else, or raises."""

    version, absent = "1", ""

    def __init__(self, name: str, factor: float = 1.0) -> None:
        self.name, self.factor = name, factor

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        if not self.factor:
            raise RuntimeError("page size 16 is not served\nand more")
        return lambda: self.factor * torch.cat([problem.reference(i)[0] for i in range(len(problem.blocks))])


class MoodyPeer(TorchPeer):
    """What it does depends on the number of query heads: 2 is wrong, 3 raises, 4 ends the process, 5 hangs."""

    version = "2"

    def __init__(self, device: torch.device) -> None:
        super().__init__("moody")
        print("a library's chatter")

    def prepare(self, problem: Problem) -> Callable[[], torch.Tensor]:
        if problem.shape.h_q == 4:
            os._exit(7)
        if problem.shape.h_q == 5:
            time.sleep(60)
        self.factor = {2: 1.2, 3: 0.0}.get(problem.shape.h_q, 1.0)
        return super().prepare(problem)


class AbsentPeer(TorchPeer):
    absent = "ModuleNotFoundError: no such library"

    def __init__(self, device: torch.device) -> None:
        super().__init__("absent")
