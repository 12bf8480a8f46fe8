"""cvt between all types that sm_90a has, and cvt.pack (PTX ISA 9.7.9.21, 9.7.9.22)."""

from __future__ import annotations

from ptxsim.silicon.entries import Entry, Op, op, raw, table
from ptxsim.silicon.patterns import triples

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_BITS = {"8": "h", "16": "h", "32": "", "64": "l"}
_ROUND = ("rn", "rz", "rm", "rp")


def _p(kind: str) -> str:
    return _BITS[kind.lstrip("bsuf")]


def _holds(to: str, of: str) -> bool:
    """Whether `to` has every value of `of`, so that there is nothing to saturate."""
    wider = int(to[1:]) > int(of[1:])
    return wider and (to[0] == of[0] or of[0] == "u")


def _integers() -> list[Op]:
    return [
        op(f"cvt{sat}.{to}.{of} d{_p(to)} {_p(of)}a")
        for to in _INTEGERS
        for of in _INTEGERS
        for sat in ("", ".sat")
        if to != of and not (sat and _holds(to, of))
    ]


def _to_float() -> list[Op]:
    ops = []
    for of in _INTEGERS:
        for to in ("f16", "f32", "f64", "bf16"):
            if to != "bf16" or of[1:] != "8":
                ops += [op(f"cvt.{mode}.{to}.{of} d{_p(to)} {_p(of)}a") for mode in _ROUND]
        ops += [op(f"cvt.rn.sat.f32.{of} d {_p(of)}a")]
    return ops


def _from_float(kind: str) -> list[Op]:
    p, ops = _p(kind), []
    for to in _INTEGERS[2:] if kind == "bf16" else _INTEGERS:
        ops += [op(f"cvt.{mode}i.{to}.{kind} d{_p(to)} {p}a") for mode in _ROUND]
        ops += [op(f"cvt.rzi.sat.{to}.{kind} d{_p(to)} {p}a")] if kind != "bf16" else []
        if kind == "f32":
            ops += [op(f"cvt.rni.ftz.{to}.f32 d{_p(to)} a"), op(f"cvt.rpi.ftz.{to}.f32 d{_p(to)} a")]
    if kind != "bf16":
        ops += [op(f"cvt.{mode}i.{kind}.{kind} d{p} {p}a") for mode in _ROUND]
        ops += [op(f"cvt.sat.{kind}.{kind} d{p} {p}a"), op(f"cvt.rni.sat.{kind}.{kind} d{p} {p}a")]
    if kind == "f32":
        ops += [op("cvt.ftz.f32.f32 d a"), op("cvt.ftz.sat.f32.f32 d a"), op("cvt.rmi.ftz.f32.f32 d a")]
    return ops


def _between() -> list[Op]:
    ops = []
    for mode in _ROUND:
        ops += [op(f"cvt.{mode}.f16.f32 dh a"), op(f"cvt.{mode}.sat.f16.f32 dh a"), op(f"cvt.{mode}.ftz.f16.f32 dh a")]
    for mode in ("rn", "rz"):
        for relu in ("", ".relu"):
            ops += [op(f"cvt.{mode}{relu}.f16.f32 dh a")] if relu else []
            ops += [op(f"cvt.{mode}{relu}.bf16.f32 dh a")]
            ops += [op(f"cvt.{mode}{relu}.{to}.f32 d a b") for to in ("f16x2", "bf16x2")]
            ops += [op(f"cvt.{mode}{relu}.tf32.f32 d a")]
    ops += [
        op("cvt.rna.tf32.f32 d a"),
        op("cvt.f32.f16 d ha"),
        op("cvt.f32.bf16 d ha"),
        op("cvt.sat.f32.f16 d ha"),
        op("cvt.ftz.f32.f16 d ha"),
    ]
    ops += [
        op("cvt.f64.f32 dl a"),
        op("cvt.ftz.f64.f32 dl a"),
        op("cvt.sat.f64.f32 dl a"),
        op("cvt.f64.f16 dl ha"),
        op("cvt.f64.bf16 dl ha"),
    ]
    for mode in _ROUND:
        ops += [
            op(f"cvt.{mode}.f32.f64 d la"),
            op(f"cvt.{mode}.ftz.f32.f64 d la"),
            op(f"cvt.{mode}.f16.f64 dh la"),
            op(f"cvt.{mode}.bf16.f64 dh la"),
        ]
        ops += [op(f"cvt.{mode}.bf16.f16 dh ha"), op(f"cvt.{mode}.f16.bf16 dh ha")]
    ops += [op("cvt.rn.sat.f32.f64 d la")]
    for to in ("e4m3x2", "e5m2x2"):
        for relu in ("", ".relu"):
            ops += [
                op(f"cvt.rn.satfinite{relu}.{to}.f32 dh a b"),
                op(f"cvt.rn.satfinite{relu}.{to}.f16x2 dh a"),
                op(f"cvt.rn{relu}.f16x2.{to} d ha"),
            ]
    return ops


def _packs() -> list[Op]:
    ops = [op(f"cvt.pack.sat.{to}.s32 d a b") for to in ("u16", "s16")]
    return ops + [op(f"cvt.pack.sat.{to}.s32.b32 d a b c") for to in ("u8", "s8", "u4", "s4", "u2", "s2")]


def _exhaustive() -> list[Op]:
    """Every fp8 code and every f16 with 4096 patterns of the input."""
    return [
        op(f"cvt.rn.f16x2.{kind} d ha", name=f"cvt.rn.f16x2.{kind} all codes") for kind in ("e4m3x2", "e5m2x2")
    ] + [raw("cvt.rn.satfinite.e4m3x2.f16x2 all", "cvt.rn.satfinite.e4m3x2.f16x2 %d, %a;", "b16"),
         raw("cvt.rn.satfinite.e5m2x2.f16x2 all", "cvt.rn.satfinite.e5m2x2.f16x2 %d, %a;", "b16")]  # fmt: skip


def entries() -> list[Entry]:
    """The conversions."""
    import numpy as np

    codes = np.arange(1024, dtype=np.uint64)
    sweep = (
        codes * np.uint64(64) + (codes % np.uint64(64)) + ((np.uint64(65535) - codes * np.uint64(63)) << np.uint64(16))
    )
    low = (codes % np.uint64(256)) | ((np.uint64(255) - codes % np.uint64(256)) << np.uint64(8))
    swept = np.where(codes < 256, low, sweep)
    return [
        table("convert_integers", _integers(), triples("i", 256, seed=31)),
        table("convert_integers_to_floats", _to_float(), triples("i", 256, seed=32)),
        table("convert_f32_to_integers", _from_float("f32"), triples("f32", 256, seed=33)),
        table("convert_f64_to_integers", _from_float("f64"), triples("f64", 256, seed=34)),
        table("convert_f16_to_integers", _from_float("f16"), triples("f16", 256, seed=35)),
        table("convert_bf16_to_integers", _from_float("bf16"), triples("bf16", 256, seed=36)),
        table("convert_floats_f32", _between(), triples("f32", 512, seed=37)),
        table("convert_floats_f64", [o for o in _between() if ".f64 " in o.name], triples("f64", 512, seed=38)),
        table(
            "convert_floats_f16",
            [o for o in _between() if " ha" in o.name or "f16x2 dh" in o.name],
            triples("f16", 512, seed=39),
        ),
        table("convert_packs", _packs(), triples("i", 256, seed=40)),
        table("convert_fp8", _exhaustive(), (swept, swept, swept)),
    ]
