"""The layout that a user states."""

from __future__ import annotations

import pytest

from ppdiag.errors import BadShape
from ppdiag.stated import StatedLayout


def test_a_size_that_is_not_stated_follows_from_the_others() -> None:
    assert StatedLayout(dp=2, tp=2).sizes(16) == {"tp": 2, "dp": 2, "pp": 4}
    assert StatedLayout(pp=4).sizes(16) == {"tp": 1, "dp": 4, "pp": 4}


def test_megatrons_order_names_dimensions_that_move_no_rank_to_another_stage() -> None:
    assert StatedLayout(pp=2, tp=2, order="tp-cp-ep-dp-pp").pipelines(8) == StatedLayout(pp=2, tp=2).pipelines(8)


def test_in_megatrons_default_order_a_pipeline_takes_every_eighth_of_sixteen_ranks() -> None:
    # RankGenerator(tp=2, pp=2, dp=4, order="tp-dp-pp").get_ranks("pp"), worked out by hand
    assert StatedLayout(pp=2, tp=2).pipelines(16) == tuple((rank, rank + 8) for rank in range(8))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (StatedLayout(pp=3), "tp = 1, dp = 2, pp = 3 has 6 ranks, and the job 8"),
        (StatedLayout(pp=16), "has 16 ranks, and the job 8"),
        (StatedLayout(tp=2), "give --pp or --dp too"),
        (StatedLayout(pp=2, order="pp-dp"), "cannot read --order 'pp-dp'"),
        (StatedLayout(pp=2, order="pp-dp-tp-tp"), "name tp, dp and pp once"),
    ],
)
def test_a_layout_of_another_number_of_ranks_is_refused(layout: StatedLayout, words: str) -> None:
    with pytest.raises(BadShape, match=words):
        layout.pipelines(8)
