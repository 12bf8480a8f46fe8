"""cp.async of threads, and bulk copies of plain runs of bytes, in the machine (PTX ISA 9.7.9.25)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cubinery.aot.ptxsim.copies import Copies
from cubinery.aot.ptxsim.faults import BarrierFault, Fault, OutOfBoundsFault, UninitialisedFault
from cubinery.aot.ptxsim.isa import async_copy, tma
from cubinery.aot.ptxsim.isa.copy_forms import BulkCopy
from cubinery.aot.ptxsim.memory import SHARED_BASE
from cubinery.aot.ptxsim.state import LANES, Gang, spread

_QUEUE = 1 << 26
"""Where queue numbers of warps' cp.async begin."""
_AGENT = -(1 << 22)
"""Race agents of warps' cp.async count down from here."""


class BulkCopies(Copies):
    """cp.async and non-tensor cp.async.bulk as generated code sees them. Machine derives from this."""

    thread_copies: dict[int, deque[Callable[[], None]]]
    """cp.async of each warp not landed yet, oldest first."""

    def _enqueue(self, warp: int, slot: int, step: Callable[[], None]) -> None:
        """A warp's cp.async land in order, at any time."""
        pipe = self.thread_copies.setdefault(warp, deque())
        pipe.append(step)

        def land() -> None:
            pipe.popleft()()

        self.issue(_QUEUE + warp, slot, land)

    # -- cp.async ------------------------------------------------------------------------------

    def thread_copy(
        self, g: Gang, mask: Any, k: int, to: Any, origin: Any, size: int, source_size: Any, ignore: Any
    ) -> None:
        """cp.async: `size` bytes a lane; the first `source_size` come from global memory, the rest are zeros."""
        count = len(g)
        active = np.ones((count, LANES), bool) if mask is None else mask
        self._check_aligned(g, active, k, to, size)
        index = spread(self.shared_index(g, active, k, to, size), count)
        reads = active if ignore is None else active & ~spread(ignore, count)
        width = min(size, 8)
        words = size // width
        partial, sizes = None, np.zeros(0)
        if source_size is not None:
            sizes = np.minimum(spread(source_size, count), size)
            partial, reads = reads & (sizes > 0) & (sizes < size), reads & (sizes == size)
        values = [np.zeros((count, LANES), np.uint8 if width == 1 else f"u{width}") for _ in range(words)]
        if reads.any():
            loaded = self.load_global(g, reads, k, origin, width, words, (True,) * words, False)
            values = [np.where(reads, value, 0).astype(value.dtype) for value in loaded]
        if partial is not None and partial.any():
            values = self._partial(g, k, partial, spread(origin, count), sizes, size, values)
        for row in range(count):
            lanes = active[row]
            if not lanes.any():
                continue
            warp, slot = int(g.warps[row]), int(g.cta[row, 0])
            at = index[row, lanes]
            clock = self._writes(g, row, k, slot, warp, at, size)
            done = self.groups.add(("cp", warp), clock)
            data = tuple(value[row, lanes] for value in values)

            def land(at: Any = at, data: Any = data, done: Callable[[], None] = done) -> None:
                self.shared.block.store(at, width, data)
                done()

            self._enqueue(warp, slot, land)

    def _partial(self, g: Gang, k: int, lanes: Any, origin: Any, sizes: Any, size: int, values: list[Any]) -> list[Any]:
        """Fill in the lanes that read less than they write."""
        data = np.ascontiguousarray(np.stack(values, axis=-1)).view(np.uint8)
        for row, lane in np.argwhere(lanes).tolist():
            address, count = int(origin[row, lane]), int(sizes[row, lane])
            try:
                self._bulk_source(address, count)
                self._copy_reads(g, row, k, address, count)
            except Fault as error:
                self._placed(error, g, k, row, lane)
            data[row, lane] = async_copy.padded(self.memory.bytes(address, count), size)
        words = data.view(values[0].dtype)
        return [words[..., i] for i in range(len(values))]

    def _writes(self, g: Gang, row: int, k: int, slot: int, warp: int, at: Any, size: int) -> tuple[int, int] | None:
        if self.races is None:
            return None
        unit = self.races.unit
        units = np.unique((at[:, None] + np.arange(0, size, min(unit, size))) // unit)
        local = self.races.async_agent(slot, _AGENT - warp)
        value = self.races.async_write(self, g, row, k, slot, local, units, proxy=False)
        return self.races.agent(slot, local), value

    def thread_copy_arrive(self, g: Gang, mask: Any, k: int, barrier: Any, increment: bool) -> None:
        """cp.async.mbarrier.arrive: each lane arrives once its earlier cp.async have landed."""
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        barrier = spread(barrier, len(g))
        for row, lane in np.argwhere(active).tolist():
            key, found = self.mbarrier_at(g, row, lane, k, int(barrier[row, lane]))
            found.pending += increment
            warp, slot = int(g.warps[row]), int(g.cta[row, 0])
            place = self.place(g, k)
            knows = None if self.races is None else self.races.publish(slot, warp % self.wpc, lane)
            thread = 0 if self.races is None else self.races.first(slot, warp % self.wpc) + lane
            clocks = () if self.races is None else self._copied(slot, warp)

            def land(
                key: Any = key, place: Any = place, knows: Any = knows, thread: int = thread, clocks: Any = clocks
            ) -> None:
                barrier = self.mbarriers.get(key)
                if barrier is None or barrier.pending < 1:
                    raise BarrierFault(f"cp.async arrives at {key[1]:#x}, which expects no arrival", place)
                barrier.pending -= 1
                if knows is not None:
                    self.follows(barrier, key, knows[0], thread, int(knows[0, thread]), lambda: place)
                    np.maximum(barrier.known, knows, out=barrier.known)
                    for agent, value in clocks:
                        barrier.known[:, agent] = np.maximum(barrier.known[:, agent], value)
                self.mbarrier_advance(key, barrier)

            self._enqueue(warp, slot, land)

    def _copied(self, slot: int, warp: int) -> tuple[tuple[int, int], ...]:
        """What all cp.async issued so far by a warp will have published."""
        assert self.races is not None
        local = self.races.async_agent(slot, _AGENT - warp)
        agent = self.races.agent(slot, local)
        return ((agent, int(self.races.clock[slot, local, 0, agent])),)

    # -- cp.async.bulk -------------------------------------------------------------------------

    def bulk_copy(
        self, g: Gang, mask: Any, k: int, form: BulkCopy, to: Any, origin: Any, size: Any, barrier: Any, ranks: Any,
        byte_mask: Any,
    ) -> None:  # fmt: skip
        """cp.async.bulk, cp.reduce.async.bulk and the prefetch by each executing lane."""
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        given = [None if v is None else spread(v, len(g)) for v in (to, origin, size, barrier, ranks, byte_mask)]
        for row, lane in np.argwhere(active).tolist():
            numbers = [0 if v is None else int(v[row, lane]) for v in given]
            try:
                self._bulk(g, row, lane, k, form, *numbers)
            except Fault as error:
                if error.place.kernel:
                    raise
                self._placed(error, g, k, row, lane)

    def _bulk(
        self, g: Gang, row: int, lane: int, k: int, form: BulkCopy, to: int, origin: int, size: int, barrier: int,
        ranks: int, byte_mask: int,
    ) -> None:  # fmt: skip
        async_copy.check_bulk(to, origin, size)
        cta = int(g.cta[row, 0])
        combine = async_copy.combine(form.reduction, form.type) if form.reduction else None
        slot = start = 0
        if form.source == "global":
            self._bulk_source(origin, size)
            self._copy_reads(g, row, k, origin, size)
            found = self.memory.find(origin)
            if self.global_races is not None and found is not None:
                run = np.array([origin - found.origin])
                self.global_races.copy_reads(self, g, row, lane, k, found, run, size)
            read: Callable[[], Any] = lambda: self.memory.bytes(origin, size)  # noqa: E731
        else:
            slot, offset = self.mbarrier_key(cta, origin)
            start = self._bulk_place(slot, offset, size)
            written = self.shared.block.written
            if self.uninitialised and written is not None and not written[start : start + size].all():
                raise UninitialisedFault(f"a bulk copy reads shared memory at {offset:#x}, never all written")
            read = lambda: self.shared.block.data[start : start + size]  # noqa: E731
        if not form.destination:
            return
        if form.destination == "global":
            self._bulk_source(to, size, writes=True)
            done = self._bulk_read(g, row, lane, k, slot, start, start + size)
            written = self.writes_global(g, row, lane, k, np.array([to]), size, combine is not None)

            def store() -> None:
                old, new = self._writable(to, size), read()
                if byte_mask or form.byte_mask is not None:
                    new = async_copy.masked_copy(old, new, byte_mask)
                old[:] = new if combine is None else combine(old, new)
                written()
                done()

            self.issue(int(g.warps[row]) + 1, slot, store)
            return
        key, _ = self.mbarrier_at(g, row, lane, k, barrier)
        target, offset = self.mbarrier_key(cta, to)
        places = [(target, key)]
        if form.mask is not None:
            base = int(self.cluster_base[cta])
            places = [(base + rank, (base + rank, key[1])) for rank in tma.multicast(ranks, self.cluster_size)]
        source = None
        if form.source != "global" and self.races is not None:
            unit, local = self.races.unit, self.races.async_agent(slot, -1 - int(g.warps[row]))
            units = np.arange(start // unit, (start + size) // unit)
            value = self.races.async_read(self, g, row, k, slot, local, units, lane=lane)
            source = (self.races.agent(slot, local), value)
        for slot_, key_ in places:
            self._signalled(g, row, lane, k, key_)
            self._bulk_load(g, row, lane, k, slot_, offset, size, key_, read, combine, source)

    def store_async(
        self, g: Gang, mask: Any, k: int, to: Any, values: tuple[Any, ...], barrier: Any, operation: str, kind: str
    ) -> None:
        """st.async and red.async: each executing lane's bytes land at any time and count at its mbarrier.

        They are ordinary stores as far as proxies go.
        """
        active = np.ones((len(g), LANES), bool) if mask is None else mask
        data = np.ascontiguousarray(np.stack([spread(v, len(g)) for v in values], axis=-1)).view(np.uint8)
        size = data.shape[-1]
        self._check_aligned(g, mask, k, to, size)
        to, barrier = spread(to, len(g)), spread(barrier, len(g))
        combine = async_copy.combine(operation, kind) if operation else None
        for row, lane in np.argwhere(active).tolist():
            key, _ = self.mbarrier_at(g, row, lane, k, int(barrier[row, lane]))
            slot, offset = self.mbarrier_key(int(g.cta[row, 0]), int(to[row, lane]))
            if slot != key[0]:
                self._placed(BarrierFault("the data and the mbarrier lie in different CTAs"), g, k, row, lane)
            try:
                read = partial(np.copy, data[row, lane])
                self._bulk_load(g, row, lane, k, slot, offset, size, key, read, combine, None, proxy=False)
            except OutOfBoundsFault as error:
                self._placed(error, g, k, row, lane)

    def _bulk_load(
        self, g: Gang, row: int, lane: int, k: int, slot: int, offset: int, size: int, key: tuple[int, int],
        read: Callable[[], Any], combine: Callable[[Any, Any], Any] | None, source: tuple[int, int] | None,
        proxy: bool = True,
    ) -> None:  # fmt: skip
        """`source` is what the end of reading shared memory publishes: an agent and its clock."""
        start = self._bulk_place(slot, offset, size)
        clock = None
        if self.races is not None:
            unit, local = self.races.unit, self.races.async_agent(slot, key[1])
            units = np.arange(start // unit, (start + size) // unit)
            value = self.races.async_write(self, g, row, k, slot, local, units, proxy=proxy, lane=lane)
            clock = (self.races.agent(slot, local), value)

        def land() -> None:
            place = self.shared.block.data[start : start + size]
            place[:] = read() if combine is None else combine(place, read())
            self.shared.block.mark(start, start + size)
            barrier = self.mbarriers.get(key)
            if source is not None and barrier is not None:
                barrier.known[:, source[0]] = np.maximum(barrier.known[:, source[0]], source[1])
            self.complete_tx(key, size, clock)

        self.issue(0, slot, land)

    def _bulk_place(self, slot: int, offset: int, size: int) -> int:
        """Index of a run in the shared block; it must lie in the CTA's memory."""
        if offset < SHARED_BASE or offset + size > self.shared.size:
            raise OutOfBoundsFault(
                f"{size} bytes at shared address {offset:#x}: expected {SHARED_BASE:#x} to {self.shared.size:#x}"
            )
        return slot * self.shared.stride + offset

    def _bulk_source(self, address: int, size: int, writes: bool = False) -> None:
        """A run of global memory lies in one allocation and, to be read, holds something."""
        found = self.memory.find(address)
        if found is None or address + size > found.end:
            raise OutOfBoundsFault(f"a bulk copy of {size} bytes at {address:#x}, which no allocation holds")
        start = address - found.origin
        marks = found.block.written
        if not writes and self.uninitialised and marks is not None and not marks[start : start + size].all():
            raise UninitialisedFault(f"a bulk copy reads {size} bytes at {address:#x}, never all written")
