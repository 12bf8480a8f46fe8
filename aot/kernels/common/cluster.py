"""Clusters of CTAs: their barrier, and stores into each other's shared memory. From sm_90 on.

An address of this CTA's shared memory names the same place in another's once `in_cta` has mapped it. Who waits for
what others send acquires it with `ptx.mbarrier_wait(..., scope="cluster")`.
"""

from __future__ import annotations

from cutlass import Int32, cute

from cubinery.aot.kernels.common.ptx import Fragment, inline


def place() -> tuple[Int32, Int32]:
    """(number of this cluster, rank of this CTA in it), both along x. ptxas would divide for %clusterid."""
    x = cute.arch.block_idx()[0]
    number = x >> log2_size()
    return number, x - (number << log2_size())


def log2_size() -> Int32:
    """Logarithm of the number of CTAs of this launch's clusters along x, which is a power of two."""
    return Int32(31 - cute.arch.clz(cute.arch.block_in_cluster_dim()[0]))


def arrive_relaxed() -> None:
    """All lanes of a warp arrive at the cluster's barrier. Releases nothing but what a fence before it has.

    An arrival that releases is a fence of the whole GPU for each warp, ahead of everything that it loads afterwards.
    """
    inline("barrier.cluster.arrive.relaxed.aligned;")


def wait() -> None:
    """Wait until every thread of the cluster has arrived or exited, and acquire what they released."""
    inline("barrier.cluster.wait.acquire.aligned;")


def in_cta(address: Int32, rank: Int32) -> Int32:
    """Where `address` lies in the shared memory of the CTA with this rank in the cluster."""
    return inline(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def send_f32x2(address: Int32, values: Fragment, barrier: Int32) -> None:
    """8 bytes to a CTA of the cluster, credited to a barrier of that CTA when they have landed."""
    inline(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, *values, barrier],
    )


def send_f32x4(address: Int32, values: Fragment, barrier: Int32) -> None:
    """16 bytes to a CTA of the cluster, credited to a barrier of that CTA when they have landed."""
    inline(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )
