"""Launch values to kernel parameters: names checked against the record, bytes packed by ParamSpec.

A launch takes one flat namespace of values: addresses, scalars, grid sizes, and the extents and strides of
tensor maps. `ArgumentPlan` is a KernelRecord compiled for that; `TensorMapCache` keeps encoded maps.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from operator import itemgetter

from cubinery.runtime.driver import Driver
from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.manifest import KernelRecord, ParamSpec, TensorMapSpec

Value = int | float

_CODES = {"pointer": "Q", "i32": "i", "i64": "q", "f32": "f", "tensor_map": "128s"}
_RANGES = {"pointer": (0, 2**64 - 1), "i32": (-(2**31), 2**31 - 1), "i64": (-(2**63), 2**63 - 1)}
_GRID_LIMITS = (2**31 - 1, 65535, 65535)

_MAP_ALIGN = 16
_PADDED_MAP_ALIGN = 32
_MAP_EXTENT_LIMIT = 2**32
_MAP_STRIDE_LIMIT = 2**40


class TensorMapCache:
    """Encoded tensor maps by what they were encoded from: one plan then serves every layer of a model.

    Bounded, least recently used out first; safe for many threads. An entry stays right when its memory is
    freed and another buffer takes the address, because a map holds nothing but these numbers.
    """

    def __init__(self, driver: Driver, capacity: int = 4096) -> None:
        self._driver, self._capacity = driver, capacity
        self._maps: OrderedDict[Hashable, bytes] = OrderedDict()
        self._tokens: dict[TensorMapSpec, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._maps)

    def token(self, spec: TensorMapSpec) -> int:
        """A small number for a spec, equal for equal specs, so that look-ups hash integers alone."""
        with self._lock:
            return self._tokens.setdefault(spec, len(self._tokens))

    def find(self, key: Hashable) -> bytes | None:
        """The 128 bytes kept under a key."""
        with self._lock:
            found = self._maps.get(key)
            if found is not None:
                self._maps.move_to_end(key)
        return found

    def encode(self, key: Hashable, spec: TensorMapSpec, numbers: Sequence[int]) -> bytes:
        """Encode and keep: `numbers` are address, extents (elements), strides (bytes). Raises ArgumentError."""
        rank = spec.rank
        address, extents, strides = numbers[0], numbers[1 : rank + 1], numbers[rank + 1 :]
        _check_map(spec, address, extents, strides)
        encoded = self._driver.encode_tensor_map(spec, address, extents, strides)
        with self._lock:
            self._maps[key] = encoded
            while len(self._maps) > self._capacity:
                self._maps.popitem(last=False)
        return encoded


def _check_map(spec: TensorMapSpec, address: int, extents: Sequence[int], strides: Sequence[int]) -> None:
    """What cuTensorMapEncodeTiled would refuse with a bare INVALID_VALUE, said by name."""
    align = _PADDED_MAP_ALIGN if spec.dtype.endswith("_align16b") else _MAP_ALIGN
    if address <= 0 or address % align:
        raise ArgumentError(f"{spec.pointer} = {address:#x}: expected an address on {align} bytes")
    for name, extent in zip(spec.extents, extents, strict=True):
        if not 1 <= extent <= _MAP_EXTENT_LIMIT:
            raise ArgumentError(f"{name} = {extent}: expected 1 to {_MAP_EXTENT_LIMIT} elements for {spec.name}")
    for name, stride in zip(spec.strides, strides, strict=True):
        if not 0 <= stride < _MAP_STRIDE_LIMIT or stride % align:
            raise ArgumentError(
                f"{name} = {stride}: expected bytes in multiples of {align}, below 2**40, for {spec.name}"
            )


class ArgumentPlan:
    """How one kernel's launch values become parameter bytes, tensor maps and a grid. Immutable."""

    def __init__(self, record: KernelRecord, maps: TensorMapCache) -> None:
        self.record, self._maps = record, maps
        self.size = max((p.offset + p.size for p in record.params), default=0)
        """Bytes of the parameter buffer."""
        self.layout = tuple((p.offset, p.size) for p in record.params)
        self._all = struct.Struct(_format(record.params))
        self._one = {p.name: (struct.Struct("<" + _CODES[p.kind]), p.offset) for p in record.params}
        self._kinds = {p.name: p.kind for p in record.params}
        self._tokens = {spec.name: maps.token(spec) for spec in record.tensor_maps}
        scalars = [p.name for p in record.params if p.kind != "tensor_map"]
        self._map_names = {s.name: (s.pointer, *_text(s.extents), *_text(s.strides)) for s in record.tensor_maps}
        self._map_values = {name: itemgetter(*names) for name, names in self._map_names.items()}
        used = [*scalars, *_text(record.grid), *(n for names in self._map_names.values() for n in names)]
        self.names = dict.fromkeys(used).keys()
        """Every launch value that the kernel needs."""
        self._grid_names = frozenset(_text(record.grid))
        shared = self._grid_names.union(*self._map_names.values())
        self.addresses = {p.name: p.offset for p in record.params if p.kind == "pointer" and p.name not in shared}
        """Offsets of the pointers that no tensor map and no grid depends on."""
        self._floats = tuple(p.name for p in record.params if p.kind == "f32")

    def pack(self, values: Mapping[str, Value]) -> bytes:
        """The parameter buffer for all values. Raises ArgumentError naming what is wrong."""
        if values.keys() != self.names:
            self._check_names(values)
        maps = {spec.name: self._encode(spec, values) for spec in self.record.tensor_maps}
        try:
            finite = all(math.isfinite(values[name]) for name in self._floats)
            packed = self._all.pack(*(maps[p.name] if p.name in maps else values[p.name] for p in self.record.params))
        except (struct.error, TypeError, OverflowError):
            finite, packed = False, b""
        if not finite:
            self._blame(values)
        return packed

    def changes(self, values: Mapping[str, Value], changed: Iterable[str]) -> list[tuple[int, bytes]]:
        """(offset, bytes) of every parameter that depends on the `changed` names; `values` are all values."""
        names = set(changed)
        if not names <= self.names:
            self._check_names(values)
        patches = []
        try:
            for name in names:
                if name in self._one:
                    if self._kinds[name] == "f32" and not math.isfinite(values[name]):
                        self._blame(values)
                    code, offset = self._one[name]
                    patches.append((offset, code.pack(values[name])))
        except (struct.error, TypeError, OverflowError):
            self._blame(values)
        stale = [s for s in self.record.tensor_maps if not names.isdisjoint(self._map_names[s.name])]
        return patches + [(self._one[spec.name][1], self._encode(spec, values)) for spec in stale]

    def grid_depends_on(self, names: Iterable[str]) -> bool:
        """Whether any of these launch values is a size of the grid."""
        return not self._grid_names.isdisjoint(names)

    def grid(self, values: Mapping[str, Value]) -> tuple[int, int, int]:
        """The grid that the record's rule gives. Raises ArgumentError outside what a grid may be."""
        x, y, z = (self._integer(n, values[n]) if isinstance(n, str) else n for n in self.record.grid)
        if x < 1 or y < 1 or z < 1 or x > _GRID_LIMITS[0] or y > _GRID_LIMITS[1] or z > _GRID_LIMITS[2]:
            rule = ", ".join(f"{n} = {v}" for n, v in zip(self.record.grid, (x, y, z), strict=True))
            raise ArgumentError(f"grid ({rule}): expected 1 to {_GRID_LIMITS[0]}, then twice 1 to {_GRID_LIMITS[1]}")
        cluster = self.record.cluster
        if x % cluster[0] or y % cluster[1] or z % cluster[2]:
            raise ArgumentError(f"grid ({x}, {y}, {z}): expected multiples of the cluster {cluster}")
        return x, y, z

    # -- inside --------------------------------------------------------------------------------

    def _encode(self, spec: TensorMapSpec, values: Mapping[str, Value]) -> bytes:
        # Literals belong to the spec, so the values of its names alone tell its maps apart.
        key = (self._tokens[spec.name], self._map_values[spec.name](values))
        try:
            found = self._maps.find(key)
        except TypeError:  # a value that has no hash is no integer either: named below
            found = None
        if found is not None:
            return found
        names = (spec.pointer, *spec.extents, *spec.strides)
        return self._maps.encode(key, spec, [self._integer(n, values[n]) if isinstance(n, str) else n for n in names])

    def _integer(self, name: str, value: Value) -> int:
        try:
            return value.__index__()  # type: ignore[union-attr]
        except (AttributeError, TypeError):
            raise ArgumentError(f"{self._where}: {name} = {value!r}: expected an integer") from None

    @property
    def _where(self) -> str:
        return f"kernel {self.record.role} ({self.record.symbol})"

    def _check_names(self, values: Mapping[str, Value]) -> None:
        unknown = [name for name in values if name not in self.names]
        missing = [name for name in self.names if name not in values]
        if missing:
            raise ArgumentError(
                f"{self._where}: no value for {', '.join(missing)}"
                + (f", and {', '.join(unknown)} is not among its names" if unknown else "")
            )
        import difflib  # for the message alone

        close = difflib.get_close_matches(unknown[0], self.names, 3)
        hint = f": did you mean {' or '.join(close)}?" if close else f": it takes {', '.join(self.names)}"
        raise ArgumentError(f"{self._where}: unknown value {', '.join(unknown)}{hint}")

    def _blame(self, values: Mapping[str, Value]) -> None:
        """Find the value that cannot be packed; called after packing failed, so speed does not matter."""
        for name, kind in self._kinds.items():
            if kind == "tensor_map":
                continue
            value = values[name]
            if kind == "f32":
                try:
                    struct.pack("<f", value)
                    good = math.isfinite(value)
                except (struct.error, TypeError, OverflowError):
                    good = False
                if not good:
                    raise ArgumentError(f"{self._where}: {name} = {value!r}: expected a finite 32-bit number")
                continue
            low, high = _RANGES[kind]
            if not low <= self._integer(name, value) <= high:
                raise ArgumentError(f"{self._where}: {name} = {value!r}: expected {low} to {high}, as {kind}")
        raise AssertionError(f"{self._where}: packing failed with values that are all in range")


def _format(params: Sequence[ParamSpec]) -> str:
    """One struct format for a whole parameter list, gaps included."""
    parts, end = ["<"], 0
    for p in params:
        parts.append("x" * (p.offset - end) + _CODES[p.kind])
        end = p.offset + p.size
    return "".join(parts)


def _text(names: Iterable[str | int]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(name, str))
