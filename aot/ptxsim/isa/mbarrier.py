"""The state of an mbarrier object: arrivals, transactions and phases (PTX ISA 9.7.13.15).

A phase ends when neither an arrival nor a transaction is pending; the next begins with the expected arrivals and no
transaction. Transaction counts may be negative for a while: bytes can land before they are expected.

`State` is pure: it knows no thread, no waiter and no memory. The machine derives its barrier objects from it, calls
the methods for each lane in order, adds the place to a fault, and looks at its waiters where `settle` returns True.

A state token, as arrive returns it in a 64-bit register, is `phase << 20 | pending` before the arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

from cubinery.aot.ptxsim.faults import BarrierFault, TransactionFault

MAX_COUNT = (1 << 20) - 1
"""The greatest arrival count, and the greatest magnitude of a transaction count (9.7.13.15.1)."""


def token_phase(token: int) -> int:
    """The phase that a state token belongs to."""
    return token >> 20


def token_pending(token: int) -> int:
    """9.7.13.15.17 mbarrier.pending_count: arrivals pending when a state token was made."""
    return token & MAX_COUNT


def check_count(count: int, what: str, low: int = 1) -> int:
    """Refuse a count that no barrier can have."""
    if not low <= count <= MAX_COUNT:
        raise BarrierFault(f"{what} with count {count}: expected {low} to {MAX_COUNT}")
    return count


@dataclass(slots=True)
class State:
    """One barrier. `fresh` makes one as mbarrier.init does."""

    count: int
    """Arrivals that each phase expects."""
    pending: int
    """Arrivals still missing in this phase."""
    tx: int = 0
    """Bytes still missing in this phase."""
    phase: int = 0
    """Phases completed so far."""

    @classmethod
    def fresh(cls, count: int) -> State:
        """9.7.13.15.9 mbarrier.init."""
        check_count(count, "mbarrier.init")
        return cls(count, count)

    def __str__(self) -> str:
        return f"phase {self.phase} misses {self.pending} of {self.count} arrivals and {self.tx} bytes"

    @property
    def token(self) -> int:
        """The state token of this moment."""
        return self.phase << 20 | self.pending

    def take(self, count: int = 1, drop: bool = False, may_complete: bool = True) -> None:
        """9.7.13.15.13 arrive and .14 arrive_drop: `count` arrivals. Nothing changes in a fault.

        `drop` lowers the count of later phases too. may_complete=False is .noComplete, for which ending the phase is a
        fault. A transaction count of .expect_tx comes before, by `add_tx`; `settle` comes after.
        """
        check_count(count, "arrive")
        if count > self.pending:
            raise BarrierFault(f"{count} arrivals, but {self}")
        if not may_complete and count == self.pending and self.tx == 0:
            raise BarrierFault(f"arrive.noComplete would end the phase: {self}")
        self.pending -= count
        if drop:
            self.count -= count

    def add_tx(self, change: int) -> None:
        """9.7.13.15.11 expect_tx: more bytes belong to this phase; .12 complete_tx, with a negative change: fewer."""
        total = self.tx + change
        if max(abs(total), abs(change)) > MAX_COUNT:
            raise TransactionFault(f"transaction count {total}: expected at most {MAX_COUNT} either way")
        self.tx = total

    def settle(self) -> bool:
        """End the phase if nothing is missing; True where it ended."""
        if self.pending or self.tx:
            return False
        self.phase += 1
        self.pending = self.count
        return True

    def add_pending(self) -> None:
        """9.7.13.15.15 cp.async.mbarrier.arrive without .noinc, as issued: one more arrival belongs to this phase.

        The arrival itself (`take`) follows when the thread's earlier cp.async have landed.
        """
        check_count(self.pending + 1, "cp.async.mbarrier.arrive")
        self.pending += 1

    def ended(self, parity: int) -> bool:
        """9.7.13.15.16 test_wait.parity, try_wait.parity: has the phase of that parity ended?

        The parity names the current phase, or the one before it.
        """
        return (self.phase & 1) != (parity & 1)

    def ended_since(self, token: int) -> bool:
        """9.7.13.15.16 test_wait, try_wait: has the phase of a state token ended?"""
        phase = token_phase(token)
        if not self.phase - 1 <= phase <= self.phase:
            raise BarrierFault(f"a test of phase {phase} in phase {self.phase}: expected this one or the one before")
        return phase < self.phase

    def unbalanced(self) -> str:
        """Words for transactions pending where nothing can come any more (at exit, at inval), or nothing."""
        return f"transaction count {self.tx} is left over: {self}" if self.tx else ""
