"""What the host function of a CuTe DSL example launches, read from the IR that the DSL keeps beside its PTX.

Nothing of the driver is called or imitated: the host function is compiled, not run. Its IR says, for a problem whose
shapes are all known at compile time, which kernels it launches, with which grid and which operands. Pointers stay
symbolic (argument, byte offset); TMA descriptors become the parameters of cuTensorMapEncodeTiled, from the layout of
the global tensor, the basis of the copy and the swizzle of its shared-memory layout. Operands that hold nothing at run
time (layouts, coordinates) take no parameter in PTX either. Whatever is not understood raises ValueError.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_FORMATS = {
    "U8": "uint8", "U16": "uint16", "U32": "uint32", "S32": "int32", "F16_RN": "float16", "BF16_RN": "bfloat16",
    "F32_RN": "float32", "F32": "float32", "F32_FTZ_RN": "float32_ftz",
    "TF32_RN": "tfloat32", "TF32": "tfloat32",
    "U4": "16u4_align8b", "U4_UNPACK_U8": "16u4_align16b",
    "U6_UNPACK_U8": "16u6_align16b",
}  # fmt: skip
"""CuTe's names of element formats, as CUtensorMapDataType."""
_FORMAT_BITS = {"U8": 8, "U16": 16, "U32": 32}
_SWIZZLES = {(0, 4, 3): "none", (1, 4, 3): "32B", (2, 4, 3): "64B", (3, 4, 3): "128B", (2, 5, 2): "128B_atom_32B"}
_BITS = {"f32": 32, "tf32": 32, "i32": 32, "f16": 16, "bf16": 16, "i16": 16, "i8": 8, "i64": 64}


_RUN_TIME = "?"
"""A leaf whose value is an operand."""

# -- layouts as text ---------------------------------------------------------------------------------


def parse(text: str) -> Any:
    """A nested tuple of CuTe leaves: ints, or strings for coordinate strides such as 1@0@1."""
    at = 0

    def item() -> Any:
        nonlocal at
        if text[at] == "(":
            at += 1
            found = []
            while text[at] != ")":
                found.append(item())
                if text[at] == ",":
                    at += 1
            at += 1
            return tuple(found)
        match = re.compile(r"[^,()]+").match(text, at)
        assert match is not None
        at = match.end()
        word = match[0]
        if "?" in word:
            return _RUN_TIME
        return word if "@" in word else int(re.sub(r"\{.*\}", "", word))

    return item()


def leaves(tree: Any) -> list[Any]:
    return [leaf for branch in tree for leaf in leaves(branch)] if isinstance(tree, tuple) else [tree]


def filled(tree: Any, values: list[int]) -> Any:
    """The tree with its run-time leaves, in order, taken from the front of `values`."""
    if isinstance(tree, tuple):
        return tuple(filled(branch, values) for branch in tree)
    return values.pop(0) if tree == _RUN_TIME else tree


def _both(text: str) -> Any:
    """A tuple, or shape and stride of a layout."""
    return layout(text) if ":" in text else parse(text)


def layout(text: str) -> tuple[Any, Any]:
    """Shape and stride of `shape:stride`."""
    shape, stride = text.split(":")
    return parse(shape), parse(stride)


def at_path(tree: Any, path: Sequence[int]) -> Any:
    for index in path:
        tree = tree[index]
    return tree


# -- operands ----------------------------------------------------------------------------------------


def _bits(kind: str) -> int:
    if kind in _BITS:
        return _BITS[kind]
    found = re.match(r"(?:f|i|ui|si)(\d+)", kind)
    if found is None:
        raise ValueError(f"element type {kind}: its size is not known")
    return int(found[1])


@dataclass(frozen=True, slots=True)
class Op:
    """One line of the host function."""

    name: str
    operands: tuple[str, ...]
    """Names of SSA values in the order of the text."""
    types: tuple[str, ...]
    """Types of the operands, where the line lists one for each; aliases replaced."""
    result: str
    """Type of the first result."""
    text: str


def split(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes."""
    parts, depth, quoted, start = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in "<([{":
            depth += 1
        elif c in ">)]}" and text[i - 1] != "-":
            depth -= 1
        elif c == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [*parts, text[start:].strip()] if text[start:].strip() else parts


_LINE = re.compile(r"^ *(?:(?P<results>%[\w, %:#]+?) = )?(?P<name>[a-z_]+\.[\w.]+)(?P<rest>.*)$")


class Host:
    """The host function, evaluated as far as its launches need."""

    def __init__(self, text: str) -> None:
        aliases = dict(re.findall(r"^(![\w]+) = (.*)$", text, re.MULTILINE))
        body = text[text.index("  func.func @") :]
        self.ops: dict[str, Op] = {}
        self.order: list[Op] = []
        for line in body.splitlines()[1:]:
            found = _LINE.match(line)
            if found:
                self._read(found, aliases)

    def _read(self, found: re.Match[str], aliases: dict[str, str]) -> None:
        rest = re.sub(r"![a-z_][\w]*(?![\w.])", lambda m: aliases.get(m[0], m[0]), found["rest"])
        before, _, kinds = rest.rpartition(" : ") if " : " in rest else (rest, "", "")
        while before.count('"') % 2 or before.count("<{") != before.count("}>"):  # the colon stood inside something
            before, _, more = before.rpartition(" : ")
            kinds = f"{more} : {kinds}"
        sources, arrow, results = kinds.rpartition(" -> ")
        inner = sources if arrow else kinds
        parts = [part for kind in split(inner) for part in (split(kind[1:-1]) if kind.startswith("(") else [kind])]
        result = split(results[1:-1])[0] if results.startswith("(") else results or (parts[0] if parts else "")
        op = Op(found["name"], tuple(re.findall(r"%\w+", before)), tuple(parts), result, rest)
        self.order.append(op)
        for name in re.findall(r"%\w+", found["results"] or ""):
            self.ops[name] = op

    def launches(self) -> list[dict[str, Any]]:
        return [self._launch(op) for op in self.order if op.name == "cuda.launch_ex"]

    def _launch(self, op: Op) -> dict[str, Any]:
        config, *operands = op.operands
        created = self.ops[config].text
        block, grid = ([self.integer(v) for v in _group(created, word)] for word in ("blockDim", "gridDim"))
        cluster = [1, 1, 1]
        for other in self.order:
            if other.name == "cuda.launch_cfg.cluster_dim" and other.operands[0] == config:
                cluster = [self.integer(v) for v in other.operands[1:4]]
        symbol = re.search(r"@kernels::@(\w+)", op.text)
        assert symbol is not None
        kinds = op.types[1:]
        params = [param for v, kind in zip(operands, kinds, strict=True) if (param := self.param(v, kind)) is not None]
        return {"symbol": symbol[1], "block": block, "grid": grid, "cluster": cluster, "params": params}

    def run_time(self, name: str) -> list[int]:
        """The values of a tuple's or layout's run-time leaves, in their order."""
        op = self.ops[name]
        if op.name == "cute.derefine":
            return self._forgotten(op)
        if "?" not in op.result:
            return []
        match op.name:
            case "cute.make_int_tuple" | "cute.make_shape" | "cute.make_stride":
                return [v for operand in op.operands for v in self._run_time_leaf(operand)]
            case "cute.make_layout" if len(op.operands) == 2:
                return [*self.run_time(op.operands[0]), *self.run_time(op.operands[1])]
            case "cute.make_view":
                return self.run_time(op.operands[1])
            case "cute.tuple_mul":
                left, right = (self._tuple(operand) for operand in op.operands)
                return [left * right]
            case "cute.get_layout" | "cute.to_int_tuple" | "cute.get_scalars":
                return self.run_time(op.operands[0])
            case _:
                raise ValueError(f"{op.result} made by {op.name}: not understood")

    def _forgotten(self, op: Op) -> list[int]:
        """cute.derefine lets known leaves count as run-time values."""
        before, after = (re.search(r'"([^"]*)"', kind) for kind in (op.types[0], op.text.rpartition(" to ")[2]))
        assert before is not None
        assert after is not None
        known = leaves(filled(_both(before[1]), self.run_time(op.operands[0])))
        return [value for value, leaf in zip(known, leaves(_both(after[1])), strict=True) if leaf == _RUN_TIME]

    def _run_time_leaf(self, name: str) -> list[int]:
        op = self.ops[name]
        if op.name == "cute.assume":
            return self._run_time_leaf(op.operands[0])
        return self.run_time(name) if op.name.startswith("cute.") else [self.integer(name)]

    def _tuple(self, name: str) -> int:
        """A one-element tuple as a number."""
        found = self.run_time(name)
        text = re.search(r'"([^"]*)"', self.ops[name].result)
        assert text is not None
        return found[0] if found else int(text[1])

    def integer(self, name: str) -> int:
        op = self.ops.get(name)
        if op is not None and op.name == "cute.assume":
            return self.integer(op.operands[0])
        if op is not None and op.name == "cute.get_scalars":
            (value,) = self.run_time(op.operands[0])
            return value
        found = self.constant(name)
        if found is None or not float(found).is_integer():
            raise ValueError(f"{name}: expected a constant integer, not {self.ops.get(name)}")
        return int(found)

    def constant(self, name: str) -> float | None:
        """The number that an arith.constant holds."""
        op = self.ops.get(name)
        if op is None or op.name != "arith.constant":
            return None
        word = op.text.split(" : ")[0].strip()
        if word.startswith("0x"):
            return float(struct.unpack("<f", struct.pack("<I", int(word, 16)))[0])
        return {"true": 1.0, "false": 0.0}.get(word) if word in ("true", "false") else float(word)

    def param(self, name: str, kind: str) -> dict[str, Any] | None:
        """One kernel parameter, or None for an operand without run-time content."""
        if kind.startswith(("!cute.memref", "!cute.ptr")):
            return {"pointer": self.pointer(name), "behind": self.run_time(name) if "?" in kind else []}
        if "non_exec_tiled_tma" in kind:
            return {"map": self.tensor_map(name, kind)}
        if kind.startswith("!cute.tiled_mma"):
            # Three flags (accumulate, negate A, negate B) and the lanes to leave alone: all zero at the launch.
            return {"mma": kind}
        if kind == "f32":
            return {"bytes": struct.pack("<f", self._number(name)).hex()}
        if kind in ("i32", "i64", "i16", "i8"):
            return {"bytes": self.integer(name).to_bytes(_bits(kind) // 8, "little", signed=True).hex()}
        if "fast_divmod" in kind:
            return {"divisor": self._divisor(name, kind)}
        if kind.startswith("!cute.coord_tensor"):
            sizes = self._coordinates(name, kind)
            return {"bytes": struct.pack(f"<{len(sizes)}i", *sizes).hex()} if sizes else None
        if kind.startswith("!cute.") and "?" not in kind:
            return None
        raise ValueError(f"operand {name} of type {kind}: not understood, or known only at run time")

    def _coordinates(self, name: str, kind: str) -> list[int]:
        """The run-time extents of the coordinate tensor that comes with a TMA atom."""
        found = re.search(r'"([^"]*)">$', kind)
        assert found is not None
        shape, stride = layout(found[1])
        if _RUN_TIME in leaves(stride):
            raise ValueError(f"operand of type {kind}: strides known only at run time")
        op = self.ops[name]
        extents = leaves(self._layout(op.operands[0], op.types[0])[0])
        return [extents[i] for i, leaf in enumerate(leaves(shape)) if leaf == _RUN_TIME]

    def _layout(self, name: str, kind: str) -> tuple[Any, Any]:
        """Shape and stride of a tensor, run-time leaves filled in."""
        text, _ = _tensor(kind)
        return filled(layout(text), self.run_time(name)) if "?" in text else layout(text)

    def _number(self, name: str) -> float:
        found = self.constant(name)
        if found is None:
            raise ValueError(f"{name}: expected a constant")
        return found

    def _divisor(self, name: str, kind: str) -> int:
        return self.integer(self.ops[name].operands[0])

    def pointer(self, name: str) -> int:
        """The argument of the host function that a pointer or a tensor's first element is."""
        if name.startswith("%arg"):
            return int(name[4:])
        op = self.ops[name]
        if op.name in ("cute.make_view", "cute.get_iter", "cute.recast_iter", "cute.assume", "cute.derefine"):
            return self.pointer(op.operands[0])
        raise ValueError(f"pointer made by {op.name}: not understood")

    def tensor_map(self, name: str, kind: str) -> dict[str, Any]:
        """The parameters of cuTensorMapEncodeTiled for a TMA atom."""
        op = self.ops[name]
        tensor, smem = op.types[:2]
        _, element = _tensor(tensor)
        shape, stride = self._layout(op.operands[0], tensor)
        basis = re.search(r'tma_gbasis = <"([^"]*)">', kind)
        form = re.search(r"tma_format = (\w+)", kind)
        if basis is None or form is None or form[1] not in _FORMATS:
            raise ValueError(f"TMA atom {kind}: not understood")
        modes = zip(*(tree if isinstance(tree, tuple) else (tree,) for tree in layout(basis[1])), strict=True)
        unit = _FORMAT_BITS.get(form[1], _bits(element)) / _bits(element)
        found = [self._dimension(size, step, shape, stride, basis[1]) for size, step in modes]
        extents, strides = [extent for _, extent, _ in found], [pitch for _, _, pitch in found]
        # The tensor counts its own elements, the box those of the format: scale factors are copied in pairs.
        extents[0] = int(extents[0] / unit)
        swizzle = re.search(r"S<(\d),(\d),(\d)>", smem)
        code = (int(swizzle[1]), int(swizzle[2]), int(swizzle[3])) if swizzle else (0, 4, 3)
        sizes = [s * _bits(element) // 8 for s in strides[1:]]
        return {
            "dtype": _FORMATS[form[1]], "pointer": self.pointer(op.operands[0]), "extents": extents, "strides": sizes,
            "box": _shared_out([size for size, _, _ in found], op.text), "swizzle": _SWIZZLES[code],
        }  # fmt: skip

    @staticmethod
    def _dimension(size: Any, step: Any, shape: Any, stride: Any, basis: str) -> tuple[int, int, int]:
        """(box, extent, stride) of one dimension; nested modes follow each other without gaps."""
        total, extent, first = 1, 1, 0
        for part, name in zip(leaves(size), leaves(step), strict=True):
            count, *path = str(name).split("@")
            if count != "1":
                raise ValueError(f"TMA basis {basis}: steps by {count}")
            where = [int(p) for p in reversed(path)]
            pitch = at_path(stride, where)
            first = first or pitch
            total, extent = total * part, extent * at_path(shape, where)
        return total, extent, first


def _group(text: str, word: str) -> list[str]:
    """The values of `word = (%a, %b, %c)`."""
    found = re.search(word + r" = \(([^)]*)\)", text)
    if found is None:
        raise ValueError(f"{text}: expected {word}")
    return re.findall(r"%\w+", found[1])


def _shared_out(box: list[int], text: str) -> list[int]:
    """The box that each of the CTAs of a multicast copies: the outermost dimensions are divided among them."""
    found = re.search(r"num_multicast = (\d+)", text)
    count, result = int(found[1]) if found else 1, list(box)
    for i in reversed(range(len(box))):
        result[i], count = -(-box[i] // count), -(-count // box[i])
    return result


def _tensor(kind: str) -> tuple[str, str]:
    """(layout, element type) of a memref type."""
    found = re.search(r'!cute\.memref<([\w.]+(?:<[^>]*>)?),.*"([^"]*)">$', kind)
    if found is None:
        raise ValueError(f"tensor type {kind}: not understood")
    return found[2], found[1]
