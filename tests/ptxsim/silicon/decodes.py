"""Decodes of the smoke bundle, on a GPU and on the simulator: same inputs, same plan, outputs as they come."""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cubinery.aot.problems.paged_decode.mma import NUM_KV_HEADS, SPLITS, decode_problem
from cubinery.runtime.families import parse_key
from cubinery.runtime.library import Library
from cubinery.runtime.ops.paged_decode.config import MmaConfig

DATA = Path(__file__).parent / "data" / "h200_decodes.npz"
"""What an H200 answered."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Outputs of one decode, and a digest of its inputs."""

    inputs: str
    o: Any
    """(tokens, heads, head_dim) float64."""
    lse: Any


LENGTHS = (300, 0, 77)
"""Keys of the sequences that every key decodes: several tiles and a partial one, none, and less than one."""


def decode_keys(library: Library) -> list[str]:
    """Keys that answer a public call."""
    return [key for key in library if isinstance(parse_key(key)[0], MmaConfig)]


def problem(key: str) -> tuple[MmaConfig, int, dict[str, Any], str]:
    """(configuration, query heads a KV head, tensors, digest of the tensors) of a key's decode."""
    config, _ = parse_key(key)
    assert isinstance(config, MmaConfig)
    group = max(1, min(config.row_tile, 16 * config.q_len) // config.q_len)
    tensors = decode_problem(config, group, LENGTHS)
    digest = hashlib.sha256(repr((key, LENGTHS, SPLITS, group)).encode())
    for tensor in tensors.values():
        digest.update(_bits(tensor.contiguous()).tobytes())
    return config, group, tensors, digest.hexdigest()[:16]


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.uint8).numpy()


def decode(library: Library, key: str, simulator: Any = None) -> Decoded:
    """Run a key's problem on the library's device: the current GPU, or the simulator that is given."""
    import torch

    from cubinery.runtime.ops.paged_decode.op import PagedDecode

    config, group, tensors, digest = problem(key)
    device = "cpu" if simulator is not None else "cuda"
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    with contextlib.ExitStack() as stack:
        if simulator is not None:
            from cubinery.aot.ptxsim.hosts import watching

            stack.enter_context(watching(simulator))
            simulator.register_tensors(**moved)
        call = PagedDecode(
            library, head_dim=config.head_dim, page_size=config.page_size, kv_format=config.kv_format,
            q_len=config.q_len, causal=config.causal, q_dtype=config.q_dtype, impl=config.impl,
            row_tile=config.row_tile, ctas_per_sm=config.ctas_per_sm, cluster=config.cluster,
            pdl=config.pdl,
        )  # fmt: skip
        assert call.keys(group)[0] == key
        plan = call.plan(
            list(LENGTHS), num_q_heads=group * NUM_KV_HEADS, num_kv_heads=NUM_KV_HEADS,
            force_splits=SPLITS if config.cluster == 1 else 0,
        )  # fmt: skip
        o, lse = plan.run(*moved.values())
    if device == "cuda":
        torch.cuda.synchronize()
    return Decoded(digest, o.cpu().double().numpy(), lse.cpu().numpy())


def save(path: Path, decoded: dict[str, Decoded]) -> None:
    """Write decodes: o as bfloat16, which it is."""
    arrays: dict[str, Any] = {}
    for key, one in sorted(decoded.items()):
        arrays[f"{key} o"] = (one.o.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        arrays[f"{key} lse"] = one.lse
        arrays[f"{key} inputs"] = np.frombuffer(one.inputs.encode(), np.uint8)
    np.savez_compressed(path, **arrays)


def load(path: Path = DATA) -> dict[str, Decoded]:
    """Read them back; nothing where there is no file."""
    if not path.exists():
        return {}
    with np.load(path) as file:
        keys = [name.removesuffix(" o") for name in file.files if name.endswith(" o")]
        return {
            key: Decoded(
                file[f"{key} inputs"].tobytes().decode(),
                (file[f"{key} o"].astype(np.uint32) << 16).view(np.float32).astype(np.float64),
                file[f"{key} lse"],
            )
            for key in keys
        }
