"""The corpus as a bundle of the product: manifest, cubins, and the PTX beside them.

With ptxas the cubins are real and run on a GPU. Without, they are ELF files that say what a compiler would say of
the kernels and hold no code, which is enough for the simulator: it executes the PTX.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptxsim.silicon.corpus import ARCH, corpus, key, module
from ptxsim.silicon.entries import Entry, Map
from tiny_bundle import cubin as hollow_cubin

from cubinery.aot.inspect import read_cubin
from cubinery.runtime.manifest import (
    PARAM_ALIGN,
    PARAM_SIZE,
    Artifact,
    FileRecord,
    KernelRecord,
    Manifest,
    ParamKind,
    ParamSpec,
    TensorMapSpec,
)

MIN_DRIVER = 12080
PARAM_BASE = 528
"""Where parameters start in sm_90's constant bank: alignments are those of the address there."""


def assemble(text: str, ptxas: str = "ptxas") -> bytes:
    """A cubin of PTX text. Raises RuntimeError with what ptxas says."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        source.write_text(text)
        command = [ptxas, f"-arch={ARCH}", "-O1", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr or done.stdout)
        return target.read_bytes()


def _spec(index: int, m: Map) -> TensorMapSpec:
    return TensorMapSpec(
        name=f"map{index}", pointer={"in": "input", "out": "output"}[m.pointer], dtype=m.dtype, box=m.box,
        element_strides=m.steps or (1,) * len(m.box), extents=m.extents, strides=m.strides, swizzle=m.swizzle,  # type: ignore[arg-type]
        interleave=m.interleave, oob_fill=m.fill,  # type: ignore[arg-type]
    )  # fmt: skip


def record(entry: Entry) -> KernelRecord:
    """How an entry is launched."""
    kinds: list[tuple[str, ParamKind]] = [("input", "pointer"), ("output", "pointer"), ("count", "i32")]
    kinds += [(f"map{i}", "tensor_map") for i in range(len(entry.maps))]
    params, end = [], PARAM_BASE
    for name, kind in kinds:
        size, align = PARAM_SIZE[kind], PARAM_ALIGN[kind]
        end = -(-end // align) * align
        params.append(ParamSpec(name, kind, end - PARAM_BASE, size, align))
        end += size
    return KernelRecord(
        role="k", symbol=entry.name, block=(entry.block, 1, 1), grid=(entry.grid, 1, 1), params=tuple(params),
        tensor_maps=tuple(_spec(i, m) for i, m in enumerate(entry.maps)), cluster=(entry.cluster, 1, 1),
        dynamic_smem=entry.shared,
    )  # fmt: skip


def write(folder: Path, entries: Iterable[Entry], *, ptxas: str = "", jobs: int = 0) -> Path:
    """Write the bundle of these entries to `folder`/sm_90a and return that."""
    root = folder / ARCH
    root.mkdir(parents=True, exist_ok=True)

    def artifact(entry: Entry) -> Artifact:
        text, launch = module(entry), record(entry)
        image = assemble(text, ptxas) if ptxas else hollow_cubin(launch, 90)
        if ptxas:
            found = [tuple(p) for p in read_cubin(image).kernels[entry.name].params]
            assert found == [(p.offset, p.size) for p in launch.params], f"{entry.name}: parameters at {found}"
        name = hashlib.sha256(image).hexdigest()
        return Artifact(
            key=key(entry.name), family="corpus", impl="ptx", arch=ARCH, config={}, source_digest="0" * 64,
            cubin=_file(root, f"cubins/{name}.cubin", image), kernels=(launch,),
            emitted={"ptx": _file(root, f"emitted/{entry.name}.ptx", text.encode())},
        )  # fmt: skip

    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
        artifacts = tuple(sorted(pool.map(artifact, entries), key=lambda a: a.key))
    Manifest(
        arch=ARCH, package_version="0.1.0", toolchain={"ptxas": ptxas or "none"}, min_driver=MIN_DRIVER,
        ptx_version="8.7", artifacts=artifacts,
    ).write(root)  # fmt: skip
    return root


def _file(root: Path, name: str, data: bytes) -> FileRecord:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return FileRecord(name, hashlib.sha256(data).hexdigest(), len(data))


def main() -> None:
    """Write the whole corpus, assembled."""
    parser = argparse.ArgumentParser(description="Assemble the silicon corpus into a bundle.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ptxas", default="ptxas")
    parser.add_argument("--jobs", type=int, default=0)
    options = parser.parse_args()
    root = write(options.folder, corpus().values(), ptxas=options.ptxas, jobs=options.jobs)
    print(f"{len(corpus())} kernels in {root}")


if __name__ == "__main__":
    main()
