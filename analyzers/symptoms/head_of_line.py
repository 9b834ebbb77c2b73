"""A message waits behind another: receives that are posted before they are needed.

What it finds: Receives that both ends had posted, and that came only when a message posted earlier between the same
two ranks was ready too.

Why it matters: A communicator works off its messages in order. A receive posted early, for a microbatch that is not
computed yet, blocks all that are posted after it: bubbles in the middle of an interleaved schedule, and a cascade of
them at its start.

What to try: Post each receive next to the op that needs it; in the warm-up after the forwards.

Source: pytorch/torchtitan#2209, pytorch/pytorch#172668, pytorch/pytorch#188833, pytorch/pytorch PR#165664,
pytorch/pytorch PR#178815, sail-sg/zero-bubble-pipeline-parallelism#73.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ppdiag.analyzers.held_messages import held_behind_another, symptom_of
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import Advice, Symptom

if TYPE_CHECKING:
    from ppdiag.analyzers.symptoms import Evidence

HOW = in_words_of(
    megatron="--no-overlap-p2p-communication, or --overlap-p2p-communication-warmup-flush where it is not used",
    torch="a version of torch whose runtime defers receives (pytorch PR#178815), else Schedule1F1B",
    other="post irecv next to the op that needs its message; even and odd ranks in opposite order",
)
MEASURE_AFTER = "time in receives of the stage table, and step time"


def find(evidence: Evidence) -> Symptom | None:
    """Fires where receives that were ready were held up for 5 % of the ranks' time."""
    advice = Advice(
        action="Post each receive next to the op that needs it",
        how=evidence.says(HOW),
        gain_fraction=None,
        source="the order of the posts and ends of messages of each pair of ranks",
        measure_after=MEASURE_AFTER,
    )
    words = Symptom("head-of-line", "Messages wait behind one another", "", (), (advice,))
    return symptom_of(held_behind_another(evidence.analysis), words, "behind another")
