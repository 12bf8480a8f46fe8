"""The launches of one layer, kept with the arguments that they were bound from, so that repeating them is free.

Tensors are used by their attributes alone, so torch is not imported here.
"""

from __future__ import annotations

import weakref
from typing import Any

from cubinery.runtime.kernel import BoundLaunch, Kernel
from cubinery.runtime.ops.paged_decode.tensors import Values


def _nothing() -> None:
    """Stands in for the weak reference to an argument that was not given."""


Known = tuple[Any, ...]
"""What `Plan.run` compares its arguments with, and then launches; a tuple, as that unpacks faster than attributes are
looked up: weak references to Q, K, V, the block table, O, LSE and the workspace, then their addresses, softmax_scale,
out_scale, whether there are no descales, sinks, q_lens or block scales, the call, and its launch on a stream."""

Recent = dict[int, Known]
"""By the id of K, which may be another tensor's by now."""

UNKNOWN: Known = (object,) * 7 + (None,) * 12
"""Stands for arguments that no run had: equal to none."""

_CALL = -2
"""Where the call stands in what is known of it."""


class Call:
    """The bound launches of one layer, and the arguments that they were bound from."""

    __slots__ = ("_held", "_k_id", "_others", "decode", "table_keys")

    def __init__(self, kernel: Kernel, values: Values) -> None:
        self.decode: BoundLaunch = kernel.bind(pick(kernel, values))
        self._held: list[tuple[Any, int | None]] = []
        self._others: list[tuple[Any, int | None]] = []
        self._k_id = 0
        self.table_keys = 0
        """Keys that a row of the block table has room for."""

    def rebind(self, values: Values) -> None:
        """Pack again what differs; `values` may be some of all."""
        self.decode.update(**values)

    def remember(self, given: tuple[Any, ...], scales: tuple[Any, Any], recent: Recent) -> None:
        """Note these arguments, and enter this call in `recent` by the id of K."""
        self.forget(recent)
        # Numbers are kept; tensors are not, they belong to the caller.
        self._held = [(weakref.ref(x), x.data_ptr()) if hasattr(x, "data_ptr") else (x, None) for x in given]
        always = (*self._held[:4], *self._held[7:10])
        references = [_nothing if pointer is None else reference for reference, pointer in always]
        self._others = [*self._held[4:7], *self._held[10:]]
        plain = all(held is None for held, _ in self._others)
        self._k_id = id(given[1])
        recent[self._k_id] = (
            *references, *(pointer for _, pointer in always), *scales, plain, self, self.decode.enqueue,
        )  # fmt: skip

    def forget(self, recent: Recent) -> None:
        """Leave `recent`."""
        if recent.get(self._k_id, UNKNOWN)[_CALL] is self:
            del recent[self._k_id]

    def same(self, given: tuple[Any, ...]) -> list[bool]:
        """Which arguments are the ones that were remembered, where they were."""
        return [_is(x, *held) for x, held in zip(given, self._held, strict=True)]

    def same_others(self, given: tuple[Any, ...]) -> bool:
        """Whether descales, sinks, q_lens and block scales are the ones that were remembered, where they were."""
        return all(_is(x, *held) for x, held in zip(given, self._others, strict=True))


def _is(x: Any, held: Any, pointer: int | None) -> bool:
    """Whether `x` is what is held: nothing, a number, or a weak reference to a tensor that had this address."""
    if pointer is None:
        return held is x or (type(x) in (int, float) and held == x)
    return held() is x and x is not None and bool(x.data_ptr() == pointer)


def pick(kernel: Kernel, values: Values) -> Values:
    """The values that one kernel takes."""
    return {name: values[name] for name in kernel.names}
