"""What is mutated: decodes of a bundle and kernels of the silicon corpus; and what a mutant does.

A mutant is reported where, under any schedule, the simulator raises a fault or an output is not what it must be.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from unittest.mock import patch

from ptxsim.mutations.operators import MapMutation, Mutation, map_mutations, mutations
from ptxsim.silicon import bundle as corpus_bundle
from ptxsim.silicon.corpus import ARCH, corpus, key, module
from ptxsim.silicon.running import differences, run

from cubinery.aot.problems.paged_decode.mma import decode
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.faults import Fault
from cubinery.aot.ptxsim.schedule import schedule as named_schedule
from cubinery.aot.ptxsim.schedule import series
from cubinery.aot.references import tolerances
from cubinery.aot.verify import Task, subject
from cubinery.runtime.bundle import Bundle
from cubinery.runtime.library import Library
from cubinery.runtime.manifest import TensorMapSpec
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig, MmaConfig, Tcgen05Config

SCHEDULES = tuple(series(4))
"""In this order, until one reports: fair, and one hostile schedule of each kind."""
FURTHER = tuple(series(10)[len(SCHEDULES) :])
"""What a mutant must survive too before the survey counts it as a survivor: two more of each hostile kind, with other
values and other depths of the ring."""
AnyMutation = Mutation | MapMutation


class OutOfTime(Exception):
    """A mutant ran longer than its limit."""


@dataclass
class MutantDriver(SimDriver):
    """A SimDriver whose launches encode tensor maps with one field wrong."""

    break_map: Callable[[TensorMapSpec], TensorMapSpec] = field(default=lambda spec: spec)

    def encode_tensor_map(
        self, spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]
    ) -> bytes:
        return super().encode_tensor_map(self.break_map(spec), address, extents, strides)


class Subject(Protocol):
    """A kernel that passes, and how to see whether a mutant of it does."""

    name: str
    text: str

    def mutations(self) -> Iterator[AnyMutation]:
        """All that can be broken."""

    def judge(self, mutation: AnyMutation | None, schedule: str) -> str:
        """What is reported of a mutant (of the kernel itself where None) under a schedule; empty where nothing is."""


RINGS = {"fair": 3, "late": 4, "delays": 3, "priorities": 4}
"""Stages in use, by the kind of schedule, for even seeds: shallow rings, so that short sequences go around them. Both
an odd and an even number: with an odd one a stage holds K and V by turns. Odd seeds have the other."""
SPLITS = (4, 17)
"""Of the second and third decode under `late`: the most that a warp merges several rows of, and over half a warp."""


def ring(schedule: str) -> int:
    """Stages in use under a schedule."""
    kind, _, seed = schedule.partition(":")
    return RINGS[kind] if int(seed or 0) % 2 == 0 else 7 - RINGS[kind]


def problems(config: DecodeConfig, schedule: str) -> list[tuple[tuple[int, ...], int]]:
    """(lengths, splits) of the decodes that judge a mutant under a schedule.

    Two chunks of four stages of K and V go around the ring twice; the mask of several tokens reaches over the last
    two stages. Chunks of two tiles go around the ring of the tcgen05 kernel, and of four around its widened blocks.
    """
    late = schedule.startswith("late")
    if isinstance(config, Tcgen05Config):
        return [((2 * tiles * TILE_KEYS - 40, 0, 77), 2) for tiles in ((2, 4) if late else (2,))]
    assert isinstance(config, MmaConfig)
    found: list[tuple[tuple[int, ...], int]] = [((7 * config.stage_keys + 2, 0, 77), 2)]
    if late:
        found += [((splits * TILE_KEYS, 0, 77), splits) for splits in SPLITS]
    return found


class Mutants:
    """Makes the drivers of mutants of one artifact, and keeps the last: its translation serves every schedule."""

    def __init__(self, arch: str, root: Path, target: str, text: str) -> None:
        self._arch, self._root, self._target, self._text = arch, root, target, text
        self._last: tuple[AnyMutation | None, MutantDriver] | None = None

    def driver(self, mutation: AnyMutation | None, schedule: str) -> MutantDriver:
        """A driver that runs the mutant (the kernel itself where None) under a schedule."""
        if self._last is None or self._last[0] is not mutation:
            text = mutation.apply(self._text) if isinstance(mutation, Mutation) else self._text
            driver = MutantDriver(self._arch, [self._root], texts={self._target: text})
            if isinstance(mutation, MapMutation):
                driver.break_map = partial(_broken, mutation)
            self._last = mutation, driver
        driver = self._last[1]
        driver.schedule = partial(named_schedule, schedule)
        return driver


def _broken(mutation: MapMutation, spec: TensorMapSpec) -> TensorMapSpec:
    return mutation.change(spec) if spec.name == mutation.map else spec


class Decode:
    """A paged decode, which merges the splits of its sequences. `wanted`: the classes of mutations, all by default."""

    def __init__(self, root: Path, arch: str, key: str, wanted: Callable[[str], bool] = lambda _: True) -> None:
        self._wanted = wanted
        self.root, self.arch, self.name = root, arch, key
        bundle = Bundle.open(root)
        artifact = next(a for a in bundle.manifest.artifacts if a.key == key)
        self.text = bundle.read(artifact.emitted["ptx"]).decode()
        self._mutants = Mutants(arch, root, key, self.text)
        self.maps = [spec for kernel in artifact.kernels for spec in kernel.tensor_maps]

    def mutations(self) -> Iterator[AnyMutation]:
        found = chain(mutations(self.text), *map(map_mutations, self.maps))
        yield from (m for m in found if self._wanted(m.kind))

    def judge(self, mutation: AnyMutation | None, schedule: str) -> str:
        driver = self._mutants.driver(mutation, schedule)
        try:
            # Other values under each schedule: what is wrong for few values gets several chances.
            seed = 7 + sum(schedule.encode()) % 100
            task = Task(self.root, self.arch, self.name, schedule)
            with (
                subject(driver, task, seed) as called,
                patch.object(MmaConfig, "ring_depth", lambda *_: ring(schedule)),
            ):
                config = called.config
                assert isinstance(config, DecodeConfig)
                for keys, splits in problems(config, schedule):
                    found = decode(called, keys=keys, splits=splits)
                    if not found.within(tolerances.paged_decode(config.impl, config.q_dtype)):
                        return f"far from the reference: {found}"
        except Fault as error:
            return str(error)
        return ""


_PATIENCE = re.compile(r"@done bra READY; add\.u32 tries.*?trap;", re.DOTALL)
"""The corpus gives up after so many tries, lest a GPU hang; a schedule may be later than that."""


class Corpus:
    """One entry of the silicon corpus: the output must be that of the unbroken kernel."""

    def __init__(self, root: Path, entry: str) -> None:
        self.root, self.entry, self.name = root, corpus()[entry], entry
        self.text = _PATIENCE.sub("@!done bra WAIT;", module(self.entry))
        self._mutants = Mutants(ARCH, root, key(entry), self.text)
        driver = self._mutants.driver(None, "fair:0")
        self.expected = run(self.entry, Library.open(root, driver=driver), driver)

    def mutations(self) -> Iterator[AnyMutation]:
        yield from mutations(self.text)
        for spec in corpus_bundle.record(self.entry).tensor_maps:
            yield from map_mutations(spec)

    def judge(self, mutation: AnyMutation | None, schedule: str) -> str:
        driver = self._mutants.driver(mutation, schedule)
        try:
            output = run(self.entry, Library.open(self.root, driver=driver), driver)
        except Fault as error:
            return str(error)
        return "; ".join(differences(self.entry, output, self.expected))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutant."""

    subject: str
    mutation: AnyMutation
    schedule: str
    """The first schedule that reported it; empty where none did."""
    report: str
    seconds: float

    @property
    def survived(self) -> bool:
        return not self.schedule


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in what takes more time of the processor."""

    def ring(_number: int, _frame: FrameType | None) -> Any:
        raise OutOfTime

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def examine(
    subject: Subject, mutation: AnyMutation, schedules: Sequence[str] = SCHEDULES, seconds: float = 90.0
) -> Verdict:
    """Run a mutant under schedules until one reports it. A mutant that never ends counts as reported."""
    start = time.perf_counter()
    for schedule in schedules:
        try:
            with limit(seconds):
                report = subject.judge(mutation, schedule)
        except OutOfTime:
            report = f"OutOfTime: still running after {seconds:.0f} s"
        if report:
            return Verdict(subject.name, mutation, schedule, report, time.perf_counter() - start)
    return Verdict(subject.name, mutation, "", "", time.perf_counter() - start)
