"""One launch: CTAs in waves, gangs through segments, until every thread has exited."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.barriers import Parked
from cubinery.aot.ptxsim.deadlock import Deadlocks
from cubinery.aot.ptxsim.dependent import Footprint
from cubinery.aot.ptxsim.faults import DivergedFault, LaunchFault, TrapFault
from cubinery.aot.ptxsim.global_races import GlobalRaces
from cubinery.aot.ptxsim.groups import Groups
from cubinery.aot.ptxsim.heap import keep_freed_memory
from cubinery.aot.ptxsim.independence import Touched
from cubinery.aot.ptxsim.isa.base import DTYPES
from cubinery.aot.ptxsim.isa.tensor_memory import COLUMNS
from cubinery.aot.ptxsim.memory import Block, GlobalMemory, SharedMemory
from cubinery.aot.ptxsim.races import Races
from cubinery.aot.ptxsim.register_pool import RegisterPool
from cubinery.aot.ptxsim.schedule import Counters, Fair, Pending, Ready
from cubinery.aot.ptxsim.special import SpecialRegisters
from cubinery.aot.ptxsim.state import LANES, Gang, join, spread
from cubinery.aot.ptxsim.translate import Compiled, Translation
from cubinery.aot.ptxsim.waits import Tracer, wait_handlers

_LANE_BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Checks:
    """What is looked for beyond bounds, alignment and barriers, which always are."""

    uninitialised: bool = True
    races: bool = True
    tensor_fences: bool = True
    """Where races are looked for: accesses to tensor memory need tcgen05.fence and wait::ld, to the letter of the PTX
    ISA. Code that was generated without them (public examples) runs with this off."""

    @classmethod
    def off(cls) -> Checks:
        return cls(uninitialised=False, races=False, tensor_fences=False)


class Machine(Deadlocks):
    """Runs one launch of one kernel."""

    def __init__(
        self,
        kernel: Translation,
        memory: GlobalMemory,
        params: bytes,
        *,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        cluster: tuple[int, int, int] = (1, 1, 1),
        dynamic_smem: int = 0,
        schedule: Fair | None = None,
        checks: Checks = Checks(),
        clusters: Sequence[int] | None = None,
        share: int = 0,
        supposed: bool = False,
        resident: int = 64,
        tracer: Tracer | None = None,
        progress: Callable[[int, int], None] | None = None,
        predecessor: Footprint | None = None,
        registers: int = 0,
        tensor_columns: int = COLUMNS,
    ) -> None:
        """`params` in the layout of the PTX. At most `resident` CTAs run at a time (whole clusters).

        `clusters` are those of the grid that run, by number, as one share of the launch; all of them where None.
        `supposed`: only supposedly has it nothing to do with the other shares, so that what it touches is recorded.
        `predecessor` is what the launch before touched, where this one may overlap with it. `registers` are those
        of a thread at launch, or 0 where setmaxnreg need not be checked. `tensor_columns` are those of tensor memory
        that a CTA may allocate.
        """
        self.kernel, self.memory, self.checks, self.tracer, self.progress = kernel, memory, checks, tracer, progress
        self.grid, self.block, self.cluster, self.dynamic_smem = grid, block, cluster, dynamic_smem
        self.schedule = schedule or Fair()
        self.tensor_columns = tensor_columns
        self.uninitialised = checks.uninitialised
        padded = np.frombuffer(params + bytes(-len(params) % 8 + 16), np.uint8)
        self.params = Block(padded)
        self.variables = {v.name: memory.variable(kernel.name, v) for v in kernel.static_globals}
        threads = block[0] * block[1] * block[2]
        self.wpc = -(-threads // LANES)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        whole = clusters is None
        if clusters is None:
            clusters = range(grid[0] * grid[1] * grid[2] // self.cluster_size)
        self.coming = deque(clusters)
        self.total, self.finished = len(clusters) * self.cluster_size, 0
        slots = min(self.total, max(resident // self.cluster_size, 1) * self.cluster_size)
        self.shared = SharedMemory(slots, kernel.dynamic_start + dynamic_smem, track=checks.uninitialised)
        local = slots * self.wpc * LANES * kernel.local_size
        self.local = Block(np.full(local, 0xFF, np.uint8), np.zeros(local, np.uint8) if checks.uninitialised else None)
        self.rank = np.arange(slots) % self.cluster_size
        self.share = share
        self.touched = Touched(slots * self.wpc) if supposed else None
        apart = not whole and not supposed
        self.footprint = Footprint() if checks.races and (kernel.lets_go or apart) else None
        self.predecessor, self.waited = predecessor if checks.races else None, np.zeros(slots, bool)
        self.gone = np.zeros(slots, bool)
        self.register_pool = RegisterPool(slots, self.wpc, registers, kernel.warps_wait)
        self.cluster_base = np.arange(slots) - self.rank
        self.block_index = np.zeros((slots, 3), np.int64)
        self.races = (
            Races(
                slots,
                self.wpc,
                self.cluster_size,
                self.shared.stride,
                kernel.unit,
                self.rank,
                self.cluster_base,
                checks.tensor_fences and kernel.uses_tensor_memory,
            )
            if checks.races
            else None
        )
        self.global_races = None if self.races is None else GlobalRaces(self.races, kernel.instrs, grid)
        self.counters = Counters()
        self.specials = SpecialRegisters(self)
        first = np.arange(self.wpc * LANES).reshape(self.wpc, LANES) < threads
        self._threads_of_cta = first
        self.live = np.zeros((slots * self.wpc, LANES), bool)
        self.named, self.mbarriers, self.clusters, self.fence_clocks = {}, {}, {}, {}
        self.fixed_params = {}
        self._maps, self.unfenced, self.groups, self.thread_copies = {}, {}, Groups(), {}
        self.ready: Ready = {}
        self.stuck: dict[int, list[Gang]] = {}
        self.parked: dict[Parked, None] = {}
        self.released: dict[Parked, None] = {}
        self.pending: list[Pending] = []
        self._last: Any = None
        """Warps that ran last, where a tracer wants to know."""
        self._wait_handlers = wait_handlers(self)
        self._undefined = [np.zeros((1, 1), DTYPES[r.type]) if r.type in DTYPES else None for r in kernel.slots]

    # -- running -------------------------------------------------------------------------------

    def run(self, long: float = 0.0, meanwhile: Callable[[], None] | None = None) -> Counters:
        """Run to the end; where that takes more than `long` seconds, call `meanwhile` once, then. Raises Fault."""
        start = time.perf_counter()
        keep_freed_memory()
        with np.errstate(all="ignore"):
            for slot in range(0, len(self.block_index), self.cluster_size):
                self.start_cluster(slot)
            going = True
            if meanwhile is not None:
                while (going := self._step()) and time.perf_counter() < start + long:
                    pass
                if going:
                    meanwhile()
            while going and self._step():
                pass
            self.finish()
        self.counters.seconds = time.perf_counter() - start
        return self.counters

    def _step(self) -> bool:
        """Run one segment; False when all is done."""
        if self.pending:
            self.land(self.schedule.lands_now(self.pending))
        if self.released:
            self.wake()
        if not self.ready:
            if self.pending:
                self.land([self.schedule.lands_late(self.pending)])
                self.wake()
                return True
            if self.finished < self.total:
                self.deadlock()
            return False
        gangs = self.schedule.pick(self.ready)
        number = gangs[0].segment
        gangs += self.stuck.pop(number, ())
        compiled = self.kernel.segments[number]
        gang: Gang | None = join(gangs, compiled.live, len(self.kernel.slots)) if len(gangs) > 1 else gangs[0]
        assert gang is not None
        if compiled.converge is not None or compiled.converge_slot >= 0:
            gang = self._converged(gang, compiled)
            if gang is None:
                return True
        self.counters.instructions += len(gang) * compiled.count
        self.counters.segments += 1
        if self.tracer is not None:
            self.tracer.ran(self, gang, compiled)
            self._last = gang.warps
        result = compiled.run(gang.frame, gang, self)
        segment = compiled.segment
        if segment.wait is not None:
            self.begin_wait(gang, compiled, result)
        elif segment.branch is None:
            self.go_on(gang, segment.follow)
        elif segment.branch.opcode == "bra":
            self._branch(gang, segment.target, segment.follow, result)
        else:
            self.exit(gang, segment.follow, result)
        return True

    def go_on(self, gang: Gang, segment: int) -> None:
        """Let a gang run `segment` next."""
        if segment < 0 or segment >= len(self.kernel.segments):
            raise LaunchFault(f"control runs past the end of {self.kernel.entry.name}")
        gang.segment = segment
        if segment in self.ready:
            self.ready[segment].append(gang)
        else:
            self.ready[segment] = [gang]

    def _branch(self, gang: Gang, target: int, follow: int, predicate: Any) -> None:
        if predicate is None:
            self.go_on(gang, target)
            return
        if gang.mask is None:
            if predicate.all():
                self.go_on(gang, target)
                return
            if not predicate.any():
                self.go_on(gang, follow)
                return
        taken = spread(predicate, len(gang))
        lanes = gang.lanes()
        yes = taken & lanes
        if not yes.any():
            self.go_on(gang, follow)
            return
        no = lanes & ~taken
        if not no.any():
            self.go_on(gang, target)
            return
        other = gang.part(no)
        self.go_on(self.pruned(gang.part(yes), target), target)
        self.go_on(self.pruned(other, follow), follow)

    def pruned(self, gang: Gang, segment: int) -> Gang:
        """Drop registers that are dead at a segment."""
        frame: list[Any] = [None] * len(gang.frame)
        for slot in self.kernel.segments[segment].live:
            frame[slot] = gang.frame[slot]
        gang.frame = frame
        return gang

    def _converged(self, gang: Gang, compiled: Compiled) -> Gang | None:
        """The lanes of a gang whose partners are all here; the others wait for theirs."""
        full = compiled.converge == 0xFFFFFFFF
        if full and gang.mask is None:
            return gang
        lanes, live = gang.lanes(), self.live[gang.warps]
        if full:
            fit = (lanes == live).all(axis=1)[:, None] & lanes
        else:
            members = (
                gang.frame[compiled.converge_slot]
                if compiled.converge_slot >= 0
                else np.full((1, 1), compiled.converge)
            )
            members = np.broadcast_to(members.astype(np.uint64), lanes.shape)
            here = (lanes * _LANE_BITS).sum(axis=1, dtype=np.uint64)[:, None]
            alive = (live * _LANE_BITS).sum(axis=1, dtype=np.uint64)[:, None]
            outside = lanes & ((members & _LANE_BITS) == 0)
            if outside.any():
                self.fail(
                    DivergedFault, "a lane executes it without being in its member mask", gang, compiled.index, outside
                )
            fit = lanes & ((members & alive & ~here) == 0)
        if fit.all() or (fit == lanes).all():
            return gang
        rest = gang.part(lanes & ~fit)
        self.stuck.setdefault(gang.segment, []).append(rest)
        return gang.part(fit) if fit.any() else None

    # -- instructions --------------------------------------------------------------------------

    def special(self, g: Gang, name: str) -> Any:
        """A special register."""
        return self.specials.read(g, name)

    def set_registers(self, g: Gang, mask: Any, k: int, count: Any, increase: bool) -> None:
        """setmaxnreg."""
        counts = spread(count, len(g))
        for row in range(len(g)):
            if mask is None or mask[row].any():
                slot, warp = divmod(int(g.warps[row]), self.wpc)
                if wrong := self.register_pool.set(slot, warp, int(counts[row, 0]), increase):
                    self.fail(LaunchFault, wrong, g.rows([row]), k)

    def trap(self, g: Gang, mask: Any, k: int) -> None:
        if mask is None or mask.any():
            self.fail(TrapFault, "the kernel executed trap", g, k, mask)
