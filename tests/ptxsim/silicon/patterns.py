"""Inputs of the silicon corpus: edge patterns crossed with each other, then seeded random ones."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any

INT32 = (0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 255, 256, 0x7F, 0x80, 0x8000, 0x7FFF, 0xFFFF, 0x10000,
         0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFE0, 0x55555555, 0xAAAAAAAA,
         0xFF, 0x80808080)  # fmt: skip
F32 = (0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800000, 0x00800001, 0x3F800000, 0xBF800000,
       0x3F800001, 0x3F7FFFFF, 0x40000000, 0x3F000000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
       0x7F800001, 0xFFC12345, 0x4B800000, 0x4B800001, 0x34000000, 0x33800000, 0x5F000000, 0xDF000000, 0x4F000000,
       0xCF000000, 0x41200000, 0x3EAAAAAB, 0x1E3CE508)  # fmt: skip
F64 = (0, 1 << 63, 1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x8010000000000001, 0x3FF0000000000000,
       0xBFF0000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x7FEFFFFFFFFFFFFF, 0xFFEFFFFFFFFFFFFF,
       0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000, 0x7FF0000000000001, 0xFFF8123456789ABC,
       0x4340000000000000, 0x3CA0000000000000, 0x47EFFFFFE0000000, 0x47EFFFFFF0000000, 0x36A0000000000000,
       0x3690000000000000, 0x43E0000000000000, 0xC3E0000000000000, 0x4008000000000000, 0x3FD5555555555555,
       0x3810000000000000, 0x380FFFFFFFFFFFFF, 0x3FE0000000000000, 0x40EFFFC000000000, 0x40F0000000000000)  # fmt: skip
F16 = (0, 0x8000, 1, 0x8001, 0x03FF, 0x0400, 0x8400, 0x3C00, 0xBC00, 0x3C01, 0x3BFF, 0x4000, 0x3800, 0x7BFF, 0xFBFF,
       0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFE12, 0x6400, 0x6401, 0x1400, 0x4900, 0x3555, 0x2E66, 0x0200, 0x7800, 0x5BFF,
       0x4248, 0xC248, 0x7FFF)  # fmt: skip
BF16 = (0, 0x8000, 1, 0x8001, 0x007F, 0x0080, 0x8080, 0x3F80, 0xBF80, 0x3F81, 0x3F7F, 0x4000, 0x3F00, 0x7F7F, 0xFF7F,
        0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0x4380, 0x4381, 0x3400, 0x4120, 0x3EAB, 0x1E3D, 0x0040, 0x7F00, 0x5F00,
        0x4049, 0xC049, 0x7FFF)  # fmt: skip
EDGES = {"i": INT32, "f32": F32, "f64": F64, "f16": F16, "bf16": BF16}


def _random(kind: str, rng: np.random.Generator, n: int) -> Array:
    """Half of any bits, half near one."""
    bits = rng.integers(0, 1 << 64, n, dtype=np.uint64)
    near = rng.standard_normal(n) * np.exp2(rng.integers(-6, 7, n))
    half = np.arange(n) % 2 == 1
    match kind:
        case "f32":
            some = near.astype(np.float32).view(np.uint32).astype(np.uint64)
            return np.where(half, some | (bits << np.uint64(32)), bits)
        case "f64":
            return np.where(half, near.view(np.uint64), bits)
        case "f16":
            pair = near.astype(np.float16).view(np.uint16).astype(np.uint64)
            return np.where(half, pair | (np.roll(pair, 1) << np.uint64(16)), bits)
        case "bf16":
            pair = (near.astype(np.float32).view(np.uint32) >> 16).astype(np.uint64)
            return np.where(half, pair | (np.roll(pair, 1) << np.uint64(16)), bits)
        case _:
            small = rng.integers(0, 70, n, dtype=np.uint64)
            return np.where(half & (np.arange(n) % 4 == 1), small, bits)


def triples(kind: str, n: int = 512, seed: int = 0) -> tuple[Array, Array, Array]:
    """Three arrays of n values as uint64: edges in pairs and triples for the first half, random for the rest.

    16-bit kinds fill both halves of the low word.
    """
    rng = np.random.default_rng([seed, len(kind), ord(kind[0])])
    edges = np.array(EDGES[kind], np.uint64)
    result = []
    for _ in range(3):
        chosen = rng.choice(edges, n // 2)
        if kind in ("f16", "bf16"):
            chosen |= rng.choice(edges, n // 2) << np.uint64(16)
        elif kind == "i":
            signs = rng.choice(np.array([0, 0, 0xFFFFFFFF, 0x80000000, 1], np.uint64), n // 2)
            chosen |= signs << np.uint64(32)
        result.append(np.concatenate([chosen, _random(kind, rng, n - n // 2)]))
    result[0][: len(edges)] = edges  # every edge alone, for unary operations
    return result[0], result[1], result[2]


def small_integers(shape: tuple[int, ...], low: int, high: int, seed: int) -> Array:
    """Integers of [low, high], as int64: products of them are exact in every accumulator."""
    return np.random.default_rng([seed, 77]).integers(low, high + 1, shape)
