from __future__ import annotations

import pytest

from tests.analyzers.symptoms.cases import MEGATRON, found, hung, wait
from tests.analyzers.test_hand_calculations import pipeline


def four(ranks: int = 4):
    return pipeline("1F1B", ranks=ranks, microbatches=4).trace()


def test_a_hang_in_a_message_of_a_shape_is_known() -> None:
    # a shape of Megatron's is three 8-byte numbers
    symptom = found(hung(four(), {1: wait(2, size_bytes=24), 2: wait(1, size_bytes=1 << 20)}), MEGATRON)[
        "shape-exchange"
    ]
    assert symptom.evidence == ("rank 1 waits to receive 24 bytes, from rank 2",)
    assert "variable_seq_lengths=False" in symptom.advice[0].how


@pytest.mark.parametrize(("ranks", "size"), [(4, 1024), (3, 24), (4, 0)], ids=["large", "three ranks", "unknown size"])
def test_other_hangs_are_not_of_shapes(ranks: int, size: int) -> None:
    assert "shape-exchange" not in found(hung(four(ranks), {1: wait(2, size_bytes=size)}), MEGATRON)


def test_a_job_that_runs_exchanges_shapes_too() -> None:
    assert "shape-exchange" not in found(four(), MEGATRON)
