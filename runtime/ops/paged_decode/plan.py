"""A planned decode step: its schedule on the device, and the launches of each layer that runs it.

Imported by op.py alone, after torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch  # noqa: TID253 - only op.py imports this module

from cubinery.runtime import process
from cubinery.runtime.errors import ArgumentError, CaptureError, PlanError
from cubinery.runtime.ops.paged_decode import tensors
from cubinery.runtime.ops.paged_decode.calls import UNKNOWN, Call, Recent
from cubinery.runtime.ops.paged_decode.config import DecodeConfig
from cubinery.runtime.ops.paged_decode.device_planner import DevicePlanner
from cubinery.runtime.ops.paged_decode.partials import Partials
from cubinery.runtime.ops.paged_decode.planner import SplitPlan, host_lengths
from cubinery.runtime.ops.paged_decode.streams import Upload, check_not_capturing, current_stream, on_stream, raw_stream
from cubinery.runtime.ops.paged_decode.windows import Window, plan_visible

if TYPE_CHECKING:
    from cubinery.runtime.ops.paged_decode.op import PagedDecode

MAX_CALLS = 512
"""Pairs of K and V caches (layers of a model) whose launches a plan keeps; the oldest goes first."""

Descale = torch.Tensor | float | None

_ONE = np.ones(1, np.float32).view(np.int32)
"""The descale of those that are not given or are numbers; it travels with the plan."""

_DESCALES = ("q_descale", "k_descale", "v_descale")


class Plan:
    """One decode step's schedule on the device, ready to run for every layer of a model.

    For one thread at a time. It must outlive the graphs that captured it.
    """

    def __init__(
        self, decode: PagedDecode, config: DecodeConfig, lengths: Any, num_q_heads: int, num_kv_heads: int,
        options: dict[str, Any], stream: int, splits: SplitPlan | None = None, cluster: int = 1,
    ) -> None:  # fmt: skip
        """Use `PagedDecode.plan`. `splits`: what `options` give, if that is known already; `cluster`: CTAs of one."""
        self.decode, self.config = decode, config
        self.cluster = cluster
        """CTAs that share a sequence; 1: no clusters."""
        self._driver = decode.library.driver
        self._generation, self._alive = process.generation, process.alive
        self.shape = tensors.Shape(
            len(lengths), decode.q_len, num_q_heads, num_kv_heads, decode.head_dim, decode.page_size,
            decode.kv_format, decode.q_dtype, decode.torch_device, config.kv_align,
        )  # fmt: skip
        self._window = Window(decode.window or 0, config.q_len)
        self.splits: SplitPlan = splits or plan_visible(lengths, self._window, **options)
        # A list no longer than the batch has no room for a second item of any sequence.
        self._splits_some = options["max_splits"] != 1 and self.num_work > self.num_seqs
        self._fixed = options["pad_to"] > 0
        # Updates stay within this plan's grid and work list, and split nothing if there is no room for it.
        self._options = options | {"pad_to": self.splits.num_work}
        if not self._splits_some:
            self._options |= {"max_splits": 1, "force_splits": 0}
        group = self.shape.group_size
        self._kernel = decode.kernel(config, cluster=cluster, stream=stream)
        self._upload = Upload(decode.torch_device, 8 * self.num_work + self.num_seqs + 1, stream)
        heads = self.partial_slots * num_kv_heads
        self._partials = Partials(
            self._driver, decode.torch_device, self._upload, stream, rows=heads * self.shape.n_q,
            head_dim=decode.head_dim, counters=heads * options["q_tiles"],
        )  # fmt: skip
        self._ordered = -1  # the stream that last ran, known to follow the upload
        self._current, self._current_of = current_stream(decode.torch_device)
        self._calls: dict[tuple[int, int], Call] = {}  # by the addresses of K and V
        self._recent: Recent = {}
        self._device_planner: DevicePlanner | None = None
        self._lse_like: torch.Tensor | None = None
        self._send(self.splits, lengths, stream)
        work = self._upload.tensor.data_ptr()
        row_ctas = options["q_tiles"] * cluster
        self._one = work + 32 * self.num_work + 4 * self.num_seqs
        self._constants: tensors.Values = {
            "work": work,
            "num_work": self.num_work,
            "lengths": work + 32 * self.num_work,
            "num_seqs": self.num_seqs,
            "ring_depth": config.ring_depth(decode.arch, self.splits.num_items * num_kv_heads * row_ctas),
            "num_kv_heads": num_kv_heads,
            "q_tiles" if config.cluster == 1 else "row_ctas": row_ctas,
            "n_q": self.shape.n_q,
            "group_size": group,
        }
        self._expects = "expected_keys" in self._kernel.names  # an older bundle's kernel of clusters does not
        if self._expects:
            self._constants["expected_keys"] = self._expected_keys()
        if decode.window is not None:
            self._constants["window"] = decode.window
        if decode.softcap is not None:
            self._constants["softcap"] = decode.softcap

    def __repr__(self) -> str:
        return (
            f"<Plan of {self.num_seqs} sequences: {self.splits.num_items} of {self.num_work} work items, "
            f"up to {self.splits.max_splits} splits, {self._kernel.key}"
            + (f" in clusters of {self.cluster}>" if self.cluster > 1 else ">")
        )

    @property
    def num_seqs(self) -> int:
        """Sequences of the batch, fixed for the life of the plan."""
        return self.shape.num_seqs

    @property
    def num_work(self) -> int:
        """Entries of the work list, unused ones included, fixed for the life of the plan."""
        return self.splits.num_work

    @property
    def device_arrays(self) -> torch.Tensor:
        """What the kernels read, int32: entries (num_work, 8) of `SplitPlan.device_work`, then lengths (num_seqs,)."""
        return self._upload.tensor[: 8 * self.num_work + self.num_seqs]

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the kernels that `run` launches, in order."""
        return (self._kernel.key,)

    @property
    def partial_slots(self) -> int:
        """Partial results that the workspace must hold, whatever lengths an update brings."""
        # A sequence in several items brings at least one item more than there are sequences.
        spare = self.num_work - self.num_seqs
        return min(self.num_work, 2 * spare) if self._splits_some else 0

    def workspace_bytes(self) -> int:
        """Bytes that `run` needs as its workspace (16-byte aligned); 0 if nothing can be split."""
        return self._partials.nbytes

    def update(self, seq_lens: Any, *, stream: Any = None) -> None:
        """Replan for new lengths of the same sequences, in the same device memory and the same grid.

        A graph that captured `run` then computes the new step when it is replayed after this, on the same
        stream. The copy follows earlier work of `stream` (the current one by default): use the stream that
        runs the plan. Raises PlanError, and changes nothing, if the new plan does not fit.
        """
        raw = raw_stream(self.decode.torch_device, stream)
        check_not_capturing(self._driver, "update", raw)
        lengths = host_lengths(seq_lens)
        if len(lengths) != self.num_seqs:
            raise PlanError(f"seq_lens has {len(lengths)} sequences: expected {self.num_seqs}, as this plan was made")
        splits = plan_visible(lengths, self._window, **self._options)
        longest = int(lengths.max())
        short = {key for key, call in self._calls.items() if call.table_keys < longest}
        if short and self._fixed:
            widest = min(self._calls[key].table_keys for key in short)
            raise PlanError(
                f"seq_lens reach {longest} keys: a block table that this plan ran with, and that a graph may hold, "
                f"has room for {widest}; capture with a wider one"
            )
        for key in short:  # the next run checks its table again
            self._forget(key)
        self._send(splits, lengths, raw)
        self.splits = splits
        if self._expects:
            guess: tensors.Values = {"expected_keys": self._expected_keys()}
            self._constants |= guess
            for call in self._calls.values():
                call.rebind(guess)

    def update_on_device(self, seq_lens: torch.Tensor, *, stream: Any = None) -> None:
        """Replan from lengths that are on the device, without the host ever seeing them; a graph may capture it.

        `seq_lens`: int32 or int64 (num_seqs,), read when `stream` gets there, so each replay plans for what they
        hold then. The first call fixes a bound, the longest length that the host has planned for: longer ones are
        cut to it, as the block table may hold no more; negative ones are 0. It is one launch: it waits for nothing and
        copies nothing from or to the host. The plan is the one that `update` makes for these lengths (where that
        would refuse, having no room, nothing is split); the attribute `splits` remains the host's last one.

        Follows earlier work of `stream`, as `update` does. Raises ArgumentError, PlanError, CaptureError.
        """
        raw = raw_stream(self.decode.torch_device, stream)
        tensors.common("seq_lens", seq_lens, self.decode.torch_device, "torch.int32", "torch.int64")
        if tuple(seq_lens.shape) != (self.num_seqs,) or not seq_lens.is_contiguous():
            raise ArgumentError(
                f"seq_lens has shape {tuple(seq_lens.shape)} and strides {tuple(seq_lens.stride())}: expected "
                f"({self.num_seqs},), contiguous"
            )
        planner = self._device_planner
        if planner is None:
            planner = self._device_planner = DevicePlanner(
                self.decode.plan_kernel(stream=raw), work=self._upload.tensor.data_ptr(), num_work=self.num_work,
                num_seqs=self.num_seqs, max_length=int(self._lengths.max()), window=self._window,
                options=self._options,
            )  # fmt: skip
        if raw != self._ordered:
            self._order(raw)
        planner.launch(seq_lens.data_ptr(), seq_lens.element_size(), raw)
        if not self._driver.is_capturing(raw):
            self._upload.written(raw)
            self._ordered = raw

    def _expected_keys(self) -> int:
        """What a launch says of the lengths, for its kernel to look pages up by; any block table has room for it."""
        lengths = self._lengths
        return int(lengths[0]) if (lengths == lengths[0]).all() else 0

    @property
    def _longest(self) -> int:
        """Keys that a block table must have room for: a later update on the device may bring them."""
        bound = 0 if self._device_planner is None else self._device_planner.max_length
        return max(int(self._lengths.max()), bound)

    def _send(self, splits: SplitPlan, lengths: Any, stream: int) -> None:
        narrow = lengths.astype(np.int32)
        self._upload.write([splits.device_work(narrow), narrow, _ONE], stream)
        self._lengths = lengths
        self._ordered = stream

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        q_descale: Descale = None,
        k_descale: Descale = None,
        v_descale: Descale = None,
        softmax_scale: float | None = None,
        out_scale: float = 1.0,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
        stream: Any = None,
        check_block_table: bool = False,
        sinks: torch.Tensor | None = None,
        q_lens: torch.Tensor | None = None,
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the step for one layer; returns (out, lse).

        - `q`, `out`: (num_seqs * q_len, num_q_heads, head_dim) or (num_seqs, q_len, num_q_heads, head_dim), any
          strides in multiples of 16 bytes, head_dim contiguous. `out` is bf16, and so is `q` unless q_dtype is
          "e4m3": then it is float8_e4m3fn or uint8 codes (see `quantize.quantize_q`).
        - `k_cache`, `v_cache`: logical views (num_pages, page_size, num_kv_heads, head_dim) of any physical
          layout (see `layouts.kv_views`), strides in multiples of 16 bytes. fp8 caches are float8_e4m3fn or
          uint8 codes; formats below 8 bits are uint8 with packed rows, head_dim * bits / 8 bytes (see
          `formats.pack`), and 6-bit ones have strides in multiples of 48 bytes; those that `tcgen05` reads lie on 32
          bytes. What lies past a sequence's end, in the page of its last key, does not matter.
        - `block_table`: int32 (num_seqs, max_blocks). Entries at and past a sequence's end are never used, nor are
          those before its window; `check_block_table` checks all others on the host, which waits for the device.
        - descales: None (1), a number, or fp32 tensors of 1 element, (num_kv_heads,) or (num_seqs,
          num_kv_heads). `q_descale * k_descale * softmax_scale` (1 / sqrt(head_dim) by default) scales the
          scores and must be positive; `v_descale * out_scale` scales the output.
        - `lse`: fp32 (num_seqs, num_kv_heads, q_len * group_size), natural log, row token * group_size + head.
        - `workspace`: at least `workspace_bytes()` on 16 bytes; the plan keeps one of its own if None. Runs
          that may overlap need one each.
        - `stream`: a torch stream or a raw handle, the current stream by default.
        - `sinks`: fp32 (num_q_heads,), natural logits that join the softmax sum of every row of their head, and so
          the LSE; they have no value and are not capped. Taken where PagedDecode has sinks=True.
        - `q_lens`: int32 (num_seqs,) on the device, new tokens of each sequence, 0 to q_len (others are cut to
          that); they are the first tokens of its q_len in `q`, and a causal token i sees keys up to
          seq_len - q_lens + i. Rows of the others give 0 and -inf. Taken where PagedDecode has q_lens=True.
        - `k_scales`, `v_scales`: for nvfp4, and only there, the e4m3 scales of the blocks of 16 elements:
          float8_e4m3fn or uint8 codes (num_pages, page_size, num_kv_heads, head_dim / 16), blocks contiguous, other
          strides and the address in multiples of a row, head_dim / 16 bytes, or of 16 if that is less. The factor of
          the whole tensor is the descale (see `quantize.quantize_kv`).

        Tensors of an earlier run are known again by identity and address: one whose shape or strides were changed in
        place since must come as a new view. With `out`, `lse` and `workspace` given it allocates, copies and waits for
        nothing. Rows that see no key give 0, and an LSE of -inf or their sink. Raises ArgumentError before anything is
        launched.
        """
        if not self._alive:
            process.check(self._generation, repr(self))
        raw = self._current(self._current_of) if stream is None else raw_stream(self.decode.torch_device, stream)
        # The launches of an earlier run with these very objects need no second look: a weak reference that still gives
        # an object gives the same one (None: it died), and the addresses say that nobody gave it other memory. Written
        # out, as this is all that a repeated run costs (docs/notes/host_time.md).
        (
            q_, k_, v_, table_, out_, lse_, workspace_, q_at, k_at, v_at, table_at, out_at, lse_at, workspace_at,
            known_softmax_scale, known_out_scale, plain, call, enqueue,
        ) = self._recent.get(id(k_cache), UNKNOWN)  # fmt: skip
        if (
            k_() is not k_cache
            or q_() is not q
            or v_() is not v_cache
            or table_() is not block_table
            or out is None  # never so for a known call
            or out_() is not out
            or lse is None
            or lse_() is not lse
            or workspace_() is not workspace
            or q.data_ptr() != q_at
            or k_cache.data_ptr() != k_at
            or v_cache.data_ptr() != v_at
            or block_table.data_ptr() != table_at
            or out.data_ptr() != out_at
            or lse.data_ptr() != lse_at
            or (None if workspace is None else workspace.data_ptr()) != workspace_at
            or (
                softmax_scale is not known_softmax_scale
                and (type(softmax_scale) is not float or softmax_scale != known_softmax_scale)
            )
            or (out_scale is not known_out_scale and (type(out_scale) is not float or out_scale != known_out_scale))
            or check_block_table
            or (
                q_descale is not None
                or k_descale is not None
                or v_descale is not None
                or sinks is not None
                or q_lens is not None
                or k_scales is not None
                or v_scales is not None
                if plain
                else not call.same_others((q_descale, k_descale, v_descale, sinks, q_lens, k_scales, v_scales))
            )
        ):
            given = (
                q, k_cache, v_cache, block_table, q_descale, k_descale, v_descale, out, lse, workspace, sinks, q_lens,
                k_scales, v_scales,
            )  # fmt: skip
            enqueue, out, lse = self._bind(given, (softmax_scale, out_scale), raw, check_block_table)
        if raw != self._ordered:
            self._order(raw)
        enqueue(raw)
        return out, lse

    # -- inside --------------------------------------------------------------------------------

    def _bind(
        self, given: tuple[Any, ...], scales: tuple[Any, ...], raw: int, check_block_table: bool
    ) -> tuple[Callable[[int], None], torch.Tensor, torch.Tensor]:
        """Check every argument that changed, allocate what was not given, and pack the launches: (launch, out, lse)."""
        q, k, v, table, q_descale, k_descale, v_descale, out, lse, workspace, sinks, q_lens, k_scales, v_scales = given
        shape = self.shape
        dense = _is_dense(k) and _is_dense(v)
        where = (k.data_ptr(), v.data_ptr()) if dense else None
        call = None if where is None else self._calls.get(where)
        if call is not None and not check_block_table:
            # Most often one tensor is new since the last run, or stands at another address, and nothing else differs.
            if (out is None or lse is None) and call.is_alike(0, q):
                out, lse = self._outputs(q, out, lse, raw)
                given = (*given[:7], out, lse, *given[9:])
            try:
                if call.replace(given, scales, self._recent):
                    return call.decode.enqueue, out, lse
            except BaseException:  # an interrupt too: it may be half changed
                self._forget(where)
                raise
        # What an earlier run of this layer was given too has been checked, and its values are packed.
        same = [False] * len(given) if call is None else call.same(given)
        values: tensors.Values = dict(self._constants) if call is None else {}
        if not same[0]:
            values |= tensors.queries("q", q, shape, "q")
        if not (same[1] and same[2]):
            values |= tensors.caches(k, v, shape)
        if not all(same[12:]):
            values |= tensors.block_scales(k_scales, v_scales, k.shape[0], shape)
        if not same[3]:
            values |= tensors.block_table(table, shape, self._longest)
        values |= self._scales(scales, (q_descale, k_descale, v_descale))
        for name, descale, known in zip(_DESCALES, (q_descale, k_descale, v_descale), same[4:7], strict=True):
            if not known:
                if descale is None or isinstance(descale, int | float):
                    values |= {name: self._one, f"{name}_seq": 0, f"{name}_head": 0}
                else:
                    values |= tensors.descale(name, descale, shape)
        if check_block_table:
            self._check_table(table, k.shape[0], raw)
        if out is not None and not same[7]:
            values |= tensors.queries("out", out, shape, "o")
        if lse is not None and not same[8]:
            values |= tensors.lse(lse, shape)
        if not same[9]:
            values |= self._partials.values(workspace, raw)
        if not same[10]:
            values |= tensors.sinks(sinks, shape, wanted=self.config.sinks)
        if not same[11]:
            values |= tensors.q_lens(q_lens, shape, wanted=self.config.q_lens)
        if out is None or lse is None:
            out, lse = self._outputs(q, out, lse, raw)
            values |= tensors.queries("out", out, shape, "o") | tensors.lse(lse, shape)
        assert where is not None, "caches() refuses what is no dense tensor"
        try:
            if call is None:
                while len(self._calls) >= MAX_CALLS:
                    self._forget(next(iter(self._calls)))
                call = self._calls[where] = Call(self._kernel, values)
            else:
                call.rebind(values)
            call.remember((*given[:7], out, lse, *given[9:]), scales, self._recent)
        except BaseException:
            self._forget(where)
            raise
        call.table_keys = table.shape[1] * shape.page_size
        return call.decode.enqueue, out, lse

    def _outputs(
        self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None, raw: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`out` and `lse`, contiguous ones allocated where they are None; `q` has been checked."""
        if out is not None and lse is not None:
            return out, lse
        with on_stream(self.decode.torch_device, raw):
            # `empty_like` is almost twice as fast as `empty`.
            if out is None:
                out = torch.empty_like(q, dtype=torch.bfloat16, memory_format=torch.contiguous_format)
            if lse is None:
                if self._lse_like is None:  # of its dtype and shape, without memory of its own
                    self._lse_like = self._upload.tensor[:1].view(torch.float32).expand(self.shape.lse)
                lse = torch.empty_like(self._lse_like, memory_format=torch.contiguous_format)
        return out, lse

    def _scales(self, scales: tuple[Any, ...], descales: tuple[Any, ...]) -> tensors.Values:
        """The two scale parameters. Descales that are numbers join the one that they multiply."""
        softmax_scale, out_scale = scales
        scale_qs = self.shape.head_dim**-0.5 if softmax_scale is None else softmax_scale
        scale_qs = tensors.number("softmax_scale", scale_qs, positive=True)
        scale_o = tensors.number("out_scale", out_scale, positive=False)
        for name, descale in zip(_DESCALES, descales, strict=True):
            if isinstance(descale, int | float):
                number = tensors.number(name, descale, positive=name != "v_descale")
                if name == "v_descale":
                    scale_o *= number
                else:
                    scale_qs *= number
        if scale_qs < tensors.SMALLEST_SCALE:
            raise ArgumentError(
                f"softmax_scale times the descales that are numbers = {scale_qs:g}: expected at least "
                f"{tensors.SMALLEST_SCALE:g}, which the kernel's fp32 can hold"
            )
        return {"scale_qs": scale_qs, "scale_o": scale_o}

    def _forget(self, key: tuple[int, int] | None) -> None:
        call = self._calls.pop(key, None) if key else None
        if call is not None:
            call.forget(self._recent)

    def _check_table(self, table: torch.Tensor, num_pages: int, raw: int) -> None:
        """Every entry that the kernel will look up names a page. Waits for the device."""
        if self._driver.is_capturing(raw):
            raise CaptureError("check_block_table waits for the device, which a graph capture forbids: check before it")
        first = 8 * self.num_work
        with on_stream(self.decode.torch_device, raw):
            entries = table.cpu().numpy()
            lengths = self._upload.tensor[first : first + self.num_seqs].cpu().numpy()
        first_keys = np.arange(entries.shape[1]) * self.shape.page_size
        used = first_keys < lengths[:, None]
        if self._window.keys:
            used &= first_keys + self.shape.page_size > self._window.first_keys(lengths)[:, None]
        bad = np.argwhere(used & ((entries < 0) | (entries >= num_pages)))
        if len(bad):
            seq, column = (int(i) for i in bad[0])
            raise ArgumentError(
                f"block_table[{seq}, {column}] = {entries[seq, column]}: expected a page, 0 to {num_pages - 1}; "
                f"{len(bad)} such entries"
            )

    def _order(self, raw: int) -> None:
        """Make a stream that did not carry the upload follow it."""
        if raw != self._upload.stream and self._driver.is_capturing(raw):
            return  # an event from outside may not enter a capture; whoever replays orders it after the update
        self._upload.order(raw, *self._partials.allocated)
        self._ordered = raw


def _is_dense(x: Any) -> bool:
    """Whether it is a tensor that has an address."""
    return isinstance(x, torch.Tensor) and x.layout is torch.strided
