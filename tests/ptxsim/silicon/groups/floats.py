"""f32, f64, f16, bf16 and packed halves: arithmetic with roundings, flushing, saturation; approximate functions."""

from __future__ import annotations

from ptxsim.silicon.entries import Close, Entry, Op, op, table
from ptxsim.silicon.patterns import triples

_ROUND = ("rn", "rz", "rm", "rp")
_SUBNORMAL = 1e-37


def _f32() -> list[Op]:
    ops = []
    for ftz in ("", ".ftz"):
        for sat in ("", ".sat"):
            for mode in _ROUND:
                ops += [op(f"{name}.{mode}{ftz}{sat}.f32 d a b") for name in ("add", "sub", "mul")]
                ops.append(op(f"fma.{mode}{ftz}{sat}.f32 d a b c"))
        for mode in _ROUND:
            ops += [op(f"div.{mode}{ftz}.f32 d a b"), op(f"rcp.{mode}{ftz}.f32 d a"), op(f"sqrt.{mode}{ftz}.f32 d a")]
        ops += [op(f"{name}{ftz}.f32 d a", Close("f32")) for name in ("abs", "neg")]
        for name in ("min", "max"):
            ops += [op(f"{name}{ftz}{nan}{xor}.f32 d a b") for nan in ("", ".NaN") for xor in ("", ".xorsign.abs")]
    ops += [op("add.f32 d a b"), op("mul.f32 d a b"), op("copysign.f32 d a b")]
    return ops


def _f64() -> list[Op]:
    ops = []
    for mode in _ROUND:
        ops += [op(f"{name}.{mode}.f64 dl la lb") for name in ("add", "sub", "mul", "div")]
        ops += [op(f"fma.{mode}.f64 dl la lb lc"), op(f"rcp.{mode}.f64 dl la"), op(f"sqrt.{mode}.f64 dl la")]
    ops += [op(f"{name}.f64 dl la lb") for name in ("min", "max", "copysign")]
    return [*ops, op("abs.f64 dl la"), op("neg.f64 dl la")]


def _approximate() -> list[Op]:
    near = Close("f32", 4e-7, _SUBNORMAL)
    ops = []
    for ftz in ("", ".ftz"):
        ops += [op(f"{name}.approx{ftz}.f32 d a", near) for name in ("rcp", "sqrt", "rsqrt", "ex2")]
        ops += [op(f"lg2.approx{ftz}.f32 d a", Close("f32", 4e-7, 3e-7))]
        ops += [op(f"{name}{ftz}.f32 d a b", near) for name in ("div.approx", "div.full")]
        # The error of sin and cos is only bounded near zero; the table's inputs are reduced to [-pi, pi] by range.
    ops += [op("tanh.approx.f32 d a", Close("f32", 1e-3, 1e-5))]
    ops += [
        op("rcp.approx.ftz.f64 dl lb", Close("f64", 1e-5, 1e-300)),
        op("rsqrt.approx.ftz.f64 dl lb", Close("f64", 1e-5, 1e-300)),
    ]
    ops += [op("rsqrt.approx.f64 dl lb", Close("f64", 1e-7, 1e-300))]
    return ops


def _halves(kind: str) -> list[Op]:
    """f16 or bf16: scalar and packed."""
    ops = []
    for pair in ("", "x2"):
        t = f"{kind}{pair}"
        d, a, b, c = ("d", "a", "b", "c") if pair else ("dh", "ha", "hb", "hc")
        loose = [("", "")]
        if kind == "f16":
            loose += [(".ftz", ""), ("", ".sat"), (".ftz", ".sat")]
        for ftz, sat in loose:
            ops += [op(f"{name}.rn{ftz}{sat}.{t} {d} {a} {b}") for name in ("add", "sub", "mul")]
            ops.append(op(f"fma.rn{ftz}{sat}.{t} {d} {a} {b} {c}"))
            if not sat:
                ops.append(op(f"fma.rn{ftz}.relu.{t} {d} {a} {b} {c}"))
                for name in ("min", "max"):
                    ops += [
                        op(f"{name}{ftz}{nan}{xor}.{t} {d} {a} {b}")
                        for nan in ("", ".NaN")
                        for xor in ("", ".xorsign.abs")
                    ]
                if kind == "f16":
                    ops += [op(f"{name}{ftz}.{t} {d} {a}", Close(kind)) for name in ("abs", "neg")]
        if kind == "bf16":
            ops += [op(f"{name}.{t} {d} {a}", Close(kind)) for name in ("abs", "neg")]
        ops += [op(f"fma.rn.oob{relu}.{t} {d} {a} {b} {c}") for relu in ("", ".relu")]
        flush = "" if kind == "f16" else ".ftz"
        rel = 2e-3 if kind == "f16" else 1.6e-2
        if not pair:  # packed ones compute the same functions
            ops += [
                op(f"ex2.approx{flush}.{t} {d} {a}", Close(kind, rel, 1e-7)),
                op(f"tanh.approx.{t} {d} {a}", Close(kind, rel, 1e-4)),
            ]
        else:
            near = Close(kind, rel, 1e-4)
            ops += [op(f"ex2.approx{flush}.{t} {d} {a}", Close(kind, rel, 1e-7)), op(f"tanh.approx.{t} {d} {a}", near)]
    return ops


def entries() -> list[Entry]:
    """The floating-point kernels."""
    a, b, c = triples("f32", 512, seed=24)
    trig = [op(f"{name}.approx{ftz}.f32 d a", Close("f32", 0, 6e-7)) for name in ("sin", "cos") for ftz in ("", ".ftz")]
    wide = triples("f64", 512, seed=25)
    near_zero = _angles(256)
    return [
        table("f32", _f32(), triples("f32", seed=21)),
        table("f64", _f64(), triples("f64", seed=22)),
        table("approximate", _approximate(), (a, wide[0], c)),
        table("approximate_division", [o for o in _approximate() if o.name.startswith("div")], (a, b, c)),
        table("trigonometric", trig, (near_zero, near_zero, near_zero)),
        table("f16", _halves("f16"), triples("f16", seed=23)),
        table("bf16", _halves("bf16"), triples("bf16", seed=26)),
    ]


def _angles(n: int):  # type: ignore[no-untyped-def]
    import numpy as np

    return np.linspace(-3.1, 3.1, n).astype(np.float32).view(np.uint32).astype(np.uint64)
