"""Kernel records from JSON: parameters, tensor maps, and that their names fit each other."""

from __future__ import annotations

import marshal
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_args

from cubinery.runtime.manifest import (
    MAX_PARAM_BYTES,
    PARAM_ALIGN,
    PARAM_SIZE,
    Interleave,
    KernelRecord,
    L2Promotion,
    OobFill,
    ParamSpec,
    Resources,
    Swizzle,
    TensorMapSpec,
)
from cubinery.runtime.manifest_checks import (
    NAME,
    boolean,
    choice,
    dims,
    fail,
    integer,
    list_of,
    names_of,
    record_of,
    text,
    unique,
)

T = TypeVar("T")

TENSOR_MAP_BITS = {
    "uint8": 8, "uint16": 16, "uint32": 32, "int32": 32, "uint64": 64, "int64": 64, "float16": 16, "float32": 32,
    "float64": 64, "bfloat16": 16, "float32_ftz": 32, "tfloat32": 32, "tfloat32_ftz": 32,
    "16u4_align8b": 4, "16u4_align16b": 4, "16u6_align16b": 6,
}  # fmt: skip
"""Bits of one element of each tensor map data type, spelt as CUtensorMapDataType in lower case."""

TMEM_COLUMNS = (0, 32, 64, 128, 256, 512)
"""What a CTA can allocate of tensor memory."""

_SYMBOL = re.compile(r"[A-Za-z_$][A-Za-z0-9_$.]*\Z")

Memo = dict[bytes, Any]
"""Parts of this document that were already found to be valid, by their exact value."""


def read_kernel(value: Any, where: str, memo: Memo) -> KernelRecord:
    """A launch record whose parameters, maps and grid fit each other. Raises InvalidError naming the place."""
    k = record_of(value, KernelRecord, where)
    text(k["role"], f"{where}.role", NAME, "a name")
    text(k["symbol"], f"{where}.symbol", _SYMBOL, "a symbol")
    k["block"] = dims(k["block"], f"{where}.block", 1024)
    k["grid"] = names_of(k["grid"], f"{where}.grid", 3)
    k["params"] = _once(k["params"], f"{where}.params", memo, _params)
    maps = list_of(k.get("tensor_maps", []), f"{where}.tensor_maps")
    k["tensor_maps"] = tuple(_once(t, f"{where}.tensor_maps[{i}]", memo, _tensor_map) for i, t in enumerate(maps))
    if "cluster" in k:
        k["cluster"] = dims(k["cluster"], f"{where}.cluster", 16)
    boolean(k.get("smaller_clusters", False), f"{where}.smaller_clusters")
    integer(k.get("dynamic_smem", 0), f"{where}.dynamic_smem", 0, 256 * 1024)
    integer(k.get("carveout", -1), f"{where}.carveout", -1, 100)
    columns = k.get("tmem_columns", 0)
    if type(columns) is not int or columns not in TMEM_COLUMNS:
        fail(f"{where}.tmem_columns", f"{columns!r:.60}: expected one of {', '.join(map(str, TMEM_COLUMNS))}")
    integer(k.get("min_ctas_per_sm", 1), f"{where}.min_ctas_per_sm", 1, 32)
    boolean(k.get("pdl", False), f"{where}.pdl")
    if k.get("resources") is not None:
        k["resources"] = _resources(k["resources"], f"{where}.resources")
    record = KernelRecord(**k)
    _check_names(record, where)
    return record


def _resources(value: Any, where: str) -> Resources:
    r = record_of(value, Resources, where)
    return Resources(**{name: integer(number, f"{where}.{name}", 0) for name, number in r.items()})


def _once(value: Any, where: str, memo: Memo, parse: Callable[[Any, str], T]) -> T:
    """`parse(value, where)`, once for equal values: the keys of a family repeat the same parameter
    lists and tensor maps, and opening a bundle of a hundred keys must stay quick.

    marshal tells 1, 1.0 and true apart; what it wrote is only compared, never loaded.
    """
    try:
        exact = marshal.dumps(value, 2)
    except ValueError:
        fail(where, "nested too deeply")
    if exact not in memo:
        memo[exact] = parse(value, where)
    found: T = memo[exact]
    return found


def _params(value: Any, where: str) -> tuple[ParamSpec, ...]:
    specs: list[ParamSpec] = []
    end = 0
    for i, raw in enumerate(list_of(value, where)):
        at = f"{where}[{i}]"
        p = record_of(raw, ParamSpec, at)
        text(p["name"], f"{at}.name", NAME, "a name")
        kind, offset, size, align = choice(p["kind"], PARAM_SIZE, f"{at}.kind"), p["offset"], p["size"], p["align"]
        if type(size) is not int or size != PARAM_SIZE[kind]:
            fail(f"{at}.size", f"{size!r:.60}: expected {PARAM_SIZE[kind]}, the size of {kind}")
        if type(align) is not int or align != PARAM_ALIGN[kind]:
            fail(f"{at}.align", f"{align!r:.60}: expected {PARAM_ALIGN[kind]}, the alignment of {kind}")
        if type(offset) is not int or offset < end or offset % min(align, 16) or offset + size > MAX_PARAM_BYTES:
            expected = f"a multiple of {min(align, 16)} from {end} to {MAX_PARAM_BYTES - size}"
            fail(f"{at}.offset", f"{offset!r:.60}: expected {expected}")
        end = offset + size
        specs.append(ParamSpec(**p))
    unique([s.name for s in specs], where, "parameter")
    return tuple(specs)


_SWIZZLE_BYTES = {"none": 1 << 32, "32B": 32, "64B": 64, "128B": 128}


def _tensor_map(value: Any, where: str) -> TensorMapSpec:
    t = record_of(value, TensorMapSpec, where)
    text(t["name"], f"{where}.name", NAME, "a name")
    text(t["pointer"], f"{where}.pointer", NAME, "a name")
    bits = TENSOR_MAP_BITS[choice(t["dtype"], TENSOR_MAP_BITS, f"{where}.dtype")]
    box = list_of(t["box"], f"{where}.box")
    rank = len(box)
    if not 1 <= rank <= 5:
        fail(f"{where}.box", f"rank {rank}: expected 1 to 5 dimensions")
    t["box"] = tuple(integer(v, f"{where}.box[{i}]", 1, 256) for i, v in enumerate(box))
    steps = list_of(t["element_strides"], f"{where}.element_strides", rank)
    t["element_strides"] = tuple(integer(v, f"{where}.element_strides[{i}]", 1, 8) for i, v in enumerate(steps))
    t["extents"] = names_of(t["extents"], f"{where}.extents", rank)
    t["strides"] = names_of(t["strides"], f"{where}.strides", rank - 1)
    choice(t.get("swizzle", "none"), get_args(Swizzle), f"{where}.swizzle")
    interleave = choice(t.get("interleave", "none"), get_args(Interleave), f"{where}.interleave")
    choice(t.get("l2_promotion", "none"), get_args(L2Promotion), f"{where}.l2_promotion")
    choice(t.get("oob_fill", "zero"), get_args(OobFill), f"{where}.oob_fill")
    spec = TensorMapSpec(**t)
    limit = _SWIZZLE_BYTES[spec.swizzle]
    if interleave == "none" and bits >= 8 and spec.box[0] * bits // 8 > limit:
        fail(f"{where}.box[0]", f"{spec.box[0]} of {spec.dtype}: expected at most {limit} bytes, the swizzle's span")
    if interleave != "none" and rank < 3:
        fail(f"{where}.interleave", f"{interleave!r} with rank {rank}: expected rank 3 or more")
    return spec


def _check_names(record: KernelRecord, where: str) -> None:
    """Parameters and maps must fit each other, and a launch value must mean one thing everywhere."""
    kinds = {p.name: p.kind for p in record.params}
    maps = [t.name for t in record.tensor_maps]
    unique(maps, f"{where}.tensor_maps", "map")
    for i, param in enumerate(record.params):
        if param.kind == "tensor_map" and param.name not in maps:
            fail(f"{where}.params[{i}].name", f"{param.name!r}: no tensor map has this name")
    for i, spec in enumerate(record.tensor_maps):
        at = f"{where}.tensor_maps[{i}]"
        if kinds.get(spec.name) != "tensor_map":
            fail(f"{at}.name", f"{spec.name!r}: no parameter of kind tensor_map has this name")
        if kinds.get(spec.pointer, "pointer") != "pointer":
            fail(f"{at}.pointer", f"{spec.pointer!r} is a parameter of kind {kinds[spec.pointer]}: expected a pointer")
        _integers(spec.extents, kinds, f"{at}.extents", spec.pointer)
        _integers(spec.strides, kinds, f"{at}.strides", spec.pointer)
    pointers = {t.pointer for t in record.tensor_maps}
    _integers(record.grid, kinds, f"{where}.grid", *pointers)


def _integers(names: tuple[str | int, ...], kinds: dict[str, Any], where: str, *pointers: str) -> None:
    for i, name in enumerate(names):
        if isinstance(name, int):
            continue
        kind = "pointer" if name in pointers else kinds.get(name, "i32")
        if kind not in ("i32", "i64"):
            fail(f"{where}[{i}]", f"{name!r} is of kind {kind}: expected an integer")
