"""The launches of one layer, kept with the arguments that they were bound from, so that repeating them is free.

Tensors are used by their attributes alone, so torch is not imported here.
"""

from __future__ import annotations

import weakref
from typing import Any

from cubinery.runtime.kernel import BoundLaunch, Kernel
from cubinery.runtime.ops.paged_decode.tensors import Values


class Recent(dict[tuple[Any, ...], "Call"]):
    """Launches by the identity of every argument; an entry leaves when one of its tensors dies."""

    __slots__ = ("__weakref__",)


class Call:
    """The bound launches of one layer, and the arguments that they were bound from."""

    __slots__ = ("_held", "addresses", "decode", "enqueue", "key", "others", "table_keys")

    def __init__(self, kernel: Kernel, values: Values) -> None:
        self.decode: BoundLaunch = kernel.bind(pick(kernel, values))
        self.enqueue = self.decode.enqueue
        self._held: list[tuple[Any, int | None]] = []
        self.addresses: tuple[int | None, ...] = ()
        """Of Q, K, V, the block table, O, LSE and the workspace (None where the plan's own is used)."""
        self.others: list[tuple[Any, int | None]] = []
        """Descales, sinks, q_lens and block scales, where they are tensors."""
        self.key: tuple[Any, ...] = ()
        self.table_keys = 0
        """Keys that a row of the block table has room for."""

    def rebind(self, values: Values) -> None:
        """Pack again what differs; `values` may be some of all."""
        self.decode.update(**values)

    def remember(self, given: tuple[Any, ...], scales: tuple[Any, ...], recent: Recent) -> None:
        """Enter these arguments in `recent`, where they stay for as long as all their tensors live."""
        recent.pop(self.key, None)
        key = self.key = _key(given, scales)
        table = weakref.ref(recent)  # else each entry would keep its own table alive

        def gone(_: Any) -> None:
            if (alive := table()) is not None:
                alive.pop(key, None)

        # Numbers are kept, so that their ids stay theirs; tensors are not, they belong to the caller.
        self._held = [(weakref.ref(x, gone), x.data_ptr()) if hasattr(x, "data_ptr") else (x, None) for x in given]
        pointers = [pointer for _, pointer in self._held]
        self.addresses = (*pointers[:4], *pointers[7:10])
        self.others = [held for held in (*self._held[4:7], *self._held[10:]) if held[1] is not None]
        recent[key] = self

    def same(self, given: tuple[Any, ...]) -> list[bool]:
        """Which arguments are the ones that were remembered, where they were."""
        return [
            held is x if pointer is None else held() is x and x is not None and x.data_ptr() == pointer
            for x, (held, pointer) in zip(given, self._held, strict=True)
        ]

    def moved(self) -> bool:
        """One of `others` has been given other memory."""
        for reference, pointer in self.others:
            tensor = reference()
            if tensor is None or tensor.data_ptr() != pointer:
                return True
        return False


def _key(given: tuple[Any, ...], scales: tuple[Any, ...]) -> tuple[Any, ...]:
    """What `Plan.run` looks a call up by: arguments that most calls leave out only count where one is given."""
    always, rest = (*given[:4], *given[7:10]), (*given[4:7], *given[10:])
    return (*map(id, always), *scales, *(map(id, rest) if any(x is not None for x in rest) else ()))


def pick(kernel: Kernel, values: Values) -> Values:
    """The values that one kernel takes."""
    return {name: values[name] for name in kernel.names}
