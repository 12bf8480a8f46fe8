"""One launch: CTAs in waves, gangs through segments, until every thread has exited."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cubinery.aot.ptxsim.barriers import Barriers, Parked
from cubinery.aot.ptxsim.bulk import BulkCopies
from cubinery.aot.ptxsim.dependent import Footprint
from cubinery.aot.ptxsim.faults import DeadlockFault, DivergedFault, LaunchFault, RaceFault, TransactionFault, TrapFault
from cubinery.aot.ptxsim.groups import Groups
from cubinery.aot.ptxsim.heap import keep_freed_memory
from cubinery.aot.ptxsim.isa.base import DTYPES, Register
from cubinery.aot.ptxsim.memory import Block, GlobalMemory, SharedMemory
from cubinery.aot.ptxsim.program import results
from cubinery.aot.ptxsim.races import Races
from cubinery.aot.ptxsim.schedule import Counters, Fair, Pending, Ready
from cubinery.aot.ptxsim.special import SpecialRegisters
from cubinery.aot.ptxsim.state import LANES, Gang, join, packed, spread
from cubinery.aot.ptxsim.tensorcore import TensorCore
from cubinery.aot.ptxsim.translate import Compiled, Translation

_LANE_BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class Checks:
    """What is looked for beyond bounds, alignment and barriers, which always are."""

    uninitialised: bool = True
    races: bool = True

    @classmethod
    def off(cls) -> Checks:
        return cls(uninitialised=False, races=False)


class Tracer(Protocol):
    """Told of every segment that runs."""

    def ran(self, machine: Machine, gang: Gang, compiled: Compiled) -> None: ...

    def waits(self, machine: Machine, gang: Gang, why: str) -> None: ...

    def woke(self, machine: Machine, gang: Gang, by: Any) -> None: ...


class Machine(TensorCore, BulkCopies, Barriers):
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
        resident: int = 64,
        tracer: Tracer | None = None,
        progress: Callable[[int, int], None] | None = None,
        predecessor: Footprint | None = None,
    ) -> None:
        """`params` in the layout of the PTX. At most `resident` CTAs run at a time (whole clusters).

        `predecessor` is what the launch before touched, where this one may overlap with it.
        """
        self.kernel, self.memory, self.checks, self.tracer, self.progress = kernel, memory, checks, tracer, progress
        self.grid, self.block, self.cluster, self.dynamic_smem = grid, block, cluster, dynamic_smem
        self.schedule = schedule or Fair()
        self.uninitialised = checks.uninitialised
        padded = np.frombuffer(params + bytes(-len(params) % 8 + 16), np.uint8)
        self.params = Block(padded)
        self.variables = {v.name: memory.variable(kernel.name, v) for v in kernel.static_globals}
        threads = block[0] * block[1] * block[2]
        self.wpc = -(-threads // LANES)
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.total = grid[0] * grid[1] * grid[2]
        slots = min(self.total, max(resident // self.cluster_size, 1) * self.cluster_size)
        self.shared = SharedMemory(slots, kernel.dynamic_start + dynamic_smem, track=checks.uninitialised)
        local = slots * self.wpc * LANES * kernel.local_size
        self.local = Block(np.full(local, 0xFF, np.uint8), np.zeros(local, np.uint8) if checks.uninitialised else None)
        self.rank = np.arange(slots) % self.cluster_size
        lets_go = any(i.opcode == "griddepcontrol" and "launch_dependents" in i.modifiers for i in kernel.instrs)
        self.footprint = Footprint() if checks.races and lets_go else None
        self.predecessor, self.waited = predecessor if checks.races else None, np.zeros(slots, bool)
        self.cluster_base = np.arange(slots) - self.rank
        self.block_index = np.zeros((slots, 3), np.int64)
        self.races = (
            Races(slots, self.wpc, self.cluster_size, self.shared.stride, kernel.unit, self.rank, self.cluster_base)
            if checks.races
            else None
        )
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
        self.next_cta = self.finished = 0
        self._last: Any = None
        """Warps that ran last, where a tracer wants to know."""
        self._wait_handlers = _handlers(self)
        self._undefined = [np.zeros((1, 1), DTYPES[r.type]) if r.type in DTYPES else None for r in kernel.slots]

    # -- running -------------------------------------------------------------------------------

    def run(self) -> Counters:
        """Run to the end. Raises Fault."""
        start = time.perf_counter()
        keep_freed_memory()
        with np.errstate(all="ignore"):
            for slot in range(0, len(self.block_index), self.cluster_size):
                self._start_cluster(slot)
            while self._step():
                pass
            self._finish()
        self.counters.seconds = time.perf_counter() - start
        return self.counters

    def _step(self) -> bool:
        """Run one segment; False when all is done."""
        if self.pending:
            self._land(self.schedule.lands_now(self.pending))
        if self.released:
            self._wake()
        if not self.ready:
            if self.pending:
                self._land([self.schedule.lands_late(self.pending)])
                self._wake()
                return True
            if self.finished < self.total:
                self._deadlock()
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
            self._wait(gang, compiled, result)
        elif segment.branch is None:
            self.go_on(gang, segment.follow)
        elif segment.branch.opcode == "bra":
            self._branch(gang, segment.target, segment.follow, result)
        else:
            self._exit(gang, segment.follow, result)
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
        self.go_on(self._pruned(gang.part(yes), target), target)
        self.go_on(self._pruned(other, follow), follow)

    def _pruned(self, gang: Gang, segment: int) -> Gang:
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

    # -- waiting -------------------------------------------------------------------------------

    def _wait(self, gang: Gang, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        segment = compiled.segment
        instr = segment.wait
        assert instr is not None
        k = self.kernel.index(instr)
        guard, rest = operands[0], operands[1:]
        if guard is not None and not guard.all():
            through = spread(guard, len(gang))
            lanes = gang.lanes()
            stays, passes = lanes & through, lanes & ~through
            if passes.any():
                self.go_on(gang.part(passes), segment.follow)
                if not stays.any():
                    return
                rows = stays.any(axis=1)
                rest = tuple(_rows(value, rows, len(gang)) for value in rest)
                gang = gang.part(stays)
        self._wait_handlers[instr.opcode](gang, k, compiled, rest)

    def park(self, gang: Gang, then: int, k: int, why: str) -> Parked:
        parked = Parked(gang, then, k, why)
        self.parked[parked] = None
        if self.tracer is not None:
            self.tracer.waits(self, gang, why)
        return parked

    def release(self, parked: Parked, row: int) -> None:
        parked.go[row] = True
        self.released[parked] = None

    def _wake(self) -> None:
        """Let released rows go on."""
        released, self.released = self.released, {}
        for parked in released:
            go = parked.go
            parked.go = np.zeros(len(go), bool)
            gang = parked.gang if go.all() else parked.gang.rows(go)
            parked.left &= ~go
            if not parked.left.any():
                del self.parked[parked]
            if self.tracer is not None:
                self.tracer.woke(self, gang, self._last)
            self.go_on(self._pruned(gang, parked.then), parked.then)

    def peek_fails(self) -> bool:
        return self.schedule.peek_fails()

    def issue(self, queue: int, slot: int, land: Callable[[], None]) -> None:
        """Hand asynchronous work to the schedule."""
        self.pending.append(Pending(queue, slot, land))

    def _land(self, indices: list[int]) -> None:
        if not indices:
            return
        work = [self.pending[i] for i in indices]
        chosen = set(indices)
        self.pending = [p for i, p in enumerate(self.pending) if i not in chosen]
        for pending in work:
            pending.land()

    # -- CTAs ----------------------------------------------------------------------------------

    def _start_cluster(self, slot: int) -> None:
        """Start the next cluster in the slots from `slot` on."""
        index = self.next_cta // self.cluster_size
        counts = [n // c for n, c in zip(self.grid, self.cluster, strict=True)]
        at = (index % counts[0], index // counts[0] % counts[1], index // (counts[0] * counts[1]))
        for rank in range(self.cluster_size):
            within = (
                rank % self.cluster[0],
                rank // self.cluster[0] % self.cluster[1],
                rank // (self.cluster[0] * self.cluster[1]),
            )
            self.block_index[slot + rank] = [a * c + w for a, c, w in zip(at, self.cluster, within, strict=True)]
        self.next_cta += self.cluster_size
        self.waited[slot : slot + self.cluster_size] = False
        first, count = slot * self.wpc, self.cluster_size * self.wpc
        self.live[first : first + count] = np.tile(self._threads_of_cta, (self.cluster_size, 1))
        warps = np.arange(first, first + count)
        for warp in warps.tolist():
            self.fence_clocks.pop(warp, None)
        frame = list(self._undefined)
        gang = Gang(0, warps, (warps // self.wpc)[:, None], packed(self.live[warps].copy()), frame)
        self.go_on(gang, 0)

    def _exit(self, gang: Gang, follow: int, predicate: Any) -> None:
        leaves = gang.lanes()
        if predicate is not None:
            through = spread(predicate, len(gang))
            stays = leaves & ~through
            if stays.any():
                self.go_on(gang.part(stays), follow)
            leaves = leaves & through
        self.live[gang.warps] &= ~leaves
        for slot in np.unique(gang.cta).tolist():
            alive = self.live[slot * self.wpc : (slot + 1) * self.wpc].any()
            if alive:
                self.barriers_of_exited(slot)
            base = int(self.cluster_base[slot])
            self.cluster_complete(base)
            if not self.live[base * self.wpc : (base + self.cluster_size) * self.wpc].any():
                self._cluster_done(base)

    def _cluster_done(self, base: int) -> None:
        """All threads of a cluster have exited: check what they leave, and start the next one there."""
        for _ in range(len(self.pending)):  # copies out of shared memory may still read it
            self._land(
                [i for i, p in enumerate(self.pending) if base <= p.slot < base + self.cluster_size and p.queue][:1]
            )
        lost = [p for p in self.pending if base <= p.slot < base + self.cluster_size]
        if lost:
            block = tuple(self.block_index[lost[0].slot].tolist())
            detail = f"block {block} exits while {len(lost)} copies to its shared memory are under way: nobody waited"
            raise TransactionFault(detail, self.place(None, len(self.kernel.instrs) - 1))
        for slot in range(base, base + self.cluster_size):
            self._abandoned(slot)
            self._leftovers(slot)
            self.tensor_exit(slot)
            if self.next_cta < self.total:
                self.shared.reset(slot)
                if self.races is not None:
                    self.races.reset(slot)
        self.clusters.pop(base, None)
        self.finished += self.cluster_size
        if self.progress is not None:
            self.progress(self.finished, self.total)
        if self.next_cta < self.total:
            self._start_cluster(base)

    def _abandoned(self, slot: int) -> None:
        """Copies out of shared memory read it until they are waited for: a CTA must not exit before."""
        for warp in range(slot * self.wpc, (slot + 1) * self.wpc):
            lost = self.groups.abandoned(("bulk", warp))
            if lost and self.races is not None:
                block = tuple(self.block_index[slot].tolist())
                detail = (
                    f"block {block} exits while bulk copies of warp {warp % self.wpc} may still read its shared "
                    f"memory: {lost} groups without cp.async.bulk.wait_group"
                )
                raise RaceFault(detail, self.place(None, len(self.kernel.instrs) - 1))

    def _leftovers(self, slot: int) -> None:
        last = len(self.kernel.instrs) - 1
        for key in [key for key in self.mbarriers if key[0] == slot]:
            barrier = self.mbarriers.pop(key)
            if barrier.tx:
                place = self.place(None, last)
                detail = (
                    f"the mbarrier at {key[1]:#x} of block {tuple(self.block_index[slot].tolist())} ends with a "
                    f"transaction count of {barrier.tx} bytes in phase {barrier.phase}: "
                    "expected and copied bytes differ"
                )
                raise TransactionFault(detail, place)
        for key in [key for key in self.named if key[0] == slot]:
            del self.named[key]

    def _finish(self) -> None:
        while self.pending:
            self._land([0])

    # -- reports -------------------------------------------------------------------------------

    def _deadlock(self) -> None:
        """Say who waits for what."""
        lines: list[str] = []
        diverged = False
        waiting = {warp for parked in self.parked for warp in parked.gang.warps[parked.left].tolist()}
        for number, gangs in self.stuck.items():
            compiled = self.kernel.segments[number]
            for gang in gangs:
                # Where the missing lanes wait at a barrier, that barrier is to blame.
                diverged = diverged or not waiting.issuperset(gang.warps.tolist())
                lanes = gang.lanes()[0]
                lines.append(
                    f"{self._who(gang, np.ones(len(gang), bool))}: lanes {_lane_list(lanes)} wait for the rest of "
                    f"their warp at line {compiled.segment.converge_line}"
                )
        for parked in self.parked:
            instr = self.kernel.instrs[parked.k]
            lines.append(f"{self._who(parked.gang, parked.left)} wait for {parked.why} at line {instr.line}")
        lines += self._barrier_states()
        kind = DivergedFault if diverged else DeadlockFault
        k = self.kernel.segments[next(iter(self.stuck))].index if diverged else next(iter(self.parked)).k
        shown = "; ".join(lines[:24]) + (f"; and {len(lines) - 24} more" if len(lines) > 24 else "")
        raise kind(f"no warp can go on: {shown}", self.place(None, k))

    def _barrier_states(self) -> list[str]:
        lines = []
        for (slot, address), barrier in self.mbarriers.items():
            if barrier.waiting:
                missing = f"{barrier.pending} of {barrier.count} arrivals and {barrier.tx} bytes"
                block = tuple(self.block_index[slot].tolist())
                lines.append(f"the mbarrier at {address:#x} of block {block}, phase {barrier.phase}, misses {missing}")
        for (slot, number), named in self.named.items():
            block = tuple(self.block_index[slot].tolist())
            lines.append(f"barrier {number} of block {block} has {named.arrived} of {named.expected} threads")
        return lines

    def _who(self, gang: Gang, rows: Any) -> str:
        names = []
        for slot in np.unique(gang.cta[rows]).tolist()[:4]:
            warps = (gang.warps[rows & (gang.cta[:, 0] == slot)] % self.wpc).tolist()
            block = tuple(self.block_index[slot].tolist())
            names.append(f"block {block} warps {', '.join(map(str, warps))}")
        return " and ".join(names)

    # -- instructions --------------------------------------------------------------------------

    def special(self, g: Gang, name: str) -> Any:
        """A special register."""
        return self.specials.read(g, name)

    def fence(self, g: Gang, _mask: Any, _k: int, kind: str) -> None:
        """fence, membar: what the checks know of the async proxy, of mbarriers, and of relaxed arrivals to come."""
        if self.races is None:
            return
        if kind != "async":
            for slot, warp in zip(g.cta[:, 0].tolist(), g.warps.tolist(), strict=True):
                self.fence_clocks[warp] = self.races.clock[slot, warp % self.wpc].copy()
        if not kind:
            return
        if kind == "async":
            self.races.fence_async(g)
        for warp in g.warps.tolist():
            for barrier in self.unfenced.pop(warp, ()):
                barrier.fenced = True

    def trap(self, g: Gang, mask: Any, k: int) -> None:
        if mask is None or mask.any():
            self.fail(TrapFault, "the kernel executed trap", g, k, mask)


def _rows(value: Any, rows: Any, count: int) -> Any:
    return value[rows] if isinstance(value, np.ndarray) and value.shape[0] == count else value


def _lane_list(lanes: Any) -> str:
    numbers = np.flatnonzero(lanes).tolist()
    return ", ".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]} to {numbers[-1]} ({len(numbers)})"


def _handlers(m: Machine) -> dict[str, Callable[[Gang, int, Compiled, tuple[Any, ...]], None]]:
    """What happens at the instruction that ends a segment, by opcode."""

    def result_slot(compiled: Compiled) -> int:
        assert compiled.segment.wait is not None
        written = results(compiled.segment.wait)
        target = written[0] if written else None
        return m.kernel.slots[target] if isinstance(target, Register) else -1

    def barrier(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        if not operands:
            m.cluster_wait(g, k, compiled.segment.follow)
            return
        number, count, vote = operands
        m.barrier_sync(g, k, compiled.segment.follow, number, count, vote, result_slot(compiled))

    def mbarrier(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        address, phase = operands
        words = m.kernel.instrs[k].modifiers
        slot, spin = result_slot(compiled), compiled.segment.spin
        m.try_wait(g, k, compiled.segment.follow, address, phase, "parity" in words, slot, spin)

    def groups(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        kind, most = operands
        if "wait_all" in m.kernel.instrs[k].modifiers:  # copies of no group yet count too
            m.commit_group(g, g.mask, kind)
        m.wait_group(g, k, compiled.segment.follow, kind, most)

    def passes(g: Gang, k: int, compiled: Compiled, _operands: tuple[Any, ...]) -> None:
        if m.kernel.instrs[k].opcode == "griddepcontrol":
            m.waited[g.cta] = True
        m.go_on(g, compiled.segment.follow)  # launches follow each other, so there is nothing to wait for

    def tensor(g: Gang, k: int, compiled: Compiled, operands: tuple[Any, ...]) -> None:
        if m.kernel.instrs[k].modifiers[0] == "alloc":
            m.tensor_alloc(g, k, compiled.segment.follow, *operands)
        else:
            m.tensor_wait(g, k, compiled.segment.follow, *operands)

    return {
        "bar": barrier,
        "barrier": barrier,
        "mbarrier": mbarrier,
        "cp": groups,
        "griddepcontrol": passes,
        "nanosleep": passes,
        "tcgen05": tensor,
        "wgmma": groups,
    }
