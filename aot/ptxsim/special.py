"""Special registers (PTX ISA, chapter 10)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cubinery.aot.ptxsim.errors import SimError
from cubinery.aot.ptxsim.memory import SHARED_BASE
from cubinery.aot.ptxsim.state import LANES, Gang

if TYPE_CHECKING:
    from cubinery.aot.ptxsim.machine import Machine

_AXES = {"x": 0, "y": 1, "z": 2}


class SpecialRegisters:
    """Special registers of a launch, as arrays of the smallest shape that holds them."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        thread = np.arange(machine.wpc * LANES).reshape(machine.wpc, LANES)
        x, y, _ = machine.block
        self.tid = [v.astype(np.uint32) for v in (thread % x, thread // x % y, thread // (x * y))]
        lane = np.arange(LANES, dtype=np.uint64)[None]
        one = np.uint64(1)
        below = (one << lane) - one
        full = np.uint64(0xFFFFFFFF)
        masks = {"eq": one << lane, "lt": below, "le": below | (one << lane)}
        masks |= {"ge": full & ~below, "gt": full & ~masks["le"]}
        self.fixed: dict[str, Any] = {f"lanemask_{name}": value.astype(np.uint32) for name, value in masks.items()}
        self.fixed["laneid"] = lane.astype(np.uint32)
        m = machine
        numbers = {
            "nwarpid": m.wpc, "nsmid": len(m.block_index), "gridid": 0, "cluster_nctarank": m.cluster_size,
            "dynamic_smem_size": m.dynamic_smem,
            "total_smem_size": m.shared.size - SHARED_BASE,
        }  # fmt: skip
        for axis, i in _AXES.items():
            numbers |= {
                f"ntid.{axis}": m.block[i], f"nctaid.{axis}": m.grid[i], f"cluster_nctaid.{axis}": m.cluster[i],
                f"nclusterid.{axis}": m.grid[i] // m.cluster[i],
            }  # fmt: skip
        self.fixed |= {name: np.full((1, 1), value, np.uint32) for name, value in numbers.items()}
        self.fixed["is_explicit_cluster"] = np.full((1, 1), m.cluster_size > 1)

    def read(self, g: Gang, name: str) -> Any:
        """The register for every lane of a gang. Raises SimError for one that is not modelled."""
        found = self.fixed.get(name)
        if found is not None:
            return found
        base, _, axis = name.partition(".")
        m, slot = self.m, g.cta[:, 0]
        if base == "tid":
            return self.tid[_AXES[axis]][g.warps % m.wpc]
        if base == "ctaid":
            value = m.block_index[slot, _AXES[axis]]
        elif base == "cluster_ctaid":
            value = m.block_index[slot, _AXES[axis]] % m.cluster[_AXES[axis]]
        elif base == "clusterid":
            value = m.block_index[slot, _AXES[axis]] // m.cluster[_AXES[axis]]
        elif base == "cluster_ctarank":
            value = m.rank[slot]
        elif base == "warpid":
            value = g.warps % m.wpc
        elif base == "smid":
            value = slot
        elif base in ("clock", "globaltimer_lo"):
            value = np.full(1, m.counters.instructions & 0xFFFFFFFF)
        elif base in ("clock_hi", "globaltimer_hi"):
            value = np.full(1, m.counters.instructions >> 32)
        elif base in ("clock64", "globaltimer"):
            return np.full((1, 1), m.counters.instructions, np.uint64)
        else:
            raise SimError(f"special register %{name} is not modelled")
        return value.astype(np.uint32)[:, None]
