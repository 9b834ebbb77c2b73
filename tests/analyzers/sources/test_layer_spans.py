"""Times of layers from their spans; all times by hand, in ms."""

from __future__ import annotations

import pytest

from ppdiag.analyzers.sources.layer_spans import LayerNames, facts_of, without_layers
from ppdiag.model import Flag, Kind
from ppdiag.trace import make_spans

MS = 1_000_000
FORWARD = {"rank": 0, "kind": Kind.FORWARD, "stage": 2, "chunk": 0}
BACKWARD = {"rank": 0, "kind": Kind.BACKWARD, "stage": 2, "chunk": 0}
LAYER = {"rank": 0, "kind": Kind.LAYER}


def span(row: dict[str, int], start: float, end: float, **more: int) -> dict[str, int]:
    return {**row, "start_ns": round(start * MS), "end_ns": round(end * MS), **more}


def layer(number: int, start: float, end: float, **more: int) -> dict[str, int]:
    return span(LAYER, start, end, seq=number, op=Kind.FORWARD, **more)


def moment(number: int, at: float, **more: int) -> dict[str, int]:
    return span(LAYER, at, at, seq=number, op=Kind.BACKWARD, **more)


def facts(*rows: dict[str, int], names: dict[int, str] | None = None) -> list[dict[str, object]]:
    return facts_of(*without_layers(make_spans(rows)), names or {})


def test_a_layer_takes_its_call_and_what_is_left_of_the_forward_is_the_rest() -> None:
    (found,) = facts(span(FORWARD, 0, 10), layer(0, 1, 3), layer(1, 3, 8), names={0: "layers.4", 1: "layers.5"})
    assert (found["stage"], found["chunk"], found["names"]) == (2, 0, ["layers.4", "layers.5"])
    assert found["forward_s"] == pytest.approx([0.002, 0.005])
    assert found["forward_rest_s"] == pytest.approx(0.003)
    assert found["backward_s"] is None


def test_a_layers_backward_lasts_until_the_next_begins_and_the_first_ones_until_its_inputs_gradient() -> None:
    forward = [span(FORWARD, 0, 10), layer(0, 1, 3), layer(1, 3, 8)]
    backward = [span(BACKWARD, 20, 40), moment(1, 22), moment(0, 30)]
    (found,) = facts(*forward, *backward, moment(-1, 35))
    assert found["backward_s"] == pytest.approx([0.005, 0.008])
    assert found["backward_rest_s"] == pytest.approx(0.007)  # 2 of the head before them, 5 of the embedding after
    (received,) = facts(*forward, *backward)  # the input is a leaf: nothing is left after the first layer
    assert received["backward_s"] == pytest.approx([0.010, 0.008])
    assert received["backward_rest_s"] == pytest.approx(0.002)


def test_layers_have_the_median_of_their_calls() -> None:
    rows = [row for m, took in enumerate((2, 3, 9)) for row in (
        span(FORWARD, 20 * m, 20 * m + 10), layer(0, 20 * m, 20 * m + took))]  # fmt: skip
    (found,) = facts(*rows)
    assert found["forward_s"] == pytest.approx([0.003])


def test_stages_of_a_rank_are_told_apart_by_the_op_around_their_layers() -> None:
    other = {**FORWARD, "stage": 6, "chunk": 1}
    first, second = facts(span(FORWARD, 0, 4), layer(0, 0, 4), span(other, 5, 9), layer(1, 5, 8), layer(2, 8, 9))
    assert [(row["stage"], row["forward_s"]) for row in (first, second)] == [
        (2, pytest.approx([0.004])),
        (6, pytest.approx([0.003, 0.001])),
    ]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([layer(0, 20, 22)], id="outside of every op"),
        pytest.param([layer(0, 1, 2, flags=Flag.DEVICE)], id="on the device, and the op on the host"),
        pytest.param([moment(0, 5)], id="a backward without one"),
    ],
)
def test_what_lies_in_no_op_of_its_kind_is_no_layer(rows: list[dict[str, int]]) -> None:
    assert facts(span(FORWARD, 0, 10), *rows) == []


def test_evaluation_and_initialisation_are_no_training() -> None:
    rows = [span(FORWARD, 0, 10, flags=Flag.EVALUATION), layer(0, 1, 2), span(FORWARD, 20, 30, flags=Flag.INIT)]
    assert facts(*rows, layer(0, 21, 22)) == []


def test_backwards_in_another_order_than_the_layers_are_left_out() -> None:
    rows = [span(FORWARD, 0, 10), layer(0, 1, 3), layer(1, 3, 8), span(BACKWARD, 20, 40), moment(0, 22), moment(1, 30)]
    (found,) = facts(*rows)
    assert found["backward_s"] is None


@pytest.mark.parametrize(
    "word", [{}, {"first": -1, "names": []}, {"first": 0, "names": 3}, {"first": "0", "names": []}]
)
def test_a_line_that_names_no_layers_is_refused(word: dict[str, object]) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        LayerNames().take(word)


def test_names_are_bounded() -> None:
    names = LayerNames()
    names.take({"first": 4090, "names": ["x" * 999] * 50})
    assert max(names.names) == 4095
    assert max(map(len, names.names.values())) == 200
