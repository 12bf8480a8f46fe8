"""Barriers: named barriers of a CTA, cluster barriers and mbarriers, and the warps that wait at them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.arrivals import ArrivalOrder, Arrivals
from cubinery.aot.ptxsim.faults import BarrierFault, DivergedFault, Fault
from cubinery.aot.ptxsim.isa.mbarrier import MAX_COUNT, State
from cubinery.aot.ptxsim.memory import RANK_SHIFT
from cubinery.aot.ptxsim.memory_order import CLUSTER
from cubinery.aot.ptxsim.state import LANES, Gang, spread

MAX_BARRIERS = 16
TRUE = np.ones((1, 1), bool)


class Parked:
    """A gang of which some or all rows wait; they go on at segment `then`."""

    __slots__ = ("gang", "go", "k", "left", "then", "why")

    def __init__(self, gang: Gang, then: int, k: int, why: str) -> None:
        self.gang, self.then, self.k, self.why = gang, then, k, why
        self.left = np.ones(len(gang), bool)
        """Rows that still wait."""
        self.go = np.zeros(len(gang), bool)
        """Rows released since the machine last looked."""


@dataclass(slots=True)
class Named:
    """A named barrier of one CTA while threads are at it."""

    expected: int
    k: int
    arrived: int = 0
    waiting: list[tuple[Parked, int]] = field(default_factory=list)
    warps: list[int] = field(default_factory=list)
    votes: list[Any] = field(default_factory=list)
    whole: bool = False
    """No thread count was given: all threads of the CTA take part."""
    known: Any = None


@dataclass(slots=True)
class MBarrier(State):
    """One mbarrier object."""

    waiting: list[tuple[Parked, int, int]] = field(default_factory=list)
    """(gang, row, phase that must complete)."""
    known: Any = None
    """What arrivals of the current phase published."""
    published: Any = None
    """What the last complete phase published."""
    fenced: bool = False
    """Its initialisation is visible to the async proxy and to other CTAs."""
    arrivals: Arrivals = field(default_factory=Arrivals)


class Barriers(ArrivalOrder):
    """Barriers as generated code sees them. Machine derives from this."""

    named: dict[tuple[int, int], Named]
    mbarriers: dict[tuple[int, int], MBarrier]
    clusters: dict[int, ClusterBarrier]
    live: Any
    """Lanes that have not exited, by resident warp: bool (warps, 32)."""

    # -- provided by the machine ---------------------------------------------------------------

    def go_on(self, gang: Gang, segment: int) -> None:
        raise NotImplementedError

    def park(self, gang: Gang, then: int, k: int, why: str) -> Parked:
        raise NotImplementedError

    def release(self, parked: Parked, row: int) -> None:
        raise NotImplementedError

    # -- bar, barrier --------------------------------------------------------------------------

    def _barrier_terms(self, g: Gang, k: int, number: Any, count: Any) -> tuple[Any, Any]:
        """Number and expected threads (0: all) of each row."""
        first = spread(number, len(g))[:, 0].astype(np.int64)
        threads = np.zeros(len(g), np.int64)
        if count is not None:
            threads = spread(count, len(g))[:, 0].astype(np.int64)
            if (threads % LANES).any() or (threads < LANES).any():
                self.fail(BarrierFault, f"thread count {int(threads[0])}: expected a multiple of {LANES}", g, k)
        if (first >= MAX_BARRIERS).any():
            self.fail(BarrierFault, f"barrier {int(first.max())}: expected 0 to {MAX_BARRIERS - 1}", g, k)
        return first, threads

    def _whole_warps(self, g: Gang, mask: Any, k: int) -> None:
        """bar counts whole warps: a warp of which only some lanes take part has diverged."""
        if mask is None:
            return
        partial = (mask != self.live[g.warps]).any(axis=1) & mask.any(axis=1)
        if partial.any():
            self.fail(DivergedFault, "not all lanes of the warp execute it", g, k, mask & partial[:, None])

    def warp_barrier(self, g: Gang, mask: Any) -> None:
        """bar.warp.sync: the machine has brought the lanes together already; now they know of each other."""
        if self.races is not None:
            self.races.converge(g, g.mask if mask is None else mask)

    def barrier_arrive(self, g: Gang, mask: Any, k: int, number: Any, count: Any) -> None:
        """bar.arrive."""
        self._whole_warps(g, mask, k)
        numbers, threads = self._barrier_terms(g, k, number, count)
        for row in range(len(g)):
            if mask is None or mask[row].any():
                self._arrive(g, row, k, int(numbers[row]), int(threads[row]), None, None)

    def barrier_sync(self, g: Gang, k: int, then: int, number: Any, count: Any, vote: Any, slot: int) -> None:
        """bar.sync and bar.red: the whole gang waits; complete barriers release their warps."""
        self._whole_warps(g, g.mask, k)
        numbers, threads = self._barrier_terms(g, k, number, count)
        parked = self.park(g, then, k, f"barrier {int(numbers[0])}")
        votes = None if vote is None else spread(vote, len(g))
        if votes is not None:
            g.frame[slot] = np.zeros((len(g), LANES), np.uint32)
        for row in range(len(g)):
            self._arrive(
                g, row, k, int(numbers[row]), int(threads[row]), parked, None if votes is None else (votes[row], slot)
            )

    def _arrive(self, g: Gang, row: int, k: int, number: int, threads: int, parked: Parked | None, vote: Any) -> None:
        cta, warp = int(g.cta[row, 0]), int(g.warps[row])
        key = (cta, number)
        barrier = self.named.get(key)
        if barrier is None:
            barrier = self.named[key] = Named(threads or self._threads(cta), k, whole=not threads)
            if self.races is not None:
                barrier.known = self.races.fresh()
        elif barrier.expected != (threads or barrier.expected) or barrier.whole != (not threads):
            given = threads or self._threads(cta)
            self.fail(
                BarrierFault,
                f"barrier {number} with {given} threads, while warps wait there for {barrier.expected}",
                g, k, _one(g, row),
            )  # fmt: skip
        if warp in barrier.warps:
            detail = f"arrives twice at barrier {number} in one phase: it can complete without a warp it stands for"
            self.fail(BarrierFault, detail, g, k, _one(g, row))
        barrier.warps.append(warp)
        barrier.arrived += LANES
        if self.races is not None:
            self.races.release(barrier.known, cta, warp % self.wpc)
        if parked is not None:
            barrier.waiting.append((parked, row))
        if vote is not None:
            barrier.votes.append(vote)
        self._complete(key, barrier, g, k)

    def _threads(self, cta: int) -> int:
        """Threads of a CTA that have not exited, in whole warps."""
        warps = self.live[cta * self.wpc : (cta + 1) * self.wpc].any(axis=1)
        return int(warps.sum()) * LANES

    def _complete(self, key: tuple[int, int], barrier: Named, g: Gang | None, k: int) -> None:
        if barrier.arrived < barrier.expected:
            return
        if barrier.arrived > barrier.expected:
            self.fail(
                BarrierFault, f"barrier {key[1]}: {barrier.arrived} threads arrived, {barrier.expected} expected", g, k
            )
        del self.named[key]
        if barrier.votes:
            self._reduce_votes(barrier)
        for parked, row in barrier.waiting:
            if self.races is not None:
                self.races.acquire(barrier.known, key[0], int(parked.gang.warps[row]) % self.wpc)
            self.release(parked, row)

    def _reduce_votes(self, barrier: Named) -> None:
        """bar.red: popc, and, or over the predicates of all threads."""
        every = np.stack([vote for vote, _ in barrier.votes])
        words = self.kernel.instrs[barrier.k].modifiers
        for (parked, row), (_, slot) in zip(barrier.waiting, barrier.votes, strict=True):
            live = self.live[parked.gang.warps[row]]
            value: Any = (
                every[:, live].sum() if "popc" in words else every[:, live].all() if "and" in words else every.any()
            )
            old = parked.gang.frame[slot].copy()
            old[row] = value
            parked.gang.frame[slot] = old if "popc" in words else old.astype(bool)

    def barriers_of_exited(self, cta: int) -> None:
        """Warps of a CTA exited: barriers of all its threads expect fewer."""
        for key in [key for key in self.named if key[0] == cta]:
            barrier = self.named[key]
            if barrier.whole:
                barrier.expected = self._threads(cta)
                if barrier.expected:
                    self._complete(key, barrier, None, barrier.k)

    # -- cluster barriers ----------------------------------------------------------------------

    def cluster_arrive(self, g: Gang, mask: Any, k: int, release: bool) -> None:
        """barrier.cluster.arrive: each thread for itself, so that lanes of a warp may come one after the other."""
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        for row in range(len(g)):
            if lanes := _bits(active[row]):
                base = int(self.cluster_base[int(g.cta[row, 0])])
                state = self.clusters.setdefault(base, ClusterBarrier())
                warp = int(g.warps[row])
                if state.arrived.get(warp, 0) & lanes:
                    self.fail(BarrierFault, "arrives twice at the cluster barrier", g, k, _one(g, row))
                state.arrived[warp] = state.arrived.get(warp, 0) | lanes
                fenced = None if release else self.fenced_by_each(warp, active[row], CLUSTER)
                if self.races is not None and (release or fenced is not None):
                    if state.known is None:
                        state.known = self.races.fresh()
                    if release:
                        self.races.release(state.known, int(g.cta[row, 0]), warp % self.wpc, active[row])
                    else:  # relaxed, after a fence: what came before the fence is ordered
                        np.maximum(state.known, fenced, out=state.known)  # type: ignore[arg-type]
                self.cluster_complete(base)

    def cluster_wait(self, g: Gang, k: int, then: int) -> None:
        """barrier.cluster.wait: until every live thread of the cluster has arrived."""
        parked = self.park(g, then, k, "the cluster barrier")
        for row in range(len(g)):
            base = int(self.cluster_base[int(g.cta[row, 0])])
            state = self.clusters.setdefault(base, ClusterBarrier())
            warp, lanes = int(g.warps[row]), _bits(g.lanes()[row])
            if not lanes & ~state.passed.get(warp, 0):  # its phase is complete
                state.passed[warp] &= ~lanes
                self._cluster_pass(state, parked, row)
            elif not lanes & ~state.arrived.get(warp, 0):
                state.waiting.append((parked, row))
            else:
                self.fail(BarrierFault, "waits at the cluster barrier without having arrived", g, k, _one(g, row))

    def _cluster_pass(self, state: ClusterBarrier, parked: Parked, row: int) -> None:
        if self.races is not None and state.published is not None:
            g = parked.gang
            self.races.acquire(state.published, int(g.cta[row, 0]), int(g.warps[row]) % self.wpc)
        self.release(parked, row)

    def cluster_complete(self, base: int) -> None:
        """Release the cluster's warps if all that live have arrived."""
        state = self.clusters.get(base)
        if state is None:
            return
        first, last = base * self.wpc, (base + self.cluster_size) * self.wpc
        alive = {warp: _bits(self.live[warp]) for warp in range(first, last) if self.live[warp].any()}
        if not alive or any(lanes & ~state.arrived.get(warp, 0) for warp, lanes in alive.items()):
            return
        waiting = state.waiting
        state.published, state.known = state.known, None
        state.waiting, state.arrived, state.passed = [], {}, alive
        for parked, row in waiting:
            state.passed[int(parked.gang.warps[row])] &= ~_bits(parked.gang.lanes()[row])
            self._cluster_pass(state, parked, row)

    # -- mbarriers -----------------------------------------------------------------------------

    def mbarrier_at(self, g: Gang, row: int, lane: int, k: int, address: int) -> tuple[tuple[int, int], MBarrier]:
        """The object at a shared address of a row's CTA (or of its cluster)."""
        key = self.mbarrier_key(int(g.cta[row, 0]), address)
        found = self.mbarriers.get(key)
        if found is None:
            where = _one(g, row, lane)
            self.fail(BarrierFault, f"no mbarrier was initialised at shared address {address:#x}", g, k, where)
        return key, found

    def mbarrier_key(self, cta: int, address: int) -> tuple[int, int]:
        """(CTA slot, address in it); the cluster rank is in the address."""
        if self.cluster_size == 1:
            return cta, address
        return int(self.cluster_base[cta]) + (address >> RANK_SHIFT), address & ((1 << RANK_SHIFT) - 1)

    def mbarrier(
        self, g: Gang, mask: Any, k: int, operation: str, address: Any, count: Any, tx: Any, complete: bool = True
    ) -> Any:
        """init, inval, arrive, arrive_drop, expect_tx, complete_tx; arrivals return a state token."""
        shape = (len(g), LANES)
        self._check_aligned(g, mask, k, address, 8)
        self.shared_index(g, mask, k, address, 8)
        address = spread(address, len(g))
        count = None if count is None else spread(count, len(g))
        tx = None if tx is None else spread(tx, len(g))
        state = np.zeros(shape, np.uint64)
        active = np.ones(shape, bool) if mask is None else mask
        ended: set[tuple[int, tuple[int, int]]] = set()
        if operation != "init":  # all lanes use it in one stretch; then each publishes for itself
            for row, lane in np.argwhere(active).tolist():
                self._uses_mbarrier(g, row, lane, k, self.mbarrier_key(int(g.cta[row, 0]), int(address[row, lane])))
        for row, lane in np.argwhere(active).tolist():
            at = int(address[row, lane])
            arrivals = 1 if count is None else int(count[row, lane])
            if operation == "init":
                self._init(g, row, lane, k, at, arrivals)
                continue
            key, barrier = self.mbarrier_at(g, row, lane, k, at)
            state[row, lane] = barrier.token
            if operation == "inval":
                del self.mbarriers[key]
                continue
            if tx is not None:
                self._expect(
                    g, row, lane, k, key, barrier, int(tx[row, lane]) * (-1 if operation == "complete_tx" else 1)
                )
            if operation in ("arrive", "arrive_drop"):
                if (row, key) in ended:
                    detail = f"the lanes of one arrival at {at:#x} end a phase of {barrier.count} and go on in the next"
                    self.fail(BarrierFault, detail, g, k, _one(g, row, lane))
                phase = barrier.phase
                self._arrive_mbarrier(g, row, lane, k, key, barrier, arrivals, operation == "arrive_drop", complete)
                if barrier.phase != phase:
                    ended.add((row, key))
            elif operation == "complete_tx":
                self.mbarrier_advance(key, barrier)
        return state

    def _init(self, g: Gang, row: int, lane: int, k: int, address: int, count: int) -> None:
        if not 1 <= count <= MAX_COUNT:
            self.fail(BarrierFault, f"mbarrier count {count}: expected 1 to {MAX_COUNT}", g, k, _one(g, row, lane))
        key = self.mbarrier_key(int(g.cta[row, 0]), address)
        old = self.mbarriers.get(key)
        if old is not None and old.waiting:
            self.fail(
                BarrierFault,
                f"mbarrier at {address:#x} is initialised while warps wait at it",
                g,
                k,
                _one(g, row, lane),
            )
        self.mbarriers[key] = made = MBarrier(count, count)
        if self.races is not None:
            made.known, made.published = self.races.fresh(), self.races.fresh()
            self.races.write(self, g, _one(g, row, lane), k, np.full((1, 1), key[0] * self.shared.stride + key[1]), 8)
            self.unfenced.setdefault(int(g.warps[row]), []).append(made)
        self.shared.block.mark(key[0] * self.shared.stride + key[1], key[0] * self.shared.stride + key[1] + 8)

    def _uses_mbarrier(self, g: Gang, row: int, lane: int, k: int, key: tuple[int, int]) -> None:
        """Who uses an mbarrier must know that it was initialised: for the race check a read of its bytes."""
        if self.races is not None:
            self.races.touch(self, g, row, lane, k, key[0] * self.shared.stride + key[1], 8)

    def _expect(self, g: Gang, row: int, lane: int, k: int, key: tuple[int, int], barrier: MBarrier, tx: int) -> None:
        try:
            barrier.add_tx(tx)
        except Fault as error:
            self.fail(type(error), f"at {key[1]:#x}: {error.detail}", g, k, _one(g, row, lane))

    def _arrive_mbarrier(
        self, g: Gang, row: int, lane: int, k: int, key: tuple[int, int], barrier: MBarrier, count: int, drop: bool,
        complete: bool,
    ) -> None:  # fmt: skip
        try:
            barrier.take(count, drop, complete)
        except Fault as error:
            self.fail(type(error), f"at {key[1]:#x}: {error.detail}", g, k, _one(g, row, lane))
        if self.races is not None:
            slot, warp = int(g.cta[row, 0]), int(g.warps[row]) % self.wpc
            known, thread = self.races.clock[slot, warp, 0], self.races.first(slot, warp) + lane
            now = int(self.races.now[slot, warp])
            self.follows(barrier, key, known, thread, now, lambda: self.place(g, k, _one(g, row, lane)))
            self.races.release(barrier.known, slot, warp, lane)
        self.mbarrier_advance(key, barrier)

    def mbarrier_advance(self, key: tuple[int, int], barrier: MBarrier) -> None:
        """Complete the phase if nothing is missing, and release who waits for it."""
        if not barrier.settle():
            return
        if self.races is not None:
            barrier.published, barrier.known = barrier.known, barrier.known.copy()
            barrier.arrivals.end()
        waiting, barrier.waiting = barrier.waiting, []
        for parked, row, phase in waiting:
            if phase < barrier.phase:
                self._pass(barrier, parked.gang, row)
                self.release(parked, row)
            else:
                barrier.waiting.append((parked, row, phase))

    def _pass(self, barrier: MBarrier, g: Gang, row: int) -> None:
        if self.races is not None:
            self.races.acquire(barrier.published, int(g.cta[row, 0]), int(g.warps[row]) % self.wpc)

    def complete_tx(self, key: tuple[int, int], size: int, clock: Any) -> None:
        """A copy has landed: count its bytes."""
        barrier = self.mbarriers.get(key)
        if barrier is None:
            return  # reported where the copy was issued; the object has been invalidated since
        barrier.tx -= size
        if self.races is not None and clock is not None:
            agent, value = clock
            barrier.known[:, agent] = np.maximum(barrier.known[:, agent], value)
        self.mbarrier_advance(key, barrier)

    def try_wait(
        self, g: Gang, k: int, then: int, address: Any, phase: Any, parity: bool, slot: int, spin: bool
    ) -> None:
        """mbarrier.try_wait: a spin blocks until the phase is complete, a lone one tells what is."""
        active = g.lanes()
        self._check_aligned(g, g.mask, k, address, 8)
        self.shared_index(g, g.mask, k, address, 8)
        address, phase = spread(address, len(g)), spread(phase, len(g))
        lead = active.argmax(axis=1)
        rows = np.arange(len(g))
        same = active & (address == address[rows, lead][:, None]) & (phase == phase[rows, lead][:, None])
        if not (same == active).all():  # lanes of a warp wait for different barriers: one group after the other
            self.try_wait(g.part(same), k, then, address[same.any(axis=1)], phase[same.any(axis=1)], parity, slot, spin)
            rest = active & ~same
            kept = rest.any(axis=1)
            self.try_wait(g.part(rest), k, then, address[kept], phase[kept], parity, slot, spin)
            return
        done = np.zeros((len(g), 1), bool)
        found = []
        for row, lane in enumerate(lead.tolist()):
            key, barrier = self.mbarrier_at(g, row, lane, k, int(address[row, lane]))
            self._uses_mbarrier(g, row, lane, k, key)
            wanted = int(phase[row, lane])
            if parity:
                # The phase of that parity that is not over, or the one before the current, which is.
                wanted = barrier.phase - barrier.ended(wanted)
            else:
                try:
                    wanted = barrier.phase - barrier.ended_since(wanted)
                except Fault as error:
                    self.fail(type(error), error.detail, g, k, _one(g, row, lane))
            done[row] = wanted < barrier.phase and not (not spin and self.peek_fails())
            if done[row]:
                self._pass(barrier, g, row)
            found.append((barrier, wanted))
        if not spin or done.all():
            g.frame[slot] = done
            self.go_on(g, then)
            return
        g.frame[slot] = TRUE
        name = f"the mbarrier at {int(address[0, lead[0]]):#x}, phase {found[0][1]}"
        parked = self.park(g, then, k, name)
        for row, (barrier, wanted) in enumerate(found):
            if done[row]:
                self.release(parked, row)
            else:
                barrier.waiting.append((parked, row, wanted))

    def peek_fails(self) -> bool:
        """May a lone try_wait of a complete phase say no this time?"""
        return False


@dataclass(slots=True)
class ClusterBarrier:
    """The barrier of a cluster."""

    arrived: dict[int, int] = field(default_factory=dict)
    """Lanes of each warp that have arrived, as bits."""
    waiting: list[tuple[Parked, int]] = field(default_factory=list)
    passed: dict[int, int] = field(default_factory=dict)
    """Lanes of each warp whose phase completed before they waited."""
    known: Any = None
    published: Any = None


def _bits(lanes: Any) -> int:
    """A row of lanes as a number."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


def _one(g: Gang, row: int, lane: int = -1) -> Any:
    """The lanes of one row, or one lane, for a fault's place."""
    lanes = np.zeros((len(g), LANES), bool)
    if lane < 0:
        lanes[row] = g.lanes()[row]
    else:
        lanes[row, lane] = True
    return lanes
