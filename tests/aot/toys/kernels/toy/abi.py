"""Launch records of the toy family."""

from __future__ import annotations

from cubinery.runtime.arch import Arch
from cubinery.runtime.config import KernelConfig
from cubinery.runtime.manifest import KernelRecord, ParamKind, pack_params
from cubinery.runtime.ops.toy.config import HelperConfig, ScaleConfig

THREADS = 128


def declare(config: KernelConfig, arch: Arch) -> KernelRecord:
    if isinstance(config, HelperConfig):
        return KernelRecord(
            "helper", "cubinery_toy_helper_0", (THREADS, 1, 1), ("n", 1, 1), pack_params(("x", "pointer"))
        )
    assert isinstance(config, ScaleConfig)
    # The body `undeclared` declares a parameter that no kernel has: a declaration that is wrong.
    wrong: tuple[tuple[str, ParamKind], ...] = (("x", "pointer"),) if config.body == "undeclared" else ()
    return KernelRecord(
        role="scale",
        symbol="cubinery_toy_scale_0",
        block=(THREADS, 1, 1),
        grid=("ctas", 1, 1),
        params=pack_params(("src", "pointer"), ("dst", "pointer"), ("n", "i32"), ("factor", "f32"), *wrong),
        dynamic_smem=4096 if config.body == "dynamic_smem" else 0,
        min_ctas_per_sm=config.ctas_per_sm,
    )
