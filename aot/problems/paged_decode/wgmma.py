"""A paged decode with warpgroup-level MMA: the problem of `mma`."""

from cubinery.aot.problems.paged_decode.mma import check

__all__ = ["check"]
