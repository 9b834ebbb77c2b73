"""Names of ranges, and which of several writers' ranges is gone by."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.sources.labels import NO_OPS, best_detail, detail, ops_named
from ppdiag.model import NONE, Kind


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PP:2F5", [(Kind.FORWARD, 2, 5)]),
        ("PP:2I5, op_id = 12", [(Kind.BACKWARD, 2, 5)]),
        ("PP:2W5, seq = 3", [(Kind.WEIGHT, 2, 5)]),
        ("PP:(4F4;3B0)OVERLAP_F_B", [(Kind.FORWARD, 4, 4), (Kind.BACKWARD, 3, 0)]),
        ("F stage 1 mb 0", [(Kind.FORWARD, 1, 0)]),
        ("Forward 3", [(Kind.FORWARD, NONE, 3)]),
        ("megatron.core.pipeline_parallel.schedules.backward_step", [(Kind.BACKWARD, NONE, NONE)]),
        ("optimizer", [(Kind.OPTIMIZER, NONE, NONE)]),
        ("Optimizer.step#Adam.step", [(Kind.OPTIMIZER, NONE, NONE)]),
        ("PP:2SEND_F5", []),
        ("aten::add, op_id = 3", []),
        ("PP:99999999F1", []),
        ("", []),
    ],
)
def test_a_name_is_of_these_ops(name, expected):
    assert [(op.kind, op.stage, op.microbatch) for op in ops_named(name)] == expected


def test_the_writer_that_says_most_is_gone_by():
    labels = [label for name in ("Forward 3", "PP:1F3", "forward_step") for label in ops_named(name)]
    assert [detail(label) for label in labels] == [1, 0, 2]
    assert best_detail(labels) == 0
    assert best_detail(ops_named("optimizer")) == NO_OPS
