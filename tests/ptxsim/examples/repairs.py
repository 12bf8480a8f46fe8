"""What cures the defects that the simulator finds in the published decode kernels, as edits of their PTX text.

Each edit is found by the shape of the code around it, and raises where it finds nothing to cure.
"""

from __future__ import annotations

import re


def _at(text: str, position: int, addition: str) -> str:
    return text[:position] + addition + text[position:]


def initialisation_fence(ptx: str) -> str:
    """The mbarriers' initialisation made visible to the async proxy before the first CTA-wide barrier."""
    return _at(ptx, ptx.index("\tbar.sync \t0;"), "\tfence.mbarrier_init.release.cluster;\n")


def balanced_bytes(ptx: str) -> str:
    """The second phase of Q's barrier, which only orders the store of O, expects no bytes of a copy."""
    *_, last = re.finditer(r"mov\.b32 \t(%r\d+), 2048;(?=\n\tmbarrier\.arrive\.expect_tx)", ptx)
    return ptx[: last.start()] + f"mov.b32 \t{last[1]}, 0;" + ptx[last.end() :]


def answered_arrivals(ptx: str) -> str:
    """An answer to each arrival of one MMA warp, and no arrival after the other's last wait: neither laps the other."""
    *_, loop = re.finditer(r"@(%p\d+) bra \t\$L__BB0_\d+;\n(?:(?!\tbar|.*bra).*\n)*?\tbar\.sync \t2, 64;", ptx)
    ptx = ptx.replace("\tbar.arrive 2, 64;", "\tbar.arrive 2, 64;\n\tbar.sync 4, 64;")
    ptx = ptx.replace("\tbar.sync \t2, 64;", "\tbar.sync \t2, 64;\n\tbar.arrive 4, 64;")
    return ptx.replace("\tbar.arrive 3, 64;", f"\t@!{loop[1]} bar.arrive 3, 64;")


def maximum_barrier(ptx: str) -> str:
    """One more barrier after the running maximum has been read."""
    reads = r"\tbar\.sync \t1, 128;\n(?:\tld\.shared\.v2\.b64[^\n]*\n|\tmov\.b64[^\n]*\n)+"
    found = next(re.finditer(reads, ptx))
    return _at(ptx, found.end(), "\tbar.sync \t1, 128;\n")


def zero_fill_wait(ptx: str) -> str:
    """wait::st behind the stores that clear the accumulator of O."""
    found = re.search(r"\ttcgen05\.st\.sync\.aligned\.32x32b[^{]*\{(%r\d+)(?:, \1)+\};\n", ptx)
    assert found is not None
    return _at(ptx, found.end(), "\ttcgen05.wait::st.sync.aligned;\n")


def store_wait(ptx: str) -> str:
    """The stores of partial O waited for before the CTA, and with it the shared memory that they read, goes."""
    *_, last = re.finditer(r"\tcp\.async\.bulk\.tensor\.\dd\.global[^\n]*\n", ptx)
    return _at(ptx, last.end(), "\tcp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;\n")


def exchange_barrier(ptx: str) -> str:
    """A barrier after the buffer, through which two pairs of warps exchange their maxima, has been read."""
    changed, count = re.subn(r"(\tbar\.sync \t2, 128;\n\tld\.shared\.b32[^\n]*\n)", r"\1\tbar.sync \t2, 128;\n", ptx)
    assert count
    return changed
