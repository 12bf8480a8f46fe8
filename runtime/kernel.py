"""A loaded kernel, and launches of it with bound values."""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from cubinery.runtime import process
from cubinery.runtime.arguments import ArgumentPlan, TensorMapCache, Value
from cubinery.runtime.driver import Driver, LaunchConfig, PreparedLaunch
from cubinery.runtime.errors import ArgumentError
from cubinery.runtime.manifest import KernelRecord

_POINTER = struct.Struct("<Q")


class Kernel:
    """One kernel on one device, ready to launch. Made by Library; safe for many threads.

    `record` is its launch as the manifest states it, `names` the launch values that it needs.
    """

    __slots__ = (
        "_arguments",
        "_clusters",
        "_config",
        "_driver",
        "_generation",
        "_handle",
        "_maps",
        "_own",
        "device",
        "key",
        "record",
    )

    def __init__(
        self, key: str, device: int, record: KernelRecord, driver: Driver, handle: Any, maps: TensorMapCache
    ) -> None:
        self.key, self.device, self.record = key, device, record
        self._driver, self._handle, self._maps = driver, handle, maps
        self._arguments = ArgumentPlan(record, maps)
        self._generation = process.generation
        self._own = threading.local()
        self._clusters = -1
        self._config = LaunchConfig(
            grid=(1, 1, 1),
            block=record.block,
            cluster=record.cluster,
            dynamic_smem=record.dynamic_smem,
            carveout=record.carveout,
            pdl=record.pdl,
        )
        self._prepare()  # sets the carveout now, so that the first launch under capture need not

    def __repr__(self) -> str:
        size = self.record.cluster[0]
        clusters = f" in clusters of {size}" if size > 1 else ""
        return f"<Kernel {self.key} ({self.record.role}){clusters} on device {self.device}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The launch values that `bind` and `launch` need."""
        return tuple(self._arguments.names)

    @property
    def max_clusters(self) -> int:
        """Clusters of this kernel that its device holds at once, as far as it is empty; asked of the driver once."""
        if self._clusters < 0:
            process.check(self._generation, repr(self))
            self._clusters = self._driver.max_clusters(self._handle, self._config)
        return self._clusters

    def in_clusters_of(self, size: int) -> Kernel:
        """This kernel, launched in clusters of `size` CTAs. Raises ArgumentError where it cannot be."""
        x, y, z = self.record.cluster
        sizes = [x] + [n for n in (2, 4, 8) if n < x and self.record.smaller_clusters]
        if size not in sizes:
            raise ArgumentError(f"{self!r}: clusters of {size!r} CTAs: expected {' or '.join(map(str, sorted(sizes)))}")
        if size == x:
            return self
        record = replace(self.record, cluster=(size, y, z))
        return Kernel(self.key, self.device, record, self._driver, self._handle, self._maps)

    def bind(self, values: Mapping[str, Value]) -> BoundLaunch:
        """Check and pack `values`: addresses, scalars, grid sizes, extents (elements) and strides (bytes).

        Exactly the names in `names`; anything missing, unknown or out of range is an ArgumentError. The
        values' memory must outlive the launches. Touches no device.
        """
        process.check(self._generation, repr(self))
        if not isinstance(values, Mapping):
            raise ArgumentError(f"values is a {type(values).__name__}: expected a mapping from names to numbers")
        packed = self._arguments.pack(values)
        grid = self._arguments.grid(values)
        prepared = self._prepare()
        prepared.params[:] = packed
        prepared.set_grid(grid)
        return BoundLaunch(self, self._arguments, prepared, dict(values))

    def launch(self, values: Mapping[str, Value], stream: int) -> None:
        """Launch with these values on a raw stream handle; packs only what differs from this thread's last launch.

        Where the same launch repeats, keep what `bind` returns: it compares nothing. Raises as `bind` does.
        """
        bound: BoundLaunch | None = getattr(self._own, "bound", None)
        if bound is None:
            bound = self._own.bound = self.bind(values)
        else:
            bound.rebind(values)
        bound.launch(stream)

    def _prepare(self) -> PreparedLaunch:
        return self._driver.prepare(self._handle, self._config, self._arguments.layout)


class BoundLaunch:
    """A kernel with its parameters packed: launching it is one driver call.

    Not safe for several threads at once: they would share one parameter buffer. Each thread binds its own.
    Parameters are copied by the driver when `launch` returns, so a later `update` disturbs no earlier launch.
    """

    __slots__ = ("_arguments", "_generation", "_prepared", "_values", "enqueue", "kernel")

    def __init__(
        self, kernel: Kernel, arguments: ArgumentPlan, prepared: PreparedLaunch, values: dict[str, Value]
    ) -> None:
        self.kernel = kernel
        self._arguments, self._prepared, self._values = arguments, prepared, values
        self.enqueue = prepared.launch
        """`launch` without the check for a fork, for callers that make it once for several launches."""
        self._generation = process.generation

    @property
    def values(self) -> Mapping[str, Value]:
        """The launch values as bound now (read only)."""
        return MappingProxyType(self._values)

    def update(self, **values: Value) -> None:
        """Change some values; packs again only what differs. Raises ArgumentError and then changes nothing."""
        old = self._values
        changed = [name for name, value in values.items() if name not in old or old[name] != value]
        if changed:
            self._change(old | values, changed)

    def set_address(self, name: str, address: int) -> None:
        """`update` of one pointer: a store of 8 bytes where nothing else of the launch depends on it."""
        offset = self._arguments.addresses.get(name)
        if offset is None or type(address) is not int or not 0 <= address < 2**64:
            self.update(**{name: address})
            return
        _POINTER.pack_into(self._prepared.params, offset, address)
        self._values[name] = address

    def rebind(self, values: Mapping[str, Value]) -> None:
        """Replace all values, as `Kernel.bind` would; packs again only what differs. Raises ArgumentError."""
        old = self._values
        if values == old:
            return
        if not isinstance(values, Mapping):
            raise ArgumentError(f"values is a {type(values).__name__}: expected a mapping from names to numbers")
        if values.keys() != old.keys():
            self._arguments.pack(values)  # raises, naming what is missing or unknown
        self._change(dict(values), [name for name, value in values.items() if old[name] != value])

    def _change(self, merged: dict[str, Value], changed: Sequence[str]) -> None:
        patches = self._arguments.changes(merged, changed)
        grid = self._arguments.grid(merged) if self._arguments.grid_depends_on(changed) else None
        params = self._prepared.params
        for offset, data in patches:
            params[offset : offset + len(data)] = data
        if grid is not None:
            self._prepared.set_grid(grid)
        self._values = merged

    def launch(self, stream: int) -> None:
        """Enqueue on a raw stream handle of the kernel's device (0: the default stream). Raises DriverError."""
        if self._generation != process.generation:
            process.check(self._generation, repr(self.kernel))
        self.enqueue(stream)
