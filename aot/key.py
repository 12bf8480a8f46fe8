"""The versioned digest of everything that shapes a compiled artifact: the key of the build cache.

Readable keys are `KernelConfig.key`; a digest adds what a key cannot say: the kernel's sources, the
compiler's version, its flags and its environment. Nothing of Python's own version enters.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from cubinery.aot.errors import BuildError
from cubinery.runtime.config import KernelConfig

DIGEST_VERSION = "cubinery-artifact-1"
"""Changes when the meaning of a digest or the layout of what it names changes."""

COMPILER_DISTRIBUTIONS = "nvidia-cutlass-dsl"
"""Every installed distribution whose name starts so shapes the code."""

_ENVIRONMENT = re.compile(r"(CUTE_DSL|CUTLASS|MLIR|LLVM|NVVM|PTXAS|NVCC)_\w+|CUDA_(HOME|PATH|TOOLKIT_PATH)")
_OWN_ENVIRONMENT = ("CUTE_DSL_ARCH",)
"""Set by the builder itself for each worker."""


def digest(parts: Mapping[str, bytes | str]) -> str:
    """sha256 (hex) over labelled parts; labels and values are length-prefixed, so no two sets collide."""
    hasher = hashlib.sha256()
    for text in (DIGEST_VERSION, str(len(parts))):
        hasher.update(_prefixed(text.encode()))
    for label in sorted(parts):
        value = parts[label]
        hasher.update(_prefixed(label.encode()))
        hasher.update(_prefixed(value if isinstance(value, bytes) else value.encode()))
    return hasher.hexdigest()


def _prefixed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def artifact_digest(
    config: KernelConfig,
    arch: str,
    hosts: Iterable[str],
    *,
    sources: Mapping[str, bytes],
    toolchain: Mapping[str, str],
    environment: Mapping[str, str],
    compile_entry: str,
) -> str:
    """The cache key of one artifact; `hosts` are the host objects compiled beside the cubin.

    `sources` are `read_sources` of its family and implementation; the module of `compile_entry`
    (`module:function`) counts too, as it holds the flags.
    """
    canonical = config.canonical()
    parts: dict[str, bytes | str] = {
        "family": canonical.family,
        "impl": canonical.impl,
        "axes": json.dumps(canonical.axes(), sort_keys=True),
        "arch": arch,
        "hosts": json.dumps(sorted(hosts)),
        "compile_entry": compile_entry,
    }
    parts |= {f"source:{name}": data for name, data in sources.items()}
    compiler = source_file(compile_entry.partition(":")[0])
    parts["compiler"] = b"" if compiler is None else compiler.read_bytes()
    parts |= {f"toolchain:{name}": version for name, version in toolchain.items()}
    parts |= {f"environment:{name}": value for name, value in environment.items()}
    return digest(parts)


def source_digest(sources: Mapping[str, bytes]) -> str:
    """sha256 over the sources that define a kernel (`read_sources`); the manifest records it."""
    return digest({f"source:{name}": data for name, data in sources.items()})


def codegen_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that the compiler reads and that the caller, not the builder, has set."""
    given = os.environ if environ is None else environ
    return {k: v for k, v in sorted(given.items()) if _ENVIRONMENT.fullmatch(k) and k not in _OWN_ENVIRONMENT}


def toolchain() -> dict[str, str]:
    """Distribution name to version of every installed part of the compiler, without importing it."""
    found: dict[str, str] = {}
    prefix = COMPILER_DISTRIBUTIONS.replace("-", "_")
    for entry in sys.path:
        # `importlib.metadata` would open the metadata of every installed package to read its name.
        for folder in sorted(Path(entry or ".").glob(f"{prefix}*.dist-info")):
            name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
            found.setdefault(name.replace("_", "-").lower(), version)
    return dict(sorted(found.items()))


# -- source closure ------------------------------------------------------------------------------


def read_sources(family: str, impl: str) -> dict[str, bytes]:
    """Module name to source of all cubinery modules that a kernel, its declaration and its config import.

    Found by reading import statements, wherever they stand in a file; nothing is executed. Packages
    count only where something is imported from their `__init__`. A family's `abi` and `config` import every
    implementation's own, `<impl>_abi` and `<impl>_config`: of those only this one's count. Raises BuildError.
    """
    kernels = f"cubinery.aot.kernels.{family}"
    registries = (f"{kernels}.abi", f"cubinery.runtime.ops.{family}.config")
    roots = (f"{kernels}.{impl}", *registries)
    found: dict[str, bytes] = {}
    queue = list(roots)
    while queue:
        name = queue.pop()
        if name in found:
            continue
        file = source_file(name)
        if file is None:
            raise BuildError(f"{family}.{impl}: there is no module {name}: expected a file of that name")
        found[name] = file.read_bytes()
        imports = _imports(name, found[name], file)
        if name in registries:
            imports = frozenset(i for i in imports if _owner(i, family) in (None, impl))
        queue.extend(imports - found.keys())
    return dict(sorted(found.items()))


def _owner(name: str, family: str) -> str | None:
    """The implementation that a module `<impl>_abi` or `<impl>_config` is for; None for any other module."""
    owner, _, kind = name.rpartition(".")[2].rpartition("_")
    if kind not in ("abi", "config") or source_file(f"cubinery.aot.kernels.{family}.{owner}") is None:
        return None
    return owner


@lru_cache(maxsize=256)
def _imports(module: str, source: bytes, file: Path) -> frozenset[str]:
    """Names of the cubinery modules that a module's text imports."""
    found: set[str] = set()
    is_package = file.name == "__init__.py"
    try:
        tree = ast.parse(source, str(file))
    except SyntaxError as error:
        raise BuildError(f"{file}:{error.lineno}: {error.msg}") from None
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else is_package - node.level]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from package import name`: a module of the package, else something of its __init__.
                child = f"{base}.{alias.name}"
                found.add(child if _ours(child) and source_file(child) is not None else base)
    return frozenset(name for name in found if _ours(name))


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement of a module, however deep; expressions, most of a tree, hold none."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            queue.extend(getattr(node, field, ()))


def _ours(name: str) -> bool:
    return name.startswith("cubinery.")


def source_file(name: str) -> Path | None:
    """The file of a module, found without importing anything; None where there is none."""
    spec = _spec(name)
    return None if spec is None or not spec.origin else Path(spec.origin)


def _spec(name: str) -> ModuleSpec | None:
    parent, _, _ = name.rpartition(".")
    if not parent:
        loaded = sys.modules.get(name)
        return PathFinder.find_spec(name) if loaded is None else loaded.__spec__
    package = sys.modules.get(parent)
    if package is not None and hasattr(package, "__path__"):
        return PathFinder.find_spec(name, list(package.__path__))
    above = _spec(parent)
    if above is None or above.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(above.submodule_search_locations))
