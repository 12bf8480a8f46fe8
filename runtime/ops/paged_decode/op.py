"""The public call of paged decode: choose a kernel, plan a step, run it.

    decode = PagedDecode(library, head_dim=128, page_size=16, kv_format="fp8")
    plan = decode.plan(seq_lens, num_q_heads=32, num_kv_heads=8)     # host work, once a step
    o, lse = plan.run(q, k_cache, v_cache, block_table)              # launches only; once a layer

Nothing compiles here, and a kernel that the library lacks is an error that lists the spec lines to add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cubinery.runtime.arch import resolve, served_by
from cubinery.runtime.errors import ArgumentError, PlanError
from cubinery.runtime.kernel import Kernel
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode import tensors
from cubinery.runtime.ops.paged_decode.clusters import MOST_CLUSTERS, cluster_rules
from cubinery.runtime.ops.paged_decode.config import TILE_KEYS, DecodeConfig
from cubinery.runtime.ops.paged_decode.plan import Plan
from cubinery.runtime.ops.paged_decode.plan_config import PlanConfig
from cubinery.runtime.ops.paged_decode.planner import (
    MAX_WORK,
    PLAN_OPTIONS,
    Policy,
    SplitPlan,
    check_options,
    host_lengths,
)
from cubinery.runtime.ops.paged_decode.select import ALONE_TILES, Problem, Selection, choose
from cubinery.runtime.ops.paged_decode.streams import check_not_capturing, device_index, raw_stream
from cubinery.runtime.ops.paged_decode.table import SelectorTable, loads
from cubinery.runtime.ops.paged_decode.windows import Window, plan_visible

if TYPE_CHECKING:
    import numpy as np

__all__ = ["PagedDecode", "Plan"]


class PagedDecode:
    """Decode attention over a paged KV cache, for one device and one kind of problem.

    One object serves any batch, GQA ratio, physical cache layout and descale granularity. Making one loads
    nothing. Safe for many threads; a Plan is for one thread at a time.
    """

    def __init__(
        self,
        library: Library,
        *,
        head_dim: int,
        page_size: int,
        kv_format: str,
        q_len: int = 1,
        causal: bool = True,
        q_dtype: str = "bf16",
        window: int | None = None,
        sinks: bool = False,
        softcap: float | None = None,
        q_lens: bool = False,
        impl: str | None = None,
        row_tile: int | None = None,
        ctas_per_sm: int | None = None,
        cluster: int | None = None,
        pdl: bool = False,
        convert_warpgroups: int | str | None = None,
        max_kv_stages: int | None = None,
        l2_prefetch: int | None = None,
        kv_evict_first: bool | None = None,
        table: SelectorTable | None = None,
        device: int | str | torch.device | None = None,
    ) -> None:
        """`q_len` new tokens a sequence; `impl`, `row_tile` and `ctas_per_sm` override the selector, as do the
        axes of `tcgen05` alone: `convert_warpgroups`, `max_kv_stages`, `l2_prefetch` (tiles) and `kv_evict_first`.
        `cluster`: 1 never uses clusters, 2, 4, 8 or 16 always uses ones of so many CTAs; None leaves it to each plan.
        `table`: what the selector consults instead of the bundle's table.

        `window`: how many keys a token sees, its own included (None: all); causal alone.
        `sinks`: `Plan.run` takes a logit for each query head, which joins the softmax sum and the LSE.
        `softcap`: scores become softcap * tanh(score / softcap).
        `q_lens`: `Plan.run` takes each sequence's number of new tokens, at most `q_len`.

        `device` is an index or a torch device, the current one by default. Raises ConfigError where no kernel serves
        the problem, ArgumentError on a window or soft-cap out of range, ArchError where the library holds nothing for
        the device.
        """
        self.library = library
        self.device = device_index(library, device)
        self.torch_device = torch.device(library.driver.torch_device(self.device))
        self.info = library.driver.device_info(self.device)
        library.archs_for(self.device)  # raises where the library serves no arch of this device
        self.arch = resolve(served_by(self.info.compute_capability)[0])
        self.head_dim, self.page_size, self.kv_format = head_dim, page_size, kv_format
        self.q_len, self.causal, self.q_dtype = q_len, causal, q_dtype
        self.window, self.softcap = tensors.window(window), tensors.softcap(softcap)
        self.sinks, self.q_lens = sinks, q_lens
        self._choices: dict[str, Any] = {
            "impl": impl, "row_tile": row_tile, "ctas_per_sm": ctas_per_sm, "cluster": cluster,
            "pdl": pdl,
            "convert_warpgroups": convert_warpgroups, "max_kv_stages": max_kv_stages, "l2_prefetch": l2_prefetch,
            "kv_evict_first": kv_evict_first,
        }  # fmt: skip
        found = library.table_for(DecodeConfig.family, self.device) if table is None else None
        self.table = table if found is None else loads(*found)
        """What the selector consults before its rules; None where the bundle has no table."""
        self._selections: dict[int, Selection] = {}
        self._holds: dict[DecodeConfig, bool] = {}
        self._cluster = cluster
        self._kernels: dict[tuple[DecodeConfig, int], Kernel] = {}
        self.config(1)

    def config(self, group_size: int) -> DecodeConfig:
        """The configuration for `group_size` query heads a KV head. Raises ConfigError."""
        return self.selection(group_size).config

    def selection(self, group_size: int) -> Selection:
        """The configuration and split policy for a GQA ratio, and the table's row that chose. Raises ConfigError."""
        found = self._selections.get(group_size)
        if found is None:
            found = self._selections[group_size] = self._select(group_size)
        return found

    def _select(self, group_size: int) -> Selection:
        problem = Problem(
            head_dim=self.head_dim, page_size=self.page_size, kv_format=self.kv_format, group_size=group_size,
            q_len=self.q_len, causal=self.causal, q_dtype=self.q_dtype, window=self.window is not None,
            sinks=self.sinks, softcap=self.softcap is not None, q_lens=self.q_lens,
        )  # fmt: skip
        return choose(problem, self.arch, table=self.table, **self._choices)

    def keys(self, group_size: int) -> tuple[str, ...]:
        """Keys of all kernels that plans of this GQA ratio may launch, for `Library.preload`."""
        first, *others = self.selection(group_size).kernels
        own = (first, *(c for c in others if self._held(c)), *first.requires())
        return tuple(self.library.key_for(c, self.device) for c in own)

    def _held(self, config: DecodeConfig) -> bool:
        """Whether these bundles have a kernel; asked of those that a plan can do without."""
        if config not in self._holds:
            self._holds[config] = self.library.key_for(config, self.device) in self.library
        return self._holds[config]

    def preload(self, group_size: int) -> None:
        """Load the kernels of a GQA ratio now. Raises KernelNotFoundError where the library lacks one."""
        self.library.preload(self.keys(group_size), [self.device])

    def plan(
        self,
        seq_lens: Any,
        *,
        num_q_heads: int,
        num_kv_heads: int,
        policy: Policy | None = None,
        max_splits: int | None = None,
        force_splits: int = 0,
        min_chunk_tiles: int = 1,
        pad_to: int = 0,
        capturable: bool = False,
        stream: Any = None,
    ) -> Plan:
        """Plan one decode step from lengths on the host: keys of each sequence, new tokens included.

        `policy` is the selector's by default, by its rules `thor` on Thor and `balanced` elsewhere; the options are
        those of `planner.plan_splits`. `pad_to` fixes the length of the work list, and `capturable` picks a length
        that suits the batch: such a plan launches the same grid whatever its lengths, so a captured graph
        stays valid across `Plan.update`. Few sequences may get a kernel of their own, which the plan's updates keep:
        `Selection.clustered` where each can have a cluster for every KV head at once, none is long, and no option says
        how to split or that lengths will change; `Selection.alone` where an SM gets one CTA at most. The plan's arrays
        travel to the device in order on `stream` (the current one by default), without waiting.

        Raises PlanError, ConfigError, KernelNotFoundError; CaptureError during a graph capture.
        """
        for name, value in (("num_q_heads", num_q_heads), ("num_kv_heads", num_kv_heads)):
            if type(value) is not int or value < 1:
                raise PlanError(f"{name} = {value!r}: expected an integer of at least 1")
        if num_q_heads % num_kv_heads:
            raise PlanError(f"num_q_heads = {num_q_heads}: expected a multiple of num_kv_heads = {num_kv_heads}")
        lengths = host_lengths(seq_lens)
        selection = self.selection(num_q_heads // num_kv_heads)
        config = selection.config
        q_tiles = -(-self.q_len * (num_q_heads // num_kv_heads) // config.row_tile)
        ctas = num_kv_heads * q_tiles
        options: dict[str, Any] = {
            "policy": selection.policy if policy is None else policy, "num_kv_heads": num_kv_heads,
            "q_tiles": q_tiles, "sm_count": self.info.sm_count,
            "ctas_per_sm": config.ctas_per_sm, "max_splits": max_splits, "force_splits": force_splits,
            "min_chunk_tiles": min_chunk_tiles, "pad_to": pad_to,
            "lone_tile_cost": selection.lone_tile_cost, "item_cost": config.item_cost,
        }  # fmt: skip
        raw = raw_stream(self.torch_device, stream)
        check_not_capturing(self.library.driver, "plan", raw)
        size = self._cluster or 1
        if config.cluster > 1:
            self._check_clusters(config, size, options, raw)
        elif not capturable and _are(
            (policy, max_splits, force_splits, min_chunk_tiles, pad_to), (None, None, 0, 1, 0)
        ):
            config, size = self._clustered(selection, lengths, ctas, raw) or (config, size)
        if config.cluster > 1:
            own = options | {
                "max_splits": 1,
                "force_splits": 0,
                "pad_to": pad_to or (len(lengths) if capturable else 0),
            }
            return Plan(self, config, lengths, num_q_heads, num_kv_heads, own, raw, cluster=size)
        window = Window(self.window or 0, self.q_len)
        splits: SplitPlan | None = None
        alone = selection.alone
        if alone is not None and len(lengths) * ctas <= self.info.sm_count and self._held(alone):
            own = options | {"ctas_per_sm": 1}
            if capturable and not pad_to:
                # Padding must not wait for an SM either.
                own["pad_to"] = len(lengths) if max_splits == 1 else self.info.sm_count // ctas
                found = plan_visible(lengths, window, **own)
            else:
                found = splits = plan_visible(lengths, window, **options)
            if found.num_work * ctas <= self.info.sm_count and ALONE_TILES[0] <= found.chunk_tiles <= ALONE_TILES[1]:
                return Plan(self, alone, lengths, num_q_heads, num_kv_heads, own, raw, found)
        if capturable and not pad_to:
            slots = max(1, self.info.sm_count * config.ctas_per_sm // ctas)
            spare = 0 if max_splits == 1 else slots
            options["pad_to"] = max(len(lengths), min(len(lengths) + spare, MAX_WORK))
        return Plan(self, config, lengths, num_q_heads, num_kv_heads, options, raw, splits)

    def _clustered(
        self, selection: Selection, lengths: np.ndarray, ctas: int, raw: int
    ) -> tuple[DecodeConfig, int] | None:
        """The selection's kernel of clusters and their size, if it is there and the batch suits it."""
        config, clusters = selection.clustered, len(lengths) * ctas
        if config is None or clusters > MOST_CLUSTERS or not self._held(config):
            return None
        tiles = -(-lengths // TILE_KEYS)
        for rule in cluster_rules(
            clusters, row_tile=config.row_tile, row_bytes=config.row_bytes,
            longest=int(tiles.max()), mean=float(tiles.mean()),
        ):  # fmt: skip
            try:
                kernel = self.kernel(config, cluster=rule.size, stream=raw)
            except ArgumentError:  # an older bundle's kernel, whose clusters have one size
                continue
            if kernel.max_clusters >= clusters:
                return config, rule.size
        return None

    def _check_clusters(self, config: DecodeConfig, size: int, options: dict[str, Any], raw: int) -> None:
        """A kernel of clusters that was asked for can do what else was. Raises PlanError."""
        given = options | {"max_splits": 1 if options["max_splits"] is None else options["max_splits"]}
        check_options(*(given[name] for name in PLAN_OPTIONS))
        for name in ("max_splits", "force_splits"):
            if given[name] > 1:
                raise PlanError(
                    f"{name} = {given[name]} with cluster = {size}: expected none, since a cluster shares a "
                    "whole sequence; leave it out, or ask for cluster = 1"
                )
        try:
            kernel = self.kernel(config, cluster=size, stream=raw)
        except ArgumentError as error:
            raise PlanError(
                f"cluster = {size}: the bundle's kernel has clusters of one size alone: build it anew with this "
                f"version of cubinery, or ask for its own size ({error})"
            ) from None
        if not kernel.max_clusters:
            raise PlanError(
                f"cluster = {size} on {self.info.name}: no part of it holds so many CTAs at once; ask for a "
                "smaller cluster, or for cluster = 1"
            )

    # -- for Plan ------------------------------------------------------------------------------

    def kernel(self, config: DecodeConfig, *, cluster: int, stream: int) -> Kernel:
        """A decode kernel, loaded at the first request. Raises ArgumentError where it has no such clusters."""
        found = self._kernels.get((config, cluster))
        if found is None:
            key = self.library.key_for(config, self.device)
            loaded = self.library.kernel(key, self.device, role="decode", stream=stream)
            found = self._kernels[config, cluster] = loaded.in_clusters_of(cluster)
        return found

    def plan_kernel(self, *, stream: int) -> Kernel:
        """The kernel that plans on the device, loaded at the first request."""
        return self.library.kernel(
            self.library.key_for(PlanConfig(), self.device), self.device, role="plan", stream=stream
        )


def _are(values: tuple[Any, ...], defaults: tuple[Any, ...]) -> bool:
    """Whether values are these defaults, and no others that equal them."""
    return all(type(x) is type(y) and x == y for x, y in zip(values, defaults, strict=True))
