"""Where the chunks of split sequences leave partial results, and the counters by which the last chunk knows itself."""

from __future__ import annotations

import torch  # noqa: TID253 - only plan.py imports this module

from cubinery.runtime.driver import Driver
from cubinery.runtime.errors import CaptureError
from cubinery.runtime.ops.paged_decode import tensors
from cubinery.runtime.ops.paged_decode.streams import Upload, on_stream


class Partials:
    """The workspaces that a plan runs with: its own, made when it is first needed, and those of its caller."""

    def __init__(
        self, driver: Driver, device: torch.device, upload: Upload, stream: int, *, rows: int, head_dim: int,
        counters: int,
    ) -> None:  # fmt: skip
        """Room for so many output `rows` of partial results, 0 where nothing is split, and so many `counters`.

        Made before the plan's `upload` is written: whoever follows that on another stream then follows this too.
        """
        self._driver, self._device, self._upload = driver, device, upload
        self._rows, self._head_dim, self._size = rows, head_dim, counters
        self._own: torch.Tensor | None = None
        self.counters: dict[int, torch.Tensor] = {}
        """Of runs with a workspace, by its address."""
        # Those of the first workspace are made here, so that its first run may be captured.
        self._spare = [self._make_counters(stream)] if rows else []

    @property
    def nbytes(self) -> int:
        """Bytes of a workspace (16-byte aligned); 0 where nothing is split."""
        return self._rows * 4 * (self._head_dim + 2) + (16 if self._rows else 0)

    @property
    def allocated(self) -> list[torch.Tensor | None]:
        """What this has allocated."""
        return [self._own, *self.counters.values()]

    def values(self, workspace: torch.Tensor | None, stream: int) -> tensors.Values:
        """Addresses for a launch with a workspace, or with this plan's own. Raises ArgumentError, CaptureError."""
        needed = self.nbytes
        if workspace is None:
            if self._own is None and needed:
                with on_stream(self._device, stream):
                    self._own = torch.empty(needed, dtype=torch.uint8, device=self._device)
            workspace = self._own
        base = 0 if workspace is None else tensors.workspace(workspace, self._device, needed)
        if not needed:  # nothing is split, so nobody reads, writes or counts
            unused = self._upload.tensor.data_ptr()
            return dict.fromkeys(("o_partial", "m_partial", "l_partial", "counters"), unused)
        m_partial = base + self._rows * self._head_dim * 4
        return {
            "o_partial": base,
            "m_partial": m_partial,
            "l_partial": -(-(m_partial + self._rows * 4) // 16) * 16,
            "counters": self._counters_of(base, stream),
        }

    def _counters_of(self, workspace: int, stream: int) -> int:
        """Address of the counters that runs with this workspace share: zero now, and after every launch."""
        counters = self.counters.get(workspace)
        if counters is None:
            if not self._spare and self._driver.is_capturing(stream):
                raise CaptureError(
                    "a plan's first run with a second workspace makes zeroed counters, which a graph capture would "
                    "zero at each replay instead: run once with this workspace before the capture"
                )
            counters = self.counters[workspace] = self._spare.pop() if self._spare else self._make_counters(stream)
        return counters.data_ptr()

    def _make_counters(self, stream: int) -> torch.Tensor:
        with on_stream(self._device, stream):
            return torch.zeros(self._size, dtype=torch.int32, device=self._device)
