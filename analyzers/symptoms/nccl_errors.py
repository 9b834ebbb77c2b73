"""NCCL itself complains: errors and warnings in its log that name the cause.

What it finds: A job that stands still, failed, or loses a tenth of the step to communication, and whose NCCL logs hold
known errors or warnings: completion errors of the card, wrong interfaces, devices that cannot be opened.

Why it matters: NCCL often says what is wrong minutes before the time-out that is seen, in one line among thousands.

What to try: What the table of known messages says for the first of them; later ones are mostly consequences.

Source: the table of known messages with its threads: ppdiag explain NAME for each, such as NVIDIA/nccl#426,
NVIDIA/nccl#707, NVIDIA/nccl#905, pytorch/pytorch#68893.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ppdiag.analyzers.stuck import find_hang
from ppdiag.analyzers.symptoms import in_words_of
from ppdiag.diagnosis import WORTH_A_WARNING, Advice, Symptom

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ppdiag.analyzers.symptoms import Evidence

SHOWN = 4
LONGEST = 160
"""Characters of NCCL's line that are shown."""
OWN_SYMPTOM = ("no-gpu-direct",)
HOW = in_words_of(other="ppdiag nccl on the run directory shows all messages, with what to do for each")
MEASURE_AFTER = "that the messages are gone from NCCL's log (ppdiag nccl)"


def find(evidence: Evidence) -> Symptom | None:
    """Fires on errors where the job ended badly, and on errors and warnings where communication costs a tenth."""
    rows = [row for row in evidence.trace.nccl.get("messages", ()) if row["slug"] not in OWN_SYMPTOM]
    failed = _failed(evidence)
    if not failed and evidence.diagnosis.why.communication < WORTH_A_WARNING:
        return None
    rows = [row for row in rows if row["severity"] == "error" or not failed]
    if not rows:
        return None
    numbers = tuple(_words(row) for row in rows[:SHOWN])
    return Symptom(
        id="nccl-errors",
        title="NCCL complains",
        severity="critical" if failed else "warning",
        evidence=numbers,
        advice=(_advice(rows[0], evidence),),
    )


def _failed(evidence: Evidence) -> bool:
    ranks = evidence.trace.ranks
    raised = any(facts.status == "raised" for facts in ranks.values())
    return raised or find_hang(ranks, evidence.diagnosis.steps.median_s) is not None


def _words(row: Mapping[str, Any]) -> str:
    text = row["text"] if len(row["text"]) <= LONGEST else f"{row['text'][:LONGEST]}..."
    return f"{row['slug']} ({row['count']} times on {', '.join(row['hosts'][:3]) or 'a host'}): {text}"


def _advice(row: Mapping[str, Any], evidence: Evidence) -> Advice:
    return Advice(
        action=f"Follow up {row['slug']}",
        how=row["advice"] or evidence.says(HOW),
        gain_fraction=None,
        source=f"NCCL's log; ppdiag explain {row['slug']}",
        measure_after=MEASURE_AFTER,
    )
