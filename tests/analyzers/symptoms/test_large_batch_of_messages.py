from __future__ import annotations

import pytest

from ppdiag.analyzers.symptoms import ANY
from ppdiag.analyzers.symptoms.large_batch_of_messages import HOW
from ppdiag.model import Kind
from tests.analyzers.symptoms.cases import evidence, hung, messages, symptom, wait


def batch(size: int):
    rows = [{"rank": 0, "kind": Kind.SEND, "peer": 1, "seq": n, "start_ns": 5, "end_ns": 9} for n in range(size)]
    return messages([*rows, {"rank": 1, "kind": Kind.RECV, "peer": 0, "seq": 0, "start_ns": 5, "end_ns": 9}])


def test_a_hang_after_a_batch_of_257_messages_is_known() -> None:
    seen = symptom("large-batch-of-messages", evidence(trace=hung(batch(257), {0: wait(1)})))
    assert seen is not None
    assert seen.evidence == ("rank 0 posted 257 messages in one batch",)
    assert "TORCH_NCCL_BATCH_P2P_CHUNK_SIZE" in HOW[ANY]


@pytest.mark.parametrize("trace", [hung(batch(256), {0: wait(1)}), batch(300)], ids=["as many as fit", "no hang"])
def test_other_batches_are_none(trace) -> None:
    assert symptom("large-batch-of-messages", evidence(trace=trace)) is None
