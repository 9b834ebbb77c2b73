"""Loops written by hand, which no adapter names: the universal layer finds their forwards, backwards and messages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ppdiag.model import Flag, Kind
from tests.e2e.conftest import read_results, read_trace, torchrun

if TYPE_CHECKING:
    from pathlib import Path

    from ppdiag.trace import Trace

RANKS, MICROBATCHES, STEPS = 3, 4, 2
JOBS = {
    "batch_isend_irecv": ("hand_1f1b.py",),
    "send_recv": ("hand_send_recv.py", "--evaluate"),
    "send_recv_without_modules": ("hand_send_recv.py", "--functional"),
}


@pytest.fixture(scope="module", params=list(JOBS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trace, Any, Any]:
    """(job, trace, results with the recorder, results without it)."""
    folder: Path = tmp_path_factory.mktemp("hand")
    script, *options = JOBS[request.param]
    arguments = [script, *options, "--steps", str(STEPS), "--microbatches", str(MICROBATCHES), "--results"]
    torchrun(RANKS, *arguments, str(folder / "on"), run_dir=folder / "run")
    torchrun(RANKS, *arguments, str(folder / "off"))
    on, off = read_results(folder / "on", RANKS), read_results(folder / "off", RANKS)
    return request.param, read_trace(folder / "run"), on, off


def of_step(spans: np.ndarray, step: int, *kinds: Kind) -> np.ndarray:
    return spans[(spans["step"] == step) & np.isin(spans["kind"], [int(kind) for kind in kinds])]


@pytest.mark.slow
def test_every_step_has_each_microbatch_forward_and_backward_once(run: Any) -> None:
    for spans in run[1].by_rank().values():
        for step in range(STEPS):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                found = of_step(spans, step, kind)
                assert sorted(found["microbatch"].tolist()) == list(range(MICROBATCHES))
                assert (found["flags"] == int(Flag.INFERRED)).all()


@pytest.mark.slow
def test_the_backward_comes_after_the_forward_of_its_microbatch(run: Any) -> None:
    for spans in run[1].by_rank().values():
        for step in range(STEPS):
            ended = {int(f["microbatch"]): f["end_ns"] for f in of_step(spans, step, Kind.FORWARD)}
            for backward in of_step(spans, step, Kind.BACKWARD):
                assert backward["start_ns"] >= ended[int(backward["microbatch"])]


@pytest.mark.slow
def test_messages_have_the_right_peers_and_are_all_waited_for(run: Any) -> None:
    for rank, spans in run[1].by_rank().items():
        neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < RANKS]
        expected = {(int(kind), peer): MICROBATCHES for kind in (Kind.SEND, Kind.RECV) for peer in neighbours}
        for step in range(STEPS):
            messages = of_step(spans, step, Kind.SEND, Kind.RECV)
            assert Counter((int(m["kind"]), int(m["peer"])) for m in messages) == expected
            assert (messages["flags"] == 0).all()
            assert set(messages["size_bytes"].tolist()) == {2 * 16 * 4}


@pytest.mark.slow
def test_both_ends_of_a_message_carry_the_same_number(run: Any) -> None:
    spans = run[1].spans
    ends = [
        {(int(m[src]), int(m[dst]), int(m["tag"]), int(m["seq"])) for m in spans[spans["kind"] == kind]}
        for kind, src, dst in ((Kind.SEND, "rank", "peer"), (Kind.RECV, "peer", "rank"))
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == np.count_nonzero(spans["kind"] == Kind.SEND)


@pytest.mark.slow
def test_an_evaluation_without_gradients_has_forwards_and_no_backwards(run: Any) -> None:
    job, trace, _, _ = run
    if job != "send_recv":
        pytest.skip("this job does not evaluate")
    for spans in trace.by_rank().values():
        found = of_step(spans, STEPS, Kind.FORWARD, Kind.BACKWARD)
        assert found["kind"].tolist() == [int(Kind.FORWARD)] * MICROBATCHES
        assert (found["flags"] == int(Flag.INFERRED | Flag.EVALUATION)).all()


@pytest.mark.slow
def test_losses_and_weights_are_bit_identical_with_and_without_the_recorder(run: Any) -> None:
    _, _, recorded, plain = run
    assert recorded == plain
    assert plain[RANKS - 1][0]["losses"]
