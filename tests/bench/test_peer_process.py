"""A peer in a process of its own: right, wrong, raising, dying, hanging; none of it ends the run."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from fake_peers import AbsentPeer, MoodyPeer, counting_timer

from benchmarks import peers
from benchmarks.paged_decode import Result
from benchmarks.peer_process import MOST_FAILURES, Limits, PeerProcess, configurations
from benchmarks.shapes import SHAPES, Shape

CPU = torch.device("cpu")


def shape(h_q: int) -> Shape:
    return Shape("small", h_q, 1, 32, 16, (20, 3))


def test_a_peer_may_be_right_wrong_raise_die_and_hang(capfd: pytest.CaptureFixture[str]) -> None:
    """One test, because a process that imports torch takes seconds."""
    peer = PeerProcess("moody", MoodyPeer, counting_timer, CPU)
    try:
        peer.start()
        peer.join()
        assert (peer.version, peer.absent) == ("2", "")
        problems = [(shape(1), "fp8"), (shape(3), "bf16"), (shape(4), "fp8"), (shape(1), "fp8")]
        peer.request_first_calls(problems)
        right, raised, died = peer.first_calls(problems)
        assert (right.title, right.error) == ("1/1/32, p16, q 1, fp8", "")
        assert right.seconds > 0
        assert raised.error == "RuntimeError: page size 16 is not served"
        assert died.error == "its process ended with exit code 7"
        peer.request_first_calls(problems)  # there is nobody left to ask, and nothing that fails
        assert [call.error for call in peer.first_calls(problems)] == ["its process is gone"]

        # What follows is measured in a new process.
        assert getattr(peer.measure(shape(1), "fp8").time, "us", None) == 10.0
        assert peer.measure(shape(2), "fp8").error.startswith("wrong result, sequence 0: O relative L2")
        assert peer.measure(shape(3), "fp8").error == "RuntimeError: page size 16 is not served"
        peer._limits = Limits(measure=0.3)
        process = peer._process
        assert peer.measure(shape(5), "fp8").error == "no answer within 0.3 s: its process was ended"
        assert process.exitcode is not None
        peer._failures = MOST_FAILURES
        assert peer.measure(shape(1), "fp8").error == f"not tried: its process was lost {MOST_FAILURES} times"
        assert "chatter" not in capfd.readouterr().out
    finally:
        peer.close()


def test_an_absent_peer_says_so_in_its_process_or_before() -> None:
    peer = PeerProcess("absent", AbsentPeer, counting_timer, CPU)
    peer._connection, theirs = multiprocessing.Pipe()
    theirs.send((("", AbsentPeer.absent), True))
    peer.join()
    assert peer.absent == AbsentPeer.absent
    known = PeerProcess("absent", AbsentPeer, counting_timer, CPU, absent="not installed")
    known.start()
    known.join()
    known.request_first_calls([(shape(1), "fp8")])
    assert known._process is None
    assert list(known.first_calls([(shape(1), "fp8")])) == []


def test_a_device_that_no_longer_works_ends_the_process() -> None:
    peer = PeerProcess("faulty", MoodyPeer, counting_timer, CPU)
    peer._connection, theirs = multiprocessing.Pipe()
    faulty = Result(error="CUDA error: an illegal memory access was encountered")
    theirs.send((faulty, False))
    assert peer.measure(shape(1), "fp8") == faulty
    assert peer._connection is None  # the next one gets a new process
    assert theirs.recv() == ("measure", ((shape(1), "fp8"),))
    with pytest.raises(EOFError):
        theirs.recv()


def test_reasons_of_absence(monkeypatch: pytest.MonkeyPatch, tmp_path: pytest.TempPathFactory) -> None:
    monkeypatch.delenv("FA3_SO", raising=False)
    assert peers.absent("fa3_vllm") == "FA3_SO is not set"
    monkeypatch.setenv("FA3_SO", f"{tmp_path}/none.so")
    assert peers.absent("fa3_vllm") == f"FA3_SO = {tmp_path}/none.so: no such file"
    monkeypatch.setenv("FA3_SO", __file__)
    assert peers.absent("fa3_vllm") == ""
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    assert peers.absent("flashinfer_xqa") == "flashinfer is not installed"


def test_configurations_cover_what_a_kernel_may_depend_on() -> None:
    problems = [(s, kv) for s in SHAPES for kv in ("fp8", "bf16")]
    found = configurations(problems)
    key = lambda s, kv: (kv, s.h_q // s.h_k, s.d, s.page_size, s.q_len)  # noqa: E731
    assert {key(s, kv) for s, kv in found} == {key(s, kv) for s, kv in problems}
    assert len(found) == 10
    assert max(sum(s.lens) for s, _ in found) <= 5 * 64


def test_draft_mask_is_causal() -> None:
    mask = peers.draft_mask(3, 18)
    assert mask.dtype == torch.uint16
    assert tuple(mask.shape) == (3, 18, 2)
    words = mask.to(torch.int64)
    bits = torch.stack([words[..., j // 16] >> j % 16 & 1 for j in range(32)], -1)
    expected = torch.zeros(18, 32, dtype=torch.int64)
    expected[:, :18] = torch.ones(18, 18).tril()
    assert (bits == expected).all()
