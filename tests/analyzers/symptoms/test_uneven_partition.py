from __future__ import annotations

from tests.analyzers.symptoms.cases import DEEPSPEED, TORCH, found
from tests.analyzers.test_hand_calculations import pipeline, slower


def test_a_heavy_stage_of_deepspeed_is_met_with_its_partition_method() -> None:
    symptom = found(pipeline("1F1B", microbatches=8, duration=slower(2, stage=1)).trace(), DEEPSPEED)[
        "uneven-partition"
    ]
    assert symptom.evidence[1] == "F and B of a microbatch: stage 0 30.0 ms, stage 1 60.0 ms"
    assert "partition_method='type:NAME'" in symptom.advice[0].how


def test_other_frameworks_and_other_imbalance_are_not_the_partitions() -> None:
    heavy = pipeline("1F1B", microbatches=8, duration=slower(2, stage=1)).trace()
    assert "uneven-partition" not in found(heavy, TORCH)
    lumpy = pipeline(microbatches=8, duration=slower(9, microbatch=3)).trace()
    assert "uneven-partition" not in found(lumpy, DEEPSPEED)
