"""Decodes on the simulator: build a few kernels, run the public call, compare with the reference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode_problem import Problem

from cubinery.aot.builder import BuildOptions, build
from cubinery.aot.ptxsim.driver import SimDriver
from cubinery.aot.ptxsim.hosts import watching
from cubinery.aot.references.paged_decode import paged_attention
from cubinery.aot.references.tolerances import PAGED_DECODE, deviation
from cubinery.aot.spec import Gates
from cubinery.aot.variants import BuildItem
from cubinery.runtime.arch import resolve
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import MmaConfig
from cubinery.runtime.ops.paged_decode.op import PagedDecode


@dataclass
class Simulated:
    """A bundle of decode kernels, open on the simulator of its arch."""

    arch: str
    folder: Path
    driver: SimDriver
    library: Library

    def check(
        self, config: MmaConfig, p: Problem, *, force_splits: int = 0, causal: bool | None = None,
        window: int | None = None, sinks: Any = None, softcap: float | None = None, q_lens: Any = None,
        cluster: int | None = None, **run_options: Any,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Run a problem on the kernel of `config`, hold it to the reference, return (o, lse) as torch tensors.

        `cluster`: CTAs of one, as many as the kernel has if None.
        """
        causal = config.causal if causal is None else causal
        choices = {
            "impl": config.impl,
            **{x: getattr(config, x) for x in ("row_tile", "ctas_per_sm", "pdl")},
            "cluster": cluster or config.cluster,
        }
        with watching(self.driver):
            given = {name: x for name, x in (("sinks", sinks), ("q_lens", q_lens)) if x is not None} | p.scales
            self.driver.register_tensors(q=p.q, k=p.k, v=p.v, block_table=p.table, **given)
            call = PagedDecode(
                self.library, head_dim=p.d, page_size=p.page_size, kv_format=p.kv_format, q_len=p.q_len,
                causal=causal, q_dtype=p.q_dtype, window=window, sinks=sinks is not None, softcap=softcap,
                q_lens=q_lens is not None, **choices,
            )  # fmt: skip
            assert call.keys(p.h_q // p.h_k)[0] == config.key(self.arch)
            plan = call.plan(p.lengths, **p.heads, force_splits=force_splits)
            o, lse = plan.run(*p.tensors, **given, **run_options)
        expected = paged_attention(
            *p.tensors, p.lengths, q_len=p.q_len, causal=causal, kv_format=p.kv_format, window=window, softcap=softcap,
            **given, **run_options,
        )  # fmt: skip
        found = deviation(o.double().numpy(), lse.numpy(), *expected)
        assert found.within(PAGED_DECODE[config.impl]), f"{config.key(self.arch)}, {force_splits} splits: {found}"
        return o, lse


def simulate(configs: Iterable[MmaConfig], arch: str, folder: Path) -> Simulated:
    """Build the decode kernels and what they require, with their PTX; the compile cache makes it quick."""
    target = resolve(arch)
    needed = {c.key(arch): c for config in configs for c in (config.canonical(), *config.requires())}
    items = [BuildItem(key, c, target, Gates(), ("ptx",), "test") for key, c in sorted(needed.items())]
    report = build(items, BuildOptions(out=folder))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    driver = SimDriver(arch, [folder / arch])
    return Simulated(arch, folder / arch, driver, Library.open(folder / arch, driver))
