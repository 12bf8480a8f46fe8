"""The launches of one layer, kept with the arguments that they were bound from, so that repeating them is free.

Tensors are used by their attributes alone, so torch is not imported here.
"""

from __future__ import annotations

import weakref
from typing import Any

from cubinery import __version__
from cubinery.runtime.errors import AbiError
from cubinery.runtime.kernel import BoundLaunch, Kernel
from cubinery.runtime.ops.paged_decode.tensors import ALIGNMENT, Values


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

_ADDRESSES = (
    "q", None, None, "block_table", "q_descale", "k_descale", "v_descale", "o", "lse", None, "sinks", "q_lens",
    "k_scales", "v_scales",
)  # fmt: skip
"""The launch value that an argument's address becomes, and nothing else depends on. K and V, of which there are tensor
maps, tell calls apart; the workspace's address gives several values."""


class Call:
    """The bound launches of one layer, and the arguments that they were bound from.

    Where arguments are `given` they are those of `Plan.run` but for the scales, the stream and check_block_table.
    """

    __slots__ = ("_held", "_k_id", "_likenesses", "_others", "_plain", "_scales", "decode", "table_keys")

    def __init__(self, kernel: Kernel, values: Values) -> None:
        self.decode: BoundLaunch = kernel.bind(pick(kernel, values))
        self._held: list[tuple[Any, int | None]] = []
        self._likenesses: list[Likeness] = []
        self._scales: tuple[Any, ...] = ()
        self._others: list[tuple[Any, int | None]] = []
        self._plain = True
        self._k_id = 0
        self.table_keys = 0
        """Keys that a row of the block table has room for."""

    def rebind(self, values: Values) -> None:
        """Pack again what differs; `values` may be some of all."""
        self.decode.update(**values)

    def remember(self, given: tuple[Any, ...], scales: tuple[Any, ...], recent: Recent) -> None:
        """Note these arguments, and enter this call in `recent` by the id of K."""
        self.forget(recent)
        # Numbers are kept; tensors are not, they belong to the caller.
        self._held = [(weakref.ref(x), x.data_ptr()) if hasattr(x, "data_ptr") else (x, None) for x in given]
        self._likenesses = [_likeness(x) if hasattr(x, "data_ptr") else None for x in given]
        self._scales = scales
        self._plain = all(held is None for held, _ in (*self._held[4:7], *self._held[10:]))
        self._enter(given[1], recent)

    def replace(self, given: tuple[Any, ...], scales: tuple[Any, ...], recent: Recent) -> bool:
        """Put tensors in the place of those that are remembered, if they are like them but for their addresses.

        Whatever is checked of the remembered ones then holds for these too. False, and nothing is changed, if one is
        not like that, or if anything else differs.
        """
        (softmax_scale, out_scale), (known_softmax_scale, known_out_scale) = scales, self._scales
        if not (_is(softmax_scale, known_softmax_scale, None) and _is(out_scale, known_out_scale, None)):
            return False
        changed, remembered = [], self._held
        for place, x in enumerate(given):
            held, pointer = remembered[place]
            if x is held:  # None, or the very number
                continue
            if pointer is None:
                if not _is(x, held, None):
                    return False
                continue
            if held() is x and x is not None and x.data_ptr() == pointer:
                continue
            if not self.is_alike(place, x):
                return False
            address, name = x.data_ptr(), None
            if address != pointer:
                name = _ADDRESSES[place]
                # No argument but K and V must lie on more than this; on less, some may.
                if name is None or address == 0 or address % ALIGNMENT:
                    return False
            changed.append((place, name, weakref.ref(x), address))
        self.forget(recent)
        for place, name, reference, address in changed:
            if name is not None:
                self.decode.set_address(name, address)
            remembered[place] = reference, address
        self._scales = scales
        self._enter(given[1], recent)
        return True

    def _enter(self, k: Any, recent: Recent) -> None:
        q, k_, v, table, q_descale, k_descale, v_descale, out, lse, workspace, *rest = self._held
        self._others = [q_descale, k_descale, v_descale, *rest]
        self._k_id = id(k)
        softmax_scale, out_scale = self._scales
        recent[self._k_id] = (
            q[0], k_[0], v[0], table[0], out[0], lse[0], workspace[0] or _nothing,
            q[1], k_[1], v[1], table[1], out[1], lse[1], workspace[1],
            softmax_scale, out_scale, self._plain, self, self.decode.enqueue,
        )  # fmt: skip

    def is_alike(self, place: int, x: Any) -> bool:
        """Whether an argument differs in nothing that is checked from the tensor remembered there, but the address."""
        known = self._likenesses[place]
        # The type says that there are these attributes, the layout that there are strides.
        return (
            known is not None
            and type(x) is known[0]
            and x.layout is known[1]
            and (x.dtype, x.device, x.shape, x.stride()) == known[2]
        )

    def forget(self, recent: Recent) -> None:
        """Leave `recent`."""
        if recent.get(self._k_id, UNKNOWN)[_CALL] is self:
            del recent[self._k_id]

    def same(self, given: tuple[Any, ...]) -> list[bool]:
        """Which arguments are the ones that were remembered, where they were."""
        return [_is(x, *held) for x, held in zip(given, self._held, strict=True)]

    def same_others(self, given: tuple[Any, ...]) -> bool:
        """Whether descales, sinks, q_lens and block scales are the ones that were remembered, where they were."""
        for place, x in enumerate(given):
            held, pointer = self._others[place]
            if x is not held and not _is(x, held, pointer):  # most are None
                return False
        return True


Likeness = tuple[Any, ...] | None
"""What the checks of a tensor look at, but for its address."""


def _likeness(x: Any) -> tuple[Any, ...]:
    return type(x), x.layout, (x.dtype, x.device, x.shape, x.stride())


def _is(x: Any, held: Any, pointer: int | None) -> bool:
    """Whether `x` is what is held: nothing, a number, or a weak reference to a tensor that had this address."""
    if pointer is None:
        return held is x or (type(x) in (int, float) and held == x)
    return held() is x and x is not None and bool(x.data_ptr() == pointer)


def pick(kernel: Kernel, values: Values) -> Values:
    """The values that one kernel takes. Raises AbiError where it takes one that this version knows nothing of."""
    unknown = [name for name in kernel.names if name not in values]
    if unknown:
        raise AbiError(
            f"{kernel.key}: a launch takes {unknown[0]!r}, which cubinery {__version__} does not know: the bundle was "
            "built by a newer version; use that one, or build the bundle with this one"
        )
    return {name: values[name] for name in kernel.names}
