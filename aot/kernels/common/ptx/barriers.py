"""mbarriers, and the asynchronous copies that they count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cutlass import Int32, Int64

from cubinery.aot.kernels.common.ptx.base import inline


def mbarrier_init(barrier: Int32, count: int) -> None:
    """A barrier whose phase completes after `count` arrivals (and all expected bytes)."""
    inline("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[barrier, Int32(count)])


def mbarrier_arrive(barrier: Int32) -> None:
    """One arrival, releasing this thread's earlier accesses to the CTA."""
    inline("mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier])


def mbarrier_arrive_expect_tx(barrier: Int32, nbytes: int | Int32) -> None:
    """One arrival that also makes the phase wait for `nbytes` of bulk copies, or of what a cluster sends."""
    inline(
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [{$r0}], {$r1};",
        read_only_args=[barrier, Int32(nbytes)],
    )


def mbarrier_wait(barrier: Int32, parity: Int32, *, scope: str = "cta") -> None:
    """Block until the phase of this parity has completed, and acquire what `scope` released to it."""
    inline(
        "{ .reg .pred done; "
        f"WAIT: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 done, [{{$r0}}], {{$r1}}; "
        "@!done bra WAIT; }",
        read_only_args=[barrier, parity],
    )


def copy_to_shared(destination: Int32, source: Int64, nbytes: int, read: Int32) -> None:
    """Start a copy of `nbytes` (4, 8 or 16, aligned) from global memory, of which only the first `read` are read.

    The rest of the destination becomes zero.
    """
    inline(
        f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {nbytes}, {{$r2}};",
        read_only_args=[destination, source, read],
    )


def mbarrier_arrive_after_copies(barrier: Int32) -> None:
    """One of the phase's expected arrivals, made when this thread's earlier `copy_to_shared` have landed."""
    inline("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{$r0}];", read_only_args=[barrier])


def fence_async_shared() -> None:
    """This thread's writes to shared memory become visible to products and bulk copies that it orders after them."""
    inline("fence.proxy.async.shared::cta;")


def prefetch_tensor_maps(*tensor_maps: Any) -> None:
    """Bring tensor maps, which lie in the kernel's parameters, close to the copy engine; one thread is enough."""
    for tensor_map in tensor_maps:
        inline("prefetch.tensormap [{$r0}];", read_only_args=[tensor_map.get_ptr()])


def tma_load_4d(
    destination: Int32, tensor_map: Any, coordinates: Sequence[Any], barrier: Int32, policy: int | None = None
) -> None:
    """Start one box of a rank-4 tensor map; its bytes are credited to `barrier`. `policy`: how L2 keeps the lines."""
    inline(
        "cp.async.bulk.tensor.4d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
        + ("" if policy is None else ".L2::cache_hint")
        + " [{$r0}], [{$r1}, {{$r2}, {$r3}, {$r4}, {$r5}}], [{$r6}]"
        + (";" if policy is None else ", {$r7};"),
        read_only_args=[destination, tensor_map, *coordinates, barrier, *([] if policy is None else [Int64(policy)])],
    )


def prefetch_4d(tensor_map: Any, coordinates: Sequence[Any]) -> None:
    """Start to bring one box of a rank-4 tensor map into L2."""
    inline(
        "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [{$r0}, {{$r1}, {$r2}, {$r3}, {$r4}}];",
        read_only_args=[tensor_map, *coordinates],
    )
