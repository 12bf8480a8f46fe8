"""Broken kernels are reported: a fixed part of what `ptxsim.mutations.survey` breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ptxsim.mutations.operators import Mutation, map_mutations, mutations
from ptxsim.mutations.subjects import FURTHER, SCHEDULES, Corpus, Decode, examine, ring
from ptxsim.mutations.tensor_operators import DROPPED_WHOLLY
from ptxsim.silicon import bundle as corpus_bundle
from ptxsim.silicon.corpus import corpus

from cubinery.runtime.manifest import TensorMapSpec

CORPUS: dict[str, set[str]] = {
    "mbarrier_ring": set(),
    "bulk_load": set(),
    "tensor_load_multicast": {"drop fence", "drop cluster barrier", "drop cluster wait"},
    "wgmma_bf16_random": set(),
}
"""Kernels of which every mutant runs, and the classes of those that are as good as the original (docs/results)."""
KINDS = (
    "drop fence", "drop CTA barrier", "drop arrive", "expect_tx + 16", "drop wait", "flip parity",
    "swap coordinates 2, 3", "atomic that does not acquire", "atomic that does not release", "arrive twice",
    "arrive at the next mbarrier",
)  # fmt: skip
"""Of the decode, the first mutant of each of these."""
TEXT = """
mbarrier.init.shared::cta.b64 [%r1], 4; fence.mbarrier_init.release.cluster;
@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], 4096;
WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p2, [%r1], %r2;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd1, {%r4, %r5}], [%r1];
"""


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("drop fence", ""),
        ("init count - 1", "mbarrier.init.shared::cta.b64 [%r1], 3;"),
        ("expect_tx / 2", "@%p1 mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%r1], 2048;"),
        ("arrive without expect_tx", "@%p1 mbarrier.arrive.release.cta.shared::cta.b64 _, [%r1];"),
        ("drop wait", "setp.eq.u32 %p2, 0, 0;"),
        (
            "flip parity",
            "{ .reg .b32 other; xor.b32 other, %r2, 1; mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 "  # noqa: ISC004
            "%p2, [%r1], other; }",
        ),
    ],
)
def test_an_operator_changes_one_statement(kind: str, after: str) -> None:
    (found,) = [m for m in mutations(TEXT) if m.kind == kind]
    assert found.after == after
    assert found.apply(TEXT).replace(after, found.before, 1 if after else 0) in (TEXT, TEXT.replace(found.before, ""))


def test_coordinates_of_a_box_are_exchanged_in_place() -> None:
    (found,) = [m for m in mutations(TEXT) if m.kind.startswith("swap")]
    assert "{%r5, %r4}" in found.apply(TEXT)


def test_a_comment_is_no_site() -> None:
    assert list(mutations("// bar.sync 0;\n")) == []


def test_an_mbarrier_that_nobody_waits_for_is_no_site() -> None:
    unused = "mbarrier.init.shared::cta.b64 [%r1], 4; fence.mbarrier_init.release.cluster; bar.sync 0;"
    assert {m.kind for m in mutations(unused)} == {"drop CTA barrier"}
    assert {"drop init", "drop fence"} < {m.kind for m in mutations(TEXT)}


def test_the_number_of_a_barrier_matters_where_somebody_arrives_elsewhere() -> None:
    def numbers(text: str) -> list[str]:
        return [m.after for m in mutations(text) if m.kind == "another barrier"]

    assert numbers("bar.sync 1, 64;") == []
    assert numbers("bar.sync 1, 64; bar.arrive 2, 64;") == ["bar.sync 2,", "bar.arrive 3,"]


@pytest.mark.parametrize(("n", "read"), [(8, False), (16, True), (64, True), (80, True)])
def test_one_group_of_rows_has_no_stride(n: int, read: bool) -> None:
    text = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{%f1, %f2}}, %x1, %x2, 1, 1, 1, 0, 0;"
    assert ("descriptor: stride" in {m.kind for m in mutations(text)}) == read


PRODUCT = "tcgen05.mma.cta_group::1.kind::f16 [%r1], [%r2], %rd1, idesc, p;"
RUNS = f"""
WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%r3], 0;
{PRODUCT} {PRODUCT.replace("%rd1", "%rd2")} tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4];
{PRODUCT.replace("%rd1", "%rd3").replace("[%r2]", "%rd9")} tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 256;
"""


def test_of_a_run_of_products_the_first_is_broken() -> None:
    found = [m for m in mutations(RUNS) if m.kind == "drop tcgen05.mma"]
    assert [m.before for m in found] == [PRODUCT, PRODUCT.replace("%rd1", "%rd3").replace("[%r2]", "%rd9")]


@pytest.mark.parametrize(
    ("kind", "after"),
    [
        ("matrix B: stride", "{ .reg .b64 bad; xor.b64 bad, %rd1, 34359738368; tcgen05.mma.cta_group::1.kind::f16 "  # noqa: ISC004
         "[%r1], [%r2], bad, idesc, p; }"),
        ("instruction: N", "{ .reg .b32 bad; xor.b32 bad, idesc, 131072; tcgen05.mma.cta_group::1.kind::f16 "  # noqa: ISC004
         "[%r1], [%r2], %rd1, bad, p; }"),
        ("product that never adds", "{ .reg .pred bad; setp.ne.u32 bad, 0, 0; tcgen05.mma.cta_group::1.kind::f16 "  # noqa: ISC004
         "[%r1], [%r2], %rd1, idesc, bad; }"),
        ("commit to the next mbarrier",
         "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r4+8];"),
        ("half the columns", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r5, 128;"),
    ],
)  # fmt: skip
def test_an_operator_of_tensor_memory_changes_one_statement(kind: str, after: str) -> None:
    assert next(m for m in mutations(RUNS) if m.kind == kind).after == after


def test_all_fences_of_tensor_memory_are_dropped_at_once() -> None:
    text = "mov.b32 a, b; tcgen05.fence::before_thread_sync; bar.sync 0;\ntcgen05.fence::after_thread_sync; ret;"
    (found,) = [m for m in mutations(text) if m.kind == "drop every tcgen05.fence"]
    assert found.apply(text) == "mov.b32 a, b;  bar.sync 0;\n ret;"
    assert found.name == "drop every tcgen05.fence@1:14"
    one = text.replace("tcgen05.fence::after_thread_sync;", "")
    assert {m.kind for m in mutations(one)} == {"drop tcgen05.fence", "drop CTA barrier"}, "one is dropped already"


def test_every_field_of_a_tensor_map_is_broken() -> None:
    spec = TensorMapSpec("m", "p", "uint8", (128, 1), (1, 1), (128, 9), (128,), swizzle="128B")
    kinds = [m.kind for m in map_mutations(spec)]
    assert kinds == ["box 0 halved", "box 0 doubled", "box 1 doubled", "swizzle none", "swizzle 32B", "swizzle 64B"]


def test_the_survey_tries_more_of_every_hostile_kind() -> None:
    kinds = {name.partition(":")[0] for name in SCHEDULES} - {"fair"}
    assert {name.partition(":")[0] for name in FURTHER} == kinds
    assert not set(SCHEDULES) & set(FURTHER)
    for kind in kinds:  # a ring of three and one of four, whatever the kind
        assert {ring(name) for name in (*SCHEDULES, *FURTHER) if name.startswith(kind)} == {3, 4}


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Corpus]:
    root = corpus_bundle.write(tmp_path_factory.mktemp("mutations"), [corpus()[name] for name in CORPUS])
    return lambda name: Corpus(root, name)


@pytest.mark.parametrize("name", CORPUS)
def test_no_mutant_of_a_small_kernel_survives(name: str, entry: Callable[[str], Corpus]) -> None:
    subject = entry(name)
    assert subject.judge(None, "late:0") == ""
    verdicts = [examine(subject, mutation) for mutation in subject.mutations()]
    assert len(verdicts) >= 15
    assert {v.mutation.kind for v in verdicts if v.survived} == CORPUS[name]


def built(key: str, root: Path) -> Decode:
    """A decode of the smoke spec and what it requires, as the compiler makes them in `root`."""
    pytest.importorskip("cutlass", reason="the compiler is not installed")
    pytest.importorskip("torch", reason="the operator needs torch")
    from cubinery.aot.builder import BuildOptions, build
    from cubinery.aot.spec import load_specs
    from cubinery.aot.variants import expand

    arch = key.split("-")[1]
    specs = load_specs([Path(__file__).parents[3] / "kernel_specs" / "smoke.yaml"])
    items = [item for item in expand(specs, [arch]) if item.key in (key, f"paged_decode-{arch}-plan")]
    report = build(items, BuildOptions(out=root / "out", cache_dir=root / "cache"))
    assert report.ok, [(row.key, row.error) for row in report.rows]
    return Decode(root / "out" / arch, arch, key)


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """An fp8 decode for sm_90a."""
    return built("paged_decode-sm_90a-mma-d128-p16-kvfp8", tmp_path_factory.mktemp("decode"))


@pytest.fixture(scope="module")
def on_tensor_memory(tmp_path_factory: pytest.TempPathFactory) -> Decode:
    """An fp8 decode for sm_110a, on tensor memory."""
    return built("paged_decode-sm_110a-tcgen05-d128-p128-kvfp8", tmp_path_factory.mktemp("on_tensor_memory"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_decode_is_reported(kind: str, decode: Decode) -> None:
    mutation = next(m for m in decode.mutations() if m.kind == kind)
    assert isinstance(mutation, Mutation)
    assert not examine(decode, mutation, ("fair:0", "late:0")).survived


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, _ in DROPPED_WHOLLY])
def test_a_decode_that_does_not_order_tensor_memory_at_all_is_reported(kind: str, on_tensor_memory: Decode) -> None:
    """As it would look if nobody had thought of fences, or of waits for loads."""
    (mutation,) = [m for m in on_tensor_memory.mutations() if m.kind == kind]
    report = examine(on_tensor_memory, mutation, ("fair:0",)).report
    assert "without tcgen05.fence on both sides" in report or "before tcgen05.wait::ld" in report
